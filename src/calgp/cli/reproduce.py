"""The command reproduce: the paper's figures and tables, rerun and judged."""

from pathlib import Path
from typing import Annotated

import typer

from calgp.cli.shared import (
    AddressOption,
    DataOption,
    EngineOption,
    GpusOption,
    JobsOption,
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

    Stop it at any time: the same command continues, and nothing is run twice. --engine ray makes the
    runs on a Ray cluster whose machines share --out and --data (docs/guides/sweeps.md).

    Example: calgp reproduce fig2 --scale laptop --jobs 2 --data images
    """
    import shlex

    from calgp import paper
    from calgp.cli import bars, job_tables
    from calgp.runs.engines import find_engine
    from calgp.runs.jobs import Paths

    if listed or name is None:
        return out.print(job_tables.experiment_table(paper.EXPERIMENTS.values()))
    workers = find_engine(engine, jobs=jobs, address=address, gpus=gpus)
    chosen = paper.chosen(name)
    size = paper.find_scale(scale)
    kept = folder / "results" if keep is None else keep
    places = tuple(results) if results else (Path("results"), folder / "results")
    where = Paths(folder / "runs", places, None if pages else kept, data)
    failures: dict[str, str] = {}
    if size.tuning:
        if faithful:
            raise CalgpError(f"Invalid --scale {scale}: it has tuned options, and --faithful the authors'.")
        names = [each.name for each in chosen]
        plan = paper.make_plan(names, size, where.small)
        out.print(job_tables.queue_cost(*plan.cost(where), paper.stale(plan, kept), jobs or 1))
        if not pages:
            with bars.overall_bar() as watch:
                failures = paper.run_queue(names, scale, where, workers=jobs or 1, engine=workers, watch=watch)
        size = paper.make_plan(names, size, where.small).scale
    cells = {each.name: each.planned(size, authors=faithful) for each in chosen}
    chosen = [each for each in chosen if cells[each.name]]
    if not size.tuning:
        everything = [cell for planned in cells.values() for cell in planned]
        if scale != "smoke":
            out.print(job_tables.cost(paper.missing(everything, where), jobs or 1))
        if not pages:
            open_fabric("auto", "32-true", threads)
            with bars.overall_bar() as watch:
                failures = paper.run_missing(everything, where, engine=workers, watch=watch)
    rows = {each.name: paper.rows_of(cells[each.name], where) for each in chosen}
    drawn = [row for each in chosen if each.frontier for row in rows[each.name]]
    costs = paper.known_costs(drawn, where)
    if costs is None and not pages:
        with bars.bar("what a prediction costs") as watch:
            costs = paper.measured_costs(drawn, where, watch)
    command = ["calgp", "reproduce", "", "--scale", scale, *["--faithful"] * faithful]
    for each in chosen:
        command[2] = each.name
        found = paper.priced(rows[each.name], costs or {})
        page = paper.write_experiment(
            each, size, cells[each.name], found, folder / (scale + "-faithful" * faithful) / each.name,
            command=command, authors=faithful, failures=failures,
        )  # fmt: skip
        out.print(job_tables.verdict_table(each, each.judged(found)))
        out.print(f"{each.name}: {page}", soft_wrap=True)
    if failures:
        again = shlex.join([*command[:2], name, *command[3:]])
        raise CalgpError(f"Not everything could be run; `{again}` tries again. " + " ".join(failures.values()))
