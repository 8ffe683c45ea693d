"""Mean-field Gaussian weights, the classical alternative to masks: q(W) = Π N(W_ij; M_ij, σ_ij²), with its exact KL.

Noise is drawn where it is cheapest, at the outputs (local reparameterisation, Kingma et al. 2015): given h, the outputs
of a linear layer are Gaussian with mean h M and variance h² σ². So every example has its own draw of W, and in a
convolution every pixel too: its outputs have the right means and variances, and not the covariances between pixels.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from calgp.gp.cholesky import TINY
from calgp.gp.likelihoods import Latent
from calgp.gp.masks import Masking, half_norm, same_convolution, truncated_normal
from calgp.gp.noise import Noise, Site, normal
from calgp.gp.posteriors import Convolution, Frequencies, Generator, Linear, Posterior


@dataclass(frozen=True)
class MeanField(Posterior):
    """q(W_ij) = N(M_ij, σ_ij²). Biases are points with a N(0, 1) prior.

    deviation: σ to start with, in units of the prior's: 1 starts as uncertain as the prior.
    """

    deviation: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.deviation < math.inf:
            raise ValueError(f"Invalid {self}: deviation must be positive and finite")

    def linear(self, inputs: int, outputs: int, *, generator: Generator = None) -> "MeanFieldLinear":
        return MeanFieldLinear(inputs, outputs, deviation=self.deviation, generator=generator)

    def linear_per_output(
        self, inputs: int, outputs: int, *, generator: Generator = None
    ) -> "MeanFieldLinearPerOutput":
        return MeanFieldLinearPerOutput(inputs, outputs, deviation=self.deviation, generator=generator)

    def convolution(
        self, inputs: int, outputs: int, kernel_size: int, *, stride: int = 1, bias: bool = True,
        generator: Generator = None,
    ) -> "MeanFieldConv2d":  # fmt: skip
        sizes = (inputs, outputs, kernel_size)
        return MeanFieldConv2d(*sizes, stride=stride, deviation=self.deviation, bias=bias, generator=generator)

    def frequencies(self, epsilon: Float[Tensor, "d n_rf"]) -> "MeanFieldFrequencies":
        return MeanFieldFrequencies(epsilon, deviation=self.deviation)

    def as_masks(self) -> Masking:
        raise ValueError("Gaussian weights need layers of their own; somebody's network can have masks in front of its")


def gaussian_kl(mean: Tensor, log_deviation: Tensor) -> Float[Tensor, ""]:
    """KL[Π N(m, s²) ‖ N(0, 1)] = Σ ½ (m² + s² − 1) − log s."""
    return half_norm(mean) + half_norm(log_deviation.exp()) - mean.numel() / 2 - log_deviation.sum()


class GaussianNoise(Site):
    """Draws from Gaussians that are independent for each row and element: mean + √variance · ε."""

    @property
    def active(self) -> bool:
        return True

    def forward(self, mean: Tensor, variance: Tensor, noise: Noise | None = None) -> Tensor:
        if noise is not None and noise.mean:
            return mean
        rows = mean.shape[0] if noise is None else noise.rows.shape[0]
        channels, *pixels = mean.shape[1:]
        epsilon = normal(noise, self.key(noise), mean[0].numel(), rows=rows, like=mean)  # [S, N, …]
        epsilon = epsilon.unflatten(-1, (*pixels, channels)).movedim(-1, 2)  # drawn channels last
        deviation = variance.clamp_min(TINY).sqrt()  # a patch of zeros has no variance, and the root no gradient there
        mean, deviation = mean.unflatten(0, (-1, rows)), deviation.unflatten(0, (-1, rows))
        return (mean + deviation * epsilon).flatten(0, 1)


class GaussianWeights(nn.Module, ABC):
    """What mean-field layers have: M, log σ, and a bias, a point with a N(0, 1) prior."""

    def __init__(
        self, shape: tuple[int, ...], deviation: float, *, biases: int = 0, generator: Generator = None
    ) -> None:
        super().__init__()
        self.draw = GaussianNoise()
        self.weight = nn.Parameter(truncated_normal(shape, 0.1, generator))
        self.log_deviation = nn.Parameter(torch.full(shape, math.log(deviation)))
        self.bias = nn.Parameter(truncated_normal((biases,), 0.1, generator)) if biases else None

    @property
    def variance(self) -> Tensor:
        """σ²."""
        return (2 * self.log_deviation).exp()

    @abstractmethod
    def moments(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of each output, given h; the outputs are independent."""

    def forward(self, h: Tensor, noise: Noise | None = None) -> Tensor:
        return self.draw(*self.moments(h), noise)

    def latent(self, h: Tensor, noise: Noise | None = None, *, draws: int = 16) -> Latent:
        mean, variance = self.moments(h)
        return Latent(mean[None], variance[None])

    def kl(self) -> Float[Tensor, ""]:
        cost = gaussian_kl(self.weight, self.log_deviation)
        return cost if self.bias is None else cost + half_norm(self.bias)


