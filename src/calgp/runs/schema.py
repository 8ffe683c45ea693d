"""What the JSON files of a run folder hold. Others made them: all is checked before anything is believed.

Keys that are not named here are let through: a later version may write more.
"""

from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from typing_extensions import NotRequired, TypedDict

from calgp import calibration
from calgp.data.images import LARGEST
from calgp.errors import CalgpError, brief

Whole = Annotated[int, Field(ge=0, lt=2**63)]
Count = Annotated[int, Field(ge=1, lt=2**40)]
Finite = Annotated[float, Field(allow_inf_nan=False, ge=-1e30, le=1e30)]
Real = Annotated[float, Field()]  # may be infinite or no number: a probability of 0 makes the MNLL so
Share = Annotated[float, Field(ge=0, le=1)]
Text = Annotated[str, Field(max_length=4096)]
Interval = Annotated[list[Real], Field(min_length=2, max_length=2)]


def _bins(found: Any) -> Any:
    """Bins lie side by side from low to high, and one of them at least holds something."""
    edges, count = found["edges"], found["count"]
    if any(len(values) != len(count) for name, values in found.items() if name != "edges" and isinstance(values, list)):
        raise ValueError("its columns differ in length")
    if len(edges) != len(count) + 1 or not all(low < high for low, high in pairwise(edges)) or not sum(count):
        raise ValueError("it has no increasing edges around its counts")
    return found


class Histogram(TypedDict):
    edges: Annotated[list[Finite], Field(min_length=2, max_length=1001)]
    count: list[Annotated[float, Field(ge=0, lt=1e15)]]


class Reliability(TypedDict):
    edges: Annotated[list[Share], Field(min_length=2, max_length=1001)]
    count: list[Annotated[int, Field(ge=0, lt=2**40)]]
    accuracy: list[Share | None]
    confidence: list[Share | None]


def _some_bin(found: Any) -> Any:
    """A bin that holds images has an accuracy and a mean confidence."""
    columns = zip(found["count"], found["accuracy"], found["confidence"], strict=True)
    if any(count and (accuracy is None or confidence is None) for count, accuracy, confidence in columns):
        raise ValueError("a bin that holds images lacks accuracy or confidence")
    return found


class Scores(TypedDict):
    err: Real
    mnll: Real
    ece: Real
    mce: Real
    brier: Real
    confidence: Real
    entropy: Real


class Intervals(TypedDict):
    err: Interval
    mnll: Interval
    ece: Interval
    brier: Interval


def _both(found: dict[str, float]) -> dict[str, float]:
    if missing := {"paper", "authors"} - set(found):
        raise ValueError(f"{min(missing)} is missing")
    return found


Variants = Annotated[dict[Text, Real], AfterValidator(_both)]


class Detected(TypedDict):
    value: Real
    interval: Interval


class Detection(TypedDict):
    auroc: Detected
    aupr_out: Detected
    aupr_in: Detected
    fpr95: Detected


class Doubt(TypedDict):
    entropy: Detection
    mutual_information: Detection


class Hold(TypedDict):
    mnll: Real


class Calibration(TypedDict):
    calibrator: Literal["temperature", "vector", "platt", "isotonic"]
    parameters: dict[str, Any]
    n: Count
    before: Hold
    after: Hold
    warning: NotRequired[Text | None]


def _usable(found: Any) -> Any:
    try:
        calibration.from_json({"calibrator": found["calibrator"]} | found["parameters"])
    except CalgpError as error:
        raise ValueError(str(error)) from None
    return found


class _Evaluation(TypedDict):
    source: Text
    n: Count
    samples: Count
    seed: Whole
    checksum: Text
    mean_entropy: Real
    mean_mutual_information: Real
    calibrator: NotRequired[Literal["temperature", "vector", "platt", "isotonic"] | None]
    calibration: NotRequired[Annotated[Calibration, AfterValidator(_usable)] | None]
    prediction_seconds: NotRequired[Finite | None]
    entropy_histogram: NotRequired[Annotated[Histogram, AfterValidator(_bins)]]
    convert: NotRequired[bool]


