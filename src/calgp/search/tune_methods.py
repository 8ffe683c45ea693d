"""Several methods tuned with the same budget, as many at a time as an engine has places."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from calgp.errors import CalgpError
from calgp.run import Run, train_command
from calgp.runs.training_data import TrainingData
from calgp.runs.writing import owned
from calgp.search.engines import Engine, RunningTask, SerialEngine
from calgp.search.jobs import Paths, Progress, done_folder

from .halving import Budget, Options, Pilot
from .sweep import worded
from .tune import TuningLog, pilot_job, pilot_run, read_log, scored, search, tune, write_log

FEWEST = 10  # held-out images; with fewer, chance decides


@dataclass(frozen=True)
class TuningTask:
    """A method to tune, by its name; where its pilots are trained and its log is written."""

    name: str
    base: Run
    budget: Budget
    where: Paths
    log: Path

    @property
    def is_done(self) -> bool:
        """Whether the log of this very search is there."""
        return self.log.is_file() and read_log(self.log).is_of(self.base, self.budget)


def tasks_of(
    bases: Mapping[str, Run], budget: Budget, out: Path, runs: Path, data: Path | None = None
) -> list[TuningTask]:
    """Logs go to `out`; pilots to `runs`, those of a method by themselves, since two methods may share a pilot."""
    return [
        TuningTask(name, base, budget, Paths(runs / name, data=data).absolute(), (out / f"{name}.json").absolute())
        for name, base in bases.items()
    ]


def tune_and_write(task: TuningTask, /, *, watch: Callable[[float], None]) -> None:
    """What an engine does with a task."""
    write_log(tune(task.base, task.budget, task.where, watch=watch), task.log)


def tune_methods(
    tasks: Sequence[TuningTask],
    budget: Budget,
    *,
    engine: Engine = SerialEngine(),
    watch: Callable[[Progress], None] = lambda progress: None,
) -> dict[str, str]:
    """Tune methods with the same budget; why some failed, by name. What is done stays done."""
    todo = [task for task in tasks if not task.is_done]
    ready, failures = len(tasks) - len(todo), dict[str, str]()

    def progress(shares: Mapping[str, float]) -> None:
        steps = [*(share * budget.total_steps for share in shares.values()), *[budget.total_steps] * ready]
        pilots = sum(pilots_within(budget, each) for each in steps)
        whole, jobs = len(tasks) * budget.total_steps, len(tasks) * budget.total_pilots
        watch(Progress(sum(steps), whole, pilots, jobs, len(failures), ", ".join(shares)))

    def ended(task: TuningTask, failure: str | None) -> None:
        nonlocal ready
        ready += 1
        if failure is not None:
            failures[task.name] = failure
        progress({})

    def under_way(seen: Sequence[RunningTask[TuningTask]]) -> None:
        progress({one.task.name: share_done(one.task, budget) if one.share is None else one.share for one in seen})

    progress({})
    if todo:
        check_hold_out(pilot_run(todo[0].base, {}, budget.steps), todo[0].where)  # before anything is trained
        with owned(todo[0].where.runs.parent):
            engine.run(tune_and_write, todo, ended=ended, watch=under_way)
    return failures


def check_hold_out(run: Run, where: Paths) -> None:
    """Refuse images that cannot be read, or are too few to judge by."""
    held_out = TrainingData.of(run, where.data).held_out
    count, classes = (0, 0) if held_out is None else (len(held_out), len(held_out.classes))
    if count < (least := max(FEWEST, classes)):
        raise CalgpError(
            f"Invalid holdout={run.holdout:g}: it keeps {count} images of {run.source} to judge by, at least {least} "
            "are needed; give a larger --holdout or more images."
        )


def pilots_within(budget: Budget, steps: float) -> int:
    """How many pilots are done after so many steps of a search.

    >>> pilots_within(Budget(pilots=3, steps=30), 29), pilots_within(Budget(pilots=3, steps=30), 60)
    (2, 4)
    """
    each = [steps for count, steps in budget.rungs for _ in range(count)]
    return sum(total <= steps + 1e-6 for total in accumulate(each))


class _NotDone(Exception):
    pass


def share_done(task: TuningTask, budget: Budget) -> float:
    """How much of a search another process has done: its pilots in their order, up to the first that is missing."""
    done = 0

    def attempt(options: Options, rung: int, steps: int) -> Pilot:
        nonlocal done
        job = pilot_job(task.base, options, steps, budget)
        if done_folder(job, task.where, {}) is None:
            raise _NotDone
        done += steps
        return scored(Pilot(options, rung, steps), job, task.where, task.base.method.calibrator)

    with suppress(_NotDone):
        search(task.base, budget, attempt)
    return done / budget.total_steps


@dataclass(frozen=True)
class TunedRow:
    """A line of the table: what tuning found for a method, and what it cost."""

    method: str
    pilots: int
    steps: int
    options: str
    mnll: float
    err: float | None
    ece: float | None
    default_mnll: float
    tuned_mnll: float
    compared_steps: int
    edges: str
    too_short: bool
    failed: int
    train_seconds: float
    command: str


def rows_of_logs(logs: Mapping[str, TuningLog]) -> list[TunedRow]:
    """A row for each method, the lowest hold-out MNLL first.

    default_mnll, tuned_mnll: of the method's default and of the winner after the same number of steps.
    """
    return sorted((_row(name, log) for name, log in logs.items()), key=lambda row: row.mnll)


def _row(name: str, log: TuningLog) -> TunedRow:
    (default, tuned), winner = log.against_default, log.winner
    failed, seconds = sum(each.failure is not None for each in log.pilots), sum(each.seconds for each in log.pilots)
    return TunedRow(
        name, len(log.pilots), log.steps, worded(winner.options), winner.mnll, winner.err, winner.ece,
        default.mnll, tuned.mnll, default.steps, worded_edges(log), log.too_short, failed, round(seconds, 1),
        train_command(log.run),
    )  # fmt: skip


def worded_edges(log: TuningLog) -> str:
    """The options of the winner at an edge of the space; nothing where there are none."""
    return ", ".join(
        f"{edge.option}={edge.value} is the {side} value" + (" that makes sense" if edge.limit else " tried")
        for edge in log.edges
        for side in [{"low": "lowest", "high": "highest"}[edge.side]]
    )
