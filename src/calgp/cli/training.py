"""The command `calgp train`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from calgp.cli.shared import (
    DataOption,
    DeviceOption,
    DevicesOption,
    ThreadsOption,
    open_fabric,
    out,
    parsed,
    require_positive,
    run_options,
    speaks,
)
from calgp.errors import CalgpError


def train(
    source: Annotated[
        str | None,
        typer.Option(
            help="An image set (see `calgp sources`), folder:PATH, or, to leave images on the disk, stream:PATH or "
            "shards:PATH."
        ),
    ] = None,
    method: Annotated[str | None, typer.Option(help="See `calgp methods`.")] = None,
    backbone: Annotated[
        str | None, typer.Option(help="lenet, lenet-cifar, lenet-3, resnet, or your own (calgp --network).")
    ] = None,
    folder: Annotated[Path | None, typer.Option("--out", help="The run folder; runs/… unless given.")] = None,
    train_size: Annotated[int | None, typer.Option(help="A balanced part of the training images.")] = None,
    holdout: Annotated[float | None, typer.Option(help="Share kept for validation, such as 0.1.")] = None,
    size: Annotated[int | None, typer.Option(help="Resize images to a square of this side.")] = None,
    colour: Annotated[str | None, typer.Option(help="Convert images: grey or rgb.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Passes over the training images.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimiser steps, instead of epochs.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Images a step, of all processes together.")] = None,
    learning_rate: Annotated[float | None, typer.Option("--learning-rate", "--lr", help="Of Adam.")] = None,
    schedule: Annotated[str | None, typer.Option(help="constant, cosine or one-cycle.")] = None,
    clip: Annotated[float | None, typer.Option(help="The largest norm of a gradient; none unless given.")] = None,
    patience: Annotated[
        int | None, typer.Option(help="Stop after so many epochs without a better hold-out; keep the best.")
    ] = None,
    class_weights: Annotated[
        str | None, typer.Option(help="balanced, or a number a class in their order: 1,2,0.5.")
    ] = None,
    augment: Annotated[str | None, typer.Option(help="Change training images: flip, crop or flip,crop.")] = None,
    crop: Annotated[
        int | None, typer.Option(help="How many pixels the crop may move an image; 4 unless given.")
    ] = None,
    normalise: Annotated[
        str | None, typer.Option(help="none, or standard: by mean and deviation of each channel, kept in the model.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of all that is random.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Any option: method.depth=3, backbone.n=2, kl_weight=0.5 …")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file of options; flags go before it.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with an interrupted run folder.")] = None,
    go_on: Annotated[
        bool, typer.Option("--continue", help="If --out holds this run: go on with it, or leave it if it is done.")
    ] = False,
    tensorboard: Annotated[Path | None, typer.Option(help="Write event files for TensorBoard here, too.")] = None,
    data: DataOption = None,
    device: DeviceOption = "auto",
    precision: Annotated[
        str | None, typer.Option(help="32-true (unless given), bf16-mixed, 16-mixed, 64-true …")
    ] = None,
    devices: DevicesOption = 1,
    accumulate: Annotated[int, typer.Option(help="Parts of a batch, one after the other, to need less memory.")] = 1,
    threads: ThreadsOption = None,
    workers: Annotated[
        int | None,
        typer.Option(help="Processes that read stream: and shards: ahead; else $CALGP_WORKERS, else 2."),
    ] = None,
    checkpoint_seconds: Annotated[float, typer.Option(help="Save the training this often; it changes no result.")] = 60,
) -> None:
    """Train a classifier into a run folder. Ctrl-C saves it; --resume goes on exactly where it was.

    So it does after a crash, from the last checkpoint: the result is the same to the bit (docs/reliability.md).

    Several processes train one run with --devices 2, or under torchrun, on one machine or many (docs/scaling.md).

    Example: calgp train --source mnist --method cnn-gp-sorf --epochs 20 --schedule one-cycle --lr 3e-3
    """
    import contextlib

    from calgp import runs, show
    from calgp.trackers import tensorboard_watch

    given = {
        "source": source, "method": method, "backbone": backbone, "train_size": train_size, "holdout": holdout,
        "size": size, "colour": colour, "epochs": epochs, "steps": steps, "batch_size": batch_size,
        "learning_rate": learning_rate, "schedule": schedule, "seed": seed, "patience": patience, "crop": crop,
        "clip": clip, "class_weights": class_weights and _weights(class_weights),
        "augment": augment and augment.split(","),
        "normalise": normalise,
    }  # fmt: skip
    given = {name: value for name, value in given.items() if value is not None}
    if resume is not None and (given or set_ or config or folder):
        raise CalgpError("--resume goes on with the run as it is: give it no other options of the run.")
    if resume is not None and runs.RunFolder(resume).interrupted:
        runs.RunFolder(resume).check_tensors("checkpoint.safetensors")
    card = runs.RunFolder(resume).card() if resume else None
    run = card.run if card else runs.from_json(run_options(config, given, set_ or []))
    begun_in = card.environment.get("precision", "32-true") if card else "32-true"
    if not 0 <= checkpoint_seconds < float("inf"):
        raise CalgpError(f"checkpoint_seconds={checkpoint_seconds} cannot be; it is a number of seconds, such as 60.")
    go_on = go_on or runs.restarted()
    if go_on and folder is None and resume is None:
        raise CalgpError("--continue, or torchrun's restart, needs the folder that the run was begun in: give --out.")
    require_positive("devices", devices)
    fabric = open_fabric(device, precision or begun_in, threads, devices)
    target = runs.RunFolder(resume or folder or runs.on_first(
        fabric, lambda: _free(Path("runs") / f"{run.label}-{run.source}-seed{run.seed}")
    ))  # fmt: skip
    go_on = any(runs.gathered(fabric, go_on))  # where a machine has restarted its processes, the others follow
    goes_on, done = runs.on_first(fabric, lambda: _goes_on(run, target) if go_on else (resume is not None, False))
    if done:
        return out.print(f"{target.path} is finished.", soft_wrap=True) if speaks() else None
    images = runs.together(fabric, lambda: runs.TrainingData.of(run, data, workers=workers))
    with contextlib.ExitStack() as stack:
        watches = []
        if speaks():
            watches.append(stack.enter_context(show.training_bar(f"Training {run.label} on {run.source}")))
        if speaks() and tensorboard is not None:
            watches.append(stack.enter_context(tensorboard_watch(target, tensorboard, resume=goes_on)))

        def watch(step: runs.Step) -> None:
            for each in watches:
                each(step)

        runs.train(
            run, target, fabric, data=images, resume=goes_on, checkpoint_seconds=checkpoint_seconds,
            accumulate=accumulate, watch=watch,
        )  # fmt: skip
    if speaks():
        out.print(f"Trained {run.label} into {target.path}.\nNext: calgp evaluate {target.path}", soft_wrap=True)


def _goes_on(run: Any, folder: Any) -> tuple[bool, bool]:
    """Whether a folder holds something of this run to go on with, and whether all of it."""
    if not (folder.path / "run.json").is_file():
        return False, False
    if folder.card().run != run:
        raise CalgpError(f"{folder.path} holds another run than this one; choose another --out.")
    return True, folder.finished and not folder.interrupted


def _weights(text: str) -> Any:
    """A list where there are commas, else what it is: balanced."""
    return [parsed(part) for part in text.split(",")] if "," in text else text


def _free(path: Path) -> Path:
    """A folder that does not exist yet: the path itself, or with a number."""
    import itertools

    from calgp.runs.folder import slug

    path = path.with_name(slug(path.name))
    names = itertools.chain([path], (path.with_name(f"{path.name}-{number}") for number in itertools.count(2)))
    return next(name for name in names if not name.exists())
