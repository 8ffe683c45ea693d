"""`GPClassifier()` beside a grid over ℓ and σ², everything else as it chooses: is its own choice as good as the best?

    python tools/embedding_grid.py train test [--seeds 0,1,2] [--lengthscales 0.7,1,1.4] [--variances 3,10,30]

Scores on the test rows; the grid is judged by them, so its best is better than anybody could choose. Spread and
temperature come from the hold-out in all rows.
"""

import argparse
import time
from pathlib import Path

import torch

from calgp import GPClassifier
from calgp.embeddings import classifier as module
from calgp.embeddings import hyperparameters, load_embeddings
from calgp.embeddings.cache import Embeddings
from calgp.embeddings.hyperparameters import Choice
from calgp.gp.laplace_softmax import VectorKernel
from calgp.metrics import outcomes, scores


def row(title: str, fitted: GPClassifier, test: Embeddings, seconds: float) -> None:
    """One line of the table."""
    log_probs = torch.from_numpy(fitted.predict_proba(test.X)).double().clamp_min(1e-12).log().log_softmax(1)
    found, choice = scores(outcomes(log_probs, torch.from_numpy(test.y))), fitted.choice_
    print(
        f"| {title} | {choice.kernel.lengthscale:g} | {choice.variance:g} | {choice.spread:.3g} | "
        f"{choice.temperature:.3f} | {found.err:.4f} | {found.mnll:.4f} | {found.ece:.4f} | {seconds:.0f} |",
        flush=True,
    )


def fit(train: Embeddings, seed: int = 0) -> tuple[GPClassifier, float]:
    begun = time.process_time()
    return GPClassifier(random_state=seed).fit(train.X, train.y), time.process_time() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train", type=Path)
    parser.add_argument("test", type=Path)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--lengthscales", default="0.7,1,1.4")
    parser.add_argument("--variances", default="3,10,30")
    given = parser.parse_args()
    train, test = load_embeddings(given.train), load_embeddings(given.test)
    print("| | ℓ | σ² | spread | T | ERR | MNLL | ECE | seconds of a core |\n" + "| --- " * 9 + "|")
    for seed in map(int, given.seeds.split(",")):
        fitted, seconds = fit(train, seed)
        row(f"GPClassifier(random_state={seed})", fitted, test, seconds)
    chosen = fitted.choice_
    for lengthscale in map(float, given.lengthscales.split(",")):
        for variance in map(float, given.variances.split(",")):
            kernel = VectorKernel(radial=1.0, lengthscale=lengthscale)
            fixed = Choice(chosen.transform, kernel, variance)
            module.search = lambda *_, fixed=fixed: (fixed, ())
            module.search_further = lambda *_, fixed=fixed: fixed
            hyperparameters.VARIANCES = (variance,)
            fitted, seconds = fit(train)
            row("grid", fitted, test, seconds)


if __name__ == "__main__":
    main()
