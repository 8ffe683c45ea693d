"""The queue of a tuned scale: what to run next, in the order of its value. It may be ended at any moment.

Several workers share the work through files alone. Each takes the first task that is not done and that nobody else has
begun: the tuning of a method on a panel, or, with the options that a tuning found, a run. Of `keep`, tunings go to
`tuning/SCALE/PANEL/METHOD.json` and runs to `SCALE/KEY`. Tunings are read from small results, so pages are a function
of these.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from calgp.data.sources import open_source
from calgp.errors import CalgpError
from calgp.runs import Interrupted, Run, RunFolder
from calgp.runs.environment import emulates_bf16
from calgp.runs.folder import slug
from calgp.runs.writing import Busy, owned
from calgp.search.duration import count_of_training_images, seconds
from calgp.search.engines import FAILURES, Engine, RunningTask, SerialEngine
from calgp.search.halving import Budget
from calgp.search.jobs import Job, Paths, Progress, finished_results, first_done, key
from calgp.search.tune import HOLDOUT, read_log, tune, write_log

from .cells import GPDNN_PRIOR
from .experiments import EXPERIMENTS, Experiment
from .published import LEARNED, after_temperature, of_the_paper
from .reproduce import jobs_of
from .rows import Cell
from .scales import GPDNN_MCD, PRESETS, SORF, Scale, find_scale

TUNED_AS = {LEARNED: SORF, GPDNN_PRIOR: GPDNN_MCD}  # variants of a method that have its options
TUNED_AS |= {variant(method): method for method in PRESETS for variant in (after_temperature, of_the_paper)}
IDLE_SECONDS = 20.0  # until a worker for whom nothing is left looks again


@dataclass(frozen=True)
class Tuning:
    """A method's search on a panel: every method gets the same budget there."""

    panel: str
    method: str
    base: Run
    budget: Budget
    key: str  # where its log is kept below the small results

    @property
    def name(self) -> str:
        return f"tuning {self.method} on {self.panel}"

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.base.source,)

    @property
    def seconds(self) -> float:
        """About how long it takes on one core."""
        total = 0.0
        for count, steps in self.budget.rungs:
            held_out = int(HOLDOUT * (self.budget.images_of(steps) or count_of_training_images(self.base)))
            total += count * seconds(replace(self.base, steps=steps), self.budget.samples, held_out)
        return total

    def share_done(self, where: Paths) -> float:
        """0: no file says how far a search is."""
        return 0.0

    def perform(self, where: Paths, watch: Callable[[float], None]) -> None:
        """Search, or go on searching, and write the log."""
        pilots = Paths(where.runs / "pilots" / slug(self.key), data=where.data, precision=where.precision)
        found = tune(self.base, self.budget, pilots, watch=watch)
        write_log(found, (where.keep or where.runs) / self.key)


Task = Tuning | Job
Rank = tuple[int, int, bool, int, int]  # seed, panel, variants last, method, tunings first


