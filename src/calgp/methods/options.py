"""What several methods ask of their options and of their generator."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from calgp.errors import CalgpError


def check_counts(method: object, *names: str) -> None:
    """Refuse what must be at least 1 and is not."""
    for name in names:
        if getattr(method, name) < 1:
            raise CalgpError(f"{name}={getattr(method, name)} cannot be; it must be at least 1.")


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
