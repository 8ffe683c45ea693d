"""Commands that search over options: sweep (a grid or draws, with seeds) and tune (equal budgets for methods)."""

import json
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from calgp.cli import parameters, rooms
from calgp.cli.flags import takes_run
from calgp.cli.shared import check_all_ran, out, say
from calgp.errors import CalgpError
from calgp.json_values import Json


@takes_run(without=["seed"])
def sweep(
    options: dict[str, Json],
    *,
    grid: Annotated[
        list[str] | None,
        Option(
            metavar="NAME=VALUES",
            help="An option of `calgp train` or --set with its values: method.keep=0.5,0.9; with --random also a "
            "range: lr=loguniform:1e-4:1e-2, or uniform, or integer.",
            show_default="none",
        ),
    ] = None,
    random: Annotated[
        int | None, Option(help="Draw this many settings instead of all combinations.", show_default="all combinations")
    ] = None,
    draw_seed: Annotated[
        int | None, Option(help="Seed of --random; more draws begin with the same ones.", show_default="0")
    ] = None,
    seeds: Annotated[str | None, Option(help="Seeds of each setting, such as 0,1,2.", show_default="0")] = None,
    folder: Annotated[Path, Option("--out", help="Where runs and tables go.")] = Path("sweeps/sweep"),
    samples: Annotated[
        int | None, Option("--samples", "-S", help="Samples for each prediction.", show_default="50")
    ] = None,
    evaluate: Annotated[
        bool, Option("--evaluate", help="Score the test images, too; nothing is chosen by them.")
    ] = False,
    part: Annotated[
        str | None,
        Option(metavar="INDEX/COUNT", help="Only these runs, 1/10 to 10/10: for job arrays.", show_default="all runs"),
    ] = None,
    dry: Annotated[bool, Option("--dry", help="Run nothing: list what would be run, and its cost.")] = False,
    workers: parameters.Workers,
    data: parameters.Data = None,
    threads: parameters.Threads = None,
    as_json: parameters.AsJson = False,
) -> None:
    """Train many settings with several seeds, and rank them by the hold-out.

    All combinations of --grid, or --random draws. Stop it at any time: the same command continues, and nothing is run
    twice. The ranking uses held-out training images, a tenth unless --holdout is given; test images are used only with
    --evaluate, and never for ranking. The tables are table.csv, table.json and report.html in --out. A --config file
    may have tables [grid] and [sweep].

    Example: calgp sweep --method cnn-gp-sorf --epochs 3 --grid method.keep=0.5,0.9 --grid lr=1e-3,3e-3 --seeds 0,1,2
    """
    numbers = seeds.split(",") if seeds else []
    if not all(each.strip().isdecimal() for each in numbers):
        raise CalgpError(f"Invalid --seeds {seeds}: must be whole numbers, such as 0,1,2.")
    wanted = rooms.sweep.described(
        options, grid or [], random=random, draw_seed=draw_seed, samples=samples, evaluate=evaluate or None,
        seeds=[int(each) for each in numbers] or None,
    )  # fmt: skip
    chosen = rooms.sweep.Part.parse(part) if part else None
    engine = workers.find()
    todo = rooms.sweep.missing_jobs(wanted, rooms.jobs.Paths(folder / "runs", data=data), chosen)
    if dry:
        return out.print(rooms.job_tables.planned_table(wanted, todo), rooms.job_tables.cost(todo, workers.jobs or 1))
    parameters.Compute(threads=threads).open()
    with rooms.bars.overall_bar() as watch:
        failures = rooms.sweep.run_sweep(wanted, folder, data=data, part=chosen, engine=engine, watch=watch)
    # the last part writes them
    if chosen is None or not rooms.sweep.missing_jobs(wanted, rooms.jobs.Paths(folder / "runs")):
        _show_sweep(wanted, folder, failures, as_json=as_json)
    check_all_ran(failures)


def _show_sweep(wanted: "rooms.sweep.Sweep", folder: Path, failures: dict[str, str], *, as_json: bool) -> None:
    """Tables and report of all that was found, into files and onto the terminal."""
    found = rooms.sweep.found_by(wanted, folder)
    command = shlex.join(["calgp", *sys.argv[1:]])
    written = rooms.sweep.write_sweep(wanted, found, folder, command=command, failures=failures)
    if as_json:
        return print(json.dumps(written))
    out.print(rooms.job_tables.sweep_table(found))
    say(f"Report: {folder / 'report.html'}")
    say(f"Best on the hold-out: {written['best']}" if written["best"] else "")


