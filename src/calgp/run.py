"""Run: the whole description of one training, as data. Every option of a training is a field here, with its help text.

Nothing here imports torch before a method is needed, so that `calgp train --help` appears at once.
"""

import dataclasses
import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from calgp.errors import CalgpError
from calgp.json_values import Json
from calgp.options import POSITIVE, Interval, about, check_options, option, options_of

if TYPE_CHECKING:
    from calgp.methods import Method
    from calgp.nets import Backbone
else:
    Method = Backbone = Any

MODEL, IMAGES, TRAINING = "Model", "Images", "Training"  # the panels of `calgp train --help`
WHOLE = Interval(1, 1e12)
SEED = Interval(0, 2**63, open=")")
EPOCHS, STEPS = 30, (1000, 30_000)  # of a run that names no budget: so many epochs, within these limits


@dataclass(frozen=True)
class Run:
    """The description of a training: method, network, images and length, but not the device, precision or threads.

    The fields say what they are for, here and in `calgp train --help`.

    >>> from calgp.methods import METHODS
    >>> from calgp.nets import BACKBONES
    >>> run = Run(METHODS["cnn-cal"], BACKBONES["lenet"], source="mnist", epochs=3)
    >>> run.label, run.holdout, run.learning_rate, run.total_steps(54_000)
    ('cnn-cal', 0.1, 0.003, 1620)
    """

    method: Method = field(
        metadata=about("How the classifier is inferred: see `calgp methods`.", default_text="cnn-gp-sorf", group=MODEL)
    )
    backbone: Backbone = field(
        metadata=about(
            "The network: see `calgp backbones`; or your own (`calgp --network`).", default_text="auto", group=MODEL
        )
    )
    source: str = option(
        "digits",
        "An image set (see `calgp sources`) or folder:PATH; stream:PATH and shards:PATH leave images on the disk.",
        group=IMAGES,
    )
    size: int | None = option(
        None, "Resize images to a square of this side.", within=WHOLE, example=64,
        default_text="as they are; 64 for files that differ in size or are larger than 256",
        group=IMAGES,
    )  # fmt: skip
    colour: Literal["grey", "rgb"] | None = option(
        None, "Convert images.", default_text="as they are", example="rgb", group=IMAGES
    )
    train_size: int | None = option(
        None, "Train on a balanced part of this many images.", within=WHOLE, default_text="all", example=1000,
        group=IMAGES,
    )  # fmt: skip
    holdout: float | None = option(
        None, "Share of the training images kept for validation and calibration.", within=Interval(0, 1, open=")"),
        default_text="0.1; of fewer than 500 images 0", example=0.1, group=IMAGES,
    )  # fmt: skip
    seed: int = option(
        0, "Seed of everything random: subset, hold-out, Ω, first weights, order of the images, masks.", within=SEED,
        group=TRAINING,
    )  # fmt: skip
    split_seed: int | None = option(
        None, "Seed of subset and hold-out only, so that the runs of an ensemble share them.", within=SEED,
        default_text="as seed", example=0, group=IMAGES,
    )  # fmt: skip
    epochs: float | None = option(
        None, "Passes over the training images.", within=POSITIVE,
        default_text="30, of colour images 60, but 1,000 to 30,000 steps in all", example=30.0, group=TRAINING,
    )  # fmt: skip
    steps: int | None = option(
        None, "Optimiser steps, instead of epochs.", within=WHOLE, default_text="by epochs", example=1000,
        group=TRAINING,
    )  # fmt: skip
    minutes: float | None = option(
        None, "Train for about this long, instead of epochs. The first steps are timed to choose their number.",
        within=POSITIVE, default_text="by epochs", example=10.0, group=TRAINING, since_version="0.2.0",
    )  # fmt: skip
    batch_size: int = option(100, "Images in each step, over all processes.", within=WHOLE, group=TRAINING)
    optimiser: Literal["adam", "sgd", "muon"] | None = option(
        None, "Adam; SGD with Nesterov's momentum of 0.9; Muon, for filters before batch norm, and Adam for the rest.",
        default_text="the network's: muon for compact, else adam", example="adam", group=TRAINING,
    )  # fmt: skip
    learning_rate: float = option(  # pyright: ignore[reportAssignmentType]  (the method's takes its place)
        None, "Step size of the optimiser.", within=POSITIVE, flags=("--lr",), default_text="the method's",
        example=0.001, group=TRAINING,
    )  # fmt: skip
    schedule: Literal["constant", "cosine", "one-cycle"] = option(
        "one-cycle",
        "How the learning rate changes: constant; cosine falls to 0; one-cycle rises for a quarter, then falls to 0.",
        group=TRAINING,
    )
    kl_weight: float = option(1.0, "Factor of the KL term; 1 is the bound.", within=Interval(0), group=TRAINING)
    mc_samples: int = option(1, "Samples of the masks in each training step (N_MC).", within=WHOLE, group=TRAINING)
    class_weights: Literal["balanced"] | tuple[float, ...] | None = option(
        None,
        "Weights of the classes: numbers in their order, or balanced, which makes all classes count the same.",
        within=Interval(0), default_text="1 each", example="balanced", group=TRAINING, since_version="0.1.0",
    )  # fmt: skip
    augment: tuple[Literal["auto", "none", "flip", "crop", "cutout", "mixup", "augmix"], ...] = option(
        ("auto",),
        "Random changes of the training images: flip, crop (moves them), cutout (a black square), mixup (mixes pairs "
        "of images and labels), augmix (mixes an image with small changes of it), auto or none.",
        default_text="auto: crop; flip colour images where a mirror does no harm",
        example="flip,crop", group=IMAGES, since_version="0.1.0", before=(),
    )  # fmt: skip
    crop: int | None = option(
        None, "The most pixels by which crop moves an image.", within=WHOLE, default_text="an eighth of its side",
        example=4, group=IMAGES, since_version="0.1.0", before=4,
    )  # fmt: skip
    normalise: Literal["none", "standard"] = option(
        "none", "Pixels as x / 255 (none), or standardised by each channel's mean and deviation (standard).",
        group=IMAGES, since_version="0.1.0",
    )  # fmt: skip
    patience: int | None = option(
        None,
        "Stop after this many epochs without a better MNLL on half of the hold-out, and keep the best state. The other "
        "half is for calibration.",
        within=WHOLE, default_text="never", example=5, group=TRAINING, since_version="0.1.0",
    )  # fmt: skip
    clip: float | None = option(
        None, "Scale gradients down to at most this norm, over all parameters.", within=POSITIVE, default_text="never",
        example=1.0, group=TRAINING, since_version="0.1.0",
    )  # fmt: skip
    skip_unreadable: bool = option(
        False, "Leave out image files that cannot be read, instead of stopping.", group=IMAGES, since_version="0.2.0"
    )
    calibration: bool | None = option(
        None, "Fit a temperature on the hold-out at the end, if it is large enough.",
        default_text="yes; of the paper's methods only cnn-cal", example=True, group=TRAINING, since_version="0.2.0",
        before=False,
    )  # fmt: skip

    def __post_init__(self) -> None:
        if self.learning_rate is None:
            object.__setattr__(self, "learning_rate", self.method.learning_rate)
        if self.optimiser is None:
            object.__setattr__(self, "optimiser", self.backbone.optimiser)
        check_options(self)
        if self.optimiser == "muon" and not self.backbone.scale_free:
            raise CalgpError(
                f"Invalid optimiser=muon: {self.backbone_label} has convolutions without batch norm; must be adam or "
                "sgd, or --backbone compact."
            )
        augment = tuple(sorted(set(self.augment) - {"none"}))
        if len(self.augment) > 1 and {"auto", "none"} & set(self.augment):
            raise CalgpError(f"Invalid augment={','.join(self.augment)}: auto and none must stand alone.")
        object.__setattr__(self, "augment", augment)
        calibrator = self.method.calibrator
        if self.holdout is None and (calibrator or self.patience or self.calibration):
            object.__setattr__(self, "holdout", 0.1)
        if self.holdout == 0 and (calibrator or self.calibration):
            raise CalgpError(
                f"Invalid holdout=0: {self.label} fits its {calibrator or 'temperature'} on held-out images, such as "
                "--holdout 0.1."
            )
        if self.patience and not self.holdout:
            raise CalgpError(f"Invalid patience={self.patience}: early stopping needs held-out images: --holdout 0.1.")
        if isinstance(self.class_weights, tuple) and not sum(self.class_weights):
            raise CalgpError(f"Invalid class_weights={self.class_weights}: must not be all 0.")

    def total_steps(self, n: int, *, epochs: float = EPOCHS) -> int:
        """Optimiser steps for n training images; the last batch of an epoch may be smaller.

        `epochs`: those of a run that names no budget.
        """
        if self.steps is not None:
            return self.steps
        epoch = math.ceil(n / self.batch_size)
        if self.epochs is not None:
            return math.ceil(self.epochs * epoch)
        least, most = STEPS
        return min(max(math.ceil(epochs * epoch), least), most)

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
        from calgp.methods import METHODS

        return _label(self.method, METHODS)

    @property
    def backbone_label(self) -> str:
        """The network by its name in BACKBONES, with what differs from it."""
        from calgp.nets import BACKBONES

        return self.backbone.own_label or _label(self.backbone, BACKBONES)


