"""Predictions that were made anywhere: probabilities or logits with labels, from .npz or .csv; and what they are worth.

.npz: an array `probs`, `log_probs` or `logits` [N, Q] and an array `y` (or `labels`) [N] of numbers 0 … Q − 1.
.csv: a header; a column `y` (or `label`), and one column for each class. Labels are the numbers of the columns, or
their names. Columns called `logit_…` are logits, all others probabilities.
"""

import csv
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from calgp import metrics
from calgp.errors import CalgpError, path_error, short_repr
from calgp.metrics import Difference, Outcomes
from calgp.posthoc import calibration
from calgp.posthoc.decisions import risk_coverage
from calgp.runs.evaluation import score_outcomes
from calgp.runs.results import OwnClasses

Kind = Literal["probs", "log_probs", "logits"]
ARRAYS: dict[str, Kind] = {
    "probs": "probs", "probabilities": "probs", "p": "probs", "log_probs": "log_probs", "logits": "logits",
}  # fmt: skip
LABELS = ("y", "labels", "label", "target", "targets", "y_true")
SUM = 1e-3  # how far the probabilities of a row may be from 1: rounding, as of four decimals
LEAST = 1e-12  # what a probability of 0 counts as, so that a likelihood is finite
MOST = 2**31  # numbers of a file


@dataclass(frozen=True, eq=False)
class Predictions:
    """Log-probabilities and labels of a file. `zeros`: rows whose label had a probability of 0."""

    name: str
    log_probs: Float[Tensor, "N Q"]
    y: Int[Tensor, "N"]
    zeros: int = 0

    def take(self, index: Tensor) -> "Predictions":
        return Predictions(self.name, self.log_probs[index], self.y[index], self.zeros)


@dataclass(frozen=True, eq=False)
class Judgement:
    """What predictions are worth: scores with intervals, reliability, and how well confidence ranks them."""

    name: str
    n: int
    classes: int
    own: OwnClasses
    aurc: float
    outcomes: Outcomes
    notes: tuple[str, ...] = ()


def read_predictions(path: Path, kind: Kind | None = None) -> Predictions:
    """The predictions of a file; `kind` says what its numbers are, where names do not."""
    if not path.is_file():
        raise path_error("file", path)
    if kind is not None and kind not in get_args(Kind):
        raise CalgpError(f"Invalid kind={kind!r}: must be probs, log_probs or logits.")
    readers = {".npz": _read_npz, ".csv": _read_csv}
    if path.suffix.lower() not in readers:
        raise CalgpError(f"Invalid file {path}: must be .npz or .csv, not {path.suffix or 'a file without an ending'}.")
    values, y, found = readers[path.suffix.lower()](path, kind)
    return _checked(path, values, y, kind or found)


def judge(predictions: Predictions, *, seed: int = 0) -> Judgement:
    """Scores of predictions, with 95 % bootstrap intervals over the rows."""
    outcomes = metrics.outcomes(predictions.log_probs, predictions.y)
    own = score_outcomes(outcomes, predictions.y, predictions.log_probs, seed=seed)
    zeros = predictions.zeros
    notes = (f"{zeros:,} rows give their label a probability of 0, counted as {LEAST:g}.",) if zeros else ()
    aurc = risk_coverage(1 - outcomes.confidence, ~outcomes.correct).aurc
    return Judgement(predictions.name, len(outcomes), outcomes.classes, own, aurc, outcomes, notes)


