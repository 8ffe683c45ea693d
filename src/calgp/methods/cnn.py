"""Convolutional networks with their fully connected layers: CNN, CNN+CAL and CNN+MCD."""

import itertools
from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from calgp.gp import UNMASKED, Latent, MaskedLinear, Masking, Noise, Softmax
from calgp.gp.masks import Granularity
from calgp.methods.base import Method
from calgp.methods.cnn_gp import CnnGp
from calgp.methods.space import KEEP, RATES, Axis
from calgp.nets import Backbone, Features, FeaturesModel, Task
from calgp.nets.base import KEPT
from calgp.options import check_options, like, option
from calgp.posthoc import calibration


@dataclass(frozen=True)
class Cnn(Method):
    """CNN: a point estimate, trained by cross-entropy. CNN+CAL (Guo et al. 2017): calibrated at the end of training.

    >>> Cnn(calibrator="temperature").in_one_line()
    'CNN with fully connected layers, a point, and a temperature'
    """

    summary: ClassVar[str] = "CNN with fully connected layers, a point"

    calibrator: str | None = option(
        None,
        "temperature, vector, platt or isotonic, fitted on the hold-out at the end of training.",
        default_text="none",
    )

    def __post_init__(self) -> None:
        if self.calibrator is not None:
            calibration.find(self.calibrator)

    def in_one_line(self) -> str:
        return self.summary + (f", and a {self.calibrator}" if self.calibrator else "")

    def build(self, task: Task, backbone: Backbone, *, generator: torch.Generator | None = None) -> "CnnModel":
        features = backbone.build(task, UNMASKED, generator=generator)
        return CnnModel(features, _fully_connected(features, task, backbone, UNMASKED, generator))


@dataclass(frozen=True)
class CnnMcd(Method):
    """CNN+MCD (Gal & Ghahramani 2016): masks in front of every layer but the first, in training and in prediction.

    It is predicted by 50 samples, as in the original. `predict(model, x, passes=1, engine="moments")` needs one pass:
    filters and hidden layers at the mean of their masks, the masks of the last layer integrated in closed form. With
    more passes filters and hidden layers are drawn in each.

    >>> CnnMcd(keep=0.9).keep
    0.9
    """

    summary: ClassVar[str] = "CNN with Monte Carlo dropout"
    draws_masks: ClassVar[bool] = True  # pyright: ignore[reportIncompatibleVariableOverride]

    keep: float = option(0.5, "π, the share of inputs that masks keep, in the fully connected layers.", within=KEPT)
    keep_filters: float = option(0.5, "π, the share of channels that masks keep, of the filters Ψ.", within=KEPT)
    granularity: Granularity = like(CnnGp, "granularity")
    inverted: bool = like(CnnGp, "inverted")
    integrate: bool = option(
        False, "Integrate the masks of the last layer in closed form, which the original does not.",
        since_version="0.1.0",
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_options(self)

    def space(self) -> Mapping[str, Axis]:
        return {"learning_rate": RATES, "method.keep_filters": KEEP, "method.keep": KEEP}

    def as_authors(self) -> "CnnMcd":
        return replace(self, keep_filters=0.5) if self.keep_filters < 1 else self

    def build(self, task: Task, backbone: Backbone, *, generator: torch.Generator | None = None) -> "CnnMcdModel":
        features = backbone.build(task, self._masking(self.keep_filters), generator=generator)
        layers = _fully_connected(features, task, backbone, self._masking(self.keep), generator)
        return CnnMcdModel(features, layers, integrate=self.integrate)

    def _masking(self, keep: float) -> Masking:
        return Masking(keep, self.granularity, self.inverted)


def _fully_connected(
    features: Features, task: Task, backbone: Backbone, masking: Masking, generator: torch.Generator | None
) -> list[MaskedLinear]:
    """From the features through the backbone's hidden widths to the classes.

    Weights start such that activations keep their scale *behind the masks*: E[z²] = π, or 1/π for inverted ones.
    """
    widths = (features.out_features, *backbone.hidden, task.classes)
    second_moment = 1 / masking.keep if masking.inverted else masking.keep
    return [
        MaskedLinear(
            before, after, masking=masking, bias=True, std=(before * second_moment) ** -0.5, generator=generator
        )
        for before, after in itertools.pairwise(widths)
    ]


class _FullyConnected(FeaturesModel, ABC):
    """f(x): the features, through layers with ReLU between them."""

    def __init__(self, features: Features, layers: list[MaskedLinear], *, integrate: bool = False) -> None:
        super().__init__(features)
        self.likelihood, self.integrate = Softmax(), integrate
        self.layers: list[MaskedLinear] = nn.ModuleList(layers)  # pyright: ignore[reportAttributeAccessIssue]

    def sample(self, h: Tensor, noise: Noise | None) -> Latent:
        f = self.features(h, noise)
        *hidden, last = self.layers
        for layer in hidden:
            f = layer(f, noise).relu()
        if self.integrates(noise):
            return last.latent(f, noise, draws=self.likelihood.points(noise)).by_sample(h.shape[0])
        return Latent(last(f, noise).unflatten(0, (-1, h.shape[0])))


class CnnModel(_FullyConnected):
    """One point and no prior: the bound is the cross-entropy."""

    def kl(self) -> Float[Tensor, ""]:
        return next(self.parameters()).new_zeros(())


class CnnMcdModel(_FullyConnected):
    """W and Ψ with q by masks and p = N(0, 1)."""

    def kl(self) -> Float[Tensor, ""]:
        return torch.stack([self.features.kl(), *(layer.kl() for layer in self.layers)]).sum()
