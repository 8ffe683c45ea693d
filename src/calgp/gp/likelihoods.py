"""From latent functions to labels."""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn


class Latent(NamedTuple):
    """What a model knows of f at N inputs: S equally likely points (a network without masks: one)."""

    mean: Float[Tensor, "S N Q"]


class Likelihood(nn.Module, ABC):
    """p(y | f)."""

    @abstractmethod
    def expected_log_prob(self, latent: Latent, y: Int[Tensor, "N"]) -> Float[Tensor, "N"]:
        """E_q log p(y | f): the average over samples that Eq. (9) has inside its sum."""

    @abstractmethod
    def log_probs(self, latent: Latent) -> Float[Tensor, "S N Q"]:
        """log p(y = q | f_s) for each component s; Eq. (10) averages their exponentials."""


class Softmax(Likelihood):
    """p(y = q | f) = exp f_q / Σ exp f."""

    def expected_log_prob(self, latent: Latent, y: Int[Tensor, "N"]) -> Float[Tensor, "N"]:
        index = y.expand(len(latent.mean), -1).unsqueeze(-1)
        return self.log_probs(latent).gather(-1, index).squeeze(-1).mean(0)

    def log_probs(self, latent: Latent) -> Float[Tensor, "S N Q"]:
        # half precision would round a probability of 0.998 to 1
        return latent.mean.to(torch.promote_types(latent.mean.dtype, torch.float32)).log_softmax(-1)
