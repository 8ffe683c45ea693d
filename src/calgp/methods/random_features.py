"""Gaussian process layers by random features on convolutional features: what is the same whatever q(W) is."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor

from calgp.data import Images
from calgp.errors import CalgpError
from calgp.gp import DeepGP, Latent, Model, Noise, Posterior, RandomFeatureGP, Softmax, Theta
from calgp.methods.base import Method
from calgp.methods.shared import start_features
from calgp.nets import Backbone, Features, Task
from calgp.options import COUNT, POSITIVE, Interval, check_options, option


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
        sizes = layer_sizes(d, classes, depth=self.depth, width=self.width)
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
            c, noise = start_features(own, own.features, train, generator)
            own.gp.scale_to(c, noise, self.scale)


def layer_sizes(d: int, classes: int, *, depth: int, width: int | None) -> list[tuple[int, int]]:
    """Inputs and outputs of each layer of a deep GP: the features are fed to all; a hidden width of None means d."""
    hidden = d if width is None else width
    return [(d if layer == 0 else hidden + d, hidden if layer < depth - 1 else classes) for layer in range(depth)]


class CnnGpModel(Model):
    """f(x) = GP(c(x | Ψ))."""

    def __init__(self, features: Features, gp: DeepGP, likelihood: Softmax, *, integrate: bool) -> None:
        super().__init__()
        self.features, self.gp, self.likelihood, self.integrate = features, gp, likelihood, integrate

    def stem(self, x: Tensor) -> Tensor:
        return self.features.stem(x)

    def sample(self, h: Tensor, noise: Noise | None) -> Latent:
        c = self.features(h, noise)
        if self.integrates(noise):
            return self.gp.latent(c, noise, draws=self.likelihood.points(noise))
        return Latent(self.gp(c, noise).unflatten(0, (-1, h.shape[0])))

    def kl(self) -> Float[Tensor, ""]:
        return self.features.kl() + self.gp.kl()
