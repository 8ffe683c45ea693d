"""The shallow networks of table 1."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from calgp.errors import CalgpError
from calgp.gp import UNMASKED, Convolution, Noise, Posterior
from calgp.nets.base import Backbone, Features, Task, bound_spectrum, canvas, check_spectral
from calgp.nets.response_norm import ResponseNorm


@dataclass(frozen=True)
class LeNet(Backbone):
    """Convolutions of 5 × 5, each with ReLU and pooling; images are padded to 32 × 32 if they are smaller.

    channels: filters of each convolution.
    pool: 2 (windows of 2 × 2, MNIST) or 3 (overlapping windows of 3 × 3, CIFAR); the stride is 2.
    normalise: local response normalisation (CIFAR): after the first pooling, before the others.
    mask_first: mask the image too ("for all parameters", as the paper's text has it; its code does not).
    spectral: a bound on the spectral norm of each convolution's filters (SNGP); None means none.
    """

    channels: tuple[int, ...] = (32, 64)
    pool: int = 2
    normalise: bool = False
    hidden: tuple[int, ...] = (1024,)
    mask_first: bool = False
    spectral: float | None = None

    def __post_init__(self) -> None:
        if not self.channels or min(self.channels) < 1 or self.pool not in (2, 3) or min((1, *self.hidden)) < 1:
            raise CalgpError(
                "A LeNet needs at least one convolution, positive widths and pool 2 or 3, not "
                f"channels={self.channels}, hidden={self.hidden}, pool={self.pool}."
            )

        check_spectral(self.spectral)

    def build(self, task: Task, masking: Posterior, *, generator: torch.Generator | None = None) -> "LeNetFeatures":
        return LeNetFeatures(self, task, masking, generator)


class LeNetFeatures(Features):
    """The network that a `LeNet` describes."""

    def __init__(self, spec: LeNet, task: Task, masking: Posterior, generator: torch.Generator | None) -> None:
        super().__init__()
        self.spec = spec
        maskings = [masking if spec.mask_first else UNMASKED] + [masking] * (len(spec.channels) - 1)
        widths = (task.channels, *spec.channels)
        self.convolutions: list[Convolution] = nn.ModuleList(  # pyright: ignore[reportAttributeAccessIssue]
            m.convolution(before, after, 5, generator=generator)
            for before, after, m in zip(widths, widths[1:], maskings, strict=False)
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

    def kl(self) -> Float[Tensor, ""]:
        return torch.stack([convolution.kl() for convolution in self.convolutions]).sum()

    def _first(self, h: Tensor, noise: Noise | None) -> Tensor:
        return self.response_norm(self._pooled(self.convolutions[0](h, noise)).relu())

    def _pooled(self, h: Tensor) -> Tensor:
        # SAME padding: what is lacking, half of it (rounded down) in front
        size = self.spec.pool
        height, width = ((size - 2 + side % 2) // 2 for side in h.shape[-2:])
        return F.max_pool2d(h, size, 2, padding=(height, width), ceil_mode=True)