@takes_run(without=["source", "method", "steps", "learning_rate", "patience"])
def tune(
    source: Annotated[str, Argument(metavar="SOURCE", help="An image set (see `calgp sources`) or folder:PATH.")],
    options: dict[str, Json],
    *,
    methods: Annotated[
        str, Option(help="Methods to tune, each with the same budget (see `calgp methods`); all: every one.")
    ] = "cnn-gp-sorf,cnn-mcd,cnn-cal",
    pilots: Annotated[int, Option(help="Short trainings that each method begins with.")] = 8,
    steps: Annotated[int, Option(help="Optimiser steps of the last, longest pilot of each method.")] = 2000,
    finalists: Annotated[
        int, Option(help="Pilots of the last round; as many as --pilots: all are trained in full.")
    ] = 1,
    folder: Annotated[Path, Option("--out", help="Where logs, tables and pilots go.")] = Path("tuned"),
    samples: Annotated[int, Option("--samples", "-S", help="Samples for each prediction.")] = 20,
    workers: parameters.Workers,
    data: parameters.Data = None,
    threads: parameters.Threads = None,
    as_json: parameters.AsJson = False,
) -> None:
    """Find good options for methods on your images, with the same number of pilots and steps for each method.

    Successive halving: many short trainings (pilots), the best third again for three times as long, and so on. Pilots
    are compared by the MNLL of held-out training images, a tenth unless --holdout is given; test images are never
    loaded. Each method declares its search space: learning rate, keep probabilities, scale of the prior. --epochs is
    for the commands that train the winners. Stop it at any time: the same command continues.

    Example: calgp tune mnist --methods cnn-gp-sorf,cnn-mcd --train-size 10000 --schedule one-cycle --jobs 2
    """
    budget = rooms.halving.Budget(pilots, steps, samples=samples, finalists=finalists)
    budgeted = "steps" in options or "epochs" in options
    bases = base_runs(methods, {**options, "source": source} | ({} if budgeted else {"steps": steps}))
    engine = workers.find()
    first = next(iter(bases.values()))
    place = folder / rooms.folders.slug(f"{source} {first.backbone_label}")
    tasks = rooms.tune_methods.tasks_of(bases, budget, place, folder / "runs", data)
    parameters.Compute(threads=threads).open()
    with rooms.bars.overall_bar() as watch:
        failures = rooms.tune_methods.tune_methods(tasks, budget, engine=engine, watch=watch)
    _show_tuning({task.name: task.log for task in tasks if task.name not in failures}, budget, place, as_json, failures)
    if failures:
        reasons = " ".join(f"{name}: {failure}" for name, failure in failures.items())
        raise CalgpError(f"Not every method could be tuned; the same command tries again. {reasons}")


def _show_tuning(
    logs: Mapping[str, Path], budget: "rooms.halving.Budget", place: Path, as_json: bool, failures: Mapping[str, str]
) -> None:
    """The table of what the methods' logs tell, into a file and onto the terminal, and how to train the winners."""
    rows = rooms.tune_methods.rows_of_logs({name: rooms.tune.read_log(log) for name, log in logs.items()})
    plain = [asdict(row) for row in rows]
    if rows:
        rooms.tables.write_csv(place / "table.csv", plain)
    if as_json:
        return print(json.dumps({"budget": asdict(budget), "rows": plain, "failures": failures}))
    if rows:
        out.print(rooms.job_tables.tuning_table(rows))
    for row in rows:
        if row.edges:
            say(f"{row.method} at an edge of its space: {row.edges}.")
        if row.too_short:
            short = f"after {budget.rungs[0][1]} steps, so chance chose among its first pilots; give more --steps."
            say(f"{row.method} had learned next to nothing {short}")
    if rows:
        say(f"Logs: {place}\nTrain the winners, the best on the hold-out first:")
    for row in rows:
        say(row.command)


def base_runs(methods: str, options: Mapping[str, Json]) -> "dict[str, rooms.runs.Run]":
    """The run of each method that tuning begins with, by its name."""
    own = options.get("method", {})
    if not isinstance(own, Mapping):
        raise CalgpError("Invalid option method: must be named by --methods, such as cnn-gp-sorf,cnn-mcd.")
    names = list(rooms.methods.METHODS) if methods == "all" else [name.strip() for name in methods.split(",")]
    if len(set(names)) < len(names):
        raise CalgpError(f"Invalid --methods {methods}: name each method once.")
    bases = {name: rooms.runs.from_json({**options, "method": {**own, "name": name}}) for name in names}
    for name, run in bases.items():
        if options.get("holdout") == 0:
            raise CalgpError(f"Invalid holdout=0: {name} is judged by held-out images, such as --holdout 0.1.")
        if run.patience:
            raise CalgpError(
                f"Invalid patience={run.patience}: pilots do not stop early, so that all make the same steps."
            )
    return bases
