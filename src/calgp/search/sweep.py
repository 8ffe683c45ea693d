"""Many runs over a grid of options, or drawn at random, and which of them held-out images find best."""

import itertools
import json
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

from calgp.errors import CalgpError
from calgp.json_values import Json
from calgp.options import COUNT, Text, check_options, find_option, json_or_text, option, validate
from calgp.report.csv_text import csv_text
from calgp.report.sweep import sweep_page
from calgp.run import SEED, Run, assign, train_command
from calgp.runs import RunFolder, from_json
from calgp.runs.comparison import METRICS, average
from calgp.runs.writing import owned, write_files
from calgp.search.engines import Engine, SerialEngine
from calgp.search.jobs import Job, Paths, Progress, done_folder, evaluation, held_out_name, run_jobs

KINDS = ("uniform", "loguniform", "integer")
LARGEST = 100_000  # runs: more is a mistake in a grid


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high` to draw from: evenly, evenly in their logarithm, or whole ones."""

    kind: str
    low: float
    high: float

    def draw(self, generator: random.Random) -> float:
        """A number with four digits, so that it can be written down; a whole one has them all."""
        if self.kind == "integer":
            return generator.randint(int(self.low), int(self.high))
        if self.kind == "loguniform":
            drawn = math.exp(generator.uniform(math.log(self.low), math.log(self.high)))
        else:
            drawn = generator.uniform(self.low, self.high)
        return min(max(float(f"{drawn:.4g}"), self.low), self.high)


Axis = tuple[Json, ...] | Range


@dataclass(frozen=True)
class Sweep:
    """What varies and what does not: options of runs as plain data, names and values of axes, seeds."""

    options: Mapping[str, Json]
    axes: Mapping[str, Axis]
    seeds: tuple[int, ...] = option((0,), "Of the runs of each setting.", within=SEED)
    random: int | None = option(
        None, "How many settings are drawn; none: all combinations of the values.", within=COUNT, example=20
    )
    draw_seed: int = option(0, "Of the settings that are drawn.", within=SEED)
    samples: int = option(50, "Draws of the masks in evaluations.", within=COUNT)
    evaluate: bool = option(False, "Score the test images, too; nothing is chosen by them.")

    def __post_init__(self) -> None:
        check_options(self)
        if "seed" in self.axes or "seed" in self.options:
            raise CalgpError("The seeds of a sweep are given by --seeds 0,1,2; leave seed out of its options.")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise CalgpError(f"Invalid seeds={list(self.seeds)}: must be some, each once, such as 0,1,2.")
        ranges = [name for name, axis in self.axes.items() if isinstance(axis, Range)]
        if ranges and self.random is None:
            raise CalgpError(f"{ranges[0]} is a range, which has no grid; --random 20 draws 20 settings.")
        if (self.random or self.size) * len(self.seeds) > LARGEST:
            raise CalgpError(f"These are more than {LARGEST:,} runs; --random 100 draws 100 settings from them.")

    @property
    def size(self) -> int:
        """How many combinations of values there are; of ranges there is no end, which is not counted."""
        return math.prod(len(axis) for axis in self.axes.values() if not isinstance(axis, Range))

    def settings(self) -> list[dict[str, Json]]:
        """The values of each axis: all combinations, or as many draws; the first of more draws are those of fewer."""
        endless = any(isinstance(axis, Range) for axis in self.axes.values())
        if self.random is None or (not endless and self.random >= self.size):
            values = [axis for axis in self.axes.values() if not isinstance(axis, Range)]
            return [dict(zip(self.axes, chosen, strict=True)) for chosen in itertools.product(*values)]
        found: dict[str, dict[str, Json]] = {}
        for index in range(100 * self.random + 1000):  # whole numbers of a short range may not be so many
            generator = random.Random(f"{self.draw_seed}/{index}")  # noqa: S311 (nothing is secret)
            axes = self.axes.items()
            setting = {n: a.draw(generator) if isinstance(a, Range) else generator.choice(a) for n, a in axes}
            found.setdefault(json.dumps(setting), setting)
            if len(found) == self.random:
                break
        return list(found.values())

    def run(self, setting: Mapping[str, Json], seed: int) -> Run:
        """The run of a setting."""
        options: dict[str, Json] = {**self.options, "seed": seed}
        # a method before its options, whatever the order they were named in
        for name, value in sorted(setting.items(), key=lambda item: item[0].count(".")):
            options = assign(options, name, value)
        try:
            # settings are compared by what was trained
            run = from_json({"holdout": 0.1, **options, "calibration": False})
        except CalgpError as error:
            raise CalgpError(f"{worded(setting) or 'The sweep'}: {error}") from None
        if not run.holdout:
            raise CalgpError("A sweep chooses by images that runs hold out; --holdout 0.1 keeps a tenth of them.")
        return run

    def jobs_by_setting(self) -> list[tuple[dict[str, Json], list[Job]]]:
        """Each setting with its runs, one a seed."""
        tests = (None,) if self.evaluate else ()
        return [
            (setting, [Job(self.run(setting, seed), self.samples, tests, held_out=True) for seed in self.seeds])
            for setting in self.settings()
        ]

    def jobs(self) -> list[Job]:
        """All runs, each once, the cheapest first: a function of this description alone."""
        found = {job.key: job for _, jobs in self.jobs_by_setting() for job in jobs}
        return sorted(found.values(), key=lambda job: job.seconds)


@dataclass(frozen=True)
class SweepResult:
    """What the runs of a setting found: (mean, standard error over seeds) of each metric, on hold-out and test images.

    seeds: of the runs that are done, of `planned`. seconds: of training, a run.
    """

    setting: Mapping[str, Json]
    run: Run
    seeds: tuple[int, ...]
    planned: int
    held_out: dict[str, tuple[float, float | None]]
    test: dict[str, tuple[float, float | None]]
    seconds: float | None = None
    folders: tuple[str, ...] = field(default=())

    @property
    def order(self) -> tuple[bool, float]:
        """By the MNLL of the hold-out; settings whose runs are not all done, or failed, come last."""
        return len(self.seeds) < self.planned, self.held_out.get("mnll", (math.inf, None))[0]


def worded(setting: Mapping[str, Json]) -> str:
    """A setting as the command line has it.

    >>> worded({"method.keep": 0.5, "schedule": "cosine"})
    'method.keep=0.5 schedule=cosine'
    """
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in setting.items()}
    return " ".join(f"{name}={text}" for name, text in texts.items())


def parse_axis(text: str) -> tuple[str, Axis]:
    """The name and the values of an axis, of NAME=VALUE,VALUE,… or NAME=KIND:LOW:HIGH.

    >>> parse_axis("lr=1e-3,3e-3")
    ('learning_rate', (0.001, 0.003))
    >>> parse_axis("backbone.channels=[2, 4],[4, 8]")
    ('backbone.channels', ([2, 4], [4, 8]))
    >>> parse_axis("lr=loguniform:1e-4:1e-2")
    ('learning_rate', Range(kind='loguniform', low=0.0001, high=0.01))
    """
    name, equals, values = text.partition("=")
    if not (name and equals and values):
        raise CalgpError(f"Invalid --grid {text}: must be NAME=VALUE,VALUE,… such as method.keep=0.5,0.9.")
    return axis_of(name, values)


def axis_of(name: str, given: Json) -> tuple[str, Axis]:
    """The same of a name and a text, or of a list, as a TOML file has it."""
    name = name if "." in name else find_option(Run, name, of="run").name
    if isinstance(given, str) and given.split(":")[0] in KINDS:
        return name, _range(name, given)
    if isinstance(given, str):  # JSON values with commas between them, or texts
        values = json_or_text(f"[{given}]")
        values = values if isinstance(values, list) else [json_or_text(part) for part in given.split(",")]
    else:
        values = given if isinstance(given, list) else [given]
    values = [Text(value) if isinstance(value, str) else value for value in values]
    if not values or any(values.count(value) > 1 for value in values):
        raise CalgpError(f"{name} has {values} in the grid; give it values that differ.")
    return name, tuple(values)


def described(options: Mapping[str, Json], grid: Iterable[str], **given: Json) -> Sweep:
    """A sweep of plain data, whose tables `grid` and `sweep` go behind the axes and the options given (None: not)."""
    options = dict(options)
    axes, sweep = options.pop("grid", {}), options.pop("sweep", {})
    if not isinstance(axes, dict) or not isinstance(sweep, dict):
        raise CalgpError("grid and sweep must be tables: [grid] of names and values, [sweep] of seeds, random …")
    found = dict(axis_of(name, given) for name, given in axes.items()) | dict(map(parse_axis, grid))
    own = {name: value for name, value in given.items() if value is not None}
    return validate(Sweep, {**sweep, **own, "options": options, "axes": found}, of="sweep")


def _range(name: str, text: str) -> Range:
    kind, *ends = text.split(":")
    try:
        low, high = map(float, ends)
    except ValueError:
        raise CalgpError(f"{name}={text} is no range; it is {kind}:LOW:HIGH, such as loguniform:1e-4:1e-2.") from None
    if not -math.inf < low < high < math.inf or (kind == "loguniform" and low <= 0):
        raise CalgpError(f"Invalid {name}={text}: LOW must be below HIGH, and above 0 in a loguniform range.")
    return Range(kind, low, high)


@dataclass(frozen=True)
class Part:
    """Each count-th job from the index-th on: parts 1/3, 2/3 and 3/3 are disjoint and together everything."""

    index: int
    count: int

    @staticmethod
    def parse(text: str) -> "Part":
        """
        >>> Part.parse("3/10")
        Part(index=3, count=10)
        """
        index, slash, count = text.partition("/")
        if not (slash and index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
            raise CalgpError(f"Invalid --part {text}: must be INDEX/COUNT, from 1/10 to 10/10.")
        return Part(int(index), int(count))

    def of(self, jobs: Sequence[Job]) -> Sequence[Job]:
        return jobs[self.index - 1 :: self.count]


def missing_jobs(sweep: Sweep, where: Paths, part: Part | None = None) -> list[Job]:
    """The runs of a sweep, or of a part of it, that are still to be made."""
    jobs = sweep.jobs()
    return [job for job in (part.of(jobs) if part else jobs) if done_folder(job, where, {}) is None]


def run_sweep(
    sweep: Sweep,
    out: Path,
    *,
    data: Path | None = None,
    part: Part | None = None,
    engine: Engine = SerialEngine(),
    watch: Callable[[Progress], None] = lambda progress: None,
) -> dict[str, str]:
    """Make the runs that are missing in out/runs; what failed, by key, with the reason. The others go on.

    Several parts may run at once, on one machine or many that share the folder; of two processes with the same part,
    or with the whole, the second is refused.
    """
    where = Paths(out / "runs", data=data)
    with owned(where.runs if part is None else out / "parts" / f"{part.index}-of-{part.count}"):
        return run_jobs(missing_jobs(sweep, where, part), where, engine=engine, watch=watch)


def found_by(sweep: Sweep, out: Path) -> list[SweepResult]:
    """A row for each setting, the best on the hold-out first."""
    rows = (_found(sweep, setting, jobs, Paths(out / "runs")) for setting, jobs in sweep.jobs_by_setting())
    return sorted(rows, key=lambda found: found.order)


def _found(sweep: Sweep, setting: Mapping[str, Json], jobs: Sequence[Job], where: Paths) -> SweepResult:
    run = jobs[0].run
    done = [(job.run, folder) for job in jobs if (folder := done_folder(job, where, {})) is not None]
    return SweepResult(
        setting,
        run,
        seeds=tuple(run.seed for run, _ in done),
        planned=len(jobs),
        held_out=_averages(done, sweep, held_out_name(run.source)),
        test=_averages(done, sweep, run.source) if sweep.evaluate else {},
        seconds=mean(folder.train_seconds() for _, folder in done) if done else None,
        folders=tuple(job.key for job in jobs),
    )


def _averages(done: Iterable[tuple[Run, RunFolder]], sweep: Sweep, name: str) -> dict[str, tuple[float, float | None]]:
    found = [evaluation(folder, run, name, sweep.samples) for run, folder in done]
    scores = [each.own.scores for each in found if each is not None]
    return {name: average([getattr(each, name) for each in scores]) for name in METRICS} if scores else {}


def plain_rows(found: Iterable[SweepResult]) -> list[dict[str, str | float | None]]:
    """Rows for a CSV file: the setting, the seeds, and each metric with its standard error."""
    rows = []
    for each in found:
        row: dict[str, str | float | None] = {
            name: value if isinstance(value, str | int | float) else json.dumps(value)
            for name, value in each.setting.items()
        }
        row |= {"seeds": " ".join(map(str, each.seeds)), "planned": each.planned}
        for place, metrics in (("holdout", each.held_out), ("test", each.test)):
            for name, (value, error) in metrics.items():
                row |= {f"{place}_{name}": value, f"{place}_{name}_se": error}
        rows.append(row | {"train_seconds": each.seconds})
    return rows


def best_command(found: Sequence[SweepResult]) -> str | None:
    """The command that trains the best setting; None where no setting has all its runs."""
    return train_command(found[0].run) if found and len(found[0].seeds) == found[0].planned else None


def write_sweep(
    sweep: Sweep, found: Sequence[SweepResult], out: Path, *, command: str, failures: Mapping[str, str]
) -> dict[str, Json]:
    """Write table.csv, table.json and report.html; what the JSON holds."""
    rows = plain_rows(found)
    best = best_command(found)
    table: dict[str, Json] = {
        "command": command,
        "seeds": list(sweep.seeds),
        "samples": sweep.samples,
        "rows": [{**row, "setting": each.setting, "runs": each.folders} for row, each in zip(rows, found, strict=True)],
        "best": best,
        "failures": dict(failures),
    }
    page = sweep_page(
        title=" × ".join(sweep.axes) or "One setting",
        command=command,
        best=best,
        rows=[(worded(one.setting), f"{len(one.seeds)} of {one.planned}", one.held_out, one.test) for one in found],
        failures=list(failures.values()),
    )
    files = {"table.csv": csv_text(rows), "table.json": json.dumps(table, indent=1) + "\n", "report.html": page}
    write_files(out, files)
    return table
