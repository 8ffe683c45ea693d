"""GPDNN (Bradshaw et al. 2017): a sparse Gaussian process on the features of a network, trained end to end."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor

from calgp.data import Images
from calgp.gp import (
    LIKELIHOODS,
    InducingPoints,
    Latent,
    Likelihood,
    Masking,
    Model,
    Noise,
    SparseGP,
    Theta,
    make_kernel,
)
from calgp.gp.masks import Granularity
from calgp.methods.base import Method
from calgp.methods.cgp import Cgp
from calgp.methods.cnn_gp import CnnGp
from calgp.methods.space import KEEP, RATES, Axis
from calgp.methods.start import draw_seed, first_features, start_at_labels
from calgp.nets import Backbone, Features, FeaturesModel, Task
from calgp.nets.base import KEPT
from calgp.options import COUNT, POSITIVE, check_options, like, option

START_IMAGES = 2000  # how many training images decide where training starts


@dataclass(frozen=True)
class Gpdnn(Method):
    """Convolutional features, a sparse variational GP with inducing points among them, learned together.

    Inducing points start at the k-means of the features of some training images, and f at a least-squares
    classification of them. Filters without masks and prior are maximum likelihood, as in the original.

    The Gaussian f is integrated by draws: random ones in each of 50 samples of the masks, or, by
    `predict(model, x, passes=1, engine="moments")`, 256 quasi-random ones after one pass with filters at the mean of
    their masks. Without masks the network is computed once in any case, and `engine="moments"` is more exact.

    >>> Gpdnn(inducing=100).inducing
    100
    """

    summary: ClassVar[str] = "CNN+sparse GP on inducing points"

    inducing: int = option(200, "M, how many inducing points.", within=COUNT)
    kernel: Literal["rbf", "arc-cosine-1"] = option("rbf", "Covariance of the GP; rbf is the original's.")
    lengthscale: float | None = option(
        None,
        "ℓ to start with.",
        within=POSITIVE,
        default_text="median distance of the features of training images",
        example=1.0,
    )
    sigma: float = like(CnnGp, "sigma")
    ard: bool = like(CnnGp, "ard")
    likelihood: Literal["softmax", "robust-max"] = like(Cgp, "likelihood")
    keep_filters: float = option(
        1.0, "π, the share of channels that masks keep, of the filters Ψ; 1 (GPDNN) is no masks.", within=KEPT
    )
    granularity: Granularity = like(CnnGp, "granularity")
    inverted: bool = like(CnnGp, "inverted")
    filter_prior: bool | None = option(
        None, "Whether filters have the prior N(0, 1), whose cost is in the bound.",
        default_text="where they have masks", since_version="0.1.0",
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def draws_masks(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.keep_filters < 1

    def in_one_line(self) -> str:
        return self.summary + (", masked filters" if self.draws_masks else "")

    def as_authors(self) -> "Gpdnn":
        return replace(self, keep_filters=0.5) if self.draws_masks else self

    def space(self) -> Mapping[str, Axis]:
        axes = {"learning_rate": RATES, "method.sigma": Axis((0.5, 1.0, 2.0), ratio=2.0)}
        return axes | ({"method.keep_filters": KEEP} if self.draws_masks else {})

    def build(self, task: Task, backbone: Backbone, *, generator: torch.Generator | None = None) -> "GpdnnModel":
        masking = Masking(self.keep_filters, self.granularity, self.inverted)
        features = backbone.build(task, masking, generator=generator)
        d = features.out_features
        points = torch.randn(self.inducing, d, generator=generator)
        theta = Theta(self.lengthscale, self.sigma, self.ard, learn=True)
        inducing = InducingPoints(make_kernel(self.kernel, d, theta), points)
        gp = SparseGP(inducing, task.classes)
        filter_prior = masking.active if self.filter_prior is None else self.filter_prior
        return GpdnnModel(features, gp, LIKELIHOODS[self.likelihood](), filter_prior=filter_prior)

    def start(self, model: Model, train: Images, *, generator: torch.Generator | None = None) -> None:
        """Inducing points by k-means of features, ℓ by their distances, q(v) by least squares on their labels."""
        model = cast(GpdnnModel, model)
        index = torch.randperm(len(train), generator=generator)[:START_IMAGES]
        model.sites()
        noise, inducing = Noise(draw_seed(generator), torch.zeros(1, dtype=torch.long), index), model.gp.inducing
        c = first_features(model, train, index, size=100, noise=noise)
        with torch.no_grad():
            inducing.points.copy_(_centres(c, inducing.size, generator))
            if self.lengthscale is None:
                natural = inducing.kernel.natural_lengthscale(c[:1000])
                if natural > 0:
                    inducing.kernel.log_lengthscale.fill_(natural.log())
        start_at_labels(model.gp, [(c, train.y[index].to(c.device))], len(train.classes))


class GpdnnModel(FeaturesModel):
    """f = GP(c(x | Ψ)): a Gaussian for each draw of the masks, or one where there are none."""

    def __init__(
        self, features: Features, gp: SparseGP[InducingPoints], likelihood: Likelihood, *, filter_prior: bool
    ) -> None:
        super().__init__(features)
        self.gp, self.likelihood, self.filter_prior = gp, likelihood, filter_prior

    def sample(self, h: Tensor, noise: Noise | None) -> Latent:
        mean, variance = (moment.unflatten(0, (-1, h.shape[0])) for moment in self.gp(self.features(h, noise)))
        return Latent(mean, variance)

    def kl(self) -> Float[Tensor, ""]:
        return self.gp.kl() + self.features.kl() if self.filter_prior else self.gp.kl()


def _centres(c: Float[Tensor, "N d"], count: int, generator: torch.Generator | None) -> Float[Tensor, "M d"]:
    """k-means; where there are fewer distinct points than centres, the points and middles between pairs of them."""
    c = c.unique(dim=0)
    if len(c) <= count:
        pairs = torch.randint(len(c), (2, count - len(c)), generator=generator).to(c.device)
        return torch.cat([c, c[pairs].mean(0)])
    from sklearn.cluster import KMeans  # takes a second, and only the start of a training needs it

    means = KMeans(count, n_init=1, max_iter=20, random_state=draw_seed(generator))  # pyright: ignore[reportArgumentType]
    return torch.as_tensor(means.fit(c.cpu().numpy()).cluster_centers_).to(c)
