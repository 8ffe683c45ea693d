"""The rows and verdicts of an experiment as tables: for its page, and as plain data for CSV and JSON."""

import math
from collections.abc import Iterable, Sequence

from calgp.json_values import Json
from calgp.report.page import Table
from calgp.report.words import decimal, percent
from calgp.runs import Run
from calgp.search.duration import count_of_training_images
from calgp.search.jobs import passes

from .experiments import Experiment
from .published import Published
from .rows import DETECTION, Cell, Row
from .scales import at_paper_scale, network_of
from .verdicts import STATES, Verdict

NAMES = {
    "err": "ERR", "mnll": "MNLL", "ece": "ECE", "brier": "BRIER", "gap": "confidence − accuracy",
    "entropy_inside": "entropy inside", "entropy_outside": "entropy outside",
    "low_entropy_outside": "low entropy outside", "auroc": "AUROC",
    "aupr_out": "AUPR, outside", "aupr_in": "AUPR, inside", "fpr95": "FPR95",
    "prediction_ms": "ms of a core, a prediction",
}  # fmt: skip
BELOW = {  # what stands below a number: intervals or not
    False: "Mean over seeds; below it ± its standard error, or, of a single seed, (± half the bootstrap interval over "
    "test images).",
    True: "Mean over seeds; below it the 95 % interval over seeds and test images.",
}
PUBLISHED = ("paper", "paper, other scale")  # columns of published numbers: comparable with ours, or not


def table_of(experiment: Experiment, rows: Sequence[Row]) -> list[dict[str, Json]]:
    """Rows as plain data: what was run, then mean, standard error, half an interval and published number by metric."""
    table = []
    for row in rows:
        plain: dict[str, Json] = {"panel": row.panel, "method": row.method}
        plain |= described(row) | ({} if row.x is None else {experiment.axis: row.x})
        plain |= {"seeds": [detail.seed for detail in row.details], "planned": row.planned}
        plain |= {"at_paper_scale": at_paper_scale(row.panel, row.runs), "paired": row.resampled is not None}
        plain |= {name: [getattr(each, name) for each in row.details] for name in ("scores", "outside_scores")}
        found = published_for(experiment, row, rows)
        for metric in experiment.metrics:
            plain[metric] = row.mean(metric) if row.values else "not run"
            plain |= {f"{metric}_se": row.error(metric), f"{metric}_half": row.half(metric)}
            plain |= {f"{metric}, {name}": value for name, value in _published_pair(found, row, metric).items()}
        table.append(plain)
    return table


def described(row: Row) -> dict[str, str]:
    """Network, training images (with a hold-out) and steps of a row's runs, done or planned."""
    steps = [detail.card.run.total_steps(detail.card.train_images) for detail in row.details]
    steps = steps or [run.total_steps(count_of_training_images(run)) for run in row.runs]
    return {
        "network": _joined(network_of(run) for run in row.runs),
        "training images": _joined(f"{count_of_training_images(run):,}" for run in row.runs),
        "steps": _joined(f"{count:,}" for count in steps),
    }


def _joined(words: Iterable[str]) -> str:
    return " / ".join(dict.fromkeys(words)) or "–"


def published_for(experiment: Experiment, row: Row, rows: Sequence[Row]) -> Published | None:
    """The paper's numbers for a method and panel; they stand in the row of the largest x."""
    if row.x is not None and row.x < max(each.x or 0 for each in rows if each.panel == row.panel):
        return None
    match = (p for p in experiment.published if (p.method, p.panel) == (row.method, row.panel))
    return next(match, None)


def comparable_number(experiment: Experiment, row: Row, rows: Sequence[Row], metric: str) -> float | None:
    """The published number, if the row has the paper's network and training images."""
    return _published_pair(published_for(experiment, row, rows), row, metric)[PUBLISHED[0]]


def _published_pair(found: Published | None, row: Row, metric: str) -> dict[str, float | None]:
    """A published number in the column where it belongs."""
    value = None if found is None else found.values.get(metric)
    same = at_paper_scale(row.panel, row.runs)
    return {PUBLISHED[0]: value if same else None, PUBLISHED[1]: None if same else value}


def numbers_table(experiment: Experiment, panel: str, rows: Sequence[Row]) -> Table:
    """Published and measured numbers side by side, each row with what was run."""
    members = [row for row in rows if row.panel == panel]
    pairs = {
        (row.label, metric): _published_pair(published_for(experiment, row, rows), row, metric)
        for row in members
        for metric in experiment.metrics
    }
    shown = {
        metric: [name for name in PUBLISHED if any(p[name] is not None for (_, m), p in pairs.items() if m == metric)]
        for metric in experiment.metrics
    }
    columns = [text for m in experiment.metrics for text in (NAMES[m], *(f"{NAMES[m]}, {name}" for name in shown[m]))]
    names, lines = list[str](), []
    for row in members:
        cells: list[tuple[str, str]] = []
        for metric in experiment.metrics:
            cells.append(_cell(row, metric, experiment.intervals))
            values = [pairs[row.label, metric][name] for name in shown[metric]]
            cells += [("–" if value is None else f"{value:g}", "") for value in values]
        x = {experiment.axis: f"{row.x:,g}"} if experiment.axis else {}
        axes = x if experiment.axis != "training images" else {}  # which has a column anyway
        what = {"method": row.method, **axes, **described(row), **x, "seeds": f"{len(row.details)} of {row.planned}"}
        lines.append((list(what.values()), cells))
        names = list(what)
    return Table(f"{panel}. {BELOW[experiment.intervals]}{_of_paper(experiment, panel)}", names, columns, lines)


