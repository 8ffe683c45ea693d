"""Outlier scores that read features: class-conditional density, of their direction too, and nearest neighbours."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from calgp.errors import CalgpError
from calgp.posthoc.outlier_score import OutlierScore, PredictiveLike

ROWS = 2**22  # numbers that are handled at a time
MOST_NEIGHBOURS = 20_000  # training rows that are kept to be searched
MOST_DIRECTIONS = 20_000  # training rows whose directions are read
NO_LENGTH = 1e-12  # features that are shorter have no direction
JITTERS = (0.0, 1e-9, 1e-7, 1e-5, 1e-3)  # relative to the mean variance


@dataclass(frozen=True, eq=False)
class ClassGaussians(OutlierScore, ABC):
    """−log Σ_c π_c N(z; μ_c, Σ): class-conditional Gaussians with one covariance for all classes."""

    reads_features, reads_predictive = True, False
    added = 0  # numbers that `read` adds to the features

    whiten: Float[Tensor, "d d"]  # A with (z − m) A white within classes
    centre: Float[Tensor, "d"]  # m, mean of all
    means: Float[Tensor, "C d"]  # of each class, whitened
    log_prior: Float[Tensor, "C"]
    log_volume: float  # −log |det A|
    shrinkage: float

    @staticmethod
    @abstractmethod
    def read(features: Float[Tensor, "N ..."]) -> Float[Tensor, "N d"]:
        """What of the features is Gaussian: z."""

    def score(self, features: Tensor | None, predictive: PredictiveLike | None = None) -> Tensor:
        def of_part(part: Tensor) -> Tensor:
            return self._score(torch.cdist((self.read(part) - self.centre) @ self.whiten, self.means).square())

        return _in_parts(of_part, _rows(features, len(self.centre) - self.added, self.name), len(self.means))

    def elementary(self, features: Tensor, predictive: PredictiveLike) -> Tensor:
        z = (self.read(features.double()) - self.centre) @ self.whiten
        squared = z.square().sum(1, keepdim=True) + self.means.square().sum(1) - 2 * z @ self.means.mT
        return self._score(squared.clamp_min(0))

    def _score(self, squared: Float[Tensor, "N C"]) -> Float[Tensor, "N"]:
        """Of squared distances to the means."""
        constant = self.log_volume + len(self.centre) / 2 * math.log(2 * math.pi)
        return constant - (self.log_prior - squared / 2).logsumexp(1)


class Density(ClassGaussians):
    """The density of linear discriminant analysis: each class a Gaussian, with one covariance for all.

    (Lee et al. 2018 take its nearest Mahalanobis distance, Mukhoti et al. 2023, DDU, the density.) Features are
    standardised, and their covariance within classes is shrunk towards the mean variance by the amount of Ledoit & Wolf
    (2004): of many rows almost nothing, and enough of a few.
    """

    name = "density"
    summary = "minus the log density of the features: a Gaussian for each class, one covariance"

    @classmethod
    def fit(cls, features: Float[Tensor, "N d"], y: Int[Tensor, "N"], *, shrinkage: float | None = None) -> "Density":
        """`shrinkage`: 0 is the empirical covariance, 1 the mean variance alone; None is Ledoit & Wolf's amount."""
        z, y = _training(features, y)
        centre, scale = _standard(z)
        _, y, count = y.unique(return_inverse=True, return_counts=True)
        means = torch.zeros(len(count), z.shape[1], dtype=torch.float64)
        for part, labels in _pairs(z, y):
            means.index_add_(0, labels, (part.double() - centre) / scale)
        means /= count[:, None]
        covariance, fourth = torch.zeros(z.shape[1], z.shape[1], dtype=torch.float64), 0.0
        for part, labels in _pairs(z, y):
            within = (part.double() - centre) / scale - means[labels]
            covariance += within.mT @ within
            fourth += within.square().sum(1).square().sum().item()
        covariance /= len(z)
        size = covariance.diagonal().mean()
        if shrinkage is None:
            shrinkage = _ledoit_wolf(len(z), fourth / len(z), covariance)
        eye = torch.eye(len(covariance), dtype=torch.float64)
        lower = _cholesky((1 - shrinkage) * covariance + shrinkage * size * eye, size)
        whiten = torch.linalg.solve_triangular(lower.mT, eye, upper=True)  # L⁻ᵀ
        volume = (lower.diagonal().log() + scale.log()).sum().item()
        prior = (count / count.sum()).double().log()
        # in the order of a file: products of matrices in another order round differently
        whitened = (whiten / scale[:, None]).contiguous()
        return cls(whitened, centre, (means @ whiten).contiguous(), prior, volume, float(shrinkage))

    @staticmethod
    def read(features: Tensor) -> Tensor:
        return features


