"""The training loop, and a training from a Run to files."""

import functools
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from lightning_fabric import Fabric
from torch import Tensor

from calgp.data import Images
from calgp.errors import CalgpError
from calgp.gp import Bound, Model, Noise, NumericalError
from calgp.nets import Task
from calgp.runs.calibrating import fit_calibrator
from calgp.runs.evaluation import one_device, score
from calgp.runs.folder import Card, RunFolder, build, environment, load_state
from calgp.runs.run import Run
from calgp.runs.training_data import TrainingData

CHECKPOINT_SECONDS = 60.0
LOG_STEPS = 20


class Interrupted(CalgpError):
    """Ctrl-C: the run stopped after a whole step, was saved, and can be resumed."""


@dataclass(frozen=True)
class Step:
    """One optimiser step, done. Both parts of the bound are still on the device."""

    step: int
    steps: int
    nll: Tensor
    kl: Tensor
    learning_rate: float


def fit(
    bound: Bound, optimiser: torch.optim.Optimizer, images: Images, run: Run, *, fabric: Fabric, first: int = 0
) -> Iterator[Step]:
    """Minimise the bound over the images, a step each time it is asked for the next: Adam on Eq. (6) by (8), (9).

    Order and masks are functions of (seed, step), so that starting at step `first` is the same as coming from 0. A step
    whose numbers fail raises NumericalError and changes nothing.
    """
    steps = run.total_steps(len(images))
    for step in range(first, steps):
        index = order(len(images), run.batch_size, step, run.seed)
        x, y = fabric.to_device((images.pixels(index), images.y[index]))
        noise = training_noise(run, step, images.rows[index].to(x.device))
        rate = run.learning_rate_at(step, steps)
        for group in optimiser.param_groups:
            group["lr"] = rate
        optimiser.zero_grad(set_to_none=True)
        nll, kl = bound(x, y, noise)
        loss = nll + run.kl_weight * kl
        if not loss.isfinite():  # before anything is changed by it
            raise NumericalError(f"the bound is no finite number: likelihood term {nll:g}, KL term {kl:g}")
        fabric.backward(loss)
        optimiser.step()
        yield Step(step + 1, steps, nll.detach(), kl.detach(), rate)


