"""Layers with weights made random by masks, Eq. (7), (14): W = diag(z) M, z ~ Bernoulli(π); and their KL, Eq. (8)."""

from abc import ABC
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from calgp.gp.likelihoods import Latent
from calgp.gp.narrow import is_narrow, narrow_convolution
from calgp.gp.noise import Noise, Site, bernoulli, binary_digits
from calgp.gp.posteriors import Convolution, Frequencies, Generator, Linear, Posterior

Granularity = Literal["element", "channel", "shared"]


@dataclass(frozen=True)
class Masking(Posterior):
    """How z is drawn over the inputs of a layer.

    keep: π, the probability that z = 1. With 1 there is no mask.
    granularity: `element`, fresh for every example, pixel and channel (the authors' code); `channel`, one z per input
        channel and example (an independent W for each example); `shared`, one W for the whole batch (the paper's
        equation, a consistent function). On vectors `element` and `channel` are the same.
    inverted: W = diag(z/π) M' instead, so that E[W] = M': for networks whose weights were trained without masks.

    >>> Masking(keep=0.9).keep, Masking().granularity
    (0.9, 'element')
    """

    keep: float = 0.5
    granularity: Granularity = "element"
    inverted: bool = False

    def __post_init__(self) -> None:
        if not 2**-16 <= self.keep <= 1 or self.granularity not in ("element", "channel", "shared"):
            raise ValueError(f"Invalid {self}: keep must lie in (0, 1], granularity must be element, channel or shared")

    @property
    def active(self) -> bool:
        return self.keep < 1 - 2**-17

    @property
    def spread(self) -> float:
        """The variance of an entry of z, or of z/π."""
        keep = self.keep if self.active else 1.0
        return (1 - keep) / keep if self.inverted else keep * (1 - keep)

    def kl(self, weight: Tensor) -> Float[Tensor, ""]:
        """KL[q(W) ‖ N(0, 1)] up to constants, Eq. (8): π/2 ‖M‖², inverted 1/(2π) ‖M'‖², without a mask ½ ‖M‖²."""
        return (1 / self.keep if self.inverted else self.keep) * half_norm(weight)

    def linear(self, inputs: int, outputs: int, *, generator: Generator = None) -> "MaskedLinear":
        return MaskedLinear(inputs, outputs, masking=self, generator=generator)

    def linear_per_output(self, inputs: int, outputs: int, *, generator: Generator = None) -> "MaskedLinearPerOutput":
        return MaskedLinearPerOutput(inputs, outputs, masking=self, generator=generator)

    def convolution(
        self, inputs: int, outputs: int, kernel_size: int, *, stride: int = 1, bias: bool = True,
        generator: Generator = None,
    ) -> "MaskedConv2d":  # fmt: skip
        sizes = (inputs, outputs, kernel_size)
        return MaskedConv2d(*sizes, stride=stride, masking=self, bias=bias, generator=generator)

    def frequencies(self, epsilon: Float[Tensor, "d n_rf"]) -> Frequencies:
        from calgp.gp.frequencies import Variational  # which has masks itself

        return Variational(epsilon, masking=self)

    def as_masks(self) -> "Masking":
        return self


UNMASKED = Masking(keep=1.0)
MOST_OUTPUTS = 32  # of an integrated layer with a covariance: Q (Q + 1) / 2 entries, each a product with m inputs
BUCKETS = 128  # groups of inputs in `_random_sums`: their covariance is off by 1/√128, that of 32 draws by 1/√32
_FAIR = binary_digits(0.5)


def half_norm(weight: Tensor) -> Float[Tensor, ""]:
    """½ ‖M‖²."""
    return _HalfNorm.apply(weight)


