"""CGP (van der Wilk et al. 2017): a Gaussian process over the patches of an image, without any network."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor

from calgp.data import Images
from calgp.errors import CalgpError
from calgp.gp import LIKELIHOODS, InducingPatches, Latent, Likelihood, Model, Noise, SparseGP, Theta
from calgp.methods.base import Method
from calgp.methods.space import RATES, Axis
from calgp.methods.start import start_at_labels
from calgp.nets import Backbone, Task
from calgp.options import COUNT, POSITIVE, check_options, option

START_PATCHES = 100_000  # of the training images, how many patches the inducing patches are chosen from
START_IMAGES = 1000  # how many training images decide where f starts


@dataclass(frozen=True)
class Cgp(Method):
    """A convolutional Gaussian process: f is a weighted sum of one function's values at all patches of the image.

    There is no network: the backbone of a run is not used. Inducing patches start at distinct training patches, and f
    at a least-squares classification of some training images.
    """

    summary: ClassVar[str] = "GP over the patches of an image, no network"
    uses_network: ClassVar[bool] = False

    inducing: int = option(500, "M, how many inducing patches; the original has 750 on MNIST.", within=COUNT)
    patch: int = option(5, "Side of a patch, in pixels.", within=COUNT)
    channels: Literal["joint", "additive"] = option(
        "joint", "Whether a patch has all colours of its pixels, or each channel its own patches and weights."
    )
    weighted: bool = option(True, "Learn how much a patch counts by its place; else all count the same.")
    lengthscale: float | None = option(
        None, "ℓ to start with.", within=POSITIVE, default_text="median distance of training patches", example=1.0
    )
    sigma: float = option(
        50.0,
        "σ to start with; large, since f is a mean over patches that images mostly share, such as black ones.",
        within=POSITIVE,
    )
    likelihood: Literal["softmax", "robust-max"] = option(
        "softmax", "softmax by draws of f, or robust-max in closed form, as in the original."
    )

    def __post_init__(self) -> None:
        check_options(self)

    def space(self) -> Mapping[str, Axis]:
        return {"learning_rate": RATES, "method.sigma": Axis((12.5, 25.0, 50.0, 100.0), ratio=2.0)}

    def build(self, task: Task, backbone: Backbone, *, generator: torch.Generator | None = None) -> "CgpModel":
        if self.patch > min(task.height, task.width):
            raise CalgpError(
                f"Patches of {self.patch} × {self.patch} do not fit into images of {task.height} × {task.width}; "
                "set method.patch to less."
            )
        inducing = InducingPatches(
            (task.channels, task.height, task.width),
            self.inducing,
            patch=self.patch,
            channels=self.channels,
            weighted=self.weighted,
            theta=Theta(self.lengthscale, self.sigma, learn=True),
            generator=generator,
        )
        return CgpModel(SparseGP(inducing, task.classes), LIKELIHOODS[self.likelihood]())

    def start(self, model: Model, train: Images, *, generator: torch.Generator | None = None) -> None:
        """Inducing patches at distinct training patches, ℓ by their distances, q(v) by least squares on labels."""
        gp = cast(CgpModel, model).gp
        inducing = gp.inducing
        patches = _distinct_patches(inducing, train, generator)
        with torch.no_grad():
            count = min(len(patches), inducing.size)  # the others stay as they were drawn
            inducing.points[:count] = patches[:count].to(inducing.points)
            if self.lengthscale is None and len(patches) > 1:
                inducing.kernel.log_lengthscale.fill_(inducing.kernel.natural_lengthscale(patches[:1000]).log())
        chosen = torch.randperm(len(train), generator=generator)[:START_IMAGES].split(100)
        batches = (
            (train.pixels(index).to(inducing.points), train.y[index].to(inducing.points.device)) for index in chosen
        )
        start_at_labels(gp, batches, len(train.classes))


class CgpModel(Model):
    """f(x) = Σ_p w_p g(x^[p]): one Gaussian, and nothing random before it."""

    def __init__(self, gp: SparseGP[InducingPatches], likelihood: Likelihood) -> None:
        super().__init__()
        self.gp, self.likelihood = gp, likelihood

    def sample(self, h: Tensor, noise: Noise | None) -> Latent:
        mean, variance = self.gp(h)
        return Latent(mean.unsqueeze(0), variance.unsqueeze(0))

    def kl(self) -> Float[Tensor, ""]:
        return self.gp.kl()


def _distinct_patches(
    inducing: InducingPatches, train: Images, generator: torch.Generator | None
) -> Float[Tensor, "N d"]:
    """Patches of some training images in random order, each once, however often it occurs (most of MNIST is black)."""
    per_image = len(inducing.weights)
    chosen = torch.randperm(len(train), generator=generator)[: -(-START_PATCHES // per_image)]
    patches = inducing.patches(train.pixels(chosen)).flatten(0, 1).unique(dim=0)
    return patches[torch.randperm(len(patches), generator=generator)]
