"""Decisions from predictions: when to answer, and which classes to keep, with promises that a hold-out can make.

Two kinds, each a frozen value that `fit` finds on held-out predictions and that is used on any others:

- `Selection` answers where uncertainty is below a threshold and abstains elsewhere: answers err at most so often;
- `PredictionSets` gives a set of classes for each image, which holds the true one at least so often (split conformal).

Both promises are about images that are exchangeable with the hold-out, and need a hold-out that nothing else has been
fitted on: neither the model nor its calibrator. Everything is computed in float64.

>>> import torch
>>> log_probs = torch.tensor([[0.7, 0.2, 0.1]]).log().expand(99, 3)  # 70 of 99 are the first class, as it says
>>> y = torch.tensor([0] * 70 + [1] * 20 + [2] * 9)
>>> sets = PredictionSets.fit(log_probs, y, coverage=0.9, kind="lac")
>>> sets.apply(log_probs[:1])
tensor([[ True,  True, False]])
"""

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from scipy.special import bdtr, betaincinv
from torch import Tensor

from calgp.errors import CalgpError, short_repr

LEVELS = 20  # counts of answered images that a guaranteed threshold is chosen from
STRICT = {"extra": "forbid"}  # a file that says more than this version knows describes another decision

# --- uncertainty -----------------------------------------------------------------------------------------------------

SCORES: dict[str, Callable[[Mapping[str, Tensor]], Tensor]] = {
    "confidence": lambda columns: 1 - columns["confidence"].double(),
    "entropy": lambda columns: columns["entropy"].double(),
    "mutual-information": lambda columns: columns["mutual_information"].double(),
}


def uncertainty(columns: Mapping[str, Tensor], score: str = "confidence") -> Tensor:
    """How uncertain predictions [N] are: 1 − max p, the entropy or the mutual information; less is surer."""
    return SCORES[_choice("score", score, SCORES)](columns)


# --- selective prediction ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RiskCoverage:
    """The error among the k least uncertain of N predictions, for k = 1 … N (El-Yaniv & Wiener 2010).

    Equal uncertainties are in no order: the errors of a tie are spread evenly over it, their mean over all orders.
    """

    coverage: Tensor  # k / N
    risk: Tensor  # (1/k) Σ_{i ≤ k} wrong_i

    @property
    def aurc(self) -> float:
        """(1/N) Σ_k risk_k: the area under the curve (Geifman et al. 2019). Less is better."""
        return self.risk.mean().item()

    @property
    def excess(self) -> float:
        """E-AURC: the area beyond that of the best order, in which all errors come last (Geifman et al. 2019)."""
        n = len(self.risk)
        k = torch.arange(1, n + 1, dtype=torch.float64)
        right = n - round(self.risk[-1].item() * n)
        return self.aurc - ((k - right).clamp_min(0) / k).mean().item()


def risk_coverage(uncertainty: Tensor, wrong: Tensor) -> RiskCoverage:
    """The curve of uncertainties [N] and of what was wrong (bool [N]).

    >>> curve = risk_coverage(torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([False, True, False, True]))
    >>> curve.risk
    tensor([0.0000, 0.5000, 0.3333, 0.5000], dtype=torch.float64)
    >>> round(curve.aurc, 4), round(curve.excess, 4)
    (0.3333, 0.125)
    """
    uncertainty, wrong = _columns(uncertainty, wrong)
    _, group, size = uncertainty.unique(return_inverse=True, return_counts=True)  # in rising order
    errors = torch.zeros(len(size), dtype=torch.float64).index_add_(0, group, wrong.double())
    k = torch.arange(1, len(uncertainty) + 1, dtype=torch.float64)
    return RiskCoverage(k / len(k), (errors / size).repeat_interleave(size).cumsum(0) / k)


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
        _choice("score", self.score, SCORES)
        _share("error", self.error)
        if self.confidence is not None:
            _share("confidence", self.confidence)
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
        _choice("score", score, SCORES)
        _share("error", error)
        uncertainty, wrong = _columns(uncertainty, wrong)
        ranked, order = uncertainty.sort()
        errors = wrong[order].cumsum(0).tolist()
        if confidence is None:
            best = _empirical(ranked, errors, error)
        else:
            best = _guaranteed(ranked, errors, error, 1 - _share("confidence", confidence))
        threshold, answered = best
        missed = errors[answered - 1] if answered else 0
        reason = _unreachable(ranked, error, confidence) if not answered else None
        return cls(score, error, confidence, threshold, len(uncertainty), answered, missed, reason)

    def abstains(self, uncertainty: Tensor) -> Tensor:
        """Where no answer is given (bool [N])."""
        return uncertainty.double() >= (math.inf if self.threshold is None else self.threshold)


