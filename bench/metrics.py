"""How fast are ECE, BRIER and the reliability diagram of ten million predictions? Against torchmetrics and netcal."""

import resource

import numpy as np
import torch

from bench.measure import Row, compare
from calgp import metrics

QUESTION = "ECE, BRIER and reliability"
BINS, BATCH = 20, 100_000


def run(quick: bool) -> list[Row]:
    n = 1_000_000 if quick else 10_000_000
    generator = torch.Generator().manual_seed(0)
    log_probs = torch.cat([3 * torch.randn(BATCH, 10, generator=generator) for _ in range(n // BATCH)]).log_softmax(-1)
    y = torch.randint(10, (n,), generator=generator)

    def ours():
        outcomes = metrics.Outcomes.cat(
            metrics.outcomes(part, labels) for part, labels in zip(log_probs.split(BATCH), y.split(BATCH), strict=True)
        )
        table = metrics.reliability(outcomes, bins=BINS)
        return table.ece(), metrics.brier(outcomes), table

    def torchmetrics_and_numpy():
        from torchmetrics.functional.classification import multiclass_calibration_error

        probs = log_probs.exp()
        ece = multiclass_calibration_error(probs, y, 10, n_bins=BINS)
        p, labels = probs.numpy(), y.numpy()
        brier = ((p - np.eye(10, dtype=np.float32)[labels]) ** 2).sum(1).mean()
        confidence, correct = p.max(1), p.argmax(1) == labels
        place = np.digitize(confidence, np.linspace(0, 1, BINS + 1)[1:-1], right=True)
        count = np.bincount(place, minlength=BINS)
        accuracy = np.bincount(place, correct, BINS) / np.maximum(count, 1)
        return ece, brier, (count, accuracy, np.bincount(place, confidence, BINS) / np.maximum(count, 1))

    def netcal():
        from netcal.metrics import ECE

        return ECE(BINS).measure(log_probs.exp().numpy(), y.numpy())

    a, b = ours(), torchmetrics_and_numpy()
    # torchmetrics adds ten million float32 in float32; NumPy's edges are doubles, which a few confidences fall between
    moved = np.abs(a[2].count.numpy() - b[2][0]).sum() / n
    if not (abs(a[0] - b[0]) < 1e-3 and abs(a[1] - b[1]) < 1e-4 and moved < 1e-5):
        raise AssertionError(f"the contenders do not agree: {a[:2]}, {b[:2]}, {moved}")
    return compare(
        QUESTION,
        f"{n / 1e6:.0f} million × 10",
        ("calgp.metrics", ours),
        {"torchmetrics and NumPy": torchmetrics_and_numpy, "netcal, ECE alone": netcal},
        reach={"torchmetrics and NumPy": 3.0},
        rounds=3,
        note=f"peak of the whole process {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GB",
    )
