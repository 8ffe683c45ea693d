"""Whether a run folder is still right: its evaluations made once more, and compared with what it holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from calgp.errors import CalgpError
from calgp.runs.card import Card
from calgp.runs.evaluation import METRICS, evaluate_images
from calgp.runs.results import Evaluation
from calgp.runs.training_data import TrainingData

if TYPE_CHECKING:
    from calgp.runs.classifier import Classifier

PROBABILITY = 1e-4  # what another order of adding may change in float32, through tens of layers
MOST_SAMPLES = 10_000  # an evaluation of a file that claims more would never end
DECIDED = ("abstained", "sets", "set_size", "covered")  # by decisions, which may have been fitted again since
State = Literal["same bits", "within tolerance", "differs", "not checked"]


@dataclass(frozen=True)
class Check:
    """What was compared, what came of it, and the largest differences of a probability and of a score.

    >>> import calgp
    >>> [check.what for check in calgp.load("shipped").verify()][:2]
    ['training images', 'digits']
    """

    what: str
    state: State
    detail: str = ""
    probability: float | None = None
    score: float | None = None


def verify_run(classifier: Classifier, directory: Path | None, watch: Callable[[str], None]) -> list[Check]:
    """Compare the training images with their checksum, and every evaluation with one made now. Nothing is written.

    An evaluation made by the same versions, threads, device and processor must have the same bits; any other must
    agree within 1e-4 in every probability, and within 1e-4 + 2/n in every score of n images: one of them may have
    changed sides at a tie or at the edge of a bin. What is not here, or was given as images, is not checked.
    """
    watch("training images")
    checks = [_training_images(classifier.card, directory)]
    for found in (*classifier.folder.evaluations(), *classifier.folder.shifted()):
        what = ", ".join([found.source, *([found.calibrator] if found.calibrator else [])])
        watch(what)
        checks.append(_evaluation(classifier, directory, what, found))
    return checks


def _training_images(card: Card, directory: Path | None) -> Check:
    if card.upgraded is not None:
        return Check("training images", "not checked", f"{card.upgraded} was trained elsewhere")
    if card.vectors is not None:
        return Check("training images", "not checked", f"it was fitted on the embeddings {card.vectors.train}")
    try:
        found = TrainingData.of(card.run, directory).train.checksum()
    except CalgpError as error:
        return Check("training images", "not checked", str(error))
    if found != card.checksum:
        return Check("training images", "differs", f"{card.run.source} is not what the run was trained on")
    return Check("training images", "same bits")


def _evaluation(classifier: Classifier, directory: Path | None, what: str, before: Evaluation) -> Check:
    shift = before.corruption
    source, corruption = (before.source, None) if shift is None else (shift.of, shift.corruption)
    convert, skip = before.convert, before.skip_unreadable
    try:
        images = classifier.test_images(source, directory=directory, convert=convert, skip_unreadable=skip)
    except CalgpError as error:
        return Check(what, "not checked", str(error))
    if before.samples > MOST_SAMPLES:
        return Check(what, "not checked", f"it had {before.samples:,} samples; at most {MOST_SAMPLES:,} are made again")
    again = classifier.calibrated_by(before.calibration if before.calibrator else None)
    try:
        now, predicted = evaluate_images(
            again, source, images=images, passes=before.samples, engine=before.engine, seed=before.seed,
            convert=convert, skip_unreadable=skip, corruption=corruption,
        )  # fmt: skip
    except CalgpError as error:  # the run's own predictions, to compare images of other classes with
        return Check(what, "not checked", str(error))
    if now.checksum != before.checksum:
        return Check(what, "differs", f"{source} is not what the run was evaluated on")
    stored = classifier.folder.columns(classifier.folder.predictions_name(*before.named), len(classifier.classes)) or {}
    stored = {key: value for key, value in stored.items() if key not in DECIDED}
    return _compare(what, before, now, stored, predicted.columns | predicted.stored)


def _compare(
    what: str, before: Evaluation, now: Evaluation, stored: dict[str, Tensor], made: dict[str, Tensor]
) -> Check:
    old, new = _numbers(before), _numbers(now)
    if old.keys() != new.keys():
        return Check(what, "differs", "scored as inside images before and as outside ones now, or the other way")
    score = max(abs(new[name] - value) for name, value in old.items())
    probability = _largest(made, stored)
    if old == new and all(name in made and value.equal(made[name]) for name, value in stored.items()):
        return Check(what, "same bits", "", probability, score)
    within = score <= PROBABILITY + 2 / before.n and (probability is None or probability <= PROBABILITY)
    if not within:  # also when a difference is NaN
        return Check(what, "differs", "beyond the tolerance", probability, score)
    if before.environment == now.environment:
        return Check(what, "differs", "the same versions, threads and processor gave other bits", probability, score)
    return Check(what, "within tolerance", "made by other versions, threads or processor", probability, score)


def _largest(made: dict[str, Tensor], stored: dict[str, Tensor]) -> float | None:
    """The largest difference of probabilities, or where only these were kept, of confidences."""
    for name, probabilities in (("log_probs", lambda value: value.exp()), ("confidence", lambda value: value)):
        if name in stored and name in made and stored[name].shape == made[name].shape:
            return (probabilities(stored[name]) - probabilities(made[name])).abs().max().item()
    return None


def _numbers(found: Evaluation) -> dict[str, float]:
    """The scores of these images alone (AUROC is also of others) that change little where predictions do (MCE may)."""
    numbers = {"mean_entropy": found.mean_entropy, "mean_mutual_information": found.mean_mutual_information}
    return numbers | ({} if found.scores is None else {name: getattr(found.scores, name) for name in METRICS})