def order(n: int, batch_size: int, step: int, seed: int) -> Tensor:
    """Which images step `step` sees: a new shuffle each epoch, the last batch of an epoch as large as what is left."""
    epoch, batch = divmod(step, -(-n // batch_size))
    return _shuffle(n, seed, epoch)[batch * batch_size : (batch + 1) * batch_size]


@functools.lru_cache(maxsize=1)
def _shuffle(n: int, seed: int, epoch: int) -> Tensor:
    return torch.randperm(n, generator=torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63))


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
    watch: Callable[[Step], None] = lambda step: None,
) -> Model:
    """Train a run into its folder. Ctrl-C saves after the step at hand and raises Interrupted.

    Where the numbers fail (a loss that is not finite, a covariance that has no factor), the last good state is kept as
    the checkpoint, and a CalgpError says so.
    """
    fabric = one_device(fabric)
    data = TrainingData.of(run, directory) if data is None else data
    if run.method.calibrator and data.held_out is None:
        raise CalgpError(f"{run.label} fits its {run.method.calibrator} on held-out images; give some with the data.")
    task = Task(*data.train.x.shape[1:], classes=len(data.train.classes))
    model = build(run, task)
    if not resume:
        run.backbone.start(model, data.train, generator=torch.Generator().manual_seed(run.seed))
        run.method.start(model, data.train, generator=torch.Generator().manual_seed(run.seed))
    optimiser = make_optimiser(run, model)
    first = _resumed(folder, model, optimiser, data) if resume else _begun(run, folder, task, data)
    bound, optimiser = fabric.setup(Bound(model, len(data.train)), optimiser)
    clock, totals, saved = time.perf_counter(), torch.zeros(3), time.monotonic()
    done = _Done(first)
    with interruptible() as stop, _keeping_the_last_good_state(folder, model, optimiser, done):
        for step in fit(bound, optimiser, data.train, run, fabric=fabric, first=first):
            done.steps = step.step
            watch(step)
            totals += torch.stack([step.nll, step.kl, torch.ones_like(step.nll)]).cpu()
            last = step.step == step.steps
            if last or step.step % LOG_STEPS == 0:
                nll, kl = (totals[:2] / totals[2]).tolist()
                seconds, clock = time.perf_counter() - clock, time.perf_counter()
                record = {"kind": "train", "step": step.step, "nll": nll, "kl": kl, "rate": step.learning_rate}
                folder.append_log(record | {"seconds": round(seconds, 3)})
                totals.zero_()
            if data.held_out is not None and (last or step.step % -(-len(data.train) // run.batch_size) == 0):
                scores = score(model, data.held_out, samples=10, seed=run.seed)
                folder.append_log({"kind": "holdout", "step": step.step} | scores.to_dict())
            if last or stop.is_set() or time.monotonic() - saved > CHECKPOINT_SECONDS:
                _require_finite(model)
                if not last:
                    _save_checkpoint(folder, model, optimiser, step.step)
                saved = time.monotonic()
            if stop.is_set() and not last:
                raise Interrupted(
                    f"Stopped after step {step.step} of {step.steps}. Go on with: calgp train --resume {folder.path}"
                )
    run.method.finish(model, data.train)
    if run.method.calibrator and data.held_out is not None:
        folder.write_calibration(fit_calibrator(model, data.held_out, run.method.calibrator, samples=50, seed=0))
    folder.write_tensors("model.safetensors", model.state_dict())
    folder.remove("checkpoint.safetensors")
    return model


def _begun(run: Run, folder: RunFolder, task: Task, data: TrainingData) -> int:
    if folder.finished or folder.interrupted:
        raise CalgpError(
            f"{folder.path} already holds a run. Choose another --out, or, if it was interrupted, go on with "
            f"`calgp train --resume {folder.path}`."
        )
    held_out = () if data.held_out is None else tuple(data.held_out.rows.tolist())
    classes, n = data.train.classes, len(data.train)
    folder.create(Card(run, task, classes, n, data.train.checksum(), held_out, environment()))
    folder.remove("log.jsonl")
    folder.remove("calibration.json")
    return 0


def _resumed(folder: RunFolder, model: Model, optimiser: torch.optim.Optimizer, data: TrainingData) -> int:
    if folder.finished:
        raise CalgpError(f"{folder.path} is finished: there is nothing to resume.")
    if not folder.interrupted:
        raise CalgpError(f"{folder.path} has no checkpoint to resume from; train it anew into another folder.")
    if data.train.checksum() != folder.card().checksum:
        raise CalgpError(
            f"The training images are not those that {folder.path} was begun with; resuming would mix them."
        )
    tensors = folder.tensors("checkpoint.safetensors")
    model_state = {key.removeprefix("model."): value for key, value in tensors.items() if key.startswith("model.")}
    load_state(model, model_state, folder.path / "checkpoint.safetensors")
    parameters = optimiser.param_groups[0]["params"]
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        if key.startswith("optimiser."):
            _, index, name = key.split(".", 2)
            parameter = parameters[int(index)]
            # laid out in memory as the parameter is (channels last): the fused step goes through both in that order
            restored = torch.empty_like(parameter).copy_(value) if value.shape == parameter.shape else value
            state.setdefault(int(index), {})[name] = restored
    optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})
    return int(folder.metadata("checkpoint.safetensors")["step"])


def _save_checkpoint(folder: RunFolder, model: Model, optimiser: torch.optim.Optimizer, step: int) -> None:
    """Model, optimiser and step; order and masks are functions of the step, so there is no more to save."""
    tensors = {f"model.{key}": value for key, value in model.state_dict().items()}
    for index, state in optimiser.state_dict()["state"].items():
        tensors |= {f"optimiser.{index}.{name}": torch.as_tensor(value) for name, value in state.items()}
    folder.write_tensors("checkpoint.safetensors", tensors, {"step": step})


@dataclass
class _Done:
    """How far a training has come."""

    steps: int


@contextmanager
def _keeping_the_last_good_state(
    folder: RunFolder, model: Model, optimiser: torch.optim.Optimizer, done: _Done
) -> Iterator[None]:
    """Numbers that fail end a training with a checkpoint of the state before, or with the last one, if that has failed.

    It has when a gradient was not finite where the loss still was: the optimiser has then spoiled the parameters.
    """
    try:
        yield
    except NumericalError as error:
        with suppress(NumericalError):
            _require_finite(model)
            _save_checkpoint(folder, model, optimiser, done.steps)
        raise CalgpError(
            f"Training failed after step {done.steps}: {error}. {_kept(folder)} Train again with a smaller learning "
            "rate or in double precision."
        ) from error


def _require_finite(model: Model) -> None:
    for name, value in model.named_parameters():
        if not value.isfinite().all():
            raise NumericalError(f"{name} is no longer finite")


def _kept(folder: RunFolder) -> str:
    if not folder.interrupted:
        return "No good state was left to keep."
    return f"{folder.path} keeps the state after step {folder.metadata('checkpoint.safetensors')['step']}."


@contextmanager
def interruptible() -> Iterator[threading.Event]:
    """Ctrl-C sets the event, so that the loop stops between steps; a second Ctrl-C stops at once."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return

    def handle(number: int, frame: object) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)
