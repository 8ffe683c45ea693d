"""What several methods share: seeds, and how a sparse GP starts."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from calgp.gp import SparseGP


def draw_seed(generator: torch.Generator | None) -> int:
    """A seed for what has its own generator."""
    return int(torch.randint(2**32, (), generator=generator))


def start_at_labels(gp: SparseGP[Any], batches: Iterable[tuple[Tensor, Tensor]], classes: int) -> None:
    """q(v) by least-squares classification of some inputs: targets 3 for the label, 0 for others, less their mean.

    From q(v) = p(v) the first thing to be learned would be less noise, and a network learns it by making all features
    the same; some never tell them apart again. Functions that know labels give it something better to do.
    """
    targets = ((x, 3 * (F.one_hot(y, classes) - 1 / classes).to(x)) for x, y in batches)
    gp.regress(targets, noise=1.0)
