"""From a classifier and images to an Evaluation: predictions, scores, intervals."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from lightning_fabric import Fabric
from torch import Tensor

from calgp import metrics
from calgp.data import Corruption, Images, corrupted, load
from calgp.data.images import to_unit_interval
from calgp.data.path_source import TEST_SHARE
from calgp.data.sources import share_files
from calgp.errors import CalgpError, short_repr
from calgp.gp import Batch, Engine, Model, NumericalError, Passes, Predictive, predict_batches
from calgp.metrics import Outcomes, Scores
from calgp.nets import Task
from calgp.runs.card import Card
from calgp.runs.decision_metrics import add_outcomes, decision_metrics, selective_scores
from calgp.runs.environment import arithmetic
from calgp.runs.outlier_metrics import RESAMPLES, flagged, out_of_distribution, outlier_columns
from calgp.runs.ranks import gathered, together
from calgp.runs.results import Corrupted, Evaluation, Histogram, Intervals, OwnClasses, Reliability

if TYPE_CHECKING:
    from calgp.runs.classifier import Classifier
    from calgp.runs.folder import RunFolder

METRICS = {"err": metrics.error_rate, "mnll": metrics.mnll, "ece": metrics.ece, "brier": metrics.brier}  # the paper's
T = TypeVar("T")
BATCH = 100
BINS = 40  # of entropies: few enough to keep, fine enough to draw a density
MOST_STORED = 20_000_000  # numbers: log-probabilities of a larger evaluation are scored as they come and not stored


@dataclass(frozen=True)
class PredictedImages:
    """What was predicted of each image of an evaluation.

    columns: label, confidence, entropy, mutual_information, y, rows, and what decisions say: one entry an image.
    stored: log-probabilities and their spread [N, Q], unless there are too many. outcomes: of the run's own classes.
    """

    columns: dict[str, Tensor]
    stored: dict[str, Tensor]
    outcomes: Outcomes | None
    names: Sequence[str] | None


def batches(
    images: Images, model: Model, parts: Iterable[slice] | None = None, seen: Callable[[Tensor], None] = lambda x: None
) -> Iterator[Batch]:
    """Images in order, or some `parts` of them, as `predict` takes them: where the model is, in its floating type.

    `seen` gets their bytes.
    """
    parameter = next(model.parameters())
    for part, x in images.read(images.parts(BATCH) if parts is None else parts):
        seen(x)
        yield to_unit_interval(x).to(parameter), images.rows[part].to(parameter.device)


def over_ranks(fabric: Fabric | None, n: int, do: Callable[[list[slice]], Iterable[T]]) -> list[T]:
    """What `do` finds for the batches of n images, each a batch's, in their order; every rank does some and has all.

    Batches stay whole, so that a rank computes the same bits that one process would; no image is there twice.
    """
    parts = [slice(first, min(first + BATCH, n)) for first in range(0, n, BATCH)]
    if fabric is None or fabric.world_size == 1:
        return list(do(parts))
    mine = parts[fabric.global_rank :: fabric.world_size]
    found = gathered(fabric, together(fabric, lambda: list(do(mine))))
    return [found[place % fabric.world_size][place // fabric.world_size] for place in range(len(parts))]


def score(model: Model, images: Images, *, passes: int | None, seed: int, fabric: Fabric | None = None) -> Scores:
    """ERR, MNLL, ECE, BRIER and the others, on images of the run's own classes; with a `fabric`, by all its ranks.

    >>> import calgp
    >>> from calgp.data import load
    >>> score(calgp.load("shipped").model, load("digits", "test"), passes=1, seed=0).err < 0.03
    True
    """

    def outcomes(parts: list[slice]) -> Iterator[Outcomes]:
        predicted = predict_batches(model, batches(images, model, parts), passes=passes, seed=seed)
        for part, predictive in zip(parts, predicted, strict=True):
            yield metrics.outcomes(predictive.log_probs.cpu(), images.y[part])

    return metrics.scores(Outcomes.cat(over_ranks(fabric, len(images), outcomes)))


def evaluate_images(
    classifier: Classifier,
    source: str,
    *,
    images: Images | None = None,
    directory: Path | None = None,
    passes: int | None = None,
    engine: Engine | None = None,
    seed: int = 0,
    convert: bool = False,
    skip_unreadable: bool = False,
    corruption: Corruption | None = None,
    watch: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Evaluation, PredictedImages]:
    """`Classifier.evaluate` without writing: the evaluation, and what was predicted of each image."""
    card, how = classifier.card, classifier.passes(passes, engine, seed)
    if images is None:
        images = classifier.test_images(source, directory=directory, convert=convert, skip_unreadable=skip_unreadable)
    check_form(images, card.task, source)
    if corruption is not None:
        images = corrupted(images, corruption.kind, corruption.severity, seed=corruption.seed)
    outside = images.classes != card.classes
    clock = time.perf_counter()
    predicted = predict_images(classifier, images, how=how, seed=seed, outside=outside, watch=watch)
    seconds = time.perf_counter() - clock
    ood = out_of_distribution(classifier.own_predictions(), predicted.columns, seed=seed) if outside else None
    shift = corruption and Corrupted(source, corruption.kind, corruption.severity, corruption.seed)
    found = _scored(
        classifier, images, predicted, how, seed, source=f"{source}~{corruption.label}" if corruption else source,
        corruption=shift, convert=convert, skip_unreadable=skip_unreadable, prediction_seconds=round(seconds, 3),
        ood=ood, inside=card.run.source if ood else None,
    )  # fmt: skip
    return found, predicted


def _scored(
    classifier: Classifier, images: Images, predicted: PredictedImages, how: Passes, seed: int, **asked: Any
) -> Evaluation:
    """What predictions of images are worth by themselves, beside what was `asked`."""
    columns, outcomes, fitted = predicted.columns, predicted.outcomes, classifier.active_decisions
    classes, log_probs = len(classifier.classes), predicted.stored.get("log_probs")
    own = None if outcomes is None else score_outcomes(outcomes, columns["y"], log_probs, seed=seed)
    most = math.log(classes)
    counts = torch.histc(columns["entropy"].float().clamp(0, most), BINS, 0, most)
    return Evaluation(
        **asked,
        outside=outcomes is None,
        n=len(images),
        samples=how.count,
        engine=how.engine,
        seed=seed,
        calibrator=None if classifier.calibration is None else classifier.calibration.calibrator,
        calibration=classifier.calibration,
        checksum=images.checksum(),
        environment=arithmetic(classifier.fabric),
        entropy_histogram=Histogram(tuple(most * place / BINS for place in range(BINS + 1)), tuple(counts.tolist())),
        mean_entropy=columns["entropy"].mean().item(),
        mean_mutual_information=columns["mutual_information"].mean().item(),
        decisions=fitted and decision_metrics(fitted, columns, classes, outside=outcomes is None),
        **(vars(own) if own else {}),
        confusion=own and metrics.confusion(columns["label"], columns["y"], classes=classes),
        selective=selective_scores(columns) if own else {},
        flagged=flagged(classifier.outlier_names, classifier.outlier_threshold, columns),
    )


def write_results(folder: RunFolder, classes: Sequence[str], found: Evaluation, by: PredictedImages) -> Evaluation:
    """Keep predictions and scores in a run folder: the evaluation, with the checksum of its predictions."""
    checksum = folder.write_tensors(
        folder.predictions_name(*found.named),
        by.columns | by.stored,
        {
            "source": found.source, "samples": found.samples, "engine": found.engine, "seed": found.seed,
            "calibrator": found.calibrator, "classes": list(classes),
            "names": None if by.names is None else list(by.names),
        },
    )  # fmt: skip
    found = replace(found, predictions=checksum)
    folder.write_evaluation(found)
    return found


def predict_images(
    classifier: Classifier, images: Images, *, how: Passes, seed: int, outside: bool, watch: Callable[[int, int], None]
) -> PredictedImages:
    """What the classifier predicts and decides of each image, by all ranks."""
    fabric = classifier.fabric

    def found(parts: list[slice]) -> Iterator[tuple[dict[str, Tensor], Outcomes | None]]:
        seen: deque[Tensor] = deque()  # images that were read, and are not predicted yet
        data = batches(images, classifier.model, parts, seen.append)
        predictives = classifier.predict_batches(data, how, seed=seed)
        for part, predictive in zip(parts, predictives, strict=True):
            y, log_probs = images.y[part], predictive.log_probs
            store = len(images) * log_probs.shape[1] <= MOST_STORED
            stored = {"log_probs": log_probs, "spread": predictive.spread} if store else {}
            decided = add_outcomes(classifier.decide_on(predictive, seen.popleft()), y, outside=outside)
            columns = {name: column for name, column in decided.items() if column.dim() == 1}
            watch(len(y) * fabric.world_size, len(images))
            scored = outlier_columns(classifier.outlier_names, predictive)
            columns |= columns_of(predictive) | scored | stored
            yield columns, None if outside else metrics.outcomes(log_probs, y)

    parts, outcomes = zip(*over_ranks(fabric, len(images), found), strict=True)
    columns = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    stored = {name: columns.pop(name) for name in ("log_probs", "spread") if name in columns}
    columns |= {"y": images.y, "rows": images.rows}
    return PredictedImages(columns, stored, None if outside else Outcomes.cat(outcomes), images.names)


def columns_of(predictive: Predictive) -> dict[str, Tensor]:
    """What is kept of each image."""
    return {
        "label": predictive.labels,
        "confidence": predictive.confidence,
        "entropy": predictive.entropy,
        "mutual_information": predictive.mutual_information,
    }


def predict_on_cpu(model: Model, data: Iterable[Batch], how: Passes, *, seed: int) -> Iterator[Predictive]:
    """The predictive of each batch of (images, rows), on the CPU; numbers that fail are a CalgpError."""
    try:
        for part in predict_batches(model, data, passes=how.count, engine=how.engine, seed=seed):
            yield on_cpu(part)
    except NumericalError as error:
        raise CalgpError(f"These images cannot be predicted: {error}.") from error


def on_cpu(part: Predictive) -> Predictive:
    return replace(part, **{name: value.cpu() for name, value in vars(part).items() if isinstance(value, Tensor)})


def score_outcomes(outcomes: Outcomes, y: Tensor, log_probs: Tensor | None, *, seed: int) -> OwnClasses:
    """Scores with bootstrap intervals, the reliability diagram, and ECE by its other definitions."""
    drawn = metrics.bootstrap_scores(outcomes, resamples=RESAMPLES, seed=seed)
    variants = {name: metrics.preset_ece(outcomes, preset).item() for name, preset in metrics.ECE_PRESETS.items()}
    variants["equal mass"] = metrics.ece(outcomes, binning="equal-mass").item()
    if log_probs is not None:
        variants["classwise"] = metrics.classwise_ece(log_probs, y).item()
    intervals = Intervals(**{name: (each.low.item(), each.high.item()) for name, each in drawn.items()})
    table = metrics.reliability(outcomes)
    edges, count = tuple(table.edges.tolist()), tuple(table.count.tolist())
    known = (
        tuple(value if n else None for value, n in zip(values.tolist(), count, strict=True))
        for values in (table.accuracy, table.confidence)
    )
    return OwnClasses(metrics.scores(outcomes), intervals, variants, Reliability(edges, count, *known))


def test_images(
    card: Card, source: str, *, directory: Path | None = None, convert: bool = False, skip_unreadable: bool = False
) -> Images:
    """The test part of a source, in the form that the run was trained on; `convert` brings any other into it.

    `skip_unreadable` leaves damaged files out, as it does where the run was trained so. Images of some of the run's
    classes, and of no others, get its labels.
    """
    size, colour = form(card.task) if convert else (card.run.size, card.run.colour)
    share = TEST_SHARE if share_files(source, card.run.source) else 1  # a folder that was not trained on is used whole
    images = load(
        source, "test", directory=directory, size=size, colour=colour, test_share=share,
        skip_unreadable=skip_unreadable or card.run.skip_unreadable,
    )  # fmt: skip
    check_form(images, card.task, source)
    return _labelled_as(images, card.classes, source)


def _labelled_as(images: Images, classes: tuple[str, ...], source: str) -> Images:
    """Images of some of these classes with their labels; those of other classes alone as they are."""
    known = [name for name in images.classes if name in classes]
    if images.classes == classes or not known:
        return images
    if strange := [name for name in images.classes if name not in classes]:
        raise CalgpError(
            f"{source} has classes of the run ({short_repr(known[0])}, …) and others ({short_repr(strange[0])}, …), "
            "which are scored differently: put images of other classes into a source of their own."
        )
    labels = torch.tensor([classes.index(name) for name in images.classes])
    return replace(images, y=labels[images.y], classes=classes)


def check_form(images: Images, task: Task, source: str) -> None:
    """Images of another form than the run's are refused."""
    shape, wanted = tuple(images.x.shape[1:]), (task.channels, task.height, task.width)
    if shape != wanted:
        has, wants = (" × ".join(map(str, sizes)) for sizes in (shape, wanted))
        raise CalgpError(
            f"{source} has images of {has}, the run was trained on {wants} (channels × height × width). "
            "--convert resizes and recolours them."
        )


def form(task: Task) -> tuple[int, Literal["grey", "rgb"]]:
    """Size and colour that bring any image into the form of a task."""
    if task.height != task.width:
        raise CalgpError(f"The run takes images of {task.height} × {task.width}; others can be made square only.")
    return task.height, colour_of(task)


def colour_of(task: Task) -> Literal["grey", "rgb"]:
    """The colour of the images that a run takes."""
    if task.channels not in (1, 3):
        raise CalgpError(f"The run takes {task.channels} channels; image files are read as grey (1) or RGB (3) only.")
    return "grey" if task.channels == 1 else "rgb"
