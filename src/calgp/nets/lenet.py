"""The shallow networks of table 1."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from calgp.gp import UNMASKED, Convolution, Noise, Posterior
from calgp.nets.base import HIDDEN, Backbone, ConvFeatures, Task, bound_spectrum, canvas, check_widths
from calgp.options import COUNT, POSITIVE, Interval, check_options, option

RADIUS, ALPHA, BETA, BIAS = 4, 0.001 / 9, 0.75, 1.0  # response normalisation in the authors' networks for CIFAR-10


@dataclass(frozen=True)
class LeNet(Backbone):
    """Convolutions of 5 × 5, each with ReLU and pooling; images are padded to 32 × 32 if they are smaller.

    >>> from calgp.gp import Masking
    >>> LeNet().build(Task(1, 28, 28, classes=10), Masking()).out_features
    4096
    """

    summary: ClassVar[str] = "convolutions of 5 × 5 with pooling, table 1"

    channels: tuple[int, ...] = option((32, 64), "Filters of each convolution.", within=COUNT)
    pool: int = option(
        2,
        "Pool windows of 2 × 2 (MNIST), or overlapping ones of 3 × 3 (CIFAR); the stride is 2.",
        within=Interval(2, 3),
    )
    normalise: bool = option(False, "Local response normalisation (CIFAR): after the first pooling, before the others.")
    hidden: tuple[int, ...] = option((1024,), HIDDEN, within=COUNT)
    mask_first: bool = option(
        False, 'Mask the image too: "for all parameters", as the paper\'s text has it; its code does not.'
    )
    spectral: float | None = option(
        None, "Bound on the spectral norm of each convolution's filters, as in SNGP.", within=POSITIVE,
        default_text="none", example=0.95,
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_options(self)
        check_widths(self, "channels")

    def multiplications(self, channels: int) -> float:
        widths, sides = (channels, *self.channels), [32 / 2**place for place in range(len(self.channels))]
        return sum(25 * a * b * side**2 for a, b, side in zip(widths, widths[1:], sides, strict=False))

    def build(self, task: Task, posterior: Posterior, *, generator: torch.Generator | None = None) -> "LeNetFeatures":
        return LeNetFeatures(self, task, posterior, generator)


class LeNetFeatures(ConvFeatures):
    """The network that a `LeNet` describes."""

    def __init__(self, spec: LeNet, task: Task, posterior: Posterior, generator: torch.Generator | None) -> None:
        super().__init__()
        self.spec = spec
        posteriors = [posterior if spec.mask_first else UNMASKED] + [posterior] * (len(spec.channels) - 1)
        widths = (task.channels, *spec.channels)
        self.convolutions: list[Convolution] = nn.ModuleList(  # pyright: ignore[reportAttributeAccessIssue]
            each.convolution(before, after, 5, generator=generator)
            for before, after, each in zip(widths, widths[1:], posteriors, strict=False)
        )
        sides = [max(side, 32) for side in (task.height, task.width)]
        for _ in spec.channels:
            sides = [-(-side // 2) for side in sides]
        self.out_features = spec.channels[-1] * sides[0] * sides[1]
        self.response_norm = ResponseNorm() if spec.normalise else nn.Identity()
        bound_spectrum(self, spec.spectral)

    def stem(self, x: Float[Tensor, "N C H W"]) -> Tensor:
        h = canvas(x, 32)
        return h if self.spec.mask_first else self._first(h, None)

    def forward(self, h: Tensor, noise: Noise | None = None) -> Float[Tensor, "SN d"]:
        if self.spec.mask_first:
            h = self._first(h, noise)
        for convolution in self.convolutions[1:]:
            h = convolution(h, noise)
            # ReLU and max-pooling commute: with nothing between them, pooling first leaves ReLU a quarter of the work
            h = self._pooled(self.response_norm(h.relu())) if self.spec.normalise else self._pooled(h).relu()
        return h.flatten(1)

    def _first(self, h: Tensor, noise: Noise | None) -> Tensor:
        return self.response_norm(self._pooled(self.convolutions[0](h, noise)).relu())

    def _pooled(self, h: Tensor) -> Tensor:
        # SAME padding: what is lacking, half of it (rounded down) in front
        size = self.spec.pool
        height, width = ((size - 2 + side % 2) // 2 for side in h.shape[-2:])
        return F.max_pool2d(h, size, 2, padding=(height, width), ceil_mode=True)


class ResponseNorm(nn.Module):
    """x_c (1 + α Σ_{|e − c| ≤ 4} x_e²)^{−3/4}: TensorFlow's lrn(depth_radius=4, bias=1, alpha=0.001/9, beta=0.75).

    It divides by neighbouring channels (Krizhevsky et al. 2012). torch's LocalResponseNorm(9, 0.001, 0.75, 1) is the
    same, by pooling in three dimensions; it takes most of the time of a LeNet's step on a processor. Here the sum over
    neighbours is a product with a band matrix (`python -m bench step` has both).
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
