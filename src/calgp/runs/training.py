"""A training from a Run to files."""

import itertools
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch
from lightning_fabric import Fabric

from calgp.data import SOURCES, Images
from calgp.errors import CalgpError
from calgp.gp import Bound, Model, NumericalError, Passes
from calgp.methods import Method
from calgp.nets import Backbone, Task, standardisers
from calgp.run import Run, default_name
from calgp.runs.card import Card
from calgp.runs.checkpoint import LastGoodState, LoadedCheckpoint, Progress, save_checkpoint
from calgp.runs.classifier import Classifier, one_device
from calgp.runs.defaults import resolved, task_of, with_steps
from calgp.runs.description import from_json, to_json
from calgp.runs.environment import Environment, environment, training_arithmetic
from calgp.runs.evaluation import score
from calgp.runs.failures import Interrupted, interruptible, require_finite
from calgp.runs.fit_calibrator import fit_calibrator, fit_if_better
from calgp.runs.folder import CHECKPOINT, RunFolder, build, slug
from calgp.runs.loop import Step, fit, make_optimiser
from calgp.runs.ranks import check_same, on_first, owned, same_buffers, summed, together, wrap_lost_ranks
from calgp.runs.results import Calibration, HoldoutRecord, NoteRecord, TrainRecord
from calgp.runs.stopping import EarlyStopping
from calgp.runs.training_data import TrainingData, class_weights

CHECKPOINT_SECONDS = 60.0  # between checkpoints, unless given
LOG_STEPS = 20


def train_run(
    run: Run,
    folder: RunFolder,
    fabric: Fabric | None = None,
    *,
    data: TrainingData | None = None,
    directory: Path | None = None,
    resume: bool = False,
    checkpoint_seconds: float | None = None,
    accumulate: int = 1,
    watch: Callable[[Step], None] = lambda step: None,
) -> Classifier:
    """Train a run into its folder. Ctrl-C, or SIGTERM, saves after the step at hand and raises Interrupted.

    A training that was killed at any moment and resumed ends with the same bits. One that had not come to its first
    checkpoint (one every `checkpoint_seconds`, 60 unless given) starts again, with `resume` or without.
    Where the numbers fail in too many steps in a row, the last good state is kept as the checkpoint, and a CalgpError
    tells which number and which images.

    Of several ranks (a Fabric with a DDP strategy, launched) each calls this with the same arguments; rank 0 writes.
    `accumulate`: in how many parts a rank takes its share of a batch, for memory's sake.
    """
    fabric = one_device(fabric)
    folder = RunFolder(folder.path, writes=fabric.is_global_zero)
    with wrap_lost_ranks(fabric):
        check_same(fabric, _identity(run, fabric, accumulate, resume=resume, data=data))
        given = data
        data = together(fabric, lambda: TrainingData.of(run, directory) if given is None else given)
        images = data.train
        check_same(fabric, {"the training images": together(fabric, images.checksum)})
    run = resolved(run, data)
    if run.method.calibrator and data.held_out is None:
        raise CalgpError(f"{run.label} fits its {run.method.calibrator} on held-out images; give some with the data.")
    if run.calibration and data.held_out is None:
        raise CalgpError("Invalid calibration=True: it needs held-out images; give some with the data.")
    if run.patience and data.stopping is None:
        raise CalgpError(f"patience={run.patience} needs images to stop by: TrainingData(train, held_out, stopping).")
    every = CHECKPOINT_SECONDS if checkpoint_seconds is None else checkpoint_seconds
    if not 0 < accumulate <= run.batch_size:
        raise CalgpError(f"Invalid accumulate={accumulate}: must be 1 to {run.batch_size}, the images of a batch.")
    with wrap_lost_ranks(fabric), owned(fabric, folder):
        if on_first(fabric, lambda: resume and folder.finished and folder.interrupted):  # killed before the very end
            folder.remove(CHECKPOINT)
            return Classifier.load(folder, fabric=fabric)
        run = with_steps(run, folder, data, fabric, accumulate=accumulate)
        model, card = _trained(
            run, folder, fabric, data, resume=resume, every=every, accumulate=accumulate, watch=watch
        )
        with _numbers_of(run, "cannot be finished"):
            run.method.finish(model, data.train)
        calibration = on_first(fabric, lambda: _calibration(run, model, data.held_out, folder, card))
        if calibration is not None:
            folder.write_calibration(calibration)
        folder.flush_log()
        folder.write_tensors("model.safetensors", model.state_dict())
        folder.remove(CHECKPOINT)
        fabric.barrier()  # no rank is done before the model is there
    return Classifier(_as_loaded(model, card), card, folder=folder, calibration=calibration, fabric=fabric)


