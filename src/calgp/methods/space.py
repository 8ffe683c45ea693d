"""The search space of a method: which values of its options tuning tries, and how it goes on beyond them. Pure data."""

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

Value = bool | int | float | str
Side = Literal["low", "high"]


@dataclass(frozen=True)
class Axis:
    """The values of one option. Numbers are ordered and can be widened at both ends; other values are mere choices.

    ratio: the next value beyond an end is that end times, or divided by, this.
    more: without a ratio, the only further values, below or above; what lies beyond these is no sensible setting.

    >>> Axis((0.001, 0.002), ratio=2.0).next_to(0.002, "high")
    0.004
    >>> Axis((0.5, 0.8, 0.9), more=(0.25, 0.95)).next_to(0.9, "high")
    0.95
    """

    values: tuple[Value, ...]
    ratio: float | None = None
    more: tuple[float, ...] = ()

    @property
    def numbers(self) -> tuple[float, ...]:
        """The values in order; none for choices."""
        found = [value for value in self.values if isinstance(value, int | float) and not isinstance(value, bool)]
        return tuple(sorted(found)) if len(found) == len(self.values) else ()

    def including(self, value: Value) -> "Axis":
        """The axis with this value, too."""
        if value in self.values:
            return self
        wider = replace(self, values=(*self.values, value))
        return replace(wider, values=wider.numbers or wider.values)

    def next_to(self, value: Value, side: Side) -> float | None:
        """The neighbour of a value on one side, beyond the end if it stands there; None where there is none."""
        if value not in self.numbers:
            return None
        place = self.numbers.index(value) + (1 if side == "high" else -1)  # type: ignore[arg-type]
        return self.numbers[place] if 0 <= place < len(self.numbers) else self.beyond(side)

    def beyond(self, side: Side) -> float | None:
        """The first value beyond an end; None at a limit."""
        if not self.numbers:
            return None
        end = max(self.numbers) if side == "high" else min(self.numbers)
        if self.ratio is not None:
            return rounded(end * self.ratio if side == "high" else end / self.ratio)
        further = [value for value in self.more if (value > end if side == "high" else value < end)]
        return (min(further) if side == "high" else max(further)) if further else None

    def refined(self) -> "Axis":
        """The axis with the geometric mean of each two neighbours, too."""
        means = [rounded(math.sqrt(low * high)) for low, high in pairwise(self.numbers)]
        return replace(self, values=tuple(sorted({*self.numbers, *means}))) if means else self

    def is_edge(self, value: Value, side: Side) -> bool:
        """Whether a value is the last one on a side."""
        return bool(self.numbers) and value == (max(self.numbers) if side == "high" else min(self.numbers))


def rounded(value: float) -> float:
    """Four digits, so that it can be written down."""
    return float(f"{value:.4g}")


# the same for all methods, so that none has a finer or wider search than another
RATES = Axis((5e-4, 1e-3, 2e-3, 4e-3, 8e-3), ratio=2.0)
KEEP = Axis((0.5, 0.8, 0.9), more=(0.25, 0.95, 0.98))  # below 1: without masks it would be another method
KEEP_OMEGA = Axis((0.5, 0.9, 1.0), more=(0.25,))
SIGMA = Axis((0.15, 0.3, 0.6, 1.0), ratio=2.0)
