"""Predictions that were made anywhere: probabilities or logits with labels, from .npz or .csv; and what they are worth.

.npz: an array `probs`, `log_probs` or `logits` [N, Q] and an array `y` (or `labels`) [N] of numbers 0 … Q − 1, or of
names, with an array `classes` [Q] that says their order.
.csv, .tsv: a header; a column `y` (or `label`), and one column for each class. Labels are the numbers of the columns,
or their names. Columns called `logit_…` or `log_prob_…` are such, all others probabilities. Commas, semicolons or tabs.
One column, or an array [N], is the probability or the logit of class 1 of two classes.
"""

import csv
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple, get_args

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
LABELS = ("y", "labels", "label", "target", "targets", "y_true", "true", "true_label", "label_ids")
PREFIXES: dict[str, Kind] = {"logit_": "logits", "log_prob_": "log_probs", "prob_": "probs", "p_": "probs"}
NO_CLASS = ("", "index", "id", "unnamed: 0", "file", "filename", "image", "path", "pred", "prediction", "predicted")
EXACT, SUM = 1e-3, 0.02  # how far the sum of a row may be from 1: without a word; rounded, as of bfloat16 or 2 decimals
LEAST = 1e-12  # what a probability of 0 counts as, so that a likelihood is finite
MOST = 2**31  # numbers of a file


@dataclass(frozen=True, eq=False)
class Predictions:
    """Log-probabilities and labels of a file.

    zeros: rows whose label had a probability of 0. notes: on how the file was read.
    """

    name: str
    log_probs: Float[Tensor, "N Q"]
    y: Int[Tensor, "N"]
    zeros: int = 0
    notes: tuple[str, ...] = ()

    def take(self, index: Tensor) -> "Predictions":
        return replace(self, log_probs=self.log_probs[index], y=self.y[index])


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
    readers = {".npz": _read_npz, ".csv": _read_csv, ".tsv": _read_csv}
    if path.suffix.lower() not in readers:
        raise CalgpError(
            f"Invalid file {path}: must be .npz, .csv or .tsv, not {path.suffix or 'a file without an ending'}."
        )
    read = readers[path.suffix.lower()](path, kind)
    checked = _checked(path, read.values, _whole(read.y), kind or read.kind or "probs")
    return replace(checked, notes=(*checked.notes, *read.notes))


def judge(predictions: Predictions, *, seed: int = 0) -> Judgement:
    """Scores of predictions, with 95 % bootstrap intervals over the rows."""
    outcomes = metrics.outcomes(predictions.log_probs, predictions.y)
    own = score_outcomes(outcomes, predictions.y, predictions.log_probs, seed=seed)
    zeros = predictions.zeros
    notes = (f"{zeros:,} rows give their label a probability of 0, counted as {LEAST:g}.",) if zeros else ()
    notes = (*notes, *predictions.notes)
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


class Read(NamedTuple):
    """What a file holds: numbers, labels, what the numbers are if it says so, and what was left out."""

    values: np.ndarray
    y: np.ndarray
    kind: Kind | None
    notes: tuple[str, ...] = ()


def _read_npz(path: Path, kind: Kind | None) -> Read:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, AttributeError, zipfile.BadZipFile) as error:
        why = "one holds objects: write names as array.astype(str)" if "Object arrays" in str(error) else "see np.savez"
        raise CalgpError(f"{path} is no .npz file of plain arrays ({why}).") from None
    classes = arrays.pop("classes", None)
    y = next((arrays.pop(name) for name in LABELS if name in arrays), None)
    named = [name for name in ARRAYS if name in arrays and kind in (None, ARRAYS[name])]
    named = named or [name for name in arrays if kind is not None and len(arrays) == 1]  # it has been said what it is
    if y is None or len(named) != 1 or y.squeeze().ndim > 1:
        raise CalgpError(
            f"{path} must hold one of {', '.join(ARRAYS)} [N, Q] and labels y [N]; it holds "
            f"{', '.join(f'{name} {list(each.shape)}' for name, each in arrays.items()) or 'nothing'}"
            f"{'' if y is None else f' and labels {list(y.shape)}'}. Say which is meant, or what one of another name "
            "is, with --kind; one-hot labels are y.argmax(1)."
        )
    if y.dtype.kind == "U" and classes is not None:
        y = _labels(path, y.ravel().tolist(), [str(each) for each in classes.ravel().tolist()])
    return Read(arrays[named[0]], y, ARRAYS.get(named[0]))


