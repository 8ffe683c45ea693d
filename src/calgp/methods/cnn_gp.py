"""The paper's model: CNN+GP(RF), CNN+GP(SORF), and deep GPs on convolutional features."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor

from calgp.data import Images
from calgp.errors import CalgpError
from calgp.gp import DeepGP, Latent, Masking, Model, Noise, RandomFeatureGP, Softmax, Theta
from calgp.gp.masks import Granularity
from calgp.methods.base import Method
from calgp.methods.shared import start_features
from calgp.methods.space import KEEP, KEEP_OMEGA, RATES, SIGMA, Axis
from calgp.nets import Backbone, Features, Task
from calgp.nets.base import KEPT
from calgp.options import COUNT, POSITIVE, Interval, check_options, option


@dataclass(frozen=True)
class CnnGp(Method):
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
        check_options(self)
        if self.kernel == "arc-cosine-0":
            raise CalgpError(
                "Invalid kernel='arc-cosine-0': it passes no gradient to the features; must be arc-cosine-1 or 2 "
                "or rbf, or calgp.gp.RandomFeatureGP on features that are fixed."
            )
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

    def build(self, task: Task, backbone: Backbone, *, generator: torch.Generator | None = None) -> "CnnGpModel":
        features = backbone.build(task, self._masking(self.keep_filters), generator=generator)
        sizes = layer_sizes(features.out_features, task.classes, depth=self.depth, width=self.width)
        layers = [
            RandomFeatureGP(
                inputs,
                outputs,
                n_rf=self.ratio * inputs if self.n_rf is None else self.n_rf,
                kernel=self.kernel,
                frequencies=self.frequencies,
                theta=self._theta(outputs if layer == self.depth and self.per_output else None),
                masking=self._masking(self.keep),
                masking_omega=self._masking(self.keep_omega),
                generator=generator,
            )
            for layer, (inputs, outputs) in enumerate(sizes, 1)
        ]
        return CnnGpModel(features, DeepGP(layers), Softmax(self.draws, self.alpha), integrate=self.integrate)

    def start(self, model: Model, train: Images, *, generator: torch.Generator | None = None) -> None:
        """ℓ of each layer by the features of some training images."""
        if self.lengthscale is None and self.scale is not None:
            scale_to_images(cast(CnnGpModel, model), train, self.scale, generator)

    def _masking(self, keep: float) -> Masking:
        return Masking(keep, self.granularity, self.inverted)

    def _theta(self, outputs: int | None) -> Theta:
        return Theta(self.lengthscale, self.sigma, self.ard, outputs, self.learn_theta)


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


def scale_to_images(model: CnnGpModel, train: Images, scale: float, generator: torch.Generator | None) -> None:
    """Set ℓ of all layers by the features of some training images, masks at their mean (`DeepGP.scale_to`)."""
    c, noise = start_features(model, model.features, train, generator)
    model.gp.scale_to(c, noise, scale)
