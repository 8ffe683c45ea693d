"""The training loop, and a training from a Run to files."""

import functools
import math
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor

from calgp.data import Images
from calgp.data.images import unit
from calgp.data.reading import ANYWHERE, Order
from calgp.errors import CalgpError
from calgp.gp import Bound, Model, Noise, NumericalError
from calgp.nets import Task, standardisers
from calgp.runs.augmentation import augmented
from calgp.runs.calibrating import fit_calibrator
from calgp.runs.evaluation import one_device, score
from calgp.runs.folder import Card, RunFolder, arithmetic, build, environment, load_state
from calgp.runs.ranks import alone, connected, gathered, on_first, owned, same_buffers, share, summed
from calgp.runs.run import Run
from calgp.runs.stopping import EarlyStopping
from calgp.runs.training_data import TrainingData, class_weights

CHECKPOINT = "checkpoint.safetensors"
CHECKPOINT_SECONDS = 60.0  # between checkpoints, unless told
LOG_STEPS = 20
ROWS_TOLD = 8
PATIENCE = 10  # steps in a row that may fail; of a training of fewer than 20 steps, half of them


class Interrupted(CalgpError):
    """Ctrl-C: the run stopped after a whole step, was saved, and can be resumed."""


@dataclass(frozen=True)
class Step:
    """One optimiser step, done or skipped. Both parts of the bound are still on the device."""

    step: int
    steps: int
    nll: Tensor
    kl: Tensor
    learning_rate: float
    skipped: str | None = None  # why the step changed nothing


