"""The command `calgp train`."""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from calgp.cli import parameters, rooms
from calgp.cli.flags import takes_run
from calgp.cli.shared import check_source, is_rank_zero, note, open_fabric, say
from calgp.errors import CalgpError, path_error
from calgp.json_values import Json

NOTHING_HELD_OUT = (
    "No images were held out, so no temperature was fitted, and nothing is known yet of how good it is; --holdout 0.1 "
    "keeps a tenth aside."
)


@takes_run()
def train(
    options: dict[str, Json],
    *,
    network: Annotated[
        str | None,
        Option(
            help="Fine-tune a pretrained network: timm:NAME, torchvision:NAME, transformers:FOLDER or "
            "file.py:function.",
            show_default="none",
            rich_help_panel="Model",
        ),
    ] = None,
    weights: Annotated[
        str | None,
        Option(
            help="Weights for --network: a file, or `random`.", show_default="the library's", rich_help_panel="Model"
        ),
    ] = None,
    folder: Annotated[
        Path | None, Option("--out", help="The run folder.", show_default="runs/METHOD-SOURCE-seedSEED")
    ] = None,
    resume: Annotated[Path | None, Option(help="Continue an interrupted run folder.", show_default="none")] = None,
    go_on: Annotated[
        bool, Option("--continue", help="If --out holds this run: continue it, or leave it if it is finished.")
    ] = False,
    tensorboard: Annotated[
        Path | None, Option(help="Write event files for TensorBoard into this folder, too.", show_default="none")
    ] = None,
    data: parameters.Data = None,
    device: parameters.Device = "auto",
    precision: Annotated[
        str | None,
        Option(
            help="32-true, bf16-mixed, 16-mixed, 64-true …",
            show_default="32-true; bf16-mixed for compact from 10,000 steps or 20 minutes, if one device has it",
        ),
    ] = None,
    devices: parameters.Devices = 1,
    accumulate: Annotated[int, Option(help="Split each batch into this many parts, to save memory.")] = 1,
    threads: parameters.Threads = None,
    workers: Annotated[
        int | None, Option(help="Processes that read stream: and shards: ahead.", show_default="$CALGP_WORKERS, else 2")
    ] = None,
    checkpoint_seconds: Annotated[float, Option(help="Save the training this often; it changes no result.")] = 60,
) -> None:
    """Train a classifier into a run folder. Ctrl-C saves it; --resume continues it exactly.

    After a crash, --resume continues from the last checkpoint, with the same result to the bit (docs/reliability.md).

    With --network: the head is trained on features of the frozen network first, then both together.

    Several GPUs or machines: --devices 2, or torchrun (docs/scaling.md).

    Example: calgp train --source mnist --minutes 10
    """
    others = bool(options or folder or network is not None)
    _check_given(resume, options, others=others, network=network, weights=weights, seconds=checkpoint_seconds)
    check_source(str(options.get("source", "")))

    run, begun_in = _resumed(resume) if resume else (rooms.training.described_run(options, network, weights), None)
    go_on = go_on or rooms.runs.restarted()
    if go_on and not (folder or resume):
        raise CalgpError("Invalid --continue: it, or torchrun's restart, needs the folder of the run; give --out.")
    fabric = open_fabric(device, precision or begun_in or "32-true", threads, devices)
    target = rooms.runs.RunFolder(
        resume or folder or rooms.runs.on_first(fabric, lambda: rooms.training.new_folder(run).path)
    )
    go_on = any(rooms.runs.gathered(fabric, go_on))  # where a machine has restarted its processes, the others follow
    images = rooms.runs.together(fabric, lambda: rooms.runs.TrainingData.of(run, data, workers=workers))
    resolved = rooms.training.resolved(run, images)
    if precision is None and begun_in is None and fabric.world_size == 1:
        fast = rooms.training.default_precision(resolved, images, fabric.device)
        fabric = open_fabric(device, fast, threads, devices)
    goes_on, done = rooms.runs.on_first(
        fabric, lambda: _can_continue(resolved, target) if go_on else (resume is not None, False)
    )
    if done:
        return say(f"{target.path} is finished.") if is_rank_zero() else None
    with _watched(resolved, images, target, tensorboard, resume=goes_on) as watch:
        trained = rooms.training.train_run(
            resolved, target, fabric, data=images, resume=goes_on, checkpoint_seconds=checkpoint_seconds,
            accumulate=accumulate, watch=watch,
        )  # fmt: skip
    if is_rank_zero():
        say("\n".join(training_summary(trained, images.watched)))


def _check_given(
    resume: Path | None,
    options: dict[str, Json],
    *,
    others: bool,
    network: str | None,
    weights: str | None,
    seconds: float,
) -> None:
    """Refuse options that cannot be, or cannot go together, before anything is imported that takes long."""
    if resume is not None and others:
        raise CalgpError("Invalid --resume: the run goes on as it is; give no other options of the run.")
    if resume is not None and not resume.exists():
        raise path_error("run folder", resume)
    if options.get("minutes") is not None and (other := next(filter(options.get, ("epochs", "steps")), None)):
        raise CalgpError(f"Invalid --minutes with --{other}: both say how long it trains; give one of them.")
    if weights is not None and network is None:
        raise CalgpError("Invalid --weights without --network: they are of a pretrained network.")
    if not 0 <= seconds < float("inf"):
        raise CalgpError(f"Invalid checkpoint_seconds={seconds}: must be at least 0, such as 60.")


