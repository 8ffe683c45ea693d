"""What every convolutional network is to the rest: c(x | Ψ) in two halves, and what its filters cost."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from calgp.data import Images
from calgp.gp import Latent, Likelihood, Model, Noise, Posterior, Softmax, bound_filters, convolutions, name_sites
from calgp.options import Interval, options_of

KEPT = Interval(2**-16, 1)  # π of masks, which are drawn by at most 16 binary digits
LARGEST_SIDE = 4096  # pixels that images are padded to
HIDDEN = "Widths of the fully connected layers with which the methods without a GP continue."


@dataclass(frozen=True)
class Task:
    """What is to be learned: images of this shape into so many classes.

    >>> Task(channels=1, height=28, width=28, classes=10).classes
    10
    """

    channels: int
    height: int
    width: int
    classes: int


class Features(nn.Module, ABC):
    """c(x | Ψ), Ψ masked."""

    out_features: int  # d

    @abstractmethod
    def stem(self, x: Float[Tensor, "N C H W"]) -> Tensor:
        """Up to the first mask: what no sample changes."""

    @abstractmethod
    def forward(self, h: Tensor, noise: Noise | None = None) -> Float[Tensor, "SN d"]:
        """From the stem's output to the features."""

    @abstractmethod
    def kl(self) -> Float[Tensor, ""]:
        """KL of q(Ψ), Eq. (8)."""


class ConvFeatures(Features):
    """c(x | Ψ) of which the convolutions alone are inferred."""

    def kl(self) -> Float[Tensor, ""]:
        return torch.stack([each.kl() for each in convolutions(self)]).sum()


class FeaturesModel(Model, ABC):
    """A model of f at the features c(x | Ψ). Its stem, computed once for all samples, is that of the network."""

    def __init__(self, features: Features) -> None:
        super().__init__()
        self.features = features

    def stem(self, x: Tensor) -> Tensor:
        return self.features.stem(x)


class FeaturesWithHead(FeaturesModel):
    """f(x) = head(c(x | Ψ)): what `Bound` trains and `predict` predicts with.

    Args:
        features: a network that a backbone has built (`calgp.wrap(network).build(task, masking)`).
        head: a RandomFeatureGP, DeepGP, SparseGP or LaplaceGP, or any module with `kl()` that takes features, and
            `noise` if it has sites, and gives f, (mean, variance) of f, or a Latent.
        likelihood: of labels given f; softmax unless given.
    """

    def __init__(self, features: Features, head: nn.Module, *, likelihood: Likelihood | None = None) -> None:
        super().__init__(features)
        self.head, self.keyed = head, bool(name_sites(head))
        self.likelihood = Softmax() if likelihood is None else likelihood

    def sample(self, h: Tensor, noise: Noise | None) -> Latent:
        c = self.features(h, noise)
        return Latent.of(self.head(c, noise) if self.keyed else self.head(c)).by_sample(h.shape[0])

    def kl(self) -> Float[Tensor, ""]:
        return self.features.kl() + self.head.kl()  # pyright: ignore[reportCallIssue]


class Backbone(ABC):
    """A frozen description of a network that can build it. Subclasses are frozen dataclasses."""

    summary: ClassVar[str] = "your own network"
    hidden: tuple[int, ...]  # widths of the fully connected layers of methods without a GP
    optimiser: ClassVar[str | None] = "adam"  # of a run that names none; None: that of the network it stands for
    scale_free: ClassVar[bool] = False  # whether batch norm follows every convolution
    inverse_temperature: ClassVar[float] = 1.0  # the mean of what 1/T is believed to be, before a hold-out is seen
    few_features: ClassVar[bool] = False  # tens, where others give thousands

    @property
    def own_label(self) -> str | None:
        """What it is called, where its kind and its options say too much."""
        return None

    def flags(self) -> list[str] | None:
        """The flags of `calgp train` that choose it, where `--backbone` does not."""
        return None

    def stored_text(self) -> str | None:
        """What a run folder must keep of it beside run.json, in network.json; nothing of most."""
        return None

    def recall(self, text: str) -> None:  # noqa: B027
        """Take what `stored_text` gave; ValueError where it is another network's."""

    def choose(self, task: Task, *, mirror: bool = False) -> "Backbone":
        """The network itself, or the one that it stands for where images are of this shape (`Auto`).

        mirror: images and their mirror images mean the same.
        """
        return self

    def as_authors(self) -> "Backbone":
        """As the paper's authors' code has it, where that differs from the paper; itself for most."""
        return self

    def multiplications(self, channels: int) -> float:
        """About how many its convolutions take for an image of 32 × 32 with so many channels."""
        return 1e7

    @abstractmethod
    def build(self, task: Task, posterior: Posterior, *, generator: torch.Generator | None = None) -> Features:
        """The network; `posterior` is the q (masks, or Gaussians) of all convolutions that should have one."""

    def start(self, model: nn.Module, train: Images, *, generator: torch.Generator | None = None) -> None:  # noqa: B027
        """What the training images decide in the network of a model before the first step; nothing for most."""


def canvas(x: Float[Tensor, "N C H W"], size: int) -> Float[Tensor, "N C H2 W2"]:
    """Zeros around images smaller than `size`, as the published experiments do with MNIST (28 to 32); channels last.

    `contiguous(memory_format=channels_last)` leaves images of one channel as they are, both layouts being the same
    memory, and the convolutions then take them, and all that follows, for channels first: half as fast.
    """
    height, width = max(size - x.shape[2], 0), max(size - x.shape[3], 0)
    x = nn.functional.pad(x, (width // 2, width - width // 2, height // 2, height - height // 2))
    return torch.empty_like(x, memory_format=torch.channels_last).copy_(x)


def check_widths(backbone: Backbone, name: str) -> None:
    """Refuse a network without a layer."""
    if not getattr(backbone, name):
        raise options_of(type(backbone))[name].error(())


def bound_spectrum(features: nn.Module, bound: float | None) -> None:
    """Bounds the filters, where the network should; after they have their first values."""
    if bound is not None:
        bound_filters(features, bound)
