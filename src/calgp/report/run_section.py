"""What a report shows of one run: its evaluations with figures and galleries; the words are in templates/parts.html."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor, equal, stack

from calgp import metrics
from calgp.data import Images
from calgp.errors import CalgpError
from calgp.runs.card import Card
from calgp.runs.evaluation import test_images
from calgp.runs.folder import RunFolder
from calgp.runs.outlier_metrics import OutOfDistribution
from calgp.runs.results import Calibration, Evaluation, Intervals

from . import figures
from .advice import advice, worst_classes
from .decisions import risk_figure, sets_figure
from .gallery import Gallery, galleries, outside_galleries
from .metric_names import METRICS, SCORED_BY
from .rerun import Rerun, rerun
from .words import certain, count, day, decimal, interval, summary

ScoreRow = tuple[str, str, str, str]  # name, value, interval, what it says


@dataclass(frozen=True)
class Result:
    """A run and its evaluations with one calibrator, or with none."""

    folder: RunFolder
    card: Card
    calibrator: str | None
    evaluations: list[Evaluation]
    first: bool  # of the run's results: the one with which its training is shown

    @property
    def title(self) -> str:
        return self.card.title(self.calibrator)

    @property
    def command(self) -> str:
        """What evaluates the run."""
        return f"calgp evaluate {shlex.quote(str(self.folder.path))}"


@dataclass(frozen=True)
class Evaluated:
    """An evaluation, a row for each image if these are kept, and the images."""

    found: Evaluation
    columns: dict[str, Tensor] | None
    images: Images | None
    absent: str  # why there are no images


@dataclass(frozen=True)
class InsideSection:
    """Images of the run's own classes."""

    found: Evaluation
    summary: str
    advice: list[str]
    scores: list[ScoreRow]
    reliability: str
    confidence: str | None
    risk: str | None
    sets: str | None
    classes: list[tuple[str, int, float | None, float | None, str]]
    galleries: list[Gallery]
    absent: str


@dataclass(frozen=True)
class OutsideSection:
    """Images of other classes."""

    found: Evaluation
    figure: str | None
    ood: list[tuple[str, OutOfDistribution]]  # by score
    galleries: list[Gallery]
    absent: str


@dataclass(frozen=True)
class RunSection:
    """A run with one calibrator or none."""

    result: Result
    label: str
    colour: str
    facts: list[tuple[str, str]]
    inside: list[InsideSection]
    outside: list[OutsideSection]
    training: str | None
    kl: bool
    rerun: Rerun


def results(folder: RunFolder) -> list[Result]:
    """A run's evaluations by the calibrator, those as trained first; in each the run's own source comes first."""
    card, found = folder.card(), folder.evaluations()
    if not found:
        raise CalgpError(f"{folder.path} has not been evaluated; run `calgp evaluate {folder.path}` first.")
    names = sorted({each.calibrator for each in found}, key=lambda name: name or "")
    found = sorted(found, key=lambda each: (each.source != card.run.source, each.source))
    return [
        Result(folder, card, name, [each for each in found if each.calibrator == name], name == names[0])
        for name in names
    ]


def run_section(result: Result, label: str, colour: str, directory: Path | None) -> RunSection:
    folder, card = result.folder, result.card
    found = [_evaluated(folder, card, each, directory) for each in result.evaluations]
    inside = [each for each in found if not each.found.outside]
    log = folder.log() if result.first else []
    steps = [record for record in log if record.kind == "train"]
    return RunSection(
        result,
        label,
        colour,
        facts=facts(folder, card) + calibration_facts(result.evaluations[0].calibration),
        inside=[_inside(each, folder, card, colour) for each in inside],
        outside=[_outside(each, inside, card) for each in found if each.found.outside],
        training=figures.training(log) if steps else None,
        kl=any(record.kl for record in steps),
        rerun=rerun(folder, card, result.evaluations),
    )


def _evaluated(folder: RunFolder, card: Card, found: Evaluation, directory: Path | None) -> Evaluated:
    name, absent = folder.predictions_name(found.source, found.calibrator), ""
    if (stored := folder.checksum(name)) is not None and found.predictions not in (None, stored):
        return Evaluated(found, None, None, f"{name} is not of the evaluation that gave these scores: evaluate again.")
    columns = folder.columns(name, len(card.classes))
    if columns is None:
        return Evaluated(found, None, None, f"The folder has no {name}: evaluate again to see them.")
    if card.vectors is not None:
        return Evaluated(found, columns, None, "Embeddings have no images to show.")
    for convert in (False, True):  # the evaluation's checksum shows which of them it saw
        try:
            images = test_images(
                card, found.source, directory=directory, convert=convert, skip_unreadable=found.skip_unreadable
            )
        except CalgpError as error:
            absent = absent or str(error)
            continue
        if images.checksum() == found.checksum and equal(images.y, columns["y"]):
            return Evaluated(found, columns, images, "")
        absent = "The images that are there now are not those that were evaluated (their checksum differs)."
    return Evaluated(found, columns, None, absent)


