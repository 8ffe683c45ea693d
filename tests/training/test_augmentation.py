import numpy as np
import pytest
import torch

import calgp
from calgp.data import Images, load
from calgp.gp import Bound, Noise
from calgp.training.augmentation import augmented, mirror_is_harmless, mixed_up

ROWS = torch.tensor([7, 0, 123_456, 3])
X = torch.arange(4 * 3 * 5 * 6).reshape(4, 3, 5, 6).float() + 1  # no pixel is black


def change(x=X, kinds=("flip", "crop", "cutout"), rows=ROWS, **options):
    return augmented(x, kinds, rows=rows, **({"crop": 2, "seed": 1, "step": 9, "epoch": 3} | options))


def windows(image: np.ndarray, pad: int) -> list[np.ndarray]:
    """All that a crop can make of an image, the naive way."""
    height, width = image.shape[1:]
    padded = np.pad(image, ((0, 0), (pad, pad), (pad, pad)), mode="edge")
    return [padded[:, i : i + height, j : j + width] for i in range(2 * pad + 1) for j in range(2 * pad + 1)]


def test_nothing_asked_for_changes_nothing():
    assert change(kinds=()) is X


def test_a_flip_is_the_image_or_its_mirror_half_the_time():
    x = X[:1].expand(2000, -1, -1, -1)
    flipped = change(x, ("flip",), torch.arange(2000))
    mirrored = (flipped == x.flip(-1)).flatten(1).all(1)
    assert ((flipped == x).flatten(1).all(1) ^ mirrored).all()
    assert abs(mirrored.float().mean() - 0.5) < 4 * 0.5 / 2000**0.5  # four standard errors
    assert change(x, ("flip",), torch.arange(2000), step=10).equal(flipped)  # the same in all steps of an epoch
    assert change(x, ("flip",), torch.arange(2000), epoch=4).equal(flipped.flip(-1))  # the other side in the next


def test_a_crop_is_one_of_the_windows_of_the_padded_image_and_each_comes():
    x = X[:1].expand(1000, -1, -1, -1)
    cropped = change(x, ("crop",), torch.arange(1000)).numpy()
    possible = windows(X[0].numpy(), 2)
    found = [next(k for k, window in enumerate(possible) if (window == image).all()) for image in cropped]
    counts = np.bincount(found, minlength=25)
    # 40 of each are expected: χ² with 24 degrees of freedom exceeds 56.4 in 2e-4 of all cases
    assert ((counts - 40) ** 2 / 40).sum() < 56.4


def test_a_cutout_is_a_black_square_and_each_place_comes():
    x = torch.ones(4000, 1, 16, 16)
    cut = change(x, ("cutout",), torch.arange(4000))[:, 0] == 0
    side = 6  # three eighths of 16
    rows, columns = cut.any(2), cut.any(1)
    assert (cut == rows[:, :, None] & columns[:, None, :]).all()  # a rectangle
    for line in (rows, columns):
        places = [each.nonzero().squeeze(1) for each in line]
        assert all(len(p) == p[-1] - p[0] + 1 for p in places)  # without a gap
        inner = [p for p in places if p[0] > 0 and p[-1] < 15]
        assert all(len(p) == side for p in inner) and max(map(len, places)) == side
        first = np.bincount([int(p[0]) for p in inner], minlength=11)[1:10]  # from 1: 0 may be cut off
        # 250 of each are expected: χ² with 8 degrees of freedom exceeds 30.1 in 2e-4 of all cases
        assert ((first - 250) ** 2 / 250).sum() < 30.1


def test_mixup_mixes_images_and_labels_by_the_same_share():
    rows, y = torch.arange(4000), torch.arange(4000) % 10
    x = torch.zeros(4000, 1, 2, 2)
    x[::2] = 1
    mixed, other = mixed_up(x, y, seed=3, step=5, rows=rows)
    share = torch.where(rows % 2 == 0, mixed[:, 0, 0, 0], 1 - mixed[:, 0, 0, 0])
    assert other.y.equal(y.roll(1)) and torch.allclose(other.share, share, atol=1e-6)
    # uniform in [0, 1]: Kolmogorov's distance exceeds 2.1 / √n in 3e-4 of all cases
    assert (other.share.sort().values - (rows + 0.5) / 4000).abs().max() < 2.1 / 4000**0.5
    again, _ = mixed_up(x, y, seed=3, step=6, rows=rows)
    assert not again.equal(mixed)


