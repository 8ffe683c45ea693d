"""Commands that carry a run from one place to another: pack, unpack, push, pull."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from calgp.cli import parameters, rooms
from calgp.cli.shared import open_folder, say


def pack(
    run: parameters.Run, file: Annotated[Path, Argument(metavar="FILE", help="The file to write, such as mnist.calgp.")]
) -> None:
    """Write a run folder as one file, to copy or to publish it; `calgp unpack` makes the folder again.

    The file is a plain tar with a checksum for each file of the run. The same run makes the same bytes.

    Example: calgp pack runs/mnist mnist.calgp
    """
    from calgp.runs.pack import pack as write

    manifest = write(open_folder(run), file)
    size = sum(each.size for each in manifest.files)
    say(f"Packed {len(manifest.files)} files of {run}, {size:,} bytes, into {file}.")
    say(f"Next: calgp unpack {file} NEW_FOLDER")


def unpack(
    file: Annotated[Path, Argument(metavar="FILE", help="A file that `calgp pack` has written.")],
    run: Annotated[Path, Argument(metavar="RUN", help="The run folder to make; it must not exist yet.")],
) -> None:
    """Make a run folder of a packed run, after checking every byte of it.

    A file that is damaged, or that holds anything but the plain files of a run, is refused, and nothing is written.

    Example: calgp unpack mnist.calgp runs/mnist
    """
    from calgp.runs.pack import unpack as read

    folder = read(file, run)
    card = folder.card()
    say(f"Unpacked {card.label}, trained on {card.run.source}, into {folder.path}.")
    say(f"Next: calgp evaluate {folder.path}")


RepositoryArgument = Annotated[
    str, Argument(metavar="OWNER/NAME", help="A model repository of the Hugging Face Hub, such as me/digits.")
]


def push(
    run: parameters.Run,
    repository: RepositoryArgument,
    private: Annotated[bool, Option("--private", help="Make a private repository; a public one is refused.")] = False,
    revision: Annotated[str | None, Option(help="The branch, which is made if need be.", show_default="main")] = None,
) -> None:
    """Publish a run on the Hugging Face Hub: the file of `calgp pack`, and a model card with its scores.

    All files of the run go along, with its predictions, and with the paths of its data that run.json names. Log in
    before with `hf auth login`, or set HF_TOKEN. Needs pip install 'calgp[hub]'.

    Example: calgp push runs/mnist me/mnist --private
    """
    done = rooms.hub.push(open_folder(run), repository, private=private, revision=revision)
    say(f"Pushed {run}, {done.size:,} bytes, as commit {done.commit[:8]} of {done.address}")
    say(f"Next: calgp pull {repository}" + (f" --revision {revision}" if revision else ""))


def pull(
    repository: RepositoryArgument,
    run: Annotated[
        Path | None, Option("--out", help="The run folder to make; it must not exist yet.", show_default="runs/NAME")
    ] = None,
    revision: Annotated[str | None, Option(help="A branch, a tag or a commit.", show_default="main")] = None,
) -> None:
    """Make a run folder of a run on the Hugging Face Hub, after checking every byte of it.

    Nothing of it is executed. The download stays in the Hub's cache. Needs pip install 'calgp[hub]'.

    Example: calgp pull me/mnist --out runs/mnist
    """
    folder = rooms.hub.pull(repository, run, revision=revision)
    card = folder.card()
    say(f"Pulled {card.label}, trained on {card.run.source}, into {folder.path}.")
    say(f"Next: calgp verify {folder.path}")
