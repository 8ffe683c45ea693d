"""Muon: steps of filters that turn all directions by the same amount (Jordan et al. 2024)."""

import torch
from jaxtyping import Float
from torch import Tensor

MOMENTUM = 0.9
TURN = 4.0  # by how many learning rates the filters of a layer turn in a step, relative to their length
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of Newton and Schulz' iteration, as published
ITERATIONS = 3


class Muon(torch.optim.Adam):
    """Adam, but for the filters of convolutions [out, in, height, width], which must be followed by batch norm.

    Batch norm undoes the scale of filters: their direction is all that counts. With O the orthogonalised momentum of
    the filters W of a layer, W turns by a fixed share of its length ‖W‖, W ← W − 4 rate ‖W‖ O / ‖O‖, and keeps its
    length. Adam instead divides each entry by its own size.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        parameters = [(each, group["lr"]) for group in self.param_groups for each in group["params"]]
        filters = [(each, rate) for each, rate in parameters if each.ndim == 4 and each.grad is not None]
        gradients = [each.grad for each, _ in filters]
        for each, rate in filters:
            self._turn(each, rate)
            each.grad = None  # not for Adam
        super().step()
        for (each, _), gradient in zip(filters, gradients, strict=True):
            each.grad = gradient

    def _turn(self, weight: Tensor, rate: float) -> None:
        state, gradient = self.state[weight], weight.grad
        assert gradient is not None  # noqa: S101 (for the type checker)
        if not state:
            state.update(step=torch.zeros(()), momentum_buffer=torch.zeros_like(weight))
        state["step"] += 1
        momentum = state["momentum_buffer"].mul_(MOMENTUM).add_(gradient)
        direction = orthogonalised((gradient + MOMENTUM * momentum).flatten(1)).view(weight.shape)  # Nesterov's
        length, size = weight.norm(), direction.norm()
        weight.sub_(direction * (TURN * rate * length / size.clamp_min(1e-12)))
        weight.mul_(length / weight.norm().clamp_min(1e-12))


def orthogonalised(matrix: Float[Tensor, "m n"]) -> Float[Tensor, "m n"]:
    """About U Vᵀ of its singular value decomposition U S Vᵀ: products of matrices bring all singular values near 1.

    All but the first and the last product are of the shorter side: half of the work, and the same but for rounding.

    >>> found = torch.linalg.svdvals(orthogonalised(torch.diag(torch.tensor([3.0, 2.0, 1.0]))))
    >>> bool(found.min() > 0.6) and bool(found.max() < 1.3)
    True
    """
    a, b, c = COEFFICIENTS
    wide = matrix.shape[0] <= matrix.shape[1]
    x = (matrix if wide else matrix.mT) / matrix.norm().clamp_min(1e-12)
    square, turn = x @ x.mT, torch.eye(len(x), dtype=x.dtype, device=x.device)
    for left in reversed(range(ITERATIONS)):  # x ← f x with f = aI + bxxᵀ + c(xxᵀ)², so that xxᵀ ← f xxᵀ f
        f = b * square + c * square @ square
        f.diagonal().add_(a)
        turn = f @ turn
        square = f @ square @ f if left else square
    return turn @ x if wide else (turn @ x).mT
