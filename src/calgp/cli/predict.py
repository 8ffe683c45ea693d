"""The command predict: a few images onto the terminal, or very many into a folder."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from calgp.cli.shared import (
    AddressOption,
    DeviceOption,
    DevicesOption,
    EscapeOption,
    JsonOption,
    PassesOption,
    PredictionEngineOption,
    RunArgument,
    ShardGpusOption,
    ShardJobsOption,
    ThreadsOption,
    UncalibratedOption,
    check_sampling,
    err,
    is_rank_zero,
    open_fabric,
    open_folder,
    out,
)
from calgp.errors import CalgpError, path_error

if TYPE_CHECKING:
    from calgp.runs import Prediction
    from calgp.search.engines import Engine

MANY = "Many images"
ImagesArgument = Annotated[
    list[Path],
    typer.Argument(metavar="IMAGE...", help="Image files, or folders of them; with --out also tar files of images."),
]
CsvOption = Annotated[Path | None, typer.Option(help="Write everything to this CSV file, too.", show_default="none")]
OutOption = Annotated[
    Path | None,
    typer.Option(
        "--out",
        help="Write .npz files into this folder instead; the same command again makes those that are missing.",
        rich_help_panel=MANY,
        show_default="none",
    ),
]
RowsOption = Annotated[int, typer.Option(help="Images in each file of --out.", rich_help_panel=MANY)]
SkipOption = Annotated[
    bool, typer.Option("--skip-unreadable", help="Leave damaged images out of --out.", rich_help_panel=MANY)
]
OnOption = Annotated[
    str, typer.Option(help="Where --out is made: local, or ray (pip install calgp\\[ray]).", rich_help_panel=MANY)
]


def predict(
    run: RunArgument,
    images: ImagesArgument,
    csv: CsvOption = None,
    escape_csv: EscapeOption = True,
    uncalibrated: UncalibratedOption = False,
    passes: PassesOption = None,
    engine: PredictionEngineOption = None,
    seed: Annotated[int, typer.Option(help="Seed of the masks.")] = 0,
    device: DeviceOption = "auto",
    devices: DevicesOption = 1,
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
    folder: OutOption = None,
    rows_per_shard: RowsOption = 1000,
    skip_unreadable: SkipOption = False,
    on: OnOption = "local",
    jobs: ShardJobsOption = None,
    address: AddressOption = None,
    gpus: ShardGpusOption = 0.0,
) -> None:
    """Classify images, with probabilities and uncertainty.

    Probabilities and entropy of a calibrated run are calibrated. Mutual information and the ± of a probability are
    those before calibration. If the run has decisions (see `calgp decide`), the answer says whether it abstains, and
    which classes are in the prediction set.

    With --out they go into a folder, a file for every 1,000 images, in several processes (--jobs) or on a Ray cluster
    (--on ray). A process that dies, or Ctrl-C, loses at most one file each.

    Example: calgp predict shipped photo.png scans/ --csv out.csv
    """
    from calgp import runs
    from calgp.search.engines import find_engine

    check_sampling(passes, seed)
    workers = find_engine(on, jobs=jobs, address=address, gpus=gpus, flag="--on")
    few, many = csv is not None or as_json or devices > 1, skip_unreadable or jobs is not None or on != "local"
    _check_flags(images, folder, few=few, many=many)
    if folder is not None:
        return _predict_shards(
            run, images, folder, workers, calibrated=not uncalibrated, device=device, threads=threads, passes=passes,
            prediction=engine, seed=seed, rows_per_shard=rows_per_shard, skip_unreadable=skip_unreadable,
        )  # fmt: skip
    fabric = open_fabric(device, "32-true", threads, devices)
    classifier = runs.Classifier.load(open_folder(run), fabric=fabric, calibrated=not uncalibrated)
    found = classifier.predict(images, passes=passes, engine=engine, seed=seed)
    if is_rank_zero():
        warn_of_decisions(classifier, found.passes)
        _show(found, csv, escape=escape_csv, as_json=as_json)


def _check_flags(images: list[Path], folder: Path | None, *, few: bool, many: bool) -> None:
    """Refuse flags for `few` images with a folder, those for `many` without; and then images that are not there."""
    if folder is not None and few:
        raise CalgpError("--csv, --json and --devices do not go with --out, which makes .npz files; leave them out.")
    if folder is None and many:
        raise CalgpError("--skip-unreadable, --jobs and --on are for many images; name a folder for them with --out.")
    if folder is None and (missing := [path for path in images if not path.exists()]):
        raise path_error("image", missing[0])


def _show(found: "Prediction", csv: Path | None, *, escape: bool, as_json: bool) -> None:
    from calgp.cli import tables

    rows = tables.prediction_rows(found)
    if csv is not None:
        tables.write_csv(csv, [row.flat() for row in rows], escape=escape)
    if as_json:
        return print(json.dumps([row.plain() for row in rows]))
    out.print(tables.prediction_table(rows))


def _predict_shards(
    run: str, images: list[Path], folder: Path, engine: "Engine", *, calibrated: bool, device: str,
    threads: int | None, **options: Any,
) -> None:  # fmt: skip
    """Predictions into a folder, with a bar, as far as they are not there."""
    from calgp.cli import bars
    from calgp.gp import Passes
    from calgp.search.predict_shards import OpenRun, find_files, opened, predict_shards

    open_fabric(device, "32-true", threads)
    opening = OpenRun.of(open_folder(run), calibrated=calibrated, device=device)
    files = find_files(images)
    with bars.bar(f"{run} on {len(files.names):,} images") as advance:
        done = predict_shards(opening, files, folder, name=run, engine=engine, watch=advance, **options)
    warn_of_decisions(opened(opening), Passes(done.passes, done.engine))
    out.print(
        f"{folder} has predictions of {done.rows:,} images in {done.shard_count:,} files.",
        soft_wrap=True, highlight=False,
    )  # fmt: skip


def warn_of_decisions(classifier: Any, how: Any) -> None:
    """Decisions that are not used, or whose promises are for other numbers than those shown."""
    made = classifier.fitted_decisions
    if made is None:
        return
    why = ""
    if classifier.active_decisions is None:
        why = "is for other probabilities than these and was not used"
    elif made.passes != how:
        why = f"is for {made.passes}; with {how} its promises need not hold"
    if why:
        path = classifier.folder.path / "decisions.json"
        err.print(f"Note: {path} {why}. `calgp decide` makes a new one.", soft_wrap=True)