def _resumed(resume: Path) -> "tuple[rooms.runs.Run, str | None]":
    """The run that a folder holds, and the precision that it was begun in."""
    folder = rooms.runs.RunFolder(resume)
    card = folder.card()
    if folder.interrupted:
        folder.check_checkpoint(card)
    return card.run, card.environment.precision


@contextmanager
def _watched(
    run: "rooms.runs.Run",
    images: "rooms.runs.TrainingData",
    target: "rooms.runs.RunFolder",
    tensorboard: Path | None,
    *,
    resume: bool,
) -> "Iterator[Callable[[rooms.training.Step], None]]":
    """What is called with each step: a progress bar, and TensorBoard if asked for; nothing on other ranks than 0."""
    with ExitStack() as stack:
        watches = []
        if is_rank_zero():
            if images.train.split_note:
                say(images.train.split_note)
            for sentence in rooms.runs.cautions(images.train, run):
                note(sentence)
            n = len(images.train)
            title = f"Training {run.label} on {n:,} images of {run.source}: {run.backbone_label}, {_budget(run, n)}"
            watches.append(stack.enter_context(rooms.bars.training_bar(title)))
            if tensorboard is not None:
                watches.append(
                    stack.enter_context(rooms.trackers.tensorboard_watch(target, tensorboard, resume=resume))
                )

        def watch(step: "rooms.training.Step") -> None:
            for each in watches:
                each(step)

        yield watch


def _budget(run: "rooms.runs.Run", images: int) -> str:
    if run.minutes is not None and run.steps is None:
        return f"{run.minutes:g} minute{'s' * (run.minutes != 1)}"
    return _steps(run.total_steps(images), run, images)


def _steps(steps: int, run: "rooms.runs.Run", images: int) -> str:
    epochs = steps / math.ceil(images / run.batch_size)
    shown = f"{epochs:,.0f}" if epochs >= 100 else f"{epochs:.3g}"
    return f"{rooms.words.count(steps, 'step')} ({shown} epoch{'s' * (shown != '1')})"


def training_summary(trained: "rooms.runs.Classifier", watched: "rooms.data.Images | None") -> list[str]:
    """What was done, how good it is on the hold-out, and what to do next: a sentence each."""
    card, folder = trained.card, trained.folder
    run, log = card.run, folder.log()
    seconds = folder.train_seconds()
    took = f"{seconds / 60:.1f} minutes" if seconds >= 60 else rooms.words.count(round(seconds), "second")
    made, planned = card.steps_made(log), run.total_steps(card.train_images)
    kept = next((each.step for each in log if each.kind == "kept"), None)
    early = f", stopped early of {planned:,}" * (made < planned)
    early += f", of which the state after step {kept:,} was kept" if kept is not None else ""
    done = (
        f"Trained {run.label} ({run.backbone_label}) on {card.train_images:,} images of {run.source} in "
        f"{_steps(made, run, card.train_images)}{early}, {took}, into {folder.path}."
    )
    scores = [each for each in log if each.kind == "holdout"]
    why = [each.why for each in log if each.kind == "uncalibrated"]
    next_one = f"Next: calgp evaluate {folder.path}"
    if not scores:
        return [done, NOTHING_HELD_OUT, next_one]
    last = scores[-1] if kept is None else next(each for each in scores if each.step == kept)
    crossed = trained.calibration and trained.calibration.crossed
    found = crossed or last
    wrong = round((found.err or 0) * (last.n or 0))
    verb = "is" if wrong == 1 else "are"
    good = (
        f"On {last.n:,} held-out images {wrong:,} {verb} wrong ({found.err or 0:.1%}), MNLL {found.mnll:.4f}, "
        f"ECE {found.ece or 0:.4f}"
    )
    if scores[0].step == 0:  # of a pretrained network
        good = f"On the frozen network {scores[0].err:.1%} were wrong, MNLL {scores[0].mnll:.4f}. {good}"
    guess = "" if watched is None else _as_good_as(wrong, watched)
    if crossed is not None and trained.calibration is not None:
        name, temperature = trained.calibration.calibrator, trained.calibration.parameters.get("temperature")
        how = f"with a temperature of {temperature:.3g}" if name == "temperature" else f"calibrated ({name})"
        return [done, f"{good}, {how}.{guess}", next_one]
    return [done, f"{good}.{''.join(f' {each}' for each in why)}{guess}", next_one]


def _as_good_as(wrong: int, held_out: "rooms.data.Images") -> str:
    """A sentence where the images themselves are not used: the most frequent class would do as well."""
    counts = held_out.y.bincount()
    if 0 < len(held_out) - counts.max() <= wrong:
        return f" {rooms.words.as_good_as(held_out.classes[counts.argmax()])}"
    return ""


def _can_continue(run: Any, folder: Any) -> tuple[bool, bool]:
    """Whether a folder holds this run, so that training can continue, and whether it is finished."""
    if not (folder.path / "run.json").is_file():
        return False, False
    begun = folder.card().run
    if begun != (run if run.minutes is None else replace(run, steps=begun.steps)):
        raise CalgpError(f"Invalid --out {folder.path}: it holds another run than this one; choose another folder.")
    return True, folder.finished and not folder.interrupted
