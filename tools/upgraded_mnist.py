"""What `calgp.upgrade` does to a plain PyTorch network: `python tools/upgraded_mnist.py [SEED …]` (CALGP_DATA).

10,000 images of MNIST train a plain CNN with Adam and cross-entropy; 1,000 others are the hold-out; all 10,000 test
images and the letters of notMNIST measure.
"""

import sys
import time

import torch
from torch import nn
from torch.nn import functional as F

import calgp
from calgp.data import load
from calgp.data.images import to_unit_interval
from calgp.upgraded import UpgradedClassifier


def plain_network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(1024, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def trained(x: torch.Tensor, y: torch.Tensor, seed: int, *, epochs: int = 10) -> nn.Module:
    torch.manual_seed(seed)
    network = plain_network()
    optimiser = torch.optim.Adam(network.parameters(), lr=1e-3)
    for _ in range(epochs):
        for rows in torch.randperm(len(y)).split(100):
            optimiser.zero_grad()
            F.cross_entropy(network(x[rows]), y[rows]).backward()
            optimiser.step()
    return network


def main(seeds: list[int]) -> None:
    images, test, letters = load("mnist", "train"), load("mnist", "test"), load("notmnist", "test")
    for seed in seeds:
        rest, held_out = images.balanced(11_000, seed).split(1 / 11, seed)
        x, y = to_unit_interval(rest.x), rest.y
        network = trained(x, y, seed)
        for given, train in (("train and hold-out", (x, y)), ("hold-out alone", None)):
            for outliers in ("combined", "density", "neighbours"):
                clock = time.perf_counter()
                upgraded = calgp.upgrade(network, held_out, train=train, outliers=outliers, error=0.01)
                seconds = time.perf_counter() - clock
                found = upgraded.evaluate(test, outside=letters)
                same = _same_labels(network, upgraded, to_unit_interval(test.x))
                print(f"seed {seed}, {given}, {seconds:.1f} s, labels unchanged: {same}")
                fitted = upgraded.fitted
                print(f"  τ {fitted.numbers['precision']:.3g}, {fitted.scaling}, temperature {fitted.temperature:.3f}")
                for name, each in (
                    ("before", found.before), ("temperature", found.temperature_alone), ("upgraded", found.scores),
                ):  # fmt: skip
                    print(
                        f"  {name:12} ERR {each.err:.4f} MNLL {each.mnll:.4f} ECE {each.ece:.4f} BRIER {each.brier:.4f}"
                    )
                print("  AUROC letters: " + ", ".join(f"{name} {each.auroc:.4f}" for name, each in found.ood.items()))
                made = found.decisions
                if made is not None and made.sets is not None and made.selection is not None:
                    print(f"  sets cover {made.sets.covered:.4f}, mean size {made.sets.mean_size:.3f}; answered "
                          f"{made.selection.share:.4f}, of which wrong {made.selection.error:.4f}")  # fmt: skip


def _same_labels(network: nn.Module, upgraded: UpgradedClassifier, x: torch.Tensor) -> bool:
    with torch.no_grad():
        before = torch.cat([network(part).argmax(1) for part in x.split(500)])
    return bool((upgraded.predict(x).predictive.labels == before).all())


if __name__ == "__main__":
    main([int(seed) for seed in sys.argv[1:]] or [0])