def _empirical(ranked: Tensor, errors: list[int], error: float) -> tuple[float | None, int]:
    """(threshold, answered): the most that the hold-out answers with no more than the target's errors."""
    cuts = [*(ranked.diff() > 0).nonzero().squeeze(1).add(1).tolist(), len(ranked)]  # ties are answered together
    good = [cut for cut in cuts if errors[cut - 1] <= error * cut]
    return (_cut(ranked, good[-1]), good[-1]) if good else (0.0, 0)


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
    n, effect = len(ranked), "abstains from everything"
    if confidence is not None and n < (least := _least(error, 1 - confidence)):
        return (
            f"An error of {error:g} with confidence {confidence:g} needs at least {least:,} held-out images, even "
            f"without a mistake; there are {n:,}: the run {effect}."
        )
    if n > 1 and ranked[0] == ranked[-1]:
        return f"All held-out images have the same uncertainty, which tells none from another: the run {effect}."
    return f"No threshold shows an error of at most {error:g} on the {n:,} held-out images: the run {effect}."


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
    tail = (1 - _share("confidence", confidence)) / 2
    low = 0.0 if k <= 0 else float(betaincinv(k, n - k + 1, tail))
    high = 1.0 if k >= n else float(betaincinv(k + 1, n - k, 1 - tail))
    return low, high


# --- conformal prediction sets -------------------------------------------------------------------------------------

KINDS = {  # name: in one line
    "lac": "the classes of probability at least 1 − t: the smallest sets on average",
    "aps": "the most probable classes up to a sum t, the last one by a keyed draw: adapts to the image",
    "aps-plain": "the same without the draw: never empty, and covers more than was asked for",
}


@dataclass(frozen=True)
class PredictionSets:
    """Sets of classes that hold the true one with probability `coverage` or more: split conformal prediction.

    A class y is in the set of x if its conformity score is at most the threshold. With s of the hold-out (x_i, y_i),
    t is the ⌈(n + 1) coverage⌉-th smallest of s(x_i, y_i) (Vovk et al. 2005, Lei et al. 2018), and the promise holds on
    average over hold-outs and images, for any model and any distribution, as long as all are exchangeable.

    lac: s = 1 − p_y (Sadinle, Lei & Wasserman 2019).
    aps: s = Σ_{k before y} p_k + u p_y, classes in falling order of probability, u uniform on [0, 1) (Romano, Sesia &
        Candès 2020). aps-plain: u = 0, so that the most probable class has s = 0 and is in every set; the many equal
        scores make it conservative.

    thresholds: one, or with `by_class` one for each class, of the held-out images of that class alone (Mondrian): then
        each class has its promise. empty: whether sets may be empty; if not, an empty one gets the most probable class,
        by which coverage can only rise, above what was asked for.
    """

    __pydantic_config__ = STRICT
    kind: str
    coverage: float
    by_class: bool
    empty: bool
    thresholds: tuple[float, ...]
    n: int  # held-out images
    classes: int

    def __post_init__(self) -> None:
        _choice("sets", self.kind, KINDS)
        _share("coverage", self.coverage)
        if len(self.thresholds) != (self.classes if self.by_class else 1):
            raise ValueError(f"{len(self.thresholds)} thresholds for {self.classes} classes")
        if not all(math.isfinite(threshold) for threshold in self.thresholds):
            raise ValueError("thresholds must be finite")

    @classmethod
    def fit(
        cls,
        log_probs: Tensor,
        y: Tensor,
        *,
        coverage: float,
        kind: str = "aps",
        by_class: bool = False,
        empty: bool = False,
        uniform: Tensor | None = None,
    ) -> "PredictionSets":
        """The sets of held-out log-probabilities [N, Q] and labels [N]; `uniform` [N] is for `aps` (`keyed_uniform`).

        Refused where n < coverage / (1 − coverage): even the largest score would promise too little.
        """
        _share("coverage", coverage)
        s = conformity(log_probs, kind, uniform)
        _check_labels(y, log_probs)
        mine = s.gather(1, y[:, None].long()).squeeze(1)
        classes = log_probs.shape[1]
        groups = [mine[y == q] for q in range(classes)] if by_class else [mine]
        names = [f"of class {q} (counted from 0)" if by_class else "" for q in range(classes)]
        thresholds = tuple(
            conformal_quantile(group, coverage, name) for group, name in zip(groups, names, strict=False)
        )
        return cls(kind, coverage, by_class, empty, thresholds, len(y), classes)

    def apply(self, log_probs: Tensor, uniform: Tensor | None = None) -> Tensor:
        """Which classes are in the sets (bool [N, Q])."""
        if log_probs.dim() != 2 or log_probs.shape[1] != self.classes:
            raise CalgpError(f"The sets are for [N, {self.classes}] log-probabilities, not {list(log_probs.shape)}.")
        s = conformity(log_probs, self.kind, uniform)
        sets = s <= s.new_tensor(self.thresholds)
        if self.empty:
            return sets
        top = torch.zeros_like(sets).scatter_(1, log_probs.argmax(1, keepdim=True), True)
        return sets | (top & ~sets.any(1, keepdim=True))


