"""A list of jobs, each a run and all that it is tested on: done like make, so that what is done stays done."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from lightning_fabric import Fabric

from calgp.data import Images, data_directory
from calgp.data.corruptions import corrupted
from calgp.data.sources import open_source
from calgp.errors import CalgpError
from calgp.run import Run
from calgp.runs import Classifier, Evaluation, RunFolder, identity
from calgp.runs.evaluation import test_images
from calgp.runs.reading import read_json
from calgp.runs.training_data import held_out_images
from calgp.runs.writing import wrap_os_errors, write_files
from calgp.search.duration import count_of_test_images, count_of_training_images, seconds
from calgp.search.engines import Engine, RunningTask, SerialEngine
from calgp.search.image_scores import image_scores, image_scores_name, packed
from calgp.training import train_run

TEMPERATURE = "temperature"
SMALL = ("scores-*.json", "log.jsonl", "calibration.json")  # what is kept of a run besides run.json


@dataclass(frozen=True)
class Shift:
    """Test images made worse: how, how much, and how many of them (a balanced part; None: all)."""

    kind: str
    severity: int
    images: int | None = None

    def applied_to(self, images: Images) -> Images:
        part = images if self.images is None else images.balanced(self.images, seed=0)
        return corrupted(part, self.kind, self.severity, seed=0)


@dataclass(frozen=True)
class Job:
    """A run and everything that it is tested on, for all experiments that want it.

    held_out: its hold-out, too. temperature: its own test images also with a temperature from its hold-out.
    shelf: the folder of kept results where those of the run go.
    """

    run: Run
    samples: int
    tests: tuple[Shift | None, ...] = (None,)
    outside: tuple[str, ...] = ()
    held_out: bool = False
    temperature: bool = False
    shelf: str = ""

    @property
    def key(self) -> str:
        return key(self.run)

    @property
    def seconds(self) -> float:
        """About how long it takes on one core."""
        whole = count_of_test_images(self.run.source)
        tests = sum((test and test.images) or whole for test in self.tests)
        held_out = int(self.held_out * (self.run.holdout or 0) * count_of_training_images(self.run))
        images = tests + held_out + sum(map(count_of_test_images, self.outside)) + whole * self.temperature
        return seconds(self.run, passes(self.run, self.samples), images)

    @property
    def name(self) -> str:
        """What people call it."""
        return f"{self.run.label} on {self.run.source}, seed {self.run.seed}"

    @property
    def sources(self) -> tuple[str, ...]:
        """The image sets that it needs."""
        return (self.run.source, *self.outside)

    def share_done(self, where: "Paths") -> float:
        """How much of it is done, by the log of its run."""
        folder = RunFolder(where.runs / self.key)
        try:
            return 0.8 * folder.log()[-1].step / self.run.total_steps(folder.card().train_images)
        except (CalgpError, IndexError):
            return 0.0

    def lacks(self, folder: RunFolder) -> bool:
        """Whether an evaluation is still to be made."""
        return self.lacks_temperature(folder) or any(
            evaluation(folder, self.run, name, self.samples) is None for name in self.names()
        )

    def lacks_temperature(self, folder: RunFolder) -> bool:
        """Whether the evaluation with a temperature is still to be made."""
        return self.temperature and evaluation(folder, self.run, self.run.source, self.samples, TEMPERATURE) is None

    def names(self) -> Iterator[str]:
        yield from [held_out_name(self.run.source)] * self.held_out
        yield from (evaluated_name(self.run.source, test) for test in self.tests)
        yield from self.outside

    def perform(self, where: "Paths", watch: Callable[[float], None] = lambda share: None) -> None:
        """Train a run, or go on with it, and make the evaluations that it lacks. It may be killed at any moment."""
        folder = RunFolder(where.runs / self.key)
        fabric = Fabric(accelerator="auto", devices=1, precision=where.precision)  # pyright: ignore[reportArgumentType]
        with folder.owned():
            if not folder.finished or folder.interrupted:  # or killed between the model and the end
                train_run(
                    self.run, folder, fabric, directory=where.data, resume=folder.interrupted,
                    watch=lambda step: watch(0.8 * step.step / step.steps),
                )  # fmt: skip
            # calibrated as the method means it: runs are compared by what was trained
            classifier = Classifier.load(folder, fabric=fabric, calibrated=self.run.method.calibrator is not None)
            source, count = self.run.source, passes(self.run, self.samples)
            missing = [name for name in self.names() if evaluation(folder, self.run, name, self.samples) is None]
            if (name := held_out_name(source)) in missing:
                images = held_out_images(folder.path, classifier.card, where.data)
                classifier.evaluate(name, images=images, passes=count)
            for test in self.tests:
                if (name := evaluated_name(source, test)) in missing:
                    images = test_images(classifier.card, source, directory=where.data)
                    classifier.evaluate(name, images=test.applied_to(images) if test else images, passes=count)
                if test is not None:  # many and large; their scores are kept
                    folder.remove(folder.predictions_name(name, self.run.method.calibrator))
            for name in self.outside:
                if name in missing:
                    classifier.evaluate(name, directory=where.data, passes=count)
            if self.lacks_temperature(folder):
                classifier.calibrate(TEMPERATURE, directory=where.data, passes=count)
                classifier.evaluate(source, directory=where.data, passes=count)
        if where.keep is not None:
            keep(folder, where.keep / self.shelf / self.key)


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


def evaluation(
    folder: RunFolder, run: Run, source: str, samples: int, calibrator: str | None = None
) -> Evaluation | None:
    """The evaluation of a run on a source, with a calibrator or as its method means it (which may have its own)."""
    found = folder.evaluation(source, calibrator or run.method.calibrator)
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


def keep(folder: RunFolder, target: Path) -> None:
    """Copy what is small of a run: its description, scores, per-image scores and log, without the command line."""
    files: dict[str, bytes | str] = {}
    for evaluated in folder.evaluations():
        if (found := image_scores(folder, evaluated)) is not None:
            files[image_scores_name(folder, evaluated)] = packed(found)
    with wrap_os_errors(target):
        files |= {file.name: file.read_bytes() for pattern in SMALL for file in folder.path.glob(pattern)}
    described = read_json(folder.path / "run.json")
    described["environment"].pop("command", None)
    write_files(target, files | {"run.json": json.dumps(described, indent=1) + "\n"})  # last: then it counts


def run_jobs(
    todo: Sequence[Job], where: Paths, *, engine: Engine = SerialEngine(), watch: Callable[[Progress], None]
) -> dict[str, str]:
    """Do all these jobs; what failed, by key, or by the source that is not there, with the reason."""
    absent = {source for job in todo for source in job.sources if not open_source(source).is_available(where.data)}
    left_out = [job for job in todo if absent & set(job.sources)]
    todo = [job for job in todo if not absent & set(job.sources)]
    failures = {
        source: f"{source} is not in {data_directory(where.data)}, so {sum(source in job.sources for job in left_out)} "
        "runs were not made; --data or CALGP_DATA names its folder."
        for source in sorted(absent)
    }
    so_far = Progress(0.0, sum(job.seconds for job in todo), 0, len(todo), len(failures), "")

    def ended(job: Job, failure: str | None) -> None:
        nonlocal so_far
        if failure is not None:
            failures[job.key] = f"{job.name}: {failure}"
        work, done = so_far.work + job.seconds, so_far.done + 1
        so_far = replace(so_far, work=work, done=done, failed=len(failures), now=job.name)
        watch(so_far)

    def under_way(seen: Sequence[RunningTask[Job]]) -> None:
        shares = [(under.task, under.task.share_done(where) if under.share is None else under.share) for under in seen]
        now = shares[0][0].name if len(shares) == 1 else f"{len(shares)} runs at a time"
        watch(replace(so_far, work=so_far.work + sum(job.seconds * share for job, share in shares), now=now))

    watch(so_far)
    if todo:
        engine.run(partial(Job.perform, where=where.absolute()), todo, ended=ended, watch=under_way)
    return failures