def _read_csv(path: Path, kind: Kind | None) -> Read:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            first = file.readline()
            file.seek(0)
            sign = max(",;\t", key=first.count)
            lines = csv.reader(file, delimiter=sign, skipinitialspace=True)
            header = [name.strip() for name in next(lines, [])]
            label, columns, left = _columns(path, header)
            texts: list[str] = []
            values = np.fromiter(
                _numbers(path, lines, columns, label, len(header), texts, comma=sign != ","), np.float64
            )
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise CalgpError(f"{path} is no CSV file with a header, in UTF-8 ({error}).") from None
    names = [header[place] for place in columns]
    kinds: set[Kind | None] = {
        next((each for prefix, each in PREFIXES.items() if name.startswith(prefix)), None) for name in names
    }
    y = _labels(path, texts, names) if len(names) != 1 else _whole(np.array(texts))
    notes = (f"{path.name}: columns that are no class were left out: {', '.join(map(repr, left))}.",) if left else ()
    return Read(values.reshape(len(texts), len(columns)), y, kinds.pop() if len(kinds) == 1 else None, notes)


def _columns(path: Path, header: Sequence[str]) -> tuple[int, list[int], list[str]]:
    """Where the labels are, where the classes are, and what else there is: an index, names of files, predicted labels.

    >>> _columns(Path("it.csv"), ["id", "label", "cat", "dog"])
    (1, [2, 3], ['id'])
    """
    lower = [name.lower() for name in header]
    labels = [place for place, name in enumerate(lower) if name in LABELS]
    if len(labels) != 1:
        what = "several columns of labels" if labels else "no header" if all(map(_is_number, header)) else "others"
        raise CalgpError(
            f"{path} must have a header with one column {' or '.join(LABELS[:3])}; it has {what}: {short_repr(header)}."
        )
    left = [name for name in header if name.lower() in NO_CLASS]
    columns = [place for place, name in enumerate(lower) if place != labels[0] and name not in NO_CLASS]
    if len({header[place] for place in columns}) < len(columns):
        raise CalgpError(f"{path} has two columns of the same name: {short_repr(header)}.")
    return labels[0], columns, left


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _numbers(
    path: Path, lines: Iterable[list[str]], columns: Sequence[int], label: int, width: int, texts: list[str],
    *, comma: bool,
) -> Iterator[float]:  # fmt: skip
    """Row by row, as text needs many times as much memory; labels go to `texts`. `comma`: decimals may have one."""
    for number, row in enumerate(lines, 2):
        if not any(map(str.strip, row)):
            continue
        if len(row) != width:
            raise CalgpError(f"{path}, line {number}: {len(row)} values, but the header names {width} columns.")
        texts.append(row[label].strip())
        for place in columns:
            text = row[place].replace(",", ".") if comma else row[place]
            try:
                yield float(text)
            except ValueError:
                raise CalgpError(
                    f"{path}, line {number}: {short_repr(row[place])} in column {place + 1} is no number; class "
                    "columns hold numbers. Leave out other columns."
                ) from None


