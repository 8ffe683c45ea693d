"""From the rows of an experiment to its files: a page, figures as SVG and PNG, tables as CSV and JSON."""

import json
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from calgp.report.csv_text import csv_text
from calgp.report.page import render_page
from calgp.report.panels import Density, Drawn, Line, curves, densities, frontiers, ladders, reliabilities, styles
from calgp.run import train_command
from calgp.runs.environment import environment
from calgp.runs.results import Reliability
from calgp.runs.writing import write_files
from calgp.search.jobs import key

from . import tables
from .experiments import Experiment
from .rows import PAPER, Cell, Row
from .scales import Scale
from .tables import NAMES, comparable_number, table_of
from .verdicts import SAYS


def write_experiment(
    experiment: Experiment,
    scale: Scale,
    cells: Sequence[Cell],
    rows: Sequence[Row],
    out: Path,
    *,
    command: Sequence[str],
    authors: bool = False,
    failures: Mapping[str, str] | None = None,
) -> Path:
    """Write all files of an experiment into `out`; the path of its page."""
    found = experiment.judged(rows)
    drawings = {experiment.name: draw(experiment, cells, rows)}
    if experiment.frontier and (drawn := draw_frontier(experiment, rows)) is not None:
        drawings[f"{experiment.name}-frontier"] = drawn
    own = {name for cell in cells for run in cell.runs for name in (key(run), run.source, cell.outside)}
    failed = [f"Failed: {reason}" for name, reason in (failures or {}).items() if name in own]
    page = render_page(
        "experiment.html",
        experiment=experiment,
        facts=_facts(scale, rows, authors),
        warning=scale.warning,
        judged=[(verdict, SAYS.get(verdict.state, verdict.state), tables.tally(verdict)) for verdict in found],
        figures=list(drawings.values()),
        tables=[tables.numbers_table(experiment, panel, rows) for panel in dict.fromkeys(row.panel for row in rows)],
        trained=tables.trained_table(cells, rows),
        command=shlex.join(command),
        trainings=[train_command(run) for run in dict.fromkeys(run for cell in cells for run in cell.runs)],
        environment=_versions(rows),
        notes=[*experiment.notes, *failed],
    )
    table = table_of(experiment, rows)
    summary = {
        "experiment": experiment.name, "scale": scale.name, "faithful": authors, "claim": experiment.claim,
        "rows": table, "verdicts": [tables.verdict_summary(verdict, rows) for verdict in found],
        "runs": {key(run): train_command(run) for cell in cells for run in cell.runs},
    }  # fmt: skip
    figures = {f"{name}.svg": drawn.svg for name, drawn in drawings.items()}
    figures |= {f"{name}.png": drawn.png for name, drawn in drawings.items()}
    plain = json.dumps(summary, indent=1, ensure_ascii=False) + "\n"
    write_files(out, {"report.html": page, **figures, "table.csv": csv_text(table), "table.json": plain})
    return out / "report.html"


def draw(experiment: Experiment, cells: Sequence[Cell], rows: Sequence[Row]) -> Drawn:
    """The figure as the paper draws it."""
    match experiment.drawing:
        case "reliability":
            return _draw_reliabilities(rows)
        case "curves":
            return _draw_curves(experiment, rows)
        case "densities":
            return _draw_densities(cells, rows)
        case "dots":
            return _draw_ladders(experiment, rows)


def draw_frontier(experiment: Experiment, rows: Sequence[Row]) -> Drawn | None:
    """Calibration against the cost of a prediction, in each panel at the largest x that most methods were run at.

    None where no cost is known.
    """
    panels: dict[str, list[tuple[str, float, float, float | None]]] = {}
    for panel, members in _panels([row for row in rows if row.mean("prediction_ms")]).items():
        counts = Counter(row.x or 0.0 for row in members)
        x = max(counts, key=lambda x: (counts[x], x))
        panels[f"{panel}\n{experiment.axis}: {x:,g}"] = [
            (row.method, row.mean("prediction_ms") or 0.0, row.mean("ece") or 0.0, row.spread("ece"))
            for row in members
            if (row.x or 0.0) == x
        ]
    return frontiers(panels, styled=styles([row.method for row in rows])) if panels else None


def _panels(rows: Sequence[Row]) -> dict[str, list[Row]]:
    return {panel: [row for row in rows if row.panel == panel] for panel in dict.fromkeys(row.panel for row in rows)}


