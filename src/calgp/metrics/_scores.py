"""The paper's numbers for one set of predictions."""

from dataclasses import asdict, dataclass

from ._calibration import Confidence, reliability
from ._outcomes import Outcomes, brier, error_rate, mnll


@dataclass(frozen=True)
class Scores:
    """One row of a table: plain numbers, ready to be written down."""

    n: int
    err: float
    mnll: float
    ece: float
    mce: float
    brier: float  # Σ over classes, as in the paper's tables
    confidence: float  # mean; compare with 1 − err
    entropy: float  # mean, in nats

    def to_dict(self) -> dict[str, int | float]:
        return asdict(self)


def scores(outcomes: Outcomes, *, bins: int = 20, confidence: Confidence = "mean") -> Scores:
    """All scores of a set of predictions; `bins` and `confidence` are those of `ece`.

    >>> import torch
    >>> from calgp.metrics import outcomes
    >>> certain = outcomes(torch.tensor([[1.0, 0.0]]).log(), torch.tensor([0]))
    >>> scores(certain)
    Scores(n=1, err=0.0, mnll=0.0, ece=0.0, mce=0.0, brier=0.0, confidence=1.0, entropy=0.0)
    """
    table = reliability(outcomes, bins=bins)
    return Scores(
        n=len(outcomes),
        err=error_rate(outcomes).item(),
        mnll=mnll(outcomes).item(),
        ece=table.ece(confidence=confidence).item(),
        mce=table.mce(confidence=confidence).item(),
        brier=brier(outcomes).item(),
        confidence=outcomes.confidence.double().mean().item(),
        entropy=outcomes.entropy.double().mean().item(),
    )
