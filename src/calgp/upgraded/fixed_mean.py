"""A Gaussian process on a network's features whose mean is the network: f_q = g_q + φᵀ w_q, w_q ~ N(0, σ² I).

g are the network's logits, and φ random features of an RBF kernel of its features, standardised. The mean of w stays 0,
so that logits and labels stay the network's. Its covariance is Laplace's around them, Σ = (Σ_i h_i φ_i φ_iᵀ + I/σ²)⁻¹.
One Σ serves all classes: h = p̂ (1 − p̂), p̂ the confidence, is the curvature of the most uncertain one. Of its own
training data a network may be so certain that h says nothing; its upper bound ¼ then leaves distances alone to tell.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from calgp.gp.frequencies import orthogonal
from calgp.gp.kernels import RBF, fourier
from calgp.gp.laplace import accumulate, shared
from calgp.posthoc import last_layer
from calgp.posthoc.checks import check_choice
from calgp.posthoc.last_layer import LastLayerPosterior

N_RF = 512
LENGTHSCALES = (0.25, 0.5, 1.0)  # in median distances of training features
VARIANCES = (10.0, 100.0)  # σ²
BOUND = 0.25  # of h
ROWS = 10_000  # training rows that stand for all, if there are more
COMPARED = 1000  # rows between which distances are measured
NUMBERS = 2**24  # that are handled at a time


@dataclass(frozen=True, eq=False)
class FixedMeanGP(LastLayerPosterior):
    """q(w), the same for each class. Near training features φᵀ Σ φ is small; far from them it returns to σ².

    >>> c = torch.randn(200, 2, generator=torch.Generator().manual_seed(0))
    >>> gp = next(candidates(c, torch.zeros(200, 2)))  # σ² = 10
    >>> near, far = gp.logit_covariance(torch.tensor([[0.0, 0.0], [50.0, 50.0]]))[:, 0, 0]
    >>> bool(near < 1), bool(far > 9)
    (True, True)
    """

    centre: Tensor  # [d], mean of the features
    omega: Tensor  # [d, n_rf], frequencies divided by the lengthscale and the deviation of each feature
    root: Tensor  # [2 n_rf, 2 n_rf], R, R Rᵀ = Σ
    precision: float  # 1 / σ²
    lengthscale: float  # ℓ, of standardised features
    classes: float  # Q

    def logit_covariance(self, c: Float[Tensor, "N d"]) -> Float[Tensor, "N Q Q"]:
        phi = fourier((c.to(self.omega) - self.centre) @ self.omega)
        variance = (phi @ self.root).square().sum(1)  # φᵀ Σ φ
        return variance[:, None, None] * torch.eye(int(self.classes), dtype=variance.dtype, device=variance.device)


POSTERIORS: dict[str, type[LastLayerPosterior]] = last_layer.POSTERIORS | {"gp": FixedMeanGP}


def posterior_from(structure: str, numbers: Mapping[str, float], tensors: Mapping[str, Tensor]) -> LastLayerPosterior:
    """A posterior from what `numbers` and `tensors` gave."""
    return POSTERIORS[check_choice("structure", structure, POSTERIORS)](**tensors, **numbers)  # pyright: ignore[reportCallIssue]


def candidates(c: Float[Tensor, "N d"], f: Float[Tensor, "N Q"]) -> Iterator[FixedMeanGP]:
    """Posteriors by training features and logits, one for each ℓ, h (of these logits, ¼) and σ² of a small grid."""
    generator = torch.Generator().manual_seed(0)
    deviation, centre = torch.std_mean(c.double(), 0, correction=0)
    deviation = torch.where(deviation > 1e-12 * c.abs().amax(0), deviation, 1.0)  # 1 for one that never changes
    order = torch.randperm(len(c), generator=generator)
    distant = RBF(c.shape[1]).natural_lengthscale(((c[order[:COMPARED]] - centre) / deviation).float()).item()
    natural = distant if distant > 0 else 1.0  # of one row, or rows that are all the same, there is none
    epsilon = orthogonal(c.shape[1], N_RF, generator=generator).double()
    centre, some = centre.to(c.dtype), order[:ROWS]
    for lengthscale in (share * natural for share in LENGTHSCALES):
        omega = (epsilon / (lengthscale * deviation[:, None])).to(c.dtype)
        for precision in _precisions(c[some], f[some], centre, omega) * (len(c) / len(some)):
            values, vectors = torch.linalg.eigh(precision)
            for variance in VARIANCES:
                root = vectors / (values.clamp_min(0) + 1 / variance).sqrt()
                numbers = 1 / variance, lengthscale, float(f.shape[1])
                yield FixedMeanGP(centre, omega, root.to(c.dtype).contiguous(), *numbers)


def _precisions(c: Tensor, f: Tensor, centre: Tensor, omega: Tensor) -> Float[Tensor, "2 m m"]:
    """Σ_i h_i φ_i φ_iᵀ with h of the logits, and with its bound."""
    m = 2 * omega.shape[1]
    totals = torch.zeros(2, m, m, dtype=torch.float64)
    size = max(1, NUMBERS // m)
    for part, logits in zip(c.split(size), f.split(size), strict=True):
        h = shared(logits)
        accumulate(totals, fourier((part - centre) @ omega), torch.cat([h, torch.full_like(h, BOUND)], 1))
    return totals
