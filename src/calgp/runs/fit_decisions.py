"""Fitting decisions on held-out images that the calibrator has not seen."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from calgp.data import Images
from calgp.errors import CalgpError
from calgp.gp import Passes, Predictive
from calgp.posthoc.decisions import PredictionSets, Selection, Wanted, keyed_uniform, uncertainty
from calgp.posthoc.outliers import Threshold
from calgp.runs.evaluation import BATCH, columns_of
from calgp.runs.fit_calibrator import calibrated_share
from calgp.runs.results import Calibration, FittedDecisions


def fit_decisions(
    wanted: Wanted,
    predictive: Predictive,
    y: Int[Tensor, "N"],
    uniform: Callable[[], Float[Tensor, "N"]],
    how: Passes,
    *,
    seed: int,
    calibration: Calibration | None = None,
) -> FittedDecisions:
    """All that is wanted, of held-out images by the probabilities of `calibration`; `uniform` randomises sets."""
    selection = sets = outliers = None
    if wanted.error is not None:
        selection = Selection.fit(
            uncertainty(columns_of(predictive), wanted.score), predictive.labels != y, error=wanted.error,
            confidence=wanted.confidence, score=wanted.score,
        )  # fmt: skip
    if wanted.coverage is not None:
        sets = PredictionSets.fit(
            predictive.log_probs, y, coverage=wanted.coverage, kind=wanted.sets, by_class=wanted.by_class,
            empty=wanted.empty, uniform=uniform(),
        )  # fmt: skip
    if wanted.false_alarm is not None:
        if predictive.outlier_scores is None:
            raise CalgpError(
                "This run has no outlier score, so there is no threshold to fit: `calgp.upgrade` and `calgp fit` make "
                "runs that have one; here, abstain by entropy (--error 0.01 --score entropy)."
            )
        outliers = Threshold.fit(predictive.outlier_scores[:, 0], false_alarm=wanted.false_alarm)
    return FittedDecisions(
        selection, sets, None if calibration is None else calibration.probabilities, n=len(y), samples=how.count,
        engine=how.engine, seed=seed, warning=None if selection is None else selection.warning, outliers=outliers,
    )  # fmt: skip


def uniform_of(images: Images) -> Float[Tensor, "N"]:
    """Numbers for randomised sets, keyed by the images."""
    return torch.cat([keyed_uniform(x) for _, x in images.read(images.parts(BATCH))])


def not_calibrated_on(images: Images, calibration: Calibration | None) -> Images | None:
    """The images that a calibrator was not fitted on; None if it was fitted on all of them."""
    if calibration is None or (calibration.of or images.checksum()) != images.checksum():
        return images  # it was fitted on others
    return calibrated_share(images, calibration.share, calibration.seed)[0]


def warning(found: str | None, images: Images, refitted: Calibration | None = None) -> str | None:
    """What a user should know of a fit on images, if anything; `refitted` is a calibrator that has just left them."""
    said = [] if found is None else [found]
    if refitted is not None:
        said.append(
            f"The calibrator ({refitted.calibrator}) had been fitted on the whole hold-out. It was fitted again on "
            f"half of it ({refitted.n:,} images); the decisions are fitted on the other half."
        )
    absent = (torch.bincount(images.y, minlength=len(images.classes)) == 0).nonzero().squeeze(1).tolist()
    if absent:
        said.append(f"The hold-out has no image of {', '.join(images.classes[q] for q in absent)}.")
    return " ".join(said) or None
