"""A Gaussian process classifier for embeddings: any matrix of numbers in; labels, probabilities and uncertainty out."""

import json
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

from calgp.embeddings.hyperparameters import FEWEST, NEARLY, Choice, cross_validate, hold_out, search, search_further
from calgp.embeddings.inputs import Inputs, parts
from calgp.embeddings.prediction import average, numbers
from calgp.errors import CalgpError
from calgp.gp import Predictive
from calgp.gp.laplace_softmax import Basis, Mode, VectorGP, VectorKernel, find_mode
from calgp.options import option
from calgp.posthoc.outliers import Combined, OutlierScore, find, from_state

if TYPE_CHECKING:
    from calgp.embeddings.cache import MadeBy
    from calgp.runs.export import Exported

FORMAT = "calgp-gp-classifier-2"


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
        try:
            check_classification_targets(y)
            self.classes_, labels = np.unique(y, return_inverse=True)
        except TypeError:
            kinds = " and ".join(sorted({type(each).__name__ for each in y}))
            raise ValueError(f"Invalid y with labels of types {kinds}: must be of one type, such as str.") from None
        if len(self.classes_) < 2:
            one = self.classes_.tolist()[0]
            raise ValueError(f"A classifier needs at least two classes; y has only one class, {one!r}.")
        order = check_random_state(self.random_state).permutation(len(X))
        x, labels = torch.from_numpy(X[order]), torch.from_numpy(labels.astype(np.int64)[order])
        with torch.no_grad():
            self._fit(x, labels)
        return self

    def predictive(self, X: Any) -> Predictive:
        """All that is known of the labels: probabilities, entropy, mutual information, variance of f."""
        x = self._read(X)
        with torch.no_grad():
            return Predictive.cat(self._predict(part) for part in parts(x, self._width))

    @property
    def outlier_names(self) -> tuple[str, ...]:
        """The scores that `scored` adds: `combined` first, as it is `outlier_score`'s own choice."""
        return (*self.scores_, "variance")

    def scored(self, X: Any) -> Predictive:
        """`predictive` with its outlier scores [N, K], a column for each of `outlier_names`."""
        x, predictive = self._read(X), self.predictive(X)
        with torch.no_grad():
            u = torch.cat([self.inputs_(part) for part in parts(x, x.shape[1])])
        fitted = [self.scores_.get(name) or find(name).fit(u, u) for name in self.outlier_names]
        return replace(predictive, outlier_scores=torch.stack([each.score(u, predictive) for each in fitted], 1))

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

        combined (entropy, and unusual features), density (class-conditional Gaussians), direction, neighbours, variance
        (of f), confidence, entropy, mutual-information.
        """
        kind = find(score)
        x = self._read(X)
        if kind.reads_features and score not in self.scores_:
            raise CalgpError(f"An older version saved this classifier, without the score {score!r}: fit it again.")
        predictive = self.predictive(X) if kind.reads_predictive else None
        fitted = self.scores_[score] if kind.reads_features else kind.fit(x, x)
        with torch.no_grad():
            return fitted.score(torch.cat([self.inputs_(part) for part in parts(x, x.shape[1])]), predictive).numpy()

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
            "outliers": self.scores_["combined"].settings(),  # the other scores are parts of it
            "made_by": None if made_by is None else asdict(made_by),
        }  # fmt: skip
        tensors |= {f"outliers.{key}": value for key, value in self.scores_["combined"].tensors().items()}
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

    def export(self, path: Path | str, *, score: str = "combined") -> "Exported":
        """Write an ONNX file that needs no calgp: `embeddings` [N, d] in, probabilities and an outlier score out.

        It is run by ONNX Runtime after writing, and kept only if it agrees with Python to 1e-5; the `combined` score,
        which counts the left-out rows beyond, to one of them, since rounding may put a row before or behind it.
        """
        from calgp.embeddings.export import export_vectors  # all of calgp.runs, which nothing else here needs

        check_is_fitted(self)
        return export_vectors(self, Path(path), score)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _fit(self, x: Tensor, y: Tensor) -> None:
        classes = len(self.classes_)
        found, self.tried_ = search(x, y, classes)
        if len(x) > max(self.inducing, FEWEST):
            found = search_further(x, y, classes, self.tried_, self.inducing)
        self.inputs_ = Inputs.fit(found.transform, x)
        u = torch.cat([self.inputs_(part) for part in parts(x, x.shape[1])])
        if len(u) <= max(self.inducing, FEWEST):
            basis, phi = Basis.exact(found.kernel, u)
            self.choice_, entropy = cross_validate(phi, y, classes, found)
            combined = Combined.of(u, y, entropy, folds=5 if len(u) >= FEWEST else 0)
            mode = find_mode(phi, y, classes, self.choice_.variance)
        else:
            basis, phi = Basis.of(found.kernel, u[: self.inducing].clone(), u)
            self.choice_, entropy, near = hold_out(basis, u, phi, y, classes, found)
            kept = len(u) - len(entropy)
            combined = Combined.of(u[:kept], y[:kept], entropy, u[kept:])
            variance = self.choice_.variance
            mode = find_mode(phi, y, classes, variance, start=near.mode, root=near.root, tolerance=NEARLY)
        self.process_ = VectorGP.fit(basis, phi, mode, self.choice_.variance, spread=self.choice_.spread)
        self.scores_: dict[str, OutlierScore] = combined.parts()

    @property
    def _width(self) -> int:
        """Numbers of a row at the widest place of a prediction."""
        return max(len(self.process_.basis.inducing), self.n_features_in_, numbers(len(self.classes_)))

    def _predict(self, x: Tensor, kept: dict[tuple[int, int], Tensor] | None = None) -> Predictive:
        u = self.inputs_(x)
        predictive = average(self.process_.to(u).latent(u), kept)
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
        fitted = {key.removeprefix("outliers."): value for key, value in tensors.items() if key.startswith("outliers.")}
        self.scores_ = from_state("combined", described["outliers"], fitted).parts()
        return self
