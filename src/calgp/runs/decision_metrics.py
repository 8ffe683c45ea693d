"""What decisions say of predictions, and how well they keep their promises on images with known classes."""

from collections.abc import Mapping

import torch
from torch import Tensor

from calgp.posthoc.decisions import SCORES, Decisions, clopper_pearson, keyed_uniform, risk_coverage, uncertainty
from calgp.runs.results import DecisionMetrics, FittedDecisions, SelectionMetrics, Selective, SetMetrics, SetsByClass


def decide_on(decisions: Decisions, columns: Mapping[str, Tensor], log_probs: Tensor, x: Tensor) -> dict[str, Tensor]:
    """Of each image: whether the run abstains (`abstained` [N]), and its set (`sets` [N, Q]), as far as there are any.

    `columns` are those of `columns_of`; `x` are the images as bytes, which key the draws of randomised sets.
    """
    return decide_by(decisions, columns, log_probs, keyed_uniform(x) if decisions.sets is not None else log_probs)


def decide_by(
    decisions: Decisions, columns: Mapping[str, Tensor], log_probs: Tensor, uniform: Tensor
) -> dict[str, Tensor]:
    """`decide_on` with the numbers of randomised sets themselves [N]."""
    if decisions.power != 1:
        log_probs = (decisions.power * log_probs).log_softmax(-1)
        confidence, entropy = log_probs.amax(-1).exp(), torch.special.entr(log_probs.exp()).sum(-1)
        columns = {**columns, "confidence": confidence, "entropy": entropy}
    found = {}
    if decisions.selection is not None:
        found["abstained"] = decisions.selection.abstains(uncertainty(columns, decisions.selection.score))
    if decisions.sets is not None:
        found["sets"] = decisions.sets.apply(log_probs, uniform)
    return found


def add_outcomes(found: dict[str, Tensor], y: Tensor, *, outside: bool) -> dict[str, Tensor]:
    """The same with the size of each set and, of the run's own classes, whether it holds the true one."""
    if "sets" not in found:
        return found
    found = found | {"set_size": found["sets"].sum(1)}
    return found if outside else found | {"covered": found["sets"].gather(1, y[:, None]).squeeze(1)}


def selective_scores(columns: Mapping[str, Tensor]) -> dict[str, Selective]:
    """AURC and E-AURC by each score of uncertainty, of images of the run's own classes."""
    curves = {name: risk_coverage(uncertainty(columns, name), columns["label"] != columns["y"]) for name in SCORES}
    return {name: Selective(curve.aurc, curve.excess) for name, curve in curves.items()}


def decision_metrics(
    fitted: FittedDecisions, columns: Mapping[str, Tensor], classes: int, *, outside: bool
) -> DecisionMetrics:
    """What decisions do on images; of the run's own classes, also how often they are right."""
    return DecisionMetrics(
        fitted,
        None if fitted.selection is None else _selection_metrics(columns, outside),
        None if fitted.sets is None else _set_metrics(columns, classes, outside),
    )


def _selection_metrics(columns: Mapping[str, Tensor], outside: bool) -> SelectionMetrics:
    answered = ~columns["abstained"]
    n = int(answered.sum())
    if outside:
        return SelectionMetrics(n, n / len(answered))
    wrong = int((columns["label"] != columns["y"])[answered].sum())
    error, interval = (wrong / n, clopper_pearson(wrong, n)) if n else (None, None)
    return SelectionMetrics(n, n / len(answered), wrong, error, interval)


def _set_metrics(columns: Mapping[str, Tensor], classes: int, outside: bool) -> SetMetrics:
    sizes, y = columns["set_size"], columns["y"]
    mean, counts = sizes.double().mean().item(), tuple(torch.bincount(sizes, minlength=classes + 1).tolist())
    if outside:
        return SetMetrics(mean, counts)
    covered, groups = columns["covered"], [y == q for q in range(classes)]
    k, n = int(covered.sum()), len(covered)
    by_class = SetsByClass(
        tuple(int(group.sum()) for group in groups),
        tuple(_mean(covered[group]) for group in groups),
        tuple(_mean(sizes[group]) for group in groups),
    )
    return SetMetrics(mean, counts, k / n, clopper_pearson(k, n), by_class)


def _mean(values: Tensor) -> float | None:
    return values.double().mean().item() if len(values) else None
