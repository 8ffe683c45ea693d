"""What is found out about a run, as frozen dataclasses: evaluations, calibration, decisions, the training log.

Each is one JSON file of the run folder, or one line of its log (`runs.record` reads and writes them).
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field

from calgp.data import Corruption
from calgp.errors import CalgpError
from calgp.gp import Engine, Passes
from calgp.json_values import Json
from calgp.metrics import Confusion, Scores
from calgp.posthoc import calibration
from calgp.posthoc.calibration import Calibrator
from calgp.posthoc.decisions import Decisions, PredictionSets, Selection
from calgp.posthoc.outliers import Threshold
from calgp.runs.environment import Environment
from calgp.runs.outlier_metrics import Flagged, OutOfDistribution
from calgp.runs.record import Count, Finite, Interval, Share, Text, Whole

CalibratorName = Literal["temperature", "vector", "platt", "isotonic"]


@dataclass(frozen=True)
class Histogram:
    """How many values fall between neighbouring edges."""

    edges: Annotated[tuple[Finite, ...], Field(min_length=2, max_length=1001)]
    count: tuple[Annotated[float, Field(ge=0, lt=1e15)], ...]

    def __post_init__(self) -> None:
        _check_bins(self.edges, self.count)


@dataclass(frozen=True)
class Reliability:
    """A reliability diagram: accuracy and mean confidence of each bin of confidence; None where a bin is empty."""

    edges: Annotated[tuple[Share, ...], Field(min_length=2, max_length=1001)]
    count: tuple[Annotated[int, Field(ge=0, lt=2**40)], ...]
    accuracy: tuple[Share | None, ...]
    confidence: tuple[Share | None, ...]

    def __post_init__(self) -> None:
        if not len(self.count) == len(self.accuracy) == len(self.confidence):
            raise ValueError("its columns differ in length")
        _check_bins(self.edges, self.count)
        columns = zip(self.count, self.accuracy, self.confidence, strict=True)
        if any(count and (accuracy is None or confidence is None) for count, accuracy, confidence in columns):
            raise ValueError("a bin that holds images lacks accuracy or confidence")

    def filled(self) -> list[tuple[float, float, int, float, float]]:
        """(left edge, right edge, count, accuracy, mean confidence) of the bins that hold something."""
        rows = zip(self.edges, self.edges[1:], self.count, self.accuracy, self.confidence, strict=False)
        return [row for row in rows if row[2]]  # pyright: ignore[reportReturnType]  (accuracy and confidence are there)


def _check_bins(edges: tuple[float, ...], count: tuple[float, ...]) -> None:
    """Bins lie side by side from low to high, and at least one of them holds something."""
    if len(edges) != len(count) + 1 or not all(low < high for low, high in pairwise(edges)) or not sum(count):
        raise ValueError("it has no increasing edges around its counts")


@dataclass(frozen=True)
class Intervals:
    """95 % bootstrap intervals over the test images."""

    err: Interval
    mnll: Interval
    ece: Interval
    brier: Interval


@dataclass(frozen=True)
class Selective:
    """Area under the risk-coverage curve of a score of uncertainty, and its excess over the best ranking."""

    aurc: float
    excess: float


@dataclass(frozen=True)
class HeldOutScores:
    """Scores of the hold-out before or after calibration."""

    mnll: float
    err: float | None = None
    ece: float | None = None
    brier: float | None = None


@dataclass(frozen=True)
class Calibration:
    """calibration.json: a calibrator, and what it did to the hold-out that it was fitted on.

    of: checksum of the held-out images. share: the part of them that was used, chosen by the seed.
    crossed: the scores of each fifth of the hold-out, calibrated by the others; None with fewer than 50 images.

    >>> import calgp
    >>> calgp.load("shipped").calibration is None  # or what was fitted
    True
    """

    calibrator: CalibratorName
    parameters: dict[str, Json]
    n: Count
    before: HeldOutScores
    after: HeldOutScores
    seed: Whole = 0
    of: Text | None = None
    share: float = 1.0
    samples: Count = 50
    engine: Engine = "samples"
    warning: Text | None = None
    crossed: HeldOutScores | None = None

    def __post_init__(self) -> None:
        try:
            _ = self.fitted
        except CalgpError as error:
            raise ValueError(str(error)) from None

    @functools.cached_property
    def fitted(self) -> Calibrator:
        return calibration.from_json({**self.parameters, "calibrator": self.calibrator})

    @property
    def passes(self) -> Passes:
        return Passes(self.samples, self.engine)

    @property
    def probabilities(self) -> "Probabilities":
        return Probabilities(self.calibrator, self.parameters)


@dataclass(frozen=True)
class Probabilities:
    """Which probabilities decisions were fitted to: those of this calibrator."""

    calibrator: Text
    parameters: dict[str, Json]


@dataclass(frozen=True)
class FittedDecisions:
    """decisions.json: thresholds and prediction sets, and the probabilities that they are for (None: as trained).

    outliers: beyond which outlier score an image is called an outlier. power: decisions read p^power, normalised, which
    are probabilities of a temperature that the images of the fit had no part in.
    """

    selection: Selection | None
    sets: PredictionSets | None
    calibration: Probabilities | None = None
    n: Whole = 0
    samples: Count = 50
    engine: Engine = "samples"
    seed: Whole = 0
    warning: Text | None = None
    outliers: Threshold | None = None  # since 0.2.0
    power: Annotated[float, Field(gt=0, le=1e6)] = 1.0  # since 0.2.0

    @property
    def decisions(self) -> Decisions:
        return Decisions(self.selection, self.sets, self.power)

    @property
    def passes(self) -> Passes:
        return Passes(self.samples, self.engine)


@dataclass(frozen=True)
class SelectionMetrics:
    """How many images were answered; of the run's own classes, also how many of the answers were wrong."""

    answered: Whole
    share: float
    wrong: Whole | None = None
    error: float | None = None
    interval: Interval | None = None


