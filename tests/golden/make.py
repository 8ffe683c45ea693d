"""How the golden run folders were made; run once for each FORMAT, by the first version that writes it.

    python tests/golden/make.py        # writes tests/golden/format-N/{run,interrupted}

What lies there is never made again for the same format: it is what older versions have left on people's disks.
"""

import os
import shutil
import signal
import sys
from pathlib import Path

import torch
from lightning_fabric import Fabric

from calgp.data import load
from calgp.runs import Interrupted, Run, RunFolder, from_json
from calgp.runs.card import FORMAT
from calgp.runs.writing import LOCK
from calgp.training import train_run

HERE = Path(__file__).parent
SOURCE = "eight digits"


def images():
    return load("digits", "test", size=12).take(torch.arange(8))


def description() -> Run:
    return from_json(
        {
            "method": {"name": "cnn-gp-sorf", "n_rf": 8},
            "backbone": {"name": "lenet", "channels": [2, 3], "hidden": [8]},
            "size": 12,
            "train_size": 100,
            "holdout": 0.2,
            "steps": 6,
            "batch_size": 20,
            "learning_rate": 1e-2,
        }
    )


def interrupt(step) -> None:
    if step.step == 3:
        os.kill(os.getpid(), signal.SIGINT)


def main() -> None:
    target, fabric = HERE / f"format-{FORMAT}", Fabric(accelerator="cpu", devices=1)
    if target.exists():
        sys.exit(f"{target} is there; it must stay as it is.")
    torch.set_num_threads(1)
    try:
        train_run(description(), RunFolder(target / "interrupted"), fabric, watch=interrupt)
    except Interrupted:
        shutil.copytree(target / "interrupted", target / "run")
    folder = RunFolder(target / "run")
    classifier = train_run(description(), folder, fabric, resume=True)
    classifier.evaluate(SOURCE, images=images(), passes=4)
    classifier.calibrate(passes=4)
    classifier.evaluate(SOURCE, images=images(), passes=4)
    for name in ("run", "interrupted"):
        (target / name / LOCK).unlink()


if __name__ == "__main__":
    main()