def default_name(what: str) -> str:
    """The name of the method or of the backbone of a run that names none."""
    return options_of(Run)[what].about.default_text


def assign(options: Mapping[str, Json], name: str, value: Json) -> dict[str, Json]:
    """A run's plain data with an option set: learning_rate, or method.depth of a method that may only be named so far.

    >>> assign({"method": "cnn-dgp"}, "method.depth", 3)
    {'method': {'name': 'cnn-dgp', 'depth': 3}}
    """
    what, dot, own = name.partition(".")
    if not dot:
        return {**options, name: value}
    if what not in ("method", "backbone"):
        raise CalgpError(f"Invalid option {name}: must be an option of the run, method.NAME or backbone.NAME.")
    chosen = options.get(what, default_name(what))
    return {**options, what: {**(chosen if isinstance(chosen, Mapping) else {"name": chosen}), own: value}}


def train_command(run: Run) -> str:
    """The command that trains this very run.

    >>> from calgp.methods import METHODS
    >>> from calgp.nets import BACKBONES
    >>> train_command(Run(METHODS["cnn-mcd"], BACKBONES["lenet"], epochs=3, augment=("flip", "crop")))
    'calgp train --source digits --method cnn-mcd --backbone lenet --epochs 3 --augment crop,flip'
    """
    from calgp.methods import METHODS
    from calgp.nets import BACKBONES

    words = ["calgp", "train", "--source", run.source]
    words += _chosen("method", run.method, METHODS)
    words += _chosen("backbone", run.backbone, BACKBONES) if (own := run.backbone.flags()) is None else own
    default = Run(run.method, run.backbone, run.source)
    for name, each in options_of(Run).items():
        if (value := getattr(run, name)) != getattr(default, name):
            shown = "none" if value == () and "none" in each.choices else each.show(value)
            words += [each.switch(value)] if each.is_switch else [each.flags[0], shown]
    return shlex.join(words)


