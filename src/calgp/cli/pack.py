"""Commands that carry a run from one place to another: pack, unpack."""

from pathlib import Path
from typing import Annotated

import typer

from calgp.cli.shared import RunArgument, open_folder, out


def pack(
    run: RunArgument,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write, such as mnist.calgp.")],
) -> None:
    """Write a run folder as one file, to copy or to publish it; `calgp unpack` makes the folder again.

    The file is a plain tar with a checksum for each file of the run. The same run makes the same bytes.

    Example: calgp pack runs/mnist mnist.calgp
    """
    from calgp.runs.pack import pack as write

    manifest = write(open_folder(run), file)
    size = sum(each.size for each in manifest.files)
    out.print(f"Packed {len(manifest.files)} files of {run}, {size:,} bytes, into {file}.", soft_wrap=True)
    out.print(f"Next: calgp unpack {file} NEW_FOLDER", soft_wrap=True)


def unpack(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file that `calgp pack` has written.")],
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run folder to make; it must not exist yet.")],
) -> None:
    """Make a run folder of a packed run, after checking every byte of it.

    A file that is damaged, or that holds anything but the plain files of a run, is refused, and nothing is written.

    Example: calgp unpack mnist.calgp runs/mnist
    """
    from calgp.runs.pack import unpack as read

    folder = read(file, run)
    card = folder.card()
    out.print(f"Unpacked {card.label}, trained on {card.run.source}, into {folder.path}.", soft_wrap=True)
    out.print(f"Next: calgp evaluate {folder.path}", soft_wrap=True)