def _draw_curves(experiment: Experiment, rows: Sequence[Row]) -> Drawn:
    methods = list(dict.fromkeys(row.method for row in rows))
    metrics = [metric for metric in experiment.metrics if metric in PAPER]

    def line(method: str, members: Sequence[Row], metric: str) -> Line:
        own = [row for row in members if row.method == method and row.values and row.x is not None]
        return Line(method, [(row.x or 0.0, row.mean(metric) or 0.0, row.spread(metric)) for row in own])

    panels = {
        panel: {NAMES[metric]: [line(method, members, metric) for method in methods] for metric in metrics}
        for panel, members in _panels(rows).items()
    }
    return curves(panels, axis=experiment.axis, log=experiment.log, styled=styles(methods))


def _draw_reliabilities(rows: Sequence[Row]) -> Drawn:
    def shown(row: Row) -> tuple[str, Reliability | None, str]:
        if not row.details:
            return row.method, None, ""
        heading = f"ECE {row.mean('ece'):.3f}  BRIER {row.mean('brier'):.3f}"
        return row.method, _joined([detail.own.own.reliability for detail in row.details]), heading

    return reliabilities([(panel, [shown(row) for row in members]) for panel, members in _panels(rows).items()])


def _draw_densities(cells: Sequence[Cell], rows: Sequence[Row]) -> Drawn:
    def shown(row: Row) -> Density | str:
        found = [(d.own.entropy_histogram, d.outside and d.outside.entropy_histogram) for d in row.details]
        known = [(inside, outside) for inside, outside in found if inside and outside]
        if not known:
            return row.method
        edges = known[0][0].edges, known[0][1].edges
        sums = ([sum(column) for column in zip(*(pair[side].count for pair in known), strict=True)] for side in (0, 1))
        inside, outside = zip(edges, sums, strict=True)
        auroc = row.mean("auroc")
        return Density(row.method, inside, outside, "" if auroc is None else f"AUROC {auroc:.3f}")

    cell = next((cell for cell in cells if cell.runs), cells[0])
    names = (f"{cell.runs[0].source} (inside)" if cell.runs else "inside", f"{cell.outside} (outside)")
    drawn = [(panel, [shown(row) for row in members]) for panel, members in _panels(rows).items()]
    return densities(drawn, names=names)


def _draw_ladders(experiment: Experiment, rows: Sequence[Row]) -> Drawn:
    def points(members: Sequence[Row], metric: str) -> list[tuple[str, float | None, float | None, float | None]]:
        return [
            (row.method, row.mean(metric), row.spread(metric), comparable_number(experiment, row, rows, metric))
            for row in members
        ]

    panels = {
        panel: {NAMES[metric]: points(members, metric) for metric in experiment.metrics}
        for panel, members in _panels(rows).items()
    }
    return ladders(panels, styled=styles([row.method for row in rows]))


def _joined(diagrams: Sequence[Reliability]) -> Reliability:
    """The reliability diagram of all seeds' predictions together."""
    count = tuple(sum(column) for column in zip(*(each.count for each in diagrams), strict=True))

    def average(columns: Sequence[Sequence[float | None]]) -> tuple[float | None, ...]:
        sums = [
            sum((column[place] or 0.0) * each.count[place] for column, each in zip(columns, diagrams, strict=True))
            for place in range(len(count))
        ]
        return tuple(total / n if n else None for total, n in zip(sums, count, strict=True))

    accuracy = average([each.accuracy for each in diagrams])
    return Reliability(diagrams[0].edges, count, accuracy, average([each.confidence for each in diagrams]))


def _facts(scale: Scale, rows: Sequence[Row], authors: bool) -> list[tuple[str, str]]:
    done, planned = sum(len(row.details) for row in rows), sum(row.planned for row in rows)
    empty = sum(not row.planned for row in rows)
    return [
        ("scale", scale.name),
        ("follows", "the authors' code" if authors else "the paper (docs/paper.md)"),
        ("results", f"{done} of {planned}" + (f", {empty} cells left out at this scale" if empty else "")),
    ]


def _versions(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """What made the runs, and what made the page."""
    now = environment()
    names = ("calgp", "torch", "python", "machine", "threads")
    made_by = [detail.card.environment for row in rows for detail in row.details]
    used = {name: {str(getattr(each, name) or "unknown") for each in made_by} for name in names}
    versions = [(f"{name} of the runs", ", ".join(sorted(found))) for name, found in used.items() if found]
    started = sorted(each.started or "" for each in made_by)
    dates = [("runs started", f"{started[0]} … {started[-1]}")] if started else []
    return [*versions, *dates, ("this page", f"calgp {now.calgp}, torch {now.torch}, {now.started}")]
