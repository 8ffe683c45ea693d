"""Prediction: what a classifier says of images; OneShot: one that is known after a single pass."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from calgp.gp import Passes, Predictive
from calgp.posthoc.outliers import Threshold


@dataclass(frozen=True)
class Prediction:
    """What a classifier says of N images.

    names: file names, where there were files. predictive: (calibrated) probabilities and their uncertainty.
    abstains: where no answer is given [N]; sets: which classes are in the prediction sets [N, Q]; None without such
    decisions. passes: how it was computed. outlier_score: how far from what was trained on, more is further [N];
    outliers: which are beyond the threshold [N]; None where no score was fitted. unreadable: why files were left out.

    >>> import calgp
    >>> p = calgp.load("shipped").predict(torch.zeros(2, 1, 28, 28))
    >>> len(p.labels), p.probs.shape, p.entropy.shape
    (2, torch.Size([2, 10]), torch.Size([2]))
    """

    names: tuple[str, ...] | None
    classes: tuple[str, ...]
    predictive: Predictive
    passes: Passes
    abstains: Tensor | None = None
    sets: Tensor | None = None
    outlier_score: Tensor | None = None
    outliers: Tensor | None = None
    unreadable: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.predictive.log_probs)

    @staticmethod
    def of(
        predictive: Predictive,
        how: Passes,
        classes: tuple[str, ...],
        *,
        decided: Mapping[str, Tensor],
        threshold: Threshold | None,
        names: tuple[str, ...] | None = None,
        unreadable: tuple[str, ...] = (),
    ) -> "Prediction":
        """With what was decided, the first of the predictive's outlier scores, and which are beyond its threshold."""
        score = None if predictive.outlier_scores is None else predictive.outlier_scores[:, 0]
        flags = None if score is None or threshold is None else threshold.flags(score)
        abstained, sets = decided.get("abstained"), decided.get("sets")
        return Prediction(names, classes, predictive, how, abstained, sets, score, flags, unreadable)

    @property
    def probs(self) -> Tensor:
        """p(y | x) of each class [N, Q]."""
        return self.predictive.probs

    @property
    def labels(self) -> list[str]:
        """The name of the most probable class of each image."""
        return [self.classes[label] for label in self.predictive.labels.tolist()]

    @property
    def confidence(self) -> Tensor:
        """The probability of the most probable class [N]."""
        return self.predictive.confidence

    @property
    def entropy(self) -> Tensor:
        """Total uncertainty in nats [N]."""
        return self.predictive.entropy

    @property
    def mutual_information(self) -> Tensor:
        """The part of the uncertainty that more data could remove, in nats [N]."""
        return self.predictive.mutual_information

    @property
    def class_sets(self) -> list[list[str]] | None:
        """The names of the classes in each prediction set; None without such decisions."""
        if self.sets is None:
            return None
        return [[self.classes[q] for q, inside in enumerate(row) if inside] for row in self.sets.tolist()]


class OneShot:
    """A `Sampling` of a classifier that has no samples: all is known after the first."""

    def __init__(self, predictive: Predictive) -> None:
        self._predictive, self.drawn = predictive, 0
        self.rows = torch.zeros(len(predictive.log_probs), dtype=torch.int64)

    def __len__(self) -> int:
        return len(self.rows)

    def draw(self, count: int) -> Tensor:
        """The same probabilities `count` times [count, N, Q]."""
        self.drawn += count
        return self._predictive.probs.expand(count, -1, -1)

    def predictive(self) -> Predictive:
        return self._predictive

    def keep(self, index: Tensor) -> None:
        """Go on with the images at `index` only."""
        fields = ((each.name, getattr(self._predictive, each.name)) for each in dataclasses.fields(Predictive))
        kept = {name: value[index] for name, value in fields if isinstance(value, Tensor)}
        self.rows, self._predictive = self.rows[index], replace(self._predictive, **kept)
