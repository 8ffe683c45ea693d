"""Run what an experiment lacks, like make: a run's folder is named by its content; what is done stays done."""

import hashlib
import json
import logging
import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path

import torch
from lightning_fabric import Fabric

from calgp.data import SOURCES, data_directory
from calgp.data.corruptions import corrupted
from calgp.errors import CalgpError
from calgp.runs import Interrupted, Run, RunFolder, Step, evaluate, identity, keep_freed_memory, train
from calgp.runs.evaluation import test_images
from calgp.runs.reading import read_json
from calgp.runs.writing import owned, remove_leftovers, reporting, write_whole

from .rows import Cell, Row, Shift, evaluated_name, evaluation, row_of
from .scales import count_of_test_images, seconds

FAILURES = (CalgpError, RuntimeError, MemoryError)  # of one run; the others go on
SMALL = ("scores-*.json", "log.jsonl", "calibration.json")  # what is kept of a run besides run.json


@dataclass(frozen=True)
class Job:
    """A run and everything that it is tested on, for all experiments that want it."""

    run: Run
    samples: int
    tests: tuple[Shift | None, ...] = (None,)
    outside: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return key(self.run)

    @property
    def seconds(self) -> float:
        """About how long it takes on one core."""
        whole = count_of_test_images(self.run.source)
        tests = sum((test and test.images) or whole for test in self.tests)
        return seconds(self.run, self.samples, tests + sum(map(count_of_test_images, self.outside)))

    @property
    def sources(self) -> tuple[str, ...]:
        """The image sets that it needs."""
        return (self.run.source, *self.outside)

    def lacks(self, folder: RunFolder) -> bool:
        """Whether an evaluation is still to be made."""
        return any(evaluation(folder, self.run, name, self.samples) is None for name in self.names())

    def names(self) -> Iterator[str]:
        yield from (evaluated_name(self.run.source, test) for test in self.tests)
        yield from self.outside


@dataclass(frozen=True)
class Progress:
    """How far all jobs together are, in estimated seconds of work; `done` and `failed` count jobs."""

    work: float
    whole: float
    done: int
    jobs: int
    failed: int
    now: str


@dataclass(frozen=True)
class Where:
    """Places: where runs are made, where small results of finished ones are looked for and kept, where images lie."""

    runs: Path
    results: Path | None = None
    keep: Path | None = None
    data: Path | None = None


@dataclass
class _Tally:
    """What has been done so far."""

    whole: float
    jobs: int
    work: float = 0.0
    done: int = 0
    failures: dict[str, str] = field(default_factory=dict)

    def progress(self, now: str, more: float = 0.0) -> Progress:
        return Progress(self.work + more, self.whole, self.done, self.jobs, len(self.failures), now)


