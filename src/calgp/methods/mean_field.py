"""The paper's model with the classical posterior: mean-field Gaussians in place of masks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from calgp.gp import UNMASKED, MeanField, Softmax
from calgp.methods.random_features import CnnGpModel, RandomFeatures
from calgp.methods.space import RATES, SIGMA, Axis
from calgp.nets import Backbone, Task
from calgp.options import POSITIVE, option


@dataclass(frozen=True)
class MeanFieldGp(RandomFeatures):
    """Convolutional features, GP layers by random features; W has a mean-field Gaussian posterior with its exact KL."""

    summary: ClassVar[str] = "CNN+GP, mean-field Gaussian over W instead of masks"
    is_calibrated: ClassVar[bool] = True  # pyright: ignore[reportIncompatibleVariableOverride]

    frequencies: Literal["variational", "sorf", "gaussian", "orthogonal"] = option(
        "sorf", "Ω: inferred, mean-field too; or drawn once, structured (sorf) or not."
    )
    filters: bool = option(
        False, "Infer Ψ too, but not the first convolution; else it is a point with the prior N(0, 1)."
    )
    deviation: float = option(0.1, "σ of q(W) and q(Ω) to start with, in units of their priors'.", within=POSITIVE)
    deviation_filters: float = option(0.1, "σ of q(Ψ) to start with.", within=POSITIVE)
    integrate: bool = option(
        True, "Integrate q(W) in closed form, so that one pass predicts; else draw W.",
        since_version="0.1.0", before=False,
    )  # fmt: skip

    def space(self) -> Mapping[str, Axis]:
        return {"learning_rate": RATES, "method.sigma": SIGMA, "method.deviation": Axis((0.03, 0.1, 0.3), ratio=3.0)}

    def build(self, task: Task, backbone: Backbone, *, generator: torch.Generator | None = None) -> CnnGpModel:
        filters = MeanField(self.deviation_filters) if self.filters else UNMASKED
        features = backbone.build(task, filters, generator=generator)
        posterior = MeanField(self.deviation)
        gp = self.deep_gp(features.out_features, task.classes, posterior, posterior, generator=generator)
        return CnnGpModel(features, gp, Softmax(), integrate=self.integrate)
