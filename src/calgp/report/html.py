"""One self-contained HTML file about one or more runs: nothing is fetched, nothing is executed."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from calgp.errors import CalgpError
from calgp.runs.folder import RunFolder
from calgp.runs.writing import wrap_os_errors, write_whole

from . import figures
from .metric_names import METRICS, PAPER
from .page import render_page
from .run_section import InsideSection, Result, RunSection, results, run_section
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
    colours = _colours([result.title for result in found])
    runs = [
        run_section(result, label, colour, directory)
        for result, label, colour in zip(found, _labels(found), colours, strict=True)
    ]
    page = render_page("report.html", runs=runs, comparison=_comparison(runs))
    out = Path(out)
    with wrap_os_errors(out.parent):
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(out, page.encode("utf-8", "replace"))
    return out


def _labels(results: Sequence[Result]) -> list[str]:
    """Titles; where two runs share one, the folder's name tells them apart."""
    names = [result.title for result in results]
    return [f"{r.title} ({r.folder.name})" if names.count(r.title) > 1 else r.title for r in results]


def _colours(methods: Sequence[str]) -> list[str]:
    """A colour for each method, the same in all figures of a page."""
    order = list(dict.fromkeys(methods))
    return [PALETTE[order.index(method) % len(PALETTE)] for method in methods]


@dataclass(frozen=True)
class Cell:
    """A value in the table of runs; `best` of its column."""

    value: str
    interval: str
    best: bool


@dataclass(frozen=True)
class ComparedRow:
    """A run in the table of runs; a cell is None where it was not evaluated."""

    label: str
    colour: str
    source: str
    n: str
    cells: list[Cell | None]


@dataclass(frozen=True)
class Comparison:
    """Several runs side by side: a table, small reliability diagrams, dots."""

    columns: list[str]
    rows: list[ComparedRow]
    sources: int
    small: list[tuple[str, str]]
    dots: list[str]


def _comparison(runs: Sequence[RunSection]) -> Comparison | None:
    """The runs side by side, on the images of their own source; None if there is nothing to compare."""
    rows = [(run, run.inside[0]) for run in runs if run.inside]
    if len(rows) < 2:
        return None
    best = {key: min(getattr(scored.values, key) for _, scored in rows) for key in PAPER}
    sources = sorted({out.source for run, _ in rows for out in run.outside if out.auroc})
    return Comparison(
        columns=[METRICS[key][0] for key in PAPER] + [f"AUROC, {source}" for source in sources],
        rows=[
            ComparedRow(
                run.label, run.colour, scored.source, scored.n,
                [*(_cell(scored, key, best[key]) for key in PAPER), *_auroc_cells([r for r, _ in rows], run, sources)],
            )
            for run, scored in rows
        ],
        sources=len({scored.source for _, scored in rows}),
        small=[
            (run.label, figures.reliability_small(
                scored.bins, label=run.label, ece=scored.values.ece, colour=run.colour
            ))
            for run, scored in rows
        ],
        dots=[
            figures.dots(
                METRICS[key][0],
                [
                    figures.Dot(run.label, getattr(scored.values, key), getattr(scored.intervals, key), run.colour)
                    for run, scored in rows
                ],
                unit="%" if key == "err" else "",
            )
            for key in PAPER
        ],
    )  # fmt: skip


def _cell(scored: InsideSection, key: str, best: float) -> Cell:
    _, form, _ = METRICS[key]
    value = getattr(scored.values, key)
    return Cell(form(value), interval(getattr(scored.intervals, key), form), value == best)


def _auroc_cells(runs: Sequence[RunSection], run: RunSection, sources: Sequence[str]) -> list[Cell | None]:
    """How well entropy separates each outside source from the inside; more is better."""
    found = [{out.source: out.auroc for out in each.outside if out.auroc} for each in runs]
    own = {out.source: out.auroc for out in run.outside if out.auroc}
    cells: list[Cell | None] = []
    for source in sources:
        best = max(each[source].value for each in found if source in each)
        auroc = own.get(source)
        cells.append(auroc and Cell(nats(auroc.value), interval(auroc.interval, nats), auroc.value == best))
    return cells
