"""Several runs side by side: one row for each setting, averaged over its seeds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from calgp.errors import CalgpError
from calgp.runs.folder import RunFolder

METRICS = ("err", "mnll", "ece", "brier")


@dataclass(frozen=True)
class Row:
    """One setting. A metric is (mean, standard error over the seeds); of a single seed there is no error."""

    method: str
    backbone: str
    source: str
    train_images: int
    steps: int
    seeds: tuple[int, ...]
    metrics: dict[str, tuple[float, float | None]]
    auroc: dict[str, tuple[float, float | None]]  # by the outside source: how well entropy tells it from the inside


def compare(folders: Sequence[RunFolder]) -> list[Row]:
    """Rows over run folders that have been evaluated on their own source, the lowest MNLL first."""
    groups: dict[tuple[str, str, str, int, int], list[RunFolder]] = {}
    for folder in folders:
        card = folder.card()
        steps = card.run.total_steps(card.train_images)
        key = (card.run.label, card.run.backbone_label, card.run.source, card.train_images, steps)
        groups.setdefault(key, []).append(folder)
    return sorted((_row(key, members) for key, members in groups.items()), key=lambda row: row.metrics["mnll"][0])


def own_scores(folder: RunFolder) -> dict[str, float]:
    """The scores of a run on the test images of the source that it was trained on."""
    source = folder.card().run.source
    for evaluation in folder.evaluations():
        if evaluation["source"] == source:
            return evaluation["scores"]
    raise CalgpError(f"{folder.path} has no scores yet; `calgp evaluate {folder.path}` makes them.")


def _row(key: tuple[str, str, str, int, int], folders: list[RunFolder]) -> Row:
    scores = [own_scores(folder) for folder in folders]
    outside: dict[str, list[float]] = {}
    for folder in folders:
        for evaluation in folder.evaluations():
            if evaluation.get("ood"):
                value = evaluation["ood"]["entropy"]["auroc"]["value"]
                outside.setdefault(evaluation["source"], []).append(value)
    return Row(
        *key,
        seeds=tuple(folder.card().run.seed for folder in folders),
        metrics={name: _average([score[name] for score in scores]) for name in METRICS},
        auroc={source: _average(values) for source, values in outside.items()},
    )


def _average(values: list[float]) -> tuple[float, float | None]:
    return mean(values), stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
