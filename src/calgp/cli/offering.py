"""What there is: methods, sources of images, a demonstration."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from calgp.cli.shared import (
    DataOption,
    JsonOption,
    ThreadsOption,
    open_fabric,
    out,
)
from calgp.errors import CalgpError


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


# by `calgp tune digits --methods cnn-gp-sorf-paper,cnn --schedule one-cycle --steps 540` (results/tuning/demo)
DEMO = {
    "cnn-gp-sorf-paper": {
        "learning_rate": 0.032, "method.keep_filters": 0.8, "method.keep": 0.9, "method.sigma": 0.15,
    },
    "cnn": {"learning_rate": 0.004},
}  # fmt: skip


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
    from calgp.runs.run import assign

    fabric = open_fabric("cpu", "32-true", threads)
    folders = []
    for method, tuned in DEMO.items():
        options = {"method": {"name": method}, "source": "digits", "steps": 540, "schedule": "one-cycle"}
        for name, value in tuned.items():
            assign(options, name, value)
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
