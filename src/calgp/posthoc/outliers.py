"""Outlier scores: how far an input lies from those that a classifier was trained on. Higher is further.

Every score is a frozen value that `fit` finds on the training features in one go. Some read the features of an input
(`density`, `neighbours`), some its predictive, `combined` both; all have the same signature, so that they can be
exchanged by name. A `Threshold` turns a score into a yes or no with a stated rate of false alarms.

>>> import torch
>>> features = torch.randn(500, 4, generator=torch.Generator().manual_seed(0))
>>> density = OUTLIER_SCORES["density"].fit(features, torch.arange(500) % 2)
>>> near, far = density.score(torch.tensor([[0.0, 0, 0, 0], [9.0, 9, 9, 9]]))
>>> bool(far > near)
True
>>> threshold = Threshold.fit(density.score(features), false_alarm=0.05)
>>> threshold.flags(density.score(torch.full((1, 4), 9.0)))
tensor([True])
"""

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from calgp.errors import CalgpError, name_error
from calgp.posthoc.decisions import conformal_quantile

ROWS = 2**22  # numbers that are handled at a time
MOST_NEIGHBOURS = 20_000  # training rows that are kept to be searched
JITTERS = (0.0, 1e-9, 1e-7, 1e-5, 1e-3)  # relative to the mean variance


class PredictiveLike(Protocol):
    """What scores read of a `calgp.Predictive`."""

    @property
    def confidence(self) -> Tensor: ...
    @property
    def entropy(self) -> Tensor: ...
    @property
    def mutual_information(self) -> Tensor: ...
    @property
    def variance(self) -> Tensor: ...
    @property
    def latent_variance(self) -> Tensor | None: ...


class OutlierScore(ABC):
    """A score of inputs, fitted on training features. Subclasses are frozen dataclasses of numbers and tensors."""

    name: ClassVar[str]
    summary: ClassVar[str]
    reads_features: ClassVar[bool]
    reads_predictive: ClassVar[bool]

    @classmethod
    @abstractmethod
    def fit(cls, features: Float[Tensor, "N d"], y: Int[Tensor, "N"]) -> "OutlierScore":
        """The score for a classifier that was trained on these features and labels."""

    @abstractmethod
    def score(self, features: Float[Tensor, "N d"] | None, predictive: PredictiveLike | None = None) -> Tensor:
        """[N] in float64, higher is more of an outlier. What the score does not read may be None."""

    def settings(self) -> dict[str, Any]:
        """The plain numbers, for JSON; with `tensors` it is all of the score."""
        return {key: value for key, value in vars(self).items() if not isinstance(value, Tensor)}

    def tensors(self) -> dict[str, Tensor]:
        """The tensors, for safetensors."""
        return {key: value for key, value in vars(self).items() if isinstance(value, Tensor)}


# --- of features -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Density(OutlierScore):
    """−log Σ_c π_c N(z; μ_c, Σ): class-conditional Gaussians with one covariance for all classes.

    It is the density of linear discriminant analysis (Lee et al. 2018 take its nearest Mahalanobis distance, Mukhoti et
    al. 2023, DDU, the density). Features are standardised, and their covariance within classes is shrunk towards the
    mean variance by the amount of Ledoit & Wolf (2004): of many rows almost nothing, and enough of a few.
    """

    name = "density"
    summary = "minus the log density of the features: a Gaussian for each class, one covariance"
    reads_features, reads_predictive = True, False

    whiten: Float[Tensor, "d d"]  # A with (z − m) A white within classes
    centre: Float[Tensor, "d"]  # m, mean of all
    means: Float[Tensor, "C d"]  # of each class, whitened
    log_prior: Float[Tensor, "C"]
    log_volume: float  # −log |det A|
    shrinkage: float

    @classmethod
    def fit(cls, features: Float[Tensor, "N d"], y: Int[Tensor, "N"], *, shrinkage: float | None = None) -> "Density":
        """`shrinkage`: 0 is the empirical covariance, 1 the mean variance alone; None is Ledoit & Wolf's amount."""
        z, y = _training(features, y)
        centre, scale = _standard(z)
        _, y, count = y.unique(return_inverse=True, return_counts=True)
        z.sub_(centre).div_(scale)  # a copy already
        means = torch.zeros(len(count), z.shape[1], dtype=torch.float64).index_add_(0, y, z) / count[:, None]
        within = z.sub_(means[y])
        covariance = within.mT @ within / len(z)
        size = covariance.diagonal().mean()
        if shrinkage is None:
            shrinkage = _ledoit_wolf(within, covariance)
        eye = torch.eye(len(covariance), dtype=torch.float64)
        lower = _cholesky((1 - shrinkage) * covariance + shrinkage * size * eye, size)
        whiten = torch.linalg.solve_triangular(lower.mT, eye, upper=True)  # L⁻ᵀ
        volume = (lower.diagonal().log() + scale.log()).sum().item()
        prior = (count / count.sum()).double().log()
        # in the order of a file: products of matrices in another order round differently
        whitened = (whiten / scale[:, None]).contiguous()
        return cls(whitened, centre, (means @ whiten).contiguous(), prior, volume, float(shrinkage))

    def score(self, features: Tensor | None, predictive: PredictiveLike | None = None) -> Tensor:
        def part(z: Tensor) -> Tensor:
            squared = torch.cdist((z - self.centre) @ self.whiten, self.means).square()
            return -(self.log_prior - squared / 2).logsumexp(1)

        constant = self.log_volume + len(self.centre) / 2 * math.log(2 * math.pi)
        return _in_parts(part, _rows(features, len(self.centre), self.name), len(self.means)) + constant


