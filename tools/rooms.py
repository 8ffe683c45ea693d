"""Draw the rooms in CONTRIBUTING.md from the import contract in pyproject.toml: `python tools/rooms.py`."""

import re
import sys
from itertools import pairwise
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
DRAWN = re.compile(r"```mermaid\nflowchart.*?```\n", re.S)


def layers() -> list[list[str]]:
    """The rooms from the top (`cli`) to the bottom, those of one layer together."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    (rows,) = (each["layers"] for each in contracts if each["type"] == "layers")
    return [[room.strip().removeprefix("calgp.") for room in row.split("|")] for row in rows]


def graph() -> str:
    """The layers as a mermaid graph; an arrow says "may import", as every layer may all those to its left."""
    rows = layers()
    lines = [f"  {' & '.join(upper)} --> {' & '.join(lower)}" for upper, lower in pairwise(rows)]
    return "```mermaid\nflowchart RL\n" + "\n".join(lines) + "\n```\n"


def drawn(page: str) -> str:
    """The page with the graph of today in place of the one that it has."""
    return DRAWN.sub(lambda _: graph(), page, count=1)


if __name__ == "__main__":
    page = ROOT / "CONTRIBUTING.md"
    page.write_text(drawn(page.read_text(encoding="utf-8")), encoding="utf-8")
