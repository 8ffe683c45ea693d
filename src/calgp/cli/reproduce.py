"""The command reproduce: the paper's figures and tables, rerun and judged."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from calgp.cli.shared import (
    AddressOption,
    DataOption,
    EngineOption,
    GpusOption,
    JobsOption,
    ThreadsOption,
    check_all_ran,
    open_fabric,
    out,
)
from calgp.errors import CalgpError

if TYPE_CHECKING:
    from calgp.paper import Cell, Experiment, Scale
    from calgp.search.engines import Engine
    from calgp.search.jobs import Paths


NameArgument = Annotated[
    str | None,
    typer.Argument(metavar="NAME", help="An experiment, such as fig2, or `all`.", show_default="list them"),
]
ScaleOption = Annotated[str, typer.Option(help="smoke (seconds), laptop (hours), desk (days) or paper (a GPU).")]
ResultsOption = Annotated[
    list[Path] | None,
    typer.Option(help="Where small results of finished runs lie.", show_default="results and OUT/results"),
]
KeepOption = Annotated[
    Path | None,
    typer.Option(help="Copy the small results of each finished run here.", show_default="OUT/results"),
]


def reproduce(
    name: NameArgument = None,
    listed: Annotated[bool, typer.Option("--list", help="List the experiments and what they claim.")] = False,
    scale: ScaleOption = "smoke",
    folder: Annotated[Path, typer.Option("--out", help="Where runs and pages go.")] = Path("reproduced"),
    jobs: JobsOption = None,
    engine: EngineOption = "local",
    address: AddressOption = None,
    gpus: GpusOption = 0.0,
    faithful: Annotated[bool, typer.Option(help="As the authors' code, where it differs from the paper.")] = False,
    pages: Annotated[bool, typer.Option("--pages", help="Run nothing: pages of what is in --results.")] = False,
    results: ResultsOption = None,
    keep: KeepOption = None,
    data: DataOption = None,
    threads: ThreadsOption = None,
) -> None:
    """Rerun the paper's figures and tables: run what is missing, judge its claims, write a page for each.

    Stop it at any time: the same command continues, and nothing is run twice. --engine ray makes the
    runs on a Ray cluster whose machines share --out and --data (docs/guides/sweeps.md).

    Example: calgp reproduce fig2 --scale laptop --jobs 2 --data images
    """
    from calgp import paper
    from calgp.cli import job_tables
    from calgp.search.engines import find_engine
    from calgp.search.jobs import Paths

    if listed or name is None:
        return out.print(job_tables.experiment_table(paper.EXPERIMENTS.values()))
    workers = find_engine(engine, jobs=jobs, address=address, gpus=gpus)
    chosen, size = paper.chosen(name), paper.find_scale(scale)
    if size.tuning and faithful:
        raise CalgpError(f"Invalid --scale {scale}: it has tuned options, and --faithful the authors'.")
    kept = folder / "results" if keep is None else keep
    places = tuple(results) if results else (Path("results"), folder / "results")
    paths = Paths(folder / "runs", places, None if pages else kept, data)
    work = _Work(workers, jobs or 1, paths, kept, pages)
    if not (size.tuning or pages):
        open_fabric("auto", "32-true", threads)
    size, cells, failures = _run_tuned(work, chosen, size) if size.tuning else _run(work, chosen, size, faithful)
    command = ["calgp", "reproduce", name, "--scale", scale, *["--faithful"] * faithful]
    place = folder / (scale + "-faithful" * faithful)
    _write_pages(work, [each for each in chosen if cells[each.name]], size, cells, place, command, failures)
    check_all_ran(failures, f"`{shlex.join(command)}`")


@dataclass(frozen=True)
class _Work:
    """Where runs are made and kept, and how many at a time; `pages`: none is made."""

    engine: "Engine"
    jobs: int
    paths: "Paths"
    kept: Path
    pages: bool


def _run(
    work: _Work, chosen: "list[Experiment]", scale: "Scale", faithful: bool
) -> "tuple[Scale, dict[str, tuple[Cell, ...]], dict[str, str]]":
    """Run what is missing at a scale whose options are fixed: the scale, the cells of each experiment, what failed."""
    from calgp import paper
    from calgp.cli import bars, job_tables

    cells = {each.name: each.planned(scale, authors=faithful) for each in chosen}
    everything = [cell for planned in cells.values() for cell in planned]
    if scale.name != "smoke":
        out.print(job_tables.cost(paper.missing(everything, work.paths), work.jobs))
    if work.pages:
        return scale, cells, {}
    with bars.overall_bar() as watch:
        return scale, cells, paper.run_missing(everything, work.paths, engine=work.engine, watch=watch)


def _run_tuned(
    work: _Work, chosen: "list[Experiment]", scale: "Scale"
) -> "tuple[Scale, dict[str, tuple[Cell, ...]], dict[str, str]]":
    """Tune and run what is missing: the scale with the options that were found, the cells, what failed."""
    from calgp import paper
    from calgp.cli import bars, job_tables

    names, failures = [each.name for each in chosen], {}
    plan = paper.make_plan(names, scale, work.paths.small)
    out.print(job_tables.queue_cost(*plan.cost(work.paths), paper.stale(plan, work.kept), work.jobs))
    if not work.pages:
        with bars.overall_bar() as watch:
            failures = paper.run_queue(
                names, scale.name, work.paths, workers=work.jobs, engine=work.engine, watch=watch
            )
    tuned = paper.make_plan(names, scale, work.paths.small).scale
    return tuned, {each.name: each.planned(tuned) for each in chosen}, failures


def _write_pages(
    work: _Work,
    chosen: "list[Experiment]",
    scale: "Scale",
    cells: "dict[str, tuple[Cell, ...]]",
    place: Path,
    command: list[str],
    failures: dict[str, str],
) -> None:
    """A page for each experiment, its verdicts and its path on the terminal."""
    from calgp import paper
    from calgp.cli import bars, job_tables

    rows = {each.name: paper.rows_of(cells[each.name], work.paths) for each in chosen}
    drawn = [row for each in chosen if each.frontier for row in rows[each.name]]
    costs = paper.known_costs(drawn, work.paths)
    if costs is None and not work.pages:
        with bars.bar("what a prediction costs") as watch:
            costs = paper.measured_costs(drawn, work.paths, watch)
    for each in chosen:
        found = paper.priced(rows[each.name], costs or {})
        page = paper.write_experiment(
            each, scale, cells[each.name], found, place / each.name, command=[*command[:2], each.name, *command[3:]],
            authors="--faithful" in command, failures=failures,
        )  # fmt: skip
        out.print(job_tables.verdict_table(each, each.judged(found)))
        out.print(f"{each.name}: {page}", soft_wrap=True)
