"""Which classes to keep: sets that hold the true class at least so often, by split conformal prediction."""

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from calgp.errors import CalgpError
from calgp.posthoc.checks import STRICT, check_choice, check_labels, check_share, normalised

KINDS = {  # name: in one line
    "lac": "the classes of probability at least 1 − t: the smallest sets on average",
    "aps": "the most probable classes up to a sum t, the last one by a keyed draw: adapts to the image",
    "aps-plain": "the same without the draw: never empty, and covers more than was asked for",
}


@dataclass(frozen=True)
class PredictionSets:
    """Sets of classes that hold the true one with probability `coverage` or more: split conformal prediction.

    A class y is in the set of x if its conformity score is at most the threshold. With s of the hold-out (x_i, y_i),
    t is the ⌈(n + 1) coverage⌉-th smallest of s(x_i, y_i) (Vovk et al. 2005, Lei et al. 2018), and the promise holds on
    average over hold-outs and images, for any model and any distribution, as long as all are exchangeable.

    lac: s = 1 − p_y (Sadinle, Lei & Wasserman 2019).
    aps: s = Σ_{k before y} p_k + u p_y, classes in falling order of probability, u uniform on [0, 1) (Romano, Sesia &
        Candès 2020). aps-plain: u = 0, so that the most probable class has s = 0 and is in every set; the many equal
        scores make it conservative.

    thresholds: one, or with `by_class` one for each class, of the held-out images of that class alone (Mondrian): then
        each class has its promise. empty: whether sets may be empty; if not, an empty one gets the most probable class,
        by which coverage can only rise, above what was asked for.
    """

    __pydantic_config__ = STRICT
    kind: str
    coverage: float
    by_class: bool
    empty: bool
    thresholds: tuple[float, ...]
    n: int  # held-out images
    classes: int

    def __post_init__(self) -> None:
        check_choice("sets", self.kind, KINDS)
        check_share("coverage", self.coverage)
        if len(self.thresholds) != (self.classes if self.by_class else 1):
            raise ValueError(f"{len(self.thresholds)} thresholds for {self.classes} classes")
        if not all(math.isfinite(threshold) for threshold in self.thresholds):
            raise ValueError("thresholds must be finite")

    @classmethod
    def fit(
        cls,
        log_probs: Tensor,
        y: Tensor,
        *,
        coverage: float,
        kind: str = "aps",
        by_class: bool = False,
        empty: bool = False,
        uniform: Tensor | None = None,
    ) -> "PredictionSets":
        """The sets of held-out log-probabilities [N, Q] and labels [N]; `uniform` [N] is for `aps` (`keyed_uniform`).

        Refused where n < coverage / (1 − coverage): even the largest score would promise too little.
        """
        check_share("coverage", coverage)
        s = conformity(log_probs, kind, uniform)
        n, classes = log_probs.shape
        if y.shape != (n,):
            raise CalgpError(f"Invalid labels of {list(y.shape)}: must be [{n}], one for each row.")
        check_labels(y, classes)
        mine = s.gather(1, y[:, None].long()).squeeze(1)
        groups = {f"of class {q} (counted from 0)": mine[y == q] for q in range(classes)} if by_class else {"": mine}
        thresholds = tuple(conformal_quantile(group, coverage, which) for which, group in groups.items())
        return cls(kind, coverage, by_class, empty, thresholds, len(y), classes)

    def apply(self, log_probs: Tensor, uniform: Tensor | None = None) -> Tensor:
        """Which classes are in the sets (bool [N, Q])."""
        if log_probs.dim() != 2 or log_probs.shape[1] != self.classes:
            raise CalgpError(f"Invalid log-probabilities of {list(log_probs.shape)}: must be [N, {self.classes}].")
        s = conformity(log_probs, self.kind, uniform)
        sets = s <= s.new_tensor(self.thresholds)
        if self.empty:
            return sets
        top = torch.zeros_like(sets).scatter_(1, log_probs.argmax(1, keepdim=True), True)
        return sets | (top & ~sets.any(1, keepdim=True))


def conformity(log_probs: Tensor, kind: str, uniform: Tensor | None = None) -> Tensor:
    """The score of every class [N, Q]: the less, the better it fits. See `PredictionSets`."""
    check_choice("sets", kind, KINDS)
    if log_probs.dim() != 2 or min(log_probs.shape) < 1:
        raise CalgpError(f"Sets are found for log-probabilities [N, Q], not for {list(log_probs.shape)}.")
    log_p = normalised(log_probs)
    if kind == "lac":
        return -log_p.expm1()
    if kind == "aps" and (uniform is None or uniform.shape != log_p.shape[:1]):
        raise CalgpError(f"aps needs a uniform number for each of the {len(log_p)} rows, as keyed_uniform gives.")
    u = torch.zeros_like(log_p[:, :1]) if kind != "aps" or uniform is None else uniform.to(log_p)[:, None]
    sorted_p, order = log_p.exp().sort(dim=1, descending=True, stable=True)
    before = sorted_p.cumsum(1) - sorted_p
    return torch.empty_like(log_p).scatter_(1, order, before + u * sorted_p)


def conformal_quantile(scores: Tensor, coverage: float, which: str = "") -> float:
    """The ⌈(n + 1) coverage⌉-th smallest score; of continuous ones, what it covers is Beta(k, n + 1 − k).

    >>> conformal_quantile(torch.arange(1.0, 20.0), 0.9)
    18.0
    """
    n = len(scores)
    k = math.ceil((n + 1) * coverage - 1e-9)  # 0.9 · 20 = 18.000000000000004 is 18
    if k > n:
        least = math.ceil(coverage / (1 - coverage) - 1e-9)
        raise CalgpError(
            f"A coverage of {coverage:g} needs at least {least:,} held-out images{which and ' '}{which}; there are "
            f"{n:,}. Hold out more, or ask for less."
        )
    return scores.double().kthvalue(k).values.item()


def keyed_uniform(x: Tensor, seed: int = 0) -> Tensor:
    """A number in [0, 1) for each row of x, drawn by its bytes: the same image has the same one, wherever it stands.

    The first 53 of the 64 bits that BLAKE2b gives for the row's bytes, keyed by the seed (8 bytes, little-endian).

    >>> images = torch.zeros(2, 1, 2, 2, dtype=torch.uint8)
    >>> first, second = keyed_uniform(images)
    >>> bool(first == second)
    True
    """
    rows = x.detach().cpu().contiguous().flatten(1).view(torch.uint8).numpy()
    key = seed.to_bytes(8, "little")
    words = [int.from_bytes(hashlib.blake2b(row.tobytes(), digest_size=8, key=key).digest(), "little") for row in rows]
    return torch.tensor([(word >> 11) / 2**53 for word in words], dtype=torch.float64)
