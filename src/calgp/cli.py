"""The command line: flags in, tables and files out. Each command hands over to a room at once."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from calgp._version import __version__
from calgp.errors import CalgpError, printable

app = typer.Typer(
    name="calgp",
    help="Image classifiers that know when they don't know: deep convolutional Gaussian processes, calibrated.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
out = Console()
err = Console(stderr=True)

# options that several commands share
DataOption = Annotated[
    Path | None, typer.Option("--data", help="Where image sets lie; else $CALGP_DATA, else the user's cache.")
]
DeviceOption = Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:1, mps …")]
DevicesOption = Annotated[
    int, typer.Option("--devices", help="So many processes of this machine, one a device; see docs/scaling.md.")
]
ThreadsOption = Annotated[int | None, typer.Option("--threads", help="CPU threads; all cores unless given.")]
SamplesOption = Annotated[int, typer.Option("--samples", "-S", help="Draws of the masks to average over.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of a table.")]
UncalibratedOption = Annotated[
    bool, typer.Option("--uncalibrated", help="The probabilities as trained, though the run has been calibrated.")
]
JobsOption = Annotated[
    int | None, typer.Option(help="Runs at a time, in processes of one thread each; 1, or with Ray one a core.")
]
EngineOption = Annotated[str, typer.Option(help="Where runs are made: local, or ray (pip install calgp[ray]).")]
AddressOption = Annotated[
    str | None, typer.Option(help="Of a Ray cluster, such as auto or HOST:6379; else it is started here.")
]
GpusOption = Annotated[float, typer.Option(help="What a run asks of a Ray cluster: 1, or 0.25 for a quarter.")]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="A run folder, or `shipped`: the run in the package.")]


def main() -> None:
    """Run a command; what a user can mend is told in one sentence."""
    try:
        app(standalone_mode=True)
    except CalgpError as error:
        if not (_speaks() or error.alone):
            sys.exit(1)
        err.print(f"[bold red]Error:[/] {escape(printable(str(error)))}", highlight=False, soft_wrap=True)
        sys.exit(1)
    except KeyboardInterrupt:
        err.print("Stopped.")
        sys.exit(130)


@app.callback(invoke_without_command=True)
def calgp(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    network: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=FILE.py:FUNCTION",
            help="Your own network, made by a function of a file or of an importable module: `--backbone NAME`, and "
            "runs that were trained with it.",
        ),
    ] = None,
) -> None:
    if version:
        out.print(__version__)
        raise typer.Exit
    for each in network or []:
        _know_network(each)


@app.command()
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
    run = card.run if card else runs.from_json(_options(config, given, set_ or []))
    begun_in = card.environment.get("precision", "32-true") if card else "32-true"
    if not 0 <= checkpoint_seconds < float("inf"):
        raise CalgpError(f"checkpoint_seconds={checkpoint_seconds} cannot be; it is a number of seconds, such as 60.")
    go_on = go_on or runs.restarted()
    if go_on and folder is None and resume is None:
        raise CalgpError("--continue, or torchrun's restart, needs the folder that the run was begun in: give --out.")
    _positive("devices", devices)
    fabric = _fabric(device, precision or begun_in, threads, devices)
    target = runs.RunFolder(resume or folder or runs.on_first(
        fabric, lambda: _free(Path("runs") / f"{run.label}-{run.source}-seed{run.seed}")
    ))  # fmt: skip
    go_on = any(runs.gathered(fabric, go_on))  # where a machine has restarted its processes, the others follow
    goes_on, done = runs.on_first(fabric, lambda: _goes_on(run, target) if go_on else (resume is not None, False))
    if done:
        return out.print(f"{target.path} is finished.", soft_wrap=True) if _speaks() else None
    images = runs.together(fabric, lambda: runs.TrainingData.of(run, data, workers=workers))
    with contextlib.ExitStack() as stack:
        watches = []
        if _speaks():
            watches.append(stack.enter_context(show.training_bar(f"Training {run.label} on {run.source}")))
        if _speaks() and tensorboard is not None:
            watches.append(stack.enter_context(tensorboard_watch(target, tensorboard, resume=goes_on)))

        def watch(step: runs.Step) -> None:
            for each in watches:
                each(step)

        runs.train(
            run, target, fabric, data=images, resume=goes_on, checkpoint_seconds=checkpoint_seconds,
            accumulate=accumulate, watch=watch,
        )  # fmt: skip
    if _speaks():
        out.print(f"Trained {run.label} into {target.path}.\nNext: calgp evaluate {target.path}", soft_wrap=True)


@app.command()
def evaluate(
    run: RunArgument,
    source: Annotated[str | None, typer.Option(help="Test images of another set than the run's own.")] = None,
    convert: Annotated[bool, typer.Option(help="Resize and recolour images of another form.")] = False,
    corrupt: Annotated[
        str | None,
        typer.Option(metavar="KIND[:SEVERITY]", help="Corrupt the images: noise:3; noise is 1 to 5 in turn."),
    ] = None,
    corrupt_seed: Annotated[int, typer.Option(help="Of what is random in --corrupt.")] = 0,
    uncalibrated: UncalibratedOption = False,
    samples: SamplesOption = 50,
    seed: Annotated[int, typer.Option(help="Of the masks.")] = 0,
    data: DataOption = None,
    device: DeviceOption = "auto",
    devices: DevicesOption = 1,
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Score a run on test images: its own, or those of another set. Other classes than its own count as outside.

    A calibrated run (see `calgp calibrate`) is scored with its calibrated probabilities; --uncalibrated scores it as it
    was trained. The results of both stand side by side in the folder, in reports and in comparisons. A run with
    decisions (see `calgp decide`) is also told how well they keep their promises.

    --corrupt makes the images worse first: noise, blur, contrast, rotation, occlusion or jpeg, with a severity from 1
    to 5 (noise:3), or without one (noise) all five, of which --json prints a list. The results are kept beside the
    others, as of mnist~noise-3; comparisons and reports stay with the images as they are. What is random in the images
    depends on --corrupt-seed, not on --seed.

    Example: calgp evaluate runs/mnist && calgp evaluate runs/mnist --source notmnist
    """
    import contextlib

    from calgp import runs, show
    from calgp.data import Corruption

    _check_sampling(samples, seed)
    corruptions = [None] if corrupt is None else Corruption.parse(corrupt, seed=corrupt_seed)
    _positive("devices", devices)
    fabric = _fabric(device, "32-true", threads, devices)
    folder = runs.on_first(fabric, lambda: _writable(_folder(run)))
    found = []
    for corruption in corruptions:
        under = "" if corruption is None else f" under {corruption.label}"
        with show.bar(f"Predicting{under}, {samples} samples") if _speaks() else contextlib.nullcontext() as advance:
            found.append(runs.evaluate(
                folder, fabric, source=source, directory=data, samples=samples, seed=seed, convert=convert,
                calibrated=not uncalibrated, corruption=corruption, watch=advance or (lambda done, total: None),
            ).summary)  # fmt: skip
    if not _speaks():
        return
    _warn_of_decisions(folder, samples, uncalibrated)
    if as_json:
        return print(json.dumps(found if len(found) > 1 else found[0]))
    out.print(show.evaluation_table(found[0]) if len(found) == 1 else show.shift_table(found))


