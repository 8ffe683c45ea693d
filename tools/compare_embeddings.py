"""GPClassifier beside its peers on the same embeddings: scores, seconds of a core and peak memory, a process each.

python tools/compare_embeddings.py train.npz test.npz --rows 2000 --part 0 --outside CIFAR-100=c100.npz --outside …

--rows and --part cut disjoint parts from the training rows; all rows unless given. --seed is that of GPClassifier, of
folds and hold-outs. laplace-torch, gpytorch and vbll are left out where they cannot be imported, and what needs more
than --minutes is stopped. Nothing is chosen by the test rows. "floor" is the ECE that the same probabilities have on as
many test rows if they are perfectly calibrated: the mean over labels drawn from them.
"""

import argparse
import importlib
import itertools
import json
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.special import entr
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold, cross_val_score
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn

from calgp import GPClassifier
from calgp.embeddings import load_embeddings
from calgp.metrics import ece, ood, outcomes, scores

CS = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
PRECISIONS = (1, 3, 10, 30, 100, 300, 1000, 3000, 10_000)  # of the weights, for laplace-torch
MANY, HELD_OUT = 10_000, 5000  # beyond so many rows C is tuned on a hold-out
SOME = 1000  # held-out rows at most on which the peers compare their settings
DRAWS = 200  # of labels, for the floor
EXACT = 3000  # rows at most of the exact Dirichlet GP
INDUCING, BATCH = 500, 500

Predict = Callable[[np.ndarray], tuple[np.ndarray, dict[str, np.ndarray]]]  # X ↦ probabilities, outlier scores


