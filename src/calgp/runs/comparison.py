"""Several runs side by side: one row for each setting, averaged over its seeds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from calgp.errors import CalgpError
from calgp.runs.card import Card
from calgp.runs.evaluation import METRICS
from calgp.runs.folder import RunFolder
from calgp.runs.results import Evaluation

Result = tuple[RunFolder, Card, Evaluation]  # a run, and its scores with one calibrator or none


@dataclass(frozen=True)
class Row:
    """One setting. A metric is (mean, standard error over the seeds); of a single seed there is no error."""

    method: str  # with the calibrator: cnn + temperature
    backbone: str
    source: str
    train_images: int
    steps: int  # made, on average over the seeds: those planned, or fewer where a run stopped early
    seeds: tuple[int, ...]
    metrics: dict[str, tuple[float, float | None]]
    auroc: dict[str, tuple[float, float | None]]  # by the outside source: how well entropy tells it from the inside


def compare(folders: Sequence[RunFolder]) -> list[Row]:
    """Rows over run folders that have been evaluated on their own source, the lowest MNLL first.

    A run whose probabilities were scored calibrated and as they are has a row for each.

    >>> from calgp.runs import shipped_run
    >>> [(row.source, row.seeds) for row in compare([shipped_run()])]
    [('digits', (0,))]
    """
    groups: dict[tuple[str, str, str, int, int], list[Result]] = {}
    for folder in folders:
        card = folder.card()
        steps = card.run.total_steps(card.train_images)
        for found in own_evaluations(folder, card):
            key = (card.title(found.calibrator), card.network, card.run.source, card.train_images, steps)
            groups.setdefault(key, []).append((folder, card, found))
    return sorted((_row(key, results) for key, results in groups.items()), key=lambda row: row.metrics["mnll"][0])


def own_evaluations(folder: RunFolder, card: Card) -> list[Evaluation]:
    """The evaluations of a run on the test images of its own source, with each calibrator and none."""
    own = [found for found in folder.evaluations() if found.source == card.run.source and not found.outside]
    if not own:
        raise CalgpError(f"{folder.path} has no scores yet; `calgp evaluate {folder.path}` makes them.")
    return own


def _row(key: tuple[str, str, str, int, int], results: list[Result]) -> Row:
    method, backbone, source, train_images, _ = key
    steps = round(mean(card.steps_made(folder.log()) for folder, card, _ in results))
    outside: dict[str, list[float]] = {}
    for folder, _, own in results:
        for found in folder.evaluations():
            if found.ood and found.calibrator == own.calibrator:
                outside.setdefault(found.source, []).append(found.ood["entropy"].auroc.value)
    return Row(
        method,
        backbone,
        source,
        train_images,
        steps,
        seeds=tuple(card.run.seed for _, card, _ in results),
        metrics={name: average([getattr(own.own.scores, name) for _, _, own in results]) for name in METRICS},
        auroc={source: average(values) for source, values in outside.items()},
    )


def average(values: list[float]) -> tuple[float, float | None]:
    """Mean and standard error; of a single value there is no error."""
    return mean(values), stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
