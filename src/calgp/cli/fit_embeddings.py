"""What `calgp fit` does: a classifier on embeddings, tested on rows that it has not seen."""

import io
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from calgp import metrics
from calgp.data.images import stratified
from calgp.embeddings import GPClassifier, load_embeddings
from calgp.embeddings.cache import MadeBy, read_manifest
from calgp.errors import CalgpError
from calgp.metrics import Scores
from calgp.runs.writing import wrap_os_errors, write_whole

LEFT_OUT = 0.2


@dataclass(frozen=True, eq=False)
class FitResult:
    """A fitted classifier, and the probabilities of the rows that tested it, in the order of its `classes_`."""

    classifier: GPClassifier
    rows: int
    probs: np.ndarray
    y: np.ndarray
    scores: Scores
    seconds: float
    tested_apart: bool  # with embeddings of their own, not with some of the training rows
    made_by: MadeBy | None  # of a folder of `calgp embed`


def fit_and_test(path: Path, test: Path | None, *, seed: int) -> FitResult:
    """Fit on all rows; test on `test`, or on a fifth of the rows with a classifier that is fitted on the others."""
    begun = time.perf_counter()
    x, labels = _labelled(path)
    if len(set(labels)) < 2:
        raise CalgpError(f"{path} has only the class {str(labels[0])!r}; a classifier needs at least two.")
    if test is not None:
        test_x, test_labels = _labelled(test)
        if test_x.shape[1] != x.shape[1]:
            raise CalgpError(
                f"{test} has embeddings of {test_x.shape[1]} numbers, {path} of {x.shape[1]}; embed both with the same "
                "network."
            )
        tested = classifier = GPClassifier(random_state=seed).fit(x, labels)
    else:
        held = _left_out(path, labels, seed)
        tested = GPClassifier(random_state=seed).fit(x[~held], labels[~held])
        test_x, test_labels = x[held], labels[held]
        classifier = GPClassifier(random_state=seed).fit(x, labels)
    if strange := sorted(set(test_labels) - set(tested.classes_)):
        raise CalgpError(
            f"{test or path} has the class {str(strange[0])!r}, which no training row has; add or remove it."
        )
    probs, y = tested.predict_proba(test_x), np.searchsorted(tested.classes_, test_labels)
    log_probs = torch.from_numpy(probs).double().clamp_min(1e-300).log()
    scores = metrics.scores(metrics.outcomes(log_probs, torch.from_numpy(y)))
    made_by = read_manifest(path).made_by if path.is_dir() else None
    return FitResult(classifier, len(x), probs, y, scores, time.perf_counter() - begun, test is not None, made_by)


def check_fit(
    embeddings: Path | None, network: str | None, source: str | None, holdout: float, predictions: Path | None,
    *, folder: bool,
) -> None:  # fmt: skip
    """Refuse options that do not go together, before any work is done."""
    if (network is None) != (source is None):
        raise CalgpError("Invalid --network without --source, or the other way: one names a network, one its images.")
    if embeddings is None and network is None:
        raise CalgpError(
            "Invalid embeddings: must be a file or folder of them, or --network and --source to make them."
        )
    if not 0 <= holdout < 1 or (holdout and not folder):
        raise CalgpError(f"Invalid --holdout {holdout:g}: must be a share below 1, of a run folder (--out runs/mine).")
    if predictions is not None and folder:
        raise CalgpError("Invalid --predictions: a run folder keeps its own; it is for --out model.safetensors.")


def check_predictions_name(path: Path) -> None:
    """Refuse a name that `calgp judge` would not read, before any work is done."""
    if path.suffix.lower() != ".npz":
        raise CalgpError(
            f"Invalid --predictions {path}: must end with .npz, such as {path.name.partition('.')[0]}.npz."
        )


def write_predictions(result: FitResult, path: Path) -> None:
    """An .npz file that `calgp judge` reads: probs [N, Q], y [N], and the names of the classes."""
    content = io.BytesIO()
    np.savez(content, probs=result.probs, y=result.y, classes=result.classifier.classes_.astype(str))
    with wrap_os_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content.getvalue())


def _labelled(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Embeddings, and the names of their classes [N]."""
    x, y, classes = load_embeddings(path)
    if y is None:
        raise CalgpError(f"{path} has no labels; put X and y into one .npz file: np.savez(file, X=X, y=y).")
    return x, np.array(classes)[y]


def _left_out(path: Path, labels: np.ndarray, seed: int) -> np.ndarray:
    classes, y = np.unique(labels, return_inverse=True)
    held = stratified(torch.from_numpy(y), len(classes), LEFT_OUT, seed).numpy()
    if len(np.unique(y[~held])) < len(classes):
        raise CalgpError(
            f"{path} has too few rows, {len(y)}, to leave some out of each class; give --test, or add rows."
        )
    return held
