"""A training that can be stopped after any step: begun, or resumed from its checkpoint, to the same bits."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import torch
from lightning_fabric import Fabric

from calgp.data import Images
from calgp.errors import CalgpError
from calgp.gp import Bound, Model, NumericalError
from calgp.nets import Task, program_features, standardisers
from calgp.run import Run
from calgp.runs import Card, Interrupted, RunFolder, TrainingData, on_first, score
from calgp.runs.build import build
from calgp.runs.environment import Environment, environment, training_arithmetic
from calgp.runs.failures import interruptible, require_finite
from calgp.runs.folder import CHECKPOINT
from calgp.runs.ranks import same_buffers, summed
from calgp.runs.results import Checkpoint, HoldoutRecord, NoteRecord, TrainRecord
from calgp.runs.training_data import class_weights
from calgp.training.checkpoint import EarlyStopping, LoadedCheckpoint, save_checkpoint
from calgp.training.defaults import task_of
from calgp.training.fine_tune import train_head
from calgp.training.loop import Step, fit, make_optimiser

LOG_STEPS = 20


class ResumableTraining:
    """A run with its model, optimiser and card, at the step where it was stopped, or before the first.

    With `resume` the folder must hold a run that is not finished, of the same images.
    """

    def __init__(
        self, run: Run, folder: RunFolder, fabric: Fabric, data: TrainingData, *, resume: bool, accumulate: int
    ) -> None:
        self.run, self.folder, self.fabric, self.data, self.accumulate = run, folder, fabric, data, accumulate
        task = task_of(data.train)
        self.model = build(run, task)
        if program_features(self.model) and fabric.world_size > 1:
            raise CalgpError("Invalid --devices: a pretrained network is trained in one process; leave it out.")
        checkpoint = on_first(fabric, lambda: _checkpoint(run, folder, data, resume=resume))
        computed_by = training_arithmetic(fabric, accumulate)
        if checkpoint is not None:
            fabric.strategy.precision.convert_module(self.model)  # before it takes numbers of that precision
            checkpoint.restore_model(self.model, folder.path / CHECKPOINT)
            self.card = on_first(fabric, lambda: _note_resumed(folder, computed_by))
        else:
            _normalise(run, self.model, data.train)
            with explain_numbers(run, "cannot start"):
                run.backbone.start(self.model, data.train, generator=torch.Generator().manual_seed(run.seed))
                run.method.start(self.model, data.train, generator=torch.Generator().manual_seed(run.seed))
            self.card = _begin(run, folder, environment(computed_by), task, data)
        same_buffers(fabric, self.model)
        bound = Bound(self.model, len(data.train), class_weights(run, data.train))
        self.bound, self.optimiser = fabric.setup(bound, make_optimiser(run, self.model))
        self.progress, self.is_new = Checkpoint(0), checkpoint is None
        self.stopping = None if run.patience is None else EarlyStopping(run.patience)
        if checkpoint is not None:  # now that the parameters are where, and of what type, they will be
            checkpoint.restore_optimiser(self.optimiser)
            self.progress, self.stopping = checkpoint.state, checkpoint.stopping(run)

    def make_steps(self, *, every: float, watch: Callable[[Step], None]) -> tuple[Model, Card]:
        """The model after the steps that are left, and its card; with a checkpoint each `every` seconds."""
        model, folder, fabric = self.model, self.folder, self.fabric
        log = _TrainingLog(folder, torch.tensor(self.progress.totals))
        if self.is_new:
            self._train_head(watch)
        epoch, saved = -(-len(self.data.train) // self.run.batch_size), time.monotonic()
        with interruptible(fabric.world_size) as stop, self._keep_last_good_state():
            for step in fit(
                self.bound, self.optimiser, self.data.train, self.run, fabric=fabric, first=self.progress.step,
                failed=self.progress.failed, accumulate=self.accumulate,
            ):  # fmt: skip
                watch(step)
                log.add(step)
                last = step.step == step.steps
                if last or step.step % epoch == 0:
                    last = self._stops_early(step.step) or last
                failed = 0 if step.skipped is None else self.progress.failed + 1
                self.progress = Checkpoint(step.step, failed, log.sums)
                self.good = self.progress if step.skipped is None else self.good
                # one rank's Ctrl-C is that of all, and rank 0's clock
                due = fabric.is_global_zero and time.monotonic() - saved > every
                stopped, save = (summed(fabric, torch.tensor([stop.is_set(), due]).float()) > 0).tolist()
                if last or stopped or save:
                    require_finite(model)
                    if not last:
                        self._save(self.progress)
                    saved = time.monotonic()
                if stopped and not last:
                    done = f"Stopped after step {step.step} of {step.steps}."
                    raise Interrupted(f"{done} Go on with: calgp train --resume {folder.path}")
                if last:
                    break
        if self.stopping is not None:
            self.stopping.restore(model)
            folder.append_log(NoteRecord("kept", self.stopping.best.step, mnll=self.stopping.best.mnll))
        return model, self.card

    def _train_head(self, watch: Callable[[Step], None]) -> None:
        """What comes before the first step, of a pretrained network; and how good it is by then."""
        if not program_features(self.model):
            return
        with explain_numbers(self.run, "cannot start"):
            train_head(self.run, self.model, self.data.train, watch)
        self._score_holdout(0)
        self._save(self.progress)

    def _stops_early(self, step: int) -> bool:
        """Score the images that are watched, and say whether they have grown no better for long enough."""
        mnll = self._score_holdout(step)
        if self.stopping is None:
            return False
        self.stopping.see(step, math.nan if mnll is None else mnll, self.model)
        return self.stopping.over

    def _score_holdout(self, step: int) -> float | None:
        """A line of the log, and its MNLL. Scores that cannot be computed stop nothing: the next steps will show."""
        if self.data.watched is None:
            return None
        passes = 1 if self.model.integrate else 10
        try:
            found = score(self.model, self.data.watched, passes=passes, seed=self.run.seed, fabric=self.fabric)
            record = HoldoutRecord(
                "holdout", step, found.mnll, found.err, found.n, found.ece, found.mce, found.brier, found.confidence,
                found.entropy,
            )  # fmt: skip
        except NumericalError as error:
            record = NoteRecord("unscored", step, str(error))
        self.folder.append_log(record)
        return record.mnll

    def _save(self, progress: Checkpoint) -> None:
        save_checkpoint(self.folder, self.model, self.optimiser, progress, self.stopping)

    @contextmanager
    def _keep_last_good_state(self) -> Iterator[None]:
        """If steps fail for good, save the last good state and say why.

        If the parameters themselves overflowed, the previous checkpoint is kept instead.
        """
        self.good = self.progress
        try:
            yield
        except NumericalError as error:
            with suppress(NumericalError):
                require_finite(self.model)
                self._save(self.good)
            kept = "No good state was left to keep."
            if self.folder.interrupted:
                kept = f"{self.folder.path} keeps the state after step {self.folder.check_checkpoint(self.card).step}."
            raise CalgpError(
                f"Training failed after step {self.good.step}: {error}. {kept} Train again with a smaller learning "
                "rate or in double precision."
            ) from error


@contextmanager
def explain_numbers(run: Run, what: str) -> Iterator[None]:
    """Numbers that fail before the first step or after the last, as one sentence."""
    try:
        yield
    except NumericalError as error:
        raise CalgpError(
            f"The training of {run.label} {what}: {error}. Leave options such as lengthscale and sigma at their "
            "defaults, or choose less extreme ones."
        ) from error


class _TrainingLog:
    """The lines of log.jsonl about steps: both parts of the bound, averaged over LOG_STEPS steps."""

    def __init__(self, folder: RunFolder, totals: torch.Tensor) -> None:
        self.folder, self.totals, self.clock = folder, totals, time.perf_counter()

    @property
    def sums(self) -> tuple[float, float, float]:
        nll, kl, count = self.totals.tolist()
        return nll, kl, count

    def add(self, step: Step) -> None:
        if step.skipped is None:
            self.totals += torch.stack([step.nll, step.kl, torch.ones_like(step.nll)]).cpu()
        else:
            self.folder.append_log(NoteRecord("skipped", step.step, step.skipped))
        if (step.step == step.steps or step.step % LOG_STEPS == 0) and self.totals[2]:
            nll, kl = (self.totals[:2] / self.totals[2]).tolist()
            seconds, self.clock = time.perf_counter() - self.clock, time.perf_counter()
            self.folder.append_log(TrainRecord("train", step.step, nll, kl, step.learning_rate, round(seconds, 3)))
            self.totals.zero_()


def _check(run: Run, folder: RunFolder, data: TrainingData, *, resume: bool) -> None:
    """Whether a folder may be trained into: nobody's, or the same run's, which is not finished."""
    begun = (folder.path / "run.json").is_file()
    if not resume:
        if folder.finished or folder.interrupted or (begun and folder.card().run != run):
            raise CalgpError(
                f"{folder.path} already holds a run. Choose another --out, or, if it was interrupted, go on with "
                f"`calgp train --resume {folder.path}`."
            )
        return
    if not begun:
        raise CalgpError(f"{folder.path} has no run to resume; `calgp train --out {folder.path}` begins one.")
    if folder.finished:
        raise CalgpError(f"{folder.path} is finished: there is nothing to resume.")
    if data.train.checksum() != folder.card().checksum:
        raise CalgpError(f"The training images are not those that {folder.path} was begun with; they would be mixed.")


def _checkpoint(run: Run, folder: RunFolder, data: TrainingData, *, resume: bool) -> LoadedCheckpoint | None:
    """What the training goes on from, if there is anything; the log is cut to it."""
    _check(run, folder, data, resume=resume)
    if not folder.interrupted:
        return None
    found = LoadedCheckpoint(*folder.checkpoint(folder.card()))
    folder.cut_log(found.state.step)
    return found


def _begin(run: Run, folder: RunFolder, made_by: Environment, task: Task, data: TrainingData) -> Card:
    """Write the card, and remove what an earlier training in this folder left."""
    held_out = () if data.held_out is None else tuple(data.held_out.rows.tolist())
    weights = class_weights(run, data.train)
    card = Card(
        run, task, data.train.classes, len(data.train), data.train.checksum(), held_out, made_by,
        class_weights=None if weights is None else tuple(weights.tolist()),
    )  # fmt: skip
    folder.create(card)
    for name in ("log.jsonl", "calibration.json", "decisions.json"):
        folder.remove(name)
    return card


def _normalise(run: Run, model: Model, train: Images) -> None:
    """Let the model take mean and deviation of its training images, where the run asks for it."""
    found = standardisers(model)
    if run.normalise == "standard" and not found:
        raise CalgpError(f"{run.label} has no network to normalise images for; leave --normalise out.")
    for features in found:
        features.fit(x for _, x in train.read(train.parts(1024)))


def _note_resumed(folder: RunFolder, now: Environment) -> Card:
    """Note in run.json what a training is continued by, if that may change its bits."""
    card = folder.card()
    before = (card.environment, *card.environment.resumed)[-1]
    if before.arithmetic() != now:
        resumed = (*card.environment.resumed, now)
        card = replace(card, environment=replace(card.environment, resumed=resumed))
        folder.create(card)
    return card
