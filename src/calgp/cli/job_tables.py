"""Tables of commands that make many runs: reproduce and sweep."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.table import Column, Table

from calgp.cli.tables import number
from calgp.cli.terminal import styled
from calgp.runs.evaluation import METRICS

if TYPE_CHECKING:  # matplotlib with it, which most commands do not need
    from calgp.paper import Experiment
    from calgp.paper.verdicts import Verdict
    from calgp.runs import RunFolder
    from calgp.search.jobs import Job
    from calgp.search.sweep import Sweep, SweepResult


def experiment_table(experiments: Iterable[Experiment]) -> Table:
    """One line an experiment."""
    table = Table(Column("name", style="bold"), "what", "claim", show_lines=True)
    for each in experiments:
        table.add_row(each.name, each.title, each.claim)
    table.caption = "calgp reproduce NAME --scale smoke|laptop|paper; `all` for all of them."
    return table


def verdict_table(experiment: Experiment, verdicts: Iterable[Verdict]) -> Table:
    """What became of the claims of an experiment."""
    from calgp.paper.verdicts import STATES

    colours = {"held": "blue", "not held": "red", "mixed": "magenta"}
    names = ("for", "undecided", "one seed", "against")
    table = Table(Column("", no_wrap=True), experiment.name, *(Column(name, justify="right") for name in names))
    for verdict in verdicts:
        count = verdict.count()
        counts = [str(count[state]) for state in STATES]
        table.add_row(styled((verdict.state, colours.get(verdict.state, "default"))), verdict.claim, *counts)
    return table


def cost(jobs: list[Job], processes: int) -> str:
    """What the runs that are missing will take."""
    if not jobs:
        return "Nothing is missing."
    hours = sum(job.seconds for job in jobs) / 3600
    return (
        f"{len(jobs)} runs are missing: about {_long(hours)} of one core, {_long(hours / processes)} with --jobs "
        f"{processes}; a GPU may be some 50 times as fast as a core. An estimate from the size of the networks."
    )


def queue_cost(tunings: int, runs: int, seconds: float, stale: list[RunFolder], processes: int) -> str:
    """What the queue of a tuned scale still has to do, and which kept runs it no longer wants."""
    parts = []
    if tunings or runs:
        hours = seconds / 3600
        parts.append(
            f"{tunings} tunings and {runs} runs are missing: about {_long(hours)} of one core, "
            f"{_long(hours / processes)} with --jobs {processes}. An estimate from the size of the networks."
        )
    else:
        parts.append("Nothing is missing.")
    if stale:
        names = ", ".join(folder.name for folder in stale[:3]) + (", …" if len(stale) > 3 else "")
        parts.append(f"{len(stale)} kept runs are stale: their options have changed since ({names}).")
    return " ".join(parts)


def _long(hours: float) -> str:
    return f"{hours:,.1f} hours" if hours >= 1 else f"{60 * hours:,.1f} minutes"


def planned_table(sweep: Sweep, missing: Iterable[Job]) -> Table:
    """The settings of a sweep, and how many of their runs are still to be made."""
    from calgp.search.sweep import worded

    absent = {job.key: job.seconds for job in missing}
    table = Table(Column("setting", overflow="fold"), "runs", "missing", "seconds")
    for setting, jobs in sweep.jobs_by_setting():
        left = [absent[job.key] for job in jobs if job.key in absent]
        table.add_row(worded(setting), str(len(jobs)), str(len(left)), f"{sum(left):,.0f}")
    return table


def sweep_table(rows: Iterable[SweepResult]) -> Table:
    """One line a setting: mean ± standard error over its seeds, the best on the hold-out first."""
    from calgp.search.sweep import worded

    rows = list(rows)
    test = any(row.test for row in rows)
    table = Table(Column("setting", overflow="fold"), "seeds", show_lines=True)
    for place in ("hold-out", *["test"] * test):
        for name in METRICS:
            table.add_column(f"{place}\n{name.upper()}", no_wrap=True, min_width=7)
    for row in rows:
        numbers = [row.held_out.get(name) for name in METRICS] + [row.test.get(name) for name in METRICS] * test
        table.add_row(
            worded(row.setting),
            f"{len(row.seeds)} of {row.planned}",
            *("not run" if value is None else number(*value) for value in numbers),
        )
    return table
