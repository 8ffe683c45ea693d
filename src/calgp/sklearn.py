"""calgp's classifiers for scikit-learn: arrays in, labels, probabilities and uncertainty out."""

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, make_dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from calgp.data import Images
from calgp.errors import CalgpError
from calgp.gp import Batch, Engine, Predictive
from calgp.json_values import Json
from calgp.methods import Method
from calgp.nets import Backbone
from calgp.options import like, option, options_of
from calgp.run import Run, default_name
from calgp.runs import Classifier, Interrupted, RunFolder, TrainingData, from_json, open_device
from calgp.runs.training_data import default_holdout
from calgp.training import Step, train_run

BATCH = 100
CHANNELS = (1, 3, 4)
# the options of a run that an estimator has under scikit-learn's names, or that make no sense of arrays
OWN = {
    "method", "backbone", "source", "size", "colour", "train_size", "split_seed", "seed", "holdout", "patience",
    "class_weights",
}  # fmt: skip
RUN_OPTIONS = {name: each for name, each in options_of(Run).items() if name not in OWN}
RunParameters: Any = make_dataclass(
    "RunParameters", [(name, each.type, like(Run, name)) for name, each in RUN_OPTIONS.items()],
    kw_only=True, eq=False, repr=False,
)  # fmt: skip


