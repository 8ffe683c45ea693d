"""What `calgp.upgrade` does to a linear classifier of EfficientNet-Lite0's features, 1,280 of them, by seed.

python tools/embed_lite0.py FOLDER …   # cifar10 train 10000, cifar10 test 10000, and outsiders
python tools/upgraded_embeddings.py FOLDER [SEED …]

9,000 images train the layer with Adam and cross-entropy, 1,000 are the hold-out.
"""

import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import calgp

OUTSIDE = ("cifar100-test-1000", "notmnist-test-1000", "noise-test-500")


def read(folder: Path, name: str) -> tuple[Tensor, Tensor]:
    with np.load(folder / f"{name}.npz") as file:
        return torch.from_numpy(file["X"]), torch.from_numpy(file["y"])


def trained(x: Tensor, y: Tensor, seed: int, *, epochs: int = 20) -> nn.Module:
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(x.shape[1], 10))
    optimiser = torch.optim.Adam(network.parameters(), lr=1e-3)
    for _ in range(epochs):
        for rows in torch.randperm(len(y)).split(100):
            optimiser.zero_grad()
            F.cross_entropy(network(x[rows]), y[rows]).backward()
            optimiser.step()
    return network


def main(folder: Path, seeds: list[int]) -> None:
    (x, y), test = (read(folder, f"cifar10-{split}-10000") for split in ("train", "test"))
    for seed in seeds:
        rows = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
        train, held_out = ((x[part], y[part]) for part in (rows[:9000], rows[9000:]))
        network = trained(*train, seed)
        for outliers in ("combined", "density", "neighbours"):
            clock = time.perf_counter()
            upgraded = calgp.upgrade(network, held_out, train=train, outliers=outliers)
            print(f"seed {seed}, {outliers}, {time.perf_counter() - clock:.1f} s, {upgraded.fitted.structure}")
            found = upgraded.evaluate(test)
            tau = upgraded.fitted.numbers["precision"]
            print(f"  τ {tau:.3g}, {upgraded.fitted.scaling}, temperature {upgraded.fitted.temperature:.3f}")
            for name in ("before", "temperature_alone", "scores"):
                each = getattr(found, name)
                print(f"  {name:18} ERR {each.err:.4f} MNLL {each.mnll:.4f} ECE {each.ece:.4f} BRIER {each.brier:.4f}")
            for name in OUTSIDE:
                ood = upgraded.evaluate(test, outside=read(folder, name)).ood
                print(f"  AUROC {name}: " + ", ".join(f"{score} {each.auroc:.4f}" for score, each in ood.items()))


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(seed) for seed in sys.argv[2:]] or [0])
