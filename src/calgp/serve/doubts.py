"""How much a run doubts the test images of a source: what the doubt about another picture is compared with."""

import torch

from calgp.errors import CalgpError
from calgp.runs import RunFolder


def entropy_percentiles(folder: RunFolder, source: str, calibrator: str | None) -> list[float] | None:
    """The entropy that 0, 1, …, 100 of 100 test images do not exceed; None if their predictions were not kept."""
    try:
        entropy = folder.tensors(folder.predictions_name(source, calibrator))["entropy"]
    except (CalgpError, KeyError):
        return None
    return entropy.double().clamp(min=0).quantile(torch.linspace(0, 1, 101, dtype=torch.float64)).tolist()
