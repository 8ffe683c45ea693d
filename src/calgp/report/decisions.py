"""Figures of when to answer and which classes to keep; the words are in templates/parts.html."""

from collections.abc import Mapping

import torch
from torch import Tensor

from calgp.posthoc.decisions import SCORES, risk_coverage, uncertainty
from calgp.runs.results import DecisionMetrics

from . import figures
from .metric_names import RANKED_BY

POINTS = 200  # of a curve: more cannot be seen
SHOWN = 20  # classes in a figure; beyond, a table of numbers says more


def risk_figure(columns: Mapping[str, Tensor], decisions: DecisionMetrics | None) -> str:
    """Risk and coverage by each score of uncertainty, with the target and threshold of the run, if it has them."""
    wrong = columns["label"] != columns["y"]
    now = decisions and decisions.selection
    made = decisions.made.selection if decisions and now else None
    curves = [
        _curve(RANKED_BY[name], uncertainty(columns, name), wrong)
        for name in SCORES
        if name == "confidence" or uncertainty(columns, name).unique().numel() > 1  # a point network has no information
    ]
    return figures.risk_coverage(
        curves,
        best=_curve("best", wrong.double(), wrong),
        target=made and made.error,
        chosen=(now.share, now.error) if now and now.error is not None else None,
    )


def _curve(name: str, scores: Tensor, wrong: Tensor) -> figures.Curve:
    curve = risk_coverage(scores, wrong)
    places = torch.linspace(0, len(wrong) - 1, min(POINTS, len(wrong))).round().long()
    return figures.Curve(name, curve.coverage[places].tolist(), curve.risk[places].tolist(), curve.aurc)


def sets_figure(decisions: DecisionMetrics | None, classes: tuple[str, ...]) -> str | None:
    """Coverage and size of prediction sets by class; None without sets, and where the classes are too many."""
    if decisions is None or decisions.made.sets is None or decisions.sets is None or decisions.sets.by_class is None:
        return None
    each = decisions.sets.by_class
    columns = zip(classes, each.covered, each.n, each.size, strict=True)
    rows = [(name, covered or 0.0, n, size or 0.0) for name, covered, n, size in columns if n]
    if not 0 < len(rows) <= SHOWN:
        return None
    return figures.set_coverage(*zip(*rows, strict=True), target=decisions.made.sets.coverage)
