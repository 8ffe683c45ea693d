from __future__ import annotations

import base64
import io

import pytest
import torch
from PIL import Image

from calgp.data import Images
from calgp.report import gallery


@pytest.mark.parametrize("channels", [1, 3])
def test_png_is_what_pillow_reads(channels: int) -> None:
    x = torch.randint(0, 256, (channels, 5, 7), generator=torch.Generator().manual_seed(0)).byte()
    image = Image.open(io.BytesIO(gallery.png(x)))
    assert image.mode == ("L" if channels == 1 else "RGB") and image.size == (7, 5)
    assert list(image.tobytes()) == x.permute(1, 2, 0).flatten().tolist()


@pytest.mark.parametrize(("height", "width", "shown"), [(28, 28, (28, 28)), (200, 100, (33, 66)), (2, 500, (83, 1))])
def test_large_images_are_shrunk(height: int, width: int, shown: tuple[int, int]) -> None:
    x = torch.full((1, height, width), 77, dtype=torch.uint8)
    _, data = gallery.data_uri(x).split(",")
    image = Image.open(io.BytesIO(base64.b64decode(data)))
    assert image.size == shown and image.getextrema() == (77, 77)


def made(n: int = 40) -> tuple[Images, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(0, 256, (n, 1, 4, 4), generator=generator).byte()
    y = torch.randint(0, 3, (n,), generator=generator)
    columns = {
        "label": torch.randint(0, 3, (n,), generator=generator),
        "confidence": torch.rand(n, generator=generator),
        "entropy": torch.rand(n, generator=generator).mul(20).round() / 20,  # with ties
        "mutual_information": torch.rand(n, generator=generator),
        "y": y,
        "rows": torch.arange(n),
    }
    return Images.of(x, y, ("a", "b", "c")), columns


def test_galleries_are_in_order() -> None:
    images, columns = made()
    uncertain, wrong, certain = gallery.galleries(images, columns, images.classes)
    entropy, names = columns["entropy"].tolist(), [f"row {i}" for i in range(len(images))]
    expected = sorted(range(len(images)), key=lambda i: -entropy[i])[: gallery.SHOWN]
    assert [image.name for image in uncertain.thumbnails] == [names[i] for i in expected]
    expected = sorted(range(len(images)), key=lambda i: entropy[i])[: gallery.SHOWN]
    assert [image.name for image in certain.thumbnails] == [names[i] for i in expected]
    mistakes = [i for i in range(len(images)) if columns["label"][i] != columns["y"][i]]
    expected = sorted(mistakes, key=lambda i: -columns["confidence"][i].item())[: gallery.SHOWN]
    assert [image.name for image in wrong.thumbnails] == [names[i] for i in expected]
    assert all(image.wrong for image in wrong.thumbnails)


def test_an_image_tells_truth_and_prediction() -> None:
    images, columns = made()
    image = gallery.galleries(images, columns, images.classes)[0].thumbnails[0]
    row = int(image.name.removeprefix("row "))
    assert image.truth == "abc"[int(images.y[row])] and image.label == "abc"[int(columns["label"][row])]
    assert image.image == gallery.data_uri(images.x[row])


def test_without_mistakes_there_is_no_gallery_of_them() -> None:
    images, columns = made()
    titles = [g.title for g in gallery.galleries(images, columns | {"label": columns["y"]}, images.classes)]
    assert titles == ["Most uncertain", "Most certain"]


def test_outside_images_are_neither_right_nor_wrong() -> None:
    images, columns = made()
    most, least = gallery.outside_galleries(images, columns, ("0", "1", "2"))
    assert not any(image.wrong for image in (*most.thumbnails, *least.thumbnails))
    assert most.thumbnails[0].label in "012" and most.thumbnails[0].truth in "abc"
