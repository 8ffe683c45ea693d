import numpy as np
import pytest
import torch
from PIL import Image

from calgp.data import Images, decode, load
from calgp.data.files import FileNames
from calgp.data.images import stratified
from calgp.errors import CalgpError


def images(counts=(40, 30, 50), channels=1, size=8, seed=0) -> Images:
    generator = torch.Generator().manual_seed(seed)
    y = torch.cat([torch.full((count,), q) for q, count in enumerate(counts)])
    y = y[torch.randperm(len(y), generator=generator)]
    x = torch.randint(0, 256, (len(y), channels, size, size), generator=generator, dtype=torch.uint8)
    names = tuple(f"{i}.png" for i in range(len(y)))
    return Images.of(x, y, tuple("abc"[: len(counts)]), names=names)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(3, 1, 2, 2)}, "uint8"),
        ({"x": torch.zeros(3, 2, 2, dtype=torch.uint8)}, r"\[N, C, H, W\]"),
        ({"x": torch.zeros(0, 1, 2, 2, dtype=torch.uint8), "y": torch.zeros(0).long()}, "at least one"),
        ({"y": torch.zeros(2).long()}, r"Invalid labels of .*: must be int64 \[3\]"),
        ({"y": torch.zeros(3)}, r"Invalid labels of .*: must be int64 \[3\]"),
        ({"y": torch.tensor([0, 1, 2])}, "from 0 to 2: must be from 0 to 1, as there are 2 classes"),
        ({"y": torch.tensor([0, -1, 1])}, "from -1"),
        ({"rows": torch.zeros(2).long()}, r"Invalid rows of .*: must be int64 \[3\]"),
        ({"names": FileNames.of(["a"])}, "file names"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    right = {
        "x": torch.zeros(3, 1, 2, 2, dtype=torch.uint8),
        "y": torch.tensor([0, 1, 1]),
        "classes": ("a", "b"),
        "rows": torch.arange(3),
    }
    Images(**right)
    with pytest.raises(CalgpError, match=message):
        Images(**(right | change))


def test_pixels_are_bytes_over_255():
    data = images()
    pixels = data.pixels(slice(3, 9))
    assert pixels.dtype == torch.float32
    assert torch.equal(pixels, data.x[3:9].float() / 255)
    assert torch.equal(data.pixels(torch.tensor([5, 2])), data.x[[5, 2]].float() / 255)
    assert data.x.dtype == torch.uint8 and len(data.pixels()) == len(data)


def test_take_keeps_rows_and_names_with_their_images():
    data = images()
    part = data.take(torch.tensor([7, 3])).take(torch.tensor([False, True]))
    assert part.rows.tolist() == [3] and list(part.names or ()) == ["3.png"]
    assert torch.equal(part.x[0], data.x[3]) and part.y[0] == data.y[3]


def test_balanced_has_exactly_the_same_number_of_each_class():
    subset = images().balanced(60, seed=1)
    assert subset.y.bincount().tolist() == [20, 20, 20]
    assert len(set(subset.rows.tolist())) == 60


def test_balanced_depends_on_the_seed_alone():
    data = images()
    assert torch.equal(data.balanced(30, seed=1).rows, data.balanced(30, seed=1).rows)
    assert not torch.equal(data.balanced(30, seed=1).rows, data.balanced(30, seed=2).rows)


def test_a_smaller_balanced_subset_is_part_of_a_larger_one():
    data = images()
    assert set(data.balanced(30, seed=3).rows.tolist()) < set(data.balanced(60, seed=3).rows.tolist())


def test_balanced_over_everything_keeps_the_natural_balance():
    data = images()
    assert data.balanced(len(data), seed=0) is data


@pytest.mark.parametrize(
    ("n", "message"),
    [
        (31, "such as 30"),
        (32, "such as 33"),
        (1, "such as 3"),
        (0, "train_size=0: must be from 3 to 120"),
        (-3, "must be from 3 to 120"),
        (123, "must be from 3 to 120"),
        (93, "must be at most 90, or all 120, as class 'b' has 30 images"),
    ],
)
def test_balanced_refuses_numbers_that_cannot_be(n, message):
    with pytest.raises(CalgpError, match=message):
        images().balanced(n, seed=0)


@pytest.mark.parametrize("held_out", [0.1, 0.25, 0.5, 0.9, 3, 17, 119])
@pytest.mark.parametrize("counts", [(40, 30, 50), (2, 2, 116), (60, 58, 2)])
def test_split_partitions_and_is_stratified(held_out, counts):
    data = images(counts)
    rest, held = data.split(held_out, seed=4)
    assert sorted(rest.rows.tolist() + held.rows.tolist()) == list(range(120))
    count = held_out if isinstance(held_out, int) else round(held_out * 120)
    assert len(held) == count
    if 3 <= count <= 117:
        assert min(held.y.bincount(minlength=3)) >= 1 and min(rest.y.bincount(minlength=3)) >= 1
    share = torch.tensor(counts) * count / 120
    # at most one from rounding and one from keeping each class on both sides, for each of two other classes
    assert (held.y.bincount(minlength=3) - share).abs().max() <= 2


def test_split_is_a_function_of_its_seed():
    data = images()
    assert torch.equal(data.split(0.2, seed=1)[1].rows, data.split(0.2, seed=1)[1].rows)
    assert not torch.equal(data.split(0.2, seed=1)[1].rows, data.split(0.2, seed=2)[1].rows)


def test_a_lone_image_is_not_held_out():
    y = torch.tensor([0] * 10 + [1])
    for seed in range(5):
        assert not stratified(y, 2, 0.5, seed)[10]


@pytest.mark.parametrize("held_out", [0.0, 1.0, -0.1, 1.5, float("nan"), 0, 120, -1])
def test_split_refuses_what_leaves_a_part_empty(held_out):
    with pytest.raises(CalgpError, match="Invalid holdout="):
        images().split(held_out, seed=0)


def test_the_global_generator_is_left_alone():
    data, before = images(), torch.get_rng_state()
    data.balanced(30, seed=1)
    data.split(0.2, seed=1)
    assert torch.equal(before, torch.get_rng_state())


def test_grey_is_pillows_luma_to_the_bit():
    data = images(channels=3, size=32)
    expected = np.stack([np.asarray(Image.fromarray(x.permute(1, 2, 0).numpy()).convert("L")) for x in data.x])
    assert np.array_equal(data.coloured("grey").x[:, 0].numpy(), expected)


def test_grey_to_rgb_and_back_changes_nothing():
    data = images()
    assert torch.equal(data.coloured("rgb").coloured("grey").x, data.x)
    assert data.coloured("rgb").x.shape[1] == 3 and data.coloured("grey") is data


@pytest.mark.parametrize("size", [4, 5, 16])
def test_resized_agrees_with_pillows_bilinear(size):
    data = images(channels=3, size=12)
    expected = np.stack(
        [
            np.asarray(Image.fromarray(x.permute(1, 2, 0).numpy()).resize((size, size), Image.Resampling.BILINEAR))
            for x in data.x
        ]
    ).transpose(0, 3, 1, 2)
    # Pillow works in fixed point and rounds after each of two passes: one step of 255 at most for each
    assert np.abs(data.resized(size).x.numpy().astype(int) - expected).max() <= 2


def test_resized_keeps_constant_images_and_rows():
    data = Images.of(torch.full((2, 1, 28, 28), 200, dtype=torch.uint8), torch.tensor([0, 1]), ("a", "b"))
    assert torch.equal(data.resized(32).x, torch.full((2, 1, 32, 32), 200, dtype=torch.uint8))
    assert data.resized(28) is data


def test_impossible_forms_are_refused():
    for size in (0, -1, 10**6):
        with pytest.raises(CalgpError, match="must be the side in pixels"):
            images().resized(size)
    with pytest.raises(CalgpError, match="'grey' or 'rgb'"):
        images().coloured("blue")  # type: ignore[arg-type]
    with pytest.raises(CalgpError, match="2 channels"):
        images(channels=2).coloured("grey")


def test_checksum_sees_pixels_labels_and_shape():
    data = images()
    same = Images(data.x.clone(), data.y.clone(), data.classes, data.rows + 5)
    assert data.checksum() == same.checksum()
    other = data.x.clone()
    other[3, 0, 2, 1] += 1
    sums = {
        data.checksum(),
        Images.of(other, data.y, data.classes).checksum(),
        Images.of(data.x, data.y.flip(0), data.classes).checksum(),
        Images.of(data.x.reshape(120, 1, 4, 16), data.y, data.classes).checksum(),
    }
    assert len(sums) == 4


def test_images_that_do_not_fit_into_memory_are_refused_before_any_is_made(monkeypatch):
    """60,000 of 4096 × 4096 took a terabyte, or what there was of it."""
    monkeypatch.setattr(decode, "memory", lambda: 10**6)
    images = load("digits", "train")
    with pytest.raises(CalgpError, match=r"images of 1 × 4096 × 4096 take .* GB, and this machine has 0\.0 GB"):
        images.resized(4096)


def test_resizing_by_small_parts_gives_the_same():
    """A part of them has at most 64 M numbers: with 4096 × 4096, no more than four images."""
    images = load("digits", "test").take(torch.arange(6))
    one_by_one = torch.cat([images.take(torch.tensor([i])).resized(4096).x[..., ::50, ::50] for i in range(6)])
    assert images.resized(4096).x[..., ::50, ::50].equal(one_by_one)
