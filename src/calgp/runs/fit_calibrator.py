"""Fitting a calibrator on held-out images."""

from dataclasses import replace

import torch
from torch import Tensor

from calgp import metrics
from calgp.data import Images
from calgp.errors import CalgpError
from calgp.gp import Model, Passes
from calgp.posthoc import calibration
from calgp.posthoc.calibration import FLAT, Prior
from calgp.posthoc.checks import stratified_folds
from calgp.run import Run
from calgp.runs.card import Card
from calgp.runs.evaluation import METRICS, batches, check_form, predict_on_cpu
from calgp.runs.results import Calibration, HeldOutScores

FEWEST = 50  # held-out images, to fit a temperature by default
FOLDS = 5
SPREAD = 0.2  # of 1/T about what a network needs: the best for hold-outs of 50 to 500 images


def check_held_out(images: Images, card: Card) -> None:
    """Images of another form or of other classes than the run's are refused."""
    check_form(images, card.task, "The hold-out")
    if images.classes != card.classes:
        raise CalgpError(f"The hold-out has classes {images.classes}, the run {card.classes}; they must be the same.")


def calibrated_share(images: Images, share: float, seed: int) -> tuple[Images | None, Images]:
    """(what is left, what is calibrated on): the same share of each class, chosen by `seed`."""
    return (None, images) if share == 1 else images.split(share, seed)


def held_out_log_probs(model: Model, images: Images, how: Passes, *, seed: int) -> Tensor:
    """What a calibrator is fitted on: log-probabilities as the model gives them."""
    return torch.cat([part.log_probs for part in predict_on_cpu(model, batches(images, model), how, seed=seed)])


def fitted_on(
    before: Tensor,
    images: Images,
    name: str,
    how: Passes,
    *,
    seed: int,
    prior: Prior = FLAT,
    share: float = 1.0,
    of: str | None = None,
) -> Calibration:
    """A calibrator of log-probabilities of these images, a `share` of those with the checksum `of`.

    Of calibrators only a temperature has use for a prior.
    """
    fitted, crossed = _fit(name, before, images.y, prior), None
    if len(images) >= FEWEST:
        crossed = _scores(cross_fitted(before, images.y, name, folds=FOLDS, prior=prior), images.y)
    parameters = calibration.to_json(fitted)
    del parameters["calibrator"]
    return Calibration(
        calibrator=name,  # type: ignore[arg-type]  (it was found)
        parameters=parameters,
        n=len(images),
        of=images.checksum() if of is None else of,
        share=share,
        samples=how.count,
        engine=how.engine,
        seed=seed,
        before=_scores(before, images.y),
        after=_scores(fitted.apply(before), images.y),
        warning=fitted.warning,
        crossed=crossed,
    )


def with_caution(found: Calibration) -> Calibration:
    """The same with a warning, where the hold-out itself says that the calibrator does no good beyond it."""
    crossed, before = found.crossed, found.before
    if crossed is None or crossed.mnll < before.mnll:
        return found
    caution = (
        f"On images that it was not fitted on, {found.calibrator} makes the MNLL no better ({before.mnll:.4f} without, "
        f"{crossed.mnll:.4f} with, cross-validated): use another calibrator, pass --uncalibrated, or hold out more."
    )
    return replace(found, warning=" ".join(filter(None, [found.warning, caution])))


def _fit(name: str, log_probs: Tensor, y: Tensor, prior: Prior) -> calibration.Calibrator:
    kind = calibration.find(name)
    return kind.fit(log_probs, y, prior) if issubclass(kind, calibration.Temperature) else kind.fit(log_probs, y)


def prior_of(run: Run) -> Prior:
    """What is believed of the temperature of such a run: nothing of methods that are as they were published."""
    return Prior(run.backbone.inverse_temperature, SPREAD) if run.method.is_calibrated else FLAT


def fit_temperature(
    model: Model, images: Images, how: Passes, prior: Prior, *, seed: int
) -> tuple[Calibration, None] | tuple[None, str]:
    """A temperature; or why there is none, in a sentence.

    With a prior it is taken whatever cross-validation says: on few images that says less than the prior does, and a
    hold-out without a mistake always says that T should be smaller.
    """
    name = "temperature"
    if len(images) < FEWEST:
        return None, f"{len(images)} held-out images are too few to fit a {name} on; at least {FEWEST} are needed."
    log_probs = held_out_log_probs(model, images, how, seed=seed)
    found = fitted_on(log_probs, images, name, how, seed=seed, prior=prior)
    if found.warning is not None:
        return None, f"The hold-out cannot support a {name}: {found.warning}"
    if prior == FLAT and found.crossed is not None and found.crossed.mnll >= found.before.mnll:
        return None, (
            f"A {name} makes the cross-validated MNLL of the hold-out no better "
            f"({found.before.mnll:.4f} without, {found.crossed.mnll:.4f} with); it is left out."
        )
    return found, None


def cross_fitted(log_probs: Tensor, y: Tensor, calibrator: str, *, folds: int = 2, prior: Prior = FLAT) -> Tensor:
    """Log-probabilities of each fold of the images, calibrated by the others; folds have the same classes."""
    fitted = torch.empty_like(log_probs)
    for out in stratified_folds(y, folds):
        fitted[out] = _fit(calibrator, log_probs[~out], y[~out], prior).apply(log_probs[out])
    return fitted


def _scores(log_probs: Tensor, y: Tensor) -> HeldOutScores:
    outcomes = metrics.outcomes(log_probs, y)
    return HeldOutScores(**{name: metric(outcomes).item() for name, metric in METRICS.items()})
