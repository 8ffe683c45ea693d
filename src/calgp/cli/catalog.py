"""Commands on what there is: methods, backbones, sources, shard."""

import dataclasses
import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from rich.table import Table
from typer import Argument, Option

from calgp.cli import parameters, rooms
from calgp.cli.shared import out, say
from calgp.cli.terminal import styled
from calgp.errors import name_error
from calgp.options import options_of
from calgp.run import default_name

NameArgument = Annotated[
    str | None, Argument(metavar="NAME", help="Show the options of this one.", show_default="list all")
]


def methods(name: NameArgument = None, as_json: parameters.AsJson = False) -> None:
    """List the methods, one line each; or the options of one, for --set method.NAME=VALUE, with their defaults.

    Example: calgp methods && calgp methods gpdnn
    """
    chosen = default_name("method")
    lines = {
        key: method.in_one_line() + " (default)" * (key == chosen) for key, method in rooms.methods.METHODS.items()
    }
    why = f"The default is {chosen}: {rooms.methods.METHODS[chosen].default_reason}"
    _list_or_show("method", rooms.methods.METHODS, lines, name, as_json=as_json, note=why)


def backbones(name: NameArgument = None, as_json: parameters.AsJson = False) -> None:
    """List the networks, one line each; or the options of one, for --set backbone.NAME=VALUE, with their defaults.

    Example: calgp backbones && calgp backbones resnet
    """
    lines = {}
    for key, each in rooms.nets.BACKBONES.items():
        own = {name: option.show(getattr(each, name)) for name, option in options_of(type(each)).items()
               if getattr(each, name) != option.default}  # fmt: skip
        differing = "".join(f", {name}={text}" for name, text in own.items())
        lines[key] = f"{each.summary}{differing}{' (default)' * (key == default_name('backbone'))}"
    _list_or_show("backbone", rooms.nets.BACKBONES, lines, name, as_json=as_json)


def _list_or_show(
    what: str, known: Mapping[str, object], lines: Mapping[str, str], name: str | None, *, as_json: bool, note: str = ""
) -> None:
    """One line for each of the known, or all about the one that is named."""
    if name is not None and name not in known:
        raise name_error(f"There is no {what}", name, known)
    chosen = known if name is None else {name: known[name]}
    if as_json:
        return print(json.dumps({key: dataclasses.asdict(each) for key, each in chosen.items()}))  # type: ignore[call-overload]
    table = Table(box=None, show_header=name is not None, pad_edge=False)
    if name is None:
        for key, line in lines.items():
            table.add_row(styled((key, "bold")), line)
        more = f"Options of one: calgp {what}s NAME. When to use which: docs/methods.md."
        return out.print(table, "\n".join(filter(None, ["", note, more])), highlight=False)
    for heading in ("--set", "default", "what it is"):
        table.add_column(heading, no_wrap=heading == "--set")
    for key, each in options_of(type(known[name])).items():
        value = getattr(known[name], key)
        shown = each.default_text if value == each.default else each.show(value)
        choices = f" [{each.metavar}]" if each.choices else ""
        table.add_row(styled((f"{what}.{key}", "bold")), shown, each.about.help + choices)
    described = inspect.getdoc(type(known[name])) or ""
    out.print(styled((name, "bold"), f": {lines[name]}\n\n{described}\n"), table)


def sources(
    download: Annotated[str | None, Option(help="Download this set.", show_default="list the sets")] = None,
    data: parameters.Data = None,
    as_json: parameters.AsJson = False,
) -> None:
    """List the image sets, and which of them are here; or download one.

    Example: calgp sources --download mnist
    """
    if download is not None:
        with rooms.bars.bar(f"Downloading {download}") as advance:
            done = 0

            def progress(now: int, total: int) -> None:
                nonlocal done
                advance(now - done, total)
                done = now

            folder = rooms.data.download(download, data, progress=progress)
        return say(f"{download} is in {folder}.")
    rows = [
        {"name": s.name, "classes": s.classes, "channels": s.channels, "size": s.size, "parts": "/".join(s.splits),
         "here": s.is_available(data), "description": s.description}
        for s in rooms.data.SOURCES.values()
    ]  # fmt: skip
    if as_json:
        return print(json.dumps(rows))
    own = "folder:PATH, stream:PATH or shards:PATH for your own"
    table = Table(*rows[0], caption=f"Data directory: {rooms.data.data_directory(data)}; and {own}.")
    for row in rows:
        table.add_row(*(("yes" if v else "no") if isinstance(v, bool) else str(v) for v in row.values()))
    out.print(table)


def shard(
    folder: Annotated[
        Path, Argument(metavar="FOLDER", help="Images in FOLDER/class/…, or below FOLDER/train and FOLDER/test.")
    ],
    target: Annotated[Path, Option("--out", help="A new folder for train-000000.tar, test-000000.tar …")],
    images_per_shard: Annotated[int, Option(help="How many images a tar file holds.")] = 10_000,
) -> None:
    """Write a folder of images into tar shards, as WebDataset reads them, to train on with --source shards:DIR.

    The files go in as they are, shuffled once and always alike: the same folder makes the same bytes.

    Example: calgp shard photos --out shards && calgp train --source shards:shards --size 64
    """
    from calgp.data.shards import write_shards

    with rooms.bars.bar(f"Writing {target}") as advance:
        written = write_shards(folder, target, images_per_shard=images_per_shard, watch=advance)
    counts = " and ".join(f"{count:,} {split} images" for split, count in written.items())
    say(f"Wrote {counts}.\nNext: calgp train --source shards:{target}")
