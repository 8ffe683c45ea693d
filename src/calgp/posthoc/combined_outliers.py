"""An outlier score of three: an unsure prediction, and features that are unusual in two ways."""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from calgp.errors import CalgpError
from calgp.posthoc.feature_outliers import Density, Neighbours
from calgp.posthoc.outlier_score import Entropy, OutlierScore, PredictiveLike

MOST = 5000  # training rows that are kept to be searched
T = TypeVar("T", Density, Neighbours)


@dataclass(frozen=True, eq=False)
class Combined(OutlierScore):
    """−log P₁ − log P₂ − log P₃: an unsure prediction, unusual features, or a little of each (Fisher's combination).

    P is the share of ordinary inputs with a score at least as high: of `entropy`, `density` and `neighbours`, counted
    among inputs that neither classifier nor features were fitted on (`unseen`). Entropy notices what lies between
    classes, density what no class looks like, neighbours what no training input looks like; each misses what another
    sees. Density and neighbours are fitted on the same features.
    """

    name = "combined"
    summary = "entropy, density and neighbours together: minus the logs of the shares of ordinary inputs beyond"
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
    unseen: Float[Tensor, "3 n"]  # scores of ordinary inputs, each sorted

    @classmethod
    def fit(cls, features: Float[Tensor, "N d"], y: Int[Tensor, "N"]) -> "Combined":
        """Of training features; `of` has to say what is ordinary."""
        raise CalgpError(
            "The outlier score 'combined' needs inputs that were not trained on: Combined.of(features, …)."
        )

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
        density, neighbours = Density.fit(features, y), Neighbours.fit(features, y, most=MOST)
        parts = [density, neighbours]
        if unseen is not None:
            ordinary = [each.score(unseen) for each in parts]
        elif folds:
            kinds = (Density.fit, lambda z, y: Neighbours.fit(z, y, most=MOST))
            ordinary = [left_out_scores(kind, features, y, folds=folds) for kind in kinds]
        else:
            ordinary = [each.score(features) for each in parts]
        scores = torch.stack([entropy.double().cpu(), *ordinary])
        if not scores.shape[1] or not scores.isfinite().all():
            raise CalgpError("Ordinary inputs have finite scores, and there must be some; these are none.")
        return cls(**vars(neighbours) | vars(density), unseen=scores.sort(dim=1).values)

    def score(self, features: Tensor | None, predictive: PredictiveLike | None = None) -> Tensor:
        found = [Entropy().score(None, predictive).cpu(), *(each.score(features) for each in self._features())]
        return torch.stack([surprise(*pair) for pair in zip(self.unseen, found, strict=True)]).sum(0)

    def parts(self) -> dict[str, OutlierScore]:
        return {each.name: each for each in (self, *self._features())}

    @property
    def step(self) -> float:
        """A rank of each: an input may have the very score of an ordinary one."""
        tail = _tail(self.unseen.shape[1])
        return 3 * math.log((tail + 2) / (tail + 1))

    def elementary(self, features: Tensor, predictive: PredictiveLike) -> Tensor:
        found = [each.elementary(features, predictive) for each in (Entropy(), *self._features())]
        scores = torch.stack(found)
        counts = (self.unseen.unsqueeze(1) < scores.unsqueeze(2)).sum(2)  # as searchsorted has them
        return sum((_surprise(*each) for each in zip(self.unseen, scores, counts, strict=True)), scores.new_zeros(()))

    def _features(self) -> tuple[Density, Neighbours]:
        return self._part(Density), self._part(Neighbours)

    def _part(self, kind: type[T]) -> T:
        return kind(**{each.name: getattr(self, each.name) for each in fields(kind)})


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
    scores, order = torch.empty(len(y), dtype=torch.float64), y.argsort(stable=True)
    for fold in range(folds):
        out = order[fold::folds]
        rest = torch.ones_like(y, dtype=torch.bool).index_fill(0, out, value=False)
        scores[out] = fit(features[rest], y[rest]).score(features[out])
    return scores
