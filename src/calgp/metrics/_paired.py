"""Two methods on the same test images: the difference of their scores, with an interval."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from calgp.errors import CalgpError

from ._bootstrap import resample_weights, resampled_ood, resampled_scores
from ._ood import ood
from ._outcomes import Outcomes
from ._scores import scores

Z = 1.959964  # half a 95 % interval, in standard errors


@dataclass(frozen=True)
class Difference:
    """first − second of a score, and half of its 95 % interval over test images.

    >>> Difference(-0.02, half=0.01).is_clear
    True
    """

    value: float
    half: float

    @property
    def is_clear(self) -> bool:
        """Whether the interval leaves out zero."""
        return abs(self.value) > self.half


def paired_scores(first: Outcomes, second: Outcomes, *, seed: int, resamples: int = 1000) -> dict[str, Difference]:
    """err, mnll, ece and brier of `first` less those of `second`, on the same images in the same order.

    Both are scored on the same resamples: an image that is hard for both adds nothing to the error of the difference.

    >>> from calgp.metrics import outcomes
    >>> good, y = torch.tensor([[0.8, 0.2], [0.3, 0.7]]).log().repeat(50, 1), torch.tensor([0, 1]).repeat(50)
    >>> paired_scores(outcomes(good, y), outcomes(good.flip(1), y), seed=0)["err"].value
    -1.0
    """
    if len(first) != len(second):
        raise CalgpError(f"Invalid pair: {len(first)} and {len(second)} images; both must be scored on the same ones.")
    weights = resample_weights(len(first), seed=seed, resamples=resamples)
    a, b = (resampled_scores(each, weights.to(each.confidence)) for each in (first, second))
    one, two = (scores(each).to_dict() for each in (first, second))
    names = ("err", "mnll", "ece", "brier")
    return {name: _difference(one[name] - two[name], a[name] - b[name]) for name in names}


def paired_ood(
    first: tuple[Float[Tensor, "N"], Float[Tensor, "M"]],
    second: tuple[Float[Tensor, "N"], Float[Tensor, "M"]],
    *,
    seed: int,
    resamples: int = 1000,
) -> dict[str, Difference]:
    """The `OutOfDistribution` numbers of `first` less those of `second`; each has scores (inside, outside).

    >>> sharp, blunt = (torch.zeros(9), torch.ones(9)), (torch.zeros(9), torch.zeros(9))
    >>> paired_ood(sharp, blunt, seed=0)["auroc"]
    Difference(value=0.5, half=0.0)
    """
    sizes = [tuple(map(len, each)) for each in (first, second)]
    if sizes[0] != sizes[1]:
        raise CalgpError(f"Invalid pair: {sizes[0]} and {sizes[1]} images; both must be scored on the same ones.")
    weights = [resample_weights(n, seed=seed + side, resamples=resamples) for side, n in enumerate(sizes[0])]
    a, b = (resampled_ood(*each, *weights) for each in (first, second))
    one, two = (ood(*each).to_dict() for each in (first, second))
    return {name: _difference(one[name] - two[name], a[name] - b[name]) for name in one}


def _difference(value: float, resampled: Float[Tensor, "R"]) -> Difference:
    return Difference(value, Z * torch.std(resampled.double()).item())
