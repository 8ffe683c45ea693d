"""The paper's model as a careful user would write it in plain PyTorch, without calgp: what the fast paths race against.

NCHW, ReLU and then pooling, `F.dropout`-like masks by `torch.bernoulli`, the Hadamard transform by butterflies, a loop
of full forward passes for prediction. The same model and the same statistics as calgp's, nothing clever, nothing silly.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def masked(h: Tensor, keep: float = 0.5, *, channel: bool = False) -> Tensor:
    """h · z, z ~ Bernoulli(keep), not rescaled (the paper); one z for each element, or for each channel of an image."""
    shape = (*h.shape[:2], 1, 1) if channel else h.shape
    return h * torch.bernoulli(torch.full(shape, keep, dtype=h.dtype, device=h.device))


def butterfly(x: Tensor) -> Tensor:
    """The ±1 Hadamard transform along the last axis, in log₂ d sums and differences."""
    d, half = x.shape[-1], 1
    while half < d:
        x = x.view(*x.shape[:-1], -1, 2, half) if x.dim() == 2 else x.view(len(x), -1, 2, half)
        x = torch.stack([x[:, :, 0] + x[:, :, 1], x[:, :, 0] - x[:, :, 1]], 2).flatten(1)
        half *= 2
    return x


class LeNet(nn.Module):
    """Table 1's network for MNIST, up to its 4096 features."""

    def __init__(self, *, masks: bool = True, channel: bool = False) -> None:
        super().__init__()
        self.masks, self.channel = masks, channel
        self.conv1 = nn.Conv2d(1, 32, 5, padding=2)
        self.conv2 = nn.Conv2d(32, 64, 5, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        h = F.max_pool2d(F.relu(self.conv1(F.pad(x, (2, 2, 2, 2)))), 2)
        if self.masks:
            h = masked(h, channel=self.channel)
        return F.max_pool2d(F.relu(self.conv2(h)), 2).flatten(1)


class ResNet(nn.Module):
    """Table 1's pre-activation network of 6n + 1 convolutions, up to its 64 features."""

    def __init__(self, n: int = 5, channels: int = 3, *, masks: bool = True) -> None:
        super().__init__()
        self.first, self.first_norm = nn.Conv2d(channels, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        widths = [16] * n + [32] * n + [64] * n
        self.blocks = nn.ModuleList(
            ResidualBlock(before, width, stride=1 if before == width else 2, masks=masks)
            for before, width in zip([16, *widths], widths, strict=False)
        )
        self.last_norm = nn.BatchNorm2d(64)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.first_norm(self.first(x)))
        for block in self.blocks:
            h = block(h)
        return F.relu(self.last_norm(h)).mean((2, 3))


class ResidualBlock(nn.Module):
    def __init__(self, before: int, width: int, *, stride: int, masks: bool) -> None:
        super().__init__()
        self.stride, self.masks, self.widening = stride, masks, width - before
        self.norm1, self.norm2 = nn.BatchNorm2d(before), nn.BatchNorm2d(width)
        self.conv1 = nn.Conv2d(before, width, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(x))
        h = self.conv1(masked(h) if self.masks else h)
        h = F.relu(self.norm2(h))
        h = self.conv2(masked(h) if self.masks else h)
        if self.stride > 1:
            x = F.avg_pool2d(x, self.stride)
        low = self.widening // 2
        return h + F.pad(x, (0, 0, 0, 0, low, self.widening - low))


class GP(nn.Module):
    """One layer by random features of the arc-cosine kernel: SORF by butterflies, or a learned Ω with its own masks."""

    def __init__(self, d: int, n_rf: int, outputs: int, *, sorf: bool) -> None:
        super().__init__()
        self.n_rf, self.padded = n_rf, 1 << (d - 1).bit_length()
        self.sorf = sorf
        if sorf:
            blocks = -(-n_rf // self.padded)
            self.register_buffer("signs", torch.randint(0, 2, (blocks, 3, self.padded)).float() * 2 - 1)
        else:
            self.omega = nn.Parameter(torch.randn(d, n_rf))
        self.weight = nn.Parameter(0.1 * torch.randn(n_rf, outputs))

    def forward(self, c: Tensor) -> Tensor:
        if self.sorf:
            c = F.pad(c, (0, self.padded - c.shape[1]))
            parts = []
            for d1, d2, d3 in self.signs:
                parts.append(butterfly(butterfly(butterfly(c * d3) * d2) * d1) / self.padded)
            projected = torch.cat(parts, 1)[:, : self.n_rf]
        else:
            projected = masked(c) @ self.omega
        phi = math.sqrt(2 / self.n_rf) * F.relu(projected)
        return masked(phi) @ self.weight


class DeepGP(nn.Module):
    def __init__(self, layers: list[GP]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, c: Tensor) -> Tensor:
        f = self.layers[0](c)
        for layer in self.layers[1:]:
            f = layer(torch.cat([f, c], 1))
        return f


class Model(nn.Module):
    """Features and head; `kl` as the paper's Eq. (8), (16) for a keep probability of ½."""

    def __init__(self, features: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.features, self.head = features, head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))

    def kl(self) -> Tensor:
        return sum((0.25 * p.pow(2).sum() for p in self.parameters()), torch.zeros(()))

    @torch.no_grad()
    def predict(self, x: Tensor, samples: int) -> tuple[Tensor, Tensor, Tensor]:
        """Mean probabilities, their variance and the expected entropy: `samples` full passes."""
        probs = torch.stack([F.softmax(self(x), -1) for _ in range(samples)])
        return probs.mean(0), probs.var(0), torch.special.entr(probs).sum(-1).mean(0)


def training_step(model: nn.Module, optimiser: torch.optim.Optimizer, x: Tensor, y: Tensor, n: int) -> None:
    optimiser.zero_grad()
    (F.cross_entropy(model(x), y) + model.kl() / n).backward()
    optimiser.step()
