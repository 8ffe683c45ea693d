"""Local response normalisation (Krizhevsky et al. 2012) between neighbouring channels."""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

RADIUS, ALPHA, BETA, BIAS = 4, 0.001 / 9, 0.75, 1.0  # of the authors' networks for CIFAR-10


class ResponseNorm(nn.Module):
    """x_c (1 + α Σ_{|e − c| ≤ 4} x_e²)^{−3/4}: TensorFlow's lrn(depth_radius=4, bias=1, alpha=0.001/9, beta=0.75).

    torch's LocalResponseNorm(9, 0.001, 0.75, 1) is the same, by pooling in three dimensions; it takes most of the time
    of a LeNet's step on a processor. Here the sum over neighbours is a product with a band matrix (`python -m bench
    step` has both).
    """

    def forward(self, x: Float[Tensor, "N C H W"]) -> Float[Tensor, "N C H W"]:
        if torch.is_grad_enabled() and x.requires_grad:
            return _ResponseNorm.apply(x)  # type: ignore[no-any-return]
        return _normalised(x)[0]


def _normalised(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The normalised x; and with channels last x, d^{−1/2} and d^{−3/4} of d = 1 + α Σ x²."""
    h = x.movedim(1, -1)
    root = ((h * h) @ _band(h) + BIAS).rsqrt()
    power = root * root.sqrt()
    return (h * power).movedim(-1, 1), h, root, power


def _band(h: Tensor) -> Float[Tensor, "C C"]:
    place = torch.arange(h.shape[-1], device=h.device)
    return ((place[:, None] - place).abs() <= RADIUS).to(h.dtype) * ALPHA


class _ResponseNorm(torch.autograd.Function):
    """∂/∂x of Σ g_c x_c d_c^{−β}: g d^{−β} − 2αβ x Σ g x d^{−β−1} over the same neighbours."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        y, *saved = _normalised(x)
        ctx.save_for_backward(*saved)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        h, root, power = ctx.saved_tensors
        direct = gradients[0].movedim(1, -1) * power
        through = (direct * h * root * root) @ _band(h)
        return (direct - 2 * BETA * h * through).movedim(-1, 1)
