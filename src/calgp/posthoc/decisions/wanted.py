"""A threshold, sets, or both: what a run may decide, and what may be asked of it."""

from dataclasses import dataclass

from calgp.errors import CalgpError
from calgp.posthoc.checks import check_choice, check_share
from calgp.posthoc.decisions.prediction_sets import KINDS, PredictionSets
from calgp.posthoc.decisions.risk import SCORES
from calgp.posthoc.decisions.selection import Selection


@dataclass(frozen=True)
class Decisions:
    """What a run decides: a threshold, sets, or both; by its probabilities p^power, normalised."""

    selection: Selection | None
    sets: PredictionSets | None
    power: float = 1.0


def check_wanted(
    *,
    error: float | None,
    confidence: float | None,
    score: str,
    coverage: float | None,
    sets: str,
    false_alarm: float | None = None,
) -> None:
    """Refuse what cannot be decided before anything is predicted for it."""
    if (error, coverage, false_alarm) == (None, None, None):
        raise CalgpError(
            "Nothing was asked for: an error (0.01) sets a threshold, a coverage (0.9) makes sets, a false_alarm "
            "(0.05) finds outliers."
        )
    given = {"error": error, "confidence": confidence, "coverage": coverage, "false_alarm": false_alarm}
    for name, value in given.items():
        if value is not None:
            check_share(name, value)
    check_choice("score", score, SCORES)
    check_choice("sets", sets, KINDS)
