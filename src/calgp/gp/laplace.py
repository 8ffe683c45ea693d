"""Laplace's approximation of the last layer: a Gaussian over W around its mode, so f has mean and variance in one pass.

At the mode Ŵ of the bound the posterior precision of w_q is I + Σ_i h_iq φ_i φ_iᵀ: its prior's, and for each training
example the curvature h = −∂² log p(y | f) / ∂f_q². It is accumulated in one pass over the training set.
"""

import math
from collections.abc import Callable, Iterable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from calgp.gp.cholesky import inverse_root
from calgp.gp.freezing import Freezable
from calgp.gp.layers import RandomFeatureGP
from calgp.gp.likelihoods import Latent


class LaplaceGP(Freezable):
    """f = ΦW with q(W) = N(Ŵ, Σ): a single Gaussian component. Before `fit` it is the point Ŵ.

    Args:
        process: its Ω is drawn once and its W has no masks, so that Ŵ is trained as a point with a N(0, 1) prior.
        covariances: 1, a Σ for all functions; or as many as there are functions.

    >>> from calgp.gp import UNMASKED
    >>> gp = LaplaceGP(RandomFeatureGP(2, 3, n_rf=5, masking=UNMASKED))
    >>> gp(torch.zeros(4, 2)).mean.shape
    torch.Size([1, 4, 3])
    """

    def __init__(self, process: RandomFeatureGP, *, covariances: int = 1) -> None:
        super().__init__()
        if covariances not in (1, process.out_features) or process.kernel.outputs is not None:
            raise ValueError(f"Invalid {covariances=}: must be 1 or {process.out_features}, functions of one Φ")
        self.process = process
        m = len(process.weights.weight)
        self.register_buffer("root", torch.zeros(covariances, m, m))  # R, Σ = R Rᵀ
        self.register_buffer("fitted", torch.tensor(False))
        self.root: Float[Tensor, "k m m"]
        self.fitted: Bool[Tensor, ""]

    def frozen(self) -> "LaplaceGP":
        """With `fitted` as a plain bool: a trace cannot decide by a tensor."""
        fitted = bool(self.fitted)
        del self.fitted
        self.fitted = fitted  # pyright: ignore[reportAttributeAccessIssue]
        return self

    def forward(self, c: Float[Tensor, "N d"]) -> Latent:
        return self.gaussian(c) if self.fitted else Latent(self.process(c).unsqueeze(0))

    def gaussian(self, c: Float[Tensor, "N d"]) -> Latent:
        """N(φᵀŴ, φᵀ Σ φ)."""
        phi = self.process.phi(c)
        mean = self.process.weights(phi).unsqueeze(0)
        # φᵀ Σ φ = ‖Rᵀ φ‖², which rounding cannot make negative
        variance = torch.stack([(phi @ root).square().sum(-1) for root in self.root], -1)  # [N, k]
        return Latent(mean, variance.expand_as(mean))

    def kl(self) -> Float[Tensor, ""]:
        """−log p(W) of the point, ½ ‖W‖², up to constants."""
        return self.process.kl()

    @torch.no_grad()
    def fit(self, features: Iterable[Tensor], curvature: Callable[[Tensor], Tensor]) -> None:
        """Σ from the training set, given batch by batch as features c.

        Args:
            features: c of every training example once, [N, d] each.
            curvature: h from f: [N, Q] → [N, covariances] (`shared`, `per_class`; 1/σ² for Gaussian noise).
        """
        covariances, m, _ = self.root.shape
        precision = torch.eye(m, dtype=torch.float64, device=self.root.device).repeat(covariances, 1, 1)
        for c in features:
            phi = self.process.phi(c)
            accumulate(precision, phi, curvature(self.process.weights(phi)))
        self.root.copy_(inverse_root(precision))
        self.fitted.fill_(True)


def accumulate(precision: Float[Tensor, "k m m"], phi: Float[Tensor, "N m"], curvature: Float[Tensor, "N k"]) -> None:
    """Adds Σ_i h_ik φ_i φ_iᵀ, in double precision: sums over a whole training set."""
    phi = phi.double()
    for total, h in zip(precision, curvature.double().unbind(-1), strict=True):
        total.addmm_(phi.mT, h.unsqueeze(-1) * phi)


def per_class(f: Float[Tensor, "N Q"]) -> Float[Tensor, "N Q"]:
    """Softmax's own curvature, p_q (1 − p_q); what couples the classes, −p_q p_r, is left out."""
    p = f.double().softmax(-1)
    return p * (1 - p)


def shared(f: Float[Tensor, "N Q"]) -> Float[Tensor, "N 1"]:
    """max_q p_q (1 − p_q) = p̂ (1 − p̂) with p̂ the confidence: one Σ, no class's being smaller."""
    return per_class(f).amax(-1, keepdim=True)


def constant_one(f: Float[Tensor, "N Q"]) -> Float[Tensor, "N 1"]:
    """1, as for regression with unit noise: SNGP's published code."""
    return torch.ones_like(f[:, :1])


def mean_field_logits(latent: Latent) -> Latent:
    """Points f / sqrt(1 + π/8 · v) whose softmax approximates the Gaussian's average softmax (MacKay 1992)."""
    if latent.variance is None:
        return latent
    return Latent(latent.mean / (1 + math.pi / 8 * latent.variance).sqrt())
