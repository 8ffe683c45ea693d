"""The paper's model, CNN+GP(RF), CNN+GP(SORF) and deep GPs on features; W, Ω, Ψ by masks or mean-field Gaussians."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor

from calgp.data import Images
from calgp.errors import CalgpError
from calgp.gp import (
    UNMASKED,
    DeepGP,
    Latent,
    Masking,
    MeanField,
    Model,
    Noise,
    Posterior,
    RandomFeatureGP,
    Softmax,
    Theta,
)
from calgp.gp.masks import Granularity
from calgp.methods.base import Method
from calgp.methods.space import KEEP, KEEP_OMEGA, RATES, SIGMA, Axis
from calgp.methods.start import start_features
from calgp.nets import Backbone, Features, FeaturesModel, Task, Wrapped
from calgp.nets.base import KEPT
from calgp.options import COUNT, POSITIVE, Interval, check_options, like, option


@dataclass(frozen=True)
class RandomFeatures(Method, ABC):
    """The description of the layers: Ω, kernel, sizes and θ; methods add what is inferred, and how."""

    frequencies: Literal["variational", "sorf", "gaussian", "orthogonal"] = option(
        "variational", "Ω: inferred, as the paper's RF; or drawn once, structured (sorf) or not."
    )
    kernel: Literal["arc-cosine-0", "arc-cosine-1", "arc-cosine-2", "rbf"] = option(
        "arc-cosine-1", "Covariance of a GP layer; arc-cosine-1 is the paper's."
    )
    n_rf: int | None = option(
        None, "Frequencies of a layer.", within=COUNT, default_text="ratio times its inputs", example=1024
    )
    ratio: int = option(1, "Frequencies of a layer for each of its inputs, where n_rf is not given.", within=COUNT)
    depth: int = option(
        1, "GP layers; more than one is a deep GP, with the features fed to each.", within=Interval(1, 1000)
    )
    width: int | None = option(
        None, "Functions of a hidden GP layer.", within=COUNT, default_text="as many as features", example=64
    )
    lengthscale: float | None = option(
        None, "ℓ to start with; the authors have 1.", within=POSITIVE, default_text="by scale", example=1.0
    )
    scale: float | None = option(
        16.0, "Standard deviation of the latent functions on training images a priori, which sets ℓ; none: ℓ = √d.",
        within=POSITIVE, since_version="0.2.0", before=None,
    )  # fmt: skip
    sigma: float = option(1.0, "σ to start with.", within=POSITIVE)
    learn_theta: bool = option(False, "Learn σ and ℓ, as far as they are identifiable.")
    ard: bool = option(False, "An ℓ for each feature.")

    def __post_init__(self) -> None:
        check_options(self)
        if self.kernel == "arc-cosine-0":
            raise CalgpError(
                "Invalid kernel='arc-cosine-0': it passes no gradient to the features; must be arc-cosine-1 or 2 "
                "or rbf, or calgp.gp.RandomFeatureGP on features that are fixed."
            )

    @abstractmethod
    def build(self, task: Task, backbone: Backbone, *, generator: torch.Generator | None = None) -> "CnnGpModel": ...

    def with_ratio(self, ratio: int) -> "RandomFeatures":
        return replace(self, n_rf=None, ratio=ratio)

    def deep_gp(
        self,
        d: int,
        classes: int,
        weights: Posterior,
        omega: Posterior,
        *,
        thetas: int | None = None,
        generator: torch.Generator | None,
    ) -> DeepGP:
        """The layers on d features, with such q(W) and q(Ω); `thetas`: of the last layer, one for each class."""
        theta = Theta(self.lengthscale, self.sigma, self.ard, learn=self.learn_theta)
        hidden = d if self.width is None else self.width
        # inputs and outputs of each layer: the features are fed to all
        sizes = [
            (d + hidden * (layer > 0), hidden if layer < self.depth - 1 else classes) for layer in range(self.depth)
        ]
        return DeepGP(
            [
                RandomFeatureGP(
                    inputs,
                    outputs,
                    n_rf=self.ratio * inputs if self.n_rf is None else self.n_rf,
                    kernel=self.kernel,
                    frequencies=self.frequencies,
                    theta=replace(theta, outputs=thetas if layer == self.depth else None),
                    masking=weights,
                    masking_omega=omega,
                    generator=generator,
                )
                for layer, (inputs, outputs) in enumerate(sizes, 1)
            ]
        )

    def start(self, model: Model, train: Images, *, generator: torch.Generator | None = None) -> None:
        """ℓ of each layer by the features of some training images, masks at their mean (`DeepGP.scale_to`)."""
        if self.lengthscale is None and self.scale is not None:
            own = cast(CnnGpModel, model)
            c, noise = start_features(own, train, generator)
            own.gp.scale_to(c, noise, self.scale)


class CnnGpModel(FeaturesModel):
    """f(x) = GP(c(x | Ψ))."""

    def __init__(self, features: Features, gp: DeepGP, likelihood: Softmax, *, integrate: bool) -> None:
        super().__init__(features)
        self.gp, self.likelihood, self.integrate = gp, likelihood, integrate

    def sample(self, h: Tensor, noise: Noise | None) -> Latent:
        c = self.features(h, noise)
        if self.integrates(noise):
            return self.gp.latent(c, noise, draws=self.likelihood.points(noise))
        return Latent(self.gp(c, noise).unflatten(0, (-1, h.shape[0])))

    def kl(self) -> Float[Tensor, ""]:
        return self.features.kl() + self.gp.kl()


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
    granularity: Granularity = like(Wrapped, "granularity")
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
