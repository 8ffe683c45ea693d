"""What `calgp fit` and `calgp classify` do: a classifier on embeddings, tested; new images through its network."""

import io
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from calgp import metrics
from calgp.data.decode import read_image
from calgp.data.images import stratified
from calgp.embeddings import GPClassifier, load_embeddings
from calgp.embeddings.cache import MadeBy, read_manifest
from calgp.embeddings.run import MODEL
from calgp.errors import CalgpError
from calgp.gp import Passes
from calgp.metrics import Scores
from calgp.nets.pretrained import FeatureExtractor, find_network
from calgp.runs import Prediction
from calgp.runs.inputs import image_files
from calgp.runs.reading import read_header, wrap_read_errors
from calgp.runs.record import parse
from calgp.runs.writing import write_files

LEFT_OUT = 0.2
BATCH = 50


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
    if predictions is not None and predictions.suffix.lower() != ".npz":  # `calgp judge` would not read it
        name = predictions.name.partition(".")[0]
        raise CalgpError(f"Invalid --predictions {predictions}: must end with .npz, such as {name}.npz.")


def write_predictions(result: FitResult, path: Path) -> None:
    """An .npz file that `calgp judge` reads: probs [N, Q], y [N], and the names of the classes."""
    content = io.BytesIO()
    np.savez(content, probs=result.probs, y=result.y, classes=result.classifier.classes_.astype(str))
    write_files(path.parent, {path.name: content.getvalue()})


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


def classified(
    model: Path, images: Iterable[Path], network: str, weights: str | None, features: str | None,
    *, device: torch.device | str,
) -> Prediction:  # fmt: skip
    """What the classifier says of image files: probabilities, uncertainty and the outlier score."""
    model = model / MODEL if model.is_dir() else model
    classifier = GPClassifier.load(model)
    with wrap_read_errors(model):
        described = read_header(model).metadata.get("made_by")
        made_by = None if described is None else parse(MadeBy, described)
    extractor = find_network(network, weights, features=features).to(device)
    _check_network(model, made_by, classifier.n_features_in_, extractor)
    files, colour = [file for path in images for file in image_files(path)], extractor.preprocessing.colour
    parts = []
    for k in range(0, len(files), BATCH):
        read = (read_image(file, name=str(file), size=None, colour=colour) for file in files[k : k + BATCH])
        parts.append(extractor([torch.from_numpy(image) for image in read]))
    x = torch.cat(parts).numpy()
    return Prediction(
        tuple(map(str, files)), tuple(map(str, classifier.classes_)), classifier.predictive(x), Passes(1, "moments"),
        outlier_score=torch.from_numpy(classifier.outlier_score(x)),
    )  # fmt: skip


def _check_network(model: Path, made_by: MadeBy | None, width: int, extractor: FeatureExtractor) -> None:
    if extractor.width != width:
        raise CalgpError(
            f"{extractor.name} gives {extractor.width} features, {model} was fitted on {width}; name the network of "
            f"the embeddings{'' if made_by is None else f', {made_by.network}'}."
        )
    if made_by is None:
        return  # embeddings of anybody's: the user alone knows their network
    for what, here, there in (
        ("weights", extractor.weights, made_by.weights),
        ("preprocessing", extractor.preprocessing, made_by.preprocessing),
    ):
        if here != there:
            raise CalgpError(
                f"{extractor.name} has other {what} here than when the embeddings of {model} were made (by "
                f"{made_by.network}); give the same network and --weights, or run `calgp embed` and `calgp fit` again."
            )
