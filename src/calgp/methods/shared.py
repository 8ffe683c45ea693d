"""What several methods share: checks of their options, and how a sparse GP starts."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from calgp.errors import CalgpError, brief
from calgp.gp import SparseGP


def check_counts(method: object, *names: str, most: int = 2**31) -> None:
    """Refuse what must be at least 1 and is not; None, where an option may be left to its default, is no count."""
    for name in names:
        if (value := getattr(method, name)) is not None and not 1 <= value <= most:
            raise CalgpError(f"{name}={brief(value)} cannot be; it must be at least 1 and at most {most}.")


def check_choices(method: object, **known: Iterable[str]) -> None:
    """Refuse a name that is not among those known."""
    for name, choices in known.items():
        if (value := getattr(method, name)) not in choices:
            raise CalgpError(f"{name}={value!r} is not known; it is one of {', '.join(choices)}.")


@contextmanager
def refusing() -> Iterator[None]:
    """What the mathematics refuses (a negative ℓ, a mask that keeps nothing), as the user's error."""
    try:
        yield
    except ValueError as error:
        raise CalgpError(f"{error}.") from None


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