def _chosen(what: str, value: Method | Backbone, table: Mapping[str, Method | Backbone]) -> list[str]:
    """Flags that choose the nearest ready value, and set the options that differ from it."""
    name, differing = _nearest(value, table)
    settings = [("--set", f"{what}.{key}={options_of(type(value))[key].show(new)}") for key, new in differing.items()]
    return [f"--{what}", name, *(word for setting in settings for word in setting)]


def _label(value: Method | Backbone, table: Mapping[str, Method | Backbone]) -> str:
    name, differing = _nearest(value, table)
    return " ".join([name, *(f"{key}={new}" for key, new in differing.items())])


def _nearest(value: Any, table: Mapping[str, Method | Backbone]) -> tuple[str, dict[str, Json]]:
    """The ready value that is most like this one, or the kind if there is none, and the options that differ from it."""
    options = dataclasses.asdict(value)
    alike = {name: each for name, each in table.items() if type(each) is type(value)}
    ready = {name: dataclasses.asdict(each) for name, each in alike.items()}  # type: ignore[call-overload]
    if not ready:
        ready = {type(value).__name__: {name: each.default for name, each in options_of(type(value)).items()}}
    differing = {name: {key: new for key, new in options.items() if new != old[key]} for name, old in ready.items()}
    name = min(differing, key=lambda name: len(differing[name]))
    return name, differing[name]
