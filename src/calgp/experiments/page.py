"""From the rows of an experiment to its files: a page, figures as SVG and PNG, tables as CSV and JSON."""

import csv
import dataclasses
import io
import json
import math
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from calgp.methods import METHODS
from calgp.nets import BACKBONES
from calgp.report.experiment import Judged, Table, Tally, experiment_page
from calgp.report.figures import Bins
from calgp.report.panels import Density, Drawn, Line, curves, densities, frontiers, ladders, reliabilities, styles
from calgp.report.words import decimal, percent
from calgp.runs import Run
from calgp.runs.folder import environment
from calgp.runs.writing import remove_leftovers, reporting, write_whole

from .paper import Experiment, Published
from .reproduce import key
from .rows import DETECTION, PAPER, Cell, Row
from .scales import Scale
from .verdicts import Part, Verdict

NAMES = {
    "err": "ERR", "mnll": "MNLL", "ece": "ECE", "brier": "BRIER", "gap": "confidence − accuracy",
    "entropy_inside": "entropy inside", "entropy_outside": "entropy outside", "auroc": "AUROC",
    "aupr_out": "AUPR, outside", "aupr_in": "AUPR, inside", "fpr95": "FPR95",
    "prediction_ms": "ms of a core, a prediction",
}  # fmt: skip
BELOW = {  # what stands below a number: intervals or not
    False: "Mean over seeds; below it ± its standard error, or, of a single seed, (± half the bootstrap interval over "
    "test images).",
    True: "Mean over seeds; below it the 95 % interval, of seeds or of test images, whichever is wider.",
}
WARNINGS = {
    "smoke": "Smoke scale: tiny networks, a few steps, embedded digits. It shows that everything runs; its numbers say "
    "nothing about the paper, and panels only stand for the data and networks that they are named after.",
    "laptop": "Laptop scale: smaller training sets, shorter budgets, smaller ResNets than the paper's; stated below.",
    "paper": None,
}


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
    page = experiment_page(
        name=experiment.name,
        title=experiment.title,
        claim=experiment.claim,
        facts=_facts(scale, rows, authors),
        warning=WARNINGS[scale.name],
        judged=[_judged(verdict) for verdict in found],
        figures=[(drawn.svg, drawn.says) for drawn in drawings.values()],
        tables=[_numbers(experiment, panel, rows) for panel in dict.fromkeys(row.panel for row in rows)],
        trained=_trained(cells, rows),
        commands=[shlex.join(command)],
        trainings=[train_command(run) for run in dict.fromkeys(run for cell in cells for run in cell.runs)],
        environment=_versions(rows),
        notes=[*experiment.notes, *failed],
    )
    plain = table_of(experiment, rows)
    told = {
        "experiment": experiment.name,
        "scale": scale.name,
        "faithful": authors,
        "claim": experiment.claim,
        "rows": plain,
        "verdicts": [_told(verdict) for verdict in found],
        "runs": {key(run): train_command(run) for cell in cells for run in cell.runs},
    }
    files = {
        "report.html": page.encode("utf-8", "replace"),
        **{f"{name}.svg": drawn.svg.encode() for name, drawn in drawings.items()},
        **{f"{name}.png": drawn.png for name, drawn in drawings.items()},
        "table.csv": _csv(plain).encode(),
        "table.json": (json.dumps(told, indent=1, ensure_ascii=False) + "\n").encode(),
    }
    with reporting(out):
        out.mkdir(parents=True, exist_ok=True)
        remove_leftovers(out)
        for name, data in files.items():
            write_whole(out / name, data)
    return out / "report.html"


