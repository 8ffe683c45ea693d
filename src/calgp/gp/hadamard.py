"""The Walsh–Hadamard transform, and products of it with diagonal matrices.

By fht-cpu where that is installed (`calgp[fast]`), else by products with small dense factors.
"""

import sys

import torch
from jaxtyping import Float
from torch import Tensor

from calgp.gp.constants import constant, is_traced

try:
    if sys.platform != "linux":  # elsewhere its OpenMP library may not be loaded beside torch's
        raise ImportError
    from fht_cpu import fht
except ImportError:
    fht = None

ORDERS = (1, 12, 20, 28)  # m of the Hadamard matrices H̃_m ⊗ H̃_2 ⊗ … ⊗ H̃_2
LEAST = 16  # powers of two beside m = 12, 20, 28, and for fht-cpu: smaller ones are faster padded, or by one product
FACTOR = 64  # two products with a 64 × 64 matrix beat twelve butterflies over 4096 numbers: the work stays in the cache
CACHE = 2**22  # bytes that are worked on at a time: they stay in the cache
GRAIN = 2**15  # from so many numbers on, torch multiplies in several threads
WIDTH = 64  # columns of a dense product that is as fast as three transforms by fht-cpu
THREADS = 6  # so many that share torch's products are as fast as one of fht-cpu


