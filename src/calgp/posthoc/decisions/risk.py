"""How uncertain predictions are, and the error among the least uncertain of them: risk and coverage."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from calgp.errors import CalgpError
from calgp.posthoc.checks import check_choice

SCORES: dict[str, Callable[[Mapping[str, Tensor]], Tensor]] = {
    "confidence": lambda columns: 1 - columns["confidence"].double(),
    "entropy": lambda columns: columns["entropy"].double(),
    "mutual-information": lambda columns: columns["mutual_information"].double(),
}


def uncertainty(columns: Mapping[str, Tensor], score: str = "confidence") -> Tensor:
    """How uncertain predictions [N] are: 1 − max p, the entropy or the mutual information; less is surer."""
    return SCORES[check_choice("score", score, SCORES)](columns)


@dataclass(frozen=True)
class RiskCoverage:
    """The error among the k least uncertain of N predictions, for k = 1 … N (El-Yaniv & Wiener 2010).

    Equal uncertainties are in no order: the errors of a tie are spread evenly over it, their mean over all orders.
    """

    coverage: Tensor  # k / N
    risk: Tensor  # (1/k) Σ_{i ≤ k} wrong_i

    @property
    def aurc(self) -> float:
        """(1/N) Σ_k risk_k: the area under the curve (Geifman et al. 2019). Less is better."""
        return self.risk.mean().item()

    @property
    def excess(self) -> float:
        """E-AURC: the area beyond that of the best order, in which all errors come last (Geifman et al. 2019)."""
        n = len(self.risk)
        k = torch.arange(1, n + 1, dtype=torch.float64)
        right = n - round(self.risk[-1].item() * n)
        return self.aurc - ((k - right).clamp_min(0) / k).mean().item()


def risk_coverage(uncertainty: Tensor, wrong: Tensor) -> RiskCoverage:
    """The curve of uncertainties [N] and of what was wrong (bool [N]).

    >>> curve = risk_coverage(torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([False, True, False, True]))
    >>> curve.risk
    tensor([0.0000, 0.5000, 0.3333, 0.5000], dtype=torch.float64)
    >>> round(curve.aurc, 4), round(curve.excess, 4)
    (0.3333, 0.125)
    """
    uncertainty, wrong = check_columns(uncertainty, wrong)
    _, group, size = uncertainty.unique(return_inverse=True, return_counts=True)  # in rising order
    errors = torch.zeros(len(size), dtype=torch.float64).index_add_(0, group, wrong.double())
    k = torch.arange(1, len(uncertainty) + 1, dtype=torch.float64)
    return RiskCoverage(k / len(k), (errors / size).repeat_interleave(size).cumsum(0) / k)


def check_columns(uncertainty: Tensor, wrong: Tensor) -> tuple[Tensor, Tensor]:
    """Uncertainties and what was wrong, checked, in float64 and bool, on the CPU."""
    if uncertainty.dim() != 1 or len(uncertainty) < 1 or wrong.shape != uncertainty.shape:
        raise CalgpError(
            f"Invalid uncertainties of {list(uncertainty.shape)} and errors of {list(wrong.shape)}: must be two "
            "columns [N] of at least one image."
        )
    uncertainty = uncertainty.detach().double().cpu()
    if uncertainty.isnan().any():
        raise CalgpError("Invalid uncertainties: must be numbers, but some are NaN.")
    return uncertainty, wrong.detach().bool().cpu()
