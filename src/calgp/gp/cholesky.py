"""The Cholesky factor of a covariance that rounding may have made slightly indefinite."""

import torch
from jaxtyping import Float
from torch import Tensor

JITTERS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2)  # relative to the mean of the diagonal


class NumericalError(ValueError):
    """The numbers of a model have left what floating point can do; the state before the step is still good."""


def cholesky(k: Float[Tensor, "M M"]) -> Float[Tensor, "M M"]:
    """L with LLᵀ = K + jI, in double precision, j the first of `JITTERS` (times the mean variance) that suffices.

    Double precision costs little for M × M, and half of its digits survive what would take all of float32's.
    """
    k = k.double()
    scale, eye = k.diagonal().mean().detach(), torch.eye(len(k), dtype=k.dtype, device=k.device)
    if not scale.isfinite() or scale <= 0:
        raise NumericalError(f"the covariance of the inducing variables has a mean variance of {scale.item():g}")
    for jitter in JITTERS:
        factor, failed = torch.linalg.cholesky_ex(k + jitter * scale * eye)
        if not failed and factor.detach().isfinite().all():
            return factor
    raise NumericalError(
        f"the {len(k)} × {len(k)} covariance of the inducing variables is not positive definite, even with "
        f"{JITTERS[-1]:g} of its mean variance ({scale.item():g}) added to the diagonal"
    )


def factor(precision: Float[Tensor, "*k M M"], what: str) -> Float[Tensor, "*k M M"]:
    """L with LLᵀ = P, for a P that is I or more by its making: if it has none, its numbers have failed."""
    lower, failed = torch.linalg.cholesky_ex(precision)
    if failed.any() or not lower.isfinite().all():
        raise NumericalError(f"{what} has no Cholesky factor: its numbers are too large, too small or not finite")
    return lower
