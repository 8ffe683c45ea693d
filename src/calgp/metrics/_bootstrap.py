"""Confidence intervals by resampling the test set: of one method, and of the difference between two."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from calgp.errors import CalgpError

from ._calibration import ECE_PRESETS, EcePreset, bin_excess
from ._ood import OutOfDistribution, detection, ood, ranks
from ._outcomes import Outcomes, check_some
from ._scores import scores

OURS = EcePreset(bins=20, confidence="mean", closed="right", certain="kept", edges="k/M")  # `metrics.ece`
WEIGHTS = 2**22  # of images in resamples, that are held at a time
LEVELS = 2**16  # of scores in resamples, likewise: more would leave the processor's cache
Z = 1.959964  # half a 95 % interval, in standard errors


@dataclass(frozen=True)
class Interval:
    """An estimate with the ends of its percentile interval; each has the shape of the metric."""

    estimate: Float[Tensor, "..."]
    low: Float[Tensor, "..."]
    high: Float[Tensor, "..."]


def bootstrap(
    outcomes: Outcomes, metric: Callable[[Outcomes], Tensor], *, seed: int, resamples: int = 1000, level: float = 0.95
) -> Interval:
    """Percentile interval of a metric over test sets drawn with replacement from this one.

    It shows the chance of the test set, not that of training. The metric may stack several numbers, which then share
    their resamples. Indices are drawn on the CPU from `seed`, one resample at a time: the same on every device, and no
    more memory than the columns again. ECE has an upward bias in resamples, which the percentile interval keeps.

    >>> from calgp.metrics import error_rate, outcomes
    >>> predicted = outcomes(torch.tensor([[0.7, 0.3]]).log().expand(100, 2), torch.arange(100) % 2)
    >>> interval = bootstrap(predicted, error_rate, seed=0)
    >>> bool(interval.low < interval.estimate < interval.high)
    True
    """
    _check(resamples, level)
    check_some(outcomes)
    generator = torch.Generator().manual_seed(seed)
    device = outcomes.confidence.device
    values = [metric(outcomes.take(_draw(len(outcomes), generator).to(device))) for _ in range(resamples)]
    return _percentiles(metric(outcomes), torch.stack(values), level)


def bootstrap_scores(
    outcomes: Outcomes, *, seed: int, resamples: int = 1000, level: float = 0.95
) -> dict[str, Interval]:
    """`bootstrap` of ERR, MNLL, ECE and BRIER, by name, in a part of the time: a resample is a weight of each image.

    >>> from calgp.metrics import outcomes
    >>> predicted = outcomes(torch.tensor([[0.7, 0.3]]).log().expand(100, 2), torch.arange(100) % 2)
    >>> found = bootstrap_scores(predicted, seed=0)["err"]
    >>> bool(found.low < found.estimate < found.high)
    True
    """
    _check(resamples, level)
    check_some(outcomes)
    n, device, generator = len(outcomes), outcomes.confidence.device, torch.Generator().manual_seed(seed)
    loss = -outcomes.label_log_prob.double()
    means = [~outcomes.correct, loss.where(loss.isfinite(), 0), loss.isinf(), outcomes.brier]
    columns = torch.cat([torch.stack(means, 1).double(), bin_excess(outcomes, OURS, torch.float64)], 1)

    def weighted(weights: Float[Tensor, "R N"]) -> Float[Tensor, "R 4"]:
        err, mnll, lost, brier, *excess = (weights.to(columns) @ columns / n).unbind(1)
        mnll = mnll.masked_fill(lost > 0, torch.inf)  # of a label whose probability was 0
        return torch.stack([err, mnll, torch.stack(excess).abs().sum(0), brier], 1)

    values = []
    for start in range(0, resamples, step := max(1, WEIGHTS // n)):
        draws = [_draw(n, generator) for _ in range(min(step, resamples - start))]
        values.append(weighted(torch.stack([torch.bincount(each, minlength=n) for each in draws]).to(device)))
    estimate, drawn = weighted(torch.ones(1, n, device=device))[0], torch.cat(values)
    names = ("err", "mnll", "ece", "brier")
    return {name: _percentiles(estimate[i], drawn[:, i], level) for i, name in enumerate(names)}


def bootstrap_ood(
    inside: Float[Tensor, "N"], outside: Float[Tensor, "M"], *, seed: int, resamples: int = 1000, level: float = 0.95
) -> dict[str, Interval]:
    """Percentile intervals of the `OutOfDistribution` numbers, by name; both sides are resampled, each by itself.

    Scores are sorted once; a resample only counts how often each level of score was drawn.

    >>> found = bootstrap_ood(torch.arange(50.0), torch.arange(40.0, 90.0), seed=0)
    >>> bool(found["auroc"].low < found["auroc"].estimate < found["auroc"].high)
    True
    """
    _check(resamples, level)
    generator = torch.Generator().manual_seed(seed)
    *sides, levels = ranks(inside, outside)

    def resampled(count: int) -> Float[Tensor, "R 4"]:
        counts = [
            torch.bincount(rank[_draw(len(rank), generator).to(rank.device)], minlength=levels)
            for _ in range(count)
            for rank in sides
        ]
        return detection(torch.stack(counts[::2]), torch.stack(counts[1::2]))

    starts = range(0, resamples, step := max(1, LEVELS // levels))
    values = torch.cat([resampled(min(step, resamples - start)) for start in starts])
    estimate = detection(*(torch.bincount(rank, minlength=levels) for rank in sides))
    names = OutOfDistribution.__dataclass_fields__
    return {name: _percentiles(estimate[i], values[:, i], level) for i, name in enumerate(names)}


def resample_weights(n: int, *, seed: int, resamples: int = 500) -> Float[Tensor, "R N"]:
    """How often each of n images is drawn in each resample; the same for all methods, which pairs them.

    >>> resample_weights(4, seed=0, resamples=2).sum(1)
    tensor([4., 4.])
    """
    generator = torch.Generator().manual_seed(seed)
    counts = [torch.bincount(_draw(n, generator), minlength=n) for _ in range(resamples)]
    return torch.stack(counts).float()


def resampled_scores(outcomes: Outcomes, weights: Float[Tensor, "R N"]) -> dict[str, Float[Tensor, "R"]]:
    """The scores of each resample, by name. `gap` is confidence − accuracy; above 0 is over-confident.

    A paired comparison of two methods takes the difference of their scores resample by resample.

    >>> from calgp.metrics import outcomes
    >>> predicted = outcomes(torch.tensor([[0.75, 0.25], [0.5, 0.5]]).log(), torch.tensor([1, 0]))
    >>> resampled_scores(predicted, torch.tensor([[1.0, 1.0], [2.0, 0.0]]))["err"]
    tensor([0.5000, 1.0000])
    """
    wrong = (~outcomes.correct).to(outcomes.confidence)
    columns = [wrong, -outcomes.label_log_prob, outcomes.brier, outcomes.entropy, outcomes.confidence - 1 + wrong]
    presets = {"ece": OURS, "ece_paper": ECE_PRESETS["paper"], "ece_authors": ECE_PRESETS["authors"]}
    parts = [torch.stack(columns, 1), *(bin_excess(outcomes, preset) for preset in presets.values())]
    # one product for all: reading the weights takes the time
    means, *excess = (weights @ torch.cat(parts, 1) / len(outcomes)).split([part.shape[1] for part in parts], 1)
    found = dict(zip(["err", "mnll", "brier", "entropy", "gap"], means.unbind(1), strict=True))
    return found | {name: each.abs().sum(1) for name, each in zip(presets, excess, strict=True)}


def resampled_ood(
    inside: Float[Tensor, "N"],
    outside: Float[Tensor, "M"],
    inside_weights: Float[Tensor, "R N"],
    outside_weights: Float[Tensor, "R M"],
) -> dict[str, Float[Tensor, "R"]]:
    """The `OutOfDistribution` numbers of each resample, by name.

    >>> found = resampled_ood(torch.arange(4.0), torch.arange(2.0, 6.0), torch.ones(1, 4), torch.ones(1, 4))
    >>> found["auroc"]
    tensor([0.8750], dtype=torch.float64)
    """
    inside_rank, outside_rank, levels = ranks(inside, outside)

    def counted(rank: Int[Tensor, "N"], weights: Float[Tensor, "R N"]) -> Int[Tensor, "R L"]:
        return torch.stack([torch.bincount(rank, each, minlength=levels) for each in weights]).long()

    step = max(1, LEVELS // levels)
    parts = zip(inside_weights.split(step), outside_weights.split(step), strict=True)
    values = torch.cat([detection(counted(inside_rank, a), counted(outside_rank, b)) for a, b in parts])
    return dict(zip(OutOfDistribution.__dataclass_fields__, values.unbind(1), strict=True))


def _draw(n: int, generator: torch.Generator) -> Int[Tensor, "N"]:
    return torch.randint(n, (n,), generator=generator)


def _percentiles(estimate: Tensor, values: Float[Tensor, "R ..."], level: float) -> Interval:
    tails = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=values.dtype, device=values.device)
    low, high = values.quantile(tails, dim=0)
    return Interval(estimate, low, high)


def _check(resamples: int, level: float) -> None:
    if resamples < 1 or not 0 < level < 1:
        raise CalgpError(f"Invalid {resamples=}, {level=}: must be at least 1, and between 0 and 1.")


@dataclass(frozen=True)
class Difference:
    """first − second of a score, and half of its 95 % interval over test images.

    >>> Difference(-0.02, half=0.01).is_clear
    True
    """

    value: float
    half: float

    @property
    def is_clear(self) -> bool:
        """Whether the interval leaves out zero."""
        return abs(self.value) > self.half


def paired_scores(first: Outcomes, second: Outcomes, *, seed: int, resamples: int = 1000) -> dict[str, Difference]:
    """err, mnll, ece and brier of `first` less those of `second`, on the same images in the same order.

    Both are scored on the same resamples: an image that is hard for both adds nothing to the error of the difference.

    >>> from calgp.metrics import outcomes
    >>> good, y = torch.tensor([[0.8, 0.2], [0.3, 0.7]]).log().repeat(50, 1), torch.tensor([0, 1]).repeat(50)
    >>> paired_scores(outcomes(good, y), outcomes(good.flip(1), y), seed=0)["err"].value
    -1.0
    """
    if len(first) != len(second):
        raise CalgpError(f"Invalid pair: {len(first)} and {len(second)} images; both must be scored on the same ones.")
    weights = resample_weights(len(first), seed=seed, resamples=resamples)
    a, b = (resampled_scores(each, weights.to(each.confidence)) for each in (first, second))
    one, two = (scores(each).to_dict() for each in (first, second))
    names = ("err", "mnll", "ece", "brier")
    return {name: _difference(one[name] - two[name], a[name] - b[name]) for name in names}


def paired_ood(
    first: tuple[Float[Tensor, "N"], Float[Tensor, "M"]],
    second: tuple[Float[Tensor, "N"], Float[Tensor, "M"]],
    *,
    seed: int,
    resamples: int = 1000,
) -> dict[str, Difference]:
    """The `OutOfDistribution` numbers of `first` less those of `second`; each has scores (inside, outside).

    >>> sharp, blunt = (torch.zeros(9), torch.ones(9)), (torch.zeros(9), torch.zeros(9))
    >>> paired_ood(sharp, blunt, seed=0)["auroc"]
    Difference(value=0.5, half=0.0)
    """
    sizes = [tuple(map(len, each)) for each in (first, second)]
    if sizes[0] != sizes[1]:
        raise CalgpError(f"Invalid pair: {sizes[0]} and {sizes[1]} images; both must be scored on the same ones.")
    weights = [resample_weights(n, seed=seed + side, resamples=resamples) for side, n in enumerate(sizes[0])]
    a, b = (resampled_ood(*each, *weights) for each in (first, second))
    one, two = (ood(*each).to_dict() for each in (first, second))
    return {name: _difference(one[name] - two[name], a[name] - b[name]) for name in one}


def _difference(value: float, resampled: Float[Tensor, "R"]) -> Difference:
    return Difference(value, Z * torch.std(resampled.double()).item())
