"""What a report says of one run: its evaluations as rows, figures and galleries."""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor, equal, stack

from calgp import metrics
from calgp.data import Images
from calgp.errors import CalgpError
from calgp.runs.card import Card
from calgp.runs.evaluation import test_images
from calgp.runs.folder import RunFolder
from calgp.runs.outlier_metrics import Flagged, Number, OutOfDistribution
from calgp.runs.results import (
    Calibration,
    Evaluation,
    Intervals,
    Reliability,
    TrainRecord,
)

from . import figures
from .advice import advice, worst_classes
from .decisions import DecisionSection, decision_section, outside_sentence
from .gallery import Gallery, galleries, outside_galleries
from .metric_names import DETECTION, METRICS, SCORED_BY, VARIANTS
from .rerun import Rerun, rerun
from .words import count, day, decimal, detection, interval, nats, percent, summary

CERTAIN = 0.9  # a confidence that counts as certain
MOST_CLASSES = 30  # of a confusion matrix that is shown


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


@dataclass(frozen=True)
class Evaluated:
    """An evaluation, a row for each image if these are kept, and the images."""

    found: Evaluation
    columns: dict[str, Tensor] | None
    images: Images | None
    absent: str  # why there are no images


@dataclass(frozen=True)
class ScoreRow:
    """A line of the table of scores."""

    name: str
    value: str
    interval: str
    says: str


@dataclass(frozen=True)
class DetectionRow:
    """A line of the table of out-of-distribution detection: value and interval of each measure by one score."""

    name: str
    cells: list[tuple[str, str]]


@dataclass(frozen=True)
class ClassRow:
    """A line of the table of classes."""

    name: str
    n: str
    recall: str
    precision: str
    mistaken_for: str


@dataclass(frozen=True)
class InsideSection:
    """Images of the run's own classes."""

    source: str
    n: str
    samples: str
    seed: int
    summary: str
    scores: list[ScoreRow]
    values: metrics.Scores
    intervals: Intervals
    variants: list[tuple[str, str]]
    reliability: str
    bins: Reliability
    confidence: str | None
    decisions: DecisionSection | None
    flagged: str | None
    advice: list[str]
    classes: list[ClassRow]
    matrix: list[list[int]] | None
    names: tuple[str, ...]
    galleries: list[Gallery]
    absent: str


@dataclass(frozen=True)
class OutsideSection:
    """Images of other classes."""

    source: str
    n: str
    entropy: str
    mutual_information: str
    sentence: str | None
    figure: str | None
    measures: list[str]
    table: list[DetectionRow] | None
    auroc: Number | None
    decisions: str | None
    flagged: str | None
    galleries: list[Gallery]
    absent: str


@dataclass(frozen=True)
class RunSection:
    """A run with one calibrator or none."""

    label: str
    title: str
    colour: str
    facts: list[tuple[str, str]]
    calibrated: bool
    inside: list[InsideSection]
    outside: list[OutsideSection]
    training: str | None
    kl: bool
    rerun: Rerun
    evaluate: str


def results(folder: RunFolder) -> list[Result]:
    """A run's evaluations by the calibrator, those of the probabilities as trained first."""
    card, found = folder.card(), folder.evaluations()
    if not found:
        raise CalgpError(f"{folder.path} has not been evaluated; run `calgp evaluate {folder.path}` first.")
    names = sorted({each.calibrator for each in found}, key=lambda name: name or "")
    return [
        Result(folder, card, name, [each for each in found if each.calibrator == name], name == names[0])
        for name in names
    ]


