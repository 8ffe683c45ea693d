"""How well does a score tell examples outside the training distribution from those inside?"""

from dataclasses import asdict, dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from calgp.errors import CalgpError


@dataclass(frozen=True)
class OutOfDistribution:
    """Detection of the outside, which is the positive class; a larger score means more outside."""

    auroc: float  # P(outside > inside) + ½ P(equal)
    aupr_out: float  # average precision, outside positive
    aupr_in: float  # average precision, inside positive, scores negated
    fpr95: float  # share of the inside flagged when (at least) 95 % of the outside is caught

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


def ood(inside: Float[Tensor, "N"], outside: Float[Tensor, "M"]) -> OutOfDistribution:
    """Compare the scores (say, entropies) of inputs from inside and outside; exact with ties, by one sort.

    >>> ood(torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0.3, 0.9]))
    OutOfDistribution(auroc=0.8125, aupr_out=0.75, aupr_in=0.8875, fpr95=0.5)
    """
    inside_rank, outside_rank, levels = ranks(inside, outside)
    found = detection(torch.bincount(inside_rank, minlength=levels), torch.bincount(outside_rank, minlength=levels))
    return OutOfDistribution(*found.tolist())


def ranks(inside: Float[Tensor, "N"], outside: Float[Tensor, "M"]) -> tuple[Int[Tensor, "N"], Int[Tensor, "M"], int]:
    """Scores as levels 0, 1, …, from the highest score down; equal scores share a level."""
    for name, scores in (("inside", inside), ("outside", outside)):
        if scores.ndim != 1 or not len(scores) or scores.isnan().any():
            raise CalgpError(f"Invalid scores {name} of {list(scores.shape)}: must be [N], at least one, without NaN.")
    dtype = torch.promote_types(inside.dtype, outside.dtype)
    values, level = torch.cat([inside.to(dtype), outside.to(dtype)]).unique(return_inverse=True)
    level = len(values) - 1 - level
    return level[: len(inside)], level[len(inside) :], len(values)


def detection(inside: Int[Tensor, "... L"], outside: Int[Tensor, "... L"]) -> Float[Tensor, "... 4"]:
    """AUROC, both AUPRs and FPR95 from the number of examples at each level of score, highest level first."""
    false, true = inside.cumsum(-1), outside.cumsum(-1)  # flagged at a threshold that includes the level
    n, m = false[..., -1:], true[..., -1:]
    # Σ over inside examples of the outside ones above, and half of the equal ones; doubled, it is an integer
    auroc = (inside * (2 * true - outside)).sum(-1).double() / (2 * n * m).squeeze(-1)
    aupr_out = _average_precision(outside, true, false)
    aupr_in = _average_precision(inside, n - false + inside, m - true + outside)  # counted from below
    reached = (20 * true < 19 * m).sum(-1, keepdim=True)  # in integers: 0.95 is no binary fraction
    fpr95 = (false.gather(-1, reached).double() / n).squeeze(-1)
    return torch.stack([auroc, aupr_out, aupr_in, fpr95], -1)


def _average_precision(
    positive: Int[Tensor, "... L"], positives: Int[Tensor, "... L"], negatives: Int[Tensor, "... L"]
) -> Float[Tensor, "..."]:
    # Σ (recall − previous recall) · precision
    precision = positives / (positives + negatives).clamp(min=1).double()
    return (positive * precision).sum(-1) / positive.sum(-1)
