"""What a run decides about its predictions, where it has been told to: sets of classes, and when to say nothing."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from calgp.gp import Predictive
from calgp.runs import RunFolder


@dataclass(frozen=True)
class Decided:
    """One entry an image; None where the run does not decide this."""

    sets: Tensor | None  # bool [N, Q]
    abstains: Tensor | None  # bool [N]


Decide = Callable[[Predictive, Tensor], Decided]  # of a predictive and its pictures, uint8 [N, C, H, W]


def decisions_of(folder: RunFolder) -> Decide | None:
    """How the run in a folder decides; None if it was never told to."""
    return None