class _HalfNorm(torch.autograd.Function):
    """One pass over M in each direction; autograd would make five, which is a quarter of a step with a large Ω."""

    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor) -> Tensor:
        flat = weight.flatten()
        return flat.dot(flat) / 2

    @staticmethod
    def setup_context(ctx, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> Tensor:
        (weight,) = ctx.saved_tensors
        return gradients[0] * weight


class Mask(Site):
    """Multiplies its input by z, Eq. (7), (14). Always on: there is no evaluation mode in which W stops being random.

    The first mask that a batch meets turns its N rows into S · N, sample by sample: what comes before is the same for
    all samples and is computed once.
    """

    def __init__(self, masking: Masking, *, image: bool = False) -> None:
        super().__init__()
        self.masking, self.image = masking, image
        # here and not on each call: torch.compile may take a number such as `keep` for a variable, but not digits
        self.digits = binary_digits(masking.keep) if masking.active else ()

    @property
    def active(self) -> bool:
        return self.masking.active

    def forward(self, h: Tensor, noise: Noise | None = None) -> Tensor:
        if not self.masking.active:
            return h
        if noise is not None and noise.mean:
            return self.mean(h)
        rows = h.shape[0] if noise is None else noise.rows.shape[0]
        return (h.unflatten(0, (-1, rows)) * self.draw(h, noise)).flatten(0, 1)

    def draw(self, h: Tensor, noise: Noise | None = None) -> Tensor:
        """z, or z/π, for the input h: images (drawn channels-last, as the convolutions like it) or vectors [B, …, m].

        The result has the axes S, N (1 if z is shared) and those of h but the first, 1 where z does not vary.
        """
        rows = h.shape[0] if noise is None else noise.rows.shape[0]
        granularity = self.masking.granularity
        pixels = h.shape[2:] if self.image and granularity == "element" else (1,) * (h.dim() - 2)
        channels = h.shape[1] if self.image else h.shape[-1]
        size = channels * torch.Size(pixels).numel()
        shared = granularity == "shared"
        z = bernoulli(noise, self.key(noise), size, digits=self.digits, rows=rows, shared=shared, like=h)
        z = z.unflatten(-1, (*pixels, channels))
        z = z.movedim(-1, 2) if self.image else z
        return z / self.masking.keep if self.masking.inverted else z

    def mean(self, h: Tensor) -> Tensor:
        """E[z] h."""
        return h if self.masking.inverted or not self.active else self.masking.keep * h

    def extra_repr(self) -> str:
        return f"keep={self.masking.keep}, {self.masking.granularity}" + ", inverted" * self.masking.inverted


class MaskedWeights(nn.Module, ABC):
    """What masked layers have: M, the mask of its inputs, and a bias, a point with a N(0, 1) prior."""

    def __init__(
        self, shape: tuple[int, ...], masking: Masking, *, image: bool = False, biases: int = 0, std: float = 0.1,
        generator: Generator = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.mask = Mask(masking, image=image)
        self.weight = nn.Parameter(truncated_normal(shape, std, generator))
        self.bias = nn.Parameter(truncated_normal((biases,), std, generator)) if biases else None

    def kl(self) -> Float[Tensor, ""]:
        """Eq. (8)."""
        cost = self.mask.masking.kl(self.weight)
        return cost if self.bias is None else cost + half_norm(self.bias)


class MaskedLinear(MaskedWeights, Linear):
    """h ↦ h W + b with W = diag(z) M, Eq. (7), M of shape in × out: z switches inputs, which are rows of W.

    >>> MaskedLinear(4, 3)(torch.ones(2, 4)).shape
    torch.Size([2, 3])
    """

    def __init__(
        self, inputs: int, outputs: int, *, masking: Masking = Masking(), bias: bool = False, std: float = 0.1,
        generator: Generator = None,
    ) -> None:  # fmt: skip
        super().__init__((inputs, outputs), masking, biases=outputs * bias, std=std, generator=generator)

    def forward(self, h: Tensor, noise: Noise | None = None) -> Tensor:
        f = self.mask(h, noise) @ self.weight
        return f if self.bias is None else f + self.bias

    def mean(self, h: Float[Tensor, "B in"]) -> Float[Tensor, "B out"]:
        """E f = π h M + b over all masks, given h; inverted h M + b."""
        f = self.mask.mean(h) @ self.weight
        return f if self.bias is None else f + self.bias

    def covariance(self, h: Float[Tensor, "B in"]) -> Float[Tensor, "B out out"]:
        """Cov[f_q, f_r] = π(1 − π) Σ_i h_i² M_iq M_ir over all masks, given h; inverted (1 − π)/π Σ_i …"""
        return self.mask.masking.spread * weighted_gram(h.square(), self.weight)

    def latent(self, h: Float[Tensor, "B in"], noise: Noise | None = None, *, draws: int = 16) -> Latent:
        mean = self.mean(h)
        if not self.mask.active:
            return Latent(mean[None])
        if mean.shape[-1] <= MOST_OUTPUTS:
            return Latent(mean[None], covariance=self.covariance(h)[None])
        delta = self.mask.masking.spread**0.5 * self._random_sums(h, noise, -(-draws // 2))
        mean = mean.repeat(delta.shape[1] // mean.shape[0], 1)  # where these are the first draws of several samples
        return Latent(mean + torch.cat([delta, -delta]))

    def _random_sums(self, h: Float[Tensor, "B in"], noise: Noise | None, count: int) -> Float[Tensor, "count SB out"]:
        """Σ_i ε_i h_i M_i with random signs ε: what has the covariance Σ_i h_i² M_iq M_ir, without its Q² entries.

        To be cheap it is summed in two steps, ε_i = ε'_b(i) s_i: within BUCKETS groups of inputs by signs s that all
        rows share, then over the groups by signs ε' of each row. With as many groups as inputs it is plain.
        """
        rows = h.shape[0] if noise is None else noise.rows.shape[0]
        inputs, outputs = self.weight.shape
        size = -(-inputs // BUCKETS)
        groups = -(-inputs // size)
        key = self.mask.key(noise)
        shared = _signs(noise, key, inputs, rows=rows, shared=True, like=h)  # [S, 1, in]
        own = _signs(noise, key ^ 1, count * groups, rows=rows, shared=False, like=h)
        own = own.expand(-1, rows, -1).unflatten(-1, (count, groups))  # [S, N, count, groups]; exports keep one row
        pad = groups * size - inputs
        signed = F.pad((h.unflatten(0, (-1, rows)) * shared).flatten(0, 1), (0, pad)).unflatten(-1, (groups, size))
        m = F.pad(self.weight, (0, 0, 0, pad)).view(groups, size, outputs)
        sums = torch.bmm(signed.transpose(0, 1), m).transpose(0, 1)  # [S · N, groups, out]
        return torch.bmm(own.flatten(0, 1), sums).transpose(0, 1)


class MaskedLinearPerOutput(MaskedWeights, Linear):
    """f_q = Σ_i z_i h_qi M_iq: each output has its own inputs, and all share the mask."""

    def __init__(self, inputs: int, outputs: int, *, masking: Masking = Masking(), generator: Generator = None) -> None:
        super().__init__((inputs, outputs), masking, generator=generator)

    def forward(self, h: Float[Tensor, "B out in"], noise: Noise | None = None) -> Float[Tensor, "SB out"]:
        return (self.mask(h, noise) * self.weight.mT).sum(-1)

    def latent(self, h: Float[Tensor, "B out in"], noise: Noise | None = None, *, draws: int = 16) -> Latent:
        terms = h * self.weight.mT
        mean = self.mask.mean(terms).sum(-1)
        if not self.mask.active:
            return Latent(mean[None])
        with torch.autocast(h.device.type, enabled=False):  # as in `weighted_gram`
            terms = terms.to(torch.promote_types(terms.dtype, torch.float32))
            return Latent(mean[None], covariance=(self.mask.masking.spread * terms @ terms.mT)[None])


def _signs(
    noise: Noise | None, site: int, size: int, *, rows: int, shared: bool, like: Tensor
) -> Float[Tensor, "S N_or_1 size"]:
    """−1 or 1, equally likely."""
    return 2 * bernoulli(noise, site, size, digits=_FAIR, rows=rows, shared=shared, like=like) - 1


def weighted_gram(weights: Float[Tensor, "B in"], m: Float[Tensor, "in out"]) -> Float[Tensor, "B out out"]:
    """Σ_i w_i M_iq M_ir for each row of weights: one product with all pairs of columns of M.

    In single precision at least: half precision would leave no digit of a small eigenvalue.
    """
    outputs = m.shape[1]
    first, second = torch.triu_indices(outputs, outputs, device=m.device)
    with torch.autocast(m.device.type, enabled=False):
        dtype = torch.promote_types(torch.promote_types(weights.dtype, m.dtype), torch.float32)
        m = m.to(dtype)
        pairs = weights.to(dtype) @ (m[:, first] * m[:, second])  # [B, out (out + 1) / 2]
    place = torch.empty(outputs, outputs, dtype=torch.int64, device=m.device)
    place[first, second] = place[second, first] = torch.arange(len(first), device=m.device)
    return pairs[:, place]


class MaskedConv2d(MaskedWeights, Convolution):
    """Convolution with filters Ψ = diag(z) M, Eq. (7); TensorFlow's SAME padding, as in the published experiments.

    >>> MaskedConv2d(1, 6, 5, masking=Masking(0.8))(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 6, 28, 28])
    """

    def __init__(
        self, inputs: int, outputs: int, kernel_size: int, *, stride: int = 1, masking: Masking = Masking(),
        bias: bool = True, generator: Generator = None,
    ) -> None:  # fmt: skip
        shape = (outputs, inputs, kernel_size, kernel_size)
        super().__init__(shape, masking, image=True, biases=outputs * bias, generator=generator)
        self.kernel_size, self.stride = kernel_size, stride

    def forward(self, h: Float[Tensor, "B C H W"], noise: Noise | None = None) -> Float[Tensor, "SB D H2 W2"]:
        if self._recombines(h, noise):
            return self._recombined(h, noise)
        return same_convolution(self.mask(h, noise), self.weight, self.bias, self.stride)

    def _recombines(self, h: Tensor, noise: Noise | None) -> bool:
        """Whether many samples are predicted from an input that is still the same for all, and z is per channel."""
        if noise is None or noise.mean or not self.mask.active or self.mask.masking.granularity == "element":
            return False
        if torch.compiler.is_compiling():  # products into given memory cannot be traced
            return False
        many = len(h) == len(noise.rows) and 2 * len(noise.samples) >= h.shape[1]
        return many and not torch.is_grad_enabled()

    def _recombined(self, h: Float[Tensor, "N C H W"], noise: Noise | None) -> Float[Tensor, "SN D H2 W2"]:
        """The response is linear in z: b + Σ_c z_c (h_c ∗ M_c). What one convolution costs gives all h_c ∗ M_c, and a
        sample is a product of matrices: with 5 × 5 filters 25 times less work."""
        n, channels = h.shape[:2]
        outputs, k = len(self.weight), self.kernel_size
        windows = same_padding(h, k, self.stride).unfold(2, k, self.stride).unfold(3, k, self.stride)
        height, width = windows.shape[2:4]
        windows = windows.transpose(0, 1).reshape(channels, -1, k * k)  # [C, N · H2 · W2, k²]
        filters = self.weight.permute(1, 2, 3, 0).flatten(1, 2)  # [C, k², D]
        responses = h.new_empty(channels + 1, n * height * width, outputs)  # the last is the bias, whose z is 1
        torch.bmm(windows, filters, out=responses[:-1])
        responses[-1] = 0 if self.bias is None else self.bias
        z = F.pad(self.mask.draw(h, noise).flatten(2), (0, 1), value=1.0)  # [S, N or 1, C + 1]
        f = h.new_empty(len(z), n, height * width * outputs)
        of_images = responses.view(-1, *f.shape[1:]).transpose(0, 1)
        torch.bmm(z.expand(-1, n, -1).transpose(0, 1), of_images, out=f.transpose(0, 1))
        return f.view(-1, height, width, outputs).movedim(-1, 1)  # channels last in memory


def same_convolution(
    h: Float[Tensor, "B C H W"], weight: Float[Tensor, "D C K K"], bias: Float[Tensor, "D"] | None, stride: int
) -> Float[Tensor, "B D H2 W2"]:
    """Convolution with SAME padding."""
    kernel_size = weight.shape[-1]
    if stride == 1 and bias is None and is_narrow(h, weight):
        return narrow_convolution(h, weight)
    if stride == 1 and kernel_size % 2:  # the same on both sides: the convolution pads without a copy
        return F.conv2d(h, weight, bias, padding=kernel_size // 2)
    return F.conv2d(same_padding(h, kernel_size, stride), weight, bias, stride)


def same_padding(h: Float[Tensor, "B C H W"], kernel_size: int, stride: int) -> Float[Tensor, "B C H2 W2"]:
    """Zeros around the image such that windows give ceil(size / stride) outputs; the odd zero goes last.

    >>> same_padding(torch.ones(1, 1, 28, 28), 5, 1).shape
    torch.Size([1, 1, 32, 32])
    """
    pads = []
    for size in (h.shape[3], h.shape[2]):
        total = max((-(-size // stride) - 1) * stride + kernel_size - size, 0)
        pads += [total // 2, total - total // 2]
    return F.pad(h, pads) if any(pads) else h


def truncated_normal(shape: tuple[int, ...], std: float, generator: Generator) -> Tensor:
    """N(0, std²) cut at two standard deviations (TensorFlow's truncated_normal)."""
    return nn.init.trunc_normal_(torch.empty(shape), std=std, a=-2 * std, b=2 * std, generator=generator)
