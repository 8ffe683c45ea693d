"""The paper's model with the classical posterior: mean-field Gaussians in place of masks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, cast

import torch

from calgp.data import Images
from calgp.gp import UNMASKED, DeepGP, MeanField, Model, RandomFeatureGP, Softmax, Theta
from calgp.methods.base import Method
from calgp.methods.cnn_gp import CnnGp, CnnGpModel, layer_sizes, scale_to_images
from calgp.methods.space import RATES, SIGMA, Axis
from calgp.nets import Backbone, Task
from calgp.options import POSITIVE, check_options, like, option


@dataclass(frozen=True)
class MeanFieldGp(Method):
    """Convolutional features, GP layers by random features; W has a mean-field Gaussian posterior with its exact KL."""

    summary: ClassVar[str] = "CNN+GP, mean-field Gaussian over W instead of masks"
    is_calibrated: ClassVar[bool] = True  # pyright: ignore[reportIncompatibleVariableOverride]

    frequencies: Literal["variational", "sorf", "gaussian", "orthogonal"] = option(
        "sorf", "Ω: inferred, mean-field too; or drawn once, structured (sorf) or not."
    )
    kernel: Literal["arc-cosine-1", "arc-cosine-2", "rbf"] = like(CnnGp, "kernel")
    n_rf: int | None = like(CnnGp, "n_rf")
    ratio: int = like(CnnGp, "ratio")
    depth: int = like(CnnGp, "depth")
    width: int | None = like(CnnGp, "width")
    lengthscale: float | None = like(CnnGp, "lengthscale")
    scale: float | None = like(CnnGp, "scale")
    sigma: float = like(CnnGp, "sigma")
    learn_theta: bool = like(CnnGp, "learn_theta")
    ard: bool = like(CnnGp, "ard")
    filters: bool = option(
        False, "Infer Ψ too, but not the first convolution; else it is a point with the prior N(0, 1)."
    )
    deviation: float = option(0.1, "σ of q(W) and q(Ω) to start with, in units of their priors'.", within=POSITIVE)
    deviation_filters: float = option(0.1, "σ of q(Ψ) to start with.", within=POSITIVE)
    integrate: bool = option(
        True, "Integrate q(W) in closed form, so that one pass predicts; else draw W.",
        since_version="0.1.0", before=False,
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_options(self)

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
        return CnnGpModel(features, DeepGP(layers), Softmax(), integrate=self.integrate)

    def start(self, model: Model, train: Images, *, generator: torch.Generator | None = None) -> None:
        """ℓ of each layer by the features of some training images."""
        if self.lengthscale is None and self.scale is not None:
            scale_to_images(cast(CnnGpModel, model), train, self.scale, generator)

    def _theta(self) -> Theta:
        return Theta(self.lengthscale, self.sigma, self.ard, None, self.learn_theta)