def _of_paper(experiment: Experiment, panel: str) -> str:
    found = {(p.network, p.images) for p in experiment.published if p.panel == panel}
    named = [(network.replace("none", "no network"), images) for network, images in sorted(found)]
    named = " / ".join(f"{network}, {images:,} training images" for network, images in named)
    return f" The paper: {named}." if named else ""


def _form(metric: str, value: float) -> str:
    if metric == "prediction_ms":
        return f"{value:.3g}"
    return percent(value) if metric in ("fpr95", "low_entropy_outside") else decimal(value)


def _cell(row: Row, metric: str, intervals: bool) -> tuple[str, str]:
    value, error, half = row.mean(metric), row.error(metric), row.half(metric)
    if value is None:
        return "–" if row.values else "not run", ""
    if intervals and half is not None:
        least, most = (0.0, 1.0) if metric in (*DETECTION, "low_entropy_outside") else (0.0, math.inf)
        ends = max(least, value - half), min(most, value + half)
        return _form(metric, value), " – ".join(_form(metric, end) for end in ends)
    if error is not None:
        return _form(metric, value), f"± {error:.4f}"
    return _form(metric, value), "" if half is None else f"(± {half:.4f})"


def trained_table(cells: Sequence[Cell], rows: Sequence[Row]) -> Table:
    """What was trained, a line for each kind of run."""
    lines: dict[tuple[str, ...], list[tuple[Run, Cell]]] = {}
    for cell in cells:
        for run in cell.runs:
            kind = (cell.panel, run.source, network_of(run), f"{run.train_size or 'all'}")
            lines.setdefault(kind, []).append((run, cell))
    seconds = {
        detail.folder: (detail.train_seconds, detail.own.prediction_seconds)
        for row in rows for detail in row.details
    }  # fmt: skip
    table = []
    for kind, members in lines.items():
        runs = [run for run, _ in members]
        length = _joined(f"{run.steps} steps" if run.steps else f"{run.epochs:g} epochs" for run in runs)
        seeds = ", ".join(map(str, sorted({run.seed for run in runs})))
        shown = [length, seeds, _joined(str(passes(run, cell.samples)) for run, cell in members), str(len(set(runs)))]
        batches = f"batches of {_joined(str(run.batch_size) for run in runs)}"
        table.append((kind, list(zip(shown, (batches, "", "", ""), strict=True))))
    whole = sum(train for train, _ in seconds.values())
    predicting = sum(predict or 0.0 for _, predict in seconds.values())
    took = f"{_time(whole)} of training and {_time(predicting)} of prediction"
    names, columns = ["panel", "images", "network", "training images"], ["length", "seeds", "passes", "runs"]
    return Table(f"What was trained: {len(seconds)} runs, {took}.", names, columns, table)


def _time(seconds: float) -> str:
    """
    >>> _time(5), _time(600), _time(20000)
    ('5 s', '10 min', '5.6 h')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def tally(verdict: Verdict) -> tuple[list[str], list[tuple[str, list[list[tuple[str, int, str]]]]]]:
    """Names of metrics, and for each panel a cell for each metric: how its comparisons went.

    A cell has (state, how many, what it says) for each way that they went; a single comparison says its difference.
    """
    panels = dict.fromkeys(part.panel for part in verdict.parts)
    metrics = dict.fromkeys(part.metric for part in verdict.parts)

    def cell(panel: str, metric: str) -> list[tuple[str, int, str]]:
        parts = [part for part in verdict.parts if (part.panel, part.metric) == (panel, metric)]
        if len(parts) == 1:
            return [(parts[0].state, 1, f"{parts[0].difference:+.4f}".replace("-", "−"))]
        count = verdict.count(panel, metric)
        return [(state, count[state], str(count[state])) for state in STATES if count[state]]

    return [NAMES[metric] for metric in metrics], [(p, [cell(p, m) for m in metrics]) for p in panels]


def verdict_summary(verdict: Verdict, rows: Sequence[Row]) -> dict[str, Json]:
    """A verdict as plain data. `rows` of a comparison are places in the table's rows (tools/check_verdicts.py)."""
    places = {id(row): place for place, row in enumerate(rows)}
    parts = [
        {"what": p.what, "panel": p.panel, "metric": p.metric, "difference": p.difference, "interval": p.interval,
         "state": p.state, "leaning": p.leaning, "rows": [places[id(row)] for row in p.rows], "metrics": p.metrics,
         "side": p.side, "margin": p.margin, "offset": p.offset, "at_paper_scale": p.at_paper_scale}
        for p in verdict.parts
    ]  # fmt: skip
    at_scale = verdict.at_paper_scale()
    return {
        "claim": verdict.claim, "state": verdict.state, "summary": verdict.summary, "comparisons": parts,
        "at_paper_scale": {"state": at_scale.state, "summary": at_scale.summary},
    }  # fmt: skip
