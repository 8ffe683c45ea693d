"""The gradient of filters of narrow images in bf16: many images side by side, since the kernel takes whole rows."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

NARROW, WIDE = 8, 32  # pixels: rows up to NARROW waste most of a tile of AMX, those from WIDE on next to nothing


def is_narrow(h: Tensor, weight: Tensor) -> bool:
    """Whether the gradient of these filters, 3 × 3, is cheaper with images side by side."""
    suits = h.dtype == torch.bfloat16 and h.device.type == "cpu" and h.shape[-1] <= NARROW
    return suits and weight.shape[-2:] == (3, 3) and torch.is_grad_enabled() and not torch.compiler.is_compiling()


def narrow_convolution(h: Float[Tensor, "B C H W"], weight: Float[Tensor, "D C 3 3"]) -> Float[Tensor, "B D H W"]:
    """The convolution with SAME padding; in bf16, as under autocast."""
    return _NarrowConvolution.apply(h, weight.to(h.dtype))


class _NarrowConvolution(torch.autograd.Function):
    """The gradient of the filters is a sum over all images: a column of zeros between them changes nothing."""

    @staticmethod
    def forward(h: Tensor, weight: Tensor) -> Tensor:
        return F.conv2d(h, weight, padding=1)

    @staticmethod
    def setup_context(ctx, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (h, weight), (gradient,) = ctx.saved_tensors, gradients
        image, filters = ctx.needs_input_grad
        return (
            _backward(gradient, h, weight, [True, False, False])[0] if image else None,
            _backward(side_by_side(gradient), side_by_side(h), weight, [False, True, False])[1] if filters else None,
        )


def _backward(gradient: Tensor, h: Tensor, weight: Tensor, wanted: list[bool]) -> tuple[Tensor | None, ...]:
    one = [1, 1]  # stride, padding, dilation
    return torch.ops.aten.convolution_backward(gradient, h, weight, None, one, one, one, False, [0, 0], 1, wanted)


def side_by_side(h: Float[Tensor, "B C H W"]) -> Float[Tensor, "B2 C H W2"]:
    """Images beside each other, each with a column of zeros after it; channels last in memory.

    >>> side_by_side(torch.ones(12, 1, 3, 3)).shape  # the least divisor of 12 that makes 32 columns
    torch.Size([1, 1, 3, 48])
    """
    n, channels, height, width = h.shape
    together = next(k for k in range(1, n + 1) if n % k == 0 and (k * (width + 1) >= WIDE or k == n))
    rows = h.new_zeros(n // together, height, together, width + 1, channels)
    images = h.permute(0, 2, 3, 1).unflatten(0, (-1, together))  # [B2, images, H, W, C]
    rows[..., :width, :].copy_(images.transpose(1, 2))
    return rows.flatten(2, 3).permute(0, 3, 1, 2)
