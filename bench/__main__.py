"""Run the benchmarks, print a table, and keep it: `python -m bench`, about six minutes on two quiet cores."""

import argparse
import dataclasses
import importlib
import json
import os
import sys
import time
from datetime import datetime, timezone
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.measure import Curve, Machine, Row, describe
from calgp.runs import tune_process

QUESTIONS = ("transform", "masks", "step", "prediction", "metrics", "scaling")
LOADED = 0.1  # a larger share of the processors in other hands spoils the numbers


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("questions", nargs="*", metavar="question", help=f"of {', '.join(QUESTIONS)}; all by default")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller cases, to see that it works")
    parser.add_argument("--out", type=Path, default=Path("results/bench"), help="where bench.json and the plots go")
    parser.add_argument("--docs", action="store_true", help="also write results/notes/performance.md and the plots")
    options = parser.parse_args()
    unknown = set(options.questions) - set(QUESTIONS)
    if unknown:
        parser.error(f"there is no question {', '.join(sorted(unknown))}; there are {', '.join(QUESTIONS)}")
    console = Console() if sys.stdout.isatty() else Console(width=150)
    tune_process()  # for all contenders alike, as `calgp` does
    load = os.getloadavg()[0]
    if load > LOADED * (os.cpu_count() or 1):
        console.print(f"[yellow]The load is {load:.1f} before anything has begun: the machine is not quiet.[/]")
    rows: list[Row] = []
    curves: list[Curve] = []
    shares: dict[str, float] = {}
    start = time.perf_counter()
    for question in options.questions or QUESTIONS:
        console.print(f"[dim]{time.perf_counter() - start:4.0f} s  {question} …[/]")
        before = Machine.now()
        found = importlib.import_module(f"bench.{question}").run(options.quick)
        shares[question] = before.others(Machine.now())
        rows += [item for item in found if isinstance(item, Row)]
        curves += [item for item in found if isinstance(item, Curve)]
    record = {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "command": "python -m bench" + " --quick" * options.quick + " --docs" * options.docs,
        "seconds": round(time.perf_counter() - start),
        "machine": describe(),
        "others": {question: round(share, 3) for question, share in shares.items()},
        "rows": [dataclasses.asdict(row) | {"reached": row.reached} for row in rows],
        "curves": [dataclasses.asdict(curve) for curve in curves],
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "bench.json").write_text(json.dumps(record, indent=1) + "\n")
    if rows:
        console.print(table(rows))
    if curves:
        console.print(exponents(curves))
    for question, share in shares.items():
        if share > LOADED:
            console.print(f"[yellow]Others used {share:.0%} of the processors during {question}: run it again.[/]")
    if options.docs:
        from bench.document import document

        document(record, Path("results/notes/performance.md"), Path("docs/performance.svg"))
        console.print("Wrote results/notes/performance.md and docs/performance.svg.")
    console.print(f"{record['seconds']} s. The numbers are in {options.out / 'bench.json'}.")
    return 0


def table(rows: list[Row]) -> Table:
    shown = Table(title="How many times as fast (median over rounds, quartiles)", box=None, title_justify="left")
    shown.add_column("")
    shown.add_column("against")
    shown.add_column("ratio", justify="right", no_wrap=True)
    shown.add_column("quartiles", no_wrap=True)
    shown.add_column("aimed at", justify="right", no_wrap=True)
    for question, group in groupby(rows, key=lambda row: row.question):
        shown.add_row(f"[bold]{question}[/]")
        for row in group:
            mark = {None: "", True: "[green]", False: "[red]"}[row.reached]
            reach = "" if row.reach is None else f"≥ {row.reach:.3g}"
            spread = "" if row.low == row.high else f"{row.low:.3g} … {row.high:.3g}"
            ours = "" if row.ours.startswith("calgp") else f"{row.ours}, "
            shown.add_row(f"  {ours}{row.what}", row.other, f"{mark}{row.ratio:.3g}", spread, reach)
    return shown


def exponents(curves: list[Curve]) -> Table:
    shown = Table(title="How cost grows: y ~ xᵖ over the larger half of the points", box=None, title_justify="left")
    for name in ("as this grows", "of", "what", "p"):
        shown.add_column(name)
    for curve in curves:
        shown.add_row(curve.question, curve.name, curve.what, f"{curve.exponent:.2f}")
    return shown


if __name__ == "__main__":
    sys.exit(main())
