"""Inputs of a `GPClassifier`: standardised, and divided so that rows have a length of about one."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

ROWS = 2**22  # numbers that are handled at a time


def parts(x: Tensor, width: int) -> tuple[Tensor, ...]:
    """So many rows at a time that rows × width stays small."""
    return x.split(max(1, ROWS // max(1, width)))


@dataclass(frozen=True, eq=False)
class Inputs:
    """u = (t(x) − mean) / scale: standardised features, divided by √d so that rows have a length of about one.

    >>> u = Inputs.fit("plain", torch.tensor([[1.0, 5.0], [3.0, 5.0]]))(torch.tensor([[3.0, 5.0]]))
    >>> u * 2**0.5  # one standard deviation above the mean; the second column never changes
    tensor([[1.0000, 0.0000]])
    """

    transform: str
    mean: Tensor
    scale: Tensor

    @staticmethod
    def fit(transform: str, x: Tensor) -> "Inputs":
        change, some = TRANSFORMS[transform], parts(x, x.shape[1])
        mean = torch.stack([change(part).double().sum(0) for part in some]).sum(0) / len(x)
        squares = [(change(part) - mean).square().sum(0) for part in some]
        deviation = (torch.stack(squares).sum(0) / len(x)).sqrt()
        scale = torch.where(deviation <= 1e-6 * mean.abs(), torch.ones_like(deviation), deviation)  # one never changes
        return Inputs(transform, mean, scale.where(scale > 0, torch.ones_like(scale)) * math.sqrt(x.shape[1]))

    def __call__(self, x: Tensor) -> Tensor:
        return (TRANSFORMS[self.transform](x) - self.mean.to(x)).div_(self.scale.to(x))


TRANSFORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda x: x,
    "root": lambda x: x.sign() * x.abs().sqrt(),  # for features with long tails, such as those of rectified units
}
