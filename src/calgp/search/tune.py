"""Equal tuning: every method gets the same pilots and the same steps, judged by the MNLL of the same hold-out.

Test images are never loaded. A search is resumed by doing it again: pilots that are done are read, not trained.
"""

import json
import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, ClassVar

import torch
from pydantic import ConfigDict, PlainSerializer, PlainValidator, ValidationError

from calgp import metrics
from calgp.errors import CalgpError
from calgp.gp import NumericalError
from calgp.methods.space import Axis
from calgp.options import adapter
from calgp.runs import Run, RunFolder
from calgp.runs.description import from_folder, to_json
from calgp.runs.fit_calibrator import cross_fitted
from calgp.runs.reading import read_json
from calgp.runs.writing import write_files
from calgp.search.jobs import Job, Paths, done_folder, evaluation, held_out_name

from .halving import Attempt, Budget, Edge, Options, Pilot, Search, best_of, edges_of, successive_halving

__all__ = ["Budget", "Edge", "MadeBy", "Pilot", "TuningLog", "read_log", "tune", "with_options", "write_log"]

HOLDOUT = 0.1  # the share of the training images that judges, unless the run has its own
LEARNED = 0.9  # of the MNLL of a guess: what the best first pilot must be below
FORMAT = 1


@dataclass(frozen=True)
class MadeBy:
    """The software that made the pilots, and when the last of them began."""

    calgp: str
    torch: str
    device: str
    precision: str
    date: str


@dataclass(frozen=True)
class TuningLog:
    """The whole search of one method.

    base: the run that was tuned. declared: its method's space. searched: the same after widening and refining.
    classes: of the images; 0 if it is not known.
    """

    __pydantic_config__: ClassVar = ConfigDict(ser_json_inf_nan="strings")  # JSON has no infinite numbers

    base: Annotated[Run, PlainValidator(from_folder), PlainSerializer(to_json)]
    budget: Budget
    declared: dict[str, Axis]
    searched: dict[str, Axis]
    pilots: tuple[Pilot, ...]
    made_by: MadeBy
    classes: int = 0
    format: int = field(default=FORMAT)

    def __post_init__(self) -> None:
        for rung, (count, steps) in enumerate(self.budget.rungs):
            found = [pilot.steps for pilot in self.pilots if pilot.rung == rung]
            if found != [steps] * count:
                raise CalgpError(
                    f"Rung {rung} of the tuning of {self.base.label} has {len(found)} pilots of {sorted(set(found))} "
                    f"steps; its budget is {count} pilots of {steps} steps."
                )
        if not any(pilot.order < math.inf for pilot in self.pilots):
            raise CalgpError(f"No pilot of the tuning of {self.base.label} has a score.")

    def is_of(self, base: Run, budget: Budget) -> bool:
        """Whether this is the search of a run with a budget, over the space that its method declares now."""
        return (self.base, self.budget, self.declared) == (base, budget, dict(base.method.space()))

    @property
    def winner(self) -> Pilot:
        """The lowest MNLL of the last rung; of the one before, should all of the last have failed."""
        best = [best_of(self.pilots, rung)[0] for rung in reversed(range(len(self.budget.rungs)))]
        return next(pilot for pilot in best if pilot.order < math.inf)

    @property
    def edges(self) -> tuple[Edge, ...]:
        """Where the winner stands at an edge of the space, widened as it was."""
        return edges_of(self.searched, self.winner.options)

    @property
    def run(self) -> Run:
        """The base run with the winner's options; its own steps, hold-out and seed."""
        return with_options(self.base, self.winner.options)

    @property
    def against_default(self) -> tuple[Pilot, Pilot]:
        """The base's own options at the last rung that they reached, and the winner's at the same rung."""
        mine = [pilot for pilot in self.pilots if pilot.options == self.pilots[0].options][-1]
        same = (pilot for pilot in self.pilots if pilot.options == self.winner.options and pilot.rung == mine.rung)
        return mine, next(same)

    @property
    def too_short(self) -> bool:
        """Whether the first pilots had learned next to nothing: their ranking, which chose the others, is then chance.

        Probabilities 1/Q for all Q classes have an MNLL of log Q.
        """
        return self.classes > 1 and best_of(self.pilots, 0)[0].order > LEARNED * math.log(self.classes)

    @property
    def steps(self) -> int:
        """Of all pilots together."""
        return sum(pilot.steps for pilot in self.pilots)


