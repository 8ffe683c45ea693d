"""What mkdocs asks while it builds the site: names of calgp in docs/paper.md become links to the API reference."""

import re
from importlib import import_module
from typing import Any

LINKED = ("paper.md", "glossary.md")
NAME = re.compile(r"`((?:gp|metrics|nets|methods|calibration|runs|data)(?:\.[A-Za-z_]\w*)+)`")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    return NAME.sub(_linked, markdown) if page.file.src_uri in LINKED else markdown


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