@app.command()
def predict(
    run: RunArgument,
    images: Annotated[list[Path], typer.Argument(help="Picture files, or folders of them.")],
    csv: Annotated[Path | None, typer.Option(help="Write everything to a CSV file.")] = None,
    uncalibrated: UncalibratedOption = False,
    samples: SamplesOption = 50,
    seed: Annotated[int, typer.Option(help="Of the masks.")] = 0,
    device: DeviceOption = "auto",
    devices: DevicesOption = 1,
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say what pictures show, and how sure that is.

    Of a calibrated run, probabilities and entropy are calibrated; mutual information and the ± of a probability compare
    samples, and stay those of the average before calibration. Of a run with decisions (see `calgp decide`), it is also
    told whether it abstains, and the set of classes that holds the true one as often as was promised.

    Example: calgp predict shipped photo.png scans/ --csv out.csv
    """
    from calgp import runs, show

    _check_sampling(samples, seed)
    folder = _folder(run)
    _positive("devices", devices)
    fabric = _fabric(device, "32-true", threads, devices)
    names, predicted, decided = runs.decide_files(
        folder, images, fabric, samples=samples, seed=seed, calibrated=not uncalibrated
    )
    if not _speaks():
        return
    _warn_of_decisions(folder, samples, uncalibrated)
    rows = show.prediction_rows(names, predicted, folder.card().classes, decided)
    if csv is not None:
        show.write_csv(csv, rows)
    if as_json:
        return print(json.dumps(rows))
    out.print(show.prediction_table(rows))


@app.command()
def calibrate(
    run: RunArgument,
    calibrator: Annotated[str, typer.Option(help="temperature, vector, platt or isotonic.")] = "temperature",
    share: Annotated[
        float, typer.Option(help="Part of the hold-out to use; 0.5 leaves half for `calgp decide`.")
    ] = 1.0,
    samples: SamplesOption = 50,
    seed: Annotated[int, typer.Option(help="Of the masks, and of which images --share takes.")] = 0,
    data: DataOption = None,
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Calibrate a finished run of any method on the images that it held out (`calgp train --holdout 0.1`).

    The calibrator acts on the averaged probabilities and is kept in calibration.json; `evaluate` and `predict` use it
    from then on. Entropy is then that of the calibrated probabilities; mutual information and expected entropy compare
    samples, which calibration does not change: they stay as they were and do not add up to the calibrated entropy.

    Example: calgp calibrate runs/mnist && calgp evaluate runs/mnist
    """
    from calgp import runs, show

    _check_sampling(samples, seed)
    folder = _writable(_folder(run))
    fabric = _fabric(device, "32-true", threads)
    found = runs.calibrate(
        folder, fabric, calibrator=calibrator, share=share, directory=data, samples=samples, seed=seed
    )
    if as_json:
        return print(json.dumps(found))
    out.print(show.calibration_table(found))
    out.print(f"Next: calgp evaluate {folder.path}", soft_wrap=True)


@app.command()
def decide(
    run: RunArgument,
    error: Annotated[
        float | None, typer.Option(help="Answer only where no more than this share is wrong: 0.01.")
    ] = None,
    confidence: Annotated[float, typer.Option(help="That --error holds on new images.")] = 0.95,
    empirical: Annotated[bool, typer.Option("--empirical", help="--error on the hold-out itself: no promise.")] = False,
    score: Annotated[
        str, typer.Option(help="What doubt is: confidence, entropy or mutual-information.")
    ] = "confidence",
    coverage: Annotated[float | None, typer.Option(help="Sets that hold the true class this often: 0.9.")] = None,
    sets: Annotated[str, typer.Option(help="How sets are made: aps, aps-plain or lac.")] = "aps",
    by_class: Annotated[bool, typer.Option("--by-class", help="--coverage for each class by itself.")] = False,
    empty: Annotated[
        bool, typer.Option("--empty", help="Leave empty sets empty; else they get the top class.")
    ] = False,
    uncalibrated: UncalibratedOption = False,
    samples: SamplesOption = 50,
    seed: Annotated[int, typer.Option(help="Of the masks.")] = 0,
    data: DataOption = None,
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Decide when a run answers, and which classes it keeps, on the images that it held out (--holdout 0.1).

    --error finds a threshold of doubt, beyond which the run abstains: what it answers is wrong no more often than this,
    with --confidence. --coverage makes conformal prediction sets, which hold the true class at least as often as this.
    Both promises are for images like those held out, and are kept in decisions.json: `evaluate`, `predict` and
    `report` use them from then on.

    A calibrated run needs held-out images that its calibrator has not seen: calibrate it with --share 0.5 first.

    Example: calgp decide runs/mnist --error 0.005 --coverage 0.99 && calgp evaluate runs/mnist
    """
    from calgp import runs, show

    _check_sampling(samples, seed)
    folder = _writable(_folder(run))
    fabric = _fabric(device, "32-true", threads)
    found = runs.decide(
        folder, fabric, error=error, confidence=None if empirical else confidence, score=score, coverage=coverage,
        sets=sets, by_class=by_class, empty=empty, calibrated=not uncalibrated, directory=data, samples=samples,
        seed=seed,
    )  # fmt: skip
    if as_json:
        return print(json.dumps(found))
    out.print(show.decisions_table(found, folder.card().classes))
    out.print(f"Next: calgp evaluate {folder.path}", soft_wrap=True)


@app.command()
def ensemble(
    run: Annotated[list[str], typer.Argument(metavar="RUN...", help="Finished runs, of the same classes and images.")],
    folder: Annotated[Path, typer.Option("--out", help="The folder of the ensemble.")],
) -> None:
    """Make several finished runs one: the average of their predictions, each as likely as the others.

    The folder lists the runs by their relative paths and copies nothing: evaluate, predict, calibrate, compare and
    report work on it as on any run. To calibrate it, its runs must hold out the same images: train them with
    --holdout 0.1 --set split_seed=0.

    Example: calgp ensemble runs/cnn-seed0 runs/cnn-seed1 runs/cnn-seed2 --out runs/ensemble
    """
    from calgp import runs

    card = runs.ensemble([_folder(name) for name in run], target := runs.RunFolder(folder))
    out.print(f"Made {card.label} in {target.path}.\nNext: calgp evaluate {target.path}", soft_wrap=True)


@app.command()
def verify(
    run: RunArgument,
    data: DataOption = None,
    device: DeviceOption = "auto",
    threads: Annotated[int | None, typer.Option(help="CPU threads; those of the evaluations unless given.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Evaluate a run once more and compare with what its folder holds; status 1 if they disagree. Writes nothing.

    The same versions, threads and processor must give the same bits; others must agree within a stated tolerance
    (docs/reliability.md). The training images are compared by their checksum. What is not here is not checked.

    Example: calgp verify shipped
    """
    import dataclasses

    from calgp import runs, show

    folder = _folder(run)
    places = [*(found.get("environment", {}) for found in folder.evaluations()), folder.card().environment]
    fabric = _fabric(device, "32-true", threads or next((p["threads"] for p in places if "threads" in p), None))
    with show.steps_shown() as watch:
        checks = runs.verify(folder, fabric, directory=data, watch=watch)
    if as_json:
        print(json.dumps([dataclasses.asdict(check) for check in checks]))
    else:
        out.print(show.verification_table(checks))
    if any(check.state == "differs" for check in checks):
        raise CalgpError(f"{folder.path} does not agree with what was found now.")


@app.command()
def compare(
    run: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, or folders of run folders.")],
    csv: Annotated[Path | None, typer.Option(help="Write the table to a CSV file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Several runs side by side: mean ± standard error over seeds of the same setting.

    A run that was evaluated calibrated and as it was trained has a row for each.

    Example: calgp compare runs/
    """
    import dataclasses

    from calgp import runs, show

    rows = runs.compare([folder for path in run for folder in _run_folders(path)])
    if csv is not None:
        show.write_csv(csv, [show.flat_row(row) for row in rows])
    if as_json:
        return print(json.dumps([dataclasses.asdict(row) for row in rows]))
    out.print(show.comparison_table(rows))


@app.command()
def report(
    run: Annotated[list[str], typer.Argument(metavar="RUN...", help="Run folders, or `shipped`.")],
    file: Annotated[Path | None, typer.Option("--out", help="The HTML file; report.html in the first run.")] = None,
    data: DataOption = None,
) -> None:
    """One HTML page about one or more runs: scores, reliability, doubt inside and outside, pictures, training.

    Example: calgp report runs/mnist --out mnist.html
    """
    from calgp.report import write_report

    folders = [_folder(name) for name in run]
    target = file if file is not None else _writable(folders[0]).path / "report.html"
    path = write_report(folders, target, directory=data)
    out.print(f"Report: {path}", soft_wrap=True)


@app.command()
def export(
    run: RunArgument,
    to: Annotated[str, typer.Option("--to", help="onnx or torch-export.")] = "onnx",
    file: Annotated[Path | None, typer.Option("--out", help="The file; model.onnx or .pt2 in the run.")] = None,
    samples: SamplesOption = 50,
    seed: Annotated[int, typer.Option(help="Of the masks.")] = 0,
    uncalibrated: UncalibratedOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write a run as one file that needs no calgp, with its uncertainty: probabilities, entropy, mutual information.

    The file holds the draws of --samples samples, those of `calgp predict` for its first image; all images of a batch
    share them. It is run after writing, by ONNX Runtime with default optimisations or by torch, and kept only if it
    agrees with calgp to 1e-5. What the file needs and tells: docs/guides/deployment.md.

    Example: calgp export runs/mnist --to onnx --out mnist.onnx
    """
    from calgp import runs, show

    _check_sampling(samples, seed)
    folder = _folder(run)
    target = _writable(folder) if file is None else folder
    done = runs.export(target, file, to=to, samples=samples, seed=seed, calibrated=not uncalibrated)  # type: ignore[arg-type]
    if as_json:
        return print(json.dumps(show.export_row(done)))
    out.print(show.export_lines(done), soft_wrap=True)


@app.command()
def track(
    run: RunArgument,
    to: Annotated[str, typer.Option("--to", help="mlflow or tensorboard.")],
    where: Annotated[
        str | None, typer.Option("--where", help="A directory, or an address that MLflow takes; mlruns or events.")
    ] = None,
    model: Annotated[bool, typer.Option("--model", help="Copy the weights too (MLflow).")] = False,
) -> None:
    """Copy a run into an experiment tracker: its options as parameters, its log and scores as metrics.

    Example: calgp track runs/mnist --to mlflow && calgp track runs/mnist --to tensorboard --where events
    """
    from calgp import trackers

    default = "mlruns" if to == "mlflow" else "events"
    out.print(trackers.track(_folder(run), to, where or default, model=model), soft_wrap=True)


@app.command()
def serve(
    run: Annotated[str | None, typer.Argument(metavar="RUN", help="A run folder, or `shipped`.")] = None,
    demo: Annotated[bool, typer.Option("--demo", help="Serve the run that comes with the package.")] = False,
    host: Annotated[str, typer.Option(help="The address to listen on; this machine alone unless given.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="The port to listen on.")] = 8000,
    token_file: Annotated[
        Path | None, typer.Option(help="A file with the token that clients must send; else $CALGP_TOKEN, else none.")
    ] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="A name by which clients may call the server, such as that of a proxy.")
    ] = None,
    limit: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="A limit, such as samples=200; see docs/serve.md.")
    ] = None,
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
) -> None:
    """Serve a run over HTTP: a page at / and an API (/openapi.json). Ctrl-C or SIGTERM finishes what was accepted.

    Limits and their defaults: body=4194304 bytes, side=8192 and pixels=25000000 of pictures, images=32 a request,
    samples=1000 an image, queue=256 images, requests=128, connections=512, seconds=30 a request, wait=0.002 seconds for
    company, batch=64 images.

    Example: calgp serve --demo --port 8000
    """
    try:
        from calgp.serve import Limits, read_token
        from calgp.serve import serve as serve_run
    except ModuleNotFoundError as error:
        raise CalgpError(f"`calgp serve` needs {error.name}: pip install 'calgp[serve]' brings it.") from None

    if demo == (run is not None):
        raise CalgpError("Name one run to serve, such as runs/mnist, or give --demo for the one in the package.")
    limits, token = Limits.parse(limit or []), read_token(token_file)
    folder, fabric = _folder(run or "shipped"), _fabric(device, "32-true", threads)
    out.print(f"Serving {folder.card().label} on http://{host}:{port} (Ctrl-C stops it).", soft_wrap=True)
    serve_run(folder, fabric, host=host, port=port, limits=limits, token=token, hosts=allow_host or (), threads=threads)


@app.command()
def reproduce(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="An experiment, such as fig2, or `all`.")] = None,
    listed: Annotated[bool, typer.Option("--list", help="List the experiments and what they claim.")] = False,
    scale: Annotated[str, typer.Option(help="smoke (seconds), laptop (hours) or paper (a GPU).")] = "smoke",
    folder: Annotated[Path, typer.Option("--out", help="Where runs and pages go.")] = Path("reproduced"),
    jobs: JobsOption = None,
    engine: EngineOption = "local",
    address: AddressOption = None,
    gpus: GpusOption = 0.0,
    faithful: Annotated[bool, typer.Option(help="As the authors' code, where it differs from the paper.")] = False,
    pages: Annotated[bool, typer.Option("--pages", help="Run nothing: pages of what there is.")] = False,
    results: Annotated[Path, typer.Option(help="Small results of finished runs are taken from here.")] = Path(
        "results"
    ),
    keep: Annotated[Path | None, typer.Option(help="Copy the small results of each finished run here.")] = None,
    data: DataOption = None,
    threads: ThreadsOption = None,
) -> None:
    """Rerun the paper's figures and tables: run what is missing, judge its claims, write a page for each.

    Stop it whenever you like: the same command goes on where it was, and nothing is run twice. --engine ray makes the
    runs on a Ray cluster whose machines share --out and --data (docs/scaling.md).

    Example: calgp reproduce fig2 --scale laptop --jobs 2 --data images
    """
    import shlex

    from calgp import experiments, show
    from calgp.runs.engines import find_engine

    if listed or name is None:
        return out.print(show.experiment_table(experiments.EXPERIMENTS.values()))
    workers = find_engine(engine, jobs=jobs, address=address, gpus=gpus)
    chosen = experiments.chosen(name)
    size = experiments.find_scale(scale)
    cells = {each.name: each.planned(size, authors=faithful) for each in chosen}
    where = experiments.Where(folder / "runs", results, keep, data)
    everything = [cell for planned in cells.values() for cell in planned]
    if scale != "smoke":
        out.print(show.cost(experiments.missing(everything, where), jobs or 1))
    failures: dict[str, str] = {}
    if not pages:
        _fabric("auto", "32-true", threads)
        with show.overall_bar() as watch:
            failures = experiments.run_missing(everything, where, engine=workers, watch=watch)
    command = ["calgp", "reproduce", "", "--scale", scale, *["--faithful"] * faithful]
    for each in chosen:
        command[2] = each.name
        page = experiments.write_experiment(
            each, size, cells[each.name], experiments.rows_of(cells[each.name], where),
            folder / (scale + "-faithful" * faithful) / each.name, command=command, authors=faithful, failures=failures,
        )  # fmt: skip
        out.print(f"{each.name}: {page}", soft_wrap=True)
    if failures:
        again = shlex.join([*command[:2], name, *command[3:]])
        raise CalgpError(f"Not everything could be run; `{again}` tries again. " + " ".join(failures.values()))


@app.command()
def sweep(
    grid: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUES",
            help="An option of `calgp train` or --set with its values: method.keep=0.5,0.9; with --random also a "
            "range: lr=loguniform:1e-4:1e-2, or uniform, or integer.",
        ),
    ] = None,
    random: Annotated[int | None, typer.Option(help="Draw so many settings instead of all combinations.")] = None,
    draw_seed: Annotated[int | None, typer.Option(help="Of --random; more draws begin with the same ones.")] = None,
    seeds: Annotated[str | None, typer.Option(help="Of the runs of each setting: 0,1,2; 0 unless given.")] = None,
    source: Annotated[str | None, typer.Option(help="An image set (see `calgp sources`) or folder:PATH.")] = None,
    method: Annotated[str | None, typer.Option(help="See `calgp methods`.")] = None,
    backbone: Annotated[str | None, typer.Option(help="lenet, lenet-cifar, lenet-3 or resnet.")] = None,
    train_size: Annotated[int | None, typer.Option(help="A balanced part of the training images.")] = None,
    holdout: Annotated[float | None, typer.Option(help="Share kept to choose by; 0.1 unless given.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Passes over the training images.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimiser steps, instead of epochs.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Images a step.")] = None,
    learning_rate: Annotated[float | None, typer.Option("--learning-rate", "--lr", help="Of Adam.")] = None,
    schedule: Annotated[str | None, typer.Option(help="constant, cosine or one-cycle.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Any other option, the same for all runs.")] = None,
    config: Annotated[
        Path | None, typer.Option(help="A TOML file of options, with tables [grid] and [sweep]; flags go before it.")
    ] = None,
    folder: Annotated[Path, typer.Option("--out", help="Where runs and tables go.")] = Path("sweeps/sweep"),
    samples: Annotated[int | None, typer.Option("--samples", "-S", help="Draws of the masks; 50 unless given.")] = None,
    evaluate: Annotated[
        bool, typer.Option("--evaluate", help="Score the test images, too; nothing is chosen by them.")
    ] = False,
    part: Annotated[
        str | None, typer.Option(metavar="INDEX/COUNT", help="Only these runs, 1/10 to 10/10: for job arrays.")
    ] = None,
    dry: Annotated[bool, typer.Option("--dry", help="Run nothing: list what would be run, and its cost.")] = False,
    jobs: JobsOption = None,
    engine: EngineOption = "local",
    address: AddressOption = None,
    gpus: GpusOption = 0.0,
    data: DataOption = None,
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train many settings with several seeds; a table of them, the best on the hold-out first.

    All combinations of --grid, or --random draws. Stop it whenever you like: the same command goes on where it was, and
    nothing is run twice. Test images are not looked at unless --evaluate asks for it, and never sorted by. The tables
    are table.csv, table.json and report.html in --out.

    Example: calgp sweep --method cnn-gp-sorf --epochs 3 --grid method.keep=0.5,0.9 --grid lr=1e-3,3e-3 --seeds 0,1,2
    """
    import shlex

    from calgp import show
    from calgp.experiments import sweep as sweeping
    from calgp.experiments.reproduce import Where
    from calgp.runs.engines import find_engine

    given = {
        "source": source, "method": method, "backbone": backbone, "train_size": train_size, "holdout": holdout,
        "epochs": epochs, "steps": steps, "batch_size": batch_size, "learning_rate": learning_rate,
        "schedule": schedule,
    }  # fmt: skip
    options = _options(config, {name: value for name, value in given.items() if value is not None}, set_ or [])
    told = {"drawn": random, "draw_seed": draw_seed, "samples": samples, "evaluate": evaluate or None,
            "seeds": seeds and _seeds(seeds)}  # fmt: skip
    wanted = sweeping.described(options, grid or [], {name: value for name, value in told.items() if value is not None})
    chosen = sweeping.Part.parse(part) if part else None
    workers = find_engine(engine, jobs=jobs, address=address, gpus=gpus)
    todo = sweeping.missing_jobs(wanted, Where(folder / "runs", data=data), chosen)
    if dry:
        return out.print(show.planned_table(wanted, todo), show.cost(todo, jobs or 1))
    _fabric("auto", "32-true", threads)
    with show.overall_bar() as watch:
        failures = sweeping.run_sweep(wanted, folder, data=data, part=chosen, engine=workers, watch=watch)
    if chosen is None or not sweeping.missing_jobs(wanted, Where(folder / "runs")):  # the last part writes them
        found = sweeping.found_by(wanted, folder)
        command = shlex.join(["calgp", *sys.argv[1:]])
        written = sweeping.write_sweep(wanted, found, folder, command=command, failures=failures)
        if as_json:
            print(json.dumps(written))
        else:
            out.print(show.sweep_table(found))
            out.print(f"Report: {folder / 'report.html'}", soft_wrap=True)
            out.print(f"Best on the hold-out: {written['best']}" if written["best"] else "", soft_wrap=True)
    if failures:
        raise CalgpError("Not everything could be run; the same command tries again. " + " ".join(failures.values()))


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(help="Tell of this one: its options and what they are now.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List the methods, one line each; or tell of one and of the options that --set method.NAME=VALUE takes.

    Example: calgp methods && calgp methods gpdnn
    """
    import dataclasses
    import inspect

    from calgp.methods import METHODS

    if name is not None and name not in METHODS:
        raise CalgpError(f"There is no method {name!r}; there are {', '.join(METHODS)}.")
    chosen = METHODS if name is None else {name: METHODS[name]}
    options = {key: dataclasses.asdict(method) for key, method in chosen.items()}  # type: ignore[call-overload]
    if as_json:
        return print(json.dumps(options))
    if name is None:
        table = Table(box=None, show_header=False)
        for key, method in METHODS.items():
            table.add_row(f"[bold]{key}[/]", escape(method.in_one_line()))
        out.print(table)
        return out.print("\nOptions of one: calgp methods NAME. Costs and when to use which: docs/methods.md.")
    out.print(f"[bold]{name}[/]: {escape(METHODS[name].in_one_line())}\n")
    out.print(escape(inspect.getdoc(type(METHODS[name])) or ""), "\n")
    out.print(escape("\n".join(f"--set method.{key}={value}" for key, value in options[name].items())))


