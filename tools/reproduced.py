"""Write docs/reproduced.md and its figures from the tables of `calgp reproduce all`.

usage: calgp reproduce all --scale laptop --pages && python tools/reproduced.py reproduced/laptop
"""

import json
import math
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from calgp.experiments import EXPERIMENTS
from calgp.experiments.page import NAMES

DOCS = Path(__file__).parent.parent / "docs"
MOST = 100  # rows of a table that is still read; longer ones are drawn only

HEAD = """# The paper's experiments, measured at laptop scale

Written by `tools/reproduced.py` from what is kept in `results/`: this page is not edited by hand. What laptop scale is,
and how to run it, is told in [Experiments](reproduce.md); what the numbers say, in [Results](results.md). A cell is the
mean over its seeds, ± half a 95 % interval (Student's t over seeds, or the bootstrap over test images, whichever is
wider), with the paper's number in brackets where it prints one. The paper trained on all images, for hours of a GPU;
budgets here are a fraction of that. A verdict of an experiment that was run in part is of that part.

"""


def main(tables: str) -> None:
    (DOCS / "figures").mkdir(exist_ok=True)
    found = {name: json.loads((Path(tables) / name / "table.json").read_text()) for name in EXPERIMENTS}
    parts = [HEAD, *_summary(found)]
    for name, table in found.items():
        parts += [f"\n## {name}: {EXPERIMENTS[name].title}\n\n{table['claim']}\n\n"]
        for picture in sorted((Path(tables) / name).glob("*.png"), key=lambda picture: len(picture.name)):
            shutil.copy(picture, DOCS / "figures" / picture.name)
            parts += [f"![{picture.stem}](figures/{picture.name})\n\n"]
        parts += [line for each in table["verdicts"] for line in _verdict(each)]
        parts += [f"{note}\n\n" for note in EXPERIMENTS[name].notes]
        parts += [*_rows(name, table["rows"])]
    (DOCS / "reproduced.md").write_text("".join(parts))


def _summary(found: dict[str, Any]) -> list[str]:
    """Every claim with its verdict, and how much of its experiment was run."""
    lines = [
        "| | runs made | claim | verdict | comparisons for / undecided / against |\n",
        f"| --- | ---: |{3 * ' --- |'}\n",
    ]
    for name, table in found.items():
        made = sum(len(row["seeds"]) for row in table["rows"])
        planned = sum(row["planned"] for row in table["rows"])
        for place, verdict in enumerate(table["verdicts"]):
            start = f"[{name}](#{_anchor(name)}) | {made} of {planned}" if place == 0 else " | "
            counts = _counts(Counter(part["state"] for part in verdict["comparisons"]))
            lines.append(f"| {start} | {verdict['claim']} | {verdict['state']} | {counts} |\n")
    return lines


def _anchor(name: str) -> str:
    kept = "".join(c for c in f"{name}: {EXPERIMENTS[name].title}".lower() if c.isalnum() or c in " -")
    return "-".join(kept.split())


def _verdict(verdict: dict[str, Any]) -> list[str]:
    """A claim, how its comparisons went, and where, if that is more than one place."""
    places = dict[tuple[str, str], Counter[str]]()
    for part in verdict["comparisons"]:
        places.setdefault((part["panel"], part["metric"]), Counter())[part["state"]] += 1
    panels, metrics = (list(dict.fromkeys(place[axis] for place in places)) for axis in (0, 1))
    lines = [f"**{verdict['state']}**: {verdict['claim']} ({verdict['told']})\n\n"]
    if len(panels) > 1:
        lines.append(f"| for / undecided / against | {' | '.join(NAMES[metric] for metric in metrics)} |\n")
        lines.append(f"| --- |{' ---: |' * len(metrics)}\n")
        for panel in panels:
            counts = [places.get((panel, metric), Counter()) for metric in metrics]
            lines.append(f"| {panel} | {' | '.join(map(_counts, counts))} |\n")
        lines.append("\n")
    return lines


def _counts(count: Counter[str]) -> str:
    return " / ".join(str(count[state]) for state in ("held", "undecided", "not held"))


def _rows(name: str, rows: list[dict[str, Any]]) -> list[str]:
    run = [row for row in rows if row["seeds"]]
    left = [row for row in rows if not row["seeds"]]
    if len(run) > MOST:
        return [f"{len(run)} cells were run: too many for a table here; `table.csv` has them.\n"]
    axis, metrics = EXPERIMENTS[name].axis, EXPERIMENTS[name].metrics
    heads = ["panel", *([axis] if rows and axis in rows[0] else []), "method", "seeds", *(NAMES[m] for m in metrics)]
    lines = [f"| {' | '.join(heads)} |\n", f"| {' | '.join(['---'] * len(heads))} |\n"] if run else []
    for row in run:
        x = [f"{row[axis]:,g}"] if axis in row else []
        cells = [row["panel"], *x, row["method"], str(len(row["seeds"])), *(_cell(row, m) for m in metrics)]
        lines.append(f"| {' | '.join(cells)} |\n")
    if left:
        missing = dict[str, list[str]]()
        for row in left:
            missing.setdefault(row["panel"] + (f", {row[axis]:,g}" if axis in row else ""), []).append(row["method"])
        lines.append("\nNot run:\n\n" + "".join(f"- {cell}: {'; '.join(who)}\n" for cell, who in missing.items()))
    return lines


def _cell(row: dict[str, Any], metric: str) -> str:
    value, half, published = row[metric], row[f"{metric}_half"], row[f"{metric}_published"]
    if value is None or isinstance(value, str):
        return "–"
    spread = "" if half is None or math.isnan(half) else f" ± {half:.4f}"
    return f"{value:.4f}{spread}" + ("" if published is None else f" [{published:g}]")


if __name__ == "__main__":
    main(*sys.argv[1:])
