"""A small, fast network: whitened patches, then convolutions of 3 × 3 with batch norm and GELU."""

import math
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from calgp.data import Images
from calgp.gp import UNMASKED, Convolution, Noise, Posterior, convolutions
from calgp.nets.base import HIDDEN, Backbone, ConvFeatures, Task, bound_spectrum, canvas, check_widths
from calgp.nets.lenet import LeNet
from calgp.nets.resnet import batch_norm
from calgp.nets.standardised import standardisers
from calgp.options import COUNT, Interval, check_options, like, option

PATCH = 2  # side of a whitened patch
SMALLEST = 16  # images are padded to this side at least
WHITENED_IMAGES = 2000  # how many training images the patches are whitened by
FLOOR = 1e-3  # of the variance of a patch: smaller directions are noise and are not blown up


@dataclass(frozen=True)
class Compact(Backbone):
    """Whitened patches of 2 × 2, then stages of two convolutions of 3 × 3 with pooling, and the maximum over the image.

    The whitening is computed from training images at the start and is not trained. Each stage halves the image. Images
    of 64 pixels and more are brought to about 32: their patches do not overlap, and as many further stages of one
    convolution as it takes come first.

    >>> from calgp.gp import Masking
    >>> Compact(widths=(8, 16)).build(Task(3, 32, 32, classes=10), Masking()).out_features
    16
    """

    summary: ClassVar[str] = "small, fast network: whitened patches, batch norm"
    optimiser: ClassVar[str | None] = "muon"
    scale_free: ClassVar[bool] = True
    inverse_temperature: ClassVar[float] = 0.8  # few images many times make it too sure: results/notes/results.md

    widths: tuple[int, ...] = option((64, 128, 256), "Channels of the stages.", within=COUNT)
    entry: int = option(32, "Channels of the further stages of large images.", within=COUNT)
    unmasked: int = option(
        1, "Stages without masks, counted from the image; samples share what they compute.", within=Interval(0, 100)
    )
    mirror: bool = option(
        False, "Predict by the mean features of an image and its mirror image, in twice the time.",
        since_version="0.2.0",
    )  # fmt: skip
    shift: int = option(
        0, "Predict by the mean features of an image and of the image moved by this many pixels, up and left, and down "
        "and right, in three times the time.", within=Interval(0, 100), since_version="0.2.0",
    )  # fmt: skip
    hidden: tuple[int, ...] = option((), HIDDEN, within=COUNT, default_text="none", example="384,192")
    spectral: float | None = like(LeNet, "spectral")

    def __post_init__(self) -> None:
        check_options(self)
        check_widths(self, "widths")

    def build(self, task: Task, posterior: Posterior, *, generator: torch.Generator | None = None) -> "CompactFeatures":
        return CompactFeatures(self, task, posterior, generator)

    def start(self, model: nn.Module, train: Images, *, generator: torch.Generator | None = None) -> None:
        """The whitening, by patches of some training images."""
        for features in (module for module in model.modules() if isinstance(module, CompactFeatures)):
            chosen = torch.randperm(len(train), generator=generator)[:WHITENED_IMAGES].sort().values
            x = train.pixels(chosen)
            for each in standardisers(model):
                x = each.normalised(x)
            features.whitening.fit(canvas(x, PATCH))


