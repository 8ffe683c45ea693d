import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from calgp.data import load
from calgp.training.augmentation import augmented
from calgp.training.augmix import CHAINS, DEPTH, OPERATIONS, augmix, change

X = load("digits", "test").pixels(slice(0, 6)).expand(-1, 3, -1, -1) * torch.tensor([1, 0.6, 0.3])[:, None, None] + 0.05
X = (255 * X.clamp(0, 1)).round() / 255  # colours that Pillow can hold
ROWS = torch.tensor([7, 0, 123_456, 3, 4, 5])


def pictures(x: torch.Tensor) -> list[Image.Image]:
    return [Image.fromarray(each) for each in (255 * x).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()]


def changed(name: str, strength: float, x: torch.Tensor = X) -> np.ndarray:
    """In grey values, as Pillow has them: [N, H, W, C]."""
    operation = torch.full((len(x),), OPERATIONS.index(name))
    return 255 * change(x, operation, torch.full((len(x),), strength)).permute(0, 2, 3, 1).numpy()


@pytest.mark.parametrize(
    ("name", "strength", "theirs"),
    [
        ("posterize", 0.2, lambda image: ImageOps.posterize(image, 4)),
        ("posterize", -0.3, lambda image: ImageOps.posterize(image, 3)),
        ("solarize", 0.25, lambda image: ImageOps.solarize(image, 192)),
        ("autocontrast", 0.1, ImageOps.autocontrast),
    ],
)
def test_changes_of_colour_are_those_of_pillow(name, strength, theirs):
    expected = np.stack([np.asarray(theirs(image)) for image in pictures(X)])
    assert np.abs(changed(name, strength) - expected).max() <= 1  # Pillow rounds to whole grey values


@pytest.mark.parametrize(
    ("name", "strength", "inverse"),
    [
        ("rotate", 0.3, lambda s: (np.cos(s * np.pi / 6), -np.sin(s * np.pi / 6), np.sin(s * np.pi / 6), 0, 0)),
        ("shear-x", -0.3, lambda s: (1, 0.3 * s, 0, 0, 0)),
        ("shear-y", 0.2, lambda s: (1, 0, 0.3 * s, 0, 0)),
        ("move-x", 0.3, lambda s: (1, 0, 0, s / 3 * 28, 0)),
        ("move-y", -0.15, lambda s: (1, 0, 0, 0, s / 3 * 28)),
    ],
)
def test_moves_are_those_of_pillow(name, strength, inverse):
    """Pillow maps x' to (a x' + b y' + c, …) of pixels counted from the corner; ours turns around the middle."""
    scale, b, d, right, down = inverse(strength)
    middle = 14.0
    matrix = (
        scale,
        b,
        middle - scale * middle - b * middle + right,
        d,
        scale,
        middle - d * middle - scale * middle + down,
    )
    expected = np.stack([
        np.asarray(image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR))
        for image in pictures(X)
    ])  # fmt: skip
    inner = (slice(None), slice(7, 21), slice(7, 21))  # Pillow fills the border with black
    assert (
        np.abs(changed(name, strength)[inner] - expected[inner]).max() <= 2
    )  # of 255: Pillow's arithmetic is in integers


def test_no_operation_leaves_images_alone():
    assert change(X, torch.full((6,), len(OPERATIONS)), torch.full((6,), 0.3)).equal(X)


def test_an_image_depends_on_its_row_alone_and_stays_in_range():
    whole = augmix(X, seed=1, step=9, rows=ROWS)
    torch.testing.assert_close(augmix(X[2:3], seed=1, step=9, rows=ROWS[2:3]), whole[2:3], atol=1e-6, rtol=0)
    assert whole.amin() >= 0 and whole.amax() <= 1 + 1e-6
    assert not augmix(X, seed=1, step=10, rows=ROWS).equal(whole) and not augmix(X, seed=2, step=9, rows=ROWS).equal(
        whole
    )
    assert augmented(X, ("augmix",), crop=2, seed=1, step=9, epoch=0, rows=ROWS).equal(whole)


def test_images_are_mixed_in_the_published_proportions(monkeypatch):
    """With changes that make an image white with a probability of ½: E[m] = ½, and chains weigh a third each."""
    made = []

    def white(x, operation, strength):
        made.append(operation)
        return torch.where((operation < len(OPERATIONS) // 2)[:, None, None, None], torch.ones_like(x), x)

    monkeypatch.setattr("calgp.training.augmix.change", white)
    n = 20_000
    mixed = augmix(torch.zeros(n, 1, 1, 1), seed=0, step=0, rows=torch.arange(n)).flatten()
    depth = torch.stack(made).view(CHAINS, DEPTH, n).lt(len(OPERATIONS)).sum(1)  # changes of each chain
    assert depth.unique().tolist() == [1, 2, 3]
    # a chain is white unless none of its 1, 2 or 3 changes is; the mean of 1 − m is ½
    chance = sum(1 - 0.5**k for k in (1, 2, 3)) / 3
    assert mixed.mean().item() == pytest.approx(chance / 2, abs=4 * mixed.std().item() / n**0.5)  # four standard errors
