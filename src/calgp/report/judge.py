"""The page of predictions that were made anywhere: scores, reliability, and differences in pairs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from calgp.metrics import Difference
from calgp.runs.predictions_file import Judgement

from . import figures
from .experiment import Table
from .metric_names import METRICS, PAPER, VARIANTS
from .page import render_page
from .svg import PALETTE
from .words import count, decimal, interval, summary

CERTAIN = 0.9  # a confidence that counts as certain


@dataclass(frozen=True)
class Section:
    """One set of predictions."""

    name: str
    summary: str
    tiles: list[tuple[str, str, str]]
    reliability: str
    confidence: str
    variants: list[tuple[str, str]]
    notes: Sequence[str]


def judge_page(
    found: Sequence[Judgement], differences: Mapping[str, Difference] | None, notes: Sequence[str] = ()
) -> str:
    """The whole page as HTML: a section for each, and the first less the second."""
    sections = [_section(each, PALETTE[place % len(PALETTE)]) for place, each in enumerate(found)]
    paired = None if differences is None else _paired(found, differences)
    return render_page("judge.html", sections=sections, paired=paired, notes=notes)


def _section(found: Judgement, colour: str) -> Section:
    own, outcomes = found.own, found.outcomes
    certain = outcomes.confidence >= CERTAIN
    sure = (
        (
            int(certain.sum()),
            outcomes.confidence[certain].mean().item(),
            outcomes.correct[certain].double().mean().item(),
        )
        if certain.any()
        else None
    )
    tiles = []
    for key in PAPER:
        name, form, _ = METRICS[key]
        tiles.append((name, form(getattr(own.scores, key)), interval(getattr(own.intervals, key), form)))
    return Section(
        found.name,
        summary(own.scores, sure).replace("test image", "row").replace("image", "row"),
        tiles,
        figures.reliability(own.reliability, ece=own.scores.ece, mce=own.scores.mce, colour=colour),
        figures.confidence_histogram(outcomes.confidence.tolist(), outcomes.correct.tolist()),
        [(VARIANTS[name], decimal(value)) for name, value in own.ece_variants.items()],
        [f"{count(found.n, 'row')}, {found.classes} classes. AURC by confidence: {found.aurc:.3g}.", *found.notes],
    )


def _paired(found: Sequence[Judgement], differences: Mapping[str, Difference]) -> Table:
    first, second = found[0].name, found[1].name
    return Table(
        f"{first} less {second}, on the same rows; below it half of the 95 % interval. Less is better, so that a "
        f"difference below zero favours {first}.",
        ("score",),
        ("difference", "verdict"),
        [
            ((METRICS[name][0],), [(decimal(each.value), f"± {each.half:.4f}"), (verdict(each, first, second), "")])
            for name, each in differences.items()
        ],
    )


def verdict(difference: Difference, first: str, second: str) -> str:
    """Which of two is better, or that chance may have made the difference.

    >>> verdict(Difference(-0.02, half=0.01), "a", "b"), verdict(Difference(0.02, half=0.03), "a", "b")
    ('a is better', 'undecided')
    """
    if not difference.is_clear:
        return "undecided"
    return f"{first if difference.value < 0 else second} is better"