def test_the_bound_of_mixed_images_is_the_mixture_of_the_bounds_of_their_labels():
    model = calgp.load("shipped").model
    bound, noise = Bound(model, 100, torch.linspace(0.5, 2, 10)), Noise(1, torch.arange(3), torch.arange(4))
    x, y = torch.rand(4, 1, 28, 28, generator=torch.Generator().manual_seed(0)), torch.tensor([1, 2, 3, 9])
    mixed, other = mixed_up(x, y, seed=0, step=0, rows=torch.arange(4))
    with torch.no_grad():
        found = bound(mixed, y, noise, other)[0]
        # one image at a time, as one batch: the masks are those of the rows
        terms = [bound(mixed[[i]], label[[i]], Noise(1, torch.arange(3), torch.tensor([i])))[0]
                 for label in (y, other.y) for i in range(4)]  # fmt: skip
    terms = torch.stack(terms).view(2, 4)
    assert torch.allclose(found, (other.share * terms[0] + (1 - other.share) * terms[1]).mean(), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64])
def test_what_an_image_becomes_depends_on_seed_step_and_row_and_not_on_the_batch(dtype):
    x = (X % 256).to(dtype)
    whole = change(x)
    assert whole.dtype == dtype and whole.shape == x.shape
    for i in range(4):
        assert whole[i].equal(change(x[i : i + 1], rows=ROWS[i : i + 1])[0])
    assert whole.flip(0).equal(change(x.flip(0), rows=ROWS.flip(0)))
    for other in (change(x, seed=2), change(x, step=10), change(x, rows=ROWS + 1)):
        assert not whole.equal(other)


def patterns(n: int, *, sided: bool, classes: int = 4) -> Images:
    """Noise with a bright bar on the left or right, at a height that tells the class; `sided`: the side does too."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(100, (n, 3, 32, 32), dtype=torch.uint8, generator=generator)
    y = torch.arange(n) % classes
    side = y % 2 if sided else torch.randint(2, (n,), generator=generator)
    height = y // 2 if sided else y
    for row in range(n):
        left, top = 16 * int(side[row]), 8 * int(height[row])
        x[row, :, top : top + 8, left : left + 16] += 100
    return Images.of(x, y, tuple("abcd"))


@pytest.mark.parametrize("n", [80, 600, 5000])
def test_a_mirror_is_harmless_where_the_side_says_nothing_of_the_class(n):
    assert mirror_is_harmless(patterns(n, sided=False))
    assert not mirror_is_harmless(patterns(n, sided=True))


def test_one_class_of_many_that_has_a_side_is_enough():
    """Two rare classes differ by their side alone: over all images that is little, of these classes it is all."""
    free, sided = patterns(1900, sided=False), patterns(100, sided=True)
    sided.x[sided.y % 2 == 0, :, :, :16] += 30  # bright all the way down, on the side of the class
    sided.x[sided.y % 2 == 1, :, :, 16:] += 30
    x, y = torch.cat([free.x, sided.x]), torch.cat([free.y, sided.y % 2 + 4])
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(1))
    assert not mirror_is_harmless(Images.of(x[order], y[order], tuple("abcdef")))


def test_digits_are_not_flipped_and_what_cannot_be_told_apart_is_not():
    assert not mirror_is_harmless(load("digits", "train"))
    noise = torch.randint(256, (400, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert not mirror_is_harmless(Images.of(noise, torch.arange(400) % 4, tuple("abcd")))
    assert not mirror_is_harmless(Images.of(noise[:3], torch.arange(3) % 2, tuple("ab")))