def facts(folder: RunFolder, card: Card) -> list[tuple[str, str]]:
    """What was trained, on what and when, as names and values."""
    run = card.run
    when_and_where = [("date", day(card.environment.started or "unknown")), ("folder", folder.name)]
    if card.upgraded is not None:
        fitted = f"{count(card.train_images, 'image')} were seen by the upgrade"
        return [("network", card.network), ("trained", "elsewhere"), ("upgraded", fitted), *when_and_where]
    if card.vectors is not None:
        rows = f"{card.train_images:,} embeddings of {card.task.height:,} numbers, {card.vectors.train}"
        return [("fitted on", rows), *when_and_where]
    return [
        ("network", card.network),
        ("trained on", f"{count(card.train_images, 'image')} of {run.source}"),
        ("steps", f"{card.steps_made(folder.log()):,}"),
        ("seed", ", ".join(str(member.seed) for member in card.members) or str(run.seed)),
        *when_and_where,
    ]


def calibration_facts(found: Calibration | None) -> list[tuple[str, str]]:
    """What the probabilities went through, and what it did to the hold-out that it was fitted on."""
    if found is None:
        return []
    temperature = found.parameters.get("temperature")
    before, after = decimal(found.before.mnll), decimal(found.after.mnll)
    return [
        ("calibrated by", found.calibrator if temperature is None else f"temperature {temperature:.3g}"),
        ("hold-out MNLL", f"{before} → {after} ({count(found.n, 'image')})"),
        *([("note", found.warning)] if found.warning else []),
    ]


def _inside(evaluated: Evaluated, folder: RunFolder, card: Card, colour: str) -> InsideSection:
    found, own, columns = _with_confusion(evaluated, card), evaluated.found.own, evaluated.columns
    sure = None if columns is None else (columns["confidence"], columns["label"] == columns["y"])
    return InsideSection(
        found,
        summary=summary(own.scores, sure and certain(*sure)),
        advice=advice(found, card, str(folder.path)),
        scores=score_rows(own.scores, own.intervals, _more_intervals(evaluated)),
        reliability=figures.reliability(own.reliability, ece=own.scores.ece, mce=own.scores.mce, colour=colour),
        confidence=sure and figures.confidence_histogram(*(column.tolist() for column in sure)),
        risk=risk_figure(columns, found.decisions) if columns else None,
        sets=sets_figure(found.decisions, card.classes),
        classes=worst_classes(found, card.classes),
        galleries=galleries(evaluated.images, columns, card.classes) if evaluated.images and columns else [],
        absent=evaluated.absent,
    )


def _with_confusion(evaluated: Evaluated, card: Card) -> Evaluation:
    """An evaluation of an older version has no confusion matrix, but its predictions have what it needs."""
    found, columns = evaluated.found, evaluated.columns
    if found.confusion is not None or columns is None:
        return found
    return replace(found, confusion=metrics.confusion(columns["label"], columns["y"], classes=len(card.classes)))


def _outside(evaluated: Evaluated, inside: Sequence[Evaluated], card: Card) -> OutsideSection:
    found, images, columns = evaluated.found, evaluated.images, evaluated.columns
    return OutsideSection(
        found,
        figure=_entropies(evaluated, inside[0], card) if inside else None,
        ood=sorted((found.ood or {}).items(), key=lambda pair: [*SCORED_BY, pair[0]].index(pair[0])),
        galleries=outside_galleries(images, columns, card.classes) if images and columns else [],
        absent=evaluated.absent,
    )


def _entropies(evaluated: Evaluated, own: Evaluated, card: Card) -> str | None:
    if own.columns is None or evaluated.columns is None:
        return None
    auroc = evaluated.found.ood["entropy"].auroc if evaluated.found.ood else None
    return figures.entropies(
        own.columns["entropy"].tolist(),
        evaluated.columns["entropy"].tolist(),
        classes=len(card.classes),
        names=(own.found.source, evaluated.found.source),
        auroc=auroc and (auroc.value, auroc.interval),
    )


def _more_intervals(evaluated: Evaluated) -> dict[str, list[float]]:
    """Of the scores for which evaluation keeps no intervals, by the same bootstrap, if all probabilities were kept."""
    columns = evaluated.columns
    if columns is None or "log_probs" not in columns:
        return {}
    found = metrics.bootstrap(
        metrics.outcomes(columns["log_probs"], columns["y"]),
        lambda o: stack([metrics.mce(o), o.entropy.double().mean()]),
        resamples=500,
        seed=evaluated.found.seed,
    )
    return dict(zip(("mce", "entropy"), stack([found.low, found.high], 1).tolist(), strict=True))


def score_rows(scores: metrics.Scores, intervals: Intervals, more: dict[str, list[float]]) -> list[ScoreRow]:
    return [
        (name, form(getattr(scores, key)), interval(getattr(intervals, key, more.get(key)), form), says)
        for key, (name, form, says) in METRICS.items()
    ]
