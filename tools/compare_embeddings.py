"""GPClassifier beside its peers on the same embeddings: scores, seconds of a core and peak memory, a process each.

python tools/compare_embeddings.py train.npz test.npz --rows 2000 --part 0 --outside CIFAR-100=c100.npz --outside …

--rows and --part cut disjoint parts from the training rows; all rows unless given. laplace-torch, gpytorch and vbll are
left out where they cannot be imported. Nothing is chosen by the test rows.
"""

import argparse
import importlib
import json
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, PredefinedSplit, StratifiedKFold
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn

from calgp import GPClassifier
from calgp.embeddings import load_embeddings
from calgp.metrics import ood, outcomes, scores

CS = (0.001, 0.003, 0.01, 0.03, 0.1)
MANY, HELD_OUT = 10_000, 5000  # beyond so many rows C is tuned on a hold-out
EXACT = 3000  # rows at most of the exact Dirichlet GP
INDUCING, BATCH = 500, 500

Predict = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]  # X ↦ probabilities, outlier score


@dataclass(frozen=True)
class Data:
    """Embeddings: to fit, to test, and from elsewhere."""

    x: np.ndarray
    y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray
    outside: Mapping[str, np.ndarray]

    @property
    def classes(self) -> int:
        return int(self.y.max()) + 1


def gp(data: Data) -> Predict:
    fitted = GPClassifier().fit(data.x, data.y)
    return lambda x: (fitted.predict_proba(x), fitted.outlier_score(x))


def logistic(data: Data) -> Predict:
    scaler, fitted = _tuned(data)
    return _confidence(lambda x: fitted.predict_proba(scaler.transform(x)))


def _tuned(data: Data) -> tuple[StandardScaler, LogisticRegression]:
    scaler = StandardScaler().fit(data.x)
    folds = StratifiedKFold(5, shuffle=True, random_state=0)
    if len(data.x) > MANY:
        last = np.full(len(data.x), -1)
        last[np.random.default_rng(0).permutation(len(last))[:HELD_OUT]] = 0
        folds = PredefinedSplit(last)
    search = GridSearchCV(LogisticRegression(max_iter=500), {"C": CS}, cv=folds, scoring="neg_log_loss")
    search.fit(scaler.transform(data.x), data.y)
    print(search.best_params_, file=sys.stderr)
    return scaler, search.best_estimator_


def laplace(data: Data) -> Predict:
    """laplace-torch on the tuned logistic regression as a layer: Kronecker, precision by the evidence, probit."""
    sys.path.append(str(Path(sys.prefix) / "networks"))
    library = importlib.import_module("laplace")
    scaler, fitted = _tuned(data)
    layer = nn.Linear(data.x.shape[1], data.classes)
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(fitted.coef_))
        layer.bias.copy_(torch.from_numpy(fitted.intercept_))
    pairs = torch.utils.data.TensorDataset(_standard(scaler, data.x), torch.from_numpy(data.y))
    found = library.Laplace(layer, "classification", subset_of_weights="all", hessian_structure="kron")
    found.fit(torch.utils.data.DataLoader(pairs, BATCH))
    found.optimize_prior_precision(method="marglik")
    return _confidence(lambda x: _parts(scaler, x, lambda part: found(part, link_approx="probit")))


def vbll(data: Data) -> Predict:
    """Variational Bayesian last layers, discriminative: its own loss, Adam, 100 epochs or 10,000 steps."""
    library = importlib.import_module("vbll")
    scaler = StandardScaler().fit(data.x)
    x, y = _standard(scaler, data.x), torch.from_numpy(data.y)
    layer = library.DiscClassification(x.shape[1], data.classes, 1 / len(x), parameterization="diagonal")
    _adam(layer, x, y, 1e-3, lambda part, labels: layer(part).train_loss_fn(labels), epochs=100)
    return _confidence(lambda x: _parts(scaler, x, lambda part: layer(part).predictive.probs))


def svgp(data: Data) -> Predict:
    """gpytorch: a sparse GP for each class, one RBF kernel, 500 inducing inputs, softmax; Adam, 60 epochs."""
    gpytorch = importlib.import_module("gpytorch")
    scaler = StandardScaler().fit(data.x)
    root = data.x.shape[1] ** 0.5
    x, y, shape = _standard(scaler, data.x) / root, torch.from_numpy(data.y), torch.Size([data.classes])

    class Process(gpytorch.models.ApproximateGP):
        def __init__(self, inducing: Tensor) -> None:
            variational = gpytorch.variational
            distribution = variational.CholeskyVariationalDistribution(len(inducing), batch_shape=shape)
            inner = variational.VariationalStrategy(self, inducing, distribution, learn_inducing_locations=False)
            super().__init__(variational.IndependentMultitaskVariationalStrategy(inner, num_tasks=data.classes))
            self.mean_module = gpytorch.means.ConstantMean(batch_shape=shape)
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
            self.covar_module.outputscale = 10.0

        def forward(self, x: Tensor) -> object:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    process = Process(x[:INDUCING].clone())
    likelihood = gpytorch.likelihoods.SoftmaxLikelihood(num_classes=data.classes, mixing_weights=False)
    bound = gpytorch.mlls.VariationalELBO(likelihood, process, num_data=len(x))
    _adam(process, x, y, 0.02, lambda part, labels: -bound(process(part), labels), epochs=60)

    def probabilities(part: Tensor) -> Tensor:
        return likelihood(process(part / root)).probs.mean(0)

    return _confidence(lambda x: _parts(scaler, x, probabilities))


