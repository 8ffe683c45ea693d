"""The command line: flags in, tables and files out. Each command hands over to a room at once."""

import sys
from typing import Annotated

import typer
from rich.markup import escape

from calgp._version import __version__
from calgp.cli.experimenting import reproduce, sweep
from calgp.cli.handing_over import export, report, serve, track
from calgp.cli.judging import calibrate, compare, decide, ensemble, evaluate, predict, verify
from calgp.cli.offering import demo, methods, shard, sources
from calgp.cli.shared import err, out, speaks
from calgp.cli.training import train
from calgp.cli.tune import tune
from calgp.errors import CalgpError, printable

__all__ = ["app", "err", "main", "out"]

app = typer.Typer(
    name="calgp",
    help="Image classifiers that know when they don't know: deep convolutional Gaussian processes, calibrated.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
COMMANDS = (  # in the order of `calgp --help`
    train, evaluate, predict, calibrate, decide, ensemble, verify, compare,
    report, export, track, serve, reproduce, sweep, tune, methods, sources, shard, demo,
)  # fmt: skip
for command in COMMANDS:
    app.command()(command)


def main() -> None:
    """Run a command; what a user can mend is told in one sentence."""
    try:
        app(standalone_mode=True)
    except CalgpError as error:
        if not (speaks() or error.alone):
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
