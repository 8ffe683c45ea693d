"""The Walsh–Hadamard transform, by small dense factors, and products of it with diagonal matrices."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from calgp.gp.constants import constant

FACTOR = 64  # two products with a 64 × 64 matrix beat twelve butterflies over 4096 numbers: the work stays in the cache
CACHE = 2**19  # bytes of numbers that a core works on at a time; there are two such buffers, and they stay in its cache


def hadamard_transform(x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
    """H̃ x along the last axis, H̃ the ±1 Hadamard matrix (Sylvester's order) of size d, a power of two.

    H̃_{ab} = H̃_a ⊗ H̃_b: reshaped to a × b, x becomes H̃_a x H̃_b. Only factors of at most 64 × 64 ever exist.

    >>> hadamard_transform(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    tensor([10., -2., -4.,  0.])
    """
    d = x.shape[-1]
    for factor, after in _factors(d):
        matrix = _hadamard_matrix(factor, x.dtype, x.device)
        x = x.unflatten(-1, (-1, factor)) @ matrix if after == 1 else matrix @ x.unflatten(-1, (-1, factor, after))
        x = x.reshape(*x.shape[: -2 if after == 1 else -3], d)
    return x


def alternating_product(
    x: Float[Tensor, "rows *blocks d"], *diagonals: Float[Tensor, "..."] | None
) -> Float[Tensor, "rows *blocks d"]:
    """D_k H̃ … D₁ H̃ D₀ x for diagonal matrices, given by their diagonals, broadcast against x (None: the identity).

    Only D₀, which must have the blocks of x, may ask for a gradient.
    """
    if x.device.type == "cpu" and not torch.compiler.is_compiling():
        return _InCache.apply(x, *diagonals)
    return _plain(x, *diagonals)


def _plain(x: Tensor, first: Tensor | None, *others: Tensor | None) -> Tensor:
    x = x if first is None else x * first
    for diagonal in others:
        x = hadamard_transform(x)
        x = x if diagonal is None else x * diagonal
    return x


class _InCache(torch.autograd.Function):
    """`_plain`, on a processor's cache: all factors of a few rows before the next rows, to and fro between two buffers.

    The transpose of the product is the product with the diagonals in reverse order: the backward pass is the same
    function, and nothing but the diagonals is kept for it.
    """

    @staticmethod
    def forward(x: Tensor, *diagonals: Tensor | None) -> Tensor:
        first, *others = diagonals
        factors = _factors(x.shape[-1])
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        row = x.shape[1:].numel() * x.element_size()
        size = max(1, CACHE * torch.get_num_threads() // row)  # rows at a time
        buffers = x.new_empty(2, *out[:size].shape)
        for rows, result in zip(x.split(size), out.split(size), strict=True):
            now, spare = buffers[:, : len(rows)]
            now.copy_(rows) if first is None else torch.mul(rows, first, out=now)
            for diagonal in others:
                for factor, after in factors:
                    _multiply(_hadamard_matrix(factor, x.dtype, x.device), now, spare, after)
                    now, spare = spare, now
                if diagonal is not None:
                    now *= diagonal
            result.copy_(now)
        return out

    @staticmethod
    def setup_context(ctx, inputs: tuple[Tensor | None, ...], output: Tensor) -> None:
        x, *diagonals = inputs
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, *diagonals)

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, first, *others = ctx.saved_tensors
        unused = (None for _ in others)
        if x is None:
            return _InCache.apply(gradients[0], *reversed(others), first), None, *unused
        to_first = _InCache.apply(gradients[0], *reversed(others), None)
        return to_first * first, (to_first * x).sum(0), *unused

    @staticmethod
    def vmap(info, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        if any(dim is not None for dim in in_dims[1:]):
            raise NotImplementedError("vmap over the diagonals; map over x alone")
        x, *diagonals = args
        x = x.movedim(in_dims[0] or 0, 0)
        return _InCache.apply(x.flatten(0, 1), *diagonals).unflatten(0, x.shape[:2]), 0


def _multiply(matrix: Tensor, x: Tensor, out: Tensor, after: int) -> None:
    """(I ⊗ H̃_f ⊗ I_after) x, by one product of matrices."""
    f = len(matrix)
    if after == 1:
        torch.mm(x.view(-1, f), matrix, out=out.view(-1, f))
    else:
        x = x.view(-1, f, after)
        torch.bmm(matrix.expand(len(x), f, f), x, out=out.view(-1, f, after))


def _factors(d: int) -> list[tuple[int, int]]:
    """Sizes f of the factors of H̃_d, each with the product of those behind it: H̃_d = Π (I ⊗ H̃_f ⊗ I_after).

    >>> _factors(4096), _factors(128)
    ([(64, 1), (64, 64)], [(64, 1), (2, 64)])
    """
    factors, after = [], 1
    while after < d:
        factor = min(FACTOR, d // after)
        factors.append((factor, after))
        after *= factor
    return factors


@constant
def _hadamard_matrix(d: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "d d"]:
    """H̃_ij = (−1)^(number of ones shared by i and j in binary)."""
    i = torch.arange(d, device=device)
    shared = i[:, None] & i
    parity = sum((shared >> place for place in range(d.bit_length())), torch.zeros_like(shared)) & 1
    return (1 - 2 * parity).to(dtype)