@dataclass(eq=False, repr=False)
class ConvGPClassifier(ClassifierMixin, BaseEstimator, RunParameters):
    """Any of calgp's methods as a scikit-learn classifier that also says how uncertain it is.

    Parameters are the fields below, and all options of `calgp.Run` that have a meaning for arrays, with their names and
    defaults: epochs, learning_rate, augment and others. `calgp train --help` explains them.

    >>> ConvGPClassifier("cnn-mcd", epochs=3).get_params()["batch_size"]
    100

    The training is that of `calgp.train`, with the same numbers for the same seed. In prediction all images see the
    same S draws, so that what is predicted for one depends neither on the others in X nor on its place among them.

    Attributes:
        classes_: the labels.
        model_, calibrator_: what was trained, and what its probabilities go through, if anything.
        run_: the `calgp.Run` that describes the training, without its data.
        history_: the log of the training.
        image_shape_: (channels, height, width).
        pixel_range_: the range in use; None for uint8.
        n_features_in_: of flat X the number of pixels, else the second dimension of X.
    """

    method: Any = option(default_name("method"), "A name in `calgp.METHODS`, or a value of it.")
    _: KW_ONLY
    backbone: Any = option(default_name("backbone"), "A name in `calgp.nets.BACKBONES`, or a value of it.")
    method_options: Mapping[str, Json] | None = option(None, 'What differs from the method: {"depth": 2}.')
    backbone_options: Mapping[str, Json] | None = option(None, 'What differs from the backbone: {"n": 2}.')
    image_shape: tuple[int, ...] | None = option(
        None, "(height, width) or (height, width, channels) of X that is flat, [N, d]; without, an image is one line."
    )
    channels: str = option(
        "auto", "Where X of four dimensions has them: first, last, or auto: where there are 1, 3 or 4 of them."
    )
    pixel_range: tuple[float, float] | None = option(
        None, "(black, white) of pixels that are not uint8; without, (0, 1) or the range of the training images."
    )
    class_weight: str | Mapping[Any, float] | None = option(
        None, "Weights in the likelihood term: balanced, or by label, 1 for those not named."
    )
    early_stopping: bool = option(
        False, "Stop after `patience` epochs without a better MNLL of half of the held-out images; keep the best state."
    )
    patience: int = option(5, "Epochs, see `early_stopping`.")
    validation_fraction: float = option(
        0.1, "Share of the training images kept for early stopping and calibration; of fewer than 500, only if asked."
    )
    passes: int | None = option(
        None, "Of the network for a prediction; without, 1 where the last layer is integrated, 50 samples elsewhere."
    )
    engine: Engine | None = option(None, "moments or samples (see `calgp.predict`); without, as the method is trained.")
    random_state: int | np.random.RandomState | None = option(
        None, "A number is the seed of everything that is random, as in `calgp.Run`."
    )
    device: str = option("auto", "auto, cpu, cuda, cuda:1, mps …")
    precision: str = option("32-true", "Of training: 32-true, bf16-mixed …; 64-true predicts in double precision, too.")
    verbose: int = option(0, "1 prints a line an epoch.")

    def fit(self, X: Any, y: Any) -> "ConvGPClassifier":
        """Train on images X and their labels y."""
        X, y = validate_data(self, X, y, allow_nd=True)
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"A classifier needs at least two classes; y has only one class, {self.classes_[0]!r}.")
        pixels = arranged(X, self.image_shape, self.channels)
        self.image_shape_ = pixels.shape[1:]
        self.pixel_range_ = None if X.dtype == np.uint8 else _range(pixels, self.pixel_range)
        names = tuple(str(label) for label in self.classes_)
        images = Images.of(_bytes(pixels, self.pixel_range_), torch.from_numpy(labels.astype(np.int64)), names)
        self.run_ = self._run(len(images))
        self._train(TrainingData.cut(images, self.run_))
        return self

    def predictive(self, X: Any) -> Predictive:
        """All that is known of the labels: probabilities, entropy, mutual information, spread over samples."""
        check_is_fitted(self)
        x = self._read(X)
        fabric = open_device(self.device)
        classifier = Classifier(self.model_, self.card_, calibration=self.calibration_, fabric=fabric)
        try:
            how = classifier.passes(self.passes, self.engine)
            batches = _batches(x, next(self.model_.parameters()))
            return Predictive.cat(classifier.predict_batches(batches, how, seed=self.run_.seed))
        finally:
            self.model_.cpu()  # so that it can be pickled for any machine

    def predict_proba(self, X: Any) -> np.ndarray:
        """p(y | x), Eq. (10), [N, Q] in the order of `classes_`; float32 unless the precision is 64-true."""
        return self.predictive(X).probs.numpy()

    def predict(self, X: Any) -> np.ndarray:
        """The most probable labels."""
        labels = self.predict_proba(X).argmax(1)
        return self.classes_[labels]

    def entropy(self, X: Any) -> np.ndarray:
        """The uncertainty in nats: 0 where it is certain, log Q where it knows nothing."""
        return self.predictive(X).entropy.numpy()

    def save(self, path: Path | str) -> RunFolder:
        """Write a run folder, which `calgp predict` and `calgp evaluate --source …` read; its source is "arrays"."""
        check_is_fitted(self)
        folder = RunFolder(path)
        if (folder.path / "run.json").exists():
            raise CalgpError(f"{folder.path} already holds a run. Choose another folder.")
        folder.create(self.card_)
        for record in self.history_:
            folder.append_log(record)
        if self.calibration_ is not None:
            folder.write_calibration(self.calibration_)
        folder.write_tensors("model.safetensors", self.model_.state_dict())
        return folder

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        return tags

    def _run(self, images: int) -> Run:
        """The description of a training on so many images, checked."""
        state = self.random_state
        seed = int(state) if isinstance(state, Integral) else check_random_state(state).randint(2**31 - 1)
        given = ((name, getattr(self, name)) for name in RUN_OPTIONS)
        options: dict[str, Json | Method | Backbone] = {name: value for name, value in given if value is not None}
        options |= {"source": "arrays", "class_weights": self._weights(), "seed": seed}
        chosen = {"method": (self.method, self.method_options), "backbone": (self.backbone, self.backbone_options)}
        for what, (value, differing) in chosen.items():
            named = isinstance(value, str)
            options[what] = {"name": value} | dict(differing or {}) if named else replace(value, **(differing or {}))
        run = from_json(options)
        calibrates = run.method.is_calibrated if self.calibration is None else self.calibration
        calibrates = calibrates and default_holdout(images) > 0
        if not self.early_stopping and not run.method.calibrator and not calibrates:
            return replace(run, holdout=0.0, calibration=False)
        return replace(run, holdout=self.validation_fraction, patience=self.patience if self.early_stopping else None)

    def _weights(self) -> str | tuple[float, ...] | None:
        if not isinstance(self.class_weight, Mapping):
            return self.class_weight
        labels = self.classes_.tolist()
        if strange := set(self.class_weight) - set(labels):
            raise ValueError(
                f"class_weight names {sorted(map(str, strange))}, which y has not: its classes are {labels}."
            )
        return tuple(float(self.class_weight.get(label, 1.0)) for label in labels)

    def _train(self, data: TrainingData) -> None:
        epoch = -(-len(data.train) // self.run_.batch_size)

        def report(step: Step) -> None:
            if self.verbose and (step.step % epoch == 0 or step.step == step.steps):
                parts = f"negative log-likelihood term {step.nll.item():.4f}, KL term {step.kl.item():.4f}"
                print(f"step {step.step} of {step.steps}: {parts}")

        with tempfile.TemporaryDirectory(prefix="calgp-") as place:
            folder = RunFolder(place)
            fabric = open_device(self.device, self.precision)
            try:
                trained = train_run(self.run_, folder, fabric, data=data, watch=report)
            except Interrupted:  # its advice to resume is for run folders that stay
                raise KeyboardInterrupt from None
            model = trained.model.cpu()
            self.model_ = model.double() if self.precision == "64-true" else model
            self.run_ = trained.card.run
            self.card_, self.history_ = trained.card, folder.log()
            self.calibration_, self.calibrator_ = trained.calibration, trained.calibrator

    def _read(self, X: Any) -> Tensor:
        """Images to predict, in the form of those that `fit` has seen."""
        X = validate_data(self, X, allow_nd=True, reset=False)
        pixels = arranged(X, self.image_shape, self.channels)
        if pixels.shape[1:] != self.image_shape_:
            has, wants = (" × ".join(map(str, shape)) for shape in (pixels.shape[1:], self.image_shape_))
            raise ValueError(f"X has images of {has}; fit has seen {wants} (channels × height × width).")
        if (X.dtype == np.uint8) != (self.pixel_range_ is None):
            low, high = self.pixel_range_ or (None, None)
            seen = "uint8" if low is None else f"numbers from {low} to {high}"
            raise ValueError(f"X has pixels of {X.dtype}; fit has seen {seen}: give the same kind.")
        return _bytes(pixels, self.pixel_range_)


def arranged(X: np.ndarray, image_shape: tuple[int, ...] | None, channels: str) -> np.ndarray:
    """X as [N, C, H, W], channels where they were said or found to be.

    >>> arranged(np.zeros((7, 64)), (8, 8), "auto").shape
    (7, 1, 8, 8)
    """
    if channels not in ("auto", "first", "last"):
        raise ValueError(f"Invalid channels={channels!r}: must be first, last or auto.")
    if X.ndim == 2:
        return _unflattened(X, image_shape)
    if X.ndim == 3:
        return X[:, None]
    if X.ndim != 4:
        raise ValueError(f"X has {X.ndim} dimensions; images are [N, H, W], [N, H, W, C], [N, C, H, W] or flat [N, d].")
    if channels == "auto":
        first, last = X.shape[1] in CHANNELS, X.shape[3] in CHANNELS
        if first == last:
            raise ValueError(
                f"X of shape {X.shape} {'could have' if first else 'has no'} 1, 3 or 4 channels "
                f"{'first or last' if first else 'first nor last'}; say channels='first' or channels='last'."
            )
        channels = "first" if first else "last"
    return X if channels == "first" else X.transpose(0, 3, 1, 2)


def _unflattened(X: np.ndarray, image_shape: tuple[int, ...] | None) -> np.ndarray:
    shape = (1, X.shape[1]) if image_shape is None else tuple(image_shape)
    if len(shape) not in (2, 3) or min(shape) < 1 or np.prod(shape) != X.shape[1]:
        raise ValueError(
            f"image_shape={image_shape} does not fit {X.shape[1]} numbers an image; it is (height, width) or "
            "(height, width, channels), and their product is how many there are."
        )
    return X.reshape(len(X), *shape, *(1,) * (3 - len(shape))).transpose(0, 3, 1, 2)


def _range(pixels: np.ndarray, given: tuple[float, float] | None) -> tuple[float, float]:
    if given is not None:
        low, high = given
        if not -np.inf < low < high < np.inf:
            raise ValueError(
                f"Invalid pixel_range={given}: must be (black, white) with black below white, such as (0, 1)."
            )
        return float(low), float(high)
    low, high = float(pixels.min()), float(pixels.max())
    if low >= 0 and high <= 1:
        return 0.0, 1.0
    return low, high if high > low else low + 1


def _bytes(pixels: np.ndarray, pixel_range: tuple[float, float] | None) -> Tensor:
    """uint8 as it is; other numbers from their range to 0 … 255."""
    if pixel_range is not None:
        low, high = pixel_range
        scaled = (pixels.astype(np.float64) - low) * (255 / (high - low))
        pixels = scaled.round().clip(0, 255).astype(np.uint8)
    return torch.from_numpy(np.array(pixels, order="C"))


def _batches(x: Tensor, like: Tensor) -> Iterator[Batch]:
    """All rows are 0: the masks of an image are keyed by its row, and here its place in X should not matter."""
    for part in x.split(BATCH):
        yield part.float().div_(255).to(like), torch.zeros(len(part), dtype=torch.long, device=like.device)
