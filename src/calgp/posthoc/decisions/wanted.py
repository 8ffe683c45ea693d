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


@dataclass(frozen=True)
class Wanted:
    """Which decisions to fit; what cannot be decided is refused before anything is predicted for it.

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
        if (self.error, self.coverage, self.false_alarm) == (None, None, None):
            raise CalgpError(
                "Nothing was asked for: an error (0.01) sets a threshold, a coverage (0.9) makes sets, a false_alarm "
                "(0.05) finds outliers."
            )
        for name in ("error", "confidence", "coverage", "false_alarm"):
            if (value := getattr(self, name)) is not None:
                check_share(name, value)
        check_choice("score", self.score, SCORES)
        check_choice("sets", self.sets, KINDS)