@dataclass(frozen=True)
class Plan:
    """Experiments at a tuned scale, with what is known of them so far.

    scale: with the options that were found. untuned: the searches that are still to be made.
    authors: as the authors' code has it where that differs from the paper.
    """

    names: tuple[str, ...]
    scale: Scale
    untuned: Mapping[tuple[str, str], Tuning]
    authors: bool = False

    def planned(self) -> dict[str, tuple[Cell, ...]]:
        """The cells of each experiment.

        Those of methods that are not tuned yet have the options that their tuning begins with.
        """
        return {name: EXPERIMENTS[name].planned(self.scale, authors=self.authors) for name in self.names}

    def cells(self) -> list[Cell]:
        """All of them."""
        return [cell for cells in self.planned().values() for cell in cells]

    def tasks(self, where: Paths) -> list[Task]:
        """What can be begun now: the most valuable first, seed 0 of everything before second seeds."""
        cells = [cell for cell in self.cells() if origin(cell) not in self.untuned]
        results = finished_results(where.small)
        ranked: list[tuple[Rank, Task]] = [
            (self._rank(0, *pair, variant=False, tuned=False), task) for pair, task in self.untuned.items()
        ]
        ranks = self.ranks(cells)
        for job in jobs_of(cells):
            if first_done(job, results.get(job.key, ())) is None:
                ranked.append((ranks[job.key], replace(job, shelf=self.scale.name)))
        return [task for _, task in sorted(ranked, key=lambda each: each[0])]

    def ranks(self, cells: Iterable[Cell]) -> dict[str, Rank]:
        """By run, the rank of the most valuable cell that wants it."""
        found: dict[str, Rank] = {}
        for cell in cells:
            for run in cell.runs:
                rank = self._rank(run.seed, *origin(cell), variant=cell.method in TUNED_AS, tuned=True)
                found[key(run)] = min(rank, found.get(key(run), rank))
        return found

    def _rank(self, seed: int, panel: str, method: str, *, variant: bool, tuned: bool) -> Rank:
        """Panels and methods stand in their order of value."""
        panels, methods = list(self.scale.settings), list(self.scale.methods)
        return seed, panels.index(panel), variant, methods.index(method), int(tuned)

    def cost(self, where: Paths) -> tuple[int, int, float]:
        """Tunings and runs that are missing, and about how many seconds of one core they take."""
        untuned = [cell for cell in self.cells() if origin(cell) in self.untuned]
        tasks = [*self.tasks(where), *jobs_of(untuned)]
        return len(self.untuned), len(tasks) - len(self.untuned), sum(task.seconds for task in tasks)


def origin(cell: Cell) -> tuple[str, str]:
    """The panel and the method whose tuning a cell's options come from."""
    return cell.panel, TUNED_AS.get(cell.method, cell.method)


def make_plan(names: Sequence[str], scale: Scale, places: Iterable[Path], *, authors: bool = False) -> Plan:
    """A plan with the options of all tunings that are found in small results."""
    plan = Plan(tuple(names), *tuned(scale, tuple(places)), authors)
    used = {origin(cell) for cell in plan.cells() if cell.runs}
    return replace(plan, untuned={pair: task for pair, task in plan.untuned.items() if pair in used})


def tuned(scale: Scale, places: Sequence[Path]) -> tuple[Scale, dict[tuple[str, str], Tuning]]:
    """The scale with the options of tunings, and the tunings that are missing.

    A log of another base, budget or space than today's does not count: what it found is stale.
    """
    settings, untuned = dict(scale.settings), dict[tuple[str, str], Tuning]()
    for panel, budget in scale.tuning.items():
        setting = settings[panel]
        searched = find_scale(setting.tuned_at) if setting.tuned_at else scale
        options, rates = dict(setting.options), dict(setting.rates)
        for method in setting.only[setting.largest]:
            base = searched.run(method, panel, searched.settings[panel].largest, 0)
            task = Tuning(panel, method, base, budget, f"tuning/{searched.name}/{slug(panel)}/{slug(method)}.json")
            logs = (read_log(place / task.key) for place in places if (place / task.key).is_file())
            log = next((log for log in logs if log.is_of(base, budget)), None)
            if log is None:
                untuned[panel, method] = task
                continue
            found = log.winner.options
            of_method = {name.removeprefix("method."): value for name, value in found.items() if "." in name}
            options[method] = {**options.get(method, {}), **of_method}
            rates[method] = float(found["learning_rate"])
        settings[panel] = replace(setting, options=options, rates=rates)
    return replace(scale, settings=settings), untuned


def stale(plan: Plan, keep: Path) -> list[RunFolder]:
    """Kept runs of the scale that no cell of its plan wants any longer: their options have changed since."""
    wanted = {key(run) for cell in plan.cells() for run in cell.runs}
    kept = finished_results([keep / plan.scale.name])
    return [folders[0] for name, folders in kept.items() if name not in wanted]


@dataclass(frozen=True)
class Coverage:
    """Runs of an experiment: how many are done, the seconds that they trained, and what is missing.

    seconds_missing: of one core, an estimate; tunings that are missing are part of it.
    """

    done: int
    missing: int
    tunings_missing: int
    seconds_done: float
    seconds_missing: float


