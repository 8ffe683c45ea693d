"""AugMix (Hendrycks et al. 2020): an image, mixed with itself after chains of small changes."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from calgp.gp import Noise
from calgp.gp.noise import site_key

_SITE = site_key("augmix")
CHAINS, DEPTH = 3, 3  # chains of an image, and changes of a chain at most
SEVERITY = 0.3  # of the range of a change: level 3 of 10, as published
OPERATIONS = ("rotate", "shear-x", "shear-y", "move-x", "move-y", "posterize", "solarize", "autocontrast")


def augmix(x: Float[Tensor, "N C H W"], *, seed: int, step: int, rows: Int[Tensor, "N"]) -> Float[Tensor, "N C H W"]:
    """m x + (1 − m) Σ_i w_i chain_i(x) with m uniform in [0, 1] and w ~ Dirichlet(1, 1, 1), drawn for each image.

    A chain makes one to three of the published changes, but for the equalised histogram. The second part of the paper,
    a loss that compares three versions of each image, is not here: it would triple the cost of a step.
    """
    count = 1 + CHAINS * (2 + 2 * DEPTH)
    words = Noise(-1 - seed, torch.tensor([step]), rows.to(x.device)).words(_SITE, count, shared=False)[0]
    u = ((words >> 11).double() / 2**53 + 0.5 + 2**-54).to(x)  # signed words: uniform in (0, 1)
    original, weights, drawn = u[:, 0], -u[:, 1 : 1 + CHAINS].log(), u[:, 1 + CHAINS :].view(len(x), CHAINS, -1)
    weights = weights / weights.sum(1, keepdim=True)
    mixed = torch.zeros_like(x)
    for chain in range(CHAINS):
        depth, changed = 1 + (DEPTH * drawn[:, chain, 0]).long(), x
        for place in range(DEPTH):
            chosen, strength = drawn[:, chain, 1 + 2 * place], drawn[:, chain, 2 + 2 * place]
            chosen = (len(OPERATIONS) * chosen).long().masked_fill(depth <= place, len(OPERATIONS))
            changed = change(changed, chosen, SEVERITY * (2 * strength - 1))
        mixed = mixed + _of_images(weights[:, chain]) * changed
    return _of_images(original) * x + _of_images(1 - original) * mixed


def change(
    x: Float[Tensor, "N C H W"], operation: Int[Tensor, "N"], strength: Float[Tensor, "N"]
) -> Float[Tensor, "N C H W"]:
    """Each image by one of OPERATIONS; beyond their number, none.

    Strengths in [−1, 1] reach 30 degrees, a shear of 0.3 and a third of the side; they posterize to 4 − ⌊4 |s|⌋ bits,
    and solarize the brightest |s|. The border is repeated.
    """
    x = _transformed(x, operation, strength)
    size = _of_images(strength.abs())
    step = 2.0 ** (4 + (4 * size).floor())  # of 256 grey values
    low, high = x.amin((2, 3), keepdim=True), x.amax((2, 3), keepdim=True)
    stretched = torch.where(high > low, (x - low) / (high - low).clamp_min(1e-12), x)
    for name, changed in (
        ("posterize", ((255 * x).round() / step).floor() * step / 255),
        ("solarize", torch.where(x >= 1 - size, 1 - x, x)),
        ("autocontrast", stretched),
    ):
        x = torch.where(_of_images(operation == OPERATIONS.index(name)), changed, x)
    return x


def _transformed(x: Tensor, operation: Tensor, strength: Tensor) -> Tensor:
    """Rotated, sheared or moved, in one interpolation; other operations leave images as they are."""
    rotate, shear_x, shear_y, move_x, move_y = (
        torch.where(operation == place, strength * most, 0.0)
        for place, most in enumerate((math.pi / 6, 0.3, 0.3, 2 / 3, 2 / 3))
    )
    rows = [torch.stack([rotate.cos(), shear_x - rotate.sin(), move_x], 1),
            torch.stack([shear_y + rotate.sin(), rotate.cos(), move_y], 1)]  # fmt: skip
    grid = F.affine_grid(torch.stack(rows, 1), list(x.shape), align_corners=False)
    moved = F.grid_sample(x, grid, padding_mode="border", align_corners=False)
    return torch.where(_of_images(operation < 5), moved, x)


def _of_images(values: Tensor) -> Tensor:
    return values[:, None, None, None]
