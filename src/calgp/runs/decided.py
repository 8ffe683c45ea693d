"""What a run's decisions make of predictions, and how well they keep their promises on images with known classes."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from calgp.decisions import SCORES, Decisions, clopper_pearson, doubt, keyed_uniform, risk_coverage


def decided(decisions: Decisions, columns: Mapping[str, Tensor], log_probs: Tensor, x: Tensor) -> dict[str, Tensor]:
    """Of each image: whether the run abstains (`abstained` [N]), and its set (`sets` [N, Q]); what there is of them.

    `columns` are those of `columns_of`; `x` are the pictures as bytes, which key the draws of randomised sets.
    """
    found = {}
    if decisions.selection is not None:
        found["abstained"] = decisions.selection.abstains(doubt(columns, decisions.selection.score))
    if decisions.sets is not None:
        found["sets"] = decisions.sets.apply(log_probs, keyed_uniform(x))
    return found


def with_outcomes(found: dict[str, Tensor], y: Tensor, *, outside: bool) -> dict[str, Tensor]:
    """The same with the size of each set and, of the run's own classes, whether it holds the true one."""
    if "sets" not in found:
        return found
    found = found | {"set_size": found["sets"].sum(1)}
    return found if outside else found | {"covered": found["sets"].gather(1, y[:, None]).squeeze(1)}


def selective_scores(columns: Mapping[str, Tensor]) -> dict[str, dict[str, float]]:
    """AURC and E-AURC by each score of doubt, of images of the run's own classes."""
    curves = {name: risk_coverage(doubt(columns, name), columns["label"] != columns["y"]) for name in SCORES}
    return {name: {"aurc": curve.aurc, "excess": curve.excess} for name, curve in curves.items()}


def kept_promises(
    decisions: Decisions, columns: Mapping[str, Tensor], classes: int, *, outside: bool
) -> dict[str, dict[str, Any] | None]:
    """What decisions do on images; of the run's own classes, also how often they are right."""
    return {
        "selection": None if decisions.selection is None else _selected(columns, outside),
        "sets": None if decisions.sets is None else _sized(columns, classes, outside),
    }


def _selected(columns: Mapping[str, Tensor], outside: bool) -> dict[str, Any]:
    answered = ~columns["abstained"]
    n = int(answered.sum())
    found: dict[str, Any] = {"answered": n, "share": n / len(answered)}
    if outside:
        return found
    wrong = int((columns["label"] != columns["y"])[answered].sum())
    return found | {
        "wrong": wrong,
        "error": wrong / n if n else None,
        "interval": list(clopper_pearson(wrong, n)) if n else None,
    }


def _sized(columns: Mapping[str, Tensor], classes: int, outside: bool) -> dict[str, Any]:
    sizes, y = columns["set_size"], columns["y"]
    found: dict[str, Any] = {
        "mean_size": sizes.double().mean().item(),
        "sizes": torch.bincount(sizes, minlength=classes + 1).tolist(),  # images with sets of 0, 1, … Q classes
    }
    if outside:
        return found
    covered = columns["covered"]
    k, n = int(covered.sum()), len(covered)
    groups = [y == q for q in range(classes)]
    return found | {
        "covered": k / n,
        "interval": list(clopper_pearson(k, n)),
        "by_class": {
            "n": [int(group.sum()) for group in groups],
            "covered": [_mean(covered[group]) for group in groups],
            "size": [_mean(sizes[group]) for group in groups],
        },
    }


def _mean(values: Tensor) -> float | None:
    return values.double().mean().item() if len(values) else None
