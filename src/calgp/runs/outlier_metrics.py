"""How well scores tell images of other classes from the run's own, and how many of them a threshold calls outliers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from calgp import metrics
from calgp.gp import Predictive
from calgp.posthoc.decisions import clopper_pearson
from calgp.posthoc.outliers import Threshold
from calgp.runs.record import Interval, Share, Text

PREFIX = "outlier_"  # of the columns that hold the scores of a run's own outlier scores
RESAMPLES = 500


@dataclass(frozen=True)
class Number:
    """A value with its 95 % interval."""

    value: float
    interval: Interval


@dataclass(frozen=True)
class OutOfDistribution:
    """How well a score of uncertainty separates images of other classes from the run's own."""

    auroc: Number
    aupr_out: Number
    aupr_in: Number
    fpr95: Number


@dataclass(frozen=True)
class Flagged:
    """The share of images that a run calls outliers by `score`, whose threshold has a stated false-alarm rate."""

    score: Text
    false_alarm: Share
    share: Share
    interval: Interval


def outlier_columns(names: Sequence[str], predictive: Predictive) -> dict[str, Tensor]:
    """The outlier scores of a predictive as columns: none where the classifier has fitted none.

    >>> import torch
    >>> one = Predictive(torch.zeros(1, 1), torch.zeros(1), torch.zeros(1, 1), 1, outlier_scores=torch.tensor([[3.0]]))
    >>> outlier_columns(["network-confidence"], one)
    {'outlier_network_confidence': tensor([3.])}
    """
    if predictive.outlier_scores is None:
        return {}
    return {_column(name): each for name, each in zip(names, predictive.outlier_scores.unbind(1), strict=True)}


def out_of_distribution(
    inside: Mapping[str, Tensor] | None, columns: Mapping[str, Tensor], *, seed: int
) -> dict[str, OutOfDistribution] | None:
    """How well each score separates these images from the run's own test images, predicted in the same way.

    Entropy and confidence are the calibrated ones, mutual information that of the samples (`Predictive.calibrated`).
    """
    if inside is None:
        return None
    found, own = {}, _scores(inside)
    for name, outside in _scores(columns).items():
        if name in own:
            intervals = metrics.bootstrap_ood(own[name], outside, resamples=RESAMPLES, seed=seed)
            ends = {key: (each.low.item(), each.high.item()) for key, each in intervals.items()}
            found[name] = OutOfDistribution(**{k: Number(one.estimate.item(), ends[k]) for k, one in intervals.items()})
    return found


def flagged(names: Sequence[str], threshold: Threshold | None, columns: Mapping[str, Tensor]) -> Flagged | None:
    """The share of images that the first of a run's outlier scores calls outliers; None without a threshold."""
    if threshold is None or not names or _column(names[0]) not in columns:
        return None
    flags = threshold.flags(columns[_column(names[0])])
    count, n = int(flags.sum()), len(flags)
    return Flagged(names[0], threshold.false_alarm, count / n, clopper_pearson(count, n))


def _column(name: str) -> str:
    return PREFIX + name.replace("-", "_")


def _scores(columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By name, higher is further outside; those of any classifier first."""
    found = {"entropy": columns["entropy"], "mutual_information": columns["mutual_information"]}
    found["confidence"] = 1 - columns["confidence"].double()
    return found | {name.removeprefix(PREFIX): each for name, each in columns.items() if name.startswith(PREFIX)}
