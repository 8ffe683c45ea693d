"""The Walsh–Hadamard transform, by small dense factors."""

import torch
from jaxtyping import Float
from torch import Tensor

from calgp.gp.constants import constant

FACTOR = 64  # two products with a 64 × 64 matrix beat twelve butterflies over 4096 numbers: the work stays in the cache


def hadamard_transform(x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
    """H̃ x along the last axis, H̃ the ±1 Hadamard matrix (Sylvester's order) of size d, a power of two.

    H̃_{ab} = H̃_a ⊗ H̃_b: reshaped to a × b, x becomes H̃_a x H̃_b. Only factors of at most 64 × 64 ever exist.

    >>> hadamard_transform(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    tensor([10., -2., -4.,  0.])
    """
    d = x.shape[-1]
    if d <= FACTOR:
        return x @ _hadamard_matrix(d, x.dtype, x.device)
    x = x.unflatten(-1, (d // FACTOR, FACTOR)) @ _hadamard_matrix(FACTOR, x.dtype, x.device)
    return hadamard_transform(x.mT).mT.flatten(-2)


@constant
def _hadamard_matrix(d: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "d d"]:
    """H̃_ij = (−1)^(number of ones shared by i and j in binary)."""
    i = torch.arange(d, device=device)
    shared = i[:, None] & i
    parity = sum((shared >> place for place in range(d.bit_length())), torch.zeros_like(shared)) & 1
    return (1 - 2 * parity).to(dtype)
