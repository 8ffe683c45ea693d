"""What tests do with a run folder in one call; everything goes through `Classifier`."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from calgp.data import Images
from calgp.runs import Calibration, Check, Classifier, Evaluation, Exported, FittedDecisions, Prediction, RunFolder
from calgp.runs.evaluation import PredictedImages, evaluate_images
from calgp.runs.reading import read_header, read_tensors
from calgp.runs.training_data import held_out_images
from forked import python


def made_once(places: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """A folder that the first of all test processes makes; the others wait for it."""
    base = places.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, done = shared / name, shared / f"{name}.made"
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            make(folder)
            done.touch()
    return folder


def classifier(folder: RunFolder, fabric=None, *, calibrated: bool = True, decided: bool = True) -> Classifier:
    return Classifier.load(folder, fabric=fabric, calibrated=calibrated, decided=decided)


def evaluate(folder: RunFolder, fabric=None, *, calibrated: bool = True, **options) -> Evaluation:
    return classifier(folder, fabric, calibrated=calibrated).evaluate(**options)


def evaluate_unsaved(
    folder: RunFolder, fabric=None, *, calibrated: bool = True, **options
) -> tuple[Evaluation, PredictedImages]:
    return evaluate_images(classifier(folder, fabric, calibrated=calibrated), **options)


def calibrate(folder: RunFolder, fabric=None, **options) -> Calibration:
    return classifier(folder, fabric, calibrated=False, decided=False).calibrate(**options)


def decide(folder: RunFolder, fabric=None, *, calibrated: bool = True, **options) -> FittedDecisions:
    return classifier(folder, fabric, calibrated=calibrated, decided=False).decide(**options)


def active_decisions(folder: RunFolder, *, calibrated: bool = True) -> FittedDecisions | None:
    return classifier(folder, calibrated=calibrated).active_decisions


def verify(folder: RunFolder, fabric=None, **options) -> list[Check]:
    return classifier(folder, fabric).verify(**options)


def export(folder: RunFolder, path: Path | None = None, *, calibrated: bool = True, **options) -> Exported:
    return classifier(folder, calibrated=calibrated).export(path, **options)


def predict_files(folder: RunFolder, paths, fabric=None, *, calibrated: bool = True, **options) -> Prediction:
    return classifier(folder, fabric, calibrated=calibrated).predict(paths, **options)


def held_out(folder: RunFolder) -> Images:
    return held_out_images(folder.path, folder.card())


def tensors(folder: RunFolder, name: str) -> dict[str, Tensor]:
    """The tensors of a file, as they lie there."""
    return read_tensors(folder.path / name)


def predictions(folder: RunFolder, source: str, calibrator: str | None = None, corruption: str | None = None):
    """The columns that an evaluation kept."""
    return tensors(folder, folder.predictions_name(source, calibrator, corruption))


def metadata(folder: RunFolder, name: str) -> dict[str, Any]:
    """The JSON that is stored beside the tensors of a file."""
    return read_header(folder.path / name).metadata


def exported(*words: object) -> str:
    """`calgp export` in a process of its own, as users export: torch's tracer is not to follow the checks of types."""
    done = python("-m", "calgp", *words)
    assert done.returncode == 0, (words, done.stderr)
    return done.stdout