class Direction(ClassGaussians):
    """The density of direction and log length, (z/‖z‖, log ‖z‖), class by class as in `Density`.

    Networks give longer features to images that they are sure of. A Gaussian of the features themselves takes short
    ones for ordinary, whatever they show; one of their direction does not (Mueller & Hein 2025, Mahalanobis++).
    """

    name = "direction"
    summary = "minus the log density of the direction of the features and of their log length"
    added = 1

    @classmethod
    def fit(cls, features: Float[Tensor, "N d"], y: Int[Tensor, "N"], *, most: int = MOST_DIRECTIONS) -> "Direction":
        """Of at most `most` rows, drawn by a fixed seed."""
        z, y = _training(features, y)
        if len(z) > most:
            drawn = torch.randperm(len(z), generator=torch.Generator().manual_seed(0))[:most].sort().values
            z, y = z[drawn], y[drawn]
        return cls(**vars(Density.fit(cls.read(z), y)))

    @staticmethod
    def read(features: Tensor) -> Tensor:
        length = features.square().sum(1, keepdim=True).sqrt().clamp_min(NO_LENGTH)
        return torch.cat([features / length, length.log()], 1)


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
        return cls(_unit((z.double() - centre) / scale).float(), centre, scale, min(k, len(z)))

    def score(self, features: Tensor | None, predictive: PredictiveLike | None = None) -> Tensor:
        return _in_parts(self._score, _rows(features, len(self.centre), self.name), len(self.rows))

    def elementary(self, features: Tensor, predictive: PredictiveLike) -> Tensor:
        return self._score(features.double())

    def _score(self, z: Float[Tensor, "N d"]) -> Float[Tensor, "N"]:
        cosine = _unit((z - self.centre) / self.scale).float() @ self.rows.mT
        # ‖u − v‖² = 2 − 2 u·v of unit vectors: the k-th nearest has the k-th largest product
        return (2 - 2 * cosine.topk(self.k, dim=1).values[:, -1].double()).clamp_min(0).sqrt()


def _training(features: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    if features.dim() != 2 or min(features.shape) < 1 or y.shape != features.shape[:1]:
        raise CalgpError(
            f"Outlier scores are fitted on features [N, d] and labels [N], not on {list(features.shape)} and "
            f"{list(y.shape)}."
        )
    z = features.detach().cpu()
    z = z if z.dtype == torch.float32 else z.double()
    if not z.isfinite().all():
        raise CalgpError("Features must be finite numbers; some are NaN or infinite.")
    return z, y.detach().long().cpu()


def _rows(features: Tensor | None, d: int, name: str) -> Tensor:
    if features is None or features.dim() != 2 or features.shape[1] != d:
        came = "none" if features is None else str(list(features.shape))
        raise CalgpError(f"The outlier score {name!r} reads features [N, {d}], as it was fitted on; came {came}.")
    return features.detach().cpu()


def _standard(z: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each feature, in double precision; 1 for one that never changes."""
    parts = z.split(max(1, ROWS // z.shape[1]))
    mean = torch.stack([part.double().sum(0) for part in parts]).sum(0) / len(z)
    deviation = (torch.stack([(part.double() - mean).square().sum(0) for part in parts]).sum(0) / len(z)).sqrt()
    constant = deviation <= 1e-12 * z.abs().amax(0)
    return mean, torch.where(constant, torch.ones_like(deviation), deviation)


def _unit(z: Tensor) -> Tensor:
    return z / z.norm(dim=1, keepdim=True).clamp_min(torch.finfo(z.dtype).tiny)


def _pairs(z: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Features and labels of so many rows that copies of them are small."""
    size = max(1, ROWS // z.shape[1])
    return zip(z.split(size), y.split(size), strict=True)


def _ledoit_wolf(n: int, fourth: float, covariance: Float[Tensor, "d d"]) -> float:
    """How much to shrink towards μI, μ the mean variance (Ledoit & Wolf 2004, lemma 3.3); `fourth` is the mean ‖x‖⁴."""
    d = len(covariance)
    size = covariance.diagonal().mean()
    squared = covariance.square().sum()
    # ‖S − μI‖², and the mean of ‖x xᵀ − S‖² / n over rows
    delta = squared - d * size.square()
    beta = (fourth - squared) / n
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
