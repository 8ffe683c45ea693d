"""Reliability diagrams (1) and calibration errors (2), as counts per bin that can be added up."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor

from calgp.errors import CalgpError

from ._outcomes import Outcomes, check_choice, check_some, checked_chunks, row_slices

Confidence = Literal["mean", "midpoint"]
Binning = Literal["equal-width", "equal-mass"]
Counts = tuple[Int[Tensor, "G M"], Int[Tensor, "G M"], Float[Tensor, "G M"]]  # examples, correct ones, Σ confidence
FEW = 4096  # confidences that are found among edges sooner than compared with each


@dataclass(frozen=True)
class Reliability:
    """Examples per bin of confidence: the reliability diagram, and all that calibration errors need.

    All fields but `edges` add up over batches and ranks (`Reliability.merge`). With a leading axis of classes
    (`classwise_reliability`) each class has its own row.
    """

    edges: Float[Tensor, "edges"]  # M + 1 of them: bin m is (edges[m], edges[m + 1]]
    count: Int[Tensor, "*Q M"]  # |B_m|
    correct: Int[Tensor, "*Q M"]
    confidence_sum: Float[Tensor, "*Q M"]
    n: int  # predictions altogether; more than the bins hold where a preset loses some

    @property
    def accuracy(self) -> Float[Tensor, "*Q M"]:
        """acc(B_m), Eq. (1); NaN in an empty bin."""
        return self.correct.double() / self.count

    @property
    def confidence(self) -> Float[Tensor, "*Q M"]:
        """Mean confidence in each bin; NaN in an empty one."""
        return self.confidence_sum / self.count

    @property
    def midpoint(self) -> Float[Tensor, "M"]:
        """The middle of each bin."""
        return (self.edges[1:] + self.edges[:-1]) / 2

    def ece(self, *, confidence: Confidence = "mean") -> Float[Tensor, "*Q"]:
        """Expected calibration error, Eq. (2): Σ_m |B_m|/N · |acc(B_m) − conf(B_m)|."""
        return self._excess(confidence).abs().sum(-1) / self.n

    def mce(self, *, confidence: Confidence = "mean") -> Float[Tensor, "*Q"]:
        """Maximum calibration error: max_m |acc(B_m) − conf(B_m)| over the bins that hold something."""
        return (self._excess(confidence).abs() / self.count.clamp(min=1)).amax(-1)

    def _excess(self, confidence: Confidence) -> Float[Tensor, "*Q M"]:
        # |B_m| (conf(B_m) − acc(B_m)), which is 0, not NaN, in an empty bin
        check_choice("confidence", confidence, ("mean", "midpoint"))
        expected = self.confidence_sum if confidence == "mean" else self.count * self.midpoint
        return expected - self.correct

    @staticmethod
    def merge(parts: Iterable["Reliability"]) -> "Reliability":
        """Add up the counts of batches or ranks, which need the same bins."""
        parts = list(parts)
        if not parts:
            raise CalgpError("Invalid parts of a reliability: must be at least one.")
        if not all(torch.equal(part.edges, parts[0].edges) for part in parts):
            raise CalgpError("Invalid parts of a reliability: must have the same bin edges.")
        names = ("count", "correct", "confidence_sum", "n")
        return replace(parts[0], **{name: sum(getattr(part, name) for part in parts) for name in names})


def reliability(outcomes: Outcomes, *, bins: int = 20, binning: Binning = "equal-width") -> Reliability:
    """Accuracy against confidence, Eq. (1), in bins (a, b]; 0 belongs to the first bin, 1 to the last.

    Edges are k/M, rounded to the precision of the confidences: what equals k/M there is in the bin that ends at k/M.
    `binning="equal-mass"` puts the edges at quantiles instead, so that bins hold N/M examples each (equal confidences
    stay together); such bins depend on the data, so join the outcomes, not the bins.

    >>> from calgp.metrics import outcomes
    >>> log_probs = torch.tensor([[0.9, 0.1, 0.0], [0.8, 0.2, 0.0], [0.4, 0.3, 0.3]]).log()
    >>> predicted = outcomes(log_probs, torch.tensor([0, 1, 1]))
    >>> table = reliability(predicted, bins=2)
    >>> table.count, table.accuracy
    (tensor([1, 2]), tensor([0.0000, 0.5000], dtype=torch.float64))
    """
    check_choice("binning", binning, ("equal-width", "equal-mass"))
    _check_bins(bins)
    check_some(outcomes)
    edges = _equal_width(bins)
    if binning == "equal-mass":  # the k-th edge is the ⌈kN/M⌉-th smallest confidence
        ranks = (torch.arange(1, bins) * len(outcomes) + bins - 1) // bins - 1
        edges[1:-1] = outcomes.confidence.sort().values[ranks.to(outcomes.confidence.device)]
    return _tabulate(outcomes, edges.to(outcomes.confidence.device), closed="right", certain="kept")


def ece(
    outcomes: Outcomes, *, bins: int = 20, confidence: Confidence = "mean", binning: Binning = "equal-width"
) -> Float[Tensor, ""]:
    """Expected calibration error, Eq. (2): Σ_m |B_m|/N · |acc(B_m) − conf(B_m)|.

    `confidence="mean"` is the mean confidence in the bin, as in Guo et al. (2017) and in the paper's tables;
    `"midpoint"` is the paper's formula, which is 0.5/M for a perfect and certain classifier.

    >>> from calgp.metrics import outcomes
    >>> log_probs = torch.tensor([[0.9, 0.1, 0.0], [0.8, 0.2, 0.0], [0.4, 0.3, 0.3]]).log()
    >>> predicted = outcomes(log_probs, torch.tensor([0, 1, 1]))
    >>> ece(predicted, bins=2), ece(predicted, bins=2, confidence="midpoint")
    (tensor(0.3667, dtype=torch.float64), tensor(0.2500, dtype=torch.float64))
    """
    return reliability(outcomes, bins=bins, binning=binning).ece(confidence=confidence)


def mce(
    outcomes: Outcomes, *, bins: int = 20, confidence: Confidence = "mean", binning: Binning = "equal-width"
) -> Float[Tensor, ""]:
    """Maximum calibration error: max_m |acc(B_m) − conf(B_m)| over the bins that hold something.

    >>> from calgp.metrics import outcomes
    >>> log_probs = torch.tensor([[0.9, 0.1, 0.0], [0.8, 0.2, 0.0], [0.4, 0.3, 0.3]]).log()
    >>> mce(outcomes(log_probs, torch.tensor([0, 1, 1])), bins=2)
    tensor(0.4000, dtype=torch.float64)
    """
    return reliability(outcomes, bins=bins, binning=binning).mce(confidence=confidence)


def classwise_reliability(log_probs: Float[Tensor, "N Q"], y: Integer[Tensor, "N"], *, bins: int = 20) -> Reliability:
    """The reliability of every class's probability, [Q, M]; batches are joined by `Reliability.merge`.

    >>> classwise_reliability(torch.tensor([[0.9, 0.1]]).log(), torch.tensor([0]), bins=2).count
    tensor([[0, 1],
            [1, 0]])
    """
    _check_bins(bins)
    check_some(log_probs)
    edges = _equal_width(bins).to(log_probs.device)
    count, correct, total = _empty(log_probs.shape[-1], bins, log_probs.device)
    for _, _, p, label in checked_chunks(log_probs.detach(), y):
        hit = torch.zeros_like(p, dtype=torch.bool).scatter_(0, label, True)
        part = _count(p, hit, edges, closed="right", certain="kept")
        count, correct, total = count + part[0], correct + part[1], total + part[2]
    return Reliability(edges, count, correct, total, n=len(log_probs))


def classwise_ece(log_probs: Float[Tensor, "N Q"], y: Integer[Tensor, "N"], *, bins: int = 20) -> Float[Tensor, ""]:
    """Mean over the classes of the calibration error of each class's probability (static calibration error).

    From batches: `Reliability.merge(classwise_reliability(…) for …).ece().mean()`.

    >>> classwise_ece(torch.tensor([[0.9, 0.1], [0.6, 0.4]]).log(), torch.tensor([0, 0]))
    tensor(0.2500, dtype=torch.float64)
    """
    return classwise_reliability(log_probs, y, bins=bins).ece().mean()


@dataclass(frozen=True)
class EcePreset:
    """One of the definitions of ECE in use, in full."""

    bins: int
    confidence: Confidence
    closed: Literal["right", "left"]  # (a, b] or [a, b)
    certain: Literal["kept", "apart", "lost"]  # p = 1: in the last bin, in a bin of its own, in none but counted in N
    edges: Literal["k/M", "linspace"]  # correctly rounded, or by torch.linspace in float32, where confidences follow


ECE_PRESETS = {
    # The formula of Tran et al. (2018), the paper; the text does not name M, their code has 20.
    "paper": EcePreset(bins=20, confidence="midpoint", closed="right", certain="kept", edges="k/M"),
    "authors": EcePreset(bins=20, confidence="mean", closed="left", certain="lost", edges="k/M"),
    "guo": EcePreset(bins=15, confidence="mean", closed="right", certain="kept", edges="linspace"),
    "torchmetrics": EcePreset(bins=15, confidence="mean", closed="left", certain="apart", edges="linspace"),
    "netcal": EcePreset(bins=10, confidence="mean", closed="left", certain="kept", edges="k/M"),
}


def preset_ece(outcomes: Outcomes, preset: EcePreset) -> Float[Tensor, ""]:
    """ECE as somebody else defines it, so that published numbers can be compared.

    >>> from calgp.metrics import outcomes
    >>> wrong = outcomes(torch.tensor([[1.0, 0.0], [0.5, 0.5]]).log(), torch.tensor([1, 1]))
    >>> preset_ece(wrong, ECE_PRESETS["guo"]), preset_ece(wrong, ECE_PRESETS["authors"])
    (tensor(0.7500, dtype=torch.float64), tensor(0.2500, dtype=torch.float64))
    """
    check_some(outcomes)
    outcomes, edges = _binned_by(preset, outcomes)
    table = _tabulate(outcomes, edges, closed=preset.closed, certain=preset.certain)
    return table.ece(confidence=preset.confidence)


def bin_excess(outcomes: Outcomes, preset: EcePreset, dtype: torch.dtype | None = None) -> Float[Tensor, "N M"]:
    """Confidence − correctness of each image, in the column of its bin: ECE as a sum over images.

    `preset_ece` is Σ_m |Σ_i excess_im| / N, so resamples of the images only need weighted sums of these rows. They have
    the precision of the confidences unless `dtype` names another; bins are those of the confidences as they are.

    >>> from calgp.metrics import outcomes
    >>> predicted = outcomes(torch.tensor([[0.75, 0.25], [0.5, 0.5]]).log(), torch.tensor([1, 0]))
    >>> bin_excess(predicted, EcePreset(2, "mean", "right", "kept", "k/M"))
    tensor([[ 0.0000,  0.7500],
            [-0.5000,  0.0000]])
    """
    outcomes, edges = _binned_by(preset, outcomes)
    inner = (edges[1:-1] if preset.certain == "kept" else edges[1:]).to(outcomes.confidence.dtype)
    cell = _cells(outcomes.confidence[None], inner, preset.closed)[0]
    middle = ((cell + 0.5) / preset.bins).clamp(max=1).to(outcomes.confidence)
    expected = (outcomes.confidence if preset.confidence == "mean" else middle).to(dtype or middle.dtype)
    excess = expected.new_zeros(len(outcomes), len(inner) + 1)
    excess.scatter_(1, cell[:, None], (expected - outcomes.correct.to(expected))[:, None])
    return excess[:, :-1] if preset.certain == "lost" else excess


def _binned_by(preset: EcePreset, outcomes: Outcomes) -> tuple[Outcomes, Float[Tensor, "edges"]]:
    edges = _equal_width(preset.bins)
    if preset.edges == "linspace":
        edges = torch.linspace(0, 1, preset.bins + 1, dtype=torch.float32).double()
        outcomes = replace(outcomes, confidence=outcomes.confidence.float())
    return outcomes, edges.to(outcomes.confidence.device)


def _tabulate(outcomes: Outcomes, edges: Float[Tensor, "edges"], *, closed: str, certain: str) -> Reliability:
    cells = len(edges) - (1 if certain == "kept" else 0)
    count, correct, total = _empty(1, cells, edges.device)
    for rows in row_slices(outcomes.confidence):
        confidence, hit = outcomes.confidence[None, rows], outcomes.correct[None, rows]
        part = _count(confidence, hit, edges, closed=closed, certain=certain)
        count, correct, total = count + part[0], correct + part[1], total + part[2]
    keep = cells - 1 if certain == "lost" else cells
    if certain == "apart":
        edges = torch.cat([edges, edges[-1:]])
    return Reliability(edges, count[0, :keep], correct[0, :keep], total[0, :keep], n=len(outcomes))


def _count(
    confidence: Float[Tensor, "G n"],
    hit: Bool[Tensor, "G n"],
    edges: Float[Tensor, "edges"],
    *,
    closed: str,
    certain: str,
) -> Counts:
    inner = (edges[1:-1] if certain == "kept" else edges[1:]).to(confidence.dtype)
    groups, cells = len(confidence), len(inner) + 1
    cell = _cells(confidence, inner, closed)
    cell += cells * torch.arange(groups, device=cell.device)[:, None]
    key = cell.mul_(2).add_(hit).flatten()  # (group, bin, correct?) as one number: two passes give all three counts
    count = torch.bincount(key, minlength=2 * groups * cells).reshape(groups, cells, 2)
    total = torch.zeros(2 * groups * cells, dtype=torch.float64, device=key.device)
    total.scatter_add_(0, key, confidence.flatten().double())
    return count.sum(-1), count[..., 1], total.reshape(groups, cells, 2).sum(-1)


def _cells(confidence: Float[Tensor, "G n"], inner: Float[Tensor, "edges"], closed: str) -> Int[Tensor, "G n"]:
    """In which bin a confidence falls: how many edges lie below it.

    A few comparisons beat a search among the edges, unless there are few confidences.
    """
    if len(inner) > 32 or confidence.numel() < FEW:
        return torch.bucketize(confidence.contiguous(), inner, right=closed == "left")
    below = torch.ge if closed == "left" else torch.gt
    cell = torch.zeros_like(confidence, dtype=torch.uint8)
    for edge in inner:
        cell += below(confidence, edge)
    return cell.long()


def _empty(groups: int, cells: int, device: torch.device) -> Counts:
    count = torch.zeros(groups, cells, dtype=torch.long, device=device)
    return count, count, count.double()


def _equal_width(bins: int) -> Float[Tensor, "edges"]:
    return torch.arange(bins + 1, dtype=torch.float64) / bins


def _check_bins(bins: int) -> None:
    if bins < 1:
        raise CalgpError(f"Invalid {bins=}: must be at least 1, such as 20.")
