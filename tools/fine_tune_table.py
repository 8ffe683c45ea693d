"""The numbers on fine-tuning in results/notes/own-network.md: EfficientNet-Lite0 on a part of CIFAR-10.

network.py is the one of docs/guides/pretrained-network.md; $CALGP_DATA has CIFAR-10.

python tools/fine_tune_table.py tuned OUT METHOD [OPTIONS]     # calgp.train; OPTIONS of the backbone, JSON
python tools/fine_tune_table.py frozen                         # GPClassifier and logistic regression on its features
"""

import json
import sys
import time

import numpy as np
import torch
from sklearn.linear_model import LogisticRegressionCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor

import calgp
from calgp import metrics
from calgp.data import Images, load
from calgp.metrics import Scores
from calgp.nets.pretrained import find_network
from calgp.runs import TrainingData, from_json
from calgp.runs.evaluation import evaluate_images

NETWORK, SIZE, TRAIN, TEST, EPOCHS = "network.py:lite0", 96, 2000, 2000, 3
CS = 10 ** np.linspace(-5, 1, 13)


def test_images() -> Images:
    return load("cifar10", "test", size=SIZE).take(torch.arange(TEST))


def show(name: str, scores: Scores, seconds: float) -> None:
    print(f"{name}: ERR {scores.err:.4f} MNLL {scores.mnll:.4f} ECE {scores.ece:.4f}, {seconds:.0f} s of a core")


def tuned(out: str, method: str, options: str = "{}") -> None:
    """A run, evaluated as it is and without its temperature, if it has one."""
    begun = time.process_time()
    run = calgp.train(
        "cifar10", network=NETWORK, out=out, method=method, train_size=TRAIN, size=SIZE, epochs=EPOCHS, holdout=0.1,
        backbone={"name": "auto", **json.loads(options)},
    )  # fmt: skip
    seconds, test = time.process_time() - begun, test_images()
    show(f"{method}, calibrated {run.calibration is not None}", scores_of(run, test), seconds)
    if run.calibration is not None:
        show(f"{method}, as trained", scores_of(run.calibrated_by(None), test), seconds)


def scores_of(run: calgp.Classifier, test: Images) -> Scores:
    found = evaluate_images(run, "cifar10", images=test)[0].scores
    assert found is not None  # noqa: S101
    return found


def frozen() -> None:
    """Two heads on the same images, hold-out included."""
    begun, network = time.process_time(), find_network(NETWORK, size=SIZE)
    run = from_json({"source": "cifar10", "size": SIZE, "train_size": TRAIN, "holdout": 0.0})
    train, test = TrainingData.of(run, None).train, test_images()

    def features(x: Tensor) -> np.ndarray:
        return torch.cat([network.features(part) for part in x.split(50)]).numpy()

    c, other = features(train.x), features(test.x)
    print(f"features: {time.process_time() - begun:.0f} s of a core")
    search = LogisticRegressionCV(
        Cs=CS, cv=5, scoring="neg_log_loss", max_iter=2000, use_legacy_attributes=False, l1_ratios=(0.0,)
    )
    for name, model in (
        ("GPClassifier", calgp.GPClassifier()),
        ("logistic", make_pipeline(StandardScaler(), search)),
    ):
        begun = time.process_time()
        log_probs = torch.from_numpy(model.fit(c, train.y.numpy()).predict_proba(other)).double().log()
        show(name, metrics.scores(metrics.outcomes(log_probs, test.y)), time.process_time() - begun)


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"tuned": tuned, "frozen": frozen}[sys.argv[1]](*sys.argv[2:])