@dataclass(frozen=True, eq=False)
class Neighbours(OutlierScore):
    """Distance to the k-th nearest training features, all standardised and of length one (Sun et al. 2022)."""

    name = "neighbours"
    summary = "distance to the k-th nearest training features, standardised and of length one"
    reads_features, reads_predictive = True, False

    rows: Float[Tensor, "M d"]  # of length one, in float32
    centre: Float[Tensor, "d"]
    scale: Float[Tensor, "d"]
    k: int

    @classmethod
    def fit(
        cls, features: Float[Tensor, "N d"], y: Int[Tensor, "N"], *, k: int = 10, most: int = MOST_NEIGHBOURS
    ) -> "Neighbours":
        """Keeps at most `most` training rows, drawn by a fixed seed; of fewer than k rows it takes the furthest."""
        z, _ = _training(features, y)
        if k < 1 or most < 1:
            raise CalgpError(f"Invalid k={k} or most={most}: both must be at least 1.")
        centre, scale = _standard(z)
        if len(z) > most:
            k = max(1, round(k * most / len(z)))  # the same share of the training set
            z = z[torch.randperm(len(z), generator=torch.Generator().manual_seed(0))[:most].sort().values]
        return cls(_unit((z - centre) / scale).float(), centre, scale, min(k, len(z)))

    def score(self, features: Tensor | None, predictive: PredictiveLike | None = None) -> Tensor:
        def part(z: Tensor) -> Tensor:
            cosine = _unit((z - self.centre) / self.scale).float() @ self.rows.mT
            # ‖u − v‖² = 2 − 2 u·v of unit vectors: the k-th nearest has the k-th largest product
            return (2 - 2 * cosine.topk(self.k, dim=1).values[:, -1].double()).clamp_min(0).sqrt()

        return _in_parts(part, _rows(features, len(self.centre), self.name), len(self.rows))


# --- of both ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Combined(Density):
    """−log P₁ − log P₂: unusual features, or an unsure prediction, or a little of both (Fisher's combination).

    P₁ is the share of ordinary inputs with a `confidence` score at least as high, P₂ that of the `density` score, both
    counted among inputs that neither classifier nor density was fitted on (`unseen`). Density notices what no class
    looks like, confidence what lies between classes; either alone misses what the other sees.
    """

    name = "combined"
    summary = "density of the features and confidence together: minus the log of the shares of ordinary inputs beyond"
    reads_features, reads_predictive = True, True

    unseen: Float[Tensor, "2 n"]  # confidence and density scores of ordinary inputs, sorted

    @classmethod
    def fit(cls, features: Float[Tensor, "N d"], y: Int[Tensor, "N"], **options: Any) -> "Combined":
        """Of training features; `of` has to say what is ordinary."""
        raise CalgpError("The outlier score 'combined' needs inputs that were not trained on: Combined.of(density, …).")

    @classmethod
    def of(
        cls, density: Density, confidence_scores: Float[Tensor, "n"], density_scores: Float[Tensor, "n"]
    ) -> "Combined":
        """`density` is fitted on training features, the two scores are of ordinary inputs that were left out of it."""
        unseen = torch.stack([confidence_scores.double(), density_scores.double()]).cpu()
        if not unseen.shape[1] or not unseen.isfinite().all():
            raise CalgpError("Ordinary inputs have finite scores, and there must be some; these are none.")
        return cls(**vars(density), unseen=unseen.sort(dim=1).values)

    def score(self, features: Tensor | None, predictive: PredictiveLike | None = None) -> Tensor:
        unsure = MaximumProbability().score(None, predictive).cpu()
        return surprise(self.unseen[0], unsure) + surprise(self.unseen[1], super().score(features))


