"""An outlier score of four: an unsure prediction, and features that are unusual in three ways."""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from calgp.errors import CalgpError
from calgp.posthoc.checks import stratified_folds
from calgp.posthoc.feature_outliers import Density, Direction, Neighbours
from calgp.posthoc.outlier_score import Entropy, OutlierScore, PredictiveLike

MOST = 5000  # training rows that are kept to be searched
SHARE = 0.1  # of the outliers, that a score of features is expected to notice
T = TypeVar("T", Density, Direction, Neighbours)


@dataclass(frozen=True, eq=False)
class Combined(OutlierScore):
    """−log P₀ + Σ log(1 − a + a/Pᵢ): an unsure prediction, features that are really unusual, or a little of each.

    P is the share of ordinary inputs with a score at least as high: P₀ of `entropy`, the others of `density`,
    `direction` and `neighbours`, counted among inputs that neither classifier nor features were fitted on (`unseen`).
    Near the data the entropy tells most, and ordinary scatter of the features must not hide it; far away the features
    do. So a share a = 0.1 of the outliers is expected to have unusual features: what a tenth of the ordinary inputs
    exceed counts little, what none exceeds counts in full. With a = 1 it is Fisher's combination.
    """

    name = "combined"
    summary = "entropy, and features whose density, direction or neighbours few ordinary inputs have"
    reads_features, reads_predictive = True, True

    whiten: Float[Tensor, "d d"]  # those of Density …
    centre: Float[Tensor, "d"]
    means: Float[Tensor, "C d"]
    log_prior: Float[Tensor, "C"]
    log_volume: float
    shrinkage: float
    rows: Float[Tensor, "M d"]  # … and of Neighbours
    scale: Float[Tensor, "d"]
    k: int
    unseen: Float[Tensor, "s n"]  # scores of ordinary inputs, each sorted
    # a, and what Direction has; older files, without it, are Fisher's combination of the other three
    share: float = 1.0
    direction_whiten: Float[Tensor, "e e"] | None = None
    direction_centre: Float[Tensor, "e"] | None = None
    direction_means: Float[Tensor, "C e"] | None = None
    direction_log_prior: Float[Tensor, "C"] | None = None
    direction_log_volume: float = 0.0
    direction_shrinkage: float = 0.0

    @classmethod
    def fit(cls, features: Float[Tensor, "N d"], y: Int[Tensor, "N"]) -> "Combined":
        """Of training features; `of` has to say what is ordinary."""
        raise CalgpError("The outlier score 'combined' needs inputs that were not trained on: use Combined.of(…).")

    @classmethod
    def of(
        cls,
        features: Float[Tensor, "N d"],
        y: Int[Tensor, "N"],
        entropy: Float[Tensor, "n"],
        unseen: Float[Tensor, "n d"] | None = None,
        *,
        folds: int = 5,
    ) -> "Combined":
        """Fitted on training features; `entropy` and features `unseen` are of ordinary inputs that were left out.

        Without such features, those of training are left out in turn, in `folds`; `entropy` is then of these.
        """
        fits = (Density.fit, Direction.fit, lambda z, y: Neighbours.fit(z, y, most=MOST))
        density, direction, neighbours = parts = [fit(features, y) for fit in fits]
        if unseen is not None:
            ordinary = [each.score(unseen) for each in parts]
        elif folds:
            ordinary = [left_out_scores(fit, features, y, folds=folds) for fit in fits]
        else:
            ordinary = [each.score(features) for each in parts]
        scores = torch.stack([entropy.double().cpu(), *ordinary])
        if not scores.shape[1] or not scores.isfinite().all():
            raise CalgpError("Ordinary inputs have finite scores, and there must be some; these are none.")
        more = {f"direction_{key}": value for key, value in vars(direction).items()}
        return cls(**vars(neighbours) | vars(density) | more, unseen=scores.sort(dim=1).values, share=SHARE)

    def score(self, features: Tensor | None, predictive: PredictiveLike | None = None) -> Tensor:
        found = [Entropy().score(None, predictive).cpu(), *(each.score(features) for each in self._features())]
        return self._combined([surprise(*pair) for pair in zip(self.unseen, found, strict=True)])

    def parts(self) -> dict[str, OutlierScore]:
        return {each.name: each for each in (self, *self._features())}

    @property
    def step(self) -> float:
        """A rank of each: an input may have the very score of an ordinary one."""
        tail = _tail(self.unseen.shape[1])
        return len(self.unseen) * math.log((tail + 2) / (tail + 1))

    def elementary(self, features: Tensor, predictive: PredictiveLike) -> Tensor:
        found = [each.elementary(features, predictive) for each in (Entropy(), *self._features())]
        scores = torch.stack(found)
        counts = (self.unseen.unsqueeze(1) < scores.unsqueeze(2)).sum(2)  # as searchsorted has them
        return self._combined([_surprise(*each) for each in zip(self.unseen, scores, counts, strict=True)])

    def _combined(self, surprises: list[Tensor]) -> Tensor:
        unsure, *unusual = surprises
        # log(1 − a + a eˢ) = s + log(a + (1 − a) e⁻ˢ), which does not overflow
        return unsure + sum(s + (self.share + (1 - self.share) * (-s).exp()).log() for s in unusual)

    def _features(self) -> tuple[OutlierScore, ...]:
        if self.direction_whiten is None:
            return self._part(Density), self._part(Neighbours)
        return self._part(Density), self._part(Direction, "direction_"), self._part(Neighbours)

    def _part(self, kind: type[T], prefix: str = "") -> T:
        return kind(**{each.name: getattr(self, prefix + each.name) for each in fields(kind)})


def surprise(ordinary: Float[Tensor, "n"], scores: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
    """−log of the share of `ordinary` scores (sorted) that are at least as high; an exponential tail beyond a tenth.

    >>> surprise(torch.arange(99.0), torch.tensor([0.0, 50.0])).exp().tolist()  # all of 100, and half of them: the new
    [1.0, 2.0]
    """
    return _surprise(ordinary, scores, torch.searchsorted(ordinary, scores))


def _tail(n: int) -> int:
    """How many of n ordinary scores the tail is fitted to."""
    return min(n - 1, max(n // 10, 5))


def _surprise(ordinary: Tensor, scores: Tensor, below: Int[Tensor, "N"]) -> Tensor:
    """`below`: how many of the ordinary scores are lower than each."""
    n = len(ordinary)
    tail = _tail(n)
    start = ordinary[n - 1 - tail]
    mean = (ordinary[n - tail :] - start).mean() if tail else torch.ones_like(start)
    beyond = math.log((n + 1) / (tail + 2)) + (scores - start) / torch.where(mean > 0, mean, torch.ones_like(mean))
    share = (n - below + 1) / (n + 1)
    return torch.where(scores > start, beyond, -share.to(scores).log())


def left_out_scores(
    fit: Callable[[Any, Any], OutlierScore], features: Float[Tensor, "N d"], y: Int[Tensor, "N"], *, folds: int = 5
) -> Float[Tensor, "N"]:
    """Scores of all rows, each by a score that was fitted on the rows of other folds; folds have the same classes."""
    scores = torch.empty(len(y), dtype=torch.float64)
    for out in stratified_folds(y, folds):
        scores[out] = fit(features[~out], y[~out]).score(features[out])
    return scores
