"""Fitting a calibrator on the hold-out of a run."""

from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric

from calgp import calibration, metrics
from calgp.data import Images
from calgp.errors import CalgpError
from calgp.gp import Model
from calgp.runs.evaluation import METRICS, Predictor, batches, check_form, one_device
from calgp.runs.folder import Card, RunFolder
from calgp.runs.training_data import held_out_images


def calibrate(
    folder: RunFolder,
    fabric: Fabric | None = None,
    *,
    calibrator: str = "temperature",
    held_out: Images | None = None,
    share: float = 1.0,
    directory: Path | None = None,
    samples: int = 50,
    seed: int = 0,
) -> dict[str, Any]:
    """Fit a calibrator to a finished run of any method and keep it in calibration.json; what that file holds.

    The images are the run's hold-out, or `held_out`: images that it was not trained on; or a `share` of them, the same
    of each class, chosen by the seed: then `decide` has the others for itself. From then on `evaluate` and
    `predict_files` give calibrated probabilities.
    """
    calibration.find(calibrator)
    if not 0 < share <= 1:
        raise CalgpError(f"share={share:g} cannot be; it is the part of the hold-out to calibrate on, such as 0.5.")
    fabric, card = one_device(fabric), folder.card()
    images = held_out_images(folder, directory) if held_out is None else held_out
    check_held_out(images, card)
    with folder.owned():
        model = folder.model().to(fabric.device)
        found = fit_calibrator(model, images, calibrator, samples=samples, seed=seed, share=share)
        folder.write_calibration(found)
    return found


def check_held_out(images: Images, card: Card) -> None:
    """Images of another form or of other classes than the run's are refused."""
    check_form(images, card.task, "The hold-out")
    if images.classes != card.classes:
        raise CalgpError(f"The hold-out has classes {images.classes}, the run {card.classes}; they must be the same.")


def calibrated_share(images: Images, share: float, seed: int) -> tuple[Images | None, Images]:
    """(what is left, what is calibrated on): the same share of each class, chosen by `seed`."""
    return (None, images) if share == 1 else images.split(share, seed)


def fit_calibrator(
    model: Model, images: Images, name: str, *, samples: int, seed: int, share: float = 1.0
) -> dict[str, Any]:
    """What calibration.json holds: the calibrator, and the scores of the images it was fitted on, before and after."""
    checksum = images.checksum()
    _, images = calibrated_share(images, share, seed)
    parts = Predictor(model, None).predict(batches(images, model), samples=samples, seed=seed)
    before = torch.cat([part.log_probs for part in parts])
    fitted = calibration.find(name).fit(before, images.y)
    parameters = calibration.to_json(fitted)
    return {
        "calibrator": parameters.pop("calibrator"),
        "parameters": parameters,
        "n": len(images),
        "of": checksum,  # the images that this share was taken from, by the seed
        "share": share,
        "samples": samples,
        "seed": seed,
        "before": _scores(before, images),
        "after": _scores(fitted.apply(before), images),
        "warning": fitted.warning,
    }


def _scores(log_probs: torch.Tensor, images: Images) -> dict[str, float]:
    outcomes = metrics.outcomes(log_probs, images.y)
    return {name: metric(outcomes).item() for name, metric in METRICS.items()}
