"""Intervals of numbers that vary over seeds and over test images."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, variance

from scipy.special import ndtri, stdtrit

Z = float(ndtri(0.975))  # half a 95 % interval over test images, in standard errors


@dataclass(frozen=True)
class Estimate:
    """A number with its standard errors over seeds and over test images; None where that is not known.

    freedom: degrees of freedom of `seed_error`; 0 for a single seed, or one seed against one seed.
    """

    value: float
    seed_error: float | None
    freedom: int
    test_error: float | None

    @property
    def one_seed(self) -> bool:
        return self.seed_error is None

    def half(self, comparisons: int = 1) -> float | None:
        """Half the interval that covers with 95 % for so many comparisons at once (Bonferroni); None if unknown.

        h² = (t_ν(α) s_seed)² + (z(α) s_test)², α = 0.025 / comparisons. Both variances add, because all seeds are
        scored on the same test images: the spread over seeds does not contain the chance of the test images. Each
        has its own quantile. One Student quantile with Welch and Satterthwaite's degrees of freedom is too narrow
        here: with two seeds each it tells equal methods apart in up to 8 % of cases, and in 68 % of families of 40
        (tests/paper/test_intervals.py).

        With one seed, the interval covers the chance of the test images alone.

        >>> round(Estimate(0.1, seed_error=0.01, freedom=2, test_error=0.0).half(), 4)
        0.043
        """
        if self.test_error is None:
            return None
        alpha = 0.025 / max(comparisons, 1)
        over_seeds = 0.0 if self.seed_error is None else float(stdtrit(self.freedom, 1 - alpha)) * self.seed_error
        return math.hypot(over_seeds, float(ndtri(1 - alpha)) * self.test_error)


def seed_error(first: Sequence[float], second: Sequence[float] = ()) -> tuple[float | None, int]:
    """Standard error over seeds of a mean, or of a difference of means, and its degrees of freedom.

    The variance is pooled over both: s² (1/n₁ + 1/n₂), ν = n₁ + n₂ − 2. None if no seed was repeated.

    >>> error, freedom = seed_error([0.1, 0.2], [0.5])
    >>> round(error, 4), freedom
    (0.0866, 1)
    """
    groups = [values for values in (first, second) if values]
    freedom = sum(len(values) - 1 for values in groups)
    if not freedom:
        return None, 0
    squares = sum((len(values) - 1) * variance(values) for values in groups if len(values) > 1)
    return math.sqrt(squares / freedom * sum(1 / len(values) for values in groups)), freedom


def estimate(values: Sequence[float], test_error: float | None) -> Estimate:
    """The mean over seeds."""
    return Estimate(mean(values), *seed_error(values), test_error)
