"""The command `calgp tune`."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from calgp.cli.flags import takes_run
from calgp.cli.shared import (
    AddressOption,
    DataOption,
    EngineOption,
    GpusOption,
    JobsOption,
    JsonOption,
    ThreadsOption,
    open_fabric,
    out,
)
from calgp.errors import CalgpError
from calgp.json_values import Json

if TYPE_CHECKING:
    from rich.table import Table

    from calgp.runs import Run
    from calgp.search.halving import Budget
    from calgp.search.tune_methods import TunedRow


SourceArgument = Annotated[
    str, typer.Argument(metavar="SOURCE", help="An image set (see `calgp sources`) or folder:PATH.")
]
MethodsOption = Annotated[
    str, typer.Option(help="Methods to tune, each with the same budget (see `calgp methods`); all: every one.")
]
FinalistsOption = Annotated[
    int, typer.Option(help="Pilots of the last round; as many as --pilots: all are trained in full.")
]


@takes_run(without=["source", "method", "steps", "learning_rate", "patience"])
def tune(
    source: SourceArgument,
    options: dict[str, Json],
    *,
    methods: MethodsOption = "cnn-gp-sorf,cnn-mcd,cnn-cal",
    pilots: Annotated[int, typer.Option(help="Short trainings that each method begins with.")] = 8,
    steps: Annotated[int, typer.Option(help="Optimiser steps of the last, longest pilot of each method.")] = 2000,
    finalists: FinalistsOption = 1,
    folder: Annotated[Path, typer.Option("--out", help="Where logs, tables and pilots go.")] = Path("tuned"),
    samples: Annotated[int, typer.Option("--samples", "-S", help="Samples for each prediction.")] = 20,
    jobs: JobsOption = None,
    engine: EngineOption = "local",
    address: AddressOption = None,
    gpus: GpusOption = 0.0,
    data: DataOption = None,
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find good options for methods on your images, with the same number of pilots and steps for each method.

    Successive halving: many short trainings (pilots), the best third again for three times as long, and so on. Pilots
    are compared by the MNLL of held-out training images, a tenth unless --holdout is given; test images are never
    loaded. Each method declares its search space: learning rate, keep probabilities, scale of the prior. --epochs is
    for the commands that train the winners. Stop it at any time: the same command continues.

    Example: calgp tune mnist --methods cnn-gp-sorf,cnn-mcd --train-size 10000 --schedule one-cycle --jobs 2
    """
    from calgp.cli import bars
    from calgp.runs.folder import slug
    from calgp.search.engines import find_engine
    from calgp.search.halving import Budget
    from calgp.search.tune_methods import tasks_of, tune_methods

    budget = Budget(pilots, steps, samples=samples, finalists=finalists)
    budgeted = "steps" in options or "epochs" in options
    bases = base_runs(methods, {**options, "source": source} | ({} if budgeted else {"steps": steps}))
    workers = find_engine(engine, jobs=jobs, address=address, gpus=gpus)
    first = next(iter(bases.values()))
    place = folder / slug(f"{source} {first.backbone_label}")
    tasks = tasks_of(bases, budget, place, folder / "runs", data)
    open_fabric("auto", "32-true", threads)
    with bars.overall_bar() as watch:
        failures = tune_methods(tasks, budget, engine=workers, watch=watch)
    _write_found({task.name: task.log for task in tasks if task.name not in failures}, budget, place, as_json, failures)
    if failures:
        reasons = " ".join(f"{name}: {failure}" for name, failure in failures.items())
        raise CalgpError(f"Not every method could be tuned; the same command tries again. {reasons}")


def _write_found(
    logs: Mapping[str, Path], budget: "Budget", place: Path, as_json: bool, failures: Mapping[str, str]
) -> None:
    """The table of what the methods' logs tell, into a file and onto the terminal."""
    from calgp.cli import tables
    from calgp.search.tune import read_log
    from calgp.search.tune_methods import rows_of_logs

    rows = rows_of_logs({name: read_log(log) for name, log in logs.items()})
    plain = [asdict(row) for row in rows]
    if rows:
        tables.write_csv(place / "table.csv", plain)
    if as_json:
        print(json.dumps({"budget": asdict(budget), "rows": plain, "failures": failures}))
    elif rows:
        _print_found(rows, budget, place)


def _print_found(rows: "list[TunedRow]", budget: "Budget", place: Path) -> None:
    """The table, what to be careful about, and the commands that train the winners."""
    out.print(tuning_table(rows))
    for row in rows:
        if row.edges:
            out.print(f"{row.method} at an edge of its space: {row.edges}.", soft_wrap=True, highlight=False)
        if row.too_short:
            out.print(
                f"{row.method} had learned next to nothing after {budget.rungs[0][1]} steps, so chance chose among "
                "its first pilots; give more --steps.", soft_wrap=True, highlight=False,
            )  # fmt: skip
    out.print(f"Logs: {place}", soft_wrap=True)
    out.print("Train the winners, the best on the hold-out first:")
    for row in rows:
        out.print(row.command, soft_wrap=True, highlight=False)


def base_runs(methods: str, options: Mapping[str, Json]) -> "dict[str, Run]":
    """The run of each method that tuning begins with, by its name."""
    from calgp.methods import METHODS
    from calgp.runs import from_json

    own = options.get("method", {})
    if not isinstance(own, Mapping):
        raise CalgpError("Invalid option method: must be named by --methods, such as cnn-gp-sorf,cnn-mcd.")
    names = list(METHODS) if methods == "all" else [name.strip() for name in methods.split(",")]
    if len(set(names)) < len(names):
        raise CalgpError(f"Invalid --methods {methods}: name each method once.")
    bases = {name: from_json({**options, "method": {**own, "name": name}}) for name in names}
    for name, run in bases.items():
        if options.get("holdout") == 0:
            raise CalgpError(f"Invalid holdout=0: {name} is judged by held-out images, such as --holdout 0.1.")
        if run.patience:
            raise CalgpError(
                f"Invalid patience={run.patience}: pilots do not stop early, so that all make the same steps."
            )
    return bases


def tuning_table(rows: "Iterable[TunedRow]") -> "Table":
    """One line a method, the lowest hold-out MNLL first."""
    from rich.table import Column, Table

    table = Table("method", "pilots", "steps", Column("best options", no_wrap=True), "hold-out\nMNLL",
                  "default\n→ tuned", show_lines=True)  # fmt: skip
    for row in rows:
        failed = f"\n{row.failed} failed" if row.failed else ""
        options = row.options.replace("method.", "").replace(" ", "\n")
        compared = f"{row.default_mnll:.4f}\n→ {row.tuned_mnll:.4f}\n{row.compared_steps:,} steps"
        table.add_row(row.method, f"{row.pilots}{failed}", f"{row.steps:,}", options, f"{row.mnll:.4f}", compared)
    return table
