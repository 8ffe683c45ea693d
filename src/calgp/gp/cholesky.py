"""Roots of covariances and precisions, which rounding may have made slightly indefinite."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

JITTERS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2)  # relative to the mean of the diagonal
JITTER = 1e-6  # relative to the trace
ENLARGEMENTS = 4  # of it: a millionth to a hundredth
TINY = 1e-12  # the smallest variance: rounding may bring one below zero, and the square root has no gradient there


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
    """L with LLᵀ = P of a precision P = I + …; NumericalError where overflow or rounding has spoilt P."""
    lower, failed = torch.linalg.cholesky_ex(precision)
    if failed.any() or not lower.isfinite().all():
        raise NumericalError(f"{what} has no Cholesky factor: its numbers are too large, too small or not finite")
    return lower


def inverse_root(precision: Float[Tensor, "k m m"]) -> Float[Tensor, "k m m"]:
    """R with R Rᵀ = P⁻¹: P = L Lᵀ, R = L⁻ᵀ."""
    lower = factor(precision, "the precision of the weights")
    identity = torch.eye(precision.shape[-1], dtype=precision.dtype, device=precision.device)
    return torch.linalg.solve_triangular(lower.mT, identity.expand_as(lower), upper=True)


def covariance_root(covariance: Float[Tensor, "*any Q Q"]) -> Float[Tensor, "*any Q Q"]:
    """R with R Rᵀ = C + δ I, δ a millionth of C's trace: also where C is singular.

    It is singular where no feature reaches a class, where there are more classes than features, where two classes are
    opposites; and with keep = 1 all of it is zero. A covariance summed in single precision then has negative
    eigenvalues of the size of its rounding: where δ does not outweigh them, it is ten times as large, and so on. What
    is not finite has a root that is no number.
    """
    double = covariance.double()
    jitter = (JITTER * double.diagonal(dim1=-2, dim2=-1).sum(-1)).clamp_min(TINY)[..., None, None]
    eye = torch.eye(covariance.shape[-1], dtype=double.dtype, device=double.device)
    if torch.compiler.is_compiling():
        return _cholesky_by_columns(double + jitter * eye, jitter / 2).to(covariance.dtype)
    root, failed = torch.linalg.cholesky_ex(double + jitter * eye)
    for _ in range(ENLARGEMENTS):
        if not failed.any():
            return root.to(covariance.dtype)
        jitter = torch.where(failed[..., None, None] > 0, 10 * jitter, jitter)
        root, failed = torch.linalg.cholesky_ex(double + jitter * eye)
    return root.masked_fill(failed[..., None, None] > 0, math.nan).to(covariance.dtype)


def _cholesky_by_columns(
    a: Float[Tensor, "*any Q Q"], smallest: Float[Tensor, "*any 1 1"] | float = 0.0
) -> Float[Tensor, "*any Q Q"]:
    """Cholesky's factor by elementary operations, for exports: ONNX has no operator for it.

    `smallest`: what the square of a diagonal entry is at least, where rounding would bring it below.
    """
    columns, smallest = [], torch.as_tensor(smallest, dtype=a.dtype, device=a.device)
    for place in range(a.shape[-1]):
        column = a[..., place]
        for done in columns:
            column = column - done * done[..., place : place + 1]
        pivot = torch.maximum(column[..., place : place + 1], smallest.squeeze(-1)).sqrt()
        # entries above the diagonal are what rounding leaves of zero
        column = torch.cat([torch.zeros_like(column[..., :place]), pivot, column[..., place + 1 :] / pivot], -1)
        columns.append(column)
    return torch.stack(columns, -1)
