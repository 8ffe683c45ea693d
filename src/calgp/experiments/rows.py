"""Cells of an experiment, and the rows of numbers that runs fill them with."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean, stdev
from typing import Any

from calgp.runs import Run, RunFolder

PAPER = ("err", "mnll", "ece", "brier")
DETECTION = ("auroc", "aupr_out", "aupr_in", "fpr95")
# 97.5 % points of Student's t by degrees of freedom; beyond the table the normal one is close enough
STUDENT = (math.inf, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def student(freedom: int) -> float:
    """
    >>> student(2), student(100)
    (4.303, 1.96)
    """
    return STUDENT[freedom] if freedom < len(STUDENT) else 1.96


@dataclass(frozen=True)
class Shift:
    """Test images made worse: how, how much, and how many of them (a balanced part; None: all)."""

    kind: str
    severity: int
    images: int | None = None


@dataclass(frozen=True)
class Cell:
    """A place in a table or figure, and the runs that fill it, one a seed; without runs it says "not run".

    panel: data and network, in the paper's words. x: training size, depth or severity, where there is an axis.
    test: what is done to the test images before they are scored; nothing unless given.
    outside: a source of other classes, on which doubt is measured.
    instead: metrics that are told by another definition: (("ece", "ece_authors"),).
    """

    method: str
    panel: str
    x: float | None
    runs: tuple[Run, ...] = ()
    samples: int = 50
    test: Shift | None = None
    outside: str | None = None
    instead: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Row:
    """What runs found for a cell: a value a seed for each metric.

    halves: half the 95 % bootstrap interval over the test images, averaged over the seeds, where it is known.
    details: of each seed, what figures and the page need besides.
    """

    method: str
    panel: str
    x: float | None
    values: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    halves: Mapping[str, float] = field(default_factory=dict)
    details: tuple[Mapping[str, Any], ...] = ()
    planned: int = 0

    @property
    def label(self) -> str:
        return ", ".join([self.method, self.panel, *([] if self.x is None else [f"{self.x:,g}"])])

    def mean(self, metric: str) -> float | None:
        """The mean over seeds; None where nothing was run."""
        values = self.values.get(metric)
        return mean(values) if values else None

    def error(self, metric: str) -> float | None:
        """Standard error over the seeds; None for fewer than two."""
        values = self.values.get(metric, ())
        return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None

    def spread(self, metric: str) -> float | None:
        """What figures show around a mean: its standard error, or of one seed half the interval over test images."""
        error = self.error(metric)
        return self.halves.get(metric) if error is None else error

    def half(self, metric: str) -> float | None:
        """Half a 95 % interval: chance of training (Student's t over seeds) or of the test set, the larger one."""
        error, test = self.error(metric), self.halves.get(metric)
        known = [] if error is None else [student(len(self.values[metric]) - 1) * error]
        known += [] if test is None else [test]
        return max(known) if known else None


def row_of(cell: Cell, folders: Sequence[RunFolder]) -> Row:
    """The row of a cell from the run folders of its seeds that are done."""
    details = [_detail(cell, folder) for folder in folders]
    values: dict[str, list[float]] = {}
    halves: dict[str, list[float]] = {}
    for detail in details:
        found = _numbers(detail)
        for name, (value, half) in (found | {name: found[other] for name, other in cell.instead}).items():
            values.setdefault(name, []).append(value)
            if half is not None:
                halves.setdefault(name, []).append(half)
    return Row(
        cell.method, cell.panel, cell.x, {name: tuple(found) for name, found in values.items()},
        {name: mean(found) for name, found in halves.items()}, tuple(details), len(cell.runs),
    )  # fmt: skip


def evaluated_name(source: str, test: Shift | None) -> str:
    """What evaluations of a source, or of its corrupted images, are called."""
    if test is None:
        return source
    return f"{source} {test.kind} {test.severity}" + (f" of {test.images}" if test.images else "")


def held_out_name(source: str) -> str:
    """What evaluations of the hold-out of a run are called."""
    return f"{source} hold-out"


def evaluation(folder: RunFolder, run: Run, source: str, samples: int) -> dict[str, Any] | None:
    """The evaluation of a run on a source as its method means it (calibrated, where that is part of the method)."""
    found = folder.evaluation(source, run.method.calibrator)
    return found if found is not None and found["samples"] == samples else None


def _detail(cell: Cell, folder: RunFolder) -> dict[str, Any]:
    card = folder.card()
    log = [record for record in folder.log() if record["kind"] == "train"]
    own = evaluation(folder, card.run, evaluated_name(card.run.source, cell.test), cell.samples)
    outside = evaluation(folder, card.run, cell.outside, cell.samples) if cell.outside else None
    return {
        "seed": card.run.seed,
        "folder": folder.name,
        "environment": card.environment,
        "run": card.run,
        "task": card.task,
        "train_images": card.train_images,
        "train_seconds": sum(record.get("seconds", 0.0) for record in log),
        "own": own,
        "outside": outside,
    }


def _numbers(detail: Mapping[str, Any]) -> dict[str, tuple[float, float | None]]:
    """Metrics of one run, with half their bootstrap intervals."""
    own, outside = detail["own"], detail["outside"]
    halves = {name: (high - low) / 2 for name, (low, high) in own["intervals"].items()}
    found: dict[str, tuple[float, float | None]] = {name: (own["scores"][name], halves.get(name)) for name in PAPER}
    for name in ("paper", "authors"):
        found[f"ece_{name}"] = own["ece_variants"][name], halves.get("ece")
    found["brier_mean"] = own["scores"]["brier"] / detail["task"].classes, halves["brier"] / detail["task"].classes
    # confidence − accuracy: above 0 is over-confident; its chance is that of the errors
    found["gap"] = own["scores"]["confidence"] - (1 - own["scores"]["err"]), halves.get("err")
    found["entropy_inside"] = own["mean_entropy"], None
    if outside:
        found["entropy_outside"] = outside["mean_entropy"], None
        for name in DETECTION if outside["ood"] else ():
            number = outside["ood"]["entropy"][name]
            found[name] = number["value"], (number["interval"][1] - number["interval"][0]) / 2
    return found
