"""A Gaussian process classifier for embeddings: any matrix of numbers in; labels, probabilities and uncertainty out."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from calgp.errors import CalgpError
from calgp.gp import Latent, Noise, Predictive, Softmax
from calgp.gp.laplace_softmax import Basis, Mode, VectorGP, VectorKernel, find_mode, weight_root, weight_variance
from calgp.options import option
from calgp.posthoc.calibration import Temperature
from calgp.posthoc.outliers import Combined, Density, Neighbours, OutlierScore, find, from_state, left_out_density

if TYPE_CHECKING:
    from calgp.runs.embedding_cache import Embeddings

if TYPE_CHECKING:
    from calgp.runs.embedding_cache import MadeBy

FORMAT = "calgp-gp-classifier-1"
SEARCHED, SEARCHED_CLASSES = 1000, 100  # training rows on which kernels are compared, and classes of them at most
MIDDLE = 6000  # training rows on which σ² is chosen, if there are more
HELD_OUT = 5000  # rows at most that are left out of so many
FEWEST = 20  # training rows that can tell one kernel from another
FOLDS, SEARCH_FOLDS = 5, 3
KEPT_NEIGHBOURS = 5000
ROWS = 2**22  # numbers that are handled at a time
DRAWS, FEWER_DRAWS = 256, 64  # of f; fewer for more than a hundred classes
VARIANCES = tuple(10 ** (power / 2) for power in range(-1, 8))  # σ²: 0.3 … 3,000
LENGTHSCALES = tuple(2 ** (power / 2) for power in range(-6, 5))  # ℓ: 0.12 … 4, of inputs of length one
SPREADS = tuple(10 ** (-power / 2) for power in range(9))  # of Laplace's variance: 1 … 0.0001
CLEARLY = 0.002  # relative: less of a better likelihood is not worth another step
COLDEST, HOTTEST = 0.2, 5.0  # temperatures that left-out rows are believed
PRIOR_ROWS = 50  # what T = 1 counts beside the left-out rows


def load_embeddings(path: Path | str) -> "Embeddings":
    """X, y and classes of embeddings in files: a folder that `calgp embed` has made, .npz, .npy or .safetensors."""
    from calgp.runs.embedding_cache import load_embeddings  # all of calgp.runs, which nothing else here needs

    return load_embeddings(path)


@dataclass(frozen=True, eq=False)
class Inputs:
    """u = (t(x) − mean) / scale: standardised features, divided by √d so that rows have a length of about one."""

    transform: str
    mean: Tensor
    scale: Tensor

    @staticmethod
    def fit(transform: str, x: Tensor) -> "Inputs":
        mean = torch.stack([TRANSFORMS[transform](part).double().sum(0) for part in _parts(x, x.shape[1])]).sum(
            0
        ) / len(x)
        squares = [(TRANSFORMS[transform](part) - mean).square().sum(0) for part in _parts(x, x.shape[1])]
        deviation = (torch.stack(squares).sum(0) / len(x)).sqrt()
        scale = torch.where(deviation <= 1e-6 * mean.abs(), torch.ones_like(deviation), deviation)  # one never changes
        return Inputs(transform, mean, scale.where(scale > 0, torch.ones_like(scale)) * math.sqrt(x.shape[1]))

    def __call__(self, x: Tensor) -> Tensor:
        return (TRANSFORMS[self.transform](x) - self.mean.to(x)).div_(self.scale.to(x))


TRANSFORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda x: x,
    "root": lambda x: x.sign() * x.abs().sqrt(),  # for features with long tails, such as those of rectified units
}


@dataclass(frozen=True)
class Choice:
    """Hyperparameters, and the mean negative log-likelihood of left-out rows with them (None: there were too few)."""

    transform: str
    kernel: VectorKernel
    variance: float  # σ²
    mnll: float | None = None
    spread: float = 1.0  # of Laplace's variance of f
    temperature: float = 1.0


@dataclass(eq=False, repr=False)
class GPClassifier(ClassifierMixin, BaseEstimator):
    """A Gaussian process classifier for embeddings, or any matrix of numbers; it finds its hyperparameters by itself.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> X = rng.normal(size=(200, 5))
    >>> y = np.where(X[:, 0] * X[:, 1] > 0, "same", "other")
    >>> classifier = GPClassifier().fit(X, y)
    >>> classifier.score(rng.normal(size=(5, 5)) * 0 + [1, 1, 0, 0, 0], ["same"] * 5)
    1.0
    >>> float(classifier.outlier_score([[0, 0, 0, 0, 50]])[0]) > float(classifier.outlier_score(X).max())
    True

    Every class has a function f_q ~ GP(b_q, σ² k) with k linear, radial (RBF) or both, of standardised inputs; labels
    follow softmax(f). Laplace's approximation gives f as a Gaussian in one pass: exact up to 2,000 rows, with that many
    inducing inputs (Nyström) beyond. The kernel, ℓ, σ², whether features are taken as their square roots, and a
    temperature are those with the best likelihood of left-out rows (cross-validation; a hold-out beyond 2,000 rows).
    Probabilities average over 256 quasi-random draws of f, the same for all rows. X of float32 is computed in single
    precision, any other in double precision.

    Attributes:
        classes_: the labels.
        choice_: the hyperparameters (`Choice`), with the likelihood of left-out rows.
        tried_: all that were compared, on at most 1,000 rows.
        process_: the `calgp.gp.laplace_softmax.VectorGP`.
        scores_: fitted outlier scores, by name.
        n_features_in_: the columns of X.
    """

    inducing: int = option(2000, "Inducing inputs: training rows that carry the process, if there are more of them.")
    random_state: int | np.random.RandomState | None = option(
        0, "Which rows are left out and which carry the process; the same number gives the same classifier."
    )

    def fit(self, X: Any, y: Any) -> "GPClassifier":
        """Learn from embeddings X [N, d] and their labels y."""
        if not isinstance(self.inducing, (int, np.integer)) or self.inducing < 2:
            raise CalgpError(f"Invalid inducing={self.inducing!r}: must be a whole number of at least 2, such as 2000.")
        X, y = validate_data(self, X, y, dtype=[np.float64, np.float32])
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"A classifier needs at least two classes; y has only one class, {self.classes_[0]!r}.")
        order = check_random_state(self.random_state).permutation(len(X))
        x, labels = torch.from_numpy(X[order]), torch.from_numpy(labels.astype(np.int64)[order])
        with torch.no_grad():
            self._fit(x, labels)
        return self

    def predictive(self, X: Any) -> Predictive:
        """All that is known of the labels: probabilities, entropy, mutual information, variance of f."""
        x = self._read(X)
        with torch.no_grad():
            return Predictive.cat(self._predict(part) for part in _parts(x, self._width))

    def predict_proba(self, X: Any) -> np.ndarray:
        """p(y | x) [N, Q] in the order of `classes_`."""
        return self.predictive(X).probs.numpy()

    def predict(self, X: Any) -> np.ndarray:
        """The most probable labels."""
        labels = self.predictive(X).labels.numpy()
        return self.classes_[labels]

    def entropy(self, X: Any) -> np.ndarray:
        """The uncertainty in nats: 0 where it is certain, log Q where it knows nothing."""
        return self.predictive(X).entropy.numpy()

    def outlier_score(self, X: Any, score: str = "combined") -> np.ndarray:
        """How far rows lie from the training set [N], higher is further; `score` is a name of `OUTLIER_SCORES`.

        combined (density and confidence), density (class-conditional Gaussians), neighbours, variance (of f),
        confidence, entropy, mutual-information.
        """
        kind = find(score)
        x = self._read(X)
        predictive = self.predictive(X) if kind.reads_predictive else None
        fitted = self.scores_[score] if kind.reads_features else kind.fit(x, x)
        with torch.no_grad():
            return fitted.score(torch.cat([self.inputs_(part) for part in _parts(x, x.shape[1])]), predictive).numpy()

    # --- files -------------------------------------------------------------------------------------------------------

    def save(self, path: Path | str, *, made_by: "MadeBy | None" = None) -> Path:
        """Write one safetensors file: tensors, and JSON in its header. Nothing in it is executed when it is read.

        `made_by`: the network of the embeddings, for `calgp classify`.
        """
        from calgp.runs.writing import wrap_os_errors, write_whole  # all of calgp.runs, which nothing else here needs

        check_is_fitted(self)
        if self.classes_.dtype.kind not in "iufbUO" or not all(
            isinstance(each, str | int | float | bool) for each in self.classes_.tolist()
        ):
            raise CalgpError(f"Labels of type {self.classes_.dtype} cannot be written; use numbers or strings.")
        process, path = self.process_, Path(path)
        tensors = {
            "mean": self.inputs_.mean, "scale": self.inputs_.scale, "inducing": process.basis.inducing,
            "project": process.basis.project, "weight": process.mode.weight, "bias": process.mode.bias,
            "root": process.root,
        }  # fmt: skip
        described = {
            "format": FORMAT, "choice": asdict(self.choice_), "tried": [asdict(each) for each in self.tried_],
            "parameters": {"inducing": int(self.inducing)},
            "classes": self.classes_.tolist(), "classes_type": self.classes_.dtype.str,
            "scores": {name: score.settings() for name, score in self.scores_.items()},
            "made_by": None if made_by is None else asdict(made_by),
        }  # fmt: skip
        for name, score in self.scores_.items():
            tensors |= {f"{name}.{key}": value for key, value in score.tensors().items()}
        tensors = {key: value.clone().contiguous() for key, value in tensors.items()}
        with wrap_os_errors(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, save(tensors, {"calgp": json.dumps(described)}))
        return path

    @classmethod
    def load(cls, path: Path | str) -> "GPClassifier":
        """Read what `save` has written; it predicts the same numbers."""
        path = Path(path)
        if not path.is_file():
            raise CalgpError(f"There is no file {path}; GPClassifier.save(path) writes one.")
        try:
            with safe_open(path, "pt") as file:
                described = json.loads((file.metadata() or {})["calgp"])
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
            if described["format"] != FORMAT:
                raise CalgpError(f"{path} is of format {described['format']!r}; this version reads {FORMAT!r}.")
            return cls(**described["parameters"])._restore(described, tensors)
        except (SafetensorError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise CalgpError(f"{path} is no file of GPClassifier.save, or it is damaged ({error!r}).") from None

    # --- inside ------------------------------------------------------------------------------------------------------

    def _fit(self, x: Tensor, y: Tensor) -> None:
        classes = len(self.classes_)
        found, self.tried_ = _search(x, y, classes)
        self.inputs_ = Inputs.fit(found.transform, x)
        u = torch.cat([self.inputs_(part) for part in _parts(x, x.shape[1])])
        if len(u) <= max(self.inducing, FEWEST):
            basis, phi = Basis.exact(found.kernel, u)
            (self.choice_, unsure), start = _cross_validate(phi, y, classes, found), None
            ordinary = left_out_density(u, y) if len(u) >= FEWEST else None
        else:
            basis, phi = Basis.of(found.kernel, u[: self.inducing].clone(), u)
            self.choice_, unsure, start = _hold_out(basis, u, phi, y, classes, found)
            kept = len(u) - len(unsure)
            ordinary = Density.fit(u[:kept], y[:kept]).score(u[kept:])
        mode = find_mode(phi, y, classes, self.choice_.variance, start=start)
        self.process_ = VectorGP.fit(basis, phi, mode, self.choice_.variance, spread=self.choice_.spread)
        del phi
        density = Density.fit(u, y)
        self.scores_: dict[str, OutlierScore] = {
            "density": density, "neighbours": Neighbours.fit(u, y, most=KEPT_NEIGHBOURS),
            "combined": Combined.of(density, unsure, density.score(u) if ordinary is None else ordinary),
        }  # fmt: skip

    @property
    def _width(self) -> int:
        """Numbers of a row at the widest place of a prediction."""
        return max(len(self.process_.basis.inducing), self.n_features_in_, _numbers(len(self.classes_)))

    def _predict(self, x: Tensor) -> Predictive:
        u = self.inputs_(x)
        predictive = _average(self.process_.to(u).latent(u))
        return predictive.calibrated((predictive.log_probs / self.choice_.temperature).log_softmax(-1))

    def _read(self, X: Any) -> Tensor:
        check_is_fitted(self)
        return torch.from_numpy(np.array(validate_data(self, X, dtype=[np.float64, np.float32], reset=False)))

    def _restore(self, described: dict[str, Any], tensors: dict[str, Tensor]) -> "GPClassifier":
        def choice(data: dict[str, Any]) -> Choice:
            return replace(Choice(**data), kernel=VectorKernel(**data["kernel"]))

        self.choice_, self.tried_ = choice(described["choice"]), tuple(map(choice, described["tried"]))
        self.classes_ = np.array(described["classes"], dtype=np.dtype(described["classes_type"]))
        self.inputs_ = Inputs(self.choice_.transform, tensors["mean"], tensors["scale"])
        basis = Basis(self.choice_.kernel, tensors["inducing"], tensors["project"])
        mode = Mode(tensors["weight"], tensors["bias"])
        self.process_ = VectorGP(basis, mode, tensors["root"], self.choice_.variance, self.choice_.spread)
        self.n_features_in_ = basis.inducing.shape[1]
        self.scores_ = {
            name: from_state(name, settings, {
                key.removeprefix(f"{name}."): value for key, value in tensors.items() if key.startswith(f"{name}.")
            })
            for name, settings in described["scores"].items()
        }  # fmt: skip
        return self


# --- prediction ------------------------------------------------------------------------------------------------------


def _draws(classes: int) -> int:
    return DRAWS if classes <= 100 else FEWER_DRAWS


def _numbers(classes: int) -> int:
    """How many there are of a row, where f is drawn."""
    return 2 * classes * _draws(classes)


def _average(latent: Latent) -> Predictive:
    """softmax(f) over draws of f that all rows share, with the variance of f."""
    _, n, classes = latent.mean.shape
    rows = torch.zeros(n, dtype=torch.long)
    noise = Noise(0, torch.zeros(1, dtype=torch.long), rows, mean=True, draws=_draws(classes))
    predictive = Predictive.of(Softmax().log_probs(latent, noise))
    return replace(predictive, latent_variance=latent.marginal_variance[0, :, 0])


def _parts(x: Tensor, width: int) -> tuple[Tensor, ...]:
    return x.split(max(1, ROWS // max(1, width)))


# --- hyperparameters -------------------------------------------------------------------------------------------------


def _search(x: Tensor, y: Tensor, classes: int) -> tuple[Choice, tuple[Choice, ...]]:
    """The transform, the kernel and a first σ² by cross-validation on some rows, from the most likely ones outwards."""
    radial = VectorKernel(radial=1.0, lengthscale=1.0)
    if len(x) < FEWEST:
        return Choice("plain", radial, 10.0), ()
    if classes > SEARCHED_CLASSES:  # the cost grows with them: some, evenly spaced, tell as much
        some = torch.linspace(0, classes - 1, SEARCHED_CLASSES).long()
        rows = torch.isin(y, some)
        x, y, classes = x[rows], torch.searchsorted(some, y[rows]), SEARCHED_CLASSES
    x, y = x[:SEARCHED], y[:SEARCHED]
    tried: list[Choice] = []

    def score(transform: str, kernel: VectorKernel) -> float:
        for each in tried:
            if (each.transform, each.kernel) == (transform, kernel) and each.mnll is not None:
                return each.mnll
        _, phi = Basis.exact(kernel, Inputs.fit(transform, x)(x))
        variance, mnll = _best_variance(phi, y, classes, _folds(y, SEARCH_FOLDS), tried[-1].variance if tried else 10.0)
        tried.append(Choice(transform, kernel, variance, mnll))
        return mnll

    transform = min(TRANSFORMS, key=lambda name: score(name, radial))
    _climb(LENGTHSCALES, 1.0, lambda lengthscale: score(transform, replace(radial, lengthscale=lengthscale)))
    lengthscale = min(tried, key=lambda each: each.mnll or 0.0).kernel.lengthscale
    score(transform, VectorKernel(linear=0.5, radial=0.5, lengthscale=lengthscale / 2**0.5))
    score(transform, VectorKernel(linear=1.0))
    return min(tried, key=lambda each: each.mnll or 0.0), tuple(tried)


def _climb(values: tuple[float, ...], first: float, score: Callable[[float], float]) -> float:
    """The value with the lowest score, from the one nearest to `first` on, as long as neighbours are clearly better."""
    place = min(range(len(values)), key=lambda k: abs(math.log(values[k] / first)))
    best, start = score(values[place]), place
    for step in (-1, 1):
        while 0 <= place + step < len(values):
            if step == 1 and place < start:  # it went down already
                return values[place]
            if (found := score(values[place + step])) >= (1 - CLEARLY) * best:
                break
            place, best = place + step, found
    return values[place]


def _folds(y: Tensor, count: int) -> list[Tensor]:
    """Which rows each fold leaves out (bool [N]): of each class about the same share."""
    number = torch.empty_like(y)
    number[y.argsort(stable=True)] = torch.arange(len(y)) % count
    return [number == fold for fold in range(count)]


def _best_variance(phi: Tensor, y: Tensor, classes: int, folds: list[Tensor], first: float) -> tuple[float, float]:
    """σ² and the mean negative log-likelihood of left-out rows at the mode, at its best temperature."""
    rows = [(phi[~fold], y[~fold], phi[fold]) for fold in folds]
    order = torch.cat([y[fold] for fold in folds])
    starts: list[Mode | None] = [None] * len(folds)
    found: dict[float, float] = {}

    def score(variance: float) -> float:
        for place, (kept, labels, _) in enumerate(rows):
            starts[place] = find_mode(kept, labels, classes, variance, start=starts[place], tolerance=1e-2)
        log_probs = torch.cat(
            [mode(out).log_softmax(1) for mode, (_, _, out) in zip(starts, rows, strict=True) if mode]
        )
        found[variance] = _mnll((log_probs / _temperature(log_probs, order)).log_softmax(1), order)
        return found[variance]

    best = _climb(VARIANCES, first, score)
    return best, found[best]


def _cross_validate(phi: Tensor, y: Tensor, classes: int, found: Choice) -> tuple[Choice, Tensor]:
    """σ², spread and temperature of a process that all rows carry, by the likelihood of left-out rows.

    And 1 less the confidence of each row when it was left out; of too few rows, of all of them as they are.
    """
    if len(y) < FEWEST:
        mode = find_mode(phi, y, classes, found.variance)
        return found, 1 - mode(phi).softmax(1).amax(1)
    folds = _folds(y, FOLDS)
    variance, _ = _best_variance(phi, y, classes, folds, found.variance)
    mean, spread = phi.new_empty(len(y), classes), phi.new_empty(len(y))
    for fold in folds:
        mode = find_mode(phi[~fold], y[~fold], classes, variance)
        mean[fold], spread[fold] = (
            mode(phi[fold]),
            weight_variance(phi[fold], weight_root(phi[~fold], mode, variance)),
        )
    return _calibrated(replace(found, variance=variance), mean, spread, y)


def _hold_out(
    basis: Basis, u: Tensor, phi: Tensor, y: Tensor, classes: int, found: Choice
) -> tuple[Choice, Tensor, Mode]:
    """The same of a process that only some rows carry, and the mode without the last rows, which are left out."""
    kept = len(y) - min(len(y) // 5, HELD_OUT)
    some = torch.cat([torch.arange(min(kept, MIDDLE)), torch.arange(kept, len(y))])
    variance, _ = _best_variance(phi[some], y[some], classes, [some >= kept], found.variance)
    process = VectorGP.fit(basis, phi[:kept], find_mode(phi[:kept], y[:kept], classes, variance), variance)
    parts = [process.latent(part) for part in _parts(u[kept:], len(basis.inducing))]
    mean, spread = (
        torch.cat(each) for each in zip(*((p.mean[0], p.marginal_variance[0, :, 0]) for p in parts), strict=True)
    )
    return *_calibrated(replace(found, variance=variance), mean, spread, y[kept:]), process.mode


def _calibrated(found: Choice, mean: Tensor, variance: Tensor, y: Tensor) -> tuple[Choice, Tensor]:
    """The spread and the temperature with which the mean and the variance of f at left-out rows predict best.

    And 1 less the confidence of these rows.
    """
    tried: dict[float, tuple[Choice, Tensor]] = {}

    def score(spread: float) -> float:
        wide = (spread * variance)[:, None].expand_as(mean)
        parts = zip(*(_parts(each, _numbers(mean.shape[1])) for each in (mean, wide)), strict=True)
        log_probs = torch.cat([_average(Latent(m[None], v[None])).log_probs for m, v in parts])
        temperature = _temperature(log_probs, y)
        log_probs = (log_probs / temperature).log_softmax(1)
        mnll = _mnll(log_probs, y)
        choice = replace(found, mnll=mnll, spread=spread, temperature=temperature)
        tried[spread] = choice, 1 - log_probs.amax(1).exp()
        return mnll

    return tried[_climb(SPREADS, 1.0, score)]


def _temperature(log_probs: Tensor, y: Tensor) -> float:
    """That of the left-out rows, within limits, and drawn to 1 where they are few."""
    found = min(max(Temperature.fit(log_probs, y).temperature, COLDEST), HOTTEST)
    return math.exp(math.log(found) * len(y) / (len(y) + PRIOR_ROWS))


def _mnll(log_probs: Tensor, y: Tensor) -> float:
    return -log_probs.gather(1, y[:, None]).double().mean().item()