@dataclass(frozen=True)
class Data:
    """Embeddings: to fit, to test, and from elsewhere."""

    x: np.ndarray
    y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray
    outside: Mapping[str, np.ndarray]
    seed: int = 0

    @property
    def classes(self) -> int:
        return int(self.y.max()) + 1

    def held_out(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows to fit on, and a fifth of them, or 5,000, to compare on."""
        order = np.random.default_rng(self.seed).permutation(len(self.x))
        out = min(len(order) // 5, HELD_OUT)
        return order[out:], order[:out]


def gp(data: Data) -> Predict:
    fitted = GPClassifier(random_state=data.seed).fit(data.x, data.y)
    print(fitted.choice_, file=sys.stderr)

    def predict(x: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        found = fitted.scored(x)
        scored = torch.empty(0) if found.outlier_scores is None else found.outlier_scores
        columns = dict(zip(fitted.outlier_names, scored.numpy().T, strict=True))
        return found.probs.numpy(), _read(found.probs.numpy()) | columns

    return predict


def logistic(data: Data) -> Predict:
    scaler = StandardScaler().fit(data.x)
    fitted = _tuned(replace(data, x=scaler.transform(data.x)))
    return _confidence(lambda x: fitted.predict_proba(scaler.transform(x)))


def _tuned(data: Data) -> LogisticRegression:
    """C grows as long as the likelihood of left-out rows does: of five folds, of a hold-out of many rows."""
    folds: object = StratifiedKFold(5, shuffle=True, random_state=data.seed)
    if len(data.x) > MANY:
        folds = [data.held_out()]
    best = (-np.inf, CS[0])
    for c in CS:
        model = LogisticRegression(C=c, max_iter=500)
        found = cross_val_score(model, data.x, data.y, cv=folds, scoring="neg_log_loss").mean()
        if found < best[0]:
            break
        best = (found, c)
    print("C", best[1], file=sys.stderr)
    return LogisticRegression(C=best[1], max_iter=500).fit(data.x, data.y)


def laplace(data: Data) -> Predict:
    """laplace-torch on the tuned logistic regression as a layer: Kronecker, probit, the precision by a hold-out."""
    sys.path.append(str(Path(sys.prefix) / "networks"))
    operators = torch.library.Library("torchvision", "DEF")  # which torchvision may lack, and laplace needs
    operators.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    operators.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library = importlib.import_module("laplace")
    scaler = StandardScaler().fit(data.x)
    x, y, batch = _standard(scaler, data.x), torch.from_numpy(data.y), max(10, 20 * BATCH // data.classes**2)

    def fit(rows: np.ndarray) -> Any:
        linear = _tuned(replace(data, x=x[rows].numpy(), y=data.y[rows]))
        layer = nn.Linear(x.shape[1], data.classes)
        with torch.no_grad():
            layer.weight.copy_(torch.from_numpy(linear.coef_))
            layer.bias.copy_(torch.from_numpy(linear.intercept_))
        found = library.Laplace(layer, "classification", subset_of_weights="all", hessian_structure="kron")
        pairs = torch.utils.data.TensorDataset(x[rows], y[rows])
        found.fit(torch.utils.data.DataLoader(pairs, batch))
        return found

    def predict(found: Any, part: Tensor) -> Tensor:
        return torch.cat([found(each, link_approx="probit") for each in part.split(batch)])

    kept, out = data.held_out()
    out = out[:SOME]
    found, losses = fit(kept), {}
    for precision in PRECISIONS:
        found.prior_precision = float(precision)
        losses[precision] = _mnll(predict(found, x[out]), y[out])
    best = min(losses, key=lambda precision: losses[precision])
    print("precision", best, losses, file=sys.stderr)
    found = fit(np.arange(len(x)))
    found.prior_precision = float(best)
    return _confidence(lambda each: _parts(scaler, each, lambda part: predict(found, part)))


def vbll(data: Data) -> Predict:
    """Variational Bayesian last layers, discriminative: its own loss, Adam; prior scale and steps by a hold-out."""
    library = importlib.import_module("vbll")
    scaler = StandardScaler().fit(data.x)
    x, y = _standard(scaler, data.x), torch.from_numpy(data.y)

    def fit(rows: np.ndarray, prior: float, steps: int) -> Any:
        torch.manual_seed(data.seed)
        layer = library.DiscClassification(x.shape[1], data.classes, 1 / len(rows), "diagonal", prior_scale=prior)
        _adam(layer, x[rows], y[rows], 1e-3, lambda part, labels: layer(part).train_loss_fn(labels), steps=steps)
        return layer

    def predict(layer: Any, part: Tensor) -> Tensor:
        return layer.predictive(part, n_samples=100)

    kept, out = data.held_out()
    losses = {}
    for choice in itertools.product((0.1, 1.0, 10.0), (400, 1200)):
        layer = fit(kept, *choice)
        with torch.no_grad():
            probs = predict(layer, x[out[:SOME]])
        losses[choice] = _mnll(probs, y[out[:SOME]])
    best = min(losses, key=lambda choice: losses[choice])
    print("prior scale, steps", best, losses, file=sys.stderr)
    layer = fit(np.arange(len(x)), *best)
    return _confidence(lambda each: _parts(scaler, each, lambda part: predict(layer, part)))


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
    _adam(process, x, y, 0.02, lambda part, labels: -bound(process(part), labels), steps=60 * -(-len(x) // BATCH))

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


def _read(probs: np.ndarray) -> dict[str, np.ndarray]:
    return {"confidence": 1 - probs.max(1), "entropy": entr(probs).sum(1)}


def _confidence(probabilities: Callable[[np.ndarray], np.ndarray]) -> Predict:
    def predict(x: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        probs = probabilities(x)
        return probs, _read(probs)

    return predict


def _adam(
    module: nn.Module, x: Tensor, y: Tensor, rate: float, loss: Callable[[Tensor, Tensor], Tensor], *, steps: int
) -> None:
    """Adam with a rate that falls to 0."""
    generator = torch.Generator().manual_seed(0)
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


def _mnll(probs: Tensor, y: Tensor) -> float:
    return -probs.gather(1, y[:, None]).clamp_min(1e-12).log().double().mean().item()


def floor(log_probs: Tensor) -> dict[str, float]:
    """The ECE of these probabilities where labels are drawn from them: its mean, and what 5 % exceed."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.multinomial(log_probs.exp(), DRAWS, replacement=True, generator=generator)
    found = [ece(outcomes(log_probs, each)).item() for each in drawn.mT.contiguous()]
    return {"floor": float(np.mean(found)), "floor, 95 %": float(np.quantile(found, 0.95))}


def measure(method: str, data: Data) -> dict[str, float]:
    """Fit and predict; seconds are those of the processor."""
    begun = time.process_time()
    predict = METHODS[method](data)
    probs, inside = predict(data.test_x)
    seconds = time.process_time() - begun
    log_probs = torch.from_numpy(probs).double().clamp_min(1e-12).log().log_softmax(1)
    row = scores(outcomes(log_probs, torch.from_numpy(data.test_y)))
    found = {"ERR": row.err, "MNLL": row.mnll, "ECE": row.ece, **floor(log_probs)}
    found["confidence − accuracy"] = row.confidence - 1 + row.err
    for name, x in data.outside.items():
        for score, outside in predict(x)[1].items():
            found[f"AUROC {name}, {score}"] = ood(torch.from_numpy(inside[score]), torch.from_numpy(outside)).auroc
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return found | {"seconds": round(seconds), "peak MB": round(peak)}


def read(given: argparse.Namespace) -> Data:
    train, test = load_embeddings(given.train), load_embeddings(given.test)
    rows = slice(given.part * given.rows, (given.part + 1) * given.rows) if given.rows else slice(None)
    outside = {name: load_embeddings(path).X for name, _, path in (each.partition("=") for each in given.outside)}
    if train.y is None or test.y is None:
        sys.exit("Both need labels.")
    return Data(train.X[rows], train.y[rows], test.X, test.y, outside, given.seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train", type=Path)
    parser.add_argument("test", type=Path)
    parser.add_argument("--rows", type=int, default=0)
    parser.add_argument("--part", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=10, help="of the clock, for each method")
    parser.add_argument("--outside", action="append", default=[], metavar="NAME=FILE")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS])
    parser.add_argument("--only", choices=METHODS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    if given.only:
        return print(json.dumps(measure(given.only, read(given))))
    for method in given.methods:
        command = [sys.executable, __file__, *sys.argv[1:], "--only", method]
        named = {
            "method": method,
            "train": given.train.name,
            "rows": given.rows,
            "part": given.part,
            "seed": given.seed,
        }
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60 * given.minutes)  # noqa: S603 (this file)
        except subprocess.TimeoutExpired:
            print(json.dumps(named | {"left out": f"not ended after {given.minutes:g} minutes"}), flush=True)
        except subprocess.CalledProcessError as error:
            print(json.dumps(named | {"left out": error.stderr.strip().splitlines()[-1][:100]}), flush=True)
        else:
            chosen = {"chosen": done.stderr.strip().splitlines()}
            print(json.dumps(named | json.loads(done.stdout) | chosen, ensure_ascii=False), flush=True)


if __name__ == "__main__":
    main()
