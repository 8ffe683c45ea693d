"""Where every random mask comes from.

A mask is a pure function of (seed, site, sample, row, element): the same seed gives the same masks whatever the batch
size, the chunk of samples, the order of the images or the number of processes, and resuming needs no generator state.
The function is a counter-based hash that gives 64 bits at a time, which is also the cheapest way to draw masks.
"""

import functools
import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Concatenate, NamedTuple, ParamSpec

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from calgp.gp.constants import constant

P = ParamSpec("P")
PLANES = 16  # keep probabilities are rounded to multiples of 2^-16; ½, ¾, … need one, two, … planes of bits


class Noise(NamedTuple):
    """The masks of some samples (functions) at some rows (images).

    `rows` are indices in the data set, not in the batch, so that an image keeps its masks wherever it stands. A tuple,
    since Fabric takes no frozen dataclass through the forward pass of a wrapped module.

    `integrate`: whether the weights of the last layer are integrated in closed form; None: as the model was trained.
    `mean`: masks and Gaussian weights are at their mean: one pass, of which only the latent functions are random.
    `draws`: how many quasi-random draws integrate the latent functions, the same for all rows (prediction); None: as
    many as the likelihood has, keyed like the masks (training).

    `kept` is a memory of draws by site and size: what is there is taken, what is not is drawn and put there. Export
    fills it with one row, and gives it to all.

    >>> one, two = (Noise(0, torch.arange(3), torch.tensor([row])).words(7, 4, shared=False) for row in (5, 6))
    >>> one.shape, bool((one == two).any())  # 3 samples, 1 row, 4 words; another row has others
    (torch.Size([3, 1, 4]), False)
    """

    seed: int
    samples: Int[Tensor, "S"]
    rows: Int[Tensor, "N"]
    kept: dict[tuple[int, int], Tensor] | None = None
    mean: bool = False
    integrate: bool | None = None
    draws: int | None = None

    def words(self, site: int, count: int, *, shared: bool) -> Int[Tensor, "S N_or_1 count"]:
        """64 random bits a word; `shared` leaves the row out of the key: one mask for all images."""
        device = self.rows.device
        rows = torch.zeros_like(self.rows[:1]) if shared else self.rows + 1
        key = _mix(_mix(torch.tensor(self.seed, device=device)) ^ site)
        key = _mix(key + self.samples.to(device) * _STRIDE)  # [S]
        key = _mix(key[:, None] + rows * _STRIDE)  # [S, N]
        return _mix(key[..., None] + torch.arange(count, device=device) * _STRIDE)


def site_key(name: str) -> int:
    """The number that stands for a site's name in the hash."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)


class Site(nn.Module, ABC):
    """A module that draws noise. The first active one that a batch meets turns its N rows into S · N, sample by sample.

    `site` stands for its name in the model (`name_sites`) and is part of the key of its noise.
    """

    site: int | None = None

    @property
    @abstractmethod
    def active(self) -> bool:
        """Whether it draws anything."""

    def key(self, noise: Noise | None) -> int:
        """The site's part of the key; without keyed noise none is needed."""
        if noise is not None and self.site is None:
            raise RuntimeError("This site has no name yet: call calgp.gp.name_sites(model) before using keyed noise.")
        return self.site or 0


def name_sites(module: nn.Module) -> dict[str, Site]:
    """Every place where noise is drawn, by its name in the module; gives each the key of its noise."""
    sites = {name: m for name, m in module.named_modules() if isinstance(m, Site) and m.active}
    for name, site in sites.items():
        if site.site != (key := site_key(name)):  # threads that predict write nothing
            site.site = key
    return sites


def _kept(draw: Callable[Concatenate[Any, int, int, P], Tensor]) -> Callable[Concatenate[Any, int, int, P], Tensor]:
    """Draws by way of the noise's memory, if it has one."""

    @functools.wraps(draw)
    def found(noise: Noise | None, site: int, size: int, *args: P.args, **kwargs: P.kwargs) -> Tensor:
        if noise is None or noise.kept is None:
            return draw(noise, site, size, *args, **kwargs)
        if (site, size) not in noise.kept:
            noise.kept[site, size] = draw(noise, site, size, *args, **kwargs)
        return noise.kept[site, size]

    return found


