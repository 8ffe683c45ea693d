"""The convolutional Gaussian process of van der Wilk et al. 2017: f(x) = Σ_p w_p g(x^[p]), g a GP over patches.

Sums over patches go image by image in parts that fit in a cache, and their derivatives are written out, so that memory
grows with the images and never with the square of their patches.
"""

from collections.abc import Iterator
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from calgp.gp.freezing import Freezable
from calgp.gp.kernels import RBF, Theta
from calgp.gp.sparse import Covariances, Inducing

Channels = Literal["joint", "additive"]
CHANNELS = ("joint", "additive")
PART = 2**19  # covariances at a time: 2 MB in float32, which a cache holds


class InducingPatches(Inducing, Freezable):
    """u = g(Z), Z patches; k_fu(x, z) = Σ_p w_p k_g(x^[p], z), k_ff = Σ_pp' w_p w_p' k_g(x^[p], x^[p']).

    w_p = a_p / P, so that a = 1 makes f the mean of g over the P patches (as in the authors' code).

    Args:
        image: channels, height and width of an image.
        size: M, how many patches.
        patch: their side.
        channels: `joint`, a patch has all colours of its pixels (patch² · C numbers); `additive`, each channel has its
            own patches and weights: f = Σ_c Σ_p w_cp g(x_c^[p]).
        weighted: learn a; else it stays 1, and f does not know where a patch was.
        theta: of k_g, an RBF kernel.
        generator: where the first Z come from: uniform in [0, 1], as pixels are.
    """

    def __init__(
        self,
        image: tuple[int, int, int],
        size: int,
        *,
        patch: int = 5,
        channels: Channels = "joint",
        weighted: bool = True,
        theta: Theta = Theta(learn=True),
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        depth, height, width = image
        if min(size, patch) < 1 or patch > min(height, width) or channels not in CHANNELS:
            raise ValueError(
                f"Invalid {size=}, {patch=}, {channels=}: must fit into {height} × {width}, channels one of "
                f"{', '.join(CHANNELS)}"
            )
        if theta.ard or theta.outputs is not None:
            raise ValueError(f"Invalid {theta}: must have one σ and one ℓ for all patches")
        self.size, self.patch, self.channels = size, patch, channels
        count = (height - patch + 1) * (width - patch + 1) * (depth if channels == "additive" else 1)
        d = patch**2 * (depth if channels == "joint" else 1)
        self.kernel = RBF(d, theta)
        self.points = nn.Parameter(torch.rand(size, d, generator=generator))
        self.weights = nn.Parameter(torch.ones(count), weighted)  # a

    def frozen(self) -> "PatchesAtOnce":
        return PatchesAtOnce(self)

    def prior(self) -> Float[Tensor, "M M"]:
        return self.kernel.covariance(self.points, self.points)

    def forward(self, x: Float[Tensor, "N C H W"]) -> Covariances:
        u, z, w = self.scaled(x)
        return self.covariances(_SumOverPatches.apply(u, z, w), _SumOverPairs.apply(u, w))  # type: ignore[arg-type]

    def scaled(self, x: Float[Tensor, "N C H W"]) -> tuple[Tensor, Tensor, Tensor]:
        """Λ^-½ x^[p], Λ^-½ z and w."""
        lengthscale = self.kernel.lengthscale
        patches = self.patches(x.to(self.points.dtype)) / lengthscale
        return patches, self.points / lengthscale, self.weights / len(self.weights)

    def covariances(self, fu: Float[Tensor, "N M"], ff: Float[Tensor, "N"]) -> Covariances:
        """From the sums of correlations over patches, and over their pairs."""
        variance = self.kernel.sigma.square()
        return Covariances(self.prior(), variance * fu, variance * ff)

    def patches(self, x: Float[Tensor, "N C H W"]) -> Float[Tensor, "N P d"]:
        """x^[p]: all windows of the image, stride 1; with additive channels, those of one channel after the other."""
        channel = x.flatten(0, 1).unsqueeze(1) if self.channels == "additive" else x
        windows = F.unfold(channel, self.patch).mT  # [N or N·C, P, d]
        return windows.reshape(x.shape[0], -1, windows.shape[-1])


class PatchesAtOnce(nn.Module):
    """`InducingPatches` with sums in one piece, which a trace needs: N · P² numbers."""

    def __init__(self, inducing: InducingPatches) -> None:
        super().__init__()
        self.inducing = inducing

    def forward(self, x: Float[Tensor, "N C H W"]) -> Covariances:
        u, z, w = self.inducing.scaled(x)
        return self.inducing.covariances(w @ _correlation(u, z), w @ _correlation(u, u) @ w)


class _SumOverPatches(torch.autograd.Function):
    """Σ_p w_p e(u_p, z), e(u, z) = exp(−½ ‖u − z‖²), for N images, M patches z. The backward pass computes e again."""

    @staticmethod
    def forward(ctx, u: Float[Tensor, "N P d"], z: Float[Tensor, "M d"], w: Float[Tensor, "P"]) -> Float[Tensor, "N M"]:
        ctx.save_for_backward(u, z, w)
        out = u.new_zeros(len(u), len(z))
        for images, rows in _parts(u, len(z)):
            out[images] += w[rows] @ _correlation(u[images, rows], z)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        u, z, w = ctx.saved_tensors
        g = gradients[0].unsqueeze(-1)
        du, dz, dw = torch.empty_like(u), torch.zeros_like(_with_one(z)), torch.zeros_like(w)
        for images, rows in _parts(u, len(z)):
            part, w_part = u[images, rows], w[rows, None]
            e = _correlation(part, z)
            # de = −e (u − z) (du − dz), so all is in  Σ_m g_m e_pm [1, z_m]  and  Σ_p w_p e_pm [1, u_p]
            over_z = e @ (g[images] * _with_one(z))
            over_u = e.mT @ (w_part * _with_one(part))
            dw[rows] += over_z[..., 0].sum(0)
            du[images, rows] = w_part * (over_z[..., 1:] - over_z[..., :1] * part)
            dz += (g[images] * over_u).sum(0)
        return du, dz[:, 1:] - dz[:, :1] * z, dw


class _SumOverPairs(torch.autograd.Function):
    """Σ_pp' w_p w_p' e(u_p, u_p') for N images. One product with e gives the value and all derivatives."""

    @staticmethod
    def forward(ctx, u: Float[Tensor, "N P d"], w: Float[Tensor, "P"]) -> Float[Tensor, "N"]:
        n, count, d = u.shape
        over = u.new_empty(n, count, 1 + d if any(ctx.needs_input_grad) else 1)  # Σ_p' w_p' e_pp' [1, u_p']
        for images, rows in _parts(u, count):
            weighted = (w[:, None] * _with_one(u[images]))[..., : over.shape[-1]]
            over[images, rows] = _correlation(u[images, rows], u[images]) @ weighted
        ctx.save_for_backward(u, w, over)
        return over[..., 0] @ w

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        u, w, over = ctx.saved_tensors
        (g,) = gradients
        # each pair comes twice:  dk/dw_p = 2 Σ_p' w_p' e,  dk/du_p = −2 w_p Σ_p' w_p' e (u_p − u_p')
        du = 2 * g[:, None, None] * w[:, None] * (over[..., 1:] - over[..., :1] * u)
        return du, 2 * g @ over[..., 0]


def _correlation(u: Float[Tensor, "N P d"], v: Float[Tensor, "*N R d"]) -> Float[Tensor, "N P R"]:
    """exp(−½ ‖u − v‖²), the exponent by one product: [u, −½‖u‖², 1] · [v, 1, −½‖v‖²]."""
    centre = v.mean(-2, keepdim=True)  # distances around it lose fewer digits
    u, v = u - centre, v - centre
    left = torch.cat([u, -u.square().sum(-1, keepdim=True) / 2, torch.ones_like(u[..., :1])], -1)
    right = torch.cat([v, torch.ones_like(v[..., :1]), -v.square().sum(-1, keepdim=True) / 2], -1)
    return (left @ right.mT).exp_()


def _with_one(u: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d1"]:
    """[1, u]."""
    return torch.cat([torch.ones_like(u[..., :1]), u], -1)


def _parts(u: Float[Tensor, "N P d"], columns: int) -> Iterator[tuple[slice, slice]]:
    """Images and rows of patches, so many at a time that their covariances with `columns` others are at most PART."""
    n, count, _ = u.shape
    rows = min(count, max(1, PART // columns))
    images = max(1, PART // (rows * columns))
    for first in range(0, n, images):
        for row in range(0, count, rows):
            yield slice(first, min(first + images, n)), slice(row, min(row + rows, count))
