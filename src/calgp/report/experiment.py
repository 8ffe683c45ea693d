"""The page of an experiment: one self-contained file, in the style of the reports of runs."""

from collections.abc import Sequence
from dataclasses import dataclass

from .page import render_page


@dataclass(frozen=True)
class Table:
    """Rows of text under headings; the first columns name a row, the others are numbers with what stands below them."""

    caption: str
    names: Sequence[str]
    columns: Sequence[str]
    rows: Sequence[tuple[Sequence[str], Sequence[tuple[str, str]]]]


@dataclass(frozen=True)
class Tally:
    """How the comparisons of a claim went, a row for each panel, a column for each metric.

    A cell has a part for each way that they went: its state, how many, and what it says.
    """

    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Sequence[tuple[str, int, str]]]]]


@dataclass(frozen=True)
class Judged:
    """A claim with its verdict, in words. `state` is one word for its style, `says` what readers see."""

    claim: str
    state: str
    says: str
    summary: str
    tally: Tally
    parts: Sequence[tuple[str, str, str, str]]  # what, difference, interval, state


def experiment_page(
    *,
    name: str,
    title: str,
    claim: str,
    facts: Sequence[tuple[str, str]],
    warning: str | None,
    judged: Sequence[Judged],
    figures: Sequence[tuple[str, str]],
    tables: Sequence[Table],
    trained: Table,
    commands: Sequence[str],
    trainings: Sequence[str],
    environment: Sequence[tuple[str, str]],
    notes: Sequence[str],
) -> str:
    """The whole page as HTML."""
    return render_page(
        "experiment.html", name=name, title=title, claim=claim, facts=facts, warning=warning, judged=judged,
        figures=figures, tables=tables, trained=trained, commands=commands, trainings=trainings,
        environment=environment, notes=notes,
    )  # fmt: skip
