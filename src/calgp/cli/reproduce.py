"""The command reproduce: the paper's figures and tables, rerun and judged."""

import shlex
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from calgp.cli import parameters, rooms
from calgp.cli.shared import check_all_ran, out, say
from calgp.errors import CalgpError


def reproduce(
    name: Annotated[
        str | None, Argument(metavar="NAME", help="An experiment, such as fig2, or `all`.", show_default="list them")
    ] = None,
    *,
    listed: Annotated[
        bool, Option("--list", help="List the experiments, what is done of them and what is missing.")
    ] = False,
    scale: Annotated[
        str | None,
        Option(
            help="smoke (seconds), laptop (hours), desk (days) or paper (a GPU).",
            show_default="smoke; with --list laptop and desk",
        ),
    ] = None,
    folder: Annotated[Path, Option("--out", help="Where runs and pages go.")] = Path("reproduced"),
    places: parameters.Workers,
    faithful: Annotated[bool, Option(help="As the authors' code, where it differs from the paper.")] = False,
    pages: Annotated[bool, Option("--pages", help="Run nothing: pages of what is in --results.")] = False,
    results: Annotated[
        list[Path] | None,
        Option(help="Where small results of finished runs lie.", show_default="results and OUT/results"),
    ] = None,
    keep: Annotated[
        Path | None, Option(help="Copy the small results of each finished run here.", show_default="OUT/results")
    ] = None,
    data: parameters.Data = None,
    threads: parameters.Threads = None,
) -> None:
    """Rerun the paper's figures and tables: run what is missing, judge its claims, write a page for each.

    Stop it at any time: the same command continues, and nothing is run twice. --engine ray makes the
    runs on a Ray cluster whose machines share --out and --data (docs/guides/sweeps.md).

    Example: calgp reproduce fig2 --scale laptop --jobs 2 --data images
    """
    small = tuple(results) if results else (Path("results"), folder / "results")
    if listed or name is None:
        return _list(name or "all", ("laptop", "desk") if scale is None else (scale,), rooms.jobs.Paths(folder, small))
    scale = scale or "smoke"
    engine, names, size = places.find(), [each.name for each in rooms.paper.chosen(name)], rooms.paper.find_scale(scale)
    if size.tuning and faithful:
        raise CalgpError(f"Invalid --scale {scale}: it has tuned options, and --faithful the authors'.")
    kept = folder / "results" if keep is None else keep
    paths = rooms.jobs.Paths(folder / "runs", small, None if pages else kept, data)
    if not (size.tuning or pages):
        parameters.Compute(threads=threads).open()
    plan = rooms.paper.make_plan(names, size, paths.small, authors=faithful)
    _print_cost(plan, paths, kept, places.jobs or 1)
    failures = {} if pages else _run(plan, paths, engine, places.jobs or 1)
    plan = rooms.paper.make_plan(names, size, paths.small, authors=faithful)  # with what tunings have found
    command = ["calgp", "reproduce", name, "--scale", scale, *["--faithful"] * faithful]
    _write_pages(plan, paths, folder / (scale + "-faithful" * faithful), command, failures, race=not pages)
    check_all_ran(failures, f"`{shlex.join(command)}`")


def _list(name: str, scales: tuple[str, ...], paths: "rooms.jobs.Paths") -> None:
    """The experiments, and what is done of them at each scale."""
    out.print(rooms.job_tables.experiment_table(rooms.paper.EXPERIMENTS.values()))
    for each in scales:
        found = rooms.paper.coverage(rooms.paper.chosen(name), rooms.paper.find_scale(each), paths)
        out.print(rooms.job_tables.coverage_table(each, found))


def _print_cost(plan: "rooms.paper.Plan", paths: "rooms.jobs.Paths", kept: Path, processes: int) -> None:
    if plan.scale.tuning:
        out.print(rooms.job_tables.queue_cost(*plan.cost(paths), rooms.paper.stale(plan, kept), processes))
    elif plan.scale.name != "smoke":
        out.print(rooms.job_tables.cost(rooms.paper.missing(plan.cells(), paths), processes))


def _run(
    plan: "rooms.paper.Plan", paths: "rooms.jobs.Paths", engine: "rooms.engines.Engine", workers: int
) -> dict[str, str]:
    """Tune and run what is missing, with a bar; what failed."""
    with rooms.bars.overall_bar() as watch:
        if plan.scale.tuning:
            return rooms.paper.run_queue(
                plan.names, plan.scale.name, paths, workers=workers, engine=engine, watch=watch
            )
        return rooms.paper.run_missing(plan.cells(), paths, engine=engine, watch=watch)


def _write_pages(
    plan: "rooms.paper.Plan",
    paths: "rooms.jobs.Paths",
    place: Path,
    command: list[str],
    failures: dict[str, str],
    *,
    race: bool,
) -> None:
    """A page for each experiment, its verdicts and its path on the terminal; `race`: measure costs that are missing."""
    planned = [(rooms.paper.EXPERIMENTS[name], cells) for name, cells in plan.planned().items() if cells]
    rows = {each.name: rooms.paper.rows_of(cells, paths) for each, cells in planned}
    drawn = [row for each, _ in planned if each.frontier for row in rows[each.name]]
    costs = rooms.paper.known_costs(drawn, paths)
    if costs is None and race:
        with rooms.bars.bar("what a prediction costs") as watch:
            costs = rooms.paper.measured_costs(drawn, paths, watch)
    for each, cells in planned:
        found = rooms.paper.priced(rows[each.name], costs or {})
        page = rooms.paper.write_experiment(
            each, plan.scale, cells, found, place / each.name, command=[*command[:2], each.name, *command[3:]],
            authors=plan.authors, failures=failures,
        )  # fmt: skip
        out.print(rooms.job_tables.verdict_table(each, each.judged(found)))
        say(f"{each.name}: {page}")