@dataclass(frozen=True)
class SetsByClass:
    """Of each class: images, the share whose set holds it, and the mean size of the sets."""

    n: tuple[Whole, ...]
    covered: tuple[float | None, ...]
    size: tuple[float | None, ...]


@dataclass(frozen=True)
class SetMetrics:
    """How large prediction sets are (`sizes`: images with a set of 0, 1, … classes), and how often they are right."""

    mean_size: float
    sizes: tuple[Whole, ...]
    covered: float | None = None
    interval: Interval | None = None
    by_class: SetsByClass | None = None


@dataclass(frozen=True)
class DecisionMetrics:
    """What decisions did on a set of images, and the decisions themselves."""

    made: FittedDecisions
    selection: SelectionMetrics | None
    sets: SetMetrics | None


@dataclass(frozen=True)
class Corrupted:
    """How test images were corrupted, and `of` which source they are."""

    of: Text
    kind: Text
    severity: int
    seed: Whole = 0

    def __post_init__(self) -> None:
        try:
            _ = self.corruption
        except CalgpError as error:
            raise ValueError(str(error)) from None

    @property
    def corruption(self) -> Corruption:
        return Corruption(self.kind, self.severity, self.seed)

    @property
    def label(self) -> str:
        return self.corruption.label


@dataclass(frozen=True)
class Evaluation:
    """scores-*.json: what a run's predictions are worth on one set of images.

    `outside` images have other classes than the run: only their uncertainty is measured (`ood`, by score of
    uncertainty, if the run's own test images were evaluated before). All other images have `scores`.

    samples: passes of the network. checksum: of the images. convert: images were resized and recoloured.
    skip_unreadable: damaged files were left out.
    predictions: checksum of the predictions that were scored, those of predictions-*.safetensors.
    ece_variants: ECE by its other definitions. selective: risk-coverage areas, by score of uncertainty.

    >>> from calgp.runs import shipped_run
    >>> found = shipped_run().evaluation("digits")
    >>> found.n, found.outside, found.scores.err < 0.03
    (1000, False, True)
    """

    source: Text
    outside: bool
    n: Count
    samples: Count
    seed: Whole
    checksum: Text
    mean_entropy: float
    mean_mutual_information: float
    engine: Engine = "samples"
    calibrator: CalibratorName | None = None
    calibration: Calibration | None = None
    convert: bool = False
    skip_unreadable: bool = False
    corruption: Corrupted | None = None
    environment: Environment = field(default_factory=Environment)
    prediction_seconds: Finite | None = None
    entropy_histogram: Histogram | None = None
    decisions: DecisionMetrics | None = None
    scores: Scores | None = None
    intervals: Intervals | None = None
    ece_variants: dict[Text, float] | None = None
    reliability: Reliability | None = None
    confusion: Confusion | None = None  # since 0.2.0
    selective: dict[Text, Selective] = field(default_factory=dict)
    ood: dict[Text, OutOfDistribution] | None = None
    inside: Text | None = None  # the source of the run's own images, for `ood`
    flagged: Flagged | None = None
    predictions: Text | None = None

    def __post_init__(self) -> None:
        missing = [name for name in INSIDE if getattr(self, name) is None]
        if not self.outside and missing:
            raise ValueError(f"{missing[0]} is missing")
        for name, keys in (("ood", {"entropy", "mutual_information"}), ("ece_variants", {"paper", "authors"})):
            if (given := getattr(self, name)) is not None and (absent := keys - set(given)):
                raise ValueError(f"{name}.{min(absent)} is missing")

    @property
    def passes(self) -> Passes:
        return Passes(self.samples, self.engine)

    @property
    def named(self) -> tuple[str, CalibratorName | None, str | None]:
        """What names its files: the source, the calibrator and the corruption."""
        shift = self.corruption
        return (self.source, self.calibrator, None) if shift is None else (shift.of, self.calibrator, shift.label)

    @property
    def computed_by(self) -> str:
        """How it was predicted, in words: where passes cannot differ, because nothing is random, one was made."""
        return str(self.passes) if self.is_random else "1 pass"

    @property
    def is_random(self) -> bool:
        """Whether anything in the model was averaged over; a plain network is a point, and has no such uncertainty."""
        return self.mean_mutual_information > 1e-7

    @property
    def own(self) -> "OwnClasses":
        """The scores of images of the run's own classes; refused for images of other classes."""
        if self.scores is None or self.intervals is None or self.ece_variants is None or self.reliability is None:
            raise CalgpError(f"{self.source} has images of other classes than the run: there is nothing to score.")
        return OwnClasses(self.scores, self.intervals, self.ece_variants, self.reliability)


