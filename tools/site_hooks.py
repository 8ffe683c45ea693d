"""What mkdocs asks while it builds the site: links from names to the API reference, and the help of all commands."""

import re
from importlib import import_module
from typing import Any

COMMANDS = "<!-- commands -->"  # docs/cli.md: here come the commands with their help
LINKED = ("paper.md", "glossary.md")
NAME = re.compile(r"`((?:gp|metrics|nets|methods|calibration|runs|data)(?:\.[A-Za-z_]\w*)+)`")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    if COMMANDS in markdown:
        return markdown.replace(COMMANDS, commands())
    return NAME.sub(_linked, markdown) if page.file.src_uri in LINKED else markdown


def commands() -> str:
    """The `--help` of every command as Markdown: a heading, the text, a table of arguments and options."""
    from typer.main import get_command

    from calgp.cli import app

    group: Any = get_command(app)
    return "\n\n".join(_command(name, command) for name, command in group.commands.items())


def _command(name: str, command: Any) -> str:
    rows = ["| | |", "| --- | --- |", *(_option(each) for each in command.params if not each.hidden)]
    text = re.sub(r"\[/?(?:dim|bold)?\]", "", command.help or "")
    return f"## `calgp {name}`\n\n{text}\n\n" + "\n".join(rows)


def _option(option: Any) -> str:
    is_argument = option.param_type_name == "argument"
    name = option.name.upper() if is_argument else ", ".join(option.opts + option.secondary_opts)
    text = " ".join((getattr(option, "help", None) or "").split()).replace("|", "\\|").replace("\\[", "[")
    text = re.sub(r"(?:\[dim\])?\[default: \(?(.*?)\)?\](?:\[/\])?$", r"Default: \1.", text)
    return f"| `{name}` | {text} |"


def _linked(match: re.Match[str]) -> str:
    place = home(match[1])
    return f"[`{match[1]}`][{place}]" if place else match[0]


def home(name: str) -> str | None:
    """Where a name of a page is explained: by its own place, or, of a method without a docstring, by its class.

    >>> home("gp.inference.predict"), home("gp.kernels.ArcCosine.expand"), home("gp.nothing")
    ('calgp.gp.inference.predict', 'calgp.gp.kernels.ArcCosine', None)
    """
    parts = ["calgp", *name.split(".")]
    for cut in range(len(parts), 0, -1):
        try:
            found: Any = import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        explained = None
        for part in parts[cut:]:
            found = getattr(found, part, None)
            if callable(found) and found.__doc__:
                explained = f"{found.__module__}.{found.__qualname__}"
        return explained if found is not None else None
    return None
