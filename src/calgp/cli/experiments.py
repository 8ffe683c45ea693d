"""Commands that make many runs: reproduce and sweep."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

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


def reproduce(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="An experiment, such as fig2, or `all`.", show_default="list them"),
    ] = None,
    listed: Annotated[bool, typer.Option("--list", help="List the experiments and what they claim.")] = False,
    scale: Annotated[
        str, typer.Option(help="smoke (seconds), laptop (hours), desk (days) or paper (a GPU).")
    ] = "smoke",
    folder: Annotated[Path, typer.Option("--out", help="Where runs and pages go.")] = Path("reproduced"),
    jobs: JobsOption = None,
    engine: EngineOption = "local",
    address: AddressOption = None,
    gpus: GpusOption = 0.0,
    faithful: Annotated[bool, typer.Option(help="As the authors' code, where it differs from the paper.")] = False,
    pages: Annotated[bool, typer.Option("--pages", help="Run nothing: pages of what is in --results.")] = False,
    results: Annotated[
        list[Path] | None,
        typer.Option(help="Where small results of finished runs lie.", show_default="results and OUT/results"),
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option(help="Copy the small results of each finished run here.", show_default="OUT/results"),
    ] = None,
    data: DataOption = None,
    threads: ThreadsOption = None,
) -> None:
    """Rerun the paper's figures and tables: run what is missing, judge its claims, write a page for each.

    Stop it whenever you like: the same command goes on where it was, and nothing is run twice. --engine ray makes the
    runs on a Ray cluster whose machines share --out and --data (docs/scaling.md).

    Example: calgp reproduce fig2 --scale laptop --jobs 2 --data images
    """
    import shlex

    from calgp import experiments
    from calgp.cli import tables
    from calgp.runs.engines import find_engine

    if listed or name is None:
        return out.print(tables.experiment_table(experiments.EXPERIMENTS.values()))
    workers = find_engine(engine, jobs=jobs, address=address, gpus=gpus)
    chosen = experiments.chosen(name)
    size = experiments.find_scale(scale)
    kept = folder / "results" if keep is None else keep
    places = tuple(results) if results else (Path("results"), folder / "results")
    where = experiments.Paths(folder / "runs", places, None if pages else kept, data)
    failures: dict[str, str] = {}
    if size.tuning:
        if faithful:
            raise CalgpError(f"Invalid --scale {scale}: it has tuned options, and --faithful the authors'.")
        names = [each.name for each in chosen]
        plan = experiments.make_plan(names, size, where.small)
        out.print(tables.queue_cost(*plan.cost(where), experiments.stale(plan, kept), jobs or 1))
        if not pages:
            with tables.overall_bar() as watch:
                failures = experiments.run_queue(names, scale, where, workers=jobs or 1, engine=workers, watch=watch)
        size = experiments.make_plan(names, size, where.small).scale
    cells = {each.name: each.planned(size, authors=faithful) for each in chosen}
    chosen = [each for each in chosen if cells[each.name]]
    if not size.tuning:
        everything = [cell for planned in cells.values() for cell in planned]
        if scale != "smoke":
            out.print(tables.cost(experiments.missing(everything, where), jobs or 1))
        if not pages:
            open_fabric("auto", "32-true", threads)
            with tables.overall_bar() as watch:
                failures = experiments.run_missing(everything, where, engine=workers, watch=watch)
    rows = {each.name: experiments.rows_of(cells[each.name], where) for each in chosen}
    drawn = [row for each in chosen if each.frontier for row in rows[each.name]]
    costs = experiments.known_costs(drawn, where)
    if costs is None and not pages:
        with tables.bar("what a prediction costs") as watch:
            costs = experiments.measured_costs(drawn, where, watch)
    command = ["calgp", "reproduce", "", "--scale", scale, *["--faithful"] * faithful]
    for each in chosen:
        command[2] = each.name
        found = experiments.priced(rows[each.name], costs or {})
        page = experiments.write_experiment(
            each, size, cells[each.name], found, folder / (scale + "-faithful" * faithful) / each.name,
            command=command, authors=faithful, failures=failures,
        )  # fmt: skip
        out.print(tables.verdict_table(each, each.judged(found)))
        out.print(f"{each.name}: {page}", soft_wrap=True)
    if failures:
        again = shlex.join([*command[:2], name, *command[3:]])
        raise CalgpError(f"Not everything could be run; `{again}` tries again. " + " ".join(failures.values()))


@takes_run(without=["seed"])
def sweep(
    options: dict[str, Any],
    *,
    grid: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUES",
            help="An option of `calgp train` or --set with its values: method.keep=0.5,0.9; with --random also a "
            "range: lr=loguniform:1e-4:1e-2, or uniform, or integer.",
            show_default="none",
        ),
    ] = None,
    random: Annotated[
        int | None,
        typer.Option(help="Draw so many settings instead of all combinations.", show_default="all combinations"),
    ] = None,
    draw_seed: Annotated[
        int | None, typer.Option(help="Of --random; more draws begin with the same ones.", show_default="0")
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="Of the runs of each setting: 0,1,2.", show_default="0")] = None,
    folder: Annotated[Path, typer.Option("--out", help="Where runs and tables go.")] = Path("sweeps/sweep"),
    samples: Annotated[
        int | None, typer.Option("--samples", "-S", help="Draws of the masks.", show_default="50")
    ] = None,
    evaluate: Annotated[
        bool, typer.Option("--evaluate", help="Score the test images, too; nothing is chosen by them.")
    ] = False,
    part: Annotated[
        str | None,
        typer.Option(
            metavar="INDEX/COUNT", help="Only these runs, 1/10 to 10/10: for job arrays.", show_default="all runs"
        ),
    ] = None,
    dry: Annotated[bool, typer.Option("--dry", help="Run nothing: list what would be run, and its cost.")] = False,
    jobs: JobsOption = None,
    engine: EngineOption = "local",
    address: AddressOption = None,
    gpus: GpusOption = 0.0,
    data: DataOption = None,
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train many settings with several seeds; a table of them, the best on the hold-out first.

    All combinations of --grid, or --random draws. Stop it whenever you like: the same command goes on where it was, and
    nothing is run twice. Test images are not looked at unless --evaluate asks for it, and never sorted by. The tables
    are table.csv, table.json and report.html in --out. A --config file may have tables [grid] and [sweep]. Without
    --holdout, a tenth of the training images is kept to choose by.

    Example: calgp sweep --method cnn-gp-sorf --epochs 3 --grid method.keep=0.5,0.9 --grid lr=1e-3,3e-3 --seeds 0,1,2
    """
    import shlex

    from calgp.cli import tables
    from calgp.experiments import sweep as sweeping
    from calgp.experiments.reproduce import Paths
    from calgp.runs.engines import find_engine

    told = {"random": random, "draw_seed": draw_seed, "samples": samples, "evaluate": evaluate or None,
            "seeds": seeds and _seeds(seeds)}  # fmt: skip
    wanted = sweeping.described(options, grid or [], {name: value for name, value in told.items() if value is not None})
    chosen = sweeping.Part.parse(part) if part else None
    workers = find_engine(engine, jobs=jobs, address=address, gpus=gpus)
    todo = sweeping.missing_jobs(wanted, Paths(folder / "runs", data=data), chosen)
    if dry:
        return out.print(tables.planned_table(wanted, todo), tables.cost(todo, jobs or 1))
    open_fabric("auto", "32-true", threads)
    with tables.overall_bar() as watch:
        failures = sweeping.run_sweep(wanted, folder, data=data, part=chosen, engine=workers, watch=watch)
    if chosen is None or not sweeping.missing_jobs(wanted, Paths(folder / "runs")):  # the last part writes them
        found = sweeping.found_by(wanted, folder)
        command = shlex.join(["calgp", *sys.argv[1:]])
        written = sweeping.write_sweep(wanted, found, folder, command=command, failures=failures)
        if as_json:
            print(json.dumps(written))
        else:
            out.print(tables.sweep_table(found))
            out.print(f"Report: {folder / 'report.html'}", soft_wrap=True)
            out.print(f"Best on the hold-out: {written['best']}" if written["best"] else "", soft_wrap=True)
    if failures:
        raise CalgpError("Not everything could be run; the same command tries again. " + " ".join(failures.values()))


def _seeds(text: str) -> list[int]:
    if not all(part.strip().isdecimal() for part in text.split(",")):
        raise CalgpError(f"Invalid --seeds {text}: must be whole numbers, such as 0,1,2.")
    return [int(part) for part in text.split(",")]
