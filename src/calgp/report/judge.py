"""The page of predictions that were made anywhere: scores, reliability, and differences in pairs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from calgp.metrics import Difference
from calgp.runs.predictions_file import Judgement

from . import figures
from .metric_names import METRICS, PAPER
from .page import Table, render_page
from .run_section import ScoreRow, score_rows
from .svg import PALETTE
from .words import certain, decimal, summary


@dataclass(frozen=True)
class Section:
    """One set of predictions."""

    found: Judgement
    summary: str
    tiles: list[ScoreRow]
    reliability: str
    confidence: str


def judge_page(
    found: Sequence[Judgement], differences: Mapping[str, Difference] | None, notes: Sequence[str] = ()
) -> str:
    """The whole page as HTML: a section for each, and the first less the second."""
    sections = [_section(each, PALETTE[place % len(PALETTE)]) for place, each in enumerate(found)]
    paired = None if differences is None else _paired(found, differences)
    return render_page("judge.html", sections=sections, paired=paired, notes=notes)


def _section(found: Judgement, colour: str) -> Section:
    own, confidence, correct = found.own, found.outcomes.confidence, found.outcomes.correct
    return Section(
        found,
        summary(own.scores, certain(confidence, correct)).replace("test image", "row").replace("image", "row"),
        score_rows(own.scores, own.intervals, {})[: len(PAPER)],
        figures.reliability(own.reliability, ece=own.scores.ece, mce=own.scores.mce, colour=colour),
        figures.confidence_histogram(confidence.tolist(), correct.tolist()),
    )


def _paired(found: Sequence[Judgement], differences: Mapping[str, Difference]) -> Table:
    first, second = found[0].name, found[1].name
    caption = (
        f"{first} less {second}, on the same rows; below it half of the 95 % interval. Less is better, so that a "
        f"difference below zero favours {first}."
    )
    rows = [
        ((METRICS[name][0],), [(decimal(each.value), f"± {each.half:.4f}"), (verdict(each, first, second), "")])
        for name, each in differences.items()
    ]
    return Table(caption, ("score",), ("difference", "verdict"), rows)


def verdict(difference: Difference, first: str, second: str) -> str:
    """Which of two is better, or that chance may have made the difference.

    >>> verdict(Difference(-0.02, half=0.01), "a", "b"), verdict(Difference(0.02, half=0.03), "a", "b")
    ('a is better', 'undecided')
    """
    if not difference.is_clear:
        return "undecided"
    return f"{first if difference.value < 0 else second} is better"