def key(run: Run) -> str:
    """The name of a run's folder: a hash of its whole description, so that equal runs share a folder and no others."""
    text = json.dumps(identity(run), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def jobs_of(cells: Iterable[Cell]) -> list[Job]:
    """The runs of all cells, each once, with all that they are tested on; the cheapest first."""
    found: dict[tuple[str, int], Job] = {}
    for cell in cells:
        for run in cell.runs:
            name = key(run), cell.samples
            job = found.get(name, Job(run, cell.samples))
            tests = tuple(dict.fromkeys((*job.tests, cell.test)))
            outside = job.outside + ((cell.outside,) if cell.outside and cell.outside not in job.outside else ())
            found[name] = Job(run, cell.samples, tests, outside)
    return sorted(found.values(), key=lambda job: job.seconds)


def finished_results(path: Path | None) -> dict[str, list[RunFolder]]:
    """By key, run folders below `path`, whatever their names, that can be read: small results kept in a repository."""
    found: dict[str, list[RunFolder]] = {}
    for file in sorted(path.rglob("run.json")) if path is not None and path.is_dir() else []:
        folder = RunFolder(file.parent)
        try:
            card = folder.card()
        except CalgpError:  # of another version or damaged: it will be run
            continue
        if not card.members:
            found.setdefault(key(card.run), []).append(folder)
    return found


def done_folder(job: Job, where: Where, results: Mapping[str, Sequence[RunFolder]]) -> RunFolder | None:
    """The folder that has all evaluations of a job; None if it is still to be run."""
    for folder in (RunFolder(where.runs / job.key), *results.get(job.key, ())):
        if (folder.path / "run.json").is_file() and not job.lacks(folder):
            return folder
    return None


def perform(job: Job, where: Where, watch: Callable[[float], None] = lambda share: None) -> None:
    """Train a run, or go on with it, and make the evaluations that it lacks. It may be killed at any moment."""
    folder = RunFolder(where.runs / job.key)
    with folder.owned():
        _perform(job, folder, where, watch)
    if where.keep is not None:
        keep(folder, where.keep / job.key)


def _perform(job: Job, folder: RunFolder, where: Where, watch: Callable[[float], None]) -> None:
    fabric = Fabric(accelerator="auto", devices=1)

    def step(step: Step) -> None:
        watch(0.8 * step.step / step.steps)

    if not folder.finished or folder.interrupted:  # or killed between the model and the end
        train(job.run, folder, fabric, directory=where.data, resume=folder.interrupted, watch=step)
    for test in job.tests:
        name = evaluated_name(job.run.source, test)
        if evaluation(folder, job.run, name, job.samples) is None:
            images = test_images(folder, job.run.source, directory=where.data)
            if test is not None:
                part = images if test.images is None else images.balanced(test.images, seed=0)
                images = corrupted(part, test.kind, test.severity, seed=0)
            evaluate(folder, fabric, source=name, images=images, samples=job.samples)
        if test is not None:  # many and large; their scores are kept
            folder.remove(folder.predictions_name(name, job.run.method.calibrator))
    for source in job.outside:
        if evaluation(folder, job.run, source, job.samples) is None:
            evaluate(folder, fabric, source=source, directory=where.data, samples=job.samples)


def keep(folder: RunFolder, target: Path) -> None:
    """Copy what is small of a run: its description, scores and log, without the command line, which names places."""
    with reporting(target):
        target.mkdir(parents=True, exist_ok=True)
        remove_leftovers(target)
        for pattern in SMALL:
            for file in folder.path.glob(pattern):
                write_whole(target / file.name, file.read_bytes())
        described = read_json(folder.path / "run.json")
        described["environment"].pop("command", None)
        write_whole(target / "run.json", (json.dumps(described, indent=1) + "\n").encode())  # last: then it counts


def _keep_finished(cells: Iterable[Cell], where: Where) -> None:
    """Keep what is finished and was not kept, by a process that was killed in between."""
    if where.keep is not None:
        for job in jobs_of(cells):
            if done_folder(job, where, {}) is not None and done_folder(job, Where(where.keep), {}) is None:
                keep(RunFolder(where.runs / job.key), where.keep / job.key)


def missing(cells: Iterable[Cell], where: Where) -> list[Job]:
    """The jobs that are still to be done."""
    results = finished_results(where.results)
    return [job for job in jobs_of(cells) if done_folder(job, where, results) is None]


def run_missing(
    cells: Iterable[Cell],
    where: Where,
    *,
    jobs: int = 1,
    watch: Callable[[Progress], None] = lambda progress: None,
) -> dict[str, str]:
    """Run what is missing for some cells; what failed, by key, with the reason. The others go on.

    Of two processes with the same place for their runs the second is refused.
    """
    with owned(where.runs):
        return _run_missing(list(cells), where, jobs, watch)


def _run_missing(cells: Sequence[Cell], where: Where, jobs: int, watch: Callable[[Progress], None]) -> dict[str, str]:
    _keep_finished(cells, where)
    todo = missing(cells, where)
    absent = {source for job in todo for source in job.sources if not SOURCES[source].is_here(where.data)}
    left_out = [job for job in todo if absent & set(job.sources)]
    todo = [job for job in todo if not absent & set(job.sources)]
    tally = _Tally(sum(job.seconds for job in todo), len(todo))
    for source in sorted(absent):
        count = sum(source in job.sources for job in left_out)
        tally.failures[source] = (
            f"{source} is not in {data_directory(where.data)}, so {count} runs were not made; --data or CALGP_DATA "
            "names its folder."
        )
    watch(tally.progress(""))
    if todo and jobs == 1:
        _here(todo, where, tally, watch)
    elif todo:
        _in_processes(todo, where, jobs, tally, watch)
    return tally.failures


def rows_of(cells: Iterable[Cell], where: Where) -> list[Row]:
    """A row for each cell, from the runs that are done."""
    results = finished_results(where.results)
    rows = []
    for cell in cells:
        wanted = [Job(run, cell.samples, (cell.test,), (cell.outside,) if cell.outside else ()) for run in cell.runs]
        found = [done_folder(job, where, results) for job in wanted]
        rows.append(row_of(cell, [folder for folder in found if folder is not None]))
    return rows


def _here(todo: Sequence[Job], where: Where, tally: _Tally, watch: Callable[[Progress], None]) -> None:
    for job in todo:
        name = f"{job.run.label} on {job.run.source}, seed {job.run.seed}"
        watch(tally.progress(name))

        def share(part: float, job: Job = job, name: str = name) -> None:
            watch(tally.progress(name, part * job.seconds))

        try:
            perform(job, where, share)
        except Interrupted:
            raise Interrupted("Stopped; nothing is lost. The same command goes on where it was.") from None
        except FAILURES as error:
            tally.failures[job.key] = f"{name}: {error}"
        tally.work, tally.done = tally.work + job.seconds, tally.done + 1
        watch(tally.progress(name))


def _in_processes(
    todo: Sequence[Job], where: Where, jobs: int, tally: _Tally, watch: Callable[[Progress], None]
) -> None:
    """Each process has one thread; a run under way is watched by the log that it writes."""
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=work_alone) as pool:
        futures: dict[Future[None], Job] = {pool.submit(perform, job, where): job for job in todo}
        try:
            pending = set(futures)
            while pending:
                ended, pending = wait(pending, timeout=1.0, return_when=FIRST_COMPLETED)
                for future in ended:
                    _ended(future, futures[future], tally)
                running = [futures[future] for future in pending if future.running()]
                under_way = sum(job.seconds * _share(job, where) for job in running)
                watch(tally.progress(f"{len(running)} runs at a time", under_way))
        except KeyboardInterrupt:
            pool.shutdown(wait=True, cancel_futures=True)  # those under way save themselves
            raise Interrupted("Stopped; nothing is lost. The same command goes on where it was.") from None


