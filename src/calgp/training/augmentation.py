"""Training images, changed in each step: what a flip, a small move or a missing part should not matter to."""

from collections.abc import Collection

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.nn import functional as F

from calgp.data import Images
from calgp.gp import MixedLabels, Noise
from calgp.gp.noise import site_key
from calgp.training.augmix import augmix

_SITE = site_key("augmentation")
CUT_OUT = 3 / 8  # of the side
LOOKED_AT = 4000  # training images at most that are looked at in a mirror
THUMBNAIL = 12  # pixels of the side to which they shrink for that
RIDGE = 0.1  # of the variance of a pixel
CLEARLY = 3.0  # standard errors
CLEARLY_OF_A_CLASS = 4.0  # the same of one of many classes


def augmented(
    x: Shaped[Tensor, "N C H W"],
    kinds: Collection[str],
    *,
    crop: int,
    seed: int,
    step: int,
    epoch: int,
    rows: Int[Tensor, "N"],
) -> Shaped[Tensor, "N C H W"]:
    """Images of a training step, changed by `kinds`.

    flip: left and right, in every second epoch; half of the images begin with it (Jordan 2024). crop: moved by up to
    `crop` pixels. cutout: a square of three eighths of the side, anywhere, is black (DeVries & Taylor 2017). augmix:
    see `augmix`. `mixed_up` is mixup.

    What is drawn is keyed by (seed, step, row), as the masks are: it depends neither on the batch nor on what was drawn
    before, so that a resumed training sees the same images.
    """
    if not kinds:
        return x
    rows = rows.to(x.device)
    words = _words(seed, step, rows, 4)  # an image's: down, right, and where it is cut out
    if "crop" in kinds:
        x = _moved(x, crop, words[:, :2] % (2 * crop + 1))
    if "flip" in kinds:
        mirrored = (_words(seed, 0, rows, 5)[:, 4] + epoch) % 2 == 1
        x = torch.where(mirrored[:, None, None, None], x.flip(-1), x)
    if "augmix" in kinds:
        x = augmix(x, seed=seed, step=step, rows=rows)
    if "cutout" in kinds:
        x = _cut_out(x, words[:, 2:])
    return x


def mixed_up(
    x: Float[Tensor, "N C H W"], y: Int[Tensor, "N"], *, seed: int, step: int, rows: Int[Tensor, "N"]
) -> tuple[Float[Tensor, "N C H W"], MixedLabels]:
    """mixup (Zhang et al. 2018) with λ uniform in [0, 1]: λ x + (1 − λ) x', and the labels of both.

    x' is the image before it in the batch.
    """
    share = (_words(seed, step, rows.to(x.device), 6)[:, 5] >> 11).double() / 2**53 + 0.5  # signed words: [−½, ½)
    share = share.to(x)
    weight = share[:, None, None, None]
    return weight * x + (1 - weight) * x.roll(1, 0), MixedLabels(y.roll(1, 0), share)


def _words(seed: int, step: int, rows: Int[Tensor, "N"], count: int) -> Int[Tensor, "N count"]:
    """Random words of each image in a step; the seeds of training are the negative ones."""
    return Noise(-1 - seed, torch.tensor([step]), rows).words(_SITE, count, shared=False)[0]


def mirror_is_harmless(images: Images) -> bool:
    """Whether images of a class look like that class in a mirror, so that training may flip them.

    One half of (at most 4,000) images teaches a linear classifier of thumbnails, the other half is classified as it is
    and in a mirror. A flip is harmless if the classifier is better than a guess, and is not clearly worse in the
    mirror, neither over all images nor of any class. Digits, letters and arrows are not flipped.
    """
    rows = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))[:LOOKED_AT].sort().values
    rows = rows[images.y[rows].argsort(stable=True)]  # by class, so that every second has all of them
    x, y = images.pixels(rows), images.y[rows]
    looks = F.interpolate(x, (THUMBNAIL, THUMBNAIL), mode="bilinear", antialias=True).double()
    teaching = torch.arange(len(y)) % 2 == 0
    weights = _linear(looks[teaching], y[teaching], len(images.classes))
    rest = looks[~teaching], y[~teaching]
    plain, mirrored = ((_inputs(x) @ weights).argmax(1).eq(rest[1]).double() for x in (rest[0], rest[0].flip(-1)))
    if not _is_clear((plain - 1 / len(images.classes)) * _balanced(rest[1]), CLEARLY):
        return False
    lost = plain - mirrored
    return not _is_clear(lost, CLEARLY) and not any(
        _is_clear(lost[rest[1] == each], CLEARLY_OF_A_CLASS) for each in rest[1].unique()
    )


def _linear(looks: Shaped[Tensor, "N C H W"], y: Int[Tensor, "N"], classes: int) -> Tensor:
    """Ridge regression of the classes' indicators on pixels and 1, all classes alike: [C H W + 1, classes]."""
    x = _inputs(looks)
    weighted = (x * _balanced(y)[:, None]).mT
    penalty = RIDGE * len(x) * looks.var() * torch.eye(x.shape[1], dtype=x.dtype)
    return torch.linalg.solve(weighted @ x + penalty, weighted @ F.one_hot(y, classes).to(x))


def _balanced(y: Int[Tensor, "N"]) -> Float[Tensor, "N"]:
    """Weights of images with which all classes count the same."""
    count = torch.bincount(y)
    return len(y) / ((count > 0).sum() * count[y]).double()


def _inputs(looks: Tensor) -> Tensor:
    return F.pad(looks.flatten(1) - 0.5, (0, 1), value=1.0)


def _is_clear(difference: Float[Tensor, "N"], errors: float) -> bool:
    """Whether paired differences are above zero by so many standard errors of their mean; of fewer than two, no."""
    if len(difference) < 2:
        return False
    return bool(difference.mean() > errors * difference.std() / len(difference) ** 0.5)


def _cut_out(x: Tensor, words: Int[Tensor, "N 2"]) -> Tensor:
    """A black square around a pixel of each image; what would lie outside is not there."""
    within = []  # its rows [N, H], its columns [N, W]
    for axis, length in enumerate(x.shape[-2:]):
        first = (words[:, axis] % length)[:, None] - CUT_OUT * length / 2
        place = torch.arange(length, device=x.device)
        within.append((place >= first) & (place < first + CUT_OUT * length))
    return x.masked_fill(within[0][:, None, :, None] & within[1][:, None, None, :], 0)


def _moved(x: Tensor, most: int, offsets: Int[Tensor, "N 2"]) -> Tensor:
    """Moved by offset − `most` pixels (down, right), each image by its own; pixels of the border fill what is left."""
    n, channels, height, width = x.shape
    down = (offsets[:, :1] - most + torch.arange(height, device=x.device)).clamp(0, height - 1)  # [N, H]
    right = (offsets[:, 1:] - most + torch.arange(width, device=x.device)).clamp(0, width - 1)  # [N, W]
    image = torch.arange(n, device=x.device)[:, None, None, None]
    channel = torch.arange(channels, device=x.device)[None, :, None, None]
    return x[image, channel, down[:, None, :, None], right[:, None, None, :]]
