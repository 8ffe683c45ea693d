"""Images to look at: the most uncertain, the confidently wrong, the most certain."""

import base64
import io
from dataclasses import dataclass

import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from calgp.data import Images

LARGEST = 96  # pixels a side: larger images are shrunk, so that a report stays small
SHOWN = 12


@dataclass(frozen=True)
class Thumbnail:
    """A test image (a data: address) with what the model says of it; uncertainty is in nats."""

    image: str
    name: str
    truth: str
    label: str
    confidence: float
    entropy: float
    epistemic: float
    wrong: bool


@dataclass(frozen=True)
class Gallery:
    title: str
    note: str
    thumbnails: list[Thumbnail]


def galleries(images: Images, columns: dict[str, Tensor], classes: tuple[str, ...]) -> list[Gallery]:
    """Images of the run's own classes, of which `columns` has a row each."""
    titles = (
        ("Most uncertain", "The highest entropy: what to ask a person about."),
        ("Confidently wrong", "The mistakes with the highest confidence."),
        ("Most certain", "The lowest entropy."),
    )
    found = chosen(images, columns, classes)
    return [Gallery(*title, shown) for title, shown in zip(titles, found, strict=True) if shown]


def outside_galleries(images: Images, columns: dict[str, Tensor], classes: tuple[str, ...]) -> list[Gallery]:
    """Images of other classes: uncertainty is the right answer, certainty is not; none is wrong."""
    uncertain, _, certain = chosen(images, columns | {"wrong": columns["y"] < 0}, classes)
    return [
        Gallery("Most uncertain", "The highest entropy: the model notices these.", uncertain),
        Gallery("Least uncertain", "The lowest entropy: the model takes these for its own classes.", certain),
    ]


def chosen(
    images: Images, columns: dict[str, Tensor], classes: tuple[str, ...]
) -> tuple[list[Thumbnail], list[Thumbnail], list[Thumbnail]]:
    """The most uncertain, the most confident mistakes, the most certain; among equals the first in the data set."""
    columns = {"wrong": columns["label"] != columns["y"]} | columns
    mistakes, entropy = columns["wrong"].nonzero().squeeze(1), columns["entropy"]
    uncertain, certain = (entropy.argsort(descending=most, stable=True) for most in (True, False))
    confident = mistakes[columns["confidence"][mistakes].argsort(descending=True, stable=True)]
    first, second, third = (_thumbnails(images, columns, index, classes) for index in (uncertain, confident, certain))
    return first, second, third


def _thumbnails(images: Images, columns: dict[str, Tensor], index: Tensor, classes: tuple[str, ...]) -> list[Thumbnail]:
    """The first images at `index`; `classes` are those of the model, which may not be those of the images."""
    index = index[:SHOWN]
    rows = {name: values[index].tolist() for name, values in columns.items() if values.ndim == 1}
    return [
        Thumbnail(
            image=data_uri(images.x[place]),
            name=f"row {rows['rows'][i]}" if images.names is None else images.names[place],
            truth=images.classes[rows["y"][i]],
            label=classes[rows["label"][i]],
            confidence=rows["confidence"][i],
            entropy=max(rows["entropy"][i], 0.0),
            epistemic=max(rows["mutual_information"][i], 0.0),
            wrong=rows["wrong"][i],
        )
        for i, place in enumerate(index.tolist())
    ]


def data_uri(x: Tensor) -> str:
    """An image (uint8 [C, H, W]) as a PNG inside its own address; a large one by means of k × k pixels."""
    k = -(-max(x.shape[1:]) // LARGEST)
    small = F.avg_pool2d(x.float(), [min(k, side) for side in x.shape[1:]]).round().byte()
    return "data:image/png;base64," + base64.b64encode(png(small)).decode()


def png(x: Tensor) -> bytes:
    """An image (uint8 [C, H, W], C = 1 grey or 3 RGB) as a PNG file; of other channels the first is shown."""
    file = io.BytesIO()
    pixels = x.permute(1, 2, 0) if len(x) == 3 else x[0]
    Image.fromarray(pixels.contiguous().numpy()).save(file, "PNG")
    return file.getvalue()