def run_section(result: Result, label: str, colour: str, directory: Path | None) -> RunSection:
    folder, card = result.folder, result.card
    found = [_evaluated(folder, card, each, directory) for each in result.evaluations]
    found.sort(key=lambda each: (each.found.source != card.run.source, each.found.source))
    inside = [each for each in found if not each.found.outside]
    log = folder.log() if result.first else []
    steps = [record for record in log if isinstance(record, TrainRecord)]
    return RunSection(
        label=label,
        title=result.title,
        colour=colour,
        facts=facts(folder, card) + calibration_facts(found[0].found.calibration),
        calibrated=result.calibrator is not None,
        inside=[_inside(each, folder, card, colour) for each in inside],
        outside=[_outside(each, inside, card) for each in found if each.found.outside],
        training=figures.training(log) if steps else None,
        kl=any(record.kl for record in steps),
        rerun=rerun(folder, card, [each.found for each in found]),
        evaluate=f"calgp evaluate {shlex.quote(str(folder.path))}",
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
            images = test_images(card, found.source, directory=directory, convert=convert)
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
    if card.upgraded is not None:
        fitted = f"{count(card.train_images, 'image')} were seen by the upgrade"
        date = day(card.environment.started or "unknown")
        return [
            ("network", card.network),
            ("trained", "elsewhere"),
            ("upgraded", fitted),
            ("date", date),
            ("folder", folder.name),
        ]
    if card.vectors is not None:
        rows = f"{card.train_images:,} embeddings of {card.task.height:,} numbers, {card.vectors.train}"
        return [("fitted on", rows), ("date", day(card.environment.started or "unknown")), ("folder", folder.name)]
    return [
        ("network", card.network),
        ("trained on", f"{count(card.train_images, 'image')} of {run.source}"),
        ("steps", f"{run.total_steps(card.train_images):,}"),
        ("seed", ", ".join(str(member.seed) for member in card.members) or str(run.seed)),
        ("date", day(card.environment.started or "unknown")),
        ("folder", folder.name),
    ]


def calibration_facts(found: Calibration | None) -> list[tuple[str, str]]:
    """What the probabilities went through, and what it did to the hold-out that it was fitted on."""
    if found is None:
        return []
    numbers = [f"{name} {value:.3g}" for name, value in found.parameters.items() if name == "temperature"]
    before, after = decimal(found.before.mnll), decimal(found.after.mnll)
    facts = [
        ("calibrated by", ", ".join(numbers) or found.calibrator),
        ("hold-out MNLL", f"{before} → {after} ({count(found.n, 'image')})"),
    ]
    return facts + ([("note", found.warning)] if found.warning else [])


def _inside(evaluated: Evaluated, folder: RunFolder, card: Card, colour: str) -> InsideSection:
    found, own, columns = _with_confusion(evaluated, card), evaluated.found.own, evaluated.columns
    matrix = found.confusion and found.confusion.matrix() if len(card.classes) <= MOST_CLASSES else None
    return InsideSection(
        source=found.source,
        n=count(found.n, "image"),
        samples=found.computed_by,
        seed=found.seed,
        summary=summary(own.scores, _certain(columns)),
        scores=_score_rows(own.scores, own.intervals, _more_intervals(evaluated)),
        values=own.scores,
        intervals=own.intervals,
        variants=[(VARIANTS.get(name, name), decimal(value)) for name, value in own.ece_variants.items()],
        reliability=figures.reliability(own.reliability, ece=own.scores.ece, mce=own.scores.mce, colour=colour),
        bins=own.reliability,
        confidence=None
        if columns is None
        else figures.confidence_histogram(columns["confidence"].tolist(), (columns["label"] == columns["y"]).tolist()),
        decisions=decision_section(found, columns, card.classes),
        flagged=_flagged_sentence(found.flagged),
        advice=advice(found, card, str(folder.path)),
        classes=_class_rows(found, card.classes),
        matrix=matrix,
        names=card.classes,
        galleries=_shown(evaluated, galleries, card),
        absent=evaluated.absent,
    )


def _with_confusion(evaluated: Evaluated, card: Card) -> Evaluation:
    """An evaluation of an older version has no confusion matrix, but its predictions have what it needs."""
    found, columns = evaluated.found, evaluated.columns
    if found.confusion is not None or columns is None:
        return found
    return replace(found, confusion=metrics.confusion(columns["label"], columns["y"], classes=len(card.classes)))


def _share(value: float | None) -> str:
    return "–" if value is None else percent(value)


def _class_rows(found: Evaluation, classes: tuple[str, ...]) -> list[ClassRow]:
    return [
        ClassRow(name, f"{n:,}", _share(recall), _share(precision), wrong or "–")
        for name, n, recall, precision, wrong in worst_classes(found, classes)
    ]


def _outside(evaluated: Evaluated, inside: Sequence[Evaluated], card: Card) -> OutsideSection:
    found, own = evaluated.found, inside[0] if inside else None
    auroc = found.ood["entropy"].auroc if found.ood else None
    return OutsideSection(
        source=found.source,
        n=count(found.n, "image"),
        entropy=nats(found.mean_entropy),
        mutual_information=nats(found.mean_mutual_information),
        sentence=detection(found.source, found.inside or card.run.source, auroc.value) if auroc else None,
        figure=_entropies(evaluated, own, card, auroc),
        measures=[name for name, _ in DETECTION.values()],
        table=_detection_rows(found.ood) if found.ood else None,
        auroc=auroc,
        decisions=outside_sentence(found),
        flagged=_flagged_sentence(found.flagged),
        galleries=_shown(evaluated, outside_galleries, card),
        absent=evaluated.absent,
    )


def _entropies(evaluated: Evaluated, own: Evaluated | None, card: Card, auroc: Number | None) -> str | None:
    if own is None or own.columns is None or evaluated.columns is None:
        return None
    return figures.entropies(
        own.columns["entropy"].tolist(),
        evaluated.columns["entropy"].tolist(),
        classes=len(card.classes),
        names=(own.found.source, evaluated.found.source),
        auroc=None if auroc is None else (auroc.value, auroc.interval),
    )


def _shown(
    evaluated: Evaluated, choose: Callable[[Images, dict[str, Tensor], tuple[str, ...]], list[Gallery]], card: Card
) -> list[Gallery]:
    if evaluated.images is None or evaluated.columns is None:
        return []
    return choose(evaluated.images, evaluated.columns, card.classes)


def _certain(columns: dict[str, Tensor] | None) -> tuple[int, float, float] | None:
    """Of the images with a confidence of 90 % or more: how many, their mean confidence, the share that is right."""
    if columns is None or not (high := columns["confidence"] >= CERTAIN).any():
        return None
    right = (columns["label"] == columns["y"])[high].double()
    return int(high.sum()), columns["confidence"][high].double().mean().item(), right.mean().item()


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


def _score_rows(scores: metrics.Scores, intervals: Intervals, more: dict[str, list[float]]) -> list[ScoreRow]:
    return [
        ScoreRow(name, form(getattr(scores, key)), interval(getattr(intervals, key, more.get(key)), form), says)
        for key, (name, form, says) in METRICS.items()
    ]


def _detection_rows(ood: dict[str, OutOfDistribution]) -> list[DetectionRow]:
    rows = []
    for by in sorted(ood, key=lambda name: [*SCORED_BY, name].index(name)):
        numbers = [(getattr(ood[by], key), form) for key, (_, form) in DETECTION.items()]
        cells = [(form(each.value), interval(each.interval, form)) for each, form in numbers]
        rows.append(DetectionRow(SCORED_BY.get(by, by.replace("_", " ")), cells))
    return rows


def _flagged_sentence(flagged: Flagged | None) -> str | None:
    """What the threshold of the outlier score says of these images."""
    if flagged is None:
        return None
    by = SCORED_BY.get(flagged.score.replace("-", "_"), flagged.score)
    of = f"a threshold that at most {percent(flagged.false_alarm)} of ordinary images should exceed"
    return f"{percent(flagged.share)} are called outliers by {by}, with {of}."