def padded_size(d: int) -> int:
    """The next size d' ≥ d: a power of two, or 12, 20 or 28 times a power of two from 16 on.

    >>> padded_size(768), padded_size(1000), padded_size(1025)
    (768, 1024, 1280)
    """
    return min(m * max(1 if m == 1 else LEAST, 1 << (-(-d // m) - 1).bit_length()) for m in ORDERS)


def hadamard_transform(x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
    """H̃ x along the last axis, H̃ the symmetric ±1 Hadamard matrix of size d, a power of two or 12, 20, 28 times one.

    H̃_{m·2^k} = H̃_m ⊗ H̃_2 ⊗ … ⊗ H̃_2: for a power of two, Sylvester's.

    >>> hadamard_transform(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    tensor([10., -2., -4.,  0.])
    """
    return alternating_product(x.reshape(-1, x.shape[-1]), None, None).view(x.shape)


def alternating_product(
    x: Float[Tensor, "rows *blocks d"], *diagonals: Float[Tensor, "..."] | None
) -> Float[Tensor, "rows *blocks d"]:
    """D_k H̃ … D₁ H̃ D₀ x for diagonal matrices, given by their diagonals, broadcast against x (None: the identity).

    Only D₀, which must have the blocks of x, may ask for a gradient.
    """
    if x.device.type != "cpu" or is_traced():
        return _plain(x, *diagonals)
    first = diagonals[0]
    recorded = torch.is_grad_enabled() and (x.requires_grad or (first is not None and first.requires_grad))
    return _InCache.apply(x, *diagonals) if recorded else _in_cache(x, *diagonals)


def has_fast_transform(x: Tensor) -> bool:
    """Whether numbers of this type, at this place, are transformed by fht-cpu.

    It works on one thread: its others would be a second pool beside torch's, each in the way of the other.
    """
    known = fht is not None and x.dtype in (torch.float32, torch.float64)
    return known and x.device.type == "cpu" and torch.get_num_threads() <= THREADS


def dense_width(x: Tensor, size: int) -> int:
    """The number of columns up to which a dense product is faster than three transforms, however many rows x has.

    Measured: transforms by fht-cpu take two to three times as long with a factor of 12, 20 or 28 in them, and those by
    torch four to six times.
    """
    if not has_fast_transform(x):
        return 6 * WIDTH
    return (WIDTH if size & (size - 1) == 0 else 3 * WIDTH) * torch.get_num_threads()


def _plain(x: Tensor, first: Tensor | None, *others: Tensor | None) -> Tensor:
    d = x.shape[-1]
    x = x if first is None else x * first
    for diagonal in others:
        for factor, after in _factors(d):
            matrix = _hadamard_matrix(factor, x.dtype, x.device)
            x = x.unflatten(-1, (-1, factor)) @ matrix if after == 1 else matrix @ x.unflatten(-1, (-1, factor, after))
            x = x.reshape(*x.shape[: -2 if after == 1 else -3], d)
        x = x if diagonal is None else x * diagonal
    return x


class _InCache(torch.autograd.Function):
    """The transpose of the product is the product with the diagonals in reverse order: the backward pass is the same
    function, and nothing but the diagonals is kept for it."""

    @staticmethod
    def forward(ctx, x: Tensor, *diagonals: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, *diagonals)
        return _in_cache(x, *diagonals)

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, first, *others = ctx.saved_tensors
        unused = (None for _ in others)
        if x is None:
            return alternating_product(gradients[0], *reversed(others), first), None, *unused
        to_first = alternating_product(gradients[0], *reversed(others), None)
        return to_first * first, (to_first * x).sum(0), *unused


def _in_cache(x: Tensor, first: Tensor | None, *others: Tensor | None) -> Tensor:
    """`_plain`, on a processor's cache: all transforms of a few rows before the next rows."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    power = _power_of_two(x.shape[-1])
    inside = power if power >= LEAST and has_fast_transform(x) and type(out) is Tensor else 1  # what fht-cpu does
    factors = [(_hadamard_matrix(f, x.dtype, x.device), after) for f, after in _factors(x.shape[-1], inside)]
    # rows at a time, on each thread; beside fht-cpu so few that torch multiplies in one: with several, a multiplication
    # takes ten times as long where it has to wait for a busy core
    row, threads = x.shape[1:].numel(), torch.get_num_threads()
    cached = CACHE * threads // ((2 if factors else 1) * x.element_size())
    size = max(1, (GRAIN - 1 if inside > 1 and threads > 1 else cached) // row)
    buffer = torch.empty_like(out[:size]) if factors else out
    for rows, result in [(x, out)] if len(x) <= size else zip(x.split(size), out.split(size), strict=True):
        now, spare = result, buffer[: len(rows)] if factors else result
        if len(factors) * len(others) % 2:  # to and fro between the two, so as to end in the first
            now, spare = spare, now
        now.copy_(rows) if first is None else torch.mul(rows, first, out=now)
        for diagonal in others:
            if inside > 1:
                fht(now.view(-1, inside).numpy(), num_threads=1)  # pyright: ignore[reportOptionalCall]
            for matrix, after in factors:
                _multiply(matrix, now, spare, after)
                now, spare = spare, now
            if diagonal is not None:
                now *= diagonal
    return out


def _multiply(matrix: Tensor, x: Tensor, out: Tensor, after: int) -> None:
    """(I ⊗ H̃_f ⊗ I_after) x, by one product of matrices."""
    f = len(matrix)
    if after == 1:
        torch.mm(x.view(-1, f), matrix, out=out.view(-1, f))
    else:
        x = x.view(-1, f, after)
        torch.bmm(matrix.expand(len(x), f, f), x, out=out.view(-1, f, after))


def _factors(d: int, after: int = 1) -> list[tuple[int, int]]:
    """Sizes f of the factors of H̃_d = Π (I ⊗ H̃_f ⊗ I_after), from I_after on, each with the product of those behind it.

    >>> _factors(4096), _factors(128), _factors(768), _factors(768, 64)
    ([(64, 1), (64, 64)], [(64, 1), (2, 64)], [(64, 1), (12, 64)], [(12, 64)])
    """
    factors, power = [], _power_of_two(d)
    while after < d:
        rest = d // after
        factor = rest if rest <= FACTOR else min(FACTOR, power // after)
        factors.append((factor, after))
        after *= factor
    return factors


def _power_of_two(d: int) -> int:
    """2^k of d = m · 2^k."""
    odd = d // (d & -d)
    m = 1 if odd == 1 else 4 * odd
    if m not in ORDERS or d % m:
        raise ValueError(f"Invalid size {d}: must be 1, 12, 20 or 28 times a power of two, such as {padded_size(d)}.")
    return d // m


@constant
def _hadamard_matrix(d: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "d d"]:
    """H̃_m ⊗ H̃_{2^k}: Sylvester's H̃_ij = (−1)^(number of ones shared by i and j in binary), and Paley's of order m."""
    power = _power_of_two(d)
    i = torch.arange(power, device=device)
    shared = i[:, None] & i
    parity = sum((shared >> place for place in range(power.bit_length())), torch.zeros_like(shared)) & 1
    return torch.kron(torch.tensor(_paley(d // power), device=device), 1 - 2 * parity).to(dtype)


def _paley(m: int) -> list[list[int]]:
    """A symmetric Hadamard matrix of order 1, 12, 20 (Paley's first construction, q = m − 1) or 28 (second, q = 13).

    With χ(a) = 1 for the squares a ≠ 0 mod q and −1 for the others: the first is χ(a + b) with a border of ones; the
    second [[C + I, C − I], [C − I, −C − I]] with C_ab = χ(a − b), a diagonal of zeros and a border of ones.
    """
    if m == 1:
        return [[1]]
    q = 13 if m == 28 else m - 1
    squares = {a * a % q for a in range(1, q)}
    if m < 28:
        return [[1] * m, *([1, *(1 if (a + b) % q in squares else -1 for b in range(q))] for a in range(q))]
    rows = [[1 if (a - b) % q in squares else -1 for b in range(q)] for a in range(q)]
    plus, minus = (
        [[i, *[1] * q], *([1, *(i if a == b else rows[a][b] for b in range(q))] for a in range(q))] for i in (1, -1)
    )
    return [
        *(one + other for one, other in zip(plus, minus, strict=True)),
        *(other + [-x for x in one] for one, other in zip(plus, minus, strict=True)),
    ]
