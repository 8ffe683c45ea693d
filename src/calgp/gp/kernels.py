"""Covariances of the Gaussian processes, each beside its random-feature expansion: Eq. (4), (5), (11), (12)."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn


@dataclass(frozen=True)
class Theta:
    """Where θ = (σ, ℓ) starts, what shape it has, and whether it is learned.

    lengthscale: ℓ; None means √d, which keeps projections of unit-scale features at unit scale.
    ard: one ℓ for each dimension (Λ = diag(ℓ₁², …, ℓ_d²)) instead of one for all.
    outputs: an own θ for each of so many latent functions, instead of one for all; every result of the kernel then has
        an axis of that size.
    learn: train what is identifiable of θ.

    >>> RBF(16, Theta()).lengthscale.item()  # √16
    4.0
    """

    lengthscale: float | None = None
    sigma: float = 1.0
    ard: bool = False
    outputs: int | None = None
    learn: bool = False

    def __post_init__(self) -> None:
        for name, value in (("ℓ", self.lengthscale), ("σ", self.sigma)):
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"Invalid {name}={value}: must be positive and finite")


class Kernel(nn.Module, ABC):
    """A covariance k(c, c') of d-dimensional features. It owns θ, kept as logarithms."""

    def __init__(self, d: int, theta: Theta = Theta()) -> None:
        super().__init__()
        lengthscale = math.sqrt(d) if theta.lengthscale is None else theta.lengthscale
        self.outputs = theta.outputs
        lead = () if theta.outputs is None else (theta.outputs,)
        learn_sigma, learn_lengthscale = (theta.learn and known for known in self.identifiable(ard=theta.ard))
        self.log_sigma = nn.Parameter(torch.full((*lead, 1), math.log(theta.sigma)), learn_sigma)
        log_lengthscale = torch.full((*lead, d if theta.ard else 1), math.log(lengthscale))
        self.log_lengthscale = nn.Parameter(log_lengthscale, learn_lengthscale)

    @property
    def lengthscale(self) -> Float[Tensor, "*outputs d_or_1"]:
        """ℓ."""
        return self.log_lengthscale.exp()

    @property
    def sigma(self) -> Float[Tensor, "*outputs 1"]:
        """σ, the standard deviation of the process (for RBF; a scale for arc-cosine)."""
        return self.log_sigma.exp()

    @abstractmethod
    def identifiable(self, *, ard: bool) -> tuple[bool, bool]:
        """Whether σ and ℓ can be identified from the data, apart from each other, so that learning them makes sense."""

    @abstractmethod
    def covariance(self, c1: Float[Tensor, "N d"], c2: Float[Tensor, "M d"]) -> Float[Tensor, "*outputs N M"]:
        """k(c1, c2), exactly."""

    @abstractmethod
    def diagonal(self, c: Float[Tensor, "N d"]) -> Float[Tensor, "*outputs N"]:
        """k(c, c) of each c, in closed form."""

    @abstractmethod
    def natural_lengthscale(self, c: Float[Tensor, "N d"]) -> Float[Tensor, ""]:
        """An ℓ at which the kernel tells features such as these apart, for want of a better one to start from."""

    @abstractmethod
    def scaled_lengthscale(self, c: Float[Tensor, "N d"], scale: float) -> Float[Tensor, ""]:
        """The ℓ at which functions of features such as these have the standard deviation `scale` a priori.

        Where ℓ does not change it (rbf: σ alone does), the natural one.
        """

    @abstractmethod
    def expand(self, projected: Float[Tensor, "*batch n_rf"]) -> Float[Tensor, "*batch m"]:
        """Φ from CΩ, such that E[ΦΦᵀ] = k."""

    @abstractmethod
    def features(self, n_rf: int) -> int:
        """m: how many features come from n_rf frequencies."""

    def _scaled(self, c: Float[Tensor, "N d"]) -> Float[Tensor, "*outputs N d"]:
        """Λ^-½ c."""
        return c / self.lengthscale.unsqueeze(-2)


class ArcCosine(Kernel):
    """The arc-cosine kernel of order 0, 1 or 2 (Cho & Saul 2009), Eq. (4): k = (σ²/π) ‖u‖ᵖ‖v‖ᵖ J_p(α), u = Λ^-½ c.

    Order 1 is the paper's: its features are rectified linear units. It is homogeneous in c: with one ℓ only σ/ℓᵖ is
    identifiable, and with ARD the common scale of ℓ stands for σ; so `learn` trains σ, or ℓ under ARD.

    >>> c = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> ArcCosine(2, Theta(lengthscale=1.0)).covariance(c, c)[0]  # 1, and 1/π at a right angle
    tensor([1.0000, 0.3183])
    """

    def __init__(self, d: int, theta: Theta = Theta(), *, order: int = 1) -> None:
        super().__init__(d, theta)
        if order not in (0, 1, 2):
            raise ValueError(f"Invalid {order=}: must be 0, 1 or 2")
        self.order = order

    def identifiable(self, *, ard: bool) -> tuple[bool, bool]:
        return not ard, ard

    def covariance(self, c1: Float[Tensor, "N d"], c2: Float[Tensor, "M d"]) -> Float[Tensor, "*outputs N M"]:
        u, v = self._scaled(c1), self._scaled(c2)
        norms = _norm(u).unsqueeze(-1) * _norm(v).unsqueeze(-2)  # ‖u‖‖v‖ [N, M]
        cosine = u @ v.mT / norms.clamp_min(torch.finfo(norms.dtype).tiny)
        # (σ²/π) ‖u‖ᵖ ‖v‖ᵖ J_p(α); of order 0, a zero vector has no angle, and no features either
        size = norms**self.order if self.order else norms.sign()
        return self.sigma.square().unsqueeze(-1) / math.pi * size * _J[self.order](cosine)

    def diagonal(self, c: Float[Tensor, "N d"]) -> Float[Tensor, "*outputs N"]:
        # (σ²/π) ‖u‖²ᵖ J_p(0), with J_p(0) = π, π, 3π
        squared = self._scaled(c).square().sum(-1)
        size = (squared.sign(), squared, 3 * squared.square())[self.order]
        return self.sigma.square() * size

    def natural_lengthscale(self, c: Float[Tensor, "N d"]) -> Float[Tensor, ""]:
        return c.norm(dim=-1).median()  # so that ‖u‖ = 1; it does not matter for the angles

    def scaled_lengthscale(self, c: Float[Tensor, "N d"], scale: float) -> Float[Tensor, ""]:
        # sqrt(k(c, c)) = σ (‖c‖ / ℓ)ᵖ, but for √3 of order 2
        size = self.natural_lengthscale(c)
        return size * (self.sigma.mean() / scale) ** (1 / self.order) if self.order else size

    def expand(self, projected: Float[Tensor, "*batch n_rf"]) -> Float[Tensor, "*batch m"]:
        # Φ = sqrt(2σ²/N_RF) max(0, CΩ)ᵖ, Eq. (5)
        scale = self.sigma * math.sqrt(2 / projected.shape[-1])
        if self.order == 0:
            return scale * (projected > 0)
        if self.order == 1:
            return (scale * projected).relu_()  # in the memory of the product: one large tensor less
        return scale * projected.relu().square()

    def features(self, n_rf: int) -> int:
        return n_rf


class RBF(Kernel):
    """k = σ² exp(−½ (c − c')ᵀ Λ⁻¹ (c − c')), Eq. (11) with the ½ that its own p(ω) = N(0, Λ⁻¹) implies.

    >>> c = torch.tensor([[0.0, 0.0], [1.0, 0.0]])
    >>> RBF(2, Theta(lengthscale=1.0)).covariance(c, c)[0]  # 1, and exp(−1/2)
    tensor([1.0000, 0.6065])
    """

    def identifiable(self, *, ard: bool) -> tuple[bool, bool]:
        return True, True

    def covariance(self, c1: Float[Tensor, "N d"], c2: Float[Tensor, "M d"]) -> Float[Tensor, "*outputs N M"]:
        u, v = self._scaled(c1), self._scaled(c2)
        # ‖u − v‖² = ‖u‖² + ‖v‖² − 2u·v; centred first, which loses fewer digits
        centre = u.mean(-2, keepdim=True).detach()
        u, v = u - centre, v - centre
        squared = u.square().sum(-1).unsqueeze(-1) + v.square().sum(-1).unsqueeze(-2) - 2 * u @ v.mT
        return self.sigma.square().unsqueeze(-1) * torch.exp(-squared.clamp_min(0) / 2)

    def diagonal(self, c: Float[Tensor, "N d"]) -> Float[Tensor, "*outputs N"]:
        variance = self.sigma.square()  # σ², whatever c
        return variance.expand(*variance.shape[:-1], c.shape[0])

    def natural_lengthscale(self, c: Float[Tensor, "N d"]) -> Float[Tensor, ""]:
        return torch.pdist(c).median()  # the median heuristic: distances of order one

    def scaled_lengthscale(self, c: Float[Tensor, "N d"], scale: float) -> Float[Tensor, ""]:
        return self.natural_lengthscale(c)

    def expand(self, projected: Float[Tensor, "*batch n_rf"]) -> Float[Tensor, "*batch m"]:
        return fourier(projected, self.sigma)

    def features(self, n_rf: int) -> int:
        return 2 * n_rf


def fourier(projected: Float[Tensor, "*batch n_rf"], sigma: Tensor | float = 1.0) -> Float[Tensor, "*batch m"]:
    """Φ = sqrt(σ²/N_RF) [cos(CΩ), sin(CΩ)], Eq. (12).

    >>> fourier(torch.tensor([0.0])).square().sum()  # σ², whatever is projected
    tensor(1.)
    """
    return sigma / math.sqrt(projected.shape[-1]) * torch.cat([projected.cos(), projected.sin()], -1)


def _norm(u: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
    """‖u‖ with gradient 0 at u = 0 (an all-zero feature vector), where the norm has none."""
    squared = u.square().sum(-1)
    positive = squared > 0
    return torch.where(positive, torch.where(positive, squared, 1).sqrt(), 0)


# The angular functions J_p, as functions of s = cos α. arccos has no gradient at α = 0, the diagonal of K; but in s
# dJ₂/ds = 4 J₁ and dJ₁/ds = π − α are finite everywhere, so the derivatives are given rather than left to autograd.


def _angle(cosine: Tensor) -> Tensor:
    return torch.arccos(cosine.clamp(-1, 1))


def _j0(cosine: Tensor) -> Tensor:
    """J₀ = π − α. Not differentiable on the diagonal, and its features have no gradient anywhere."""
    return math.pi - _angle(cosine)


class _J1(torch.autograd.Function):
    """J₁ = sin α + (π − α) cos α, dJ₁/ds = π − α."""

    @staticmethod
    def forward(ctx, cosine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine)
        alpha = _angle(cosine)
        return alpha.sin() + (math.pi - alpha) * alpha.cos()

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> Tensor:
        (cosine,) = ctx.saved_tensors
        return gradients[0] * _j0(cosine)


class _J2(torch.autograd.Function):
    """J₂ = 3 sin α cos α + (π − α)(1 + 2 cos² α), dJ₂/ds = 4 J₁."""

    @staticmethod
    def forward(ctx, cosine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine)
        alpha = _angle(cosine)
        return 3 * alpha.sin() * alpha.cos() + (math.pi - alpha) * (1 + 2 * alpha.cos().square())

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> Tensor:
        (cosine,) = ctx.saved_tensors
        return gradients[0] * 4 * _J1.apply(cosine)


_J = (_j0, _J1.apply, _J2.apply)