def _ended(future: Future[None], job: Job, tally: _Tally) -> None:
    tally.work, tally.done = tally.work + job.seconds, tally.done + 1
    try:
        future.result()
    except Interrupted:
        raise KeyboardInterrupt from None
    except BrokenProcessPool:
        raise CalgpError(
            "A process died, perhaps for want of memory; nothing is lost. The same command goes on; try fewer --jobs."
        ) from None
    except FAILURES as error:
        tally.failures[job.key] = f"{job.run.label} on {job.run.source}, seed {job.run.seed}: {error}"


def _share(job: Job, where: Where) -> float:
    """How much of a run is done, by its log."""
    folder = RunFolder(where.runs / job.key)
    try:
        steps = job.run.total_steps(folder.card().train_images)
        return 0.8 * folder.log()[-1]["step"] / steps
    except (CalgpError, IndexError):
        return 0.0


def work_alone() -> None:
    """What a process of the pool needs first: one thread, no chatter, and an end when its parent ends.

    Ctrl-C is the parent's business; a training under way hears it itself, and saves.
    """
    logging.getLogger("lightning_fabric").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning_fabric")
    keep_freed_memory()
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_follow_parent, daemon=True).start()


def _follow_parent() -> None:
    """A parent that is killed cannot end its processes: they would wait for work for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
