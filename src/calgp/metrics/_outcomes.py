"""Each prediction reduced to a few numbers, chunk by chunk, and the means of those numbers."""

from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor

from calgp.errors import CalgpError

# Probabilities held at a time: a few such temporaries stay inside a CPU's cache; a GPU wants fewer, larger launches.
CPU_CHUNK, GPU_CHUNK = 1 << 17, 1 << 24


@dataclass(frozen=True)
class Outcomes:
    """What the metrics need to know of N predictions: columns that any number of batches or ranks can join.

    Columns have the dtype of the predictions (float32 for half precision) and stay on their device.
    """

    confidence: Float[Tensor, "N"]  # p = max_k g_k(x)
    correct: Bool[Tensor, "N"]  # argmax_k g_k(x) = y; among equal maxima the first counts
    label_log_prob: Float[Tensor, "N"]  # log g_y(x)
    brier: Float[Tensor, "N"]  # Σ_k (y_k − g_k(x))²
    entropy: Float[Tensor, "N"]  # −Σ_k g_k(x) log g_k(x)
    classes: int  # Q

    def __len__(self) -> int:
        return len(self.confidence)

    def take(self, index: Int[Tensor, "M"]) -> "Outcomes":
        """The outcomes at `index`, which may repeat (bootstrap) or leave out (subsets)."""
        return replace(self, **{name: getattr(self, name)[index] for name in _COLUMNS})

    @staticmethod
    def cat(parts: Iterable["Outcomes"]) -> "Outcomes":
        """Join batches or ranks; the result is the same as that of all predictions at once.

        >>> log_probs, y = torch.tensor([[0.9, 0.1], [0.6, 0.4]]).log(), torch.tensor([0, 1])
        >>> len(Outcomes.cat([outcomes(log_probs, y), outcomes(log_probs[:1], y[:1])]))
        3
        """
        parts = list(parts)
        classes = {part.classes for part in parts}
        if len(classes) != 1:
            raise CalgpError(
                f"Invalid outcomes of {sorted(classes) or 'no'} classes: must be of one number of classes."
            )
        columns = {name: torch.cat([getattr(part, name) for part in parts]) for name in _COLUMNS}
        return Outcomes(**columns, classes=classes.pop())


_COLUMNS = tuple(field.name for field in fields(Outcomes) if field.name != "classes")


def outcomes(log_probs: Float[Tensor, "N Q"], y: Integer[Tensor, "N"]) -> Outcomes:
    """Reduce log-probabilities and labels to columns, in rows at a time, so that temporaries stay small.

    Raises `CalgpError` when labels are out of range or rows do not sum to one: logits and probabilities are not
    log-probabilities. `log_softmax` is finite, and so is the MNLL. A probability of zero (−∞) is accepted, too; as the
    label's it makes the MNLL infinite.

    >>> outcomes(torch.tensor([[0.8, 0.2]]).log(), torch.tensor([0])).brier
    tensor([0.0800])
    """
    log_probs = log_probs.detach()
    columns = torch.empty(4, len(log_probs), dtype=_working_dtype(log_probs), device=log_probs.device)
    correct = torch.empty(len(log_probs), dtype=torch.bool, device=log_probs.device)
    for rows, log_p, p, label in checked_chunks(log_probs, y):
        label_log_prob = log_probs[rows].t().gather(0, label).to(log_p.dtype)  # [1, n]
        columns[1, rows] = label_log_prob
        columns[3, rows] = _entropy(log_p, p)
        # Σ_k (y_k − g_k)²; g_y − 1 as expm1(log g_y), as a subtraction would lose the digits of certain predictions
        columns[2, rows] = p.scatter_(0, label, label_log_prob.expm1()).square_().sum(0)
        columns[0, rows], correct[rows] = _confidence(log_p, label, label_log_prob)
    return Outcomes(columns[0], correct, columns[1], columns[2], columns[3], classes=log_probs.shape[1])


def error_rate(outcomes: Outcomes) -> Float[Tensor, ""]:
    """Share of wrong predictions, ERR.

    >>> log_probs = torch.tensor([[0.9, 0.1], [0.6, 0.4]]).log()
    >>> error_rate(outcomes(log_probs, torch.tensor([0, 1])))
    tensor(0.5000, dtype=torch.float64)
    """
    return _mean(~outcomes.correct)


def mnll(outcomes: Outcomes) -> Float[Tensor, ""]:
    """Mean negative log-likelihood of the labels, −mean log g_y(x), in nats.

    >>> mnll(outcomes(torch.tensor([[0.5, 0.5]]).log(), torch.tensor([1])))
    tensor(0.6931, dtype=torch.float64)
    """
    return 0 - _mean(outcomes.label_log_prob)


def brier(outcomes: Outcomes, *, classes: Literal["sum", "mean"] = "sum") -> Float[Tensor, ""]:
    """Squared distance between labels and probabilities, Eq. (3).

    `classes="sum"` leaves out the factor 1/Q, as the paper's tables do (range 0 to 2); `"mean"` is the paper's formula.

    >>> predicted = outcomes(torch.tensor([[0.8, 0.2]]).log(), torch.tensor([0]))
    >>> brier(predicted), brier(predicted, classes="mean")
    (tensor(0.0800, dtype=torch.float64), tensor(0.0400, dtype=torch.float64))
    """
    check_choice("classes", classes, ("sum", "mean"))
    total = _mean(outcomes.brier)
    return total if classes == "sum" else total / outcomes.classes


