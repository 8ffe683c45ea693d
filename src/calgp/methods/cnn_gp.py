"""The paper's model: CNN+GP(RF), CNN+GP(SORF), and deep GPs on convolutional features."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from calgp.errors import CalgpError
from calgp.gp import FREQUENCIES, KERNELS, DeepGP, Latent, Masking, Model, Noise, RandomFeatureGP, Softmax, Theta
from calgp.gp.masks import Granularity
from calgp.methods.base import Method
from calgp.methods.shared import check_choices, check_counts
from calgp.methods.space import KEEP, KEEP_OMEGA, RATES, SIGMA, Axis
from calgp.nets import Backbone, Features, Task


@dataclass(frozen=True)
class CnnGp(Method):
    """Convolutional features, GP layers by random features, everything inferred by masks.

    frequencies: variational (Ω inferred: the paper's RF), sorf (structured), gaussian or orthogonal (drawn once).
    kernel: arc-cosine-1 (the paper's), arc-cosine-0, arc-cosine-2, rbf.
    n_rf: frequencies of a layer; None means `ratio` times its inputs.
    depth: GP layers; more than one is a deep GP, with the features fed to each.
    width: functions of a hidden GP layer; None means as many as there are features (the authors' choice).
    lengthscale: ℓ to start with; None means √d, the authors have 1.
    learn_theta: learn σ and ℓ, as far as they are identifiable.
    ard: an ℓ for each feature.
    per_output: an own θ for each class (last layer).
    keep, keep_filters, keep_omega: π for W, Ψ and Ω.
    granularity, inverted: how masks are drawn (calgp.gp.Masking).
    """

    summary: ClassVar[str] = "convolutional features, Gaussian process by random features, all inferred by masks"

    frequencies: Literal["variational", "sorf", "gaussian", "orthogonal"] = "variational"
    kernel: Literal["arc-cosine-0", "arc-cosine-1", "arc-cosine-2", "rbf"] = "arc-cosine-1"
    n_rf: int | None = None
    ratio: int = 1
    depth: int = 1
    width: int | None = None
    lengthscale: float | None = None
    sigma: float = 1.0
    learn_theta: bool = False
    ard: bool = False
    per_output: bool = False
    keep: float = 0.5
    keep_filters: float = 0.5
    keep_omega: float = 0.5
    granularity: Granularity = "element"
    inverted: bool = False

    def __post_init__(self) -> None:
        check_counts(self, "n_rf", "ratio", "width")
        check_counts(self, "depth", most=1000)
        check_choices(self, frequencies=FREQUENCIES, kernel=KERNELS)
        if self.kernel == "arc-cosine-0":
            raise CalgpError(
                "kernel='arc-cosine-0' passes no gradient to the convolutional features, which are trained here; "
                "use arc-cosine-1, arc-cosine-2 or rbf (or calgp.gp.RandomFeatureGP on features that are fixed)."
            )
        if self.per_output and self.frequencies == "variational":
            raise CalgpError("per_output needs frequencies that are not inferred: sorf, gaussian or orthogonal.")
        for keep in (self.keep, self.keep_filters, self.keep_omega):
            self._masking(keep)
        self._theta(None)

    def in_one_line(self) -> str:
        name = {"variational": "RF", "sorf": "SORF"}.get(self.frequencies, self.frequencies)
        layers = f", {self.depth} layers" if self.depth > 1 else ""
        scale = "√d" if self.lengthscale is None else f"{self.lengthscale:g}"
        return f"CNN+GP({name}){layers}, inferred by masks, ℓ = {scale}"

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
        return CnnGpModel(features, DeepGP(layers))

    def _masking(self, keep: float) -> Masking:
        try:
            return Masking(keep, self.granularity, self.inverted)
        except ValueError as error:
            raise CalgpError(f"{error}.") from None

    def _theta(self, outputs: int | None) -> Theta:
        try:
            return Theta(self.lengthscale, self.sigma, self.ard, outputs, self.learn_theta)
        except ValueError as error:
            raise CalgpError(f"{error}.") from None


def layer_sizes(d: int, classes: int, *, depth: int, width: int | None) -> list[tuple[int, int]]:
    """Inputs and outputs of each layer of a deep GP: the features are fed to all; a hidden width of None means d."""
    hidden = d if width is None else width
    return [(d if layer == 0 else hidden + d, hidden if layer < depth - 1 else classes) for layer in range(depth)]


class CnnGpModel(Model):
    """f(x) = GP(c(x | Ψ))."""

    def __init__(self, features: Features, gp: DeepGP) -> None:
        super().__init__()
        self.features, self.gp, self.likelihood = features, gp, Softmax()

    def stem(self, x: Tensor) -> Tensor:
        return self.features.stem(x)

    def sample(self, h: Tensor, noise: Noise | None) -> Latent:
        f = self.gp(self.features(h, noise), noise)
        return Latent(f.unflatten(0, (-1, h.shape[0])))

    def kl(self) -> Float[Tensor, ""]:
        return self.features.kl() + self.gp.kl()
