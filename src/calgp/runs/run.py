"""Run: the whole description of one training, as data."""

import dataclasses
import functools
import math
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

from calgp.errors import CalgpError, brief
from calgp.methods import METHODS, Method
from calgp.nets import BACKBONES, Backbone, Standardised, Wrapped

MOST = 1e12  # images, steps, epochs: no machine has so many
Described = TypeVar("Described", Method, Backbone)


def later(default: Any) -> Any:
    """An option younger than results that are kept: at its default it is no part of a run's `identity`."""
    return field(default=default, metadata={"later": True})


@dataclass(frozen=True)
class Run:
    """What is trained, on what, how long; not where (device, precision and threads change no result on purpose).

    method, backbone: what to build.
    source: a data set by name, or folder:PATH; `size` and `colour` convert its images.
    train_size: a balanced part of the training images; None means all of them.
    holdout: the share of the training images kept for validation and calibration (0: none); None means 0, or 0.1
        where the method calibrates at the end of training or `patience` is given.
    seed: of everything that is random: subset, hold-out, Ω, first weights, order of the data, masks.
    split_seed: of subset and hold-out alone, so that runs of several seeds (an ensemble) share them; None means `seed`.
    epochs, steps: how long; `steps`, if given, decides.
    learning_rate, schedule: constant, cosine (falling to 0) or one-cycle (rising for a quarter, then falling to 0).
    kl_weight: factor of the KL term; 1 is the bound.
    mc_samples: N_MC, the samples that estimate the likelihood term in a step.
    class_weights: w_q of the weighted likelihood term Σ_i w_{y_i} E_q log p(y_i | x_i): numbers in the order of the
        classes, or balanced, n / (Q n_q), with which every class weighs the same and all together n; None means 1.
    augment: changes of the training images, drawn anew in each step: flip (left and right) and crop (moved by up to
        `crop` pixels in each direction, black where nothing was). Evaluation never changes images.
    normalise: none, x / 255 as the paper has it; or standard, less the mean and divided by the standard deviation of
        each channel over the training images, which are stored with the model.
    patience: stop after so many epochs without a better MNLL of one half of the hold-out, and keep the best state; the
        other half stays for calibration. None means to go on to the end.
    clip: the largest norm of a step's gradient, over all parameters together; a larger one is scaled down to it. None
        means none.
    """

    method: Method
    backbone: Backbone
    source: str = "digits"
    size: int | None = None
    colour: Literal["grey", "rgb"] | None = None
    train_size: int | None = None
    holdout: float | None = None
    seed: int = 0
    split_seed: int | None = None
    epochs: float = 10.0
    steps: int | None = None
    batch_size: int = 100
    optimiser: Literal["adam", "sgd"] = "adam"
    learning_rate: float = 1e-3
    schedule: Literal["constant", "cosine", "one-cycle"] = "constant"
    kl_weight: float = 1.0
    mc_samples: int = 1
    class_weights: Literal["balanced"] | tuple[float, ...] | None = later(None)
    augment: tuple[Literal["flip", "crop"], ...] = later(())
    crop: int = later(4)
    normalise: Literal["none", "standard"] = later("none")
    patience: int | None = later(None)
    clip: float | None = later(None)

    def __post_init__(self) -> None:
        positive = ("size", "train_size", "steps", "batch_size", "mc_samples", "epochs", "learning_rate")
        for name in (*positive, "crop", "patience", "clip"):
            value = getattr(self, name)
            if value is not None and not 0 < value < MOST:
                raise CalgpError(f"{name}={brief(value)} cannot be; it must be positive, and less than {MOST:.0e}.")
        calibrator = self.method.calibrator
        if self.holdout is None:
            object.__setattr__(self, "holdout", 0.1 if calibrator or self.patience else 0.0)
        if not 0 <= self.holdout < 1:  # type: ignore[operator]
            raise CalgpError(f"holdout={self.holdout} cannot be; it is a share of the training images, such as 0.1.")
        if calibrator and not self.holdout:
            raise CalgpError(f"{self.label} fits its {calibrator} on held-out images; --holdout 0.1 keeps a tenth.")
        if self.patience and not self.holdout:
            raise CalgpError(f"patience={self.patience} is told by held-out images; --holdout 0.1 keeps a tenth.")
        object.__setattr__(self, "augment", tuple(sorted(set(self.augment))))
        weights = self.class_weights if isinstance(self.class_weights, tuple) else (1.0,)
        if not all(0 <= weight < math.inf for weight in weights) or not sum(weights) > 0:
            raise CalgpError(f"class_weights={weights} cannot be; they are 0 or more, and not all 0.")
        if not 0 <= self.kl_weight < math.inf:
            raise CalgpError(f"kl_weight={self.kl_weight} cannot be; it must be 0 or more.")
        for name in ("seed", "split_seed"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 2**63:
                raise CalgpError(f"{name}={value} cannot be; it is a whole number from 0 to 2^63 - 1.")

    def total_steps(self, n: int) -> int:
        """Optimiser steps for n training images; the last batch of an epoch may be smaller."""
        return self.steps if self.steps is not None else math.ceil(self.epochs * math.ceil(n / self.batch_size))

    def learning_rate_at(self, step: int, steps: int) -> float:
        """A pure function of the step, so that resuming needs no schedule state."""
        done = step / steps
        if self.schedule == "one-cycle" and done < 0.25:
            return self.learning_rate * (0.04 + 0.96 * (1 - math.cos(math.pi * done / 0.25)) / 2)
        if self.schedule == "one-cycle":
            done = (done - 0.25) / 0.75
        return self.learning_rate * (1 if self.schedule == "constant" else (1 + math.cos(math.pi * done)) / 2)

    @property
    def label(self) -> str:
        """The method by its name in METHODS, with what differs from it."""
        return _label(self.method, METHODS)

    @property
    def backbone_label(self) -> str:
        """The network by its name in BACKBONES, with what differs from it."""
        return _label(self.backbone, BACKBONES)


def network(run: Run) -> Backbone:
    """The network as the run's method gets it: behind a normalisation, where the run asks for one."""
    return Standardised(run.backbone) if run.normalise == "standard" else run.backbone


def to_json(run: Run) -> dict[str, Any]:
    """The run as plain data."""
    data = {field.name: getattr(run, field.name) for field in dataclasses.fields(run)}
    return data | {name: _described(data[name]) for name in ("method", "backbone")}


def identity(run: Run) -> dict[str, Any]:
    """`to_json` without later options that are at their defaults: the same for equal runs of all versions."""
    data = to_json(run)
    for described, options in ((run, data), (run.method, data["method"]), (run.backbone, data["backbone"])):
        for each in dataclasses.fields(described):  # pyright: ignore[reportArgumentType]
            if each.metadata.get("later") and getattr(described, each.name) == each.default:
                del options[each.name]
    return data


def option_name(flag: str) -> str:
    """The option that a flag of `calgp train` stands for.

    >>> option_name("lr"), option_name("train-size"), option_name("method.keep")
    ('learning_rate', 'train_size', 'method.keep')
    """
    name = flag.removeprefix("--").replace("-", "_")
    return {"lr": "learning_rate"}.get(name, name)


def assign(options: dict[str, Any], name: str, value: Any) -> None:
    """Set an option of a run's plain data: learning_rate, or method.depth of a method that may only be named so far."""
    *path, last = name.split(".")
    for each in path:
        if not isinstance(options.get(each), dict):
            default = {"method": "cnn-gp-sorf", "backbone": "lenet"}.get(each)
            options[each] = {"name": options.get(each, default)}
        options = options[each]
    options[last] = value


def from_json(data: dict[str, Any]) -> Run:
    """The run of plain data (a run folder, a TOML file, the command line), checked."""
    if not isinstance(data, dict):
        raise CalgpError(f"A run is a table of options, not {brief(data)}.")
    data = dict(data)
    data["method"] = _undescribed(data.get("method", "cnn-gp-sorf"), METHODS, "method")
    data["backbone"] = _undescribed(data.get("backbone", "lenet"), BACKBONES, "backbone", Wrapped)
    chosen = {"method": data.pop("method"), "backbone": data.pop("backbone")}
    return _validated(Run, data, "run", chosen)


def _described(value: Any) -> dict[str, Any]:
    return {"kind": type(value).__name__} | dataclasses.asdict(value)


def _undescribed(data: Any, table: dict[str, Described], what: str, *others: type[Described]) -> Described:
    """A name in the table, or {kind: …, options …}, or {name: …, options …} for a variant of a ready value.

    Kinds are those in the table, and `others`, of which there need be no ready value.
    """
    if isinstance(data, str):
        data = {"name": data}
    if not isinstance(data, dict):
        raise CalgpError(f"{what} must be a name or a table of options, not {brief(data)}.")
    data = dict(data)
    if "name" in data:
        name = data.pop("name")
        if not isinstance(name, str) or name not in table:
            raise CalgpError(f"There is no {what} {brief(name)}; there are {', '.join(table)}.")
        data = _described(table[name]) | data
    kinds = {kind.__name__: kind for kind in (*map(type, table.values()), *others)}
    kind = data.pop("kind", None)
    if not isinstance(kind, str) or kind not in kinds:
        raise CalgpError(f"There is no kind of {what} {brief(kind)}; there are {', '.join(kinds)}.")
    return _validated(kinds[kind], data, what)


def _validated(kind: type, data: dict[str, Any], what: str, checked: dict[str, Any] | None = None) -> Any:
    """A dataclass of untrusted values: unknown names and wrong types are refused by name."""
    names = [field.name for field in dataclasses.fields(kind)]
    values = dict(checked or {})
    for key, value in data.items():
        if key not in names:
            raise CalgpError(f"{what} has no option {brief(key)}; it has {', '.join(names) or 'none'}.")
        try:
            values[key] = _adapter(kind, key).validate_python(value)
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise CalgpError(
                f"{what} option {key}={brief(value)} cannot be: {reason[0].lower()}{reason[1:]}."
            ) from None
    return kind(**values)


@functools.cache
def _adapter(kind: type, name: str) -> TypeAdapter[Any]:
    """What checks an option of a dataclass."""
    return TypeAdapter(get_type_hints(kind)[name])


def _label(value: Any, table: dict[str, Any]) -> str:
    """The nearest ready value's name, or the kind if there is none, and the options that differ from it."""
    options = dataclasses.asdict(value)
    differences = {
        name: {key: new for key, new in options.items() if new != dataclasses.asdict(ready)[key]}
        for name, ready in table.items()
        if type(ready) is type(value)
    }
    if not differences:
        defaults = {field.name: field.default for field in dataclasses.fields(value)}
        differences[type(value).__name__] = {key: new for key, new in options.items() if new != defaults[key]}
    name = min(differences, key=lambda name: len(differences[name]))
    return " ".join([name, *(f"{key}={new}" for key, new in differences[name].items())])
