"""Train and evaluate the same run in processes of their own, with 1, 1, 2 and 2 threads; tell what each found.

A program of its own: it imports torch once, computes nothing, and forks, so that four processes start at once.
"""

import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path

import torch
from lightning_fabric import Fabric

from calgp.data import load
from calgp.runs import RunFolder, evaluate, from_json, train

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 12
RUN = {"method": "cnn-gp-sorf", "train_size": 1000, "steps": STEPS, "learning_rate": 3e-3}


def found(folder: RunFolder, threads: int) -> dict:
    torch.set_num_threads(threads)
    fabric = Fabric(accelerator="cpu", devices=1)
    train(from_json(RUN), folder, fabric)
    images = load("digits", "test").take(torch.arange(200))
    evaluation = evaluate(folder, fabric, source="some digits", images=images, samples=5)
    shipped = evaluate_shipped(folder.path.parent / "shipped", images, fabric)
    return {
        "threads": folder.card().environment["threads"],
        "weights": hashlib.sha256((folder.path / "model.safetensors").read_bytes()).hexdigest(),
        "predictions": hashlib.sha256(evaluation.kept["log_probs"].numpy().tobytes()).hexdigest(),
        "scores": {name: evaluation.summary["scores"][name] for name in ("err", "mnll", "ece", "brier")},
        "probabilities": evaluation.kept["log_probs"].exp().tolist(),
        "of the same model": shipped.kept["log_probs"].exp().tolist(),
    }


def evaluate_shipped(path: Path, images, fabric):
    from calgp.runs import shipped_run
    from calgp.runs.evaluation import examine

    return examine(
        shipped_run(), fabric, source="some", images=images, samples=5, seed=0, convert=False, calibration=None,
        corruption=None,
    )  # fmt: skip


def main() -> None:
    place = Path(tempfile.mkdtemp())
    for number, threads in enumerate((1, 1, 2, 2)):
        pid = os.fork()
        if not pid:
            (place / f"{number}.json").write_text(json.dumps(found(RunFolder(place / f"run{number}"), threads)))
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
    print(json.dumps([json.loads((place / f"{number}.json").read_text()) for number in range(4)]))


if __name__ == "__main__":
    main()