def fit(
    bound: Bound,
    optimiser: torch.optim.Optimizer,
    images: Images,
    run: Run,
    *,
    fabric: Fabric,
    first: int = 0,
    failed: int = 0,
    accumulate: int = 1,
) -> Iterator[Step]:
    """Minimise the bound over the images, a step each time it is asked for the next: Adam on Eq. (6) by (8), (9).

    Order, masks and augmentation are functions of (seed, step), so that starting at step `first` is the same as coming
    from 0. A step whose numbers fail (a loss or a gradient that is not finite, a covariance without a factor) is
    skipped: it changes nothing. After PATIENCE of them in a row, counted from `failed`, NumericalError tells of the
    last.

    A batch is that of all ranks: each takes its part of it, and that in `accumulate` parts, one after the other. The
    gradient is the same but for rounding, and for batch norm, which has the moments of a part.
    """
    steps, undo = run.total_steps(len(images)), _Undo(bound, fabric)
    parameters = [parameter for group in optimiser.param_groups for parameter in group["params"]]
    scaled = getattr(fabric.strategy.precision, "scaler", None) is not None  # 16-mixed
    whole: deque[Tensor] = deque()  # the batches of all ranks, of which this one's share has been asked for

    def shares() -> Iterator[Tensor]:
        for step in range(first, steps):
            whole.append(order(len(images), run.batch_size, step, run.seed, images.order))
            mine = share(fabric, whole[-1])
            yield mine if len(mine) else whole[-1][:1]  # an image that counts 0

    for step, (mine, x) in enumerate(alone(fabric, images.read(shares())), first):
        index = whole.popleft()
        held = len(share(fabric, index))
        count = min(accumulate, len(mine))
        parts = list(zip(mine.tensor_split(count), x.tensor_split(count), strict=True))
        rate = run.learning_rate_at(step, steps)
        for group in optimiser.param_groups:
            group["lr"] = rate
        optimiser.zero_grad(set_to_none=True)
        undo.remember()
        nll, kl, why = _differentiated(bound, images, run, fabric, step, parts, len(index) if held else 0)
        if why is None:
            why = _failure(bound.model, parameters, nll, kl, nll + run.kl_weight * kl)
        if why is None and run.clip is not None:
            fabric.clip_gradients(bound, optimiser, max_norm=run.clip, error_if_nonfinite=False)
        if why is None or scaled:  # a scaler skips such a step itself, and learns from it to scale less
            optimiser.step()
        undo.forget(held / len(index)) if why is None else undo.restore()
        failed = 0 if why is None else failed + 1
        if failed >= min(PATIENCE, -(-steps // 2)):
            rows = ", ".join(map(str, images.rows[index][:ROWS_TOLD].tolist()))
            raise NumericalError(
                f"step {step + 1} failed, as did the {failed - 1} before it: {why}; its images were rows {rows}"
                f"{', …' if len(index) > ROWS_TOLD else ''} of {run.source}"
            )
        yield Step(step + 1, steps, nll, kl, rate, why)


def _differentiated(
    bound: Bound,
    images: Images,
    run: Run,
    fabric: Fabric,
    step: int,
    parts: Sequence[tuple[Tensor, Tensor]],
    batch: int,
) -> tuple[Tensor, Tensor, str | None]:
    """The two parts of the bound on the batch of all ranks, whose gradients are then in place; or why there are none.

    DDP averages the gradients of the ranks: the likelihood term of m_j images of `batch` counts ranks · m_j / batch,
    the KL term once in all parts together. `parts` are places among the images, and their bytes; `batch` is 0 for a
    rank that has no image of its own.
    """
    nll, kl, loss, why = torch.zeros(()), torch.full((), math.nan), None, None
    try:
        for place, (index, pictures) in enumerate(parts, start=1):
            x, y = fabric.to_device((unit(pictures), images.y[index]))
            rows = images.rows[index].to(x.device)
            x = augmented(x, run.augment, crop=run.crop, seed=run.seed, step=step, rows=rows)
            last = place == len(parts)
            with fabric.no_backward_sync(bound, enabled=fabric.world_size > 1 and not last):  # type: ignore[arg-type]
                part, kl = bound(x, y, training_noise(run, step, rows))
                weighted = part * (fabric.world_size * len(index) / batch if batch else 0.0)
                loss = weighted + run.kl_weight / len(parts) * kl
                nll = nll.to(part) + weighted.detach()
                if not last:
                    fabric.backward(loss)
    except NumericalError as error:
        why = str(error)
    if fabric.world_size > 1:  # before the pass in which all ranks wait for each other
        told = torch.stack([nll.double() / fabric.world_size, torch.tensor(float(why is not None)).to(nll.device)])
        told = summed(fabric, told)
        nll, failures = told[0].to(kl), told[1]
        why = next(each for each in gathered(fabric, why) if each) if failures > 0 else None
    if why is not None or loss is None:
        return torch.full((), math.nan), torch.full((), math.nan), why
    fabric.backward(loss)
    return nll.detach(), kl.detach(), None


def _failure(model: Model, parameters: list[Tensor], nll: Tensor, kl: Tensor, loss: Tensor) -> str | None:
    """Which number of a step is not finite; None if all are. Only if the norms tell is each gradient looked at."""
    norms = torch._foreach_norm([p.grad for p in parameters if p.grad is not None])
    if (loss + torch.stack(norms).sum()).isfinite():
        return None
    if not loss.isfinite():
        return f"the bound is no finite number: negative log-likelihood term {nll:g}, KL term {kl:g}"
    spoiled = [name for name, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
    if not spoiled:  # the gradients are finite, their squares are not
        return None
    others = f" and of {len(spoiled) - 1} other parameters" if len(spoiled) > 1 else ""
    return f"the gradient of {spoiled[0]}{others} is not finite"


class _Undo:
    """What a forward pass changes in a module besides its parameters, running statistics of batch norm: taken back, or
    made the same on all ranks.
    """

    def __init__(self, module: torch.nn.Module, fabric: Fabric) -> None:
        self.fabric = fabric
        self.kept: list[tuple[Tensor, Tensor]] = []
        self.moving = list(module.buffers())  # until a first good step has told which of them move
        self.told = False

    def remember(self) -> None:
        self.kept = [(buffer, buffer.clone()) for buffer in self.moving]

    def restore(self) -> None:
        for buffer, value in self.kept:
            buffer.copy_(value)

    def forget(self, weight: float) -> None:
        """Let the changes stand; of several ranks, the mean of theirs, each with its `weight`."""
        if not self.told:  # by their values: batch norm does not count its changes as torch's versions do
            moved = torch.tensor([float(not buffer.equal(value)) for buffer, value in self.kept])
            self.moving = [
                buffer for (buffer, _), any_ in zip(self.kept, summed(self.fabric, moved), strict=True) if any_
            ]
            self.told = True
        means = [buffer for buffer in self.moving if buffer.is_floating_point()]
        if self.fabric.world_size > 1 and means:
            mean = summed(self.fabric, torch.cat([buffer.flatten().double() for buffer in means]) * weight)
            for buffer, value in zip(means, mean.split([buffer.numel() for buffer in means]), strict=True):
                buffer.copy_(value.view_as(buffer))


def order(n: int, batch_size: int, step: int, seed: int, kind: Order = ANYWHERE) -> Tensor:
    """Which images step `step` sees: a new shuffle each epoch, the last batch of an epoch as large as what is left."""
    epoch, batch = divmod(step, -(-n // batch_size))
    return _shuffle(n, seed, epoch, kind)[batch * batch_size : (batch + 1) * batch_size]


@functools.lru_cache(maxsize=1)
def _shuffle(n: int, seed: int, epoch: int, kind: Order) -> Tensor:
    return kind.shuffled(n, torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63))


def training_noise(run: Run, step: int, rows: Tensor) -> Noise:
    """The masks of a step. Training has the negative seeds, so that prediction never meets the same masks."""
    samples = torch.arange(step * run.mc_samples, (step + 1) * run.mc_samples, device=rows.device)
    return Noise(-1 - run.seed, samples, rows)


def make_optimiser(run: Run, model: Model) -> torch.optim.Optimizer:
    """The run's optimiser; one fused kernel for all parameters, where torch has it."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if run.optimiser == "sgd":
        return torch.optim.SGD(parameters, lr=run.learning_rate, momentum=0.9, nesterov=True)
    return torch.optim.Adam(parameters, lr=run.learning_rate, fused=True)


def train(
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
) -> Model:
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
    data = TrainingData.of(run, directory) if data is None else data
    if run.method.calibrator and data.held_out is None:
        raise CalgpError(f"{run.label} fits its {run.method.calibrator} on held-out images; give some with the data.")
    if run.patience and data.stopping is None:
        raise CalgpError(f"patience={run.patience} needs images to stop by: TrainingData(train, held_out, stopping).")
    every = CHECKPOINT_SECONDS if checkpoint_seconds is None else checkpoint_seconds
    if not 0 < accumulate <= run.batch_size:
        raise CalgpError(f"accumulate={accumulate} cannot be; a batch has 1 to {run.batch_size} (its images) parts.")
    with connected(fabric), owned(fabric, folder):
        if on_first(fabric, lambda: resume and folder.finished and folder.interrupted):  # killed before the very end
            folder.remove(CHECKPOINT)
            return folder.model()
        model = _trained(run, folder, fabric, data, resume=resume, every=every, accumulate=accumulate, watch=watch)
        run.method.finish(model, data.train)
        if run.method.calibrator and data.held_out is not None and fabric.is_global_zero:
            folder.write_calibration(fit_calibrator(model, data.held_out, run.method.calibrator, samples=50, seed=0))
        folder.flush_log()
        folder.write_tensors("model.safetensors", model.state_dict())
        folder.remove(CHECKPOINT)
        fabric.barrier()  # no rank is done before the model is there
    return model


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
) -> Model:
    """The model after the last step."""
    task = Task(*data.train.x.shape[1:], classes=len(data.train.classes))
    model = build(run, task)
    _check_ranks(fabric, data)
    checkpoint = on_first(fabric, lambda: _checkpoint(run, folder, data, resume=resume))
    computed_by = arithmetic(fabric) | _divided(fabric, accumulate)
    if checkpoint is not None:
        fabric.strategy.precision.convert_module(model)  # before it takes numbers of that precision
        done = _resumed(checkpoint, model, folder.path / CHECKPOINT)
        on_first(fabric, lambda: _tell_environment(folder, computed_by))
    else:
        _normalise(run, model, data.train)
        run.backbone.start(model, data.train, generator=torch.Generator().manual_seed(run.seed))
        run.method.start(model, data.train, generator=torch.Generator().manual_seed(run.seed))
        done = _begun(run, folder, environment(fabric) | computed_by, task, data)
    same_buffers(fabric, model)
    bound = Bound(model, len(data.train), class_weights(run, data.train))
    bound, optimiser = fabric.setup(bound, make_optimiser(run, model))
    if checkpoint is not None:  # now that the parameters are where, and of what type, they will be
        _restore(optimiser, checkpoint)
    clock, totals, saved = time.perf_counter(), torch.tensor(done.totals), time.monotonic()
    good = _Good(done, _stopping(run, checkpoint))
    del checkpoint
    with interruptible(fabric.world_size) as stop, _keeping_the_last_good_state(folder, model, optimiser, good):
        for step in fit(
            bound, optimiser, data.train, run, fabric=fabric, first=done.step, failed=done.failed, accumulate=accumulate
        ):
            watch(step)
            if step.skipped is None:
                totals += torch.stack([step.nll, step.kl, torch.ones_like(step.nll)]).cpu()
            else:
                folder.append_log({"kind": "skipped", "step": step.step, "why": step.skipped})
            last = step.step == step.steps
            if (last or step.step % LOG_STEPS == 0) and totals[2]:
                nll, kl = (totals[:2] / totals[2]).tolist()
                seconds, clock = time.perf_counter() - clock, time.perf_counter()
                record = {"kind": "train", "step": step.step, "nll": nll, "kl": kl, "rate": step.learning_rate}
                folder.append_log(record | {"seconds": round(seconds, 3)})
                totals.zero_()
            if data.watched is not None and (last or step.step % -(-len(data.train) // run.batch_size) == 0):
                seen = _holdout(model, data.watched, run, step.step, fabric)
                folder.append_log(seen)
                if good.stopping is not None:
                    good.stopping.see(step.step, seen.get("mnll", math.nan), model)
                    last = last or good.stopping.over
            failed = 0 if step.skipped is None else done.failed + 1
            done = _Done(step.step, failed, totals.tolist())
            good.done = done if step.skipped is None else good.done
            # one rank's Ctrl-C is that of all, and rank 0's clock
            due = fabric.is_global_zero and time.monotonic() - saved > every
            stopped, save = (summed(fabric, torch.tensor([stop.is_set(), due]).float()) > 0).tolist()
            if last or stopped or save:
                _require_finite(model)
                if not last:
                    _save_checkpoint(folder, model, optimiser, done, good.stopping)
                saved = time.monotonic()
            if stopped and not last:
                raise Interrupted(
                    f"Stopped after step {step.step} of {step.steps}. Go on with: calgp train --resume {folder.path}"
                )
            if last:
                break
    if good.stopping is not None:
        good.stopping.restore(model)
        folder.append_log({"kind": "kept", "step": good.stopping.step, "mnll": good.stopping.mnll})
    return model


def _holdout(model: Model, images: Images, run: Run, step: int, fabric: Fabric) -> dict[str, Any]:
    """A line of the log. Scores that cannot be found stop nothing: the next steps will tell."""
    try:
        scores = score(model, images, samples=10, seed=run.seed, fabric=fabric).to_dict()
    except NumericalError as error:
        return {"kind": "unscored", "step": step, "why": str(error)}
    return {"kind": "holdout", "step": step} | scores


@dataclass(frozen=True)
class _Done:
    """How far a training has come: steps, how many of the last failed in a row, sums since the last line of the log.

    With the model and the optimiser it is all that a checkpoint needs: order and masks are functions of the step.
    """

    step: int = 0
    failed: int = 0
    totals: Sequence[float] = (0.0, 0.0, 0.0)


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


def _check_ranks(fabric: Fabric, data: TrainingData) -> None:
    """Ranks that found other images (another copy of the data on another machine) would train on a mixture."""
    if fabric.world_size > 1 and len(set(gathered(fabric, data.train.checksum()))) > 1:
        raise CalgpError("The processes of this run have found different training images; give all the same data.")


_Checkpoint = tuple[dict[str, Tensor], dict[str, Any]]  # tensors, and what is told beside them


def _checkpoint(run: Run, folder: RunFolder, data: TrainingData, *, resume: bool) -> _Checkpoint | None:
    """What the training goes on from, if there is anything; the log is cut to it."""
    _check(run, folder, data, resume=resume)
    if not folder.interrupted:
        return None
    tensors, told = folder.tensors(CHECKPOINT), folder.metadata(CHECKPOINT)
    folder.cut_log(told["step"])
    return tensors, told


def _divided(fabric: Fabric, accumulate: int) -> dict[str, int]:
    """How a batch is divided, if it is: it changes the order of adding, and the moments of batch norm."""
    return {name: n for name, n in (("ranks", fabric.world_size), ("accumulate", accumulate)) if n > 1}


def _begun(run: Run, folder: RunFolder, made_by: dict[str, Any], task: Task, data: TrainingData) -> _Done:
    held_out = () if data.held_out is None else tuple(data.held_out.rows.tolist())
    classes, n = data.train.classes, len(data.train)
    weights = class_weights(run, data.train)
    told = None if weights is None else tuple(weights.tolist())
    described = Card(run, task, classes, n, data.train.checksum(), held_out, made_by, class_weights=told)
    folder.create(described)
    folder.remove("log.jsonl")
    folder.remove("calibration.json")
    folder.remove("decisions.json")
    return _Done()


def _resumed(checkpoint: _Checkpoint, model: Model, path: Path) -> _Done:
    tensors, told = checkpoint
    model_state = {key.removeprefix("model."): value for key, value in tensors.items() if key.startswith("model.")}
    load_state(model, model_state, path)
    return _Done(**{field.name: told[field.name] for field in fields(_Done) if field.name in told})


def _restore(optimiser: torch.optim.Optimizer, checkpoint: _Checkpoint) -> None:
    parameters = optimiser.param_groups[0]["params"]
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in checkpoint[0].items():
        if key.startswith("optimiser."):
            _, index, name = key.split(".", 2)
            parameter = parameters[int(index)]
            # laid out in memory as the parameter is (channels last): the fused step goes through both in that order
            restored = torch.empty_like(parameter).copy_(value) if value.shape == parameter.shape else value
            state.setdefault(int(index), {})[name] = restored
    optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})


def _save_checkpoint(
    folder: RunFolder,
    model: Model,
    optimiser: torch.optim.Optimizer,
    done: _Done,
    stopping: EarlyStopping | None = None,
) -> None:
    """Model, optimiser, how far it is and, for an early stop, the best so far; all else is a function of the step."""
    tensors = {f"model.{key}": value for key, value in model.state_dict().items()}
    for index, state in optimiser.state_dict()["state"].items():
        tensors |= {f"optimiser.{index}.{name}": torch.as_tensor(value) for name, value in state.items()}
    told = asdict(done)
    if stopping is not None:
        tensors |= {f"best.{key}": value for key, value in stopping.state.items()}
        told["stopping"] = stopping.to_json()
    folder.flush_log()
    folder.write_tensors(CHECKPOINT, tensors, told)


def _normalise(run: Run, model: Model, train: Images) -> None:
    """Let the model take mean and deviation of its training images, where the run asks for it."""
    found = standardisers(model)
    if run.normalise == "standard" and not found:
        raise CalgpError(f"{run.label} has no network to normalise images for; leave --normalise out.")
    for features in found:
        features.fit(x for _, x in train.read(train.parts(1024)))


def _stopping(run: Run, checkpoint: _Checkpoint | None) -> EarlyStopping | None:
    """Whether to watch for an early stop, and what a resumed training has seen so far."""
    if run.patience is None or checkpoint is None:
        return None if run.patience is None else EarlyStopping(run.patience)
    tensors, told = checkpoint
    state = {key.removeprefix("best."): value for key, value in tensors.items() if key.startswith("best.")}
    return EarlyStopping(run.patience, **told["stopping"], state=state)


def _tell_environment(folder: RunFolder, now: dict[str, Any]) -> None:
    """Note in run.json by what a training goes on, if that may change its bits."""
    card = folder.card()
    before = card.environment.get("resumed", [card.environment])[-1]
    if any(before.get(name) != now.get(name) for name in {*now, "ranks", "accumulate"}):
        resumed = [*card.environment.get("resumed", ()), now]
        folder.create(replace(card, environment=card.environment | {"resumed": resumed}))


@dataclass
class _Good:
    """How far a training had come when its numbers were last good, and its best state, if it may stop early."""

    done: _Done
    stopping: EarlyStopping | None


@contextmanager
def _keeping_the_last_good_state(
    folder: RunFolder, model: Model, optimiser: torch.optim.Optimizer, good: _Good
) -> Iterator[None]:
    """Numbers that fail end a training with a checkpoint of the state before, or with the last one, if that has failed.

    It has when a step was so large that parameters overflowed.
    """
    try:
        yield
    except NumericalError as error:
        with suppress(NumericalError):
            _require_finite(model)
            _save_checkpoint(folder, model, optimiser, good.done, good.stopping)
        raise CalgpError(
            f"Training failed after step {good.done.step}: {error}. {_kept(folder)} Train again with a smaller "
            "learning rate or in double precision."
        ) from error


def _require_finite(model: Model) -> None:
    for name, value in model.named_parameters():
        if not value.isfinite().all():
            raise NumericalError(f"{name} is no longer finite")


def _kept(folder: RunFolder) -> str:
    if not folder.interrupted:
        return "No good state was left to keep."
    return f"{folder.path} keeps the state after step {folder.metadata(CHECKPOINT)['step']}."


@contextmanager
def interruptible(ranks: int = 1) -> Iterator[threading.Event]:
    """Ctrl-C or SIGTERM sets the event, so that the loop stops between steps; a second one stops at once.

    Of several ranks it does not: torchrun hands a Ctrl-C on, which all have had from the terminal. It ends by itself
    what does not stop.
    """
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return

    def handle(number: int, frame: object) -> None:
        if event.is_set() and ranks == 1:
            raise KeyboardInterrupt
        event.set()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield event
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