def _labels(path: Path, texts: Sequence[str], names: Sequence[str]) -> np.ndarray:
    """Labels as numbers of columns: numbers already, or names of columns, with or without p_, prob_ or logit_."""
    places = {name: place for place, name in enumerate(names)}
    for prefix in PREFIXES:
        places |= {name.removeprefix(prefix): place for place, name in enumerate(names) if name.startswith(prefix)}
    if all(text in places for text in texts):
        return np.array([places[text] for text in texts], dtype=np.int64)
    y = _whole(np.array(texts))
    if y.dtype.kind not in "iu":
        odd = next(text for text in texts if text not in places)
        raise CalgpError(
            f"{path} has the label {short_repr(odd)}, which is neither a number nor one of its columns "
            f"{short_repr(list(names))}."
        )
    return y


def _whole(y: np.ndarray) -> np.ndarray:
    """Labels as whole numbers [N], if that is what they are: also in a column, and written as 2.0 or True."""
    y = y.squeeze(1) if y.ndim == 2 and y.shape[1] == 1 else y
    if y.dtype.kind not in "bfU" or not y.size:
        return y
    try:
        numbers = y.astype(np.float64)
    except ValueError:
        return y
    return numbers.astype(np.int64) if np.isfinite(numbers).all() and (numbers % 1 == 0).all() else y


def _checked(path: Path, values: np.ndarray, y: np.ndarray, kind: Kind) -> Predictions:
    one = values.ndim == 1 or (values.ndim == 2 and values.shape[1] == 1)
    if not (one or values.ndim == 2) or values.dtype.kind not in "fiu" or values.size > MOST:
        raise CalgpError(
            f"{path} must have numbers [N, Q] of at least two classes, or [N] of class 1 of two, not {values.dtype} "
            f"{values.shape}."
        )
    n, classes = values.shape[0], 2 if one else values.shape[1]
    if n < 1 or y.shape != (n,) or y.dtype.kind not in "iu":
        raise CalgpError(
            f"{path} must have a whole number as label for each of {n:,} rows, not {y.dtype} {y.shape}. For names give "
            "an array classes [Q] of all names, too."
        )
    if not -1 < int(y.min()) <= int(y.max()) < classes:
        raise CalgpError(
            f"{path} has labels from {y.min()} to {y.max()}; its {classes} classes are 0 … {classes - 1}. Number them "
            "from 0."
        )
    numbers, labels = torch.from_numpy(values.astype(np.float64)), torch.from_numpy(y.astype(np.int64))
    wrong = numbers.isnan() if kind == "log_probs" else ~numbers.isfinite()
    if wrong.any():
        raise CalgpError(
            f"{path} has a value that is no finite number in row {int(wrong.view(n, -1).any(1).int().argmax())}."
        )
    if kind == "logits":
        numbers = torch.stack([torch.zeros(n), numbers.view(n)], 1) if one else numbers
        return Predictions(path.stem, numbers.log_softmax(1), labels)
    probs = numbers.exp() if kind == "log_probs" else numbers
    probs = torch.stack([1 - probs.view(n), probs.view(n)], 1) if one else probs
    return _normalised(path, probs, labels)


def _normalised(path: Path, probs: Tensor, labels: Tensor) -> Predictions:
    """Probabilities of rows that sum to 1, but for rounding."""
    total, low = probs.sum(1), probs.amin(1)
    distance = (total - 1).abs()
    off = (distance > SUM + 1e-9) | (low < 0)
    if off.any():
        row = int(off.nonzero()[0])
        raise CalgpError(
            f"{path}, row {row}: the probabilities sum to {total[row]:.6g}, the least is {low[row]:.6g}; they must be "
            f"at least 0 and sum to 1 (± {SUM:g}). If these are logits, say so: --kind logits. Otherwise a column may "
            "be no class, or each class has a probability of its own."
        )
    worst = distance.max().item()
    rounded = (f"The probabilities of a row sum to 1 within {worst:.2g} only, and were divided by their sum.",)
    zeros = int((probs.gather(1, labels[:, None]) < LEAST).sum())
    log_probs = probs.clamp_min(LEAST).log().log_softmax(1)
    return Predictions(path.stem, log_probs, labels, zeros, rounded if worst > EXACT + 1e-9 else ())
