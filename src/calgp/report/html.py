"""One self-contained HTML file about one or more runs: nothing is fetched, nothing is executed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

from calgp.errors import CalgpError
from calgp.runs.folder import RunFolder
from calgp.runs.writing import wrap_os_errors, write_whole

from . import figures
from .metric_names import METRICS, PAPER
from .page import render_page
from .run_section import InsideSection, RunSection, results, run_section
from .svg import PALETTE
from .words import interval, nats


def write_report(folders: Sequence[RunFolder], out: Path, *, directory: Path | None = None) -> Path:
    """Write a page about evaluated runs. Without their images (`directory`: where data sets lie) it has no galleries.

    Several runs are compared first, each metric on the test images of the run's own source. A run that was evaluated
    calibrated and as it was trained is shown twice, side by side.

    >>> import tempfile
    >>> from calgp.runs import shipped_run
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     page = write_report([shipped_run()], Path(folder) / "report.html")
    ...     "Reliability" in page.read_text(encoding="utf-8")
    True
    """
    if not folders:
        raise CalgpError("A report needs at least one run folder, such as runs/mnist.")
    found = [result for folder in folders for result in results(folder)]
    titles = [result.title for result in found]
    colours = dict(zip(dict.fromkeys(titles), cycle(PALETTE), strict=False))  # of a method, the same in all figures
    runs = []
    for result, title in zip(found, titles, strict=True):
        label = f"{title} ({result.folder.name})" if titles.count(title) > 1 else title
        runs.append(run_section(result, label, colours[title], directory))
    page = render_page("report.html", runs=runs, comparison=_comparison(runs))
    out = Path(out)
    with wrap_os_errors(out.parent):
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(out, page.encode("utf-8", "replace"))
    return out


@dataclass(frozen=True)
class Cell:
    """A value in the table of runs; `best` of its column."""

    value: str
    interval: str
    best: bool


@dataclass(frozen=True)
class Comparison:
    """Several runs side by side: a table, small reliability diagrams, dots; a cell is None where nothing is known."""

    columns: list[str]
    rows: list[tuple[RunSection, InsideSection, tuple[Cell | None, ...]]]
    small: list[tuple[str, str]]
    dots: list[str]


def _comparison(runs: Sequence[RunSection]) -> Comparison | None:
    """The runs side by side, on the images of their own source; None if there is nothing to compare."""
    rows = [(run, run.inside[0]) for run in runs if run.inside]
    if len(rows) < 2:
        return None
    columns: dict[str, list[Cell | None]] = {}
    dots = []
    for key in PAPER:
        name, form, _ = METRICS[key]
        found = [(getattr(o.scores, key), getattr(o.intervals, key)) for o in (each.found.own for _, each in rows)]
        columns[name] = _cells(found, form, best=min(value for value, _ in found))
        shown = [figures.Dot(run.label, *pair, run.colour) for (run, _), pair in zip(rows, found, strict=True)]
        dots.append(figures.dots(name, shown, unit="%" if key == "err" else ""))
    outside = [{out.found.source: dict(out.ood)["entropy"].auroc for out in run.outside if out.ood} for run, _ in rows]
    for source in sorted({source for own in outside for source in own}):  # entropy separates it; more is better
        pairs = [(own[source].value, own[source].interval) if source in own else None for own in outside]
        columns[f"AUROC, {source}"] = _cells(pairs, nats, best=max(pair[0] for pair in pairs if pair))
    small = []
    for run, each in rows:
        own, label = each.found.own, run.label
        drawn = figures.reliability_small(own.reliability, label=label, ece=own.scores.ece, colour=run.colour)
        small.append((label, drawn))
    table = [(*row, cells) for row, cells in zip(rows, zip(*columns.values(), strict=True), strict=True)]
    return Comparison(list(columns), table, small, dots)


def _cells(
    pairs: Sequence[tuple[float, Sequence[float]] | None], form: Callable[[float], str], *, best: float
) -> list[Cell | None]:
    return [pair and Cell(form(pair[0]), interval(pair[1], form), pair[0] == best) for pair in pairs]