class CompactFeatures(ConvFeatures):
    """The network that a `Compact` describes."""

    def __init__(self, spec: Compact, task: Task, posterior: Posterior, generator: torch.Generator | None) -> None:
        super().__init__()
        side = max(task.height, task.width)
        halvings = max(round(math.log2(side / 32)), 0)
        further = max(halvings - 1, 0)
        self.whitening = Whitening(task.channels, stride=PATCH if halvings else 1)
        stages, before = [], self.whitening.out_channels
        for place, width in enumerate((*[spec.entry] * further, *spec.widths)):
            masked = posterior if place >= spec.unmasked + further else UNMASKED
            stages.append(Stage(before, width, masked, generator, convolutions=1 if place < further else 2))
            before = width
        self.stages: list[Stage] = nn.ModuleList(stages)  # pyright: ignore[reportAttributeAccessIssue]
        self.unmasked = min(spec.unmasked + further, len(stages))
        self.out_features, self.mirror, self.shift = before, spec.mirror, spec.shift
        for each in convolutions(self):
            nn.init.kaiming_normal_(each.weight, generator=generator)
        bound_spectrum(self, spec.spectral)

    def stem(self, x: Float[Tensor, "N C H W"]) -> Tensor:
        return torch.cat([self._first_stages(view) for view in self._views(x)], 1)

    def forward(self, h: Tensor, noise: Noise | None = None) -> Float[Tensor, "SN d"]:
        count = 1 if self.training else (3 if self.shift else 1) * (2 if self.mirror else 1)
        return torch.stack([self._last_stages(view, noise) for view in h.chunk(count, 1)]).mean(0)

    def _views(self, x: Float[Tensor, "N C H W"]) -> list[Tensor]:
        """The images of a training step as they are; those to predict also moved and mirrored, as the options say."""
        if self.training:
            return [x]
        views = [x, moved(x, -self.shift), moved(x, self.shift)] if self.shift else [x]
        return views + [view.flip(-1) for view in views] if self.mirror else views

    def _first_stages(self, x: Tensor) -> Tensor:
        h = F.gelu(self.whitening(canvas(x, SMALLEST)))
        for stage in self.stages[: self.unmasked]:
            h = stage(h)
        return h

    def _last_stages(self, h: Tensor, noise: Noise | None) -> Float[Tensor, "SN d"]:
        for stage in self.stages[self.unmasked :]:
            h = stage(h, noise)
        return h.amax((2, 3))


def moved(x: Float[Tensor, "N C H W"], by: int) -> Float[Tensor, "N C H W"]:
    """The images moved down and to the right by so many pixels; those of the border fill what is left.

    >>> moved(torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]]), 1)
    tensor([[[[1., 1.],
              [1., 1.]]]])
    """
    before, after = max(by, 0), max(-by, 0)
    padded = F.pad(x, (before, after, before, after), mode="replicate")
    height, width = x.shape[-2:]
    return padded[..., after : after + height, after : after + width]


class Stage(nn.Module):
    """Convolution, pooling, batch norm and GELU; then, of two, another convolution, batch norm and GELU."""

    def __init__(
        self, before: int, width: int, posterior: Posterior, generator: torch.Generator | None, *, convolutions: int
    ) -> None:
        super().__init__()
        inputs = (before, *[width] * (convolutions - 1))
        self.convolutions: list[Convolution] = nn.ModuleList(  # pyright: ignore[reportAttributeAccessIssue]
            posterior.convolution(each, width, 3, bias=False, generator=generator) for each in inputs
        )
        self.norms: list[nn.BatchNorm2d] = nn.ModuleList(  # pyright: ignore[reportAttributeAccessIssue]
            batch_norm(width) for _ in inputs
        )

    def forward(self, h: Tensor, noise: Noise | None = None) -> Tensor:
        for place, (convolution, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            h = convolution(h, noise)
            h = F.gelu(norm(h if place else F.max_pool2d(h, 2)))
        return h


class Whitening(nn.Module):
    """A convolution whose responses to patches are uncorrelated, each with its negative; the identity until `fit`."""

    filters: Tensor

    def __init__(self, channels: int, *, stride: int = 1) -> None:
        super().__init__()
        size = channels * PATCH**2
        self.channels, self.out_channels, self.stride = channels, 2 * size, stride
        both = torch.cat([torch.eye(size), -torch.eye(size)])
        self.register_buffer("filters", both.view(2 * size, channels, PATCH, PATCH))

    @torch.no_grad()
    def fit(self, x: Float[Tensor, "N C H W"]) -> None:
        """Take the eigenvectors of the covariance of patches, each divided by the root of its eigenvalue."""
        size = self.out_channels // 2
        patches = cast(Tensor, F.unfold(x.double(), PATCH, stride=PATCH)).transpose(1, 2).reshape(-1, size)
        values, vectors = torch.linalg.eigh(torch.cov(patches.T).view(size, size))
        signs = torch.where(vectors.sum(0) < 0, -1.0, 1.0)  # a library may give either
        whitened = (vectors * signs / (values.clamp_min(0) + FLOOR * values.mean() + 1e-12).sqrt()).T
        self.filters.copy_(torch.cat([whitened, -whitened]).view_as(self.filters))

    def forward(self, x: Float[Tensor, "N C H W"]) -> Tensor:
        return F.conv2d(x, self.filters, stride=self.stride)