def coverage(experiments: Iterable[Experiment], scale: Scale, where: Paths) -> dict[str, Coverage]:
    """By name, what is done of experiments, by the small results of finished runs."""
    results, covered = finished_results(where.small), dict[str, Coverage]()
    for each in experiments:
        plan = make_plan([each.name], scale, where.small)
        jobs, tunings = jobs_of(plan.cells()), plan.untuned.values()
        found = {job.key: first_done(job, results.get(job.key, ())) for job in jobs}
        done = [folder for folder in found.values() if folder is not None]
        absent = [job for job in jobs if found[job.key] is None]
        trained, left = sum(run.train_seconds() for run in done), sum(one.seconds for one in (*absent, *tunings))
        covered[each.name] = Coverage(len(done), len(absent), len(tunings), trained, left)
    return covered


def run_queue(
    names: Sequence[str],
    scale: str,
    where: Paths,
    *,
    workers: int = 1,
    engine: Engine = SerialEngine(),
    watch: Callable[[Progress], None] = lambda progress: None,
) -> dict[str, str]:
    """Work until nothing is left to do; what failed, by key, with the reason. The same call goes on where it was."""
    failures: dict[str, str] = {}
    counted = time.monotonic()
    whole = make_plan(names, find_scale(scale), where.small).cost(where)

    def ended(worker: int, failure: str | None) -> None:
        if failure is not None:
            failures[f"worker {worker}"] = failure

    def under_way(seen: Sequence[RunningTask[int]]) -> None:
        nonlocal counted
        if time.monotonic() - counted >= IDLE_SECONDS:
            counted = time.monotonic()
            watch(_progress(names, scale, where, whole, len(failures)))

    watch(Progress(0.0, whole[2], 0, whole[0] + whole[1], 0, ""))
    worker = _Worker(tuple(names), scale, where.absolute())
    engine.run(worker, range(workers), ended=ended, watch=under_way)
    watch(_progress(names, scale, where, whole, len(failures)))
    return failures


def _progress(names: Sequence[str], scale: str, where: Paths, whole: tuple[int, int, float], failed: int) -> Progress:
    """How much of what was missing at the beginning is done, runs under way by their logs."""
    plan = make_plan(names, find_scale(scale), where.small)
    tunings, runs, left = plan.cost(where)
    going = [(task, share) for task in plan.tasks(where) if (share := task.share_done(where))]
    left -= sum(task.seconds * share for task, share in going)
    now = ", ".join(task.name for task, _ in going[:2]) or "tuning"
    return Progress(whole[2] - left, whole[2], whole[0] + whole[1] - tunings - runs, whole[0] + whole[1], failed, now)


@dataclass(frozen=True)
class _Worker:
    """Takes the first task that is nobody else's, again and again, until there is none."""

    names: tuple[str, ...]
    scale: str
    where: Paths

    def __call__(self, number: int, /, *, watch: Callable[[float], None]) -> None:
        failed: dict[str, str] = {}
        emulated = emulates_bf16() and not torch.cuda.is_available()
        where = replace(self.where, precision="32-true" if emulated else find_scale(self.scale).precision)
        while True:
            tasks = make_plan(self.names, find_scale(self.scale), where.small).tasks(where)
            sources = {source for task in tasks for source in task.sources}
            absent = {source for source in sources if not open_source(source).is_available(where.data)}
            tasks = [task for task in tasks if task.key not in failed and not absent & set(task.sources)]
            if not tasks:
                break
            if not _take_one(tasks, where, failed, watch):
                time.sleep(IDLE_SECONDS)  # all are begun by others; what these find may bring more
        reasons = [f"{source} is not here; --data or CALGP_DATA names its folder." for source in sorted(absent)]
        if reasons := [*failed.values(), *reasons]:
            raise CalgpError(" ".join(reasons))


def _take_one(tasks: Sequence[Task], where: Paths, failed: dict[str, str], watch: Callable[[float], None]) -> bool:
    """Do the first task that nobody else has begun; whether there was one."""
    for task in tasks:
        try:
            with owned(where.runs / "begun" / slug(task.key)):
                task.perform(where, watch)
        except Busy:
            continue
        except Interrupted:
            raise
        except FAILURES as error:
            failed[task.key] = f"{task.name}: {error}"
        return True
    return False
