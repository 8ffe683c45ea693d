"""What is fitted on must be log-probabilities with labels, and options what they say."""

from collections.abc import Mapping

import torch
from torch import Tensor

from calgp.errors import CalgpError, name_error

STRICT = {"extra": "forbid"}  # a file that says more than this version knows describes another decision


def check_share(name: str, value: float) -> float:
    if not 0 < value < 1:  # also when it is NaN
        raise CalgpError(f"Invalid {name}={value:g}: must be a share between 0 and 1, such as 0.95 or 0.01.")
    return value


def check_choice(name: str, value: str, choices: Mapping[str, object]) -> str:
    if value not in choices:
        raise name_error(f"There is no {name}", value, choices)
    return value


def stratified_folds(y: Tensor, count: int) -> list[Tensor]:
    """Which rows each fold leaves out (bool [N]): of each class about the same share."""
    number = torch.empty_like(y)
    number[y.argsort(stable=True)] = torch.arange(len(y)) % count
    return [number == fold for fold in range(count)]


def normalised(log_probs: Tensor) -> Tensor:
    """Log-probabilities in float64, whose rows sum to one."""
    log_p = log_probs.detach().double()
    if not (log_p.logsumexp(-1).abs() < 1e-2).all():  # half precision is 10⁻³ off
        raise CalgpError("Rows must be log-probabilities that sum to one; take log_softmax of logits first.")
    return log_p


def check_labels(y: Tensor, classes: int) -> None:
    low, high = y.aminmax()
    if low < 0 or high >= classes:
        raise CalgpError(f"Invalid labels from {int(low)} to {int(high)}: must lie in 0 … {classes - 1}.")
