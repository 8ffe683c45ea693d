"""Images less their mean and divided by their standard deviation, before any network; both are part of the model."""

import functools
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor, nn

from calgp.gp import Noise, Posterior
from calgp.nets.base import Backbone, Features, Task


@dataclass(frozen=True)
class Standardised(Backbone):
    """A network that sees (x − mean) / std of each channel; what is padded around small images is then their mean.

    >>> from calgp.gp import Masking
    >>> from calgp.nets import LeNet
    >>> Standardised(LeNet()).build(Task(1, 28, 28, classes=10), Masking()).out_features
    4096
    """

    network: Backbone

    @property
    def hidden(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.network.hidden

    def build(self, task: Task, posterior: Posterior, *, generator: torch.Generator | None = None) -> Features:
        return StandardisedFeatures(self.network.build(task, posterior, generator=generator), task.channels)


class StandardisedFeatures(Features):
    """The network behind a normalisation that is the identity until it is `fit`ted. Its moments are stored with it."""

    mean: Tensor
    std: Tensor

    def __init__(self, network: Features, channels: int) -> None:
        super().__init__()
        self.network, self.out_features = network, network.out_features
        self.register_buffer("mean", torch.zeros(channels, 1, 1))
        self.register_buffer("std", torch.ones(channels, 1, 1))

    def fit(self, parts: Iterable[UInt8[Tensor, "n C H W"]]) -> None:
        """Take mean and standard deviation of the channels of these images; one that is constant is divided by 1."""
        mean, std = channel_moments(parts)
        self.mean.copy_(mean[:, None, None])
        self.std.copy_(torch.where(std > 0, std, 1)[:, None, None])

    def normalised(self, x: Float[Tensor, "N C H W"]) -> Float[Tensor, "N C H W"]:
        return (x - self.mean) / self.std

    def stem(self, x: Float[Tensor, "N C H W"]) -> Tensor:
        return self.network.stem(self.normalised(x))

    def forward(self, h: Tensor, noise: Noise | None = None) -> Float[Tensor, "SN d"]:
        return self.network(h, noise)

    def kl(self) -> Float[Tensor, ""]:
        return self.network.kl()


def standardisers(model: nn.Module) -> list[StandardisedFeatures]:
    """Where a model normalises its images; empty for one that takes them as they are."""
    return [module for module in model.modules() if isinstance(module, StandardisedFeatures)]


def channel_moments(parts: Iterable[UInt8[Tensor, "n C H W"]]) -> tuple[Float[Tensor, "C"], Float[Tensor, "C"]]:
    """Mean and standard deviation of x / 255 in each channel, from counts of the 256 values: exact, whatever N."""
    counts = functools.reduce(torch.add, map(_counts, parts)).double()
    share, values = counts / counts.sum(1, keepdim=True), torch.arange(256, dtype=torch.float64) / 255
    mean = share @ values
    variance = (share * (values - mean[:, None]).square()).sum(1)
    return mean, variance.sqrt()


def _counts(x: UInt8[Tensor, "*n C H W"]) -> Int64[Tensor, "C 256"]:
    return torch.stack([torch.bincount(channel.flatten(), minlength=256) for channel in x.unbind(-3)])