class Inside(_Evaluation):
    """scores-*.json of images of the run's own classes."""

    outside: Literal[False]
    scores: Scores
    intervals: Intervals
    ece_variants: Variants
    reliability: Annotated[Reliability, AfterValidator(_bins), AfterValidator(_some_bin)]


class Outside(_Evaluation):
    """scores-*.json of images of other classes."""

    outside: Literal[True]
    ood: Doubt | None
    inside: NotRequired[Text]


class Record(TypedDict):
    """A line of log.jsonl."""

    kind: Text
    step: Whole


class TrainRecord(TypedDict):
    """A line of log.jsonl about steps."""

    kind: Literal["train"]
    step: Count
    nll: Real
    kl: Real
    rate: Real
    seconds: NotRequired[Finite]


class HoldoutRecord(TypedDict):
    """A line of log.jsonl about the hold-out."""

    kind: Literal["holdout"]
    step: Count
    mnll: Real
    err: Real


class Stopping(TypedDict):
    """How far an early stop is: exactly what `EarlyStopping` takes."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]

    mnll: Real
    step: Whole
    epochs: Whole


class Checkpoint(TypedDict):
    """What is stored beside the tensors of a checkpoint."""

    step: Count
    failed: NotRequired[Whole]
    totals: NotRequired[Annotated[list[Real], Field(min_length=3, max_length=3)]]
    stopping: NotRequired[Stopping]


class DecisionsData(TypedDict):
    """decisions.json; what is decided is checked by `calgp.decisions`."""

    selection: dict[str, Any] | None
    sets: dict[str, Any] | None


class TaskData(TypedDict):
    channels: Annotated[int, Field(ge=1, le=LARGEST)]
    height: Annotated[int, Field(ge=1, le=LARGEST)]
    width: Annotated[int, Field(ge=1, le=LARGEST)]
    classes: Annotated[int, Field(ge=1, le=10**6)]


class MemberData(TypedDict):
    path: Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^/\x00][^\x00]*$")]
    label: Text
    network: Text
    seed: Whole


class Environment(TypedDict):
    command: NotRequired[list[Text]]
    calgp: NotRequired[Text]


class CardData(TypedDict):
    """run.json."""

    run: dict[str, Any]
    task: TaskData
    classes: Annotated[list[Text], Field(min_length=1)]
    train_images: Count
    checksum: Text
    holdout_rows: list[Whole]
    environment: Environment
    class_weights: NotRequired[list[Finite] | None]
    members: NotRequired[Annotated[list[MemberData], Field(max_length=1000)]]


class Schema:
    """A kind of JSON value; `check` gives back the value as it is."""

    def __init__(self, kind: Any) -> None:
        self._adapter = TypeAdapter(kind)

    def check(self, value: Any) -> Any:
        """The value, or a CalgpError that names the first thing that is not as it should be."""
        try:
            self._adapter.validate_python(value, strict=True)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            place = ".".join(map(str, first["loc"])) or "it"
            what = first["msg"][0].lower() + first["msg"][1:]
            raise CalgpError(f"{place}: {what}, not {brief(first['input'])}") from None
        return value

    def fits(self, value: Any) -> bool:
        try:
            self._adapter.validate_python(value, strict=True)
        except ValidationError:
            return False
        return True


CARD = Schema(CardData)
INSIDE = Schema(Inside)
OUTSIDE = Schema(Outside)
CALIBRATION = Schema(Annotated[Calibration, AfterValidator(_usable)])
CHECKPOINT = Schema(Checkpoint)
DECISIONS = Schema(DecisionsData)
RECORD = Schema(Record)
RECORDS = {"train": Schema(TrainRecord), "holdout": Schema(HoldoutRecord)}
