"""The paper's model with the classical posterior: mean-field Gaussians in place of masks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from calgp.gp import FREQUENCIES, KERNELS, UNMASKED, DeepGP, MeanField, RandomFeatureGP, Theta
from calgp.methods.base import Method
from calgp.methods.cnn_gp import CnnGpModel, layer_sizes
from calgp.methods.shared import check_choices, check_counts, refusing
from calgp.methods.space import RATES, SIGMA, Axis
from calgp.nets import Backbone, Task


@dataclass(frozen=True)
class MeanFieldGp(Method):
    """Convolutional features, GP layers by random features; W has a mean-field Gaussian posterior with its exact KL.

    frequencies: sorf, gaussian or orthogonal (Ω drawn once), or variational (Ω inferred, mean-field too).
    filters: whether Ψ (but not the first convolution) is inferred too; otherwise it is a point, with a N(0, 1) prior.
    deviation: σ of W and Ω to start with, in units of their priors'.
    deviation_filters: σ of Ψ to start with.
    kernel, n_rf, ratio, depth, width, lengthscale, sigma, learn_theta, ard: as in `CnnGp`.
    """

    summary: ClassVar[str] = "CNN+GP, mean-field Gaussian over W instead of masks"

    frequencies: Literal["variational", "sorf", "gaussian", "orthogonal"] = "sorf"
    kernel: Literal["arc-cosine-1", "arc-cosine-2", "rbf"] = "arc-cosine-1"
    n_rf: int | None = None
    ratio: int = 1
    depth: int = 1
    width: int | None = None
    lengthscale: float | None = None
    sigma: float = 1.0
    learn_theta: bool = False
    ard: bool = False
    filters: bool = False
    deviation: float = 0.1
    deviation_filters: float = 0.1

    def __post_init__(self) -> None:
        check_counts(self, "n_rf", "ratio", "width")
        check_counts(self, "depth", most=1000)
        check_choices(self, frequencies=FREQUENCIES, kernel=KERNELS[1:])
        with refusing():
            for deviation in (self.deviation, self.deviation_filters):
                MeanField(deviation)
            self._theta()

    def space(self) -> Mapping[str, Axis]:
        return {"learning_rate": RATES, "method.sigma": SIGMA, "method.deviation": Axis((0.03, 0.1, 0.3), ratio=3.0)}

    def build(self, task: Task, backbone: Backbone, *, generator: torch.Generator | None = None) -> CnnGpModel:
        filters = MeanField(self.deviation_filters) if self.filters else UNMASKED
        features = backbone.build(task, filters, generator=generator)
        layers = [
            RandomFeatureGP(
                inputs,
                outputs,
                n_rf=self.ratio * inputs if self.n_rf is None else self.n_rf,
                kernel=self.kernel,
                frequencies=self.frequencies,
                theta=self._theta(),
                masking=MeanField(self.deviation),
                generator=generator,
            )
            for inputs, outputs in layer_sizes(features.out_features, task.classes, depth=self.depth, width=self.width)
        ]
        return CnnGpModel(features, DeepGP(layers))

    def _theta(self) -> Theta:
        return Theta(self.lengthscale, self.sigma, self.ard, None, self.learn_theta)
