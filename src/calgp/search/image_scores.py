"""Per-image scores of an evaluation: small enough to keep for every run, enough to compare any two runs later.

`images-mnist.safetensors.gz` stands beside `scores-mnist.json`. It holds float16 columns and packed bits, about
60 KB for 10,000 images. Files may come from anybody: sizes are checked before memory is taken.
"""

import gzip
import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from safetensors.torch import load, save
from torch import Tensor

from calgp import metrics
from calgp.metrics import Outcomes
from calgp.runs import Evaluation, RunFolder
from calgp.runs.reading import is_file, read_bytes, wrap_read_errors

MOST_IMAGES = 2**17  # evaluations of more images keep no columns
MOST_BYTES = 16 * MOST_IMAGES + 4096  # of a file, packed or not
INSIDE = ("log_prob", "one_minus_confidence", "brier", "entropy", "mutual_information")
OUTSIDE = ("entropy", "mutual_information")


@dataclass(frozen=True)
class ImageScores:
    """What one evaluation found for each image; `outcomes` is None for images of classes that the run does not know."""

    entropy: Float[Tensor, "N"]
    mutual_information: Float[Tensor, "N"]
    outcomes: Outcomes | None

    def __len__(self) -> int:
        return len(self.entropy)


def image_scores(folder: RunFolder, evaluation: Evaluation) -> ImageScores | None:
    """The per-image scores of an evaluation, from the kept file or else from the predictions; None without either."""
    path, classes = folder.path / image_scores_name(folder, evaluation), folder.card().task.classes
    return _read(path, evaluation, classes) if is_file(path) else _from_predictions(folder, evaluation, classes)


def image_scores_name(folder: RunFolder, evaluation: Evaluation) -> str:
    """The name of the kept file, `images-mnist.safetensors.gz`."""
    predictions = folder.predictions_name(evaluation.source, evaluation.calibrator)
    return predictions.replace("predictions-", "images-", 1) + ".gz"


def packed(scores: ImageScores) -> bytes:
    """The file's content. 1 − confidence is stored, since float16 has its fine steps near 0, not near 1."""
    columns = {"entropy": scores.entropy, "mutual_information": scores.mutual_information}
    found = scores.outcomes
    if found is not None:
        columns |= {"log_prob": found.label_log_prob, "one_minus_confidence": 1 - found.confidence}
        columns |= {"brier": found.brier}
    tensors = {name: column.to(torch.float16).contiguous() for name, column in columns.items()}
    if found is not None:
        tensors["correct"] = torch.from_numpy(np.packbits(found.correct.numpy()))
    return gzip.compress(save(tensors), mtime=0)


def _from_predictions(folder: RunFolder, evaluation: Evaluation, classes: int) -> ImageScores | None:
    columns = folder.predictions(evaluation.source, evaluation.calibrator, classes)
    if columns is None or len(columns["y"]) > MOST_IMAGES or len(columns["y"]) != evaluation.n:
        return None
    outcomes = None
    if not evaluation.outside:
        if "log_probs" not in columns:  # too many to be stored
            return None
        outcomes = metrics.outcomes(columns["log_probs"], columns["y"])
    return ImageScores(columns["entropy"], columns["mutual_information"], outcomes)


def _read(path: Path, evaluation: Evaluation, classes: int) -> ImageScores:
    with wrap_read_errors(path):
        tensors = _unpacked(read_bytes(path, MOST_BYTES))
        n, names = evaluation.n, OUTSIDE if evaluation.outside else INSIDE
        stored = {*names, *(() if evaluation.outside else ("correct",))}
        if set(tensors) != stored:
            raise ValueError(f"its columns are {', '.join(sorted(tensors))[:200]}, not {', '.join(sorted(stored))}")
        for name in names:
            if tensors[name].dtype != torch.float16 or tensors[name].shape != (n,) or tensors[name].isnan().any():
                raise ValueError(f"{name} is no column of {n} half-precision numbers")
        columns = {name: tensors[name].float() for name in names}
        outcomes = None if evaluation.outside else _outcomes(columns, tensors["correct"], n, classes)
        if outcomes is not None and int((~outcomes.correct).sum()) != round(evaluation.own.scores.err * n):
            raise ValueError("its errors are not those of the scores beside it")
    return ImageScores(columns["entropy"], columns["mutual_information"], outcomes)


def _unpacked(content: bytes) -> dict[str, Tensor]:
    with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(f"it unpacks to more than {MOST_BYTES} bytes")
    return load(data)


def _outcomes(columns: dict[str, Tensor], bits: Tensor, n: int, classes: int) -> Outcomes:
    if bits.dtype != torch.uint8 or bits.shape != (-(-n // 8),):
        raise ValueError(f"correct is not one bit for each of {n} images")
    correct = torch.from_numpy(np.unpackbits(bits.numpy(), count=n).astype(bool))
    confidence = 1 - columns["one_minus_confidence"]
    if not ((confidence >= 0) & (confidence <= 1)).all():
        raise ValueError("it has confidences that are no probabilities")
    return Outcomes(confidence, correct, columns["log_prob"], columns["brier"], columns["entropy"], classes)