def table_of(experiment: Experiment, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows as plain data: mean, standard error and half an interval of each metric, and the published number."""
    table = []
    for row in rows:
        plain: dict[str, Any] = {"panel": row.panel, "method": row.method}
        plain |= {} if row.x is None else {experiment.axis: row.x}
        plain |= {"seeds": [detail["seed"] for detail in row.details], "planned": row.planned}
        published = published_for(experiment, row, rows)
        for metric in experiment.metrics:
            plain[metric] = row.mean(metric) if row.values else "not run"
            plain |= {f"{metric}_se": row.error(metric), f"{metric}_half": row.half(metric)}
            plain[f"{metric}_published"] = None if published is None else published.values.get(metric)
        table.append(plain)
    return table


def published_for(experiment: Experiment, row: Row, rows: Sequence[Row]) -> Published | None:
    """The paper's numbers are of full training sets: they stand beside the largest x of the method and panel."""
    if row.x is not None and row.x < max(each.x or 0 for each in rows if each.panel == row.panel):
        return None
    match = (p for p in experiment.published if (p.method, p.panel) == (row.method, row.panel))
    return next(match, None)


def draw(experiment: Experiment, cells: Sequence[Cell], rows: Sequence[Row]) -> Drawn:
    """The figure as the paper draws it."""
    kinds: dict[str, Callable[[Experiment, Sequence[Cell], Sequence[Row]], Drawn]] = {
        "reliability": _draw_reliabilities, "curves": _draw_curves, "densities": _draw_densities, "dots": _draw_ladders,
    }  # fmt: skip
    return kinds[experiment.drawing](experiment, cells, rows)


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


def train_command(run: Run) -> str:
    """The command that trains this very run."""
    words = ["calgp", "train", "--source", run.source, *_named("method", run.method, METHODS)]
    words += _named("backbone", run.backbone, BACKBONES)
    flags = {"train_size": "--train-size", "steps": "--steps", "epochs": "--epochs", "batch_size": "--batch-size",
             "learning_rate": "--lr", "schedule": "--schedule", "seed": "--seed", "size": "--size",
             "colour": "--colour"}  # fmt: skip
    default = Run(run.method, run.backbone)
    for name in (each.name for each in dataclasses.fields(run)):
        value = getattr(run, name)
        if name in ("method", "backbone", "source") or value == getattr(default, name):
            continue
        words += [flags[name], f"{value}"] if name in flags else ["--set", f"{name}={json.dumps(value)}"]
    return shlex.join(words)


def _named(what: str, value: Any, table: Mapping[str, Any]) -> list[str]:
    """The nearest ready value, and the options that differ from it."""
    options = dataclasses.asdict(value)
    alike = {name: dataclasses.asdict(ready) for name, ready in table.items() if type(ready) is type(value)}
    differing = {name: {k: v for k, v in options.items() if v != ready[k]} for name, ready in alike.items()}
    name = min(differing, key=lambda name: len(differing[name]))
    settings = [("--set", f"{what}.{option}={json.dumps(new)}") for option, new in differing[name].items()]
    return [f"--{what}", name, *(word for setting in settings for word in setting)]


def _panels(rows: Sequence[Row]) -> dict[str, list[Row]]:
    return {panel: [row for row in rows if row.panel == panel] for panel in dict.fromkeys(row.panel for row in rows)}


def _draw_curves(experiment: Experiment, cells: Sequence[Cell], rows: Sequence[Row]) -> Drawn:
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


def _draw_reliabilities(experiment: Experiment, cells: Sequence[Cell], rows: Sequence[Row]) -> Drawn:
    def shown(row: Row) -> tuple[str, Bins | None, str]:
        if not row.details:
            return row.method, None, ""
        heading = f"ECE {row.mean('ece'):.3f}  BRIER {row.mean('brier'):.3f}"
        return row.method, _joined([detail["own"]["reliability"] for detail in row.details]), heading

    return reliabilities([(panel, [shown(row) for row in members]) for panel, members in _panels(rows).items()])


def _draw_densities(experiment: Experiment, cells: Sequence[Cell], rows: Sequence[Row]) -> Drawn:
    def shown(row: Row) -> Density | str:
        found = [
            (d["own"].get("entropy_histogram"), (d["outside"] or {}).get("entropy_histogram")) for d in row.details
        ]
        known = [(inside, outside) for inside, outside in found if inside and outside]
        if not known:
            return row.method
        inside, outside = (_summed([pair[side] for pair in known]) for side in (0, 1))
        auroc = row.mean("auroc")
        return Density(row.method, inside, outside, "" if auroc is None else f"AUROC {auroc:.3f}")

    cell = next((cell for cell in cells if cell.runs), cells[0])
    names = (f"{cell.runs[0].source} (inside)" if cell.runs else "inside", f"{cell.outside} (outside)")
    return densities(
        [(panel, [shown(row) for row in members]) for panel, members in _panels(rows).items()], names=names
    )


def _draw_ladders(experiment: Experiment, cells: Sequence[Cell], rows: Sequence[Row]) -> Drawn:
    def points(members: Sequence[Row], metric: str) -> list[tuple[str, float | None, float | None, float | None]]:
        return [
            (row.method, row.mean(metric), row.spread(metric),
             None if (p := published_for(experiment, row, rows)) is None else p.values.get(metric))
            for row in members
        ]  # fmt: skip

    panels = {
        panel: {NAMES[metric]: points(members, metric) for metric in experiment.metrics}
        for panel, members in _panels(rows).items()
    }
    return ladders(panels, styled=styles([row.method for row in rows]))


def _joined(tables: Sequence[Mapping[str, Any]]) -> Bins:
    """The reliability diagram of all seeds' predictions together."""
    count = [sum(column) for column in zip(*(table["count"] for table in tables), strict=True)]

    def average(name: str) -> list[float | None]:
        sums = [
            sum((table[name][place] or 0.0) * table["count"][place] for table in tables) for place in range(len(count))
        ]
        return [total / n if n else None for total, n in zip(sums, count, strict=True)]

    return Bins(tables[0]["edges"], count, average("accuracy"), average("confidence"))


def _summed(histograms: Sequence[Mapping[str, Any]]) -> tuple[Sequence[float], Sequence[float]]:
    counts = [sum(column) for column in zip(*(each["count"] for each in histograms), strict=True)]
    return histograms[0]["edges"], counts


def _form(metric: str, value: float) -> str:
    if metric == "prediction_ms":
        return f"{value:.3g}"
    return percent(value) if metric == "fpr95" else decimal(value)


def _numbers(experiment: Experiment, panel: str, rows: Sequence[Row]) -> Table:
    """Published and measured numbers side by side."""
    members = [row for row in rows if row.panel == panel]
    known = {metric for p in experiment.published if p.panel == panel for metric in p.values}
    columns: list[str] = []
    for metric in experiment.metrics:
        columns += [NAMES[metric]] + ([f"{NAMES[metric]}, paper"] if metric in known else [])
    lines = []
    for row in members:
        published = published_for(experiment, row, rows)
        cells: list[tuple[str, str]] = []
        for metric in experiment.metrics:
            cells.append(_cell(row, metric, experiment.intervals))
            if metric in known:
                value = None if published is None else published.values.get(metric)
                cells.append(("–" if value is None else f"{value:g}", ""))
        names = [row.method, *([f"{row.x:,g}"] if experiment.axis else []), f"{len(row.details)} of {row.planned}"]
        lines.append((names, cells))
    names = ["method", *([experiment.axis] if experiment.axis else []), "seeds"]
    sizes = sorted({detail["train_images"] for row in members for detail in row.details})
    trained = "" if experiment.axis == "training images" or not sizes else f", {_and(sizes)} training images"
    return Table(f"{panel}{trained}. {BELOW[experiment.intervals]}", names, columns, lines)


def _and(numbers: Sequence[int]) -> str:
    return " and ".join(f"{number:,}" for number in numbers)


def _cell(row: Row, metric: str, intervals: bool) -> tuple[str, str]:
    value, error, half = row.mean(metric), row.error(metric), row.half(metric)
    if value is None:
        return "–" if row.values else "not run", ""
    if intervals and half is not None:
        least, most = (0.0, 1.0) if metric in DETECTION else (0.0, math.inf)
        return _form(
            metric, value
        ), f"{_form(metric, max(least, value - half))} – {_form(metric, min(most, value + half))}"
    if error is not None:
        return _form(metric, value), f"± {error:.4f}"
    return _form(metric, value), "" if half is None else f"(± {half:.4f})"


def _trained(cells: Sequence[Cell], rows: Sequence[Row]) -> Table:
    """What was trained, a line for each kind of run."""
    lines: dict[tuple[str, ...], list[tuple[Run, Cell]]] = {}
    for cell in cells:
        for run in cell.runs:
            names = (cell.panel, run.source, run.backbone_label, f"{run.train_size or 'all'}")
            lines.setdefault(names, []).append((run, cell))
    seconds = {
        (detail["folder"]): (detail["train_seconds"], (detail["own"] or {}).get("prediction_seconds"))
        for row in rows for detail in row.details
    }  # fmt: skip
    table = []
    for names, members in lines.items():
        runs = [run for run, _ in members]
        length = " / ".join(
            dict.fromkeys(f"{run.steps} steps" if run.steps else f"{run.epochs:g} epochs" for run in runs)
        )
        table.append(
            (names, [
                (length, f"batches of {' / '.join(dict.fromkeys(str(run.batch_size) for run in runs))}"),
                (", ".join(map(str, sorted({run.seed for run in runs}))), ""),
                (" / ".join(dict.fromkeys(str(cell.samples) for _, cell in members)), ""),
                (str(len(set(runs))), ""),
            ])
        )  # fmt: skip
    whole = sum(train for train, _ in seconds.values())
    predicting = sum(predict or 0.0 for _, predict in seconds.values())
    caption = (
        f"What was trained: {len(seconds)} runs, {_time(whole)} of training and {_time(predicting)} of prediction."
    )
    return Table(
        caption, ["panel", "images", "network", "training images"], ["length", "seeds", "samples", "runs"], table
    )


def _time(seconds: float) -> str:
    """
    >>> _time(5), _time(600), _time(20000)
    ('5 s', '10 min', '5.6 h')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _facts(scale: Scale, rows: Sequence[Row], authors: bool) -> list[tuple[str, str]]:
    done, planned = sum(len(row.details) for row in rows), sum(row.planned for row in rows)
    empty = sum(not row.planned for row in rows)
    return [
        ("scale", scale.name),
        ("follows", "the authors' code" if authors else "the paper (docs/paper.md)"),
        ("results", f"{done} of {planned}" + (f", {empty} cells left out at this scale" if empty else "")),
    ]


def _judged(verdict: Verdict) -> Judged:
    return Judged(verdict.claim, verdict.state, verdict.told, _tally(verdict), [_part(part) for part in verdict.parts])


def _tally(verdict: Verdict) -> Tally:
    """How many comparisons went how, where; of a single one, its difference."""
    panels = dict.fromkeys(part.panel for part in verdict.parts)
    metrics = dict.fromkeys(part.metric for part in verdict.parts)

    def cell(panel: str, metric: str) -> list[tuple[str, int, str]]:
        parts = [part for part in verdict.parts if (part.panel, part.metric) == (panel, metric)]
        if len(parts) == 1:
            return [(parts[0].state, 1, f"{parts[0].difference:+.4f}".replace("-", "−"))]
        count = verdict.count(panel, metric)
        return [(state, count[state], str(count[state])) for state in ("held", "undecided", "not held") if count[state]]

    return Tally([NAMES[metric] for metric in metrics], [(p, [cell(p, m) for m in metrics]) for p in panels])


def _part(part: Part) -> tuple[str, str, str, str]:
    ends = part.interval
    return (
        part.what, decimal(part.difference), "–" if ends is None else f"{decimal(ends[0])} … {decimal(ends[1])}",
        part.state,
    )  # fmt: skip


def _told(verdict: Verdict) -> dict[str, Any]:
    parts = [
        {"what": p.what, "panel": p.panel, "metric": p.metric, "difference": p.difference, "interval": p.interval,
         "state": p.state}
        for p in verdict.parts
    ]  # fmt: skip
    return {"claim": verdict.claim, "state": verdict.state, "told": verdict.told, "comparisons": parts}


def _versions(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """What made the runs, and what made the page."""
    now = environment()
    names = ("calgp", "torch", "python", "machine", "threads")
    used = {name: {str(d["environment"].get(name, "unknown")) for row in rows for d in row.details} for name in names}
    versions = [(f"{name} of the runs", ", ".join(sorted(found))) for name, found in used.items() if found]
    started = sorted(str(d["environment"].get("started", "")) for row in rows for d in row.details)
    dates = [("runs started", f"{started[0]} … {started[-1]}")] if started else []
    return [*versions, *dates, ("this page", f"calgp {now['calgp']}, torch {now['torch']}, {now['started']}")]


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)))
    writer.writeheader()
    writer.writerows({k: " ".join(map(str, v)) if isinstance(v, list) else v for k, v in row.items()} for row in rows)
    return text.getvalue()
