"""Outlier scores: how far an input lies from those that a classifier was trained on. Higher is further.

Every score is a frozen value that `fit` finds on the training features in one go. Some read the features of an input
(`density`, `direction`, `neighbours`), some its predictive, `combined` both; all have the same signature, so that they
can be exchanged by name. A `Threshold` turns a score into a yes or no with a stated rate of false alarms.

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
from collections.abc import Mapping
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from calgp.errors import CalgpError
from calgp.json_values import Json
from calgp.posthoc.checks import check_choice, check_share
from calgp.posthoc.combined_outliers import Combined, left_out_scores, surprise
from calgp.posthoc.decisions import conformal_quantile
from calgp.posthoc.feature_outliers import Density, Direction, Neighbours
from calgp.posthoc.outlier_score import (
    Entropy,
    MaximumProbability,
    MutualInformation,
    OutlierScore,
    PredictiveLike,
    Variance,
)

__all__ = [
    "OUTLIER_SCORES", "Combined", "Density", "Direction", "Entropy", "MaximumProbability", "MutualInformation",
    "Neighbours", "OutlierScore", "PredictiveLike", "Threshold", "Variance", "find", "from_state", "left_out_scores",
    "surprise",
]  # fmt: skip

OUTLIER_SCORES: dict[str, type[OutlierScore]] = {
    each.name: each
    for each in (MaximumProbability, Entropy, MutualInformation, Variance, Density, Direction, Neighbours, Combined)
}


def find(name: str) -> type[OutlierScore]:
    """The outlier score of that name."""
    return OUTLIER_SCORES[check_choice("outlier score", name, OUTLIER_SCORES)]


def from_state(name: str, settings: Mapping[str, Json], tensors: Mapping[str, Tensor]) -> OutlierScore:
    """A score from its name, `settings` and `tensors`."""
    cls = find(name)
    known = dataclasses.fields(cls)  # type: ignore[arg-type]
    given, wanted = {*settings, *tensors}, {field.name for field in known}
    needed = {field.name for field in known if field.default is dataclasses.MISSING}
    if not needed <= given <= wanted:
        missing, unknown = (", ".join(sorted(each)) or "nothing" for each in (needed - given, given - wanted))
        raise CalgpError(
            f"The outlier score {name!r} was written by another version or is damaged (missing: {missing}; unknown: "
            f"{unknown}): fit it again."
        )
    return cls(**settings, **tensors)


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

        >>> import torch
        >>> Threshold.fit(torch.arange(1.0, 20.0), false_alarm=0.1)
        Threshold(false_alarm=0.1, threshold=18.0, n=19)
        """
        check_share("false_alarm", false_alarm)
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
