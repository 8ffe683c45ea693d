"""A small run, and one that is trained once for all tests."""

import pytest
from lightning_fabric import Fabric

from calgp.runs import Run, RunFolder, from_json
from calgp.training import train_run
from folders import evaluate

SMALL = {
    "method": {"name": "cnn-gp-sorf"},
    "backbone": {"name": "lenet", "channels": [4, 8], "hidden": [16]},
    "train_size": 200,
    "steps": 30,
    "batch_size": 32,
    "learning_rate": 5e-3,
    "schedule": "constant",
    "augment": [],
    "calibration": False,
}


@pytest.fixture(scope="session")
def fabric() -> Fabric:
    return Fabric(accelerator="cpu", devices=1)


def small(**options) -> Run:
    return from_json(SMALL | options)


@pytest.fixture(scope="session")
def trained(tmp_path_factory, fabric) -> RunFolder:
    """A run with a hold-out, evaluated inside and outside. Read only."""
    folder = RunFolder(tmp_path_factory.mktemp("runs") / "trained")
    train_run(small(holdout=0.2), folder, fabric)
    evaluate(folder, fabric, passes=4)
    evaluate(folder, fabric, source="letters", passes=4)
    return folder
