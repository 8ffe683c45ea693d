"""What a report says of when to answer and which classes to keep."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from calgp.posthoc.decisions import SCORES, Selection, risk_coverage, uncertainty
from calgp.runs.results import DecisionMetrics, Evaluation, SelectionMetrics

from . import figures
from .words import count, interval, nats, percent

POINTS = 200  # of a curve: more cannot be seen
SCORED_BY = {"confidence": "confidence", "entropy": "entropy", "mutual-information": "mutual information"}
MADE = {
    "lac": "LAC: the classes whose probability is high enough",
    "aps": "APS: the most probable classes up to a sum, the last one by a draw that each image keeps",
    "aps-plain": "APS without a draw: the most probable classes up to a sum",
}
SHOWN = 20  # classes in a figure; beyond, a table of numbers says more


@dataclass(frozen=True)
class SelectionSection:
    """Where the run answers, and how often that is wrong."""

    sentence: str
    rows: list[tuple[str, str]]
    warning: str | None


@dataclass(frozen=True)
class SetsSection:
    """How large prediction sets are, and how often they hold the true class."""

    sentence: str
    kind: str
    n: str
    empty: str
    sizes: list[tuple[int, str, str]]
    rows: list[tuple[str, str, str, str]]
    figure: str | None


@dataclass(frozen=True)
class DecisionSection:
    """Decisions on images of the run's own classes."""

    figure: str | None
    areas: list[tuple[str, str, str]]
    selection: SelectionSection | None
    sets: SetsSection | None
    note: str | None


def decision_section(
    found: Evaluation, columns: Mapping[str, Tensor] | None, classes: tuple[str, ...]
) -> DecisionSection | None:
    """Decisions on images of the run's own classes; None where nothing is known of them."""
    decisions = found.decisions
    if columns is None and decisions is None:
        return None
    return DecisionSection(
        figure=None if columns is None else _curves(columns, decisions),
        areas=[
            (SCORED_BY[name], f"{areas.aurc:.3g}", f"{areas.excess:.3g}") for name, areas in found.selective.items()
        ],
        selection=decisions and _selection(decisions, found),
        sets=decisions and _sets(decisions, found, classes),
        note=decisions and _note(decisions, found),
    )


def outside_sentence(found: Evaluation) -> str | None:
    """One sentence of decisions on images of other classes."""
    decisions = found.decisions
    if decisions is None:
        return None
    parts = []
    if decisions.selection is not None:
        parts.append(f"It answers {percent(decisions.selection.share)} of them and abstains from the others.")
    if decisions.sets is not None:
        size = nats(decisions.sets.mean_size)
        parts.append(f"Its sets hold {size} classes on average, though none of them is right.")
    return " ".join(parts)


def _curves(columns: Mapping[str, Tensor], decisions: DecisionMetrics | None) -> str:
    wrong = columns["label"] != columns["y"]
    now = decisions and decisions.selection
    made = decisions.made.selection if decisions and now else None
    curves = [
        _curve(SCORED_BY[name], uncertainty(columns, name), wrong)
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


def _selection(decisions: DecisionMetrics, found: Evaluation) -> SelectionSection | None:
    made, now = decisions.made.selection, decisions.selection
    if made is None or now is None:
        return None
    error = "–" if now.error is None else f"{percent(now.error)} ({interval(now.interval, percent)})"
    return SelectionSection(
        sentence=_sentence(made, now, found.n),
        rows=[
            ("it answers", made.rule),
            ("promise", _promise(made)),
            ("hold-out", f"{count(made.n, 'image')}, {made.answered:,} answered, {made.wrong:,} wrong"),
            ("answered here", f"{percent(now.share)} of {count(found.n, 'image')}"),
            ("wrong, of these", error),
        ],
        warning=made.warning,
    )


def _sentence(made: Selection, now: SelectionMetrics, n: int) -> str:
    if now.error is None:
        return f"It answers none of these {count(n, 'image')}."
    asked = f"{percent(made.error)} at most were asked for"
    return f"It answers {percent(now.share)} of these images and is wrong on {percent(now.error)} of them; {asked}."


def _promise(made: Selection) -> str:
    if made.confidence is None:
        return f"{percent(made.error)} wrong at most, on the hold-out alone"
    return f"{percent(made.error)} wrong at most, with confidence {percent(made.confidence)}"


def _sets(decisions: DecisionMetrics, found: Evaluation, classes: tuple[str, ...]) -> SetsSection | None:
    made, now = decisions.made.sets, decisions.sets
    if made is None or now is None or now.by_class is None or now.covered is None:
        return None
    each = now.by_class
    rows = [
        (name, f"{n:,}", "–" if covered is None else percent(covered), "–" if size is None else nats(size))
        for name, n, covered, size in zip(classes, each.n, each.covered, each.size, strict=True)
    ]
    seen = [q for q, n in enumerate(each.n) if n]
    few = 0 < len(seen) <= SHOWN
    return SetsSection(
        sentence=f"Its sets hold the true class of {percent(now.covered)} of these images "
        f"({interval(now.interval, percent)}); {percent(made.coverage)} were asked for"
        f"{' of each class' if made.by_class else ''}. They have {nats(now.mean_size)} classes on average.",
        kind=MADE[made.kind],
        n=count(made.n, "held-out image"),
        empty="Empty sets stay empty." if made.empty else "An empty set gets the most probable class.",
        sizes=[(size, f"{k:,}", percent(k / found.n)) for size, k in enumerate(now.sizes) if k],
        rows=rows,
        figure=figures.set_coverage(
            [classes[q] for q in seen], [each.covered[q] or 0.0 for q in seen], [each.n[q] for q in seen],
            [each.size[q] or 0.0 for q in seen], target=made.coverage,
        ) if few else None,
    )  # fmt: skip


def _note(decisions: DecisionMetrics, found: Evaluation) -> str | None:
    if decisions.made.passes == found.passes:
        return None
    return (
        f"The decisions were fitted with {decisions.made.passes}, these predictions have {found.passes}: the promises "
        "are for the former."
    )