def calibrate_on_half(predictions: Predictions, name: str, *, seed: int = 0) -> tuple[Predictions, Predictions, str]:
    """A random half as it is, the same half calibrated on the other, and a word about the fit.

    >>> log_probs = torch.tensor([[0.9, 0.1]]).log().expand(100, 2)
    >>> before, after, _ = calibrate_on_half(Predictions("it", log_probs, torch.arange(100) % 2), "temperature")
    >>> len(before.y), after.name
    (50, 'it + temperature')
    """
    n = len(predictions.y)
    if n < 2:
        raise CalgpError(f"Calibration on half of the rows needs at least two; {predictions.name} has {n}.")
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    fitted, rest = (predictions.take(index.sort().values) for index in (order[: n // 2], order[n // 2 :]))
    calibrator = calibration.find(name).fit(fitted.log_probs, fitted.y)
    after = Predictions(f"{predictions.name} + {name}", calibrator.apply(rest.log_probs), rest.y)
    return rest, after, f"{name} fitted on {n // 2:,} rows, scored on the others. {calibrator.warning or ''}".strip()


def compare_predictions(first: Predictions, second: Predictions, *, seed: int = 0) -> dict[str, Difference]:
    """Scores of the first less those of the second, on the same rows."""
    if len(first.y) != len(second.y) or not first.y.equal(second.y):
        different = len(first.y) == len(second.y) and int((first.y != second.y).sum())
        why = f"{different:,} labels differ" if different else f"they have {len(first.y):,} and {len(second.y):,} rows"
        raise CalgpError(
            f"{first.name} and {second.name} cannot be compared in pairs: {why}. Both must hold the same rows in the "
            "same order."
        )
    return metrics.paired_scores(*(metrics.outcomes(each.log_probs, each.y) for each in (first, second)), seed=seed)


# --- reading ---------------------------------------------------------------------------------------------------------


def _read_npz(path: Path, kind: Kind | None) -> tuple[np.ndarray, np.ndarray, Kind | None]:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise CalgpError(f"{path} is no .npz file of plain arrays ({error}).") from None
    y = next((arrays.pop(name) for name in LABELS if name in arrays), None)
    named = [name for name in ARRAYS if name in arrays]
    if y is None or len(named) != 1 or y.ndim != 1:
        raise CalgpError(
            f"{path} must hold one of {', '.join(ARRAYS)} [N, Q] and labels y [N]; it holds "
            f"{', '.join(f'{name} {list(each.shape)}' for name, each in arrays.items()) or 'nothing'}"
            f"{'' if y is None else f' and labels {list(y.shape)}'}."
        )
    return arrays[named[0]], y, ARRAYS[named[0]]


def _read_csv(path: Path, kind: Kind | None) -> tuple[np.ndarray, np.ndarray, Kind | None]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            header, *rows = csv.reader(file)
    except (OSError, UnicodeDecodeError, csv.Error, ValueError) as error:
        raise CalgpError(f"{path} is no CSV file with a header ({error}).") from None
    header = [name.strip() for name in header]
    label = next((header.index(name) for name in LABELS if name in header), None)
    if label is None:
        raise CalgpError(f"{path} must have a column {' or '.join(LABELS[:3])}; its columns are {short_repr(header)}.")
    columns = [place for place in range(len(header)) if place != label]
    for number, row in enumerate(rows, 2):
        if len(row) != len(header):
            raise CalgpError(f"{path}, line {number}: {len(row)} values, but the header names {len(header)} columns.")
    values = np.array([[_number(path, number, row[place]) for place in columns] for number, row in enumerate(rows, 2)])
    names = [header[place] for place in columns]
    logits = bool(names) and all(name.startswith("logit_") for name in names)
    y = _labels(path, [row[label].strip() for row in rows], names)
    return values.reshape(len(rows), len(columns)), y, "logits" if logits else "probs"


def _number(path: Path, line: int, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise CalgpError(f"{path}, line {line}: {short_repr(text)} is no number; class columns hold numbers.") from None


def _labels(path: Path, texts: Sequence[str], names: Sequence[str]) -> np.ndarray:
    """Labels as numbers of columns: numbers already, or names of columns, with or without p_, prob_ or logit_."""
    places = {name: place for place, name in enumerate(names)}
    for prefix in ("p_", "prob_", "logit_"):
        places |= {name.removeprefix(prefix): place for place, name in enumerate(names) if name.startswith(prefix)}
    if all(text in places for text in texts):
        return np.array([places[text] for text in texts], dtype=np.int64)
    try:
        return np.array([int(text) for text in texts], dtype=np.int64)
    except ValueError:
        odd = next(text for text in texts if text not in places)
        raise CalgpError(
            f"{path} has the label {short_repr(odd)}, which is neither a number nor one of its columns "
            f"{short_repr(list(names))}."
        ) from None


def _checked(path: Path, values: np.ndarray, y: np.ndarray, kind: Kind | None) -> Predictions:
    if values.ndim != 2 or values.shape[1] < 2 or values.dtype.kind not in "fiu" or values.size > MOST:
        raise CalgpError(f"{path} must have numbers [N, Q] of at least two classes, not {values.dtype} {values.shape}.")
    n, classes = values.shape
    if n < 1 or y.shape != (n,) or y.dtype.kind not in "iu":
        raise CalgpError(f"{path} must have a whole number as label for each of {n:,} rows, not {y.dtype} {y.shape}.")
    if not -1 < int(y.min()) <= int(y.max()) < classes:
        raise CalgpError(f"{path} has labels from {y.min()} to {y.max()}; its {classes} classes are 0 … {classes - 1}.")
    numbers, labels = torch.from_numpy(values.astype(np.float64)), torch.from_numpy(y.astype(np.int64))
    wrong = numbers.isnan() if kind == "log_probs" else ~numbers.isfinite()
    if wrong.any():
        raise CalgpError(f"{path} has a value that is no finite number in row {int(wrong.any(1).nonzero()[0])}.")
    if kind == "logits":
        return Predictions(path.stem, numbers.log_softmax(1), labels)
    probs = numbers.exp() if kind == "log_probs" else numbers
    total, low = probs.sum(1), probs.amin(1)
    off = ((total - 1).abs() > SUM) | (low < 0)
    if off.any():
        row = int(off.nonzero()[0])
        raise CalgpError(
            f"{path}, row {row}: the probabilities sum to {total[row]:.6g}, the least is {low[row]:.6g}; they must be "
            f"at least 0 and sum to 1 (± {SUM:g}). If these are logits, say so: --kind logits."
        )
    zeros = int((probs.gather(1, labels[:, None]) < LEAST).sum())
    return Predictions(path.stem, (probs.clamp_min(LEAST).log()).log_softmax(1), labels, zeros)