def conformity(log_probs: Tensor, kind: str, uniform: Tensor | None = None) -> Tensor:
    """The score of every class [N, Q]: the less, the better it fits. See `PredictionSets`."""
    _choice("sets", kind, KINDS)
    if log_probs.dim() != 2 or min(log_probs.shape) < 1:
        raise CalgpError(f"Sets are found for log-probabilities [N, Q], not for {list(log_probs.shape)}.")
    log_p = log_probs.detach().double()
    if not (log_p.logsumexp(1).abs() < 1e-2).all():  # half precision is 10⁻³ off
        raise CalgpError("Rows must be log-probabilities that sum to one; take log_softmax of logits first.")
    if kind == "lac":
        return -log_p.expm1()
    if kind == "aps" and (uniform is None or uniform.shape != log_p.shape[:1]):
        raise CalgpError(f"aps needs a uniform number for each of the {len(log_p)} rows, as keyed_uniform gives.")
    u = torch.zeros_like(log_p[:, :1]) if kind != "aps" or uniform is None else uniform.to(log_p)[:, None]
    sorted_p, order = log_p.exp().sort(dim=1, descending=True, stable=True)
    before = sorted_p.cumsum(1) - sorted_p
    return torch.empty_like(log_p).scatter_(1, order, before + u * sorted_p)


def conformal_quantile(scores: Tensor, coverage: float, which: str = "") -> float:
    """The ⌈(n + 1) coverage⌉-th smallest score; of continuous ones, what it covers is Beta(k, n + 1 − k).

    >>> conformal_quantile(torch.arange(1.0, 20.0), 0.9)
    18.0
    """
    n = len(scores)
    k = math.ceil((n + 1) * coverage - 1e-9)  # 0.9 · 20 = 18.000000000000004 is 18
    if k > n:
        least = math.ceil(coverage / (1 - coverage) - 1e-9)
        raise CalgpError(
            f"A coverage of {coverage:g} needs at least {least:,} held-out images{which and ' '}{which}; there are "
            f"{n:,}. Hold out more, or ask for less."
        )
    return scores.double().kthvalue(k).values.item()


def keyed_uniform(x: Tensor, seed: int = 0) -> Tensor:
    """A number in [0, 1) for each row of x, drawn by its bytes: the same image has the same one, wherever it stands.

    The first 53 of the 64 bits that BLAKE2b gives for the row's bytes, keyed by the seed (8 bytes, little-endian).

    >>> images = torch.zeros(2, 1, 2, 2, dtype=torch.uint8)
    >>> first, second = keyed_uniform(images)
    >>> bool(first == second)
    True
    """
    rows = x.detach().cpu().contiguous().flatten(1).view(torch.uint8).numpy()
    key = seed.to_bytes(8, "little")
    words = [int.from_bytes(hashlib.blake2b(row.tobytes(), digest_size=8, key=key).digest(), "little") for row in rows]
    return torch.tensor([(word >> 11) / 2**53 for word in words], dtype=torch.float64)


# --- both, as data -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Decisions:
    """What a run decides: a threshold, sets, or both."""

    selection: Selection | None
    sets: PredictionSets | None


def check_wanted(
    *, error: float | None, confidence: float | None, score: str, coverage: float | None, sets: str
) -> None:
    """Refuse what cannot be decided before anything is predicted for it."""
    if error is None and coverage is None:
        raise CalgpError("Nothing was asked for: an error (0.01) sets a threshold, a coverage (0.9) makes sets.")
    for name, value in (("error", error), ("confidence", confidence), ("coverage", coverage)):
        if value is not None:
            _share(name, value)
    _choice("score", score, SCORES)
    _choice("sets", sets, KINDS)


def _share(name: str, value: float) -> float:
    if not 0 < value < 1:  # also when it is NaN
        raise CalgpError(f"{name}={value:g} cannot be; it is a share between 0 and 1, such as 0.95 or 0.01.")
    return value


def _choice(name: str, value: str, choices: Mapping[str, object]) -> str:
    if value not in choices:
        raise CalgpError(f"There is no {name} {short_repr(value)}; there are {', '.join(choices)}.")
    return value


def _columns(uncertainty: Tensor, wrong: Tensor) -> tuple[Tensor, Tensor]:
    """Uncertainties and what was wrong, checked, in float64 and bool, on the CPU."""
    if uncertainty.dim() != 1 or len(uncertainty) < 1 or wrong.shape != uncertainty.shape:
        raise CalgpError(
            f"Uncertainties and errors are two columns [N] of at least one image, not {list(uncertainty.shape)} and "
            f"{list(wrong.shape)}."
        )
    uncertainty = uncertainty.detach().double().cpu()
    if uncertainty.isnan().any():
        raise CalgpError("Uncertainties must be numbers; some are NaN.")
    return uncertainty, wrong.detach().bool().cpu()


def _check_labels(y: Tensor, log_probs: Tensor) -> None:
    n, classes = log_probs.shape
    if y.shape != (n,):
        raise CalgpError(f"Labels are [{n}], one for each row of log-probabilities, not {list(y.shape)}.")
    low, high = y.aminmax()
    if low < 0 or high >= classes:
        raise CalgpError(f"Labels must lie in 0 … {classes - 1}; these run from {int(low)} to {int(high)}.")