def dirichlet(data: Data) -> Predict:
    """gpytorch's exact Dirichlet GP (Milios et al. 2018), a kernel for all classes; Adam, 40 steps."""
    if len(data.x) > EXACT:
        raise ImportError(f"an exact GP of {len(data.x):,} rows")
    gpytorch = importlib.import_module("gpytorch")
    scaler = StandardScaler().fit(data.x)
    root = data.x.shape[1] ** 0.5
    x, y, shape = _standard(scaler, data.x) / root, torch.from_numpy(data.y), torch.Size([data.classes])
    likelihood = gpytorch.likelihoods.DirichletClassificationLikelihood(y, learn_additional_noise=True)

    class Process(gpytorch.models.ExactGP):
        def __init__(self) -> None:
            super().__init__(x, likelihood.transformed_targets, likelihood)
            self.mean_module = gpytorch.means.ConstantMean(batch_shape=shape)
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x: Tensor) -> object:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    process = Process()
    bound = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, process)
    optimiser = torch.optim.Adam(process.parameters(), lr=0.1)
    for _ in range(40):
        optimiser.zero_grad()
        (-bound(process(x), likelihood.transformed_targets).sum()).backward()
        optimiser.step()
    process.eval()
    likelihood.eval()

    def probabilities(part: Tensor) -> Tensor:
        f = process(part / root)
        draws = f.mean + f.variance.sqrt() * _normal(256, *f.mean.shape)
        return draws.softmax(1).mean(0).mT

    return _confidence(lambda x: _parts(scaler, x, probabilities))


METHODS: dict[str, Callable[[Data], Predict]] = {
    "GPClassifier()": gp, "logistic regression, tuned C": logistic, "laplace-torch, last layer": laplace,
    "vbll, discriminative": vbll, "gpytorch, SVGP": svgp, "gpytorch, Dirichlet": dirichlet,
}  # fmt: skip


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _standard(scaler: StandardScaler, x: np.ndarray) -> Tensor:
    return torch.from_numpy(scaler.transform(x)).float()


def _parts(scaler: StandardScaler, x: np.ndarray, probabilities: Callable[[Tensor], Tensor]) -> np.ndarray:
    with torch.no_grad():
        return torch.cat([probabilities(part) for part in _standard(scaler, x).split(BATCH)]).numpy()


def _confidence(probabilities: Callable[[np.ndarray], np.ndarray]) -> Predict:
    def predict(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        probs = probabilities(x)
        return probs, 1 - probs.max(1)

    return predict


def _adam(
    module: nn.Module, x: Tensor, y: Tensor, rate: float, loss: Callable[[Tensor, Tensor], Tensor], *, epochs: int
) -> None:
    """Adam with a rate that falls to 0; at most 10,000 steps."""
    generator, steps = torch.Generator().manual_seed(0), min(epochs * -(-len(x) // BATCH), 10_000)
    optimiser = torch.optim.Adam(module.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    module.train()
    for _ in range(steps):
        rows = torch.randint(len(x), (BATCH,), generator=generator)
        optimiser.zero_grad()
        loss(x[rows], y[rows]).backward()
        optimiser.step()
        schedule.step()
    module.eval()


def measure(method: str, data: Data) -> dict[str, float]:
    """Fit and predict; seconds are those of the processor."""
    begun = time.process_time()
    predict = METHODS[method](data)
    probs, inside = predict(data.test_x)
    seconds = time.process_time() - begun
    log_probs = torch.from_numpy(probs).double().clamp_min(1e-12).log().log_softmax(1)
    row = scores(outcomes(log_probs, torch.from_numpy(data.test_y)))
    found = {"ERR": row.err, "MNLL": row.mnll, "ECE": row.ece}
    for name, x in data.outside.items():
        found[f"AUROC {name}"] = ood(torch.from_numpy(inside), torch.from_numpy(predict(x)[1])).auroc
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return found | {"seconds": round(seconds), "peak MB": round(peak)}


def read(given: argparse.Namespace) -> Data:
    train, test = load_embeddings(given.train), load_embeddings(given.test)
    rows = slice(given.part * given.rows, (given.part + 1) * given.rows) if given.rows else slice(None)
    outside = {name: load_embeddings(path).X for name, _, path in (each.partition("=") for each in given.outside)}
    return Data(train.X[rows], train.y[rows], test.X, test.y, outside)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train", type=Path)
    parser.add_argument("test", type=Path)
    parser.add_argument("--rows", type=int, default=0)
    parser.add_argument("--part", type=int, default=0)
    parser.add_argument("--outside", action="append", default=[], metavar="NAME=FILE")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS])
    parser.add_argument("--only", choices=METHODS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    if given.only:
        return print(json.dumps(measure(given.only, read(given))))
    for place, method in enumerate(given.methods):
        command = [sys.executable, __file__, *sys.argv[1:], "--only", method]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 (this file)
        if done.returncode:
            print(f"| {method} | left out: {done.stderr.strip().splitlines()[-1][:100]} |")
            continue
        found = json.loads(done.stdout)
        if place == 0:
            print("| | " + " | ".join(found) + " |\n| " + "--- | " * (len(found) + 1))
        numbers = [f"{value:.4f}" if isinstance(value, float) else f"{value:,}" for value in found.values()]
        print(f"| {method} | " + " | ".join(numbers) + " |", flush=True)


if __name__ == "__main__":
    main()
