"""Gaussian process layers by random features: F = ΦW, alone and stacked."""

import itertools
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from calgp.gp.frequencies import draw_frequencies
from calgp.gp.kernels import RBF, ArcCosine, Kernel, Theta
from calgp.gp.likelihoods import Latent
from calgp.gp.masks import Masking
from calgp.gp.noise import Noise
from calgp.gp.posteriors import Posterior

KERNELS = ("arc-cosine-0", "arc-cosine-1", "arc-cosine-2", "rbf")


class RandomFeatureGP(nn.Module):
    """A Gaussian process layer by random features: f = ΦW of features c, with W_ij ~ N(0, 1) a priori.

    >>> head = RandomFeatureGP(64, 10)
    >>> head(torch.zeros(5, 64)).shape
    torch.Size([5, 10])

    A plain module: put it behind any features, train it with any loop; add `kl() / n` to the loss. Every call draws
    new masks, in training and in evaluation; average the probabilities of several calls, not the outputs.

    Args:
        in_features: d, the width of c.
        out_features: how many latent functions (classes).
        n_rf: how many frequencies; None means d.
        kernel: arc-cosine-0, arc-cosine-1, arc-cosine-2 or rbf.
        frequencies: sorf, gaussian, orthogonal or variational.
        theta: σ and ℓ, fixed unless `theta.learn`.
        masking: what q(W) is: z over its rows (Masking), or a Gaussian (MeanField).
        masking_omega: what q(Ω) is, if Ω is variational; None means as for W.
        generator: where Ω and the first M come from; None means torch's own.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        n_rf: int | None = None,
        kernel: str = "arc-cosine-1",
        frequencies: str = "sorf",
        theta: Theta = Theta(),
        masking: Posterior = Masking(),
        masking_omega: Posterior | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        n_rf = in_features if n_rf is None else n_rf
        if n_rf < 1 or in_features < 1 or out_features < 1:
            raise ValueError(f"Invalid {in_features=}, {out_features=}, {n_rf=}: must be positive")
        if theta.outputs is not None and (theta.outputs != out_features or frequencies == "variational"):
            raise ValueError(
                f"Invalid {theta.outputs=}, {frequencies=}: a θ per output must be of {out_features} outputs, and "
                "frequencies must not be inferred"
            )
        self.in_features, self.out_features, self.n_rf = in_features, out_features, n_rf
        self.kernel = make_kernel(kernel, in_features, theta)
        omega = masking if masking_omega is None else masking_omega
        self.frequencies = draw_frequencies(frequencies, in_features, n_rf, masking=omega, generator=generator)
        linear = masking.linear if theta.outputs is None else masking.linear_per_output
        self.weights = linear(self.kernel.features(n_rf), out_features, generator=generator)

    def forward(self, c: Tensor, noise: Noise | None = None) -> Tensor:
        return self.weights(self.phi(c, noise), noise)  # F = ΦW

    def latent(self, c: Tensor, noise: Noise | None = None, *, draws: int = 16) -> Latent:
        """What is known of f given Ω, with W integrated in closed form, for each sample of what came before."""
        found = self.weights.latent(self.phi(c, noise), noise, draws=draws)
        rows = found.mean.shape[1] if noise is None else noise.rows.shape[0]  # `len` would be a constant in an export
        return found.by_sample(rows)

    def phi(self, c: Tensor, noise: Noise | None = None) -> Tensor:
        """Φ, Eq. (5) or (12)."""
        return self.kernel.expand(self.frequencies(c, self.kernel.lengthscale, noise))

    @torch.no_grad()
    def scale_to(self, c: Float[Tensor, "N d"], scale: float) -> None:
        """Set ℓ such that functions of features such as c have the standard deviation `scale` a priori.

        Features that are all 0, as of images without any content, say nothing: ℓ stays.

        >>> gp = RandomFeatureGP(4, 3)
        >>> gp.scale_to(torch.eye(4), 16.0)
        >>> gp.kernel.lengthscale, gp.kernel.diagonal(torch.eye(4)).sqrt()
        (tensor([0.0625]), tensor([16., 16., 16., 16.]))
        """
        lengthscale = self.kernel.scaled_lengthscale(c, scale)
        if 0 < lengthscale < torch.inf:
            self.kernel.log_lengthscale.fill_(lengthscale.log())

    def kl(self) -> Float[Tensor, ""]:
        """KL of q(W), and of q(Ω) where it is inferred: Eq. (8), (16)."""
        return self.weights.kl() + self.frequencies.kl()


class DeepGP(nn.Module):
    """A deep Gaussian process: layer l takes [F_{l−1}, c], the features being fed forward to every layer.

    >>> deep = DeepGP([RandomFeatureGP(64, 32), RandomFeatureGP(32 + 64, 10)])
    >>> deep(torch.zeros(5, 64)).shape
    torch.Size([5, 10])
    """

    def __init__(self, layers: Sequence[RandomFeatureGP]) -> None:
        super().__init__()
        d = layers[0].in_features
        for before, after in itertools.pairwise(layers):
            if after.in_features != before.out_features + d:
                raise ValueError(
                    f"Invalid in_features={after.in_features}: must be {before.out_features} functions of the layer "
                    f"before and {d} features, {before.out_features + d} in all"
                )
        self.layers: Sequence[RandomFeatureGP] = nn.ModuleList(layers)  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, c: Tensor, noise: Noise | None = None) -> Tensor:
        *hidden, last = self.layers
        return last(self._inputs(hidden, c, noise), noise)

    def latent(self, c: Tensor, noise: Noise | None = None, *, draws: int = 16) -> Latent:
        """What is known of f given the hidden layers, with W of the last layer integrated."""
        *hidden, last = self.layers
        return last.latent(self._inputs(hidden, c, noise), noise, draws=draws)

    @torch.no_grad()
    def scale_to(self, c: Float[Tensor, "N d"], noise: Noise, scale: float) -> None:
        """`RandomFeatureGP.scale_to` of every layer, by the inputs that the features c give it now."""
        layers = list(self.layers)
        for place, layer in enumerate(layers):
            layer.scale_to(self._inputs(layers[:place], c, noise), scale)

    def _inputs(self, hidden: Sequence[RandomFeatureGP], c: Tensor, noise: Noise | None) -> Tensor:
        """What the layer after these takes: their functions, and the features."""
        fed = c
        for layer in hidden:
            f = layer(fed, noise)
            c = c.repeat(f.shape[0] // c.shape[0], 1)  # the first mask has made S · N rows of N
            fed = torch.cat([f, c], -1)
        return fed

    def kl(self) -> Float[Tensor, ""]:
        return torch.stack([layer.kl() for layer in dict.fromkeys(self.layers)]).sum()  # a layer used twice costs once


def make_kernel(name: str, d: int, theta: Theta) -> Kernel:
    """A kernel by name.

    >>> make_kernel("arc-cosine-1", 16, Theta()).order
    1
    """
    if name == "rbf":
        return RBF(d, theta)
    if name in KERNELS:
        return ArcCosine(d, theta, order=int(name[-1]))
    raise ValueError(f"Invalid kernel={name!r}: must be one of {', '.join(KERNELS)}")
