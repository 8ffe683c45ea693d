"""Whether a run folder still says the truth: its evaluations made once more, and compared with what it holds."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lightning_fabric import Fabric
from torch import Tensor

from calgp.data import Corruption
from calgp.errors import CalgpError
from calgp.runs.comparison import METRICS
from calgp.runs.evaluation import Evaluation, examine, one_device, test_images
from calgp.runs.folder import RunFolder, arithmetic
from calgp.runs.training_data import TrainingData

PROBABILITY = 1e-4  # what another order of adding may change in float32, through tens of layers
DECIDED = ("abstained", "sets", "set_size", "covered")  # by decisions, which may have been made anew since
State = Literal["same bits", "within tolerance", "differs", "not checked"]


@dataclass(frozen=True)
class Check:
    """What was compared, what came of it, and the largest differences of a probability and of a score."""

    what: str
    state: State
    told: str = ""
    probability: float | None = None
    score: float | None = None


def verify(
    folder: RunFolder,
    fabric: Fabric | None = None,
    *,
    directory: Path | None = None,
    watch: Callable[[str], None] = lambda what: None,
) -> list[Check]:
    """Compare the training images with their checksum, and every evaluation with one made now. Nothing is written.

    An evaluation made by the same versions, threads, device and processor must have the same bits; any other must
    agree within 1e-4 in every probability, and within 1e-4 + 2/n in every score of n images: one of them may have
    changed sides at a tie or at the edge of a bin. What is not here, or was given as images, is not checked.
    """
    fabric = one_device(fabric)
    return list(_checks(folder, fabric, directory, watch))


def _checks(folder: RunFolder, fabric: Fabric, directory: Path | None, watch: Callable[[str], None]) -> Iterator[Check]:
    watch("training images")
    yield _training_images(folder, directory)
    for summary in (*folder.evaluations(), *folder.shifted()):
        what = ", ".join([summary["source"], *([summary["calibrator"]] if summary.get("calibrator") else [])])
        watch(what)
        yield _evaluation(folder, fabric, directory, what, summary)


def _training_images(folder: RunFolder, directory: Path | None) -> Check:
    card = folder.card()
    try:
        found = TrainingData.of(card.run, directory).train.checksum()
    except CalgpError as error:
        return Check("training images", "not checked", str(error))
    if found != card.checksum:
        return Check("training images", "differs", f"{card.run.source} is not what the run was trained on")
    return Check("training images", "same bits")


def _evaluation(folder: RunFolder, fabric: Fabric, directory: Path | None, what: str, summary: dict[str, Any]) -> Check:
    shift = dict(summary.get("corruption") or {})
    source = shift.pop("of", summary["source"])
    corruption = Corruption(**shift) if shift else None
    calibration = summary.get("calibration") if summary.get("calibrator") else None
    convert = summary.get("convert", False)
    try:
        images = test_images(folder, source, directory=directory, convert=convert)
    except CalgpError as error:
        return Check(what, "not checked", str(error))
    now = examine(
        folder, fabric, source=source, images=images, samples=summary["samples"], seed=summary["seed"],
        convert=convert, calibration=calibration, corruption=corruption,
    )  # fmt: skip
    if now.summary["checksum"] != summary["checksum"]:
        return Check(what, "differs", f"{source} is not what the run was evaluated on")
    name = folder.predictions_name(source, summary.get("calibrator"), corruption.label if corruption else None)
    stored = folder.tensors(name) if (folder.path / name).is_file() else {}
    stored = {key: value for key, value in stored.items() if key not in DECIDED}
    return _compared(what, now, summary, stored, same=summary.get("environment") == arithmetic(fabric))


def _compared(what: str, now: Evaluation, summary: dict[str, Any], stored: dict[str, Tensor], *, same: bool) -> Check:
    before, after = _numbers(summary), _numbers(now.summary)
    if before.keys() != after.keys():
        return Check(what, "differs", "scored as inside images before and as outside ones now, or the other way")
    score = max(abs(after[name] - value) for name, value in before.items())
    made = now.columns | now.kept
    probability = _largest(made, stored)
    if before == after and all(name in made and value.equal(made[name]) for name, value in stored.items()):
        return Check(what, "same bits", "", probability, score)
    within = score <= PROBABILITY + 2 / summary["n"] and (probability is None or probability <= PROBABILITY)
    if not within:
        return Check(what, "differs", "beyond the tolerance", probability, score)
    if same:
        return Check(what, "differs", "the same versions, threads and processor gave other bits", probability, score)
    return Check(what, "within tolerance", "made by other versions, threads or processor", probability, score)


def _largest(made: dict[str, Tensor], stored: dict[str, Tensor]) -> float | None:
    """The largest difference of probabilities, or where only these were kept, of confidences."""
    for name, probabilities in (("log_probs", lambda value: value.exp()), ("confidence", lambda value: value)):
        if name in stored and name in made and stored[name].shape == made[name].shape:
            return (probabilities(stored[name]) - probabilities(made[name])).abs().max().item()
    return None


def _numbers(summary: dict[str, Any]) -> dict[str, float]:
    """The scores of these images alone (AUROC is also of others) that change little where predictions do (MCE may)."""
    found = {name: summary[name] for name in ("mean_entropy", "mean_mutual_information")}
    return found | {name: value for name, value in summary.get("scores", {}).items() if name in METRICS}
