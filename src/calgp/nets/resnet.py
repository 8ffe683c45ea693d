"""The deep networks of table 1."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from calgp.gp import UNMASKED, Noise, Posterior, convolutions
from calgp.nets.base import HIDDEN, LARGEST_SIDE, Backbone, ConvFeatures, Task, bound_spectrum, canvas, check_widths
from calgp.nets.lenet import LeNet
from calgp.options import COUNT, Interval, check_options, like, option


@dataclass(frozen=True)
class ResNet(Backbone):
    """A pre-activation residual network for small images: three stages of `n` blocks, 6n + 1 convolutions, 64 features.

    With `batch_moments`, as in the authors' code, what is predicted for an image depends on the images beside it.

    >>> from calgp.gp import Masking
    >>> ResNet(n=1).build(Task(3, 32, 32, classes=10), Masking()).out_features
    64
    """

    summary: ClassVar[str] = "residual network for small images, table 1"
    few_features: ClassVar[bool] = True

    n: int = option(5, "Blocks a stage; the paper has 5 for CIFAR-10 and 25 for CIFAR-100.", within=COUNT)
    widths: tuple[int, ...] = option((16, 32, 64), "Channels of the stages.", within=COUNT)
    pad_to: int = option(
        32, "Pad images that are smaller than this with zeros (MNIST, figure 4).", within=Interval(0, LARGEST_SIDE)
    )
    hidden: tuple[int, ...] = option((), HIDDEN, within=COUNT, default_text="none", example="384,192")
    mask_first: bool = like(LeNet, "mask_first")
    spectral: float | None = like(LeNet, "spectral")
    batch_moments: bool = option(
        False, "Normalise by the moments of the batch in prediction too, as the authors' code does."
    )

    def __post_init__(self) -> None:
        check_options(self)
        check_widths(self, "widths")

    def as_authors(self) -> "ResNet":
        return replace(self, batch_moments=True)

    def multiplications(self, channels: int) -> float:
        return sum(2 * self.n * 9 * width**2 * (32 / 2**stage) ** 2 for stage, width in enumerate(self.widths))

    def build(self, task: Task, posterior: Posterior, *, generator: torch.Generator | None = None) -> "ResNetFeatures":
        return ResNetFeatures(self, task, posterior, generator)


class ResNetFeatures(ConvFeatures):
    """The network that a `ResNet` describes. Prediction uses running batch-norm statistics, unless it should not, and
    never changes them.
    """

    def __init__(self, spec: ResNet, task: Task, posterior: Posterior, generator: torch.Generator | None) -> None:
        super().__init__()
        self.spec = spec
        before = spec.widths[0]
        first_posterior = posterior if spec.mask_first else UNMASKED
        self.first = first_posterior.convolution(task.channels, before, 3, bias=False, generator=generator)
        self.first_norm = batch_norm(before)
        self.blocks = nn.ModuleList()
        for stage, width in enumerate(spec.widths):
            for block in range(spec.n):
                stride = 2 if stage and not block else 1
                activated = not (stage or block)  # the stem has just been through batch norm and ReLU
                self.blocks.append(Block(before, width, posterior, generator, stride=stride, activated=activated))
                before = width
        self.last_norm = batch_norm(spec.widths[-1])
        self.out_features = spec.widths[-1]
        for convolution in convolutions(self):
            nn.init.xavier_uniform_(convolution.weight, generator=generator)
        bound_spectrum(self, spec.spectral)
        if spec.batch_moments:
            for norm in (module for module in self.modules() if isinstance(module, nn.BatchNorm2d)):
                norm.track_running_stats = False
                norm.running_mean = norm.running_var = norm.num_batches_tracked = None

    def stem(self, x: Float[Tensor, "N C H W"]) -> Tensor:
        h = canvas(x, self.spec.pad_to)
        return h if self.spec.mask_first else self._first(h, None)

    def forward(self, h: Tensor, noise: Noise | None = None) -> Float[Tensor, "SN d"]:
        if self.spec.mask_first:
            h = self._first(h, noise)
        for block in self.blocks:
            h = block(h, noise)
        return self.last_norm(h).relu_().mean((2, 3))

    def _first(self, h: Tensor, noise: Noise | None) -> Tensor:
        return self.first_norm(self.first(h, noise)).relu_()


class Block(nn.Module):
    """Batch norm, ReLU, masked convolution, twice, beside a shortcut (pooled and padded with zero channels)."""

    def __init__(
        self, before: int, width: int, posterior: Posterior, generator: torch.Generator | None, *, stride: int,
        activated: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        self.stride, self.widening = stride, width - before
        self.norm1 = None if activated else batch_norm(before)
        self.convolution1 = posterior.convolution(before, width, 3, stride=stride, bias=False, generator=generator)
        self.norm2 = batch_norm(width)
        self.convolution2 = posterior.convolution(width, width, 3, bias=False, generator=generator)

    def forward(self, x: Tensor, noise: Noise | None = None) -> Tensor:
        h = x if self.norm1 is None else self.norm1(x).relu_()
        h = self.convolution1(h, noise)
        h = self.convolution2(self.norm2(h).relu_(), noise)
        shortcut = self._shortcut(x)
        if h.shape[0] == shortcut.shape[0]:  # `len` would be a constant in an export
            return h.add_(shortcut)  # in place: a block spends more time in memory than on its convolutions
        return h + shortcut.repeat(h.shape[0] // shortcut.shape[0], 1, 1, 1)  # the first mask has made S · N rows of N

    def _shortcut(self, x: Tensor) -> Tensor:
        if self.stride > 1:
            x = F.avg_pool2d(x, self.stride, ceil_mode=True, count_include_pad=False)
        low = self.widening // 2
        return F.pad(x, (0, 0, 0, 0, low, self.widening - low)) if self.widening else x


def batch_norm(width: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(width, eps=1e-3)