def entropy(log_probs: Float[Tensor, "... Q"]) -> Float[Tensor, "..."]:
    """Entropy of each prediction, −Σ_k g_k log g_k, in nats; 0 log 0 = 0.

    >>> entropy(torch.tensor([[0.5, 0.5], [1.0, 0.0]]).log())
    tensor([0.6931, 0.0000])
    """
    dtype = _working_dtype(log_probs)
    rows = log_probs.reshape(-1, log_probs.shape[-1])
    result = torch.empty(len(rows), dtype=dtype, device=rows.device)
    for part in row_slices(rows):
        log_p = _columns(rows[part], dtype)
        result[part] = _entropy(log_p, log_p.exp())
    return result.reshape(log_probs.shape[:-1])


def checked_chunks(
    log_probs: Float[Tensor, "N Q"], y: Integer[Tensor, "N"]
) -> Iterator[tuple[slice, Float[Tensor, "Q n"], Float[Tensor, "Q n"], Int[Tensor, "1 n"]]]:
    """Rows, log-probabilities, probabilities and labels, some at a time and checked; the caller may overwrite them.

    Classes come first: sums over a few classes are then sums of long vectors. −∞ has become the least finite number,
    as 0 log 0 = 0 is not 0 · −∞.
    """
    _check_shapes(log_probs, y)
    dtype = _working_dtype(log_probs)
    tolerance = max(1e-3, 4 * torch.finfo(log_probs.dtype).eps)  # half precision cannot do better than its own steps
    for rows in row_slices(log_probs):
        log_p = _columns(log_probs[rows], dtype)
        p = log_p.exp()
        off = (p.sum(0) - 1).abs().amax()
        if not off <= tolerance:  # also when it is NaN
            raise CalgpError(_not_normalised(log_p, p, rows.start, tolerance))
        yield rows, log_p, p, y[rows].to(log_p.device, torch.long)[None]


def row_slices(values: Tensor) -> Iterator[slice]:
    """Rows in parts of bounded size."""
    size = CPU_CHUNK if values.device.type == "cpu" else GPU_CHUNK
    step = max(1, size * len(values) // max(1, values.numel()))
    return (slice(start, start + step) for start in range(0, len(values), step))


def check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    """Refuse a misspelt variant rather than fall back to another one."""
    choices = tuple(choices)
    if value not in choices:
        raise CalgpError(f"Invalid {name}={value!r}: must be one of {', '.join(map(repr, choices))}.")


def check_some(rows: Sized) -> None:
    """Refuse to average over nothing."""
    if not len(rows):
        raise CalgpError("Invalid predictions: must be at least one.")


def _working_dtype(log_probs: Tensor) -> torch.dtype:
    return torch.promote_types(log_probs.dtype, torch.float32)


def _columns(log_probs: Float[Tensor, "n Q"], dtype: torch.dtype) -> Float[Tensor, "Q n"]:
    # A transposed copy; with many classes a view of rows is as fast as one of columns, and transposing is not free.
    n, classes = log_probs.shape
    shape = (classes, n) if classes < 64 else (n, classes)
    copy = torch.empty(shape, dtype=dtype, device=log_probs.device)
    copy = copy if classes < 64 else copy.t()
    return copy.copy_(log_probs.t()).clamp_(min=torch.finfo(dtype).min)


def _confidence(
    log_p: Float[Tensor, "Q n"], label: Int[Tensor, "1 n"], label_log_prob: Float[Tensor, "1 n"]
) -> tuple[Float[Tensor, "n"], Bool[Tensor, "n"]]:
    # The label against the best of the others: much faster than an argmax, which is left to settle ties.
    others = log_p.scatter_(0, label, -torch.inf).amax(0)
    mine = label_log_prob[0]
    correct, tie = mine > others, mine == others
    if tie.any():
        correct[tie] = log_p.scatter_(0, label, label_log_prob)[:, tie].argmax(0) == label[0, tie]
    return torch.maximum(mine, others).exp().clamp(max=1), correct


def _entropy(log_p: Float[Tensor, "Q n"], p: Float[Tensor, "Q n"]) -> Float[Tensor, "n"]:
    return 0 - (p * log_p).sum(0)  # not −x, which makes −0 of 0


def _mean(column: Tensor) -> Float[Tensor, ""]:
    check_some(column)
    return column.mean(dtype=torch.float64)


def _check_shapes(log_probs: Tensor, y: Tensor) -> None:
    if log_probs.ndim != 2 or log_probs.shape[1] < 2 or not log_probs.is_floating_point():
        raise CalgpError(
            f"Invalid log_probs of {log_probs.dtype} {list(log_probs.shape)}: must be floating point numbers [N, Q], "
            "Q ≥ 2 classes."
        )
    if y.shape != log_probs.shape[:1] or y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise CalgpError(
            f"Invalid labels of {y.dtype} {list(y.shape)}: must be integers [{len(log_probs)}], one for each row of "
            "log_probs; one-hot labels become integers by argmax(-1)."
        )
    low, high = (int(bound) for bound in y.aminmax()) if len(y) else (0, 0)
    if low < 0 or high >= log_probs.shape[1]:
        raise CalgpError(
            f"Invalid labels from {low} to {high}: must be from 0 to {log_probs.shape[1] - 1}, as log_probs has "
            f"{log_probs.shape[1]} columns."
        )


def _not_normalised(log_p: Float[Tensor, "Q n"], p: Float[Tensor, "Q n"], start: int, tolerance: float) -> str:
    total = p.sum(0)
    row = int((~((total - 1).abs() <= tolerance)).nonzero()[0])
    values = log_p[:, row]
    probabilities = bool((values >= 0).all() and (values.sum() - 1).abs() <= tolerance)
    advice = (
        "these are probabilities: pass probs.log()" if probabilities else "if these are logits, pass log_softmax(-1)"
    )
    return (
        f"Invalid log_probs with the sum {total[row].item():.6g} in row {start + row}: exponentials must sum to 1 "
        f"(± {tolerance:.1g}); {advice}."
    )
