"""The paper's model: CNN+GP(RF), CNN+GP(SORF), and deep GPs on convolutional features, inferred by masks."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from calgp.errors import CalgpError
from calgp.gp import Masking, Softmax
from calgp.gp.masks import Granularity
from calgp.methods.random_features import CnnGpModel, RandomFeatures
from calgp.methods.space import KEEP, KEEP_OMEGA, RATES, SIGMA, Axis
from calgp.nets import Backbone, Task
from calgp.nets.base import KEPT
from calgp.options import COUNT, Interval, option


@dataclass(frozen=True)
class CnnGp(RandomFeatures):
    """Convolutional features, GP layers by random features, everything inferred by masks.

    >>> from calgp.gp import predict
    >>> from calgp.nets import LeNet, Task
    >>> model = CnnGp(frequencies="sorf", n_rf=64).build(Task(1, 28, 28, classes=10), LeNet(channels=(4, 8)))
    >>> predict(model, torch.zeros(2, 1, 28, 28), passes=3).probs.shape
    torch.Size([2, 10])
    """

    summary: ClassVar[str] = "convolutional features, Gaussian process by random features, all inferred by masks"

    default_reason: ClassVar[str] = (
        "calibrated probabilities in one pass of the network, uncertainty about the features too, and nothing to tune: "
        "the scale of its prior comes from the images."
    )
    learning_rate: ClassVar[float] = 6e-3
    draws_masks: ClassVar[bool] = True  # pyright: ignore[reportIncompatibleVariableOverride]

    per_output: bool = option(False, "An own θ for each class, in the last layer.")
    keep: float = option(0.5, "π, the share of random features that masks keep: q(W).", within=KEPT)
    keep_filters: float = option(0.5, "π, the share of channels that masks keep: q(Ψ) of the filters.", within=KEPT)
    keep_omega: float = option(0.5, "π, the share of inputs that masks keep: q(Ω), if inferred.", within=KEPT)
    granularity: Granularity = option(
        "element", "Whether a mask is drawn for each pixel and channel, for each channel, or once for all images."
    )
    inverted: bool = option(False, "Divide what a mask keeps by π, so that the mean stays.")
    integrate: bool = option(
        True, "Integrate the masks of W in closed form, so that one pass predicts; else draw them, as the paper does.",
        since_version="0.1.0", before=False,
    )  # fmt: skip
    draws: int = option(
        16, "Draws of f in a step, where W is integrated; they cost no pass of the network.", within=COUNT,
        since_version="0.1.0",
    )  # fmt: skip
    alpha: float = option(
        0.0, "The bound L_α = (1/α) log E[p(y | f)^α]: 0 is the paper's, 1 the log of the predictive.",
        within=Interval(0, 1), since_version="0.1.0",
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.per_output and self.frequencies == "variational":
            raise CalgpError("Invalid per_output=True: frequencies must not be inferred, such as sorf.")

    @property
    def is_calibrated(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.integrate  # the paper's presets stay as they were published

    def in_one_line(self) -> str:
        name = {"variational": "RF", "sorf": "SORF"}.get(self.frequencies, self.frequencies)
        layers = f", {self.depth} layers" if self.depth > 1 else ""
        how = "masks of W integrated, one pass" if self.integrate else "inferred by masks"
        given = "" if self.lengthscale is None else f", ℓ = {self.lengthscale:g}"
        return f"CNN+GP({name}){layers}, {how}{given}"

    def space(self) -> Mapping[str, Axis]:
        axes = {"learning_rate": RATES, "method.keep_filters": KEEP, "method.keep": KEEP, "method.sigma": SIGMA}
        return axes | ({"method.keep_omega": KEEP_OMEGA} if self.frequencies == "variational" else {})

    def as_authors(self) -> "CnnGp":
        """Φ without √2, Ω unmasked, N_RF = d, ℓ = 1, a mask for every element that keeps half of the filters."""
        return replace(
            self, sigma=math.sqrt(0.5), lengthscale=1.0, keep_omega=1.0, n_rf=None, ratio=1, granularity="element",
            keep_filters=0.5 if self.keep_filters < 1 else self.keep_filters, integrate=False,
        )  # fmt: skip

    def relative_cost(self, *, wide: bool) -> float:
        large = self.frequencies == "variational" and not self.n_rf and wide
        return 3.0 if large else 1.2 * self.depth

    def build(self, task: Task, backbone: Backbone, *, generator: torch.Generator | None = None) -> CnnGpModel:
        features = backbone.build(task, self._masking(self.keep_filters), generator=generator)
        gp = self.deep_gp(
            features.out_features, task.classes, self._masking(self.keep), self._masking(self.keep_omega),
            thetas=task.classes if self.per_output else None, generator=generator,
        )  # fmt: skip
        return CnnGpModel(features, gp, Softmax(self.draws, self.alpha), integrate=self.integrate)

    def _masking(self, keep: float) -> Masking:
        return Masking(keep, self.granularity, self.inverted)
