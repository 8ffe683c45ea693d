"""Fitting a calibrator on held-out images."""

import torch
from torch import Tensor

from calgp import metrics
from calgp.data import Images
from calgp.errors import CalgpError
from calgp.gp import Model, Passes
from calgp.posthoc import calibration
from calgp.runs.card import Card
from calgp.runs.evaluation import METRICS, batches, check_form, predict_on_cpu
from calgp.runs.results import Calibration, HeldOutScores


def check_held_out(images: Images, card: Card) -> None:
    """Images of another form or of other classes than the run's are refused."""
    check_form(images, card.task, "The hold-out")
    if images.classes != card.classes:
        raise CalgpError(f"The hold-out has classes {images.classes}, the run {card.classes}; they must be the same.")


def calibrated_share(images: Images, share: float, seed: int) -> tuple[Images | None, Images]:
    """(what is left, what is calibrated on): the same share of each class, chosen by `seed`."""
    return (None, images) if share == 1 else images.split(share, seed)


def fit_calibrator(
    model: Model, images: Images, name: str, how: Passes, *, seed: int, share: float = 1.0
) -> Calibration:
    """A calibrator, and the scores of the images that it was fitted on, before and after."""
    checksum = images.checksum()
    _, images = calibrated_share(images, share, seed)
    predicted = predict_on_cpu(model, batches(images, model), how, seed=seed)
    before = torch.cat([part.log_probs for part in predicted])
    fitted = calibration.find(name).fit(before, images.y)
    parameters = calibration.to_json(fitted)
    return Calibration(
        calibrator=parameters.pop("calibrator"),
        parameters=parameters,
        n=len(images),
        of=checksum,
        share=share,
        samples=how.count,
        engine=how.engine,
        seed=seed,
        before=_scores(before, images.y),
        after=_scores(fitted.apply(before), images.y),
        warning=fitted.warning,
    )


def _scores(log_probs: Tensor, y: Tensor) -> HeldOutScores:
    outcomes = metrics.outcomes(log_probs, y)
    return HeldOutScores(**{name: metric(outcomes).item() for name, metric in METRICS.items()})