def surprise(ordinary: Float[Tensor, "n"], scores: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
    """−log of the share of `ordinary` scores (sorted) that are at least as high; an exponential tail beyond a tenth.

    >>> surprise(torch.arange(99.0), torch.tensor([0.0, 50.0])).exp().tolist()  # all of 100, and half of them: the new
    [1.0, 2.0]
    """
    n = len(ordinary)
    tail = min(n - 1, max(n // 10, 5))
    start = ordinary[n - 1 - tail]
    mean = (ordinary[n - tail :] - start).mean() if tail else torch.ones_like(start)
    beyond = math.log((n + 1) / (tail + 2)) + (scores - start) / torch.where(mean > 0, mean, torch.ones_like(mean))
    share = (n - torch.searchsorted(ordinary, scores) + 1) / (n + 1)
    return torch.where(scores > start, beyond, -share.to(scores).log())


def left_out_density(features: Float[Tensor, "N d"], y: Int[Tensor, "N"], *, folds: int = 5) -> Float[Tensor, "N"]:
    """Density scores of all rows, each by a density of the rows of other folds; folds have the same classes."""
    scores, order = torch.empty(len(y), dtype=torch.float64), y.argsort(stable=True)
    for fold in range(folds):
        out = order[fold::folds]
        rest = torch.ones_like(y, dtype=torch.bool).index_fill(0, out, value=False)
        scores[out] = Density.fit(features[rest], y[rest]).score(features[out])
    return scores


# --- of a predictive -------------------------------------------------------------------------------------------------


class _OfPredictive(OutlierScore):
    """Read from a predictive: there is nothing to fit."""

    reads_features, reads_predictive = False, True

    @classmethod
    def fit(cls, features: Tensor | None = None, y: Tensor | None = None) -> "OutlierScore":
        return cls()

    def score(self, features: Tensor | None, predictive: PredictiveLike | None = None) -> Tensor:
        if predictive is None:
            raise CalgpError(f"The outlier score {self.name!r} reads a predictive; none was given.")
        return self.read(predictive).double()

    @abstractmethod
    def read(self, predictive: PredictiveLike) -> Tensor: ...


@dataclass(frozen=True)
class MaximumProbability(_OfPredictive):
    """1 − max_q p_q (Hendrycks & Gimpel 2017)."""

    name = "confidence"
    summary = "1 less the largest probability"

    def read(self, predictive: PredictiveLike) -> Tensor:
        return 1 - predictive.confidence


@dataclass(frozen=True)
class Entropy(_OfPredictive):
    """−Σ p log p: the total uncertainty."""

    name = "entropy"
    summary = "entropy of the probabilities"

    def read(self, predictive: PredictiveLike) -> Tensor:
        return predictive.entropy


@dataclass(frozen=True)
class MutualInformation(_OfPredictive):
    """Entropy less expected entropy: what more data could take away."""

    name = "mutual-information"
    summary = "mutual information of label and function: the part of the entropy that more data could take away"

    def read(self, predictive: PredictiveLike) -> Tensor:
        return predictive.mutual_information


@dataclass(frozen=True)
class Variance(_OfPredictive):
    """Mean variance of the functions f_q; where the predictive does not know it, Σ_q Var p_q over samples."""

    name = "variance"
    summary = "variance of the Gaussian process; of other classifiers, of the probabilities over samples"

    def read(self, predictive: PredictiveLike) -> Tensor:
        latent = predictive.latent_variance
        return predictive.variance.sum(-1) if latent is None else latent


OUTLIER_SCORES: dict[str, type[OutlierScore]] = {
    each.name: each
    for each in (MaximumProbability, Entropy, MutualInformation, Variance, Density, Neighbours, Combined)
}


def find(name: str) -> type[OutlierScore]:
    """The outlier score of that name."""
    if name not in OUTLIER_SCORES:
        raise name_error("There is no outlier score", name, OUTLIER_SCORES)
    return OUTLIER_SCORES[name]


def from_state(name: str, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> OutlierScore:
    """A score from its name, `settings` and `tensors`."""
    cls = find(name)
    given, wanted = {*settings, *tensors}, {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    if given != wanted:
        raise CalgpError(
            f"The outlier score {name!r} is written with {', '.join(sorted(wanted)) or 'nothing'}; this one has "
            f"{', '.join(sorted(given)) or 'nothing'}. It was written by another version or is damaged: fit it again."
        )
    return cls(**settings, **tensors)


# --- a yes or no -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Threshold:
    """Flags scores above a threshold: inputs like the held-out ones are flagged with probability ≤ `false_alarm`.

    It is the ⌈(n + 1)(1 − rate)⌉-th smallest of n held-out scores, as in split conformal prediction: the rate holds on
    average over hold-outs, whatever the score, as long as nothing else was fitted on them.
    """

    false_alarm: float
    threshold: float
    n: int  # held-out inputs

    @classmethod
    def fit(cls, inside: Float[Tensor, "N"], *, false_alarm: float = 0.05) -> "Threshold":
        """Of scores of held-out inputs from inside the training distribution.

        >>> Threshold.fit(torch.arange(1.0, 20.0), false_alarm=0.1)
        Threshold(false_alarm=0.1, threshold=18.0, n=19)
        """
        if not 0 < false_alarm < 1:
            raise CalgpError(f"Invalid false_alarm={false_alarm:g}: must be a share between 0 and 1, such as 0.05.")
        if inside.dim() != 1 or inside.isnan().any():
            raise CalgpError(f"A threshold needs scores [N] without NaN, not {list(inside.shape)}.")
        least = math.ceil((1 - false_alarm) / false_alarm - 1e-9)
        if len(inside) < least:
            raise CalgpError(
                f"A false-alarm rate of {false_alarm:g} needs at least {least:,} held-out inputs; there are "
                f"{len(inside):,}. Hold out more, or allow more false alarms."
            )
        return cls(false_alarm, conformal_quantile(inside, 1 - false_alarm), len(inside))

    def flags(self, scores: Float[Tensor, "N"]) -> Tensor:
        """Which inputs are called outliers (bool [N])."""
        return scores.double() > self.threshold


# --- inside ----------------------------------------------------------------------------------------------------------


def _training(features: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    if features.dim() != 2 or min(features.shape) < 1 or y.shape != features.shape[:1]:
        raise CalgpError(
            f"Outlier scores are fitted on features [N, d] and labels [N], not on {list(features.shape)} and "
            f"{list(y.shape)}."
        )
    z = features.detach().to("cpu", torch.float64, copy=True)
    if not z.isfinite().all():
        raise CalgpError("Features must be finite numbers; some are NaN or infinite.")
    return z, y.detach().long().cpu()


def _rows(features: Tensor | None, d: int, name: str) -> Tensor:
    if features is None or features.dim() != 2 or features.shape[1] != d:
        came = "none" if features is None else str(list(features.shape))
        raise CalgpError(f"The outlier score {name!r} reads features [N, {d}], as it was fitted on; came {came}.")
    return features.detach().cpu()


def _standard(z: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each feature; 1 for one that never changes."""
    deviation, mean = torch.std_mean(z, 0, correction=0)
    constant = deviation <= 1e-12 * z.abs().amax(0)
    return mean, torch.where(constant, torch.ones_like(deviation), deviation)


def _unit(z: Tensor) -> Tensor:
    return z / z.norm(dim=1, keepdim=True).clamp_min(torch.finfo(z.dtype).tiny)


def _ledoit_wolf(centred: Float[Tensor, "N d"], covariance: Float[Tensor, "d d"]) -> float:
    """How much to shrink towards μI, μ the mean variance (Ledoit & Wolf 2004, lemma 3.3)."""
    n, d = centred.shape
    size = covariance.diagonal().mean()
    squared = covariance.square().sum()
    # ‖S − μI‖², and the mean of ‖x xᵀ − S‖² / n over rows
    delta = squared - d * size.square()
    beta = (centred.square().sum(1).square().mean() - squared) / n
    return 0.0 if delta <= 0 else float((beta / delta).clamp(0, 1))


def _cholesky(covariance: Tensor, size: Tensor) -> Tensor:
    eye = torch.eye(len(covariance), dtype=torch.float64)
    if size <= 0:  # features that say the class and nothing else: distances as they are
        return eye
    for jitter in JITTERS:
        lower, failed = torch.linalg.cholesky_ex(covariance + jitter * size * eye)
        if not failed:
            return lower
    raise CalgpError("The covariance of the features is not positive definite; leave out features that repeat others.")


def _in_parts(function: Callable[[Tensor], Tensor], z: Tensor, width: int) -> Tensor:
    """[N], so many rows at a time that rows × width stays small."""
    size = max(1, ROWS // max(width, z.shape[1]))
    return torch.cat([function(part.double()) for part in z.split(size)]) if len(z) else z.new_zeros(0).double()
