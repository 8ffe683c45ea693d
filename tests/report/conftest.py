"""Two tiny runs, made by the real code and evaluated inside and outside."""

from __future__ import annotations

from pathlib import Path

import pytest
from lightning_fabric import Fabric

from calgp.methods import METHODS
from calgp.nets import LeNet
from calgp.runs import Run, RunFolder
from calgp.training import train_run
from folders import evaluate


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[RunFolder]:
    """CNN+GP(SORF) with a hold-out, and a plain CNN without: a few steps each, on 100 digits."""
    root, fabric = tmp_path_factory.mktemp("runs"), Fabric(accelerator="cpu")
    folders = []
    for method, holdout in (("cnn-gp-sorf", 0.2), ("cnn", 0.0)):
        backbone = LeNet(channels=(4, 8), hidden=(16,))
        run = Run(METHODS[method], backbone, train_size=100, holdout=holdout, batch_size=20, steps=30, seed=3)
        folder = RunFolder(root / method)
        train_run(run, folder, fabric)
        for source in ("digits", "letters"):
            evaluate(folder, fabric, source=source, passes=4)
        folders.append(folder)
    return folders


@pytest.fixture
def copied(runs: list[RunFolder], tmp_path: Path) -> RunFolder:
    """A run folder to damage."""
    import shutil

    return RunFolder(shutil.copytree(runs[0].path, tmp_path / "run"))
