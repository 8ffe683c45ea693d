"""The table of docs/guides/embeddings.md: GPClassifier beside logistic regression with C tuned by cross-validation.

python tools/embed_lite0.py FOLDER …     # first: cifar10 train 10000, cifar10 test 2000, cifar100 test 1000, …
python tools/embeddings_table.py FOLDER 2000 0     # training rows, and which of the disjoint parts of them (seed)

Nothing is chosen by the test images.
"""

import sys
import time
from pathlib import Path

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, StratifiedKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from calgp import GPClassifier
from calgp.metrics import Outcomes, ood, outcomes, paired_scores, scores
from calgp.posthoc.outliers import OUTLIER_SCORES

TRAIN, TEST = "cifar10-train-10000", "cifar10-test-2000"
OUTSIDE = {"CIFAR-100": "cifar100-test-1000", "notMNIST": "notmnist-test-1000", "noise": "noise-test-500"}
CS = (0.001, 0.003, 0.01, 0.03, 0.1)


def main() -> None:
    folder, n, part = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    X, y = (each[part * n : (part + 1) * n] for each in read(folder / TRAIN))
    test, labels = read(folder / TEST)
    outside = {name: read(folder / file)[0] for name, file in OUTSIDE.items()}

    begun = time.process_time()
    process = GPClassifier().fit(X, y)
    ours = judged("GPClassifier", process.predict_proba(test), labels, time.process_time() - begun)
    print(process.choice_)
    for score in OUTLIER_SCORES:
        show(
            score, process.outlier_score(test, score), {k: process.outlier_score(x, score) for k, x in outside.items()}
        )

    begun = time.process_time()
    folds = StratifiedKFold(5, shuffle=True, random_state=0)
    pipeline = make_pipeline(StandardScaler(), LogisticRegression(max_iter=500))
    linear = GridSearchCV(pipeline, {"logisticregression__C": CS}, cv=folds, scoring="neg_log_loss").fit(X, y)
    theirs = judged(f"logistic, {linear.best_params_}", linear.predict_proba(test), labels, time.process_time() - begun)
    inside = 1 - linear.predict_proba(test).max(1)
    show("confidence", inside, {k: 1 - linear.predict_proba(x).max(1) for k, x in outside.items()})
    for name, difference in paired_scores(ours, theirs, seed=0).items():
        print(f"{name}: {difference.value:+.4f} ± {difference.half:.4f}")


def read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    with np.load(path.with_suffix(".npz")) as file:
        return file["X"], file["y"]


def judged(name: str, probs: np.ndarray, y: np.ndarray, seconds: float) -> Outcomes:
    found = outcomes(torch.from_numpy(probs).double().log().log_softmax(1), torch.from_numpy(y))
    row = scores(found)
    print(f"{name}: ERR {row.err:.4f} MNLL {row.mnll:.4f} ECE {row.ece:.4f}, {seconds:.0f} s of a core")
    return found


def show(score: str, inside: np.ndarray, outside: dict[str, np.ndarray]) -> None:
    found = {k: ood(torch.from_numpy(inside), torch.from_numpy(x)).auroc for k, x in outside.items()}
    print(f"  AUROC by {score}: " + ", ".join(f"{name} {auroc:.3f}" for name, auroc in found.items()))


if __name__ == "__main__":
    main()
