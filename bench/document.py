"""The measured tables of results/notes/performance.md and the plots of docs/, from a run of the benchmarks."""

import re
from itertools import groupby
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter, LogLocator

COLOURS = {"SORF": "#1f6f8b", "dense Ω, fixed": "#c8553d"}


def document(record: dict[str, Any], page: Path, picture: Path) -> None:
    """Replace the text between the markers of `page`, and draw the plots into `picture`."""
    text = page.read_text()
    for name, content in {"table": markdown(record), "exponents": exponents(record)}.items():
        marker = re.compile(f"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.S)
        if not marker.search(text):
            raise SystemExit(f"{page} has no place for the {name}: <!-- {name} --> … <!-- /{name} --> is missing.")
        text = marker.sub(lambda match, content=content: match[1] + content + match[2], text)
    page.write_text(text)
    if record["curves"]:
        draw(record["curves"], picture)


def markdown(record: dict[str, Any]) -> str:
    machine = record["machine"]
    most = max(record["others"].values(), default=0.0)
    lines = [
        f"`{record['command']}`, {record['date']}, {record['seconds']} s; {machine['cores']} cores "
        f"({machine['processor']}, {machine['capability']}), {machine['threads']} threads, torch {machine['torch']}; "
        f"other processes took at most {most:.0%} of the processors.\n",
        "| case | ours | against | ratio | quartiles | aimed at | |",
        "| --- | --- | --- | ---: | --- | ---: | --- |",
    ]
    for question, rows in groupby(record["rows"], key=lambda row: row["question"]):
        lines.append(f"| **{question}** | | | | | | |")
        for row in rows:
            spread = "" if row["low"] == row["high"] else f"{row['low']:.2f} … {row['high']:.2f}"
            reach = "" if row["reach"] is None else f"≥ {row['reach']:.3g}"
            verdict = {None: "", True: "reached", False: "**not reached**"}[row["reached"]]
            note = "; ".join(part for part in (verdict, row["note"]) if part)
            ratio = f"{row['ratio']:.2f}"
            lines.append(f"| {row['what']} | {row['ours']} | {row['other']} | {ratio} | {spread} | {reach} | {note} |")
    return "\n".join(lines) + "\n"


def exponents(record: dict[str, Any]) -> str:
    lines = ["| as this grows | of | time | memory |", "| --- | --- | ---: | ---: |"]
    cells: dict[tuple[str, str], dict[str, float]] = {}
    for curve in record["curves"]:
        cells.setdefault((curve["question"], curve["name"]), {})[curve["what"]] = curve["exponent"]
    for (question, name), found in cells.items():
        values = [f"{found[what]:.2f}" if what in found else "" for what in ("time", "memory")]
        stored = f" (stored Ω: {found['storage of Ω']:.2f})" if "storage of Ω" in found else ""
        lines.append(f"| {question} | {name} | {values[0]} | {values[1]}{stored} |")
    return "\n".join(lines) + "\n"


def draw(curves: list[dict[str, Any]], path: Path) -> None:
    """Small multiples on logarithmic axes: a straight line is a power law, and its slope the exponent."""
    panels: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for curve in curves:
        panels.setdefault((curve["question"], curve["what"]), []).append(curve)
    order = sorted(panels, key=lambda key: (key[1] != "time", key[1]))
    columns = 4
    rows = -(-len(order) // columns)
    with plt.rc_context({"font.size": 8, "axes.spines.top": False, "axes.spines.right": False, "svg.fonttype": "none"}):
        figure, axes = plt.subplots(rows, columns, figsize=(11, 2.5 * rows), layout="constrained", squeeze=False)
        for axis, key in zip(axes.flat, order, strict=False):
            question, what = key
            for curve in panels[key]:
                label = f"{curve['name']}: {curve['exponent']:.2f}"
                axis.loglog(
                    curve["x"], curve["y"], "o-", ms=3, lw=1.2, color=COLOURS.get(curve["name"], "#1f6f8b"), label=label
                )
            ticks = sorted({x for curve in panels[key] for x in curve["x"]})
            axis.set_xticks(ticks, [f"{x:,.0f}" for x in ticks])
            axis.minorticks_off()
            axis.yaxis.set_major_locator(LogLocator(numticks=6))
            axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
            axis.set_xlabel(question)
            axis.set_ylabel(f"{what}, {panels[key][0]['unit']}")
            axis.legend(frameon=False, fontsize=7, loc="upper left", borderaxespad=0)
            axis.margins(y=0.3)
        for axis in list(axes.flat)[len(order) :]:
            axis.set_visible(False)
        figure.savefig(path)
        plt.close(figure)