class MeanFieldLinear(GaussianWeights, Linear):
    """h ↦ h W + b, q(W) Gaussian.

    >>> mean, variance = MeanFieldLinear(2, 3, deviation=0.5).moments(torch.ones(1, 2))
    >>> variance  # 1² · ½² + 1² · ½²
    tensor([[0.5000, 0.5000, 0.5000]], grad_fn=<MmBackward0>)
    """

    def __init__(
        self, inputs: int, outputs: int, *, deviation: float = 0.1, bias: bool = False, generator: Generator = None
    ) -> None:
        super().__init__((inputs, outputs), deviation, biases=outputs * bias, generator=generator)

    def moments(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """h M + b and h² σ²."""
        mean = h @ self.weight
        return mean if self.bias is None else mean + self.bias, h.square() @ self.variance


class MeanFieldLinearPerOutput(GaussianWeights, Linear):
    """f_q = h_q w_q, q(W) Gaussian: each output has its own inputs."""

    def __init__(self, inputs: int, outputs: int, *, deviation: float = 0.1, generator: Generator = None) -> None:
        super().__init__((inputs, outputs), deviation, generator=generator)

    def moments(self, h: Float[Tensor, "B out in"]) -> tuple[Tensor, Tensor]:
        """h_q m_q and h_q² σ_q²."""
        return (h * self.weight.mT).sum(-1), (h.square() * self.variance.mT).sum(-1)


class MeanFieldConv2d(GaussianWeights, Convolution):
    """Convolution with Gaussian filters; TensorFlow's SAME padding."""

    def __init__(
        self, inputs: int, outputs: int, kernel_size: int, *, stride: int = 1, deviation: float = 0.1,
        bias: bool = True, generator: Generator = None,
    ) -> None:  # fmt: skip
        shape = (outputs, inputs, kernel_size, kernel_size)
        super().__init__(shape, deviation, biases=outputs * bias, generator=generator)
        self.stride = stride

    def moments(self, h: Float[Tensor, "B C H W"]) -> tuple[Tensor, Tensor]:
        """h ∗ M + b and h² ∗ σ²."""
        mean = same_convolution(h, self.weight, self.bias, self.stride)
        return mean, same_convolution(h.square(), self.variance, None, self.stride)


class MeanFieldFrequencies(Frequencies):
    """Ω = Λ^-½ ε inferred, q(ε) Gaussian (Cutajar et al. 2017)."""

    def __init__(self, start: Float[Tensor, "d n_rf"], *, deviation: float) -> None:
        super().__init__()
        self.draw = GaussianNoise()
        self.epsilon = nn.Parameter(start)
        self.log_deviation = nn.Parameter(torch.full_like(start, math.log(deviation)))

    def forward(self, c: Tensor, lengthscale: Tensor, noise: Noise | None = None) -> Tensor:
        u = c / lengthscale  # Λ^-½ c
        return self.draw(u @ self.epsilon, u.square() @ (2 * self.log_deviation).exp(), noise)

    def kl(self) -> Float[Tensor, ""]:
        return gaussian_kl(self.epsilon, self.log_deviation)
