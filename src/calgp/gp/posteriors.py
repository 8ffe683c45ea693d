"""What a posterior over weights is to the layers: how they are made, and what they cost."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn

from calgp.gp.likelihoods import Latent
from calgp.gp.noise import Noise

if TYPE_CHECKING:
    from calgp.gp.masks import Masking

Generator = torch.Generator | None  # where first weights and Ω come from; None: torch's own


class Linear(nn.Module, ABC):
    """h ↦ h W + b, W inferred; or f_q = h_q w_q, where each output has its own inputs."""

    weight: nn.Parameter  # in × out

    @abstractmethod
    def forward(self, h: Tensor, noise: Noise | None = None) -> Tensor:
        """h W + b for a draw of W."""

    @abstractmethod
    def latent(self, h: Tensor, noise: Noise | None = None, *, draws: int = 16) -> Latent:
        """h W + b with W integrated: what is known of the outputs given h, instead of a draw of them.

        A Gaussian, or where it has too many outputs for a covariance, `draws` points.
        """

    @abstractmethod
    def kl(self) -> Float[Tensor, ""]:
        """KL[q(W) ‖ N(0, 1)], up to constants."""


class Convolution(nn.Module, ABC):
    """Filters Ψ, inferred."""

    weight: nn.Parameter  # out × in × height × width

    @abstractmethod
    def forward(self, h: Float[Tensor, "B C H W"], noise: Noise | None = None) -> Float[Tensor, "SB D H2 W2"]:
        """The convolution with a draw of Ψ."""

    @abstractmethod
    def kl(self) -> Float[Tensor, ""]:
        """KL[q(Ψ) ‖ N(0, 1)], up to constants."""


def convolutions(module: nn.Module) -> list[Convolution]:
    """The filters Ψ that a module infers, in the order of its parts."""
    return [part for part in module.modules() if isinstance(part, Convolution)]


class Frequencies(nn.Module, ABC):
    """Ω of shape d × N_RF."""

    @abstractmethod
    def forward(self, c: Tensor, lengthscale: Tensor, noise: Noise | None = None) -> Tensor:
        """CΩ, [..., n_rf]; with an ℓ per output, [..., outputs, n_rf]."""

    @abstractmethod
    def kl(self) -> Float[Tensor, ""]:
        """KL[q(Ω) ‖ p(Ω | ℓ)] = KL[q(ε) ‖ N(0, 1)] up to constants; 0 where Ω is drawn from its prior."""


class Posterior(ABC):
    """The family of q: masks, or Gaussians."""

    @abstractmethod
    def linear(self, inputs: int, outputs: int, *, generator: Generator = None) -> Linear:
        """A linear layer with such weights, of inputs [B, in]."""

    @abstractmethod
    def linear_per_output(self, inputs: int, outputs: int, *, generator: Generator = None) -> Linear:
        """f_q = h_q w_q with such weights: each output has its own inputs, [B, out, in]."""

    @abstractmethod
    def convolution(
        self, inputs: int, outputs: int, kernel_size: int, *, stride: int = 1, bias: bool = True,
        generator: Generator = None,
    ) -> Convolution:  # fmt: skip
        """A convolution with such filters."""

    @abstractmethod
    def frequencies(self, epsilon: Float[Tensor, "d n_rf"]) -> Frequencies:
        """Ω = Λ^-½ ε inferred, starting at this draw of ε from its prior."""

    @abstractmethod
    def as_masks(self) -> "Masking":
        """The same q as masks in front of layers that are there already; ValueError where it is none of masks."""
