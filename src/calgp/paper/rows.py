"""Cells of an experiment, and the rows of numbers that runs fill them with."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from statistics import mean

import torch
from torch import Tensor

from calgp import metrics
from calgp.errors import CalgpError
from calgp.metrics import Outcomes
from calgp.runs import Card, Evaluation, Run, RunFolder
from calgp.search.image_scores import ImageScores, image_scores
from calgp.search.jobs import TEMPERATURE, Shift, evaluated_name, evaluation

from .intervals import Estimate, Z, estimate, seed_error

PAPER = ("err", "mnll", "ece", "brier")
DETECTION = ("auroc", "aupr_out", "aupr_in", "fpr95")
LOW_ENTROPY = 0.1  # of log Q, the largest entropy: a prediction below it counts as sure


@dataclass(frozen=True)
class Cell:
    """A place in a table or figure, and the runs that fill it, one a seed; without runs it says "not run".

    panel: data and network, in the paper's words. x: training size, depth or severity, where there is an axis.
    test: what is done to the test images before they are scored; nothing unless given.
    outside: a source of other classes, on which uncertainty is measured.
    temperature: of probabilities with a temperature from the hold-out, not of those as trained.
    instead: metrics that follow another definition: (("ece", "ece_authors"),).
    """

    method: str
    panel: str
    x: float | None
    runs: tuple[Run, ...] = ()
    samples: int = 50
    test: Shift | None = None
    outside: str | None = None
    temperature: bool = False
    instead: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Resampled:
    """Metrics on bootstrap resamples of the test images, averaged over the seeds: [R] for each metric.

    images: a checksum of the images. Rows of the same images share their resamples, so their differences are paired.
    """

    images: str
    metrics: Mapping[str, Tensor]


@dataclass(frozen=True)
class Detail:
    """One run of a cell: its card, its evaluations, and where their scores lie."""

    folder: str
    card: Card
    train_seconds: float
    own: Evaluation
    outside: Evaluation | None
    scores: str
    outside_scores: str | None

    @property
    def seed(self) -> int:
        return self.card.run.seed


@dataclass(frozen=True)
class Row:
    """What runs found for a cell: a value a seed for each metric.

    halves: half the 95 % bootstrap interval over the test images, averaged over the seeds, where it is known.
    details: of each seed, what figures and the page need besides. runs: all that the cell asks for, done or not.
    resampled: where per-image scores of all seeds were kept.
    """

    method: str
    panel: str
    x: float | None
    values: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    halves: Mapping[str, float] = field(default_factory=dict)
    details: tuple[Detail, ...] = ()
    runs: tuple[Run, ...] = ()
    resampled: Resampled | None = None

    @property
    def planned(self) -> int:
        """The number of runs that the cell asks for."""
        return len(self.runs)

    @property
    def label(self) -> str:
        return ", ".join([self.method, self.panel, *([] if self.x is None else [f"{self.x:,g}"])])

    def mean(self, metric: str) -> float | None:
        """The mean over seeds; None where nothing was run."""
        values = self.values.get(metric)
        return mean(values) if values else None

    def error(self, metric: str) -> float | None:
        """Standard error over the seeds; None for fewer than two."""
        return seed_error(self.values.get(metric, ()))[0]

    def spread(self, metric: str) -> float | None:
        """What figures show around a mean: its standard error, or of one seed half the interval over test images."""
        error = self.error(metric)
        return self.halves.get(metric) if error is None else error

    def estimate(self, metric: str) -> Estimate | None:
        """The mean with its standard errors over seeds and over test images; None where nothing was run."""
        values = self.values.get(metric)
        return estimate(values, error_over_images(self, metric)) if values else None

    def half(self, metric: str) -> float | None:
        """Half a 95 % interval over seeds and test images; of a single seed, over test images alone."""
        found = self.estimate(metric)
        return None if found is None else found.half()


def error_over_images(row: Row, metric: str) -> float | None:
    """Standard error over test images: of the resamples, or else of the intervals that were stored with the scores."""
    if row.resampled is not None and metric in row.resampled.metrics:
        return float(row.resampled.metrics[metric].std())
    return row.halves[metric] / Z if metric in row.halves else None


def difference(a: Row, b: Row, metric: str) -> Estimate | None:
    """a − b, paired image by image where both rows have scores of the same images; None where one was not run."""
    first, second = a.values.get(metric, ()), b.values.get(metric, ())
    if not first or not second:
        return None
    return Estimate(mean(first) - mean(second), *seed_error(first, second), _paired_error(a, b, metric))


def _paired_error(a: Row, b: Row, metric: str) -> float | None:
    if a.resampled is not None and b.resampled is not None and a.resampled.images == b.resampled.images:
        one, two = a.resampled.metrics.get(metric), b.resampled.metrics.get(metric)
        if one is not None and two is not None:
            return float((one - two).std())
    errors = error_over_images(a, metric), error_over_images(b, metric)
    return None if errors[0] is None or errors[1] is None else math.hypot(errors[0], errors[1])


def row_of(cell: Cell, folders: Sequence[RunFolder]) -> Row:
    """The row of a cell from the run folders of its seeds that are done."""
    details = tuple(_detail(cell, folder) for folder in folders)
    values: dict[str, tuple[float, ...]] = {}
    halves: dict[str, list[float]] = {}
    for detail in details:
        found = _numbers(detail)
        for name, (value, half) in (found | {name: found[other] for name, other in cell.instead}).items():
            values[name] = (*values.get(name, ()), value)
            if half is not None:
                halves.setdefault(name, []).append(half)
    means = {name: mean(found) for name, found in halves.items()}
    row = Row(cell.method, cell.panel, cell.x, values, means, details, cell.runs)
    return replace(row, resampled=_resampled(cell, folders, row))


def _resampled(cell: Cell, folders: Sequence[RunFolder], row: Row) -> Resampled | None:
    """Scores of all seeds on the same resamples of their test images; None unless all have kept theirs.

    Columns have half precision. A metric that they do not reproduce, up to a tenth of its interval, is left out.
    """
    if cell.test is not None or not folders:  # of corrupted images none are kept
        return None
    found: list[dict[str, Tensor]] = []
    for folder, detail in zip(folders, row.details, strict=True):
        own = image_scores(folder, detail.own)
        outside = image_scores(folder, detail.outside) if detail.outside else None
        if own is None or own.outcomes is None or (detail.outside and outside is None):
            return None
        found.append(_resampled_metrics(own, own.outcomes, outside))
    images = {detail.own.checksum + (detail.outside.checksum if detail.outside else "") for detail in row.details}
    if len(images) > 1:
        return None
    joined = {name: torch.stack([each[name] for each in found]).double().mean(0) for name in found[0]}
    joined |= {name: joined[other] for name, other in cell.instead}
    exact = {
        name: each[1:]
        for name, each in joined.items()
        if (half := row.halves.get(name)) is not None
        and each.isfinite().all()
        and abs(each[0] - mean(row.values[name])) <= 0.1 * half + 1e-6
    }
    return Resampled(images.pop(), exact)


@lru_cache(maxsize=4)
def _weights(n: int, seed: int) -> Tensor:
    """All images as they are, then the resamples."""
    return torch.cat([torch.ones(1, n), metrics.resample_weights(n, seed=seed)])


def _resampled_metrics(own: ImageScores, outcomes: Outcomes, outside: ImageScores | None) -> dict[str, Tensor]:
    weights = _weights(len(own), 0)
    found = metrics.resampled_scores(outcomes, weights)
    found |= {"entropy_inside": found.pop("entropy"), "brier_mean": found["brier"] / outcomes.classes}
    if outside is None:
        return found
    others = _weights(len(outside), 1)
    low = (outside.entropy < LOW_ENTROPY * math.log(outcomes.classes)).float()
    found["entropy_outside"] = others @ outside.entropy / len(outside)
    found["low_entropy_outside"] = others @ low / len(outside)
    return found | metrics.resampled_ood(own.entropy, outside.entropy, weights, others)


def _detail(cell: Cell, folder: RunFolder) -> Detail:
    card = folder.card()
    calibrator = TEMPERATURE if cell.temperature else None
    own = evaluation(folder, card.run, evaluated_name(card.run.source, cell.test), cell.samples, calibrator)
    if own is None:
        raise CalgpError(f"{folder.path} lacks the evaluation of {cell.method}, {cell.panel}; run it again.")
    outside = evaluation(folder, card.run, cell.outside, cell.samples) if cell.outside else None
    where = [
        each and (folder.path / folder.scores_name(each.source, each.calibrator)).as_posix() for each in (own, outside)
    ]
    return Detail(folder.name, card, folder.train_seconds(), own, outside, str(where[0]), where[1])


def _numbers(detail: Detail) -> dict[str, tuple[float, float | None]]:
    """Metrics of one run, with half their bootstrap intervals."""
    own, outside, classes = detail.own.own, detail.outside, detail.card.task.classes
    scores = own.scores
    halves = {name: (high - low) / 2 for name, (low, high) in vars(own.intervals).items()}
    found: dict[str, tuple[float, float | None]] = {name: (getattr(scores, name), halves.get(name)) for name in PAPER}
    for name in ("paper", "authors"):
        found[f"ece_{name}"] = own.ece_variants[name], halves.get("ece")
    found["brier_mean"] = scores.brier / classes, halves["brier"] / classes
    # confidence − accuracy: above 0 is over-confident; its chance is that of the errors
    found["gap"] = scores.confidence - (1 - scores.err), halves.get("err")
    found["entropy_inside"] = detail.own.mean_entropy, _entropy_half(detail.own)
    if outside:
        found["entropy_outside"] = outside.mean_entropy, _entropy_half(outside)
        found |= _low_entropy(outside)
        for name, number in vars(outside.ood["entropy"]).items() if outside.ood else ():
            found[name] = number.value, (number.interval[1] - number.interval[0]) / 2
    return found


def _entropy_half(evaluation: Evaluation) -> float | None:
    """Half the 95 % interval of the mean entropy over images, by the histogram; older scores have none."""
    table = evaluation.entropy_histogram
    if not table:
        return None
    middles = [(low + high) / 2 for low, high in zip(table.edges, table.edges[1:], strict=False)]
    n = sum(table.count)
    centre = sum(count * middle for count, middle in zip(table.count, middles, strict=True)) / n
    squares = sum(count * (middle - centre) ** 2 for count, middle in zip(table.count, middles, strict=True)) / n
    return Z * math.sqrt(squares / n)


def _low_entropy(evaluation: Evaluation) -> dict[str, tuple[float, float | None]]:
    """The share of images whose entropy is below a tenth of the largest one: the first 4 of 40 bins."""
    table = evaluation.entropy_histogram
    if not table:
        return {}
    bound = LOW_ENTROPY * table.edges[-1] * (1 + 1e-9)
    n = sum(table.count)
    share = sum(c for c, high in zip(table.count, table.edges[1:], strict=True) if high <= bound) / n
    return {"low_entropy_outside": (share, Z * math.sqrt(share * (1 - share) / n))}
