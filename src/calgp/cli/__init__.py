"""The command line: flags in, tables and files out. Each command hands over to a room at once."""

import sys
from typing import Annotated

import typer
from rich.markup import escape

from calgp._version import __version__
from calgp.cli.catalog import backbones, methods, shard, sources
from calgp.cli.demo import demo
from calgp.cli.deploy import export, report, serve, track
from calgp.cli.evaluate import calibrate, compare, decide, ensemble, evaluate, predict, verify
from calgp.cli.reproduce import reproduce
from calgp.cli.shared import err, is_rank_zero, out
from calgp.cli.sweep import sweep
from calgp.cli.train import train
from calgp.cli.tune import tune
from calgp.errors import CalgpError, printable

__all__ = ["app", "err", "main", "out"]

app = typer.Typer(
    name="calgp",
    help="Image classifiers that know when they don't know: deep convolutional Gaussian processes, calibrated.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
COMMANDS = (  # in the order of `calgp --help`
    train, evaluate, predict, calibrate, decide, ensemble, verify, compare,
    report, export, track, serve, reproduce, sweep, tune, methods, backbones, sources, shard, demo,
)  # fmt: skip
for command in COMMANDS:
    app.command()(command)


def main() -> None:
    """Run a command; an error that the user can mend is printed as one sentence."""
    try:
        app(standalone_mode=True)
    except CalgpError as error:
        if not (is_rank_zero() or error.on_one_rank):
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


def _know_network(text: str) -> None:
    """The one place where code that a user names is imported; a run folder names no code."""
    import pkgutil
    import runpy

    from calgp.nets import BACKBONES
    from calgp.nets.wrap import wrap

    name, equals, place = text.partition("=")
    path, colon, function = place.rpartition(":")
    if not (name and equals and path and colon and function):
        raise CalgpError(
            f"Invalid --network {text}: must be NAME=FILE:FUNCTION or NAME=MODULE:FUNCTION, such as mine=nets.py:make."
        )
    try:
        make = runpy.run_path(path)[function] if path.endswith(".py") else pkgutil.resolve_name(place)
    except (OSError, ImportError, AttributeError, KeyError, ValueError) as error:
        raise CalgpError(f"Invalid --network {text}: must name a function that can be imported ({error!r}).") from None
    BACKBONES[name] = wrap(make, name=name)
