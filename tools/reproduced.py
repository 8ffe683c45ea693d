"""Write results/reproduced.md and its figures from the tables of `calgp reproduce all`; of desk, reproduced-desk.md.

usage: calgp reproduce all --scale laptop --pages --results results && python tools/reproduced.py reproduced/laptop
"""

import json
import math
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from calgp.paper import EXPERIMENTS
from calgp.paper.tables import NAMES, PUBLISHED
from calgp.paper.verdicts import SAYS, STATES

RESULTS = Path(__file__).parent.parent / "results"
MOST = 100  # rows of a table that is still read; longer ones are drawn only
DESCRIBED = ("network", "training images", "steps")
COUNTS = "for / undecided / one seed / against"

HEAD = """# The paper's experiments, measured at {scale} scale

Written by `tools/reproduced.py` from what is kept in `results/`: this page is not edited by hand.
[Experiments](../docs/reproduce.md) says what {scale} scale is, how to run it and how claims are judged.
[Claims](../docs/claims.md) is the summary. [Notes](notes/results.md) discuss the numbers.

A cell is the mean over its seeds ± half a 95 % interval over seeds and test images (of one seed: test images alone).
The paper's number stands in brackets: `[paper 0.005]` where network and training images are the paper's, else
`[paper, other scale 0.351]`. Training images include a hold-out. A verdict of an experiment that was run in part is of
that part.

"""


def main(tables: str) -> None:
    pages = {name: Path(tables) / name / "table.json" for name in EXPERIMENTS}
    found = {name: json.loads(page.read_text()) for name, page in pages.items() if page.exists()}
    scale = next(iter(found.values()))["scale"]
    end = "" if scale == "laptop" else f"-{scale}"
    figures = RESULTS / f"figures{end}"
    figures.mkdir(exist_ok=True)
    parts = [HEAD.format(scale=scale), *_summary(found)]
    for name, table in found.items():
        parts += [f"\n## {name}: {EXPERIMENTS[name].title}\n\n{table['claim']}\n\n"]
        drawn = (Path(tables) / name).glob("*.png") if any(row["seeds"] for row in table["rows"]) else ()
        for picture in sorted(drawn, key=lambda picture: len(picture.name)):
            shutil.copy(picture, figures / picture.name)
            parts += [f"![{picture.stem}]({figures.name}/{picture.name})\n\n"]
        parts += [line for each in table["verdicts"] for line in _verdict(each)]
        parts += [f"{note}\n\n" for note in EXPERIMENTS[name].notes]
        parts += [*_rows(name, table["rows"])]
    (RESULTS / f"reproduced{end}.md").write_text("".join(parts))


def _summary(found: dict[str, Any]) -> list[str]:
    """Every claim with its verdict, and how much of its experiment was run."""
    lines = [
        f"| | runs made | claim | verdict | comparisons {COUNTS} |\n",
        f"| --- | ---: |{3 * ' --- |'}\n",
    ]
    for name, table in found.items():
        made = sum(len(row["seeds"]) for row in table["rows"])
        planned = sum(row["planned"] for row in table["rows"])
        for place, verdict in enumerate(table["verdicts"]):
            start = f"[{name}](#{_anchor(name)}) | {made} of {planned}" if place == 0 else " | "
            counts = _counts(Counter(part["state"] for part in verdict["comparisons"]))
            lines.append(f"| {start} | {verdict['claim']} | {_says(verdict)} | {counts} |\n")
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
    lines = [f"**{_says(verdict)}**: {verdict['claim']} ({verdict['summary']})\n\n"]
    if len(panels) > 1:
        lines.append(f"| {COUNTS} | {' | '.join(NAMES[metric] for metric in metrics)} |\n")
        lines.append(f"| --- |{' ---: |' * len(metrics)}\n")
        for panel in panels:
            counts = [places.get((panel, metric), Counter()) for metric in metrics]
            lines.append(f"| {panel} | {' | '.join(map(_counts, counts))} |\n")
        lines.append("\n")
    return lines


def _says(verdict: dict[str, Any]) -> str:
    return SAYS.get(verdict["state"], verdict["state"])


def _counts(count: Counter[str]) -> str:
    return " / ".join(str(count[state]) for state in STATES)


def _rows(name: str, rows: list[dict[str, Any]]) -> list[str]:
    run = [row for row in rows if row["seeds"]]
    left = [row for row in rows if not row["seeds"]]
    if len(run) > MOST:
        return [f"{len(run)} cells were run: too many for a table here; `table.csv` has them.\n"]
    axis, metrics = EXPERIMENTS[name].axis, EXPERIMENTS[name].metrics
    own_axis = [axis] if axis not in ("", "training images") else []
    heads = ["panel", *own_axis, "method", *DESCRIBED, "seeds", *(NAMES[m] for m in metrics)]
    lines = [f"| {' | '.join(heads)} |\n", f"| {' | '.join(['---'] * len(heads))} |\n"] if run else []
    for row in run:
        names = [row["panel"], *(f"{row[name]:,g}" for name in own_axis), row["method"]]
        cells = [*names, *(_described(row, name) for name in DESCRIBED), str(len(row["seeds"]))]
        cells += [_cell(row, metric) for metric in metrics]
        lines.append(f"| {' | '.join(cells)} |\n")
    if left:
        missing = dict[str, list[str]]()
        for row in left:
            missing.setdefault(row["panel"] + (f", {row[axis]:,g}" if axis in row else ""), []).append(row["method"])
        lines.append("\nNot run:\n\n" + "".join(f"- {cell}: {'; '.join(who)}\n" for cell, who in missing.items()))
    return lines


def _described(row: dict[str, Any], name: str) -> str:
    return row[name] if isinstance(row[name], str) else f"{row[name]:,g}"


def _cell(row: dict[str, Any], metric: str) -> str:
    value, half = row[metric], row[f"{metric}_half"]
    if value is None or isinstance(value, str):
        return "–"
    spread = "" if half is None or math.isnan(half) else f" ± {half:.4f}"
    published = [f" [{name} {number:g}]" for name in PUBLISHED if (number := row[f"{metric}, {name}"]) is not None]
    return f"{value:.4f}{spread}" + "".join(published)


if __name__ == "__main__":
    main(*sys.argv[1:])
