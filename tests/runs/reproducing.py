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
from calgp.runs import Classifier, RunFolder, from_json, shipped_run
from calgp.runs.evaluation import evaluate_images
from calgp.training import train_run

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 12
RUN = {
    "method": "cnn-gp-sorf", "backbone": "lenet", "train_size": 1000, "steps": STEPS, "learning_rate": 3e-3,
    "augment": ["none"],
}  # fmt: skip


def found(folder: RunFolder, threads: int) -> dict:
    torch.set_num_threads(threads)
    fabric = Fabric(accelerator="cpu", devices=1)
    train_run(from_json(RUN), folder, fabric)
    images = load("digits", "test").take(torch.arange(200))
    some = {"source": "some digits", "images": images, "passes": 5}
    evaluation, predicted = evaluate_images(Classifier.load(folder, fabric=fabric), **some)
    _, shipped = evaluate_images(Classifier.load(shipped_run(), fabric=fabric, calibrated=False), **some)
    return {
        "threads": folder.card().environment.threads,
        "weights": hashlib.sha256((folder.path / "model.safetensors").read_bytes()).hexdigest(),
        "predictions": hashlib.sha256(predicted.stored["log_probs"].numpy().tobytes()).hexdigest(),
        "scores": {name: getattr(evaluation.own.scores, name) for name in ("err", "mnll", "ece", "brier")},
        "probabilities": predicted.stored["log_probs"].exp().tolist(),
        "of the same model": shipped.stored["log_probs"].exp().tolist(),
    }


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