@app.command()
def sources(
    download: Annotated[str | None, typer.Option(help="Fetch this set, where there is a network.")] = None,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the image sets, and which of them are here; or download one.

    Example: calgp sources --download mnist
    """
    from calgp import data as pictures
    from calgp import show

    if download is not None:
        with show.bar(f"Downloading {download}") as advance:
            done = 0

            def progress(now: int, total: int) -> None:
                nonlocal done
                advance(now - done, total)
                done = now

            folder = pictures.download(download, data, progress=progress)
        return out.print(f"{download} is in {folder}.", soft_wrap=True)
    rows = [
        {"name": s.name, "classes": s.classes, "channels": s.channels, "size": s.size, "parts": "/".join(s.splits),
         "here": s.is_here(data), "description": s.description}
        for s in pictures.SOURCES.values()
    ]  # fmt: skip
    if as_json:
        return print(json.dumps(rows))
    own = "folder:PATH, stream:PATH or shards:PATH for your own"
    table = Table(*rows[0], caption=f"Data directory: {pictures.data_directory(data)}; and {own}.")
    for row in rows:
        table.add_row(*(("yes" if v else "no") if isinstance(v, bool) else str(v) for v in row.values()))
    out.print(table)


@app.command()
def shard(
    folder: Annotated[Path, typer.Argument(help="Pictures: FOLDER/class/…, or below FOLDER/train and FOLDER/test.")],
    target: Annotated[Path, typer.Option("--out", help="A new folder for train-000000.tar, test-000000.tar …")],
    images_per_shard: Annotated[int, typer.Option(help="How many images a tar file holds.")] = 10_000,
) -> None:
    """Write a folder of images into tar shards, as WebDataset reads them, to train on with --source shards:DIR.

    The files go in as they are, shuffled once and always alike: the same folder makes the same bytes.

    Example: calgp shard photos --out shards && calgp train --source shards:shards --size 64
    """
    from calgp import show
    from calgp.data.shards import write_shards

    with show.bar(f"Writing {target}") as advance:
        written = write_shards(folder, target, images_per_shard=images_per_shard, watch=advance)
    counts = " and ".join(f"{count:,} {split} images" for split, count in written.items())
    out.print(f"Wrote {counts}.\nNext: calgp train --source shards:{target}", soft_wrap=True)


@app.command()
def demo(
    folder: Annotated[Path, typer.Option("--out", help="Where the runs and the report go.")] = Path("demo"),
    threads: ThreadsOption = None,
) -> None:
    """Train CNN+GP(SORF) and a plain CNN on the embedded digits, compare them on digits and letters, write a report.

    Example: calgp demo --out demo
    """
    import shutil

    from calgp import runs, show
    from calgp.report import write_report

    fabric = _fabric("cpu", "32-true", threads)
    folders = []
    for method, epochs, rate in (("cnn-gp-sorf-paper", 30, 6e-3), ("cnn", 10, 1e-3)):
        options = {
            "method": method,
            "source": "digits",
            "epochs": epochs,
            "schedule": "one-cycle",
            "learning_rate": rate,
        }
        run, target = runs.from_json(options), runs.RunFolder(folder / method)
        if (target.path / "run.json").is_file():  # an earlier demo's
            shutil.rmtree(target.path)
        with show.training_bar(f"Training {method} on 5,000 digits") as watch:
            runs.train(run, target, fabric, watch=watch)
        for source, what in (("digits", "1,000 test digits"), ("letters", "1,000 letters")):
            with show.bar(f"Predicting {what}") as advance:
                runs.evaluate(target, fabric, source=source, watch=advance)
        folders.append(target)
    out.print(show.comparison_table(runs.compare(folders)))
    out.print("AUROC: how well the entropy of the predictions tells letters from digits (0.5: not at all, 1: always).")
    out.print(f"Report: {write_report(folders, folder / 'report.html').resolve()}", soft_wrap=True)


# ---------------------------------------------------------------------------------------------------------------------


def _speaks() -> bool:
    """Whether this process tells the user: of several that do one thing together, the first."""
    return int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", 0))) == 0


def _goes_on(run: Any, folder: Any) -> tuple[bool, bool]:
    """Whether a folder holds something of this run to go on with, and whether all of it."""
    if not (folder.path / "run.json").is_file():
        return False, False
    if folder.card().run != run:
        raise CalgpError(f"{folder.path} holds another run than this one; choose another --out.")
    return True, folder.finished and not folder.interrupted


def _fabric(device: str, precision: str, threads: int | None, processes: int | None = None) -> Any:
    """Where it runs: the device and the floating type are Fabric's business. `processes`: those that it may take."""
    import logging
    import warnings

    import torch

    from calgp.runs import keep_freed_memory, open_device
    from calgp.runs.devices import ranks

    if processes is None and ranks() > 1:
        raise CalgpError("Only train, evaluate and predict can share their work; start this command without torchrun.")
    logging.getLogger("lightning_fabric").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning_fabric")
    keep_freed_memory()
    if threads is not None:
        _positive("threads", threads)
        torch.set_num_threads(threads)
    return open_device(device, precision, processes=processes or 1)


def _know_network(text: str) -> None:
    """The one place where code that a user names is imported; a run folder names no code."""
    import pkgutil
    import runpy

    from calgp.nets import BACKBONES, wrap

    name, equals, place = text.partition("=")
    path, colon, function = place.rpartition(":")
    if not (name and equals and path and colon and function):
        raise CalgpError(
            f"--network {text!r} is not of the form NAME=FILE.py:FUNCTION or NAME=package.module:FUNCTION."
        )
    try:
        make = runpy.run_path(path)[function] if path.endswith(".py") else pkgutil.resolve_name(place)
    except (OSError, ImportError, AttributeError, KeyError, ValueError) as error:
        raise CalgpError(f"--network {text!r} cannot be found ({error!r}); check the file and the function.") from None
    BACKBONES[name] = wrap(make, name=name)


def _options(config: Path | None, given: dict[str, Any], settings: list[str]) -> dict[str, Any]:
    """Options of a run: the file's, then the flags', then --set's."""
    from calgp.runs.run import assign

    options: dict[str, Any] = {} if config is None else _toml(config)
    options |= given
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key:
            raise CalgpError(f"--set {setting!r} is not of the form NAME=VALUE, such as method.depth=3.")
        assign(options, key, _value(text))
    return options


def _weights(text: str) -> Any:
    """A list where there are commas, else what it is: balanced."""
    return [_value(part) for part in text.split(",")] if "," in text else text


def _seeds(text: str) -> list[int]:
    if not all(part.strip().isdecimal() for part in text.split(",")):
        raise CalgpError(f"--seeds {text!r} is no list of whole numbers, such as 0,1,2.")
    return [int(part) for part in text.split(",")]


def _value(text: str) -> Any:
    """JSON where it is JSON, else text: 3, 0.5, true, null, [1, 2], sorf."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _toml(path: Path) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib  # pyright: ignore[reportMissingImports]
    from calgp.runs.reading import LARGEST_JSON, read_bytes

    try:
        return tomllib.loads(read_bytes(path, LARGEST_JSON).decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CalgpError(f"{path} cannot be read as TOML: {str(error)[:300]}.") from None


def _folder(name: str) -> Any:
    from calgp import runs

    shipped = name == "shipped" and not Path(name).exists()
    folder = runs.shipped_run() if shipped else runs.RunFolder(name)
    folder.card()
    return folder


def _writable(folder: Any) -> Any:
    """The shipped run is part of the package: what is made of it goes into a copy in this directory, whole or not."""
    import shutil
    import tempfile

    from calgp import runs
    from calgp.runs.writing import reporting

    if folder.path != runs.shipped_run().path:
        return folder
    copy = runs.RunFolder(Path("runs") / "shipped")
    with reporting(copy.path):
        copy.path.parent.mkdir(exist_ok=True)
        if not copy.path.exists():
            with tempfile.TemporaryDirectory(dir=copy.path.parent, prefix=".") as aside:
                Path(shutil.copytree(folder.path, Path(aside) / "shipped")).rename(copy.path)
    return copy


def _warn_of_decisions(folder: Any, samples: int, uncalibrated: bool) -> None:
    """Decisions that are not used, or whose promises are for other numbers than those shown."""
    made = folder.decisions()
    if made is None:
        return
    told = ""
    if made["calibration"] != folder.probabilities(calibrated=not uncalibrated):
        told = "is of other probabilities than these and was not used"
    elif made["samples"] != samples:
        told = f"is for {made['samples']} samples; with {samples} its promises need not hold"
    if told:
        err.print(f"Note: {folder.path / 'decisions.json'} {told}. `calgp decide` makes it anew.", soft_wrap=True)


def _run_folders(path: Path) -> list[Any]:
    from calgp import runs

    if (path / "run.json").is_file():
        return [runs.RunFolder(path)]
    found = [runs.RunFolder(file.parent) for file in sorted(path.glob("*/run.json"))]
    if not found:
        raise CalgpError(f"{path} is no run folder and holds none.")
    return found


def _free(path: Path) -> Path:
    """A folder that does not exist yet: the path itself, or with a number."""
    import itertools

    from calgp.runs.folder import slug

    path = path.with_name(slug(path.name))
    names = itertools.chain([path], (path.with_name(f"{path.name}-{number}") for number in itertools.count(2)))
    return next(name for name in names if not name.exists())


def _check_sampling(samples: int, seed: int) -> None:
    _positive("samples", samples)
    if not 0 <= seed < 2**63:
        raise CalgpError(f"seed={seed} cannot be; it is a whole number from 0 to 2^63 - 1.")


def _positive(name: str, value: int) -> None:
    if value < 1:
        raise CalgpError(f"{name}={value} cannot be; it must be at least 1.")
