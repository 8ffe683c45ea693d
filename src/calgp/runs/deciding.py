"""Fitting decisions on the hold-out of a run."""

from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric

from calgp import decisions
from calgp.data import Images
from calgp.decisions import Decisions, PredictionSets, Selection, doubt, keyed_uniform
from calgp.errors import CalgpError
from calgp.gp import Predictive
from calgp.runs.calibrating import calibrated_share, check_held_out
from calgp.runs.evaluation import BATCH, Predictor, batches, columns_of, one_device
from calgp.runs.folder import RunFolder
from calgp.runs.training_data import held_out_images


def decide(
    folder: RunFolder,
    fabric: Fabric | None = None,
    *,
    error: float | None = None,
    confidence: float | None = 0.95,
    score: str = "confidence",
    coverage: float | None = None,
    sets: str = "aps",
    by_class: bool = False,
    empty: bool = False,
    calibrated: bool = True,
    held_out: Images | None = None,
    directory: Path | None = None,
    samples: int = 50,
    seed: int = 0,
) -> dict[str, Any]:
    """Fit decisions to a finished run of any method and keep them in decisions.json; what that file holds.

    `error` (with `confidence`, `score`) asks for a threshold, `coverage` (with `sets`, `by_class`, `empty`) for
    prediction sets; see `Selection.fit` and `PredictionSets`. From then on `evaluate` and `decide_files` use them.

    The images are the run's hold-out, or `held_out`: images that the run was not trained on. Those that its calibrator
    was fitted on are left out, for the promises would not hold with them: `calibrate(folder, share=0.5)` leaves half.
    """
    decisions.check_wanted(error=error, confidence=confidence, score=score, coverage=coverage, sets=sets)
    fabric, card = one_device(fabric), folder.card()
    images = held_out_images(folder, directory) if held_out is None else held_out
    check_held_out(images, card)
    if calibrated:
        images = _not_calibrated_on(folder, images)
    predictor = Predictor(folder.model().to(fabric.device), folder.calibrator() if calibrated else None)
    data = batches(images, predictor.model)
    predictive = Predictive.cat(predictor.predict(data, samples=samples, seed=seed))
    selection = None
    if error is not None:
        wrong = predictive.labels != images.y
        doubts = doubt(columns_of(predictive), score)
        selection = Selection.fit(doubts, wrong, error=error, confidence=confidence, score=score)
    chosen = None
    if coverage is not None:
        chosen = PredictionSets.fit(
            predictive.log_probs, images.y, coverage=coverage, kind=sets, by_class=by_class, empty=empty,
            uniform=torch.cat([keyed_uniform(x) for _, x in images.read(images.parts(BATCH))]),
        )  # fmt: skip
    found = decisions.to_json(Decisions(selection, chosen))
    found |= {"calibration": folder.probabilities(calibrated=calibrated)}
    found |= {"n": len(images), "samples": samples, "seed": seed, "warning": _warning(selection, images)}
    with folder.owned():
        folder.write_decisions(found)
    return found


def _not_calibrated_on(folder: RunFolder, images: Images) -> Images:
    """The images that the run's calibrator has not been fitted on."""
    calibration = folder.calibration()
    if calibration is None or calibration.get("of", images.checksum()) != images.checksum():
        return images  # it was fitted on others
    share = calibration.get("share", 1.0)
    left, _ = calibrated_share(images, share, calibration["seed"])
    if left is None:
        raise CalgpError(
            f"{folder.path} was calibrated on all its held-out images, so none is left to make promises with: "
            f"`calgp calibrate {folder.path} --share 0.5` leaves half of them, --uncalibrated decides on the "
            "probabilities as trained."
        )
    return left


def _warning(selection: Selection | None, images: Images) -> str | None:
    told = [] if selection is None or selection.warning is None else [selection.warning]
    absent = (torch.bincount(images.y, minlength=len(images.classes)) == 0).nonzero().squeeze(1).tolist()
    if absent:
        told.append(f"The hold-out has no image of {', '.join(images.classes[q] for q in absent)}.")
    return " ".join(told) or None
