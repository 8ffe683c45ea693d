"""The command predict: a few images onto the terminal, or very many into a folder."""

import json
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from calgp.cli import parameters, rooms
from calgp.cli.shared import check_images, check_run, is_rank_zero, note, open_folder, out, say
from calgp.errors import CalgpError

MANY = "Many images"


def predict(
    run: parameters.Run,
    images: Annotated[
        list[Path],
        Argument(metavar="IMAGE...", help="Image files, or folders of them; with --out also tar files of images."),
    ],
    *,
    table: parameters.Csv,
    uncalibrated: parameters.Uncalibrated = False,
    sampling: parameters.Sampling,
    compute: parameters.Compute,
    devices: parameters.Devices = 1,
    as_json: parameters.AsJson = False,
    skip_unreadable: Annotated[bool, Option("--skip-unreadable", help="Leave out damaged images.")] = False,
    folder: Annotated[
        Path | None,
        Option(
            "--out",
            help="Write .npz files into this folder instead; the same command again makes those that are missing.",
            rich_help_panel=MANY,
            show_default="none",
        ),
    ] = None,
    rows_per_shard: Annotated[int, Option(help="Images in each file of --out.", rich_help_panel=MANY)] = 1000,
    on: Annotated[
        str, Option(help="Where --out is made: local, or ray (pip install calgp\\[ray]).", rich_help_panel=MANY)
    ] = "local",
    jobs: parameters.Jobs = None,
    address: parameters.Address = None,
    gpus: parameters.Gpus = 0.0,
) -> None:
    """Classify images, with probabilities and uncertainty.

    Probabilities and entropy of a calibrated run are calibrated. Mutual information is that before calibration, and so
    is the ± of --passes 50, the standard error of the mean over samples. If the run has decisions (see `calgp decide`),
    the answer says whether it abstains, and which classes are in the prediction set.

    With --out they go into a folder, a file for every 1,000 images, in several processes (--jobs) or on a Ray cluster
    (--on ray). A process that dies, or Ctrl-C, loses at most one file each.

    Example: calgp predict shipped photo.png scans/ --csv out.csv
    """
    few, many = table.csv is not None or as_json or devices > 1, jobs is not None or on != "local"
    check_run(run)
    _check_flags(images, folder, few=few, many=many)
    workers = rooms.engines.find_engine(on, jobs=jobs, address=address, gpus=gpus, flag="--on")
    if folder is not None:
        return _predict_shards(
            run, images, folder, workers, compute, calibrated=not uncalibrated, passes=sampling.passes,
            prediction=sampling.engine, seed=sampling.seed, rows_per_shard=rows_per_shard,
            skip_unreadable=skip_unreadable,
        )  # fmt: skip
    fabric = compute.open(devices)
    classifier = rooms.runs.Classifier.load(open_folder(run), fabric=fabric, calibrated=not uncalibrated)
    found = classifier.predict(images, **vars(sampling), skip_unreadable=skip_unreadable)
    if is_rank_zero():
        if found.unreadable:
            note(f"Left out, since they cannot be read ({len(found.unreadable)}): {'; '.join(found.unreadable)}.")
        warn_of_decisions(classifier, found.passes)
        show_predictions(found, table, as_json=as_json)


def _check_flags(images: list[Path], folder: Path | None, *, few: bool, many: bool) -> None:
    """Refuse flags for `few` images with a folder, those for `many` without; and then images that are not there."""
    if folder is not None and few:
        raise CalgpError("--csv, --json and --devices do not go with --out, which makes .npz files; leave them out.")
    if folder is None and many:
        raise CalgpError("--jobs and --on are for many images; name a folder for them with --out.")
    if folder is None:
        check_images(images)


def show_predictions(found: "rooms.runs.Prediction", table: parameters.Csv, *, as_json: bool) -> None:
    """What is said of each image: a table or JSON, and a CSV file if one was named."""
    rows = rooms.tables.prediction_rows(found)
    table.write(row.flat() for row in rows)
    if as_json:
        return print(json.dumps([row.plain() for row in rows]))
    out.print(rooms.tables.prediction_table(rows, sampled=found.passes.count > 1, width=out.width))


def _predict_shards(
    run: str, images: list[Path], folder: Path, engine: "rooms.engines.Engine", compute: parameters.Compute,
    *, calibrated: bool, **options: Any,
) -> None:  # fmt: skip
    """Predictions into a folder, with a bar, as far as they are not there."""
    compute.open()
    opening = rooms.predict_shards.OpenRun.of(open_folder(run), calibrated=calibrated, device=compute.device)
    files = rooms.predict_shards.find_files(images)
    with rooms.bars.bar(f"{run} on {len(files.names):,} images") as advance:
        done = rooms.predict_shards.predict_shards(
            opening, files, folder, name=run, engine=engine, watch=advance, **options
        )
    warn_of_decisions(rooms.predict_shards.opened(opening), rooms.gp.Passes(done.passes, done.engine))
    say(f"{folder} has predictions of {done.rows:,} images in {done.shard_count:,} files.")


def warn_of_decisions(classifier: Any, how: Any) -> None:
    """Decisions that are not used, or whose promises are for other numbers than those shown."""
    made, path = classifier.fitted_decisions, classifier.folder.path / "decisions.json"
    why = ""
    if made is not None and classifier.active_decisions is None:
        why = "is for other probabilities than these and was not used"
    elif made is not None and made.passes != how:
        why = f"is for {made.passes}; with {how} its promises need not hold"
    if why:
        note(f"{path} {why}. `calgp decide` makes a new one.")
