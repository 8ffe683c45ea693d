"""When to answer: a threshold on uncertainty, so that answers err at most so often."""

import math
from dataclasses import dataclass

import torch
from scipy.special import bdtr, betaincinv
from torch import Tensor

from calgp.posthoc.checks import STRICT, check_choice, check_share
from calgp.posthoc.decisions.risk import SCORES, check_columns

LEVELS = 20  # counts of answered images that a guaranteed threshold is chosen from


@dataclass(frozen=True)
class Selection:
    """Answers where uncertainty < threshold and abstains elsewhere; None answers everything, 0 nothing."""

    __pydantic_config__ = STRICT
    score: str
    error: float  # the target: P(wrong | answered) is to be no more
    confidence: float | None  # that the target holds, over the draw of the hold-out; None: only on the hold-out itself
    threshold: float | None
    n: int  # held-out images
    answered: int  # of them
    wrong: int  # of those
    warning: str | None = None

    def __post_init__(self) -> None:
        check_choice("score", self.score, SCORES)
        check_share("error", self.error)
        if self.confidence is not None:
            check_share("confidence", self.confidence)
        if self.threshold is not None and not 0 <= self.threshold < math.inf:
            raise ValueError(f"threshold {self.threshold} is no uncertainty")

    @classmethod
    def fit(
        cls,
        uncertainty: Tensor,
        wrong: Tensor,
        *,
        error: float,
        confidence: float | None = 0.95,
        score: str = "confidence",
    ) -> "Selection":
        """The threshold that answers most, of held-out uncertainties [N] and of what was wrong (bool [N]).

        With a `confidence` 1 − δ (the default): P(wrong | answered) ≤ `error` with that probability over the draw of
        the hold-out. Some counts c of answered images are fixed before anything is seen; the threshold of c is the
        uncertainty of the first image beyond: its answers are independent draws, their errors binomial. H_c, that
        they err more often than the target, is rejected by the exact binomial tail (Clopper & Pearson 1934). The counts
        are tested in rising order by the fallback procedure (Wiens 2003): each has a share of δ (the first, the least
        that can pass without a mistake, a half; the others the rest in equal parts), and a rejected one hands what it
        had on to the next. So no true H_c is rejected with probability 1 − δ, whatever their dependence, and the
        largest c that is rejected may be chosen. (Geifman & El-Yaniv 2017 search the counts by halving and divide δ
        by the number of steps, not of counts; but which counts are visited depends on the data.)

        Without (`confidence=None`): the hold-out itself errs no more. It is the best of many noisy numbers, so on
        other images the error is often larger.

        Where no threshold will do, the selection abstains from everything, and `warning` says why.
        """
        check_choice("score", score, SCORES)
        check_share("error", error)
        uncertainty, wrong = check_columns(uncertainty, wrong)
        ranked, order = uncertainty.sort()
        errors = wrong[order].cumsum(0).tolist()
        if confidence is None:
            # ties are answered together
            cuts = [*(ranked.diff() > 0).nonzero().squeeze(1).add(1).tolist(), len(ranked)]
            answered = max((cut for cut in cuts if errors[cut - 1] <= error * cut), default=0)
            threshold = _cut(ranked, answered) if answered else 0.0
        else:
            delta = 1 - check_share("confidence", confidence)
            threshold, answered = _guaranteed(ranked, errors, error, delta)
        missed = errors[answered - 1] if answered else 0
        reason = _unreachable(ranked, error, confidence) if not answered else None
        return cls(score, error, confidence, threshold, len(uncertainty), answered, missed, reason)

    @property
    def rule(self) -> str:
        """When it answers, in words."""
        if self.threshold is None:
            return "always"
        if not self.answered:
            return "never"
        if self.score == "confidence":
            return f"where confidence > {1 - self.threshold:.6g}"
        return f"where {self.score.replace('-', ' ')} < {self.threshold:.6g}"

    def abstains(self, uncertainty: Tensor) -> Tensor:
        """Where no answer is given (bool [N])."""
        return uncertainty.double() >= (math.inf if self.threshold is None else self.threshold)


def _guaranteed(ranked: Tensor, errors: list[int], error: float, delta: float) -> tuple[float | None, int]:
    """(threshold, answered): the most of the counts whose errors are too few for an error above the target."""
    n = len(ranked)
    first = min(_least(error, delta / 2), n)
    counts = torch.linspace(first, n, LEVELS, dtype=torch.float64).round().long().unique().tolist()
    shares = [delta / 2] + [delta / 2 / (len(counts) - 1)] * (len(counts) - 1) if len(counts) > 1 else [delta]
    best, carried = (0.0, 0), 0.0
    for count, share in zip(counts, shares, strict=True):
        carried += share
        threshold = _cut(ranked, count)
        # fewer where uncertainties are equal
        answered = count if threshold is None else int((ranked < threshold).sum())
        if answered and binomial_cdf(errors[answered - 1], answered, error) <= carried:
            best = (threshold, answered)
        else:
            carried = 0.0
    return best


def _cut(ranked: Tensor, count: int) -> float | None:
    """The uncertainty of the first image beyond `count`; None if there is none."""
    return None if count == len(ranked) else ranked[count].item()


def _least(error: float, delta: float) -> int:
    """The fewest answers that, without a mistake, show the target: (1 − error)^n ≤ δ."""
    return math.ceil(math.log(delta) / math.log1p(-error) - 1e-9)


def _unreachable(ranked: Tensor, error: float, confidence: float | None) -> str:
    n, effect = len(ranked), "the run abstains from everything"
    if confidence is not None and n < (least := _least(error, 1 - confidence)):
        return (
            f"An error of {error:g} with confidence {confidence:g} needs at least {least:,} held-out images, even "
            f"without a mistake; there are {n:,}: {effect}. Hold out more images, or allow a larger error."
        )
    if n > 1 and ranked[0] == ranked[-1]:
        return f"All held-out images have the same uncertainty, which tells none from another: {effect}."
    shown = f"No threshold shows an error of at most {error:g} on the {n:,} held-out images: {effect}."
    return f"{shown} Allow a larger error, or train a better model."


def binomial_cdf(k: int, n: int, p: float) -> float:
    """P(Binomial(n, p) ≤ k), exactly.

    >>> round(binomial_cdf(1, 3, 0.5), 6)
    0.5
    """
    return float(bdtr(min(k, n), n, p))


def clopper_pearson(k: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """The exact interval of a share of which k in n were seen (Clopper & Pearson 1934); (0, 1) where n is 0.

    >>> [round(end, 4) for end in clopper_pearson(0, 10)]
    [0.0, 0.3085]
    """
    tail = (1 - check_share("confidence", confidence)) / 2
    low = 0.0 if k <= 0 else float(betaincinv(k, n - k + 1, tail))
    high = 1.0 if k >= n else float(betaincinv(k + 1, n - k, 1 - tail))
    return low, high
