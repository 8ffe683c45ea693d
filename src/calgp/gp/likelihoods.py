"""From latent functions to labels."""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from calgp.gp.noise import Noise, normal, site_key


class Latent(NamedTuple):
    """What a model knows of f at N inputs: a mixture of S equally likely components, points or Gaussians.

    A network with masks: S points; without: one; a sparse GP: one Gaussian; a sparse GP on a masked network: S of them.
    """

    mean: Float[Tensor, "S N Q"]
    variance: Float[Tensor, "S N Q"] | None = None  # None: points

    def points(self, draws: int, noise: Noise | None = None) -> Float[Tensor, "SK N Q"]:
        """The points, or `draws` of each Gaussian (for each sample of the noise, if there is only one component)."""
        if self.variance is None:
            return self.mean
        components, n, outputs = self.mean.shape
        members = max(1, components // (1 if noise is None else len(noise.samples)))  # of an ensemble, one by one
        epsilon = normal(noise, _SITE, members * draws * outputs, rows=n, like=self.mean)
        epsilon = epsilon.unflatten(-1, (members, draws, outputs)).permute(2, 0, 3, 1, 4)
        epsilon = epsilon.flatten(0, 1)  # [S · members, draws, N, Q]
        mean, deviation = self.mean.unsqueeze(1), self.variance.clamp_min(TINY).sqrt().unsqueeze(1)
        return (mean + deviation * epsilon).flatten(0, 1)


_SITE = site_key("likelihood")
TINY = 1e-12  # the smallest variance: rounding may bring one below zero, and the square root has no gradient there


class Likelihood(nn.Module, ABC):
    """p(y | f)."""

    @abstractmethod
    def expected_log_prob(self, latent: Latent, y: Tensor, noise: Noise | None = None) -> Float[Tensor, "N"]:
        """E_q log p(y | f): the average over samples that Eq. (9) has inside its sum."""

    @abstractmethod
    def log_probs(self, latent: Latent, noise: Noise | None = None) -> Float[Tensor, "S N Q"]:
        """log p(y = q | f_s) for each point s of the components; Eq. (10) averages their exponentials."""


class Softmax(Likelihood):
    """p(y = q | f) = exp f_q / Σ exp f. A Gaussian f is integrated by `draws` draws, which cost no network pass."""

    def __init__(self, draws: int = 16) -> None:
        super().__init__()
        self.draws = draws

    def expected_log_prob(self, latent: Latent, y: Int[Tensor, "N"], noise: Noise | None = None) -> Float[Tensor, "N"]:
        log_probs = self.log_probs(latent, noise)
        return log_probs.gather(-1, y.expand(len(log_probs), -1).unsqueeze(-1)).squeeze(-1).mean(0)

    def log_probs(self, latent: Latent, noise: Noise | None = None) -> Float[Tensor, "S N Q"]:
        f = latent.points(self.draws, noise)
        # half precision would round a probability of 0.998 to 1
        return f.to(torch.promote_types(f.dtype, torch.float32)).log_softmax(-1)


class MixedSoftmax(Likelihood):
    """p(y = q | g) = softmax(g A)_q: the classes are learned mixtures of independent functions g, as many as may be."""

    def __init__(
        self, functions: int, classes: int, draws: int = 16, *, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.mixing = nn.Parameter(torch.randn(functions, classes, generator=generator) / functions**0.5)  # A
        self.softmax = Softmax(draws)

    def expected_log_prob(self, latent: Latent, y: Int[Tensor, "N"], noise: Noise | None = None) -> Float[Tensor, "N"]:
        return self.softmax.expected_log_prob(self._mixed(latent, noise), y)

    def log_probs(self, latent: Latent, noise: Noise | None = None) -> Float[Tensor, "S N Q"]:
        return self.softmax.log_probs(self._mixed(latent, noise))

    def _mixed(self, latent: Latent, noise: Noise | None) -> Latent:
        """Points of f; a Gaussian g is drawn before it is mixed, since its mixtures are correlated."""
        return Latent(latent.points(self.softmax.draws, noise) @ self.mixing)
