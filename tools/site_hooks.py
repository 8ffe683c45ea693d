"""What mkdocs asks while it builds the site: notebooks, links to the API reference, the help of all commands."""

import base64
import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

COMMANDS = "<!-- commands -->"  # docs/cli.md: here come the commands with their help
LINKED = ("paper.md", "glossary.md")
EXAMPLES = Path(__file__).parents[1] / "examples"
NAME = re.compile(r"`((?:gp|metrics|nets|methods|calibration|runs|data)(?:\.[A-Za-z_]\w*)+)`")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    if COMMANDS in markdown:
        return markdown.replace(COMMANDS, commands())
    return NAME.sub(_linked, markdown) if page.file.src_uri in LINKED else markdown


def on_files(files: Any, *, config: Any) -> Any:
    """Add a page for each notebook of examples/, with the outputs that are stored in it."""
    from mkdocs.structure.files import File

    for path in sorted(EXAMPLES.glob("*.ipynb")):
        text, images = notebook_page(path)
        files.append(File.generated(config, f"notebooks/{path.stem.replace('_', '-')}.md", content=text))
        for name, content in images.items():
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    return files


def notebook_page(path: Path) -> tuple[str, dict[str, bytes]]:
    """A notebook as Markdown, and its images by file name.

    >>> text, images = notebook_page(EXAMPLES / "embeddings.ipynb")
    >>> text.splitlines()[0], list(images)
    ('# Embeddings', ['embeddings-1.png'])
    """
    parts: list[str] = []
    images: dict[str, bytes] = {}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            data = output.get("data", {"text/plain": output.get("text", [])})
            if "image/png" in data:
                name = f"{path.stem.replace('_', '-')}-{len(images) + 1}.png"
                images[name] = base64.b64decode("".join(data["image/png"]))
                parts.append(f"![{cell['metadata']['alt']}]({name})")
            else:
                parts.append(f"```text\n{''.join(data['text/plain']).rstrip()}\n```")
    parts.insert(1, f"*From [`examples/{path.name}`](../notebooks.md): a notebook, with the output of a real run.*")
    return "\n\n".join(parts) + "\n", images


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
