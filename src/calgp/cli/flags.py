"""Flags of `Run`'s options, made from its fields: the commands that train take them all, and `--set` and `--config`."""

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from calgp.errors import CalgpError, path_error
from calgp.json_values import Json
from calgp.options import Option, Text, find_option, options_of
from calgp.run import Run, assign

WIDEST = 14  # of what stands between an option and its help, for terminals of 80 columns
MORE = "More options"
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Any option, those of the method and of the network too: method.depth=3, backbone.n=2, lr=0.01.",
        rich_help_panel=MORE,
        show_default="none",
    ),
]
Config = Annotated[
    Path | None,
    typer.Option(help="A TOML file of options; flags go before it.", rich_help_panel=MORE, show_default="none"),
]


def takes_run(*, without: Iterable[str] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command a flag for each option of a run, `--set` and `--config`; it gets what they say as `options`.

    `without`: options that the command has another way to give.
    """
    chosen = {name: each for name, each in options_of(Run).items() if name not in without}
    flags = [_parameter(name, _flag(each)) for name, each in chosen.items()]
    flags += [_parameter("set_", Set), _parameter("config", Config)]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [each for each in inspect.signature(command).parameters.values() if each.name != "options"]
        arguments = [each for each in own if each.kind is not each.KEYWORD_ONLY]
        signature = inspect.Signature([*arguments, *flags, *(each for each in own if each.kind is each.KEYWORD_ONLY)])

        @functools.wraps(command)
        def wrapper(*, set_: list[str] | None, config: Path | None, **given: Any) -> None:
            texts = {name: given.pop(name) for name in chosen}
            flagged = {name: chosen[name].parse(str(text)) for name, text in texts.items() if text is not None}
            command(options=run_options(config, flagged, set_ or []), **given)

        wrapper.__signature__ = signature  # type: ignore[attr-defined]
        wrapper.__annotations__ = {each.name: each.annotation for each in signature.parameters.values()}
        return wrapper

    return decorate


def run_options(config: Path | None, flagged: Mapping[str, Json], settings: Iterable[str]) -> dict[str, Json]:
    """A run's options as plain data: the file's, then the flags', then --set's. Those of the run itself are checked."""
    options: dict[str, Json] = {**({} if config is None else _toml(config)), **flagged}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals or not name:
            raise CalgpError(f"Invalid --set {setting}: must be NAME=VALUE, such as method.depth=3.")
        if "." in name:
            options = assign(options, name, Text(text))
        else:
            option = find_option(Run, name, of="run")
            options[option.name] = option.parse(text)
    return options


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _flag(option: Option) -> Any:
    """What typer needs: the value stays a text, so that flags, --set and files are read and refused alike."""
    shown = option.default_text if option.default not in (None, ()) else f"({option.default_text})"
    if option.is_switch:  # --skip-unreadable; --calibration and --no-calibration
        both = option.default is not False
        help_text = escape(option.about.help + f" [default: {shown}]" * both)
        flags = f"{option.switch(True)}/{option.switch(False)}" if both else option.flags[0]
        return Annotated[
            bool | None,
            typer.Option(flags, metavar="", help=help_text, rich_help_panel=option.about.group, show_default=False),
        ]
    return Annotated[
        str | None,
        typer.Option(
            *option.flags,
            metavar=option.metavar if len(option.metavar) <= WIDEST else "<str>",  # the help has the words
            help=f"{escape(option.about.help)} [dim]{escape(f'[default: {shown}]')}[/]",
            rich_help_panel=option.about.group,
            show_default=False,
            autocompletion=_completion(option),
        ),
    ]


def _completion(option: Option) -> Callable[[str], list[str]]:
    """What the shell offers: the option's words, or the names in its table."""

    def complete(incomplete: str) -> list[str]:
        known: Iterable[str] = option.choices
        if option.name == "method":
            from calgp.methods import METHODS as known
        elif option.name == "backbone":
            from calgp.nets import BACKBONES as known
        elif option.name == "source":
            from calgp.data import SOURCES as known
        return [name for name in known if name.startswith(incomplete)]

    return complete


def _toml(path: Path) -> dict[str, Json]:
    if not path.exists():
        raise path_error("file", path)
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib  # pyright: ignore[reportMissingImports]
    from calgp.runs.reading import LARGEST_JSON, read_bytes

    try:
        return tomllib.loads(read_bytes(path, LARGEST_JSON).decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CalgpError(f"Invalid --config {path}: must be a TOML file ({str(error)[:300]}).") from None
