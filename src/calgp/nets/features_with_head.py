"""A head on features, as a model: for heads and loops of one's own."""

from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from calgp.gp import Latent, Likelihood, Model, Noise, Softmax, name_sites
from calgp.nets.base import Features


class FeaturesWithHead(Model):
    """f(x) = head(c(x | Ψ)): what `Bound` trains and `predict` predicts with.

    Args:
        features: a network that a backbone has built (`calgp.wrap(network).build(task, masking)`).
        head: a RandomFeatureGP, DeepGP, SparseGP or LaplaceGP, or any module with `kl()` that takes features, and
            `noise` if it has sites, and gives f, (mean, variance) of f, or a Latent.
        likelihood: of labels given f; softmax unless given.
    """

    def __init__(self, features: Features, head: nn.Module, *, likelihood: Likelihood | None = None) -> None:
        super().__init__()
        self.features, self.head, self.keyed = features, head, bool(name_sites(head))
        self.likelihood = Softmax() if likelihood is None else likelihood

    def stem(self, x: Tensor) -> Tensor:
        return self.features.stem(x)

    def sample(self, h: Tensor, noise: Noise | None) -> Latent:
        c = self.features(h, noise)
        f: Any = self.head(c, noise) if self.keyed else self.head(c)
        if isinstance(f, Latent):
            return f.by_sample(h.shape[0])
        parts = [f] if isinstance(f, Tensor) else f
        return Latent(*(part.unflatten(0, (-1, h.shape[0])) for part in parts))

    def kl(self) -> Float[Tensor, ""]:
        return self.features.kl() + self.head.kl()  # pyright: ignore[reportCallIssue]
