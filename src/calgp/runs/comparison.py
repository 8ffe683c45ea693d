"""Several runs side by side: one row for each setting, averaged over its seeds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from calgp.errors import CalgpError
from calgp.runs.folder import RunFolder

METRICS = ("err", "mnll", "ece", "brier")
Result = tuple[RunFolder, str | None, dict[str, float]]  # a run, the calibrator it was scored with, its scores


@dataclass(frozen=True)
class Row:
    """One setting. A metric is (mean, standard error over the seeds); of a single seed there is no error."""

    method: str  # with the calibrator: cnn + temperature
    backbone: str
    source: str
    train_images: int
    steps: int
    seeds: tuple[int, ...]
    metrics: dict[str, tuple[float, float | None]]
    auroc: dict[str, tuple[float, float | None]]  # by the outside source: how well entropy tells it from the inside


def compare(folders: Sequence[RunFolder]) -> list[Row]:
    """Rows over run folders that have been evaluated on their own source, the lowest MNLL first.

    A run whose probabilities were scored calibrated and as they are has a row for each.
    """
    groups: dict[tuple[str, str, str, int, int], list[Result]] = {}
    for folder in folders:
        card = folder.card()
        steps = card.run.total_steps(card.train_images)
        for calibrator, scores in own_scores(folder).items():
            key = (card.titled(calibrator), card.network, card.run.source, card.train_images, steps)
            groups.setdefault(key, []).append((folder, calibrator, scores))
    return sorted((_row(key, results) for key, results in groups.items()), key=lambda row: row.metrics["mnll"][0])


def own_scores(folder: RunFolder) -> dict[str | None, dict[str, float]]:
    """By the calibrator (None: as it was trained), the scores of a run on the test images of its own source."""
    source = folder.card().run.source
    own = [
        evaluation
        for evaluation in folder.evaluations()
        if evaluation["source"] == source and not evaluation["outside"]
    ]
    if not own:
        raise CalgpError(f"{folder.path} has no scores yet; `calgp evaluate {folder.path}` makes them.")
    return {evaluation.get("calibrator"): evaluation["scores"] for evaluation in own}


def _row(key: tuple[str, str, str, int, int], results: list[Result]) -> Row:
    outside: dict[str, list[float]] = {}
    for folder, calibrator, _ in results:
        for evaluation in folder.evaluations():
            if evaluation.get("ood") and evaluation.get("calibrator") == calibrator:
                value = evaluation["ood"]["entropy"]["auroc"]["value"]
                outside.setdefault(evaluation["source"], []).append(value)
    return Row(
        *key,
        seeds=tuple(folder.card().run.seed for folder, _, _ in results),
        metrics={name: average([scores[name] for _, _, scores in results]) for name in METRICS},
        auroc={source: average(values) for source, values in outside.items()},
    )


def average(values: list[float]) -> tuple[float, float | None]:
    """Mean and standard error; of a single value there is no error."""
    return mean(values), stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