@_kept
def bernoulli(
    noise: Noise | None, site: int, size: int, *, digits: tuple[bool, ...], rows: int, shared: bool, like: Tensor
) -> Float[Tensor, "S N_or_1 size"]:
    """z ~ Bernoulli(π), in the floating type and on the device of `like`; `digits` are π's (`binary_digits`).

    Without `noise` the bits come from torch's own generator: one sample for each of `rows` rows.
    """
    count = -(-size // 64)
    if noise is None:
        shape = (1, 1 if shared else rows, count * len(digits))
        words = torch.randint(-(2**63), 2**63 - 1, shape, device=like.device)
    else:
        words = noise.words(site, count * len(digits), shared=shared)
    # P(bit) = 0.b₁b₂…b₁₆ in binary: from the last digit to the first, OR with a fair bit maps p to ½ + p/2, AND to p/2.
    bits = torch.zeros_like(words[..., :count])
    for digit, word in zip(digits, words.split(count, -1), strict=True):
        bits = bits.bitwise_or_(word) if digit else bits.bitwise_and_(word)
    bytes_ = bits.contiguous().view(torch.uint8).int()
    return torch.nn.functional.embedding(bytes_, _byte_table(like.device, like.dtype)).flatten(-2)[..., :size]


@_kept
def normal(noise: Noise | None, site: int, size: int, *, rows: int, like: Tensor) -> Float[Tensor, "S N size"]:
    """ε ~ N(0, 1), in the floating type and on the device of `like`: Box–Muller on the halves of a word.

    Without `noise` it comes from torch's own generator: one sample for each of `rows` rows.
    """
    if noise is None:
        return torch.randn(1, rows, size, dtype=like.dtype, device=like.device)
    words = noise.words(site, -(-size // 2), shared=False)
    # uniform in (0, 1): the middles of 2^32 intervals, in double precision, or the tails would end at four deviations
    u, v = ((half & (1 << 32) - 1).double().add(0.5) / 2**32 for half in (words, words >> 32))
    radius, angle = (-2 * u.log()).sqrt(), 2 * math.pi * v
    return torch.cat([radius * angle.cos(), radius * angle.sin()], -1)[..., :size].to(like.dtype)


def quasi_normal(
    noise: Noise, site: int, draws: int, outputs: int, *, like: Tensor
) -> Float[Tensor, "S draws outputs"]:
    """`draws` points that integrate over N(0, I) better than random ones do: scrambled Sobol points.

    Each sample has the next points of one sequence, so that those of all samples together integrate as well as one
    longer sequence. They depend on the seed and the sample alone: all rows share them.
    """
    return _quasi_normal(noise, site, draws * outputs, draws, outputs, like).view(-1, draws, outputs)


@_kept
def _quasi_normal(
    noise: Noise, site: int, size: int, draws: int, outputs: int, like: Tensor
) -> Float[Tensor, "S 1 size"]:
    last = int(noise.samples.max()) + 1
    count = 1 << (draws * last - 1).bit_length()  # a longer sequence begins with a shorter one: few are made
    points = _sobol(count, outputs, noise.seed, like.dtype, like.device)[: draws * last]
    return points.view(last, 1, size)[noise.samples.to(like.device)]


@constant
def _sobol(count: int, outputs: int, seed: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "count out"]:
    points = torch.quasirandom.SobolEngine(outputs, scramble=True, seed=seed).draw(count, dtype=torch.float64)
    return torch.special.ndtri(points.clamp(1e-9, 1 - 1e-9)).to(device, dtype)


def binary_digits(keep: float) -> tuple[bool, ...]:
    """The binary digits of `keep`, last to first, without trailing zeros: as many planes of bits are drawn.

    >>> binary_digits(0.75), binary_digits(0.25)
    ((True, True), (True, False))
    """
    digits = [bool(round(keep * 2**PLANES) >> place & 1) for place in range(PLANES)]
    return tuple(digits[digits.index(True) :])


@constant
def _byte_table(device: torch.device, dtype: torch.dtype) -> Float[Tensor, "256 8"]:
    """Row b holds the eight bits of byte b as numbers: a look-up turns bits into a mask eight at a time."""
    return (torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device) & 1).to(dtype)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


_STRIDE = _signed(0x9E3779B97F4A7C15)
_MULTIPLIERS = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)


def _mix(z: Int[Tensor, "*any"]) -> Int[Tensor, "*any"]:
    """SplitMix64's finaliser (Steele et al. 2014), in the memory of `z`, which must be the caller's own."""
    shifted = torch.empty_like(z)
    for bits, multiplier in ((30, _MULTIPLIERS[0]), (27, _MULTIPLIERS[1]), (31, 1)):
        torch.bitwise_right_shift(z, bits, out=shifted)
        z ^= shifted.bitwise_and_((1 << 64 - bits) - 1)  # torch shifts signed words arithmetically: drop the signs
        if multiplier != 1:
            z *= multiplier
    return z
