"""Fitting decisions on held-out images that the calibrator has not seen."""

from dataclasses import dataclass

import torch

from calgp.data import Images
from calgp.errors import CalgpError
from calgp.gp import Passes, Predictive
from calgp.posthoc.decisions import PredictionSets, Selection, check_wanted, keyed_uniform, uncertainty
from calgp.posthoc.outliers import Threshold
from calgp.runs.evaluation import BATCH, columns_of
from calgp.runs.fit_calibrator import calibrated_share
from calgp.runs.results import Calibration, FittedDecisions


@dataclass(frozen=True)
class Wanted:
    """Which decisions to fit.

    error: the share of answers that may be wrong; with it, a threshold of `score` is fitted, beyond which the run
        abstains. It holds on new images with `confidence`; None: on the hold-out alone.
    coverage: how often prediction sets of the kind `sets` hold the true class; `by_class`: of each class by itself;
        `empty`: empty sets stay empty.
    false_alarm: the share of ordinary images that may be called outliers by the run's outlier score.
    """

    error: float | None = None
    confidence: float | None = 0.95
    score: str = "confidence"
    coverage: float | None = None
    sets: str = "aps"
    by_class: bool = False
    empty: bool = False
    false_alarm: float | None = None

    def __post_init__(self) -> None:
        check_wanted(
            error=self.error, confidence=self.confidence, score=self.score, coverage=self.coverage, sets=self.sets,
            false_alarm=self.false_alarm,
        )  # fmt: skip


def fit_decisions(
    wanted: Wanted,
    predictive: Predictive,
    images: Images,
    calibration: Calibration | None,
    how: Passes,
    *,
    seed: int,
    refitted: Calibration | None = None,
) -> FittedDecisions:
    """All that is wanted, of the predictive of held-out images by the probabilities of `calibration`."""
    selection = fit_selection(wanted, predictive, images)
    return FittedDecisions(
        selection,
        fit_sets(wanted, predictive, images),
        None if calibration is None else calibration.probabilities,
        n=len(images),
        samples=how.count,
        engine=how.engine,
        seed=seed,
        warning=warning(selection, images, refitted),
        outliers=fit_outliers(wanted, predictive),
    )


def fit_selection(wanted: Wanted, predictive: Predictive, images: Images) -> Selection | None:
    if wanted.error is None:
        return None
    wrong = predictive.labels != images.y
    scores = uncertainty(columns_of(predictive), wanted.score)
    return Selection.fit(scores, wrong, error=wanted.error, confidence=wanted.confidence, score=wanted.score)


def fit_sets(wanted: Wanted, predictive: Predictive, images: Images) -> PredictionSets | None:
    if wanted.coverage is None:
        return None
    return PredictionSets.fit(
        predictive.log_probs, images.y, coverage=wanted.coverage, kind=wanted.sets, by_class=wanted.by_class,
        empty=wanted.empty, uniform=torch.cat([keyed_uniform(x) for _, x in images.read(images.parts(BATCH))]),
    )  # fmt: skip


def fit_outliers(wanted: Wanted, predictive: Predictive) -> Threshold | None:
    """Of the first of the classifier's outlier scores."""
    if wanted.false_alarm is None:
        return None
    if predictive.outlier_scores is None:
        raise CalgpError(
            "This run has no outlier score, so there is no threshold to fit: `calgp.upgrade` and `calgp fit` make runs "
            "that have one; here, abstain by entropy (--error 0.01 --score entropy)."
        )
    return Threshold.fit(predictive.outlier_scores[:, 0], false_alarm=wanted.false_alarm)


def not_calibrated_on(images: Images, calibration: Calibration | None) -> Images | None:
    """The images that a calibrator was not fitted on; None if it was fitted on all of them."""
    if calibration is None or (calibration.of or images.checksum()) != images.checksum():
        return images  # it was fitted on others
    return calibrated_share(images, calibration.share, calibration.seed)[0]


def warning(selection: Selection | None, images: Images, refitted: Calibration | None = None) -> str | None:
    """What a user should know of the fit, if anything; `refitted` is a calibrator that has just left these images."""
    found = [] if selection is None or selection.warning is None else [selection.warning]
    if refitted is not None:
        found.append(
            f"The {refitted.calibrator} had been fitted on the whole hold-out. It was fitted again on half of it "
            f"({refitted.n:,} images); the decisions are fitted on the other half."
        )
    absent = (torch.bincount(images.y, minlength=len(images.classes)) == 0).nonzero().squeeze(1).tolist()
    if absent:
        found.append(f"The hold-out has no image of {', '.join(images.classes[q] for q in absent)}.")
    return " ".join(found) or None
