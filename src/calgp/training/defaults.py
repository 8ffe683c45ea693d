"""What the training images decide where a run leaves it open: size, hold-out, network, augmentation, steps, …

`train_run` resolves its run before anything else, so that run.json says what was done and not "auto".
"""

import math
import time
from dataclasses import replace

import torch
from lightning_fabric import Fabric

from calgp.data import Images
from calgp.gp import Bound
from calgp.nets import Task, program_features
from calgp.run import EPOCHS, Run
from calgp.runs import RunFolder, TrainingData, on_first
from calgp.runs.build import build
from calgp.runs.environment import computes_in_bf16
from calgp.runs.training_data import class_weights
from calgp.training.augmentation import mirror_is_harmless
from calgp.training.loop import fit, make_optimiser

CROPPED = 16  # pixels: smaller images are not moved by default
FLIPPED = 28  # pixels: of smaller images a mirror is not asked
WARM_UP, TIMED = 2, 10  # steps that are made to learn how long one takes
COLOUR_EPOCHS = 60  # of a run that names no budget, of colour images, which take longer to learn
FORWARD = 0.4  # of a step is a pass without gradients, and a little for the head
LONG_STEPS, LONG_MINUTES = 10_000, 20.0  # from which a training is in bf16-mixed by default
RESERVE = 0.95  # of the minutes are for steps; the rest for scores of the hold-out


def task_of(train: Images) -> Task:
    """What is to be learned from these images."""
    return Task(*train.x.shape[1:], classes=len(train.classes))


def resolved(run: Run, data: TrainingData) -> Run:
    """The run with every option decided, but for the steps of a run in minutes. A resolved run stays as it is.

    >>> from calgp.data import load
    >>> from calgp.methods import METHODS
    >>> from calgp.nets import BACKBONES
    >>> run = Run(METHODS["cnn"], BACKBONES["auto"])
    >>> found = resolved(run, TrainingData.cut(load("digits", "train"), run))
    >>> found.backbone_label, found.holdout, found.augment, found.steps
    ('compact widths=(32, 64, 128)', 0.1, ('crop',), 1350)
    """
    task, held_out = task_of(data.train), data.held_out is not None
    open_budget = run.steps is None and run.epochs is None and run.minutes is None
    epochs = COLOUR_EPOCHS if task.channels == 3 else EPOCHS
    augment = augmentation(data.train) if run.augment == ("auto",) else run.augment
    calibrates = run.method.is_calibrated and held_out and not run.method.calibrator
    return replace(
        run,
        size=data.train.side if run.size is None else run.size,
        backbone=run.backbone.choose(task, mirror="flip" in augment),
        holdout=(0.1 if held_out else 0.0) if run.holdout is None else run.holdout,
        augment=augment,
        crop=max(task.height, task.width) // 8 or 1 if run.crop is None else run.crop,
        steps=run.total_steps(len(data.train), epochs=epochs) if open_budget else run.steps,
        calibration=calibrates if run.calibration is None else run.calibration,
    )


def augmentation(train: Images) -> tuple[str, ...]:
    """Images of 16 pixels and more are moved; those of 28 and more are flipped where a mirror does no harm."""
    side = min(train.x.shape[2:])
    if side < CROPPED:
        return ()
    return ("crop", "flip") if side >= FLIPPED and mirror_is_harmless(train) else ("crop",)


def default_precision(run: Run, data: TrainingData, device: torch.device) -> str:
    """bf16-mixed for long trainings of `compact`, where the device has instructions for it; else 32-true."""
    minutes, steps = run.minutes, run.total_steps(len(data.train))
    is_long = steps >= LONG_STEPS if minutes is None else minutes >= LONG_MINUTES
    return "bf16-mixed" if is_long and run.backbone.scale_free and computes_in_bf16(device) else "32-true"


def with_steps(run: Run, folder: RunFolder, data: TrainingData, fabric: Fabric, *, accumulate: int) -> Run:
    """The run with the number of steps that its minutes allow here; all ranks get rank zero's.

    A run that was begun in this folder keeps the number that was found then.
    """
    if run.minutes is None or run.steps is not None or run.epochs is not None:
        return run
    begun = on_first(fabric, lambda: folder.card().run if (folder.path / "run.json").is_file() else None)
    if begun is not None and begun == replace(run, steps=begun.steps):
        return begun
    seconds, first = _seconds_a_step(run, data.train, fabric, accumulate=accumulate)
    steps = max(math.floor(RESERVE * 60 * run.minutes / seconds) - WARM_UP - TIMED - first, 1)
    return replace(run, steps=on_first(fabric, lambda: steps))


def _seconds_a_step(run: Run, train: Images, fabric: Fabric, *, accumulate: int) -> tuple[float, int]:
    """How long a step takes, by a few steps of a model that is thrown away; and how many what comes before them takes.

    That is, of a pretrained network, its features of all images, without gradients.
    """
    model = build(run, task_of(train))
    bound = Bound(model, len(train), class_weights(run, train))
    bound, optimiser = fabric.setup(bound, make_optimiser(run, model))
    trial, clock = replace(run, steps=WARM_UP + TIMED), time.perf_counter()
    for step in fit(bound, optimiser, train, trial, fabric=fabric, accumulate=accumulate):
        step.nll.item()  # until the device has done it
        if step.step == WARM_UP:
            clock = time.perf_counter()
    first = FORWARD * len(train) / run.batch_size if program_features(model) else 0
    return (time.perf_counter() - clock) / TIMED, math.ceil(first)
