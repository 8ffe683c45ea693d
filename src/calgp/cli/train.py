"""The command `calgp train`."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from calgp.cli.flags import takes_run
from calgp.cli.shared import (
    DataOption,
    DeviceOption,
    DevicesOption,
    ThreadsOption,
    is_rank_zero,
    open_fabric,
    out,
    require_positive,
)
from calgp.errors import CalgpError, path_error

if TYPE_CHECKING:
    from calgp.runs import Classifier, Run


@takes_run()
def train(
    options: dict[str, Any],
    *,
    folder: Annotated[
        Path | None, typer.Option("--out", help="The run folder.", show_default="runs/METHOD-SOURCE-seedSEED")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Continue an interrupted run folder.", show_default="none")
    ] = None,
    go_on: Annotated[
        bool, typer.Option("--continue", help="If --out holds this run: continue it, or leave it if it is finished.")
    ] = False,
    tensorboard: Annotated[
        Path | None, typer.Option(help="Write event files for TensorBoard into this folder, too.", show_default="none")
    ] = None,
    data: DataOption = None,
    device: DeviceOption = "auto",
    precision: Annotated[
        str | None, typer.Option(help="32-true, bf16-mixed, 16-mixed, 64-true …", show_default="32-true; as begun")
    ] = None,
    devices: DevicesOption = 1,
    accumulate: Annotated[int, typer.Option(help="Split each batch into this many parts, to save memory.")] = 1,
    threads: ThreadsOption = None,
    workers: Annotated[
        int | None,
        typer.Option(help="Processes that read stream: and shards: ahead.", show_default="$CALGP_WORKERS, else 2"),
    ] = None,
    checkpoint_seconds: Annotated[float, typer.Option(help="Save the training this often; it changes no result.")] = 60,
) -> None:
    """Train a classifier into a run folder. Ctrl-C saves it; --resume continues it exactly.

    After a crash, --resume continues from the last checkpoint, with the same result to the bit (docs/reliability.md).

    Several GPUs or machines: --devices 2, or torchrun (docs/scaling.md).

    Example: calgp train --source mnist --minutes 10
    """
    import contextlib

    if resume is not None and (options or folder):
        raise CalgpError("Invalid --resume: the run goes on as it is; give no other options of the run.")
    if resume is not None and not resume.exists():
        raise path_error("run folder", resume)
    from calgp import runs
    from calgp.cli import bars
    from calgp.trackers import tensorboard_watch

    card = runs.RunFolder(resume).card() if resume else None
    if card is not None and resume is not None and runs.RunFolder(resume).interrupted:
        runs.RunFolder(resume).check_checkpoint(card)
    run = card.run if card else runs.from_json(options)
    begun_in = (card and card.environment.precision) or "32-true"
    if not 0 <= checkpoint_seconds < float("inf"):
        raise CalgpError(f"Invalid checkpoint_seconds={checkpoint_seconds}: must be at least 0, such as 60.")
    go_on = go_on or runs.restarted()
    if go_on and folder is None and resume is None:
        raise CalgpError("Invalid --continue: it, or torchrun's restart, needs the folder of the run; give --out.")
    require_positive("devices", devices)
    fabric = open_fabric(device, precision or begun_in, threads, devices)
    target = runs.RunFolder(resume or folder or runs.on_first(fabric, lambda: runs.new_folder(run).path))
    go_on = any(runs.gathered(fabric, go_on))  # where a machine has restarted its processes, the others follow
    asked = run
    images = runs.together(fabric, lambda: runs.TrainingData.of(asked, data, workers=workers))
    run = runs.resolved(asked, images)
    goes_on, done = runs.on_first(fabric, lambda: _goes_on(run, target) if go_on else (resume is not None, False))
    if done:
        return out.print(f"{target.path} is finished.", soft_wrap=True) if is_rank_zero() else None
    if is_rank_zero() and images.train.split_note:
        out.print(images.train.split_note, soft_wrap=True)
    with contextlib.ExitStack() as stack:
        watches = []
        if is_rank_zero():
            watches.append(stack.enter_context(bars.training_bar(_title(run, len(images.train)))))
        if is_rank_zero() and tensorboard is not None:
            watches.append(stack.enter_context(tensorboard_watch(target, tensorboard, resume=goes_on)))

        def watch(step: runs.Step) -> None:
            for each in watches:
                each(step)

        trained = runs.train_run(
            run, target, fabric, data=images, resume=goes_on, checkpoint_seconds=checkpoint_seconds,
            accumulate=accumulate, watch=watch,
        )  # fmt: skip
    if is_rank_zero():
        for sentence in training_summary(trained):
            out.print(sentence, soft_wrap=True, highlight=False)


def _title(run: "Run", images: int) -> str:
    return f"Training {run.label} on {images:,} images of {run.source}: {run.backbone_label}, {_budget(run, images)}"


def _budget(run: "Run", images: int) -> str:
    if run.minutes is not None and run.steps is None:
        return f"{run.minutes:g} minutes"
    steps = run.total_steps(images)
    return f"{steps:,} steps ({steps * run.batch_size / images:.3g} epochs)"


def training_summary(trained: "Classifier") -> list[str]:
    """What was done, how good it is on the hold-out, and what to do next: a sentence each."""
    from calgp.runs.results import HoldoutRecord, NoteRecord

    card, folder = trained.card, trained.folder
    run, log = card.run, folder.log()
    seconds = folder.train_seconds()
    took = f"{seconds / 60:.1f} minutes" if seconds >= 60 else f"{seconds:.0f} seconds"
    kept = next((f", of which the state after step {each.step:,} was kept" for each in log if each.kind == "kept"), "")
    done = (
        f"Trained {run.label} ({run.backbone_label}) on {card.train_images:,} images of {run.source} in "
        f"{_budget(run, card.train_images)}{kept}, {took}, into {folder.path}."
    )
    scores = [each for each in log if isinstance(each, HoldoutRecord)]
    why = [each.why for each in log if isinstance(each, NoteRecord) and each.kind == "uncalibrated"]
    next_one = f"Next: calgp evaluate {folder.path}"
    if not scores:
        return [done, "No images were held out, so nothing is known yet of how good it is.", next_one]
    last, crossed = scores[-1], trained.calibration and trained.calibration.crossed
    found = crossed or last
    wrong = round((found.err or 0) * (last.n or 0))
    good = (
        f"On {last.n:,} held-out images {wrong:,} are wrong ({found.err or 0:.1%}), MNLL {found.mnll:.4f}, "
        f"ECE {found.ece or 0:.4f}"
    )
    if crossed is not None and trained.calibration is not None:
        return [done, f"{good}, with a temperature of {trained.calibration.parameters['temperature']:.3g}.", next_one]
    return [done, f"{good}.{''.join(f' {each}' for each in why)}", next_one]


def _goes_on(run: Any, folder: Any) -> tuple[bool, bool]:
    """Whether a folder holds something of this run to go on with, and whether all of it."""
    if not (folder.path / "run.json").is_file():
        return False, False
    begun = folder.card().run
    if begun != (run if run.minutes is None else replace(run, steps=begun.steps)):
        raise CalgpError(f"Invalid --out {folder.path}: it holds another run than this one; choose another folder.")
    return True, folder.finished and not folder.interrupted