INSIDE = ("scores", "intervals", "ece_variants", "reliability")


@dataclass(frozen=True)
class OwnClasses:
    """What an evaluation of images of the run's own classes always has."""

    scores: Scores
    intervals: Intervals
    ece_variants: Mapping[str, float]
    reliability: Reliability


@dataclass(frozen=True)
class TrainRecord:
    """A line of log.jsonl: both parts of the bound, averaged since the last line."""

    kind: Literal["train"]
    step: Count
    nll: float
    kl: float
    rate: float
    seconds: Finite = 0.0


@dataclass(frozen=True)
class HoldoutRecord:
    """A line of log.jsonl: scores of the hold-out after an epoch; at step 0, of a head on the frozen network."""

    kind: Literal["holdout"]
    step: Whole
    mnll: float
    err: float
    n: Whole | None = None
    ece: float | None = None
    mce: float | None = None
    brier: float | None = None
    confidence: float | None = None
    entropy: float | None = None


@dataclass(frozen=True)
class NoteRecord:
    """A line of log.jsonl about a skipped step, a hold-out without scores, the state that was kept, no temperature."""

    kind: Literal["skipped", "unscored", "kept", "uncalibrated"]
    step: Whole
    why: Text | None = None
    mnll: float | None = None


LogRecord = Annotated[TrainRecord | HoldoutRecord | NoteRecord, Field(discriminator="kind")]


@dataclass(frozen=True)
class StoppingState:
    """How far early stopping is: the best MNLL, its step, and the epochs since."""

    mnll: float
    step: Whole
    epochs: Whole


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds besides its tensors: steps made, failed steps in a row, sums since the last log line."""

    step: Whole
    failed: Whole = 0
    totals: tuple[float, float, float] = (0.0, 0.0, 0.0)
    stopping: StoppingState | None = None
