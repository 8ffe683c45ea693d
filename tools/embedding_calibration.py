"""Is the temperature of `GPClassifier()` right? Judged on training rows that it has not seen; test rows are not read.

    python tools/embedding_calibration.py train ROWS [--others 10000] [--seed 0]

Fits on ROWS of the training rows, and scores others: with the spread and temperature that were chosen, with the
temperature that would have been best there, and without the step from the left-out rows' process to that of all rows.
"floor" is the ECE of a perfectly calibrated prediction with these probabilities (labels drawn from them).
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compare_embeddings import floor
from torch import Tensor

from calgp import GPClassifier
from calgp.embeddings import classifier as module
from calgp.embeddings import load_embeddings
from calgp.embeddings.inputs import parts
from calgp.embeddings.prediction import average
from calgp.gp.laplace_softmax import VectorGP
from calgp.metrics import outcomes, scores
from calgp.posthoc.calibration import Temperature


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train", type=Path)
    parser.add_argument("rows", type=int)
    parser.add_argument("--others", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    x, y, _ = load_embeddings(given.train)
    order = np.random.default_rng(100 + given.seed).permutation(len(x))
    rows, others = order[: given.rows], order[given.rows : given.rows + given.others]
    near: list[VectorGP] = []
    hold_out = module.hold_out

    def remembered(*arguments: Any) -> Any:
        found = hold_out(*arguments)
        near.append(found[-1])
        return found

    module.hold_out = remembered
    fitted = GPClassifier(random_state=given.seed).fit(x[rows], y[rows])
    print(fitted.choice_)
    labels = torch.from_numpy(y[others])
    for name, process in [("all rows", fitted.process_), *(("without the left-out", each) for each in near)]:
        log_probs = predicted(fitted, replace(process, spread=fitted.choice_.spread), x[others])
        best = Temperature.fit(log_probs, labels).temperature
        for title, temperature in (("chosen", fitted.choice_.temperature), ("best", best)):
            show(f"{name}, {title} T = {temperature:.3f}", (log_probs / temperature).log_softmax(1), labels)


def predicted(fitted: GPClassifier, process: VectorGP, x: np.ndarray) -> Tensor:
    """log p without a temperature."""
    with torch.no_grad():
        u = fitted.inputs_(torch.from_numpy(x))
        return torch.cat([average(process.latent(part)).log_probs for part in parts(u, 2000)])


def show(title: str, log_probs: Tensor, y: Tensor) -> None:
    row = scores(outcomes(log_probs, y))
    numbers = {"ERR": row.err, "MNLL": row.mnll, "ECE": row.ece, **floor(log_probs)}
    numbers["confidence − accuracy"] = row.confidence - 1 + row.err
    print(f"| {title} | " + " | ".join(f"{name} {value:.4f}" for name, value in numbers.items()) + " |", flush=True)


if __name__ == "__main__":
    main()
