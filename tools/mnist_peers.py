"""Deep ensembles, laplace-torch and SNGP beside the tuned table of docs/results.md: MNIST, LeNet, 10,000 images.

    python tools/mnist_peers.py train WORK SEED    one plain CNN of the ensemble (seeds 0, 1, 2; CALGP_DATA)
    python tools/mnist_peers.py ensemble WORK      the three, averaged, with a temperature
    python tools/mnist_peers.py laplace WORK       laplace-torch on the last layer of the CNN of seed 0
    python tools/mnist_peers.py sngp WORK          tuned like the other methods, then trained

Options are those of `calgp reproduce fig2 --scale tuned`: the CNN's learning rate by its search (results/tuning/tuned),
2,000 steps of 100 images in bf16-mixed, seed 0. Each command prints one line of JSON for results/mnist-peers.jsonl.
"""

import json
import sys
import time
import warnings
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import calgp
from calgp import metrics
from calgp.data import load
from calgp.data.images import to_unit_interval
from calgp.nets.lenet import LeNet
from calgp.run import Run
from calgp.runs import RunFolder, TrainingData, open_device
from calgp.runs.ensembles import ensemble
from calgp.search.jobs import Paths
from calgp.search.tune import Budget, tune
from calgp.training import train_run

RATE = 0.002828  # found by results/tuning/tuned/mnist-lenet/cnn-cal.json
COMMON = {"source": "mnist", "train_size": 10_000, "steps": 2000, "schedule": "one-cycle", "split_seed": 0}
BUDGET = Budget(8, 1080, samples=6, images=(1000, 3000, 10_000))  # that of every method of the table


def plain(seed: int) -> Run:
    method, backbone = calgp.METHODS["cnn-cal"], LeNet()
    return Run(method=method, backbone=backbone, seed=seed, holdout=0.1, learning_rate=RATE, **COMMON)


def sngp() -> Run:
    """Spectral norms, an RBF kernel by random features, Laplace's Gaussian over W, mean-field probabilities."""
    method: Any = calgp.METHODS["cnn-laplace"]
    method = replace(method, kernel="rbf", frequencies="gaussian", covariance="gaussian", predictive="mean-field")
    return Run(method=method, backbone=LeNet(spectral=0.95), seed=0, holdout=0.0, **COMMON)


def trained(run: Run, folder: Path) -> calgp.Classifier:
    if not (folder / "model.safetensors").is_file():
        train_run(run, RunFolder(folder), open_device("cpu", "bf16-mixed"))
    return calgp.load(folder)


def seconds(folder: Path) -> int:
    return round(sum(record.seconds for record in RunFolder(folder).log() if record.kind == "train"))


def evaluated(name: str, classifier: calgp.Classifier, passes: int, train_seconds: int) -> None:
    inside = classifier.evaluate()
    outside = classifier.evaluate("notmnist")
    show(name, passes, train_seconds, inside.scores.to_dict(), outside.ood["entropy"].auroc.value)


def show(name: str, passes: int, train_seconds: int, scores: dict[str, float], auroc: float) -> None:
    numbers = {key: round(scores[key], 4) for key in ("err", "mnll", "ece", "brier")}
    print(
        json.dumps(
            {"name": name, "passes": passes, "train_seconds": train_seconds} | numbers | {"auroc": round(auroc, 4)}
        )
    )


class Logits(nn.Module):
    """The trained CNN as an ordinary module that ends with a linear layer, as laplace-torch wants it."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        *self.hidden, last = model.layers
        self.features, self.last = model.features, nn.Linear(*last.weight.shape)
        self.last.load_state_dict({"weight": last.weight.T, "bias": last.bias})

    def forward(self, x: Tensor) -> Tensor:
        h = self.features(self.features.stem(x), None)
        for layer in self.hidden:
            h = layer(h, None).relu()
        return self.last(h)


def laplace(folder: Path) -> None:
    """Kronecker factors of the last layer, the prior by the evidence, probabilities by the probit approximation."""
    sys.path.append(str(Path(sys.prefix) / "networks"))  # where the Makefile puts laplace-torch
    classifier = calgp.load(folder)
    train = TrainingData.of(classifier.card.run, None).train
    network = Logits(classifier.model).to(memory_format=torch.contiguous_format).eval()
    data = torch.utils.data.TensorDataset(to_unit_interval(train.x), train.y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = import_module("laplace").Laplace(
            network, "classification", subset_of_weights="last_layer", hessian_structure="kron"
        )
        start = time.perf_counter()
        theirs.fit(torch.utils.data.DataLoader(data, batch_size=500))
        theirs.optimize_prior_precision(method="marglik")
        spent = time.perf_counter() - start

        def log_probs(name: str) -> tuple[Tensor, Tensor]:
            images = load(name, "test")
            parts = [theirs(to_unit_interval(x), link_approx="probit") for x in images.x.split(500)]
            return torch.cat(parts).detach().log(), images.y

        inside, outside = log_probs("mnist"), log_probs("notmnist")[0]
    found = metrics.outcomes(*inside)
    auroc = metrics.ood(found.entropy, -(outside.exp() * outside).sum(1)).auroc
    show("laplace-torch", 1, round(seconds(folder) + spent), metrics.scores(found).to_dict(), auroc)


def main(command: str, work: Path, seed: int) -> None:
    torch.set_num_threads(1)
    folders = [work / f"cnn-seed{each}" for each in range(3)]
    if command == "train":
        trained(plain(seed), folders[seed])
    elif command == "ensemble":
        folder = RunFolder(work / "ensemble")
        if not folder.path.exists():
            ensemble([RunFolder(each) for each in folders], folder)
            calgp.load(folder.path).calibrate("temperature")
        evaluated("deep ensemble", calgp.load(folder.path), 3, sum(map(seconds, folders)))
    elif command == "laplace":
        laplace(folders[0])
    elif command == "sngp":
        log = tune(sngp(), BUDGET, Paths(work / "sngp-pilots", precision="bf16-mixed"))
        print(log.winner.options, file=sys.stderr)
        evaluated("SNGP", trained(replace(log.run, holdout=0.0), work / "sngp"), 1, seconds(work / "sngp"))
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int((sys.argv[3:] or ["0"])[0]))
