"""A single pass on the same random features: W at its mode, with a Gaussian around it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor

from calgp.data import Images
from calgp.data.images import to_unit_interval
from calgp.errors import CalgpError
from calgp.gp import UNMASKED, LaplaceGP, Latent, Model, Noise, RandomFeatureGP, Softmax, Theta, evaluating
from calgp.gp.laplace import constant_one, mean_field_logits, per_class, shared
from calgp.methods.base import Method
from calgp.methods.cnn_gp import CnnGp
from calgp.methods.space import RATES, SIGMA, Axis
from calgp.methods.start import start_features
from calgp.nets import Backbone, Features, FeaturesModel, Task
from calgp.options import COUNT, check_options, like, option

CURVATURES: dict[str, Callable[[Tensor], Tensor]] = {
    "shared": shared,
    "per-class": per_class,
    "gaussian": constant_one,
}
LARGEST = 4 * 2**30  # bytes of precision matrices, in double precision
BATCH = 500


@dataclass(frozen=True)
class CnnLaplace(Method):
    """Convolutional features and random features at their mode; after training, Laplace's Gaussian over W.

    >>> CnnLaplace(kernel="rbf", predictive="mean-field").covariance
    'gaussian'
    """

    summary: ClassVar[str] = "CNN+GP, Laplace's Gaussian over W in a single pass"
    is_calibrated: ClassVar[bool] = True  # pyright: ignore[reportIncompatibleVariableOverride]

    frequencies: Literal["sorf", "gaussian", "orthogonal"] = option("sorf", "Ω, drawn once: structured (sorf) or not.")
    kernel: Literal["arc-cosine-1", "arc-cosine-2", "rbf"] = like(CnnGp, "kernel")
    n_rf: int = option(
        1024, "Frequencies; Σ has as many rows (for rbf twice as many) and costs their square in memory.", within=COUNT
    )
    lengthscale: float | None = like(CnnGp, "lengthscale")
    scale: float | None = like(CnnGp, "scale")
    sigma: float = like(CnnGp, "sigma")
    learn_theta: bool = like(CnnGp, "learn_theta")
    ard: bool = like(CnnGp, "ard")
    covariance: Literal["shared", "per-class", "gaussian"] = option(
        "gaussian",
        "Σ by the curvature p̂(1 − p̂), one for all classes; p_q(1 − p_q), one a class; or 1, as SNGP's published code.",
    )
    predictive: Literal["draws", "mean-field"] = option(
        "draws", "Draws of the Gaussian f, or one point, f / sqrt(1 + π/8 · v)."
    )

    def __post_init__(self) -> None:
        check_options(self)

    def space(self) -> Mapping[str, Axis]:
        return {"learning_rate": RATES, "method.sigma": SIGMA}

    def build(self, task: Task, backbone: Backbone, *, generator: torch.Generator | None = None) -> "LaplaceModel":
        covariances = task.classes if self.covariance == "per-class" else 1
        rows = self.n_rf * (2 if self.kernel == "rbf" else 1)
        if (size := 8 * covariances * rows**2) > LARGEST:
            raise CalgpError(
                f"covariance={self.covariance!r} with n_rf={self.n_rf} and {task.classes} classes needs "
                f"{size / 2**30:.0f} GB; use covariance='shared' or fewer frequencies."
            )
        features = backbone.build(task, UNMASKED, generator=generator)
        process = RandomFeatureGP(
            features.out_features,
            task.classes,
            n_rf=self.n_rf,
            kernel=self.kernel,
            frequencies=self.frequencies,
            theta=Theta(self.lengthscale, self.sigma, self.ard, None, self.learn_theta),
            masking=UNMASKED,
            generator=generator,
        )
        return LaplaceModel(features, LaplaceGP(process, covariances=covariances), points=self.predictive != "draws")

    def start(self, model: Model, train: Images, *, generator: torch.Generator | None = None) -> None:
        """ℓ by the features of some training images."""
        if self.lengthscale is None and self.scale is not None:
            model = cast(LaplaceModel, model)
            c, _ = start_features(model, train, generator)
            model.gp.process.scale_to(c, self.scale)

    def finish(self, model: Model, train: Images) -> None:
        model, parameter = cast(LaplaceModel, model), next(model.parameters())
        pixels = (to_unit_interval(x).to(parameter) for _, x in train.read(train.parts(BATCH)))
        with evaluating(model), torch.no_grad():
            model.gp.fit((model.features(model.stem(x)) for x in pixels), CURVATURES[self.covariance])


class LaplaceModel(FeaturesModel):
    """f(x) = GP(c(x | Ψ)): a point while it is trained, a Gaussian afterwards."""

    def __init__(self, features: Features, gp: LaplaceGP, *, points: bool) -> None:
        super().__init__(features)
        self.gp, self.likelihood, self.points = gp, Softmax(), points

    def sample(self, h: Tensor, noise: Noise | None) -> Latent:
        latent = self.gp(self.features(h, noise))
        return mean_field_logits(latent) if self.points else latent

    def kl(self) -> Float[Tensor, ""]:
        return self.features.kl() + self.gp.kl()