def tune(base: Run, budget: Budget, where: Paths, *, watch: Callable[[float], None] = lambda share: None) -> TuningLog:
    """Search the space of a run's method; `watch` hears the share of the budget's steps that is done.

    A pilot whose numbers fail counts with an infinite MNLL. A method with a calibrator is judged by two-fold
    cross-fitting: each half of the hold-out with the calibrator that was fitted on the other half.
    """
    done = 0

    def attempt(options: Options, rung: int, steps: int) -> Pilot:
        nonlocal done

        def share(part: float) -> None:
            watch((done + part * steps) / budget.total_steps)

        job = pilot_job(base, options, steps, budget)
        pilot = Pilot(options, rung, steps, job.run.seed, key=job.key)
        try:
            if done_folder(job, where, {}) is None:
                job.perform(where, share)
            pilot = scored(pilot, job, where, base.method.calibrator)
        except (CalgpError, torch.linalg.LinAlgError) as error:
            pilot = replace(pilot, failure=_numerical(error))
        done += steps
        watch(done / budget.total_steps)
        return pilot

    found = search(base, budget, attempt)
    cards = [RunFolder(where.runs / pilot.key).card() for pilot in found.pilots if pilot.failure is None]
    if not cards:
        raise CalgpError(f"Every pilot of {base.label} failed; the first: {found.pilots[0].failure}.")
    declared, classes = dict(base.method.space()), cards[0].task.classes
    last = max((card.environment for card in cards), key=lambda environment: environment.started or "")
    names = ("calgp", "torch", "device", "precision")
    made_by = MadeBy(**{name: str(getattr(last, name) or "unknown") for name in names}, date=(last.started or "")[:10])
    return TuningLog(base, budget, declared, dict(found.space), found.pilots, made_by, classes)


def search(base: Run, budget: Budget, attempt: Attempt) -> Search:
    """The search of a run's method, which begins with the run's own options."""
    space = base.method.space()
    return successive_halving(space, options_of(base, space), budget, attempt, seed=f"{base.seed}/{base.label}")


def _numerical(error: Exception) -> str:
    """Why the numbers of a pilot failed; any other error is raised, since every other pilot would meet it, too."""
    if isinstance(error, torch.linalg.LinAlgError):
        return str(error)
    if isinstance(error.__cause__, NumericalError):
        return str(error.__cause__)
    raise error


def pilot_job(base: Run, options: Options, steps: int, budget: Budget) -> Job:
    """What a pilot trains and scores: its hold-out, and no test images."""
    run = pilot_run(base, options, steps)
    if budget.images:
        run = replace(run, train_size=budget.images_of(steps))
    return Job(run, budget.samples, tests=(), held_out=True)


def pilot_run(base: Run, options: Options, steps: int) -> Run:
    """The training of a pilot: of these steps whatever happens, with a hold-out that all methods share."""
    run = with_options(base, options)
    method = replace(run.method, calibrator=None) if run.method.calibrator else run.method  # type: ignore[type-var]
    split = 0 if run.split_seed is None else run.split_seed
    return replace(
        run, method=method, steps=steps, holdout=run.holdout or HOLDOUT, split_seed=split, patience=None,
        calibration=False,
    )  # fmt: skip


def with_options(run: Run, options: Options) -> Run:
    """The run with these options, named as in a search space: learning_rate, method.sigma."""
    own = {name: value for name, value in options.items() if "." not in name}
    of_method = {name.removeprefix("method."): value for name, value in options.items() if "." in name}
    return replace(run, method=replace(run.method, **of_method), **own)  # type: ignore[type-var, arg-type]


def options_of(run: Run, names: Iterable[str]) -> Options:
    """The run's own values of options."""
    return {name: operator.attrgetter(name)(run) for name in names}


def scored(pilot: Pilot, job: Job, where: Paths, calibrator: str | None) -> Pilot:
    """A pilot that is done, with what it found on the hold-out."""
    folder, name = RunFolder(where.runs / job.key), held_out_name(job.run.source)
    found = evaluation(folder, job.run, name, job.samples)
    predicted = folder.predictions(name, None, folder.card().task.classes) if calibrator else {}
    if found is None or predicted is None or (calibrator and "log_probs" not in predicted):
        raise CalgpError(f"{folder.path} lacks predictions of its hold-out; remove it and tune again.")
    scores = found.own.scores
    if calibrator:
        y = predicted["y"]
        scores = metrics.scores(metrics.outcomes(cross_fitted(predicted["log_probs"], y, calibrator), y))
    seconds = round(folder.train_seconds(), 3)
    return replace(pilot, mnll=scores.mnll, err=scores.err, ece=scores.ece, seconds=seconds)


def write_log(log: TuningLog, path: Path) -> None:
    """Write a log as JSON, with what follows from it for readers; the file appears whole or not at all."""
    data = json.loads(adapter(TuningLog).dump_json(log))
    data["found"] = {
        "options": log.winner.options,
        "edges": [asdict(edge) for edge in log.edges],
        "total_pilots": len(log.pilots),
        "total_steps": log.steps,
    }
    write_files(path.parent, {path.name: json.dumps(data, indent=1) + "\n"})


def read_log(path: Path) -> TuningLog:
    """A log that `write_log` wrote, checked: its types, and that it spent its budget exactly."""
    try:
        return adapter(TuningLog).validate_python(read_json(path))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise CalgpError(f"{path} is no tuning log: {place}: {first['msg'].lower()}.") from None
