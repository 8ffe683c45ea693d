"""A Gaussian process on a network's features whose mean is the network: f_q = g_q + φᵀ w_q, w_q ~ N(0, σ² I).

g are the network's logits, and φ random features of an RBF kernel of its features, standardised. The mean of w stays 0,
so that logits and labels stay the network's. Its covariance is Laplace's around them, Σ = (Σ_i h_i φ_i φ_iᵀ + I/σ²)⁻¹,
with h = p̂ (1 − p̂), p̂ the confidence: the curvature of the most uncertain class, so one Σ serves all classes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from calgp.errors import name_error
from calgp.gp.frequencies import orthogonal
from calgp.gp.kernels import RBF, fourier
from calgp.gp.laplace import shared
from calgp.posthoc import last_layer
from calgp.posthoc.last_layer import LastLayerPosterior

N_RF = 512
LENGTHSCALES = (0.5, 1.0, 2.0)  # in median distances of training features
VARIANCES = (1.0, 10.0, 100.0, 1000.0)  # σ²
COMPARED = 1000  # rows between which distances are measured
NUMBERS = 2**24  # that are handled at a time


@dataclass(frozen=True, eq=False)
class FixedMeanGP(LastLayerPosterior):
    """q(w), the same for each class. Near training features φᵀ Σ φ is small; far from them it returns to σ².

    >>> c = torch.randn(200, 2, generator=torch.Generator().manual_seed(0))
    >>> gp = next(candidates(c, torch.zeros(200, 2)))  # σ² = 1
    >>> near, far = gp.logit_covariance(torch.tensor([[0.0, 0.0], [50.0, 50.0]]))[:, 0, 0]
    >>> bool(near < 0.2), bool(far > 0.8)
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


POSTERIORS = last_layer.POSTERIORS | {"gp": FixedMeanGP}


def posterior_from(structure: str, numbers: Mapping[str, float], tensors: Mapping[str, Tensor]) -> LastLayerPosterior:
    """A posterior from what `numbers` and `tensors` gave."""
    if structure not in POSTERIORS:
        raise name_error("There is no structure", structure, POSTERIORS)
    return POSTERIORS[structure](**tensors, **numbers)


def candidates(c: Float[Tensor, "N d"], f: Float[Tensor, "N Q"]) -> Iterator[FixedMeanGP]:
    """Posteriors by training features and logits, one for each ℓ and σ² of a small grid."""
    generator = torch.Generator().manual_seed(0)
    deviation, centre = torch.std_mean(c.double(), 0, correction=0)
    deviation = torch.where(deviation > 1e-12 * c.abs().amax(0), deviation, 1.0)  # 1 for one that never changes
    some = c[torch.randperm(len(c), generator=generator)[:COMPARED]]
    natural = RBF(c.shape[1]).natural_lengthscale(((some - centre) / deviation).float()).item() if len(c) > 1 else 0.0
    epsilon = orthogonal(c.shape[1], N_RF, generator=generator).double()
    for share in LENGTHSCALES:
        lengthscale = share * (natural or 1.0)
        omega = (epsilon / (lengthscale * deviation[:, None])).to(c.dtype)
        values, vectors = torch.linalg.eigh(_precision(c, f, centre.to(c.dtype), omega))
        for variance in VARIANCES:
            root = vectors / (values.clamp_min(0) + 1 / variance).sqrt()
            yield FixedMeanGP(centre.to(c.dtype), omega, root.to(c.dtype), 1 / variance, lengthscale, float(f.shape[1]))


def _precision(c: Tensor, f: Tensor, centre: Tensor, omega: Tensor) -> Tensor:
    """Σ_i h_i φ_i φ_iᵀ."""
    total = torch.zeros(2 * omega.shape[1], 2 * omega.shape[1], dtype=torch.float64)
    rows = max(1, NUMBERS // len(total))
    for part, logits in zip(c.split(rows), f.split(rows), strict=True):
        weighted = shared(logits).sqrt().to(c.dtype) * fourier((part - centre) @ omega)
        total += weighted.mT @ weighted
    return total
