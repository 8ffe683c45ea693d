"""A list of jobs, each a run and all that it is tested on: done like make, so that what is done stays done."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from lightning_fabric import Fabric

from calgp.data import data_directory
from calgp.data.corruptions import corrupted
from calgp.data.sources import open_source
from calgp.errors import CalgpError
from calgp.run import Run
from calgp.runs.classifier import Classifier
from calgp.runs.description import identity
from calgp.runs.evaluation import test_images
from calgp.runs.folder import RunFolder
from calgp.runs.reading import read_json
from calgp.runs.results import Evaluation
from calgp.runs.training_data import held_out_images
from calgp.runs.writing import remove_leftovers, wrap_os_errors, write_whole
from calgp.search.duration import count_of_test_images, count_of_training_images, seconds
from calgp.search.engines import Engine, RunningTask, SerialEngine
from calgp.search.image_scores import image_scores, image_scores_name, packed
from calgp.training.loop import Step
from calgp.training.run_training import train_run

SMALL = ("scores-*.json", "log.jsonl", "calibration.json")  # what is kept of a run besides run.json


@dataclass(frozen=True)
class Shift:
    """Test images made worse: how, how much, and how many of them (a balanced part; None: all)."""

    kind: str
    severity: int
    images: int | None = None


@dataclass(frozen=True)
class Job:
    """A run and everything that it is tested on, for all experiments that want it; `held_out`: its hold-out, too."""

    run: Run
    samples: int
    tests: tuple[Shift | None, ...] = (None,)
    outside: tuple[str, ...] = ()
    held_out: bool = False

    @property
    def key(self) -> str:
        return key(self.run)

    @property
    def seconds(self) -> float:
        """About how long it takes on one core."""
        whole = count_of_test_images(self.run.source)
        tests = sum((test and test.images) or whole for test in self.tests)
        held_out = int(self.held_out * (self.run.holdout or 0) * count_of_training_images(self.run))
        images = tests + held_out + sum(map(count_of_test_images, self.outside))
        return seconds(self.run, passes(self.run, self.samples), images)

    @property
    def name(self) -> str:
        """What people call it."""
        return f"{self.run.label} on {self.run.source}, seed {self.run.seed}"

    @property
    def sources(self) -> tuple[str, ...]:
        """The image sets that it needs."""
        return (self.run.source, *self.outside)

    def lacks(self, folder: RunFolder) -> bool:
        """Whether an evaluation is still to be made."""
        return any(evaluation(folder, self.run, name, self.samples) is None for name in self.names())

    def names(self) -> Iterator[str]:
        yield from [held_out_name(self.run.source)] * self.held_out
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
class Paths:
    """Places: where runs are made, where small results of finished ones are looked for and kept, where images lie.

    Rows and pages are made from small results alone: those in `results`, in this order, and those in `keep`.
    """

    runs: Path
    results: tuple[Path, ...] = ()
    keep: Path | None = None
    data: Path | None = None
    precision: str = "32-true"  # of trainings

    @property
    def small(self) -> tuple[Path, ...]:
        """All folders of small results, those that were given first."""
        return (*self.results, *([] if self.keep is None else [self.keep]))

    def absolute(self) -> "Paths":
        """The same for processes that are elsewhere."""
        places = {"runs": self.runs, "keep": self.keep, "data": data_directory(self.data)}
        absolute = {name: None if path is None else path.absolute() for name, path in places.items()}
        return replace(self, results=tuple(path.absolute() for path in self.results), **absolute)


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


def evaluated_name(source: str, test: Shift | None) -> str:
    """What evaluations of a source, or of its corrupted images, are called."""
    if test is None:
        return source
    return f"{source} {test.kind} {test.severity}" + (f" of {test.images}" if test.images else "")


def held_out_name(source: str) -> str:
    """What evaluations of the hold-out of a run are called."""
    return f"{source} hold-out"


def evaluation(folder: RunFolder, run: Run, source: str, samples: int) -> Evaluation | None:
    """The evaluation of a run on a source as its method means it (calibrated, where that is part of the method)."""
    found = folder.evaluation(source, run.method.calibrator)
    return found if found is not None and found.samples == passes(run, samples) else None


def passes(run: Run, samples: int) -> int:
    """How many passes predict for a run where others have so many samples: one, if its last layer is integrated."""
    return 1 if run.method.integrate else samples


def finished_results(paths: Iterable[Path]) -> dict[str, list[RunFolder]]:
    """By key, run folders below `paths`, whatever their names, that can be read: small results kept in a repository."""
    found: dict[str, list[RunFolder]] = {}
    for file in (file for path in dict.fromkeys(paths) if path.is_dir() for file in sorted(path.rglob("run.json"))):
        folder = RunFolder(file.parent)
        try:
            card = folder.card()
        except CalgpError:  # of another version or damaged: it will be run
            continue
        if not card.members:
            found.setdefault(key(card.run), []).append(folder)
    return found


def done_folder(job: Job, where: Paths, results: Mapping[str, Sequence[RunFolder]]) -> RunFolder | None:
    """The folder that has all evaluations of a job; None if it is still to be run."""
    return first_done(job, (RunFolder(where.runs / job.key), *results.get(job.key, ())))


def first_done(job: Job, folders: Iterable[RunFolder]) -> RunFolder | None:
    for folder in folders:
        if (folder.path / "run.json").is_file() and not job.lacks(folder):
            return folder
    return None


def perform(job: Job, where: Paths, watch: Callable[[float], None] = lambda share: None) -> None:
    """Train a run, or go on with it, and make the evaluations that it lacks. It may be killed at any moment."""
    folder = RunFolder(where.runs / job.key)
    with folder.owned():
        _perform(job, folder, where, watch)
    if where.keep is not None:
        keep(folder, where.keep / job.key)


def _perform(job: Job, folder: RunFolder, where: Paths, watch: Callable[[float], None]) -> None:
    fabric = Fabric(accelerator="auto", devices=1, precision=where.precision)  # pyright: ignore[reportArgumentType]

    def step(step: Step) -> None:
        watch(0.8 * step.step / step.steps)

    if not folder.finished or folder.interrupted:  # or killed between the model and the end
        train_run(job.run, folder, fabric, directory=where.data, resume=folder.interrupted, watch=step)
    calibrated = job.run.method.calibrator is not None  # as the method means it: runs are compared by what was trained
    classifier = Classifier.load(folder, fabric=fabric, calibrated=calibrated)
    count = passes(job.run, job.samples)
    name = held_out_name(job.run.source)
    if job.held_out and evaluation(folder, job.run, name, job.samples) is None:
        classifier.evaluate(name, images=held_out_images(folder.path, classifier.card, where.data), passes=count)
    for test in job.tests:
        name = evaluated_name(job.run.source, test)
        if evaluation(folder, job.run, name, job.samples) is None:
            images = test_images(classifier.card, job.run.source, directory=where.data)
            if test is not None:
                part = images if test.images is None else images.balanced(test.images, seed=0)
                images = corrupted(part, test.kind, test.severity, seed=0)
            classifier.evaluate(name, images=images, passes=count)
        if test is not None:  # many and large; their scores are kept
            folder.remove(folder.predictions_name(name, job.run.method.calibrator))
    for source in job.outside:
        if evaluation(folder, job.run, source, job.samples) is None:
            classifier.evaluate(source, directory=where.data, passes=count)


def keep(folder: RunFolder, target: Path) -> None:
    """Copy what is small of a run: its description, scores, per-image scores and log, without the command line."""
    with wrap_os_errors(target):
        target.mkdir(parents=True, exist_ok=True)
        remove_leftovers(target)
        for evaluated in folder.evaluations():
            if (found := image_scores(folder, evaluated)) is not None:
                write_whole(target / image_scores_name(folder, evaluated), packed(found))
        for pattern in SMALL:
            for file in folder.path.glob(pattern):
                write_whole(target / file.name, file.read_bytes())
        described = read_json(folder.path / "run.json")
        described["environment"].pop("command", None)
        write_whole(target / "run.json", (json.dumps(described, indent=1) + "\n").encode())  # last: then it counts


def run_jobs(
    todo: Sequence[Job], where: Paths, *, engine: Engine = SerialEngine(), watch: Callable[[Progress], None]
) -> dict[str, str]:
    """Do all these jobs; what failed, by key, or by the source that is not there, with the reason."""
    absent = {source for job in todo for source in job.sources if not open_source(source).is_available(where.data)}
    left_out = [job for job in todo if absent & set(job.sources)]
    todo = [job for job in todo if not absent & set(job.sources)]
    tally = _Tally(sum(job.seconds for job in todo), len(todo))
    for source in sorted(absent):
        count = sum(source in job.sources for job in left_out)
        tally.failures[source] = (
            f"{source} is not in {data_directory(where.data)}, so {count} runs were not made; --data or CALGP_DATA "
            "names its folder."
        )

    def ended(job: Job, failure: str | None) -> None:
        if failure is not None:
            tally.failures[job.key] = f"{job.name}: {failure}"
        tally.work, tally.done = tally.work + job.seconds, tally.done + 1
        watch(tally.progress(job.name))

    def under_way(seen: Sequence[RunningTask[Job]]) -> None:
        shares = [(under.task, share_done(under.task, where) if under.share is None else under.share) for under in seen]
        now = shares[0][0].name if len(shares) == 1 else f"{len(shares)} runs at a time"
        watch(tally.progress(now, sum(job.seconds * share for job, share in shares)))

    watch(tally.progress(""))
    if todo:
        engine.run(partial(perform, where=where.absolute()), todo, ended=ended, watch=under_way)
    return tally.failures


def share_done(job: Job, where: Paths) -> float:
    """How much of a run is done, by its log."""
    folder = RunFolder(where.runs / job.key)
    try:
        steps = job.run.total_steps(folder.card().train_images)
        return 0.8 * folder.log()[-1].step / steps
    except (CalgpError, IndexError):
        return 0.0