def _calibration(run: Run, model: Model, held_out: Images | None, folder: RunFolder, card: Card) -> Calibration | None:
    """The method's own calibrator; or a temperature, if the run wants one and it helps; if not, the log says why."""
    if held_out is None or not (run.method.calibrator or run.calibration):
        return None
    if run.method.calibrator:
        return fit_calibrator(model, held_out, run.method.calibrator, Passes.of(model), seed=0)
    found, why = fit_if_better(model, held_out, "temperature", Passes.of(model), seed=0)
    if why is not None:
        folder.append_log(NoteRecord("uncalibrated", run.total_steps(card.train_images), why))
    return found


def _trained(
    run: Run,
    folder: RunFolder,
    fabric: Fabric,
    data: TrainingData,
    *,
    resume: bool,
    every: float,
    accumulate: int,
    watch: Callable[[Step], None],
) -> tuple[Model, Card]:
    """The model after the last step, and its card."""
    task = task_of(data.train)
    model = build(run, task)
    checkpoint = on_first(fabric, lambda: _checkpoint(run, folder, data, resume=resume))
    computed_by = training_arithmetic(fabric, accumulate)
    if checkpoint is not None:
        fabric.strategy.precision.convert_module(model)  # before it takes numbers of that precision
        checkpoint.restore_model(model, folder.path / CHECKPOINT)
        card = on_first(fabric, lambda: _note_resumed(folder, computed_by))
    else:
        _normalise(run, model, data.train)
        with _numbers_of(run, "cannot start"):
            run.backbone.start(model, data.train, generator=torch.Generator().manual_seed(run.seed))
            run.method.start(model, data.train, generator=torch.Generator().manual_seed(run.seed))
        card = _begin(run, folder, environment(computed_by), task, data)
    same_buffers(fabric, model)
    bound = Bound(model, len(data.train), class_weights(run, data.train))
    bound, optimiser = fabric.setup(bound, make_optimiser(run, model))
    progress, stopping = Progress(), None if run.patience is None else EarlyStopping(run.patience)
    if checkpoint is not None:  # now that the parameters are where, and of what type, they will be
        checkpoint.restore_optimiser(optimiser)
        progress, stopping = checkpoint.progress, checkpoint.stopping(run)
        del checkpoint
    good = LastGoodState(progress, stopping)
    log = _TrainingLog(folder, torch.tensor(progress.totals))
    epoch, saved = -(-len(data.train) // run.batch_size), time.monotonic()
    with interruptible(fabric.world_size) as stop, _keep_last_good_state(folder, model, optimiser, good):
        for step in fit(
            bound, optimiser, data.train, run, fabric=fabric, first=progress.step, failed=progress.failed,
            accumulate=accumulate,
        ):  # fmt: skip
            watch(step)
            log.add(step)
            last = step.step == step.steps
            if data.watched is not None and (last or step.step % epoch == 0):
                seen = _score_holdout(model, data.watched, run, step.step, fabric)
                folder.append_log(seen)
                if stopping is not None:
                    stopping.see(step.step, math.nan if seen.mnll is None else seen.mnll, model)
                    last = last or stopping.over
            failed = 0 if step.skipped is None else progress.failed + 1
            progress = Progress(step.step, failed, log.sums)
            good.progress = progress if step.skipped is None else good.progress
            # one rank's Ctrl-C is that of all, and rank 0's clock
            due = fabric.is_global_zero and time.monotonic() - saved > every
            stopped, save = (summed(fabric, torch.tensor([stop.is_set(), due]).float()) > 0).tolist()
            if last or stopped or save:
                require_finite(model)
                if not last:
                    save_checkpoint(folder, model, optimiser, progress, stopping)
                saved = time.monotonic()
            if stopped and not last:
                raise Interrupted(
                    f"Stopped after step {step.step} of {step.steps}. Go on with: calgp train --resume {folder.path}"
                )
            if last:
                break
    if stopping is not None:
        stopping.restore(model)
        folder.append_log(NoteRecord("kept", stopping.step, mnll=stopping.mnll))
    return model, card


@contextmanager
def _numbers_of(run: Run, what: str) -> Iterator[None]:
    """Numbers that fail before the first step or after the last, as one sentence."""
    try:
        yield
    except NumericalError as error:
        raise CalgpError(
            f"The training of {run.label} {what}: {error}. Leave options such as lengthscale and sigma at their "
            "defaults, or choose less extreme ones."
        ) from error


def _as_loaded(model: Model, card: Card) -> Model:
    """The model as it will be loaded from its file: in single precision, whatever it was trained in."""
    if next(model.parameters()).dtype == torch.get_default_dtype():
        return model
    loaded = build(card.run, card.task)
    loaded.load_state_dict(model.state_dict())
    return loaded


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


def _score_holdout(model: Model, images: Images, run: Run, step: int, fabric: Fabric) -> HoldoutRecord | NoteRecord:
    """A line of the log. Scores that cannot be computed stop nothing: the next steps will show."""
    try:
        found = score(model, images, passes=1 if model.integrate else 10, seed=run.seed, fabric=fabric)
    except NumericalError as error:
        return NoteRecord("unscored", step, str(error))
    return HoldoutRecord(
        "holdout", step, found.mnll, found.err, found.n, found.ece, found.mce, found.brier, found.confidence,
        found.entropy,
    )  # fmt: skip


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
        raise CalgpError(
            f"The training images are not those that {folder.path} was begun with; resuming would mix them."
        )


def _identity(
    run: Run, fabric: Fabric, accumulate: int, *, resume: bool, data: TrainingData | None
) -> dict[str, object]:
    """What all ranks of a training must share: options, versions, precision, how a batch is divided."""
    made_by = training_arithmetic(fabric, accumulate)
    same = ("calgp", "torch", "transform", "device", "precision", "accumulate")
    options: dict[str, object] = {}
    for name, value in to_json(run).items():
        options |= {f"{name}.{key}": each for key, each in value.items()} if isinstance(value, dict) else {name: value}
    return (
        {name: getattr(made_by, name) for name in same} | options | {"resume": resume, "data given": data is not None}
    )


def _checkpoint(run: Run, folder: RunFolder, data: TrainingData, *, resume: bool) -> LoadedCheckpoint | None:
    """What the training goes on from, if there is anything; the log is cut to it."""
    _check(run, folder, data, resume=resume)
    if not folder.interrupted:
        return None
    found = LoadedCheckpoint.of(folder, folder.card())
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


@contextmanager
def _keep_last_good_state(
    folder: RunFolder, model: Model, optimiser: torch.optim.Optimizer, good: LastGoodState
) -> Iterator[None]:
    """If steps fail for good, save the last good state and say why.

    If the parameters themselves overflowed, the previous checkpoint is kept instead.
    """
    try:
        yield
    except NumericalError as error:
        with suppress(NumericalError):
            require_finite(model)
            save_checkpoint(folder, model, optimiser, good.progress, good.stopping)
        raise CalgpError(
            f"Training failed after step {good.progress.step}: {error}. {_kept(folder)} Train again with a smaller "
            "learning rate or in double precision."
        ) from error


def _kept(folder: RunFolder) -> str:
    if not folder.interrupted:
        return "No good state was left to keep."
    return f"{folder.path} keeps the state after step {folder.check_checkpoint(folder.card()).step}."


def train(
    source: str | os.PathLike[str],
    *,
    out: str | os.PathLike[str] | None = None,
    method: str | Method = default_name("method"),
    backbone: str | Backbone = default_name("backbone"),
    fabric: Fabric | None = None,
    directory: Path | None = None,
    watch: Callable[[Step], None] = lambda step: None,
    **options: object,
) -> Classifier:
    """Train a classifier on an image set or a folder of images, into a run folder.

    >>> import tempfile, torch, calgp
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = calgp.train("digits", out=f"{folder}/run", train_size=100, epochs=1)
    ...     run.predict(torch.zeros(1, 1, 28, 28)).probs.shape
    torch.Size([1, 10])

    Args:
        source: a data set by name, such as digits or mnist, or a folder with one folder of images for each class.
        out: the run folder; runs/… unless given.
        method, backbone: by name (METHODS, BACKBONES), or the objects themselves.
        fabric: where it runs; None: the best device of this machine.
        directory: where data sets lie.
        watch: is called after each step.
        options: any other field of `Run`, such as epochs=20, seed=1, holdout=0.1.
    """
    name = os.fspath(source)
    named = f"folder:{name}" if name not in SOURCES and Path(name).is_dir() else name
    run = from_json({"source": named, "method": method, "backbone": backbone, **options})
    return train_run(run, new_folder(run) if out is None else RunFolder(out), fabric, directory=directory, watch=watch)


def new_folder(run: Run) -> RunFolder:
    """A folder below runs/ that does not exist yet, named after the run.

    >>> from calgp.runs import from_json
    >>> new_folder(from_json({"source": "digits", "seed": 7})).name
    'cnn-gp-sorf-digits-seed7'
    """
    path = Path("runs") / slug(f"{run.label}-{run.source}-seed{run.seed}")
    names = itertools.chain([path], (path.with_name(f"{path.name}-{number}") for number in itertools.count(2)))
    return RunFolder(next(name for name in names if not name.exists()))
