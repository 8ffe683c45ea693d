"""The command line: flags in, tables and files out. Each command hands over to a room at once."""

import errno
import inspect
import io
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.markup import escape

from calgp._version import __version__
from calgp.cli.catalog import backbones, methods, shard, sources
from calgp.cli.demo import demo
from calgp.cli.deploy import export, report, serve, track
from calgp.cli.embeddings import classify, embed, fit
from calgp.cli.evaluate import calibrate, compare, decide, ensemble, evaluate, verify
from calgp.cli.judge import judge
from calgp.cli.pack import pack, pull, push, unpack
from calgp.cli.parameters import with_groups
from calgp.cli.predict import predict
from calgp.cli.reproduce import reproduce
from calgp.cli.search import sweep, tune
from calgp.cli.shared import err, is_rank_zero, out, out_of_memory
from calgp.cli.train import train
from calgp.errors import CalgpError, short_repr

__all__ = ["app", "err", "main", "out"]

app = typer.Typer(
    name="calgp",
    help="Image classifiers that know when they don't know: deep convolutional Gaussian processes, calibrated.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
COMMANDS = {  # in the order of `calgp --help`
    "Start": (demo, train, evaluate, report, predict),
    "Trust": (calibrate, decide, ensemble, verify, judge),
    "Pretrained networks": (embed, fit, classify),
    "Deploy and share": (serve, export, pack, unpack, push, pull, track),
    "Experiments": (compare, sweep, tune, reproduce),
    "What there is": (methods, backbones, sources, shard),
}
DISK_ERRORS = (errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


def help_text(command: Callable[..., Any]) -> str:
    """A docstring as typer shows it: paragraphs fill the width of the terminal, and [brackets] are no styles."""
    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    return escape("\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs))


for panel, commands in COMMANDS.items():
    for command in commands:
        app.command(help=help_text(command), rich_help_panel=panel)(with_groups(command))


def main() -> None:
    """Run a command; an error that the user can mend is printed as one sentence."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that knows ASCII alone shows ? for the rest
    try:
        app(standalone_mode=True)
    except CalgpError as error:
        if is_rank_zero() or error.on_one_rank:
            err.say(str(error), problem=True)
        sys.exit(error.status)
    except (MemoryError, RuntimeError, ImportError, SystemError, OSError) as error:
        if (text := _machine_error(error)) is None:
            raise
        err.say(text, problem=True)
        sys.exit(1)
    except KeyboardInterrupt:
        err.print("Stopped.")
        sys.exit(130)


def _machine_error(error: Exception) -> str | None:
    """The message for an error of the machine: too little memory, a path or a disk that cannot be used."""
    if out_of_memory(error):
        return (
            "There is not enough memory for this. Use smaller images (--size), a smaller network or --batch-size, or "
            "--accumulate; what was written before is whole."
        )
    if isinstance(error, OSError) and error.errno in DISK_ERRORS and error.filename is not None:
        return f"{short_repr(error.filename)} cannot be used ({error.strerror}); give another path, or mend this one."
    return None


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
        _register_network(each)


def _register_network(text: str) -> None:
    from calgp.nets import BACKBONES
    from calgp.nets.user_code import import_function
    from calgp.nets.wrap import wrap

    name, equals, place = text.partition("=")
    path, colon, function = place.rpartition(":")
    if not (name and equals and path and colon and function):
        raise CalgpError(
            f"Invalid --network {text}: must be NAME=FILE:FUNCTION or NAME=MODULE:FUNCTION, such as mine=nets.py:make."
        )
    BACKBONES[name] = wrap(import_function(place, f"Invalid --network {text}"), name=name)
