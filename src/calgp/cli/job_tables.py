"""Tables of commands that make many runs: reproduce, sweep and tune."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from rich.table import Column, Table

from calgp.cli.tables import number
from calgp.cli.terminal import styled
from calgp.runs.evaluation import METRICS

if TYPE_CHECKING:  # matplotlib with it, which most commands do not need
    from calgp.paper import Coverage, Experiment
    from calgp.paper.verdicts import Verdict
    from calgp.runs import RunFolder
    from calgp.search.jobs import Job
    from calgp.search.sweep import Sweep, SweepResult
    from calgp.search.tune_methods import TunedRow


def experiment_table(experiments: Iterable[Experiment]) -> Table:
    """One line an experiment."""
    table = Table(Column("name", style="bold"), "what", "claim", show_lines=True)
    for each in experiments:
        table.add_row(each.name, each.title, each.claim)
    table.caption = "calgp reproduce NAME --scale smoke|laptop|desk|paper; `all` for all of them."
    return table


def coverage_table(scale: str, found: Mapping[str, Coverage]) -> Table:
    """What is done of each experiment at a scale, what it took, and what is missing."""
    names = ("runs done", "hours trained", "runs missing", "tunings missing", "hours missing")
    table = Table(
        Column("name", style="bold"), *(Column(each, justify="right") for each in names), title=f"Scale {scale}"
    )
    for name, each in found.items():
        trained, left = (f"{seconds / 3600:.1f}" for seconds in (each.seconds_done, each.seconds_missing))
        table.add_row(name, str(each.done), trained, str(each.missing), str(each.tunings_missing), left)
    table.caption = "Hours of one core; missing ones are estimates. A run may serve several experiments."
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
    gpu = "a GPU may be some 50 times as fast as a core"
    return _cost(f"{len(jobs)} runs", sum(job.seconds for job in jobs), processes, gpu)


def queue_cost(tunings: int, runs: int, seconds: float, stale: list[RunFolder], processes: int) -> str:
    """What the queue of a tuned scale still has to do, and which kept runs it no longer wants."""
    left = _cost(f"{tunings} tunings and {runs} runs", seconds, processes)
    names = ", ".join(folder.name for folder in stale[:3]) + (", …" if len(stale) > 3 else "")
    return left + (f" {len(stale)} kept runs are stale: their options have changed since ({names})." if stale else "")


def _cost(what: str, seconds: float, processes: int, more: str = "") -> str:
    if not seconds:
        return "Nothing is missing."
    hours = (seconds / 3600 / count for count in (1, processes))
    here, there = (f"{each:,.1f} hours" if each >= 1 else f"{60 * each:,.1f} minutes" for each in hours)
    return (
        f"{what} are missing: about {here} of one core, {there} with --jobs {processes}{'; ' * bool(more)}{more}. An "
        "estimate from the size of the networks."
    )


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


def tuning_table(rows: Iterable[TunedRow]) -> Table:
    """One line a method, the lowest hold-out MNLL first."""
    table = Table("method", "pilots", "steps", Column("best options", no_wrap=True), "hold-out\nMNLL",
                  "default\n→ tuned", show_lines=True)  # fmt: skip
    for row in rows:
        failed = f"\n{row.failed} failed" if row.failed else ""
        options = row.options.replace("method.", "").replace(" ", "\n")
        compared = f"{row.default_mnll:.4f}\n→ {row.tuned_mnll:.4f}\n{row.compared_steps:,} steps"
        table.add_row(row.method, f"{row.pilots}{failed}", f"{row.steps:,}", options, f"{row.mnll:.4f}", compared)
    return table
