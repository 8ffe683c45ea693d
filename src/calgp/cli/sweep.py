"""The command sweep: many settings of options, each with several seeds."""

import json
import sys
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
    check_all_ran,
    open_fabric,
    out,
)
from calgp.errors import CalgpError
from calgp.json_values import Json

if TYPE_CHECKING:
    from calgp.search.sweep import Sweep


GridOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUES",
        help="An option of `calgp train` or --set with its values: method.keep=0.5,0.9; with --random also a "
        "range: lr=loguniform:1e-4:1e-2, or uniform, or integer.",
        show_default="none",
    ),
]
RandomOption = Annotated[
    int | None,
    typer.Option(help="Draw this many settings instead of all combinations.", show_default="all combinations"),
]
DrawSeedOption = Annotated[
    int | None, typer.Option(help="Seed of --random; more draws begin with the same ones.", show_default="0")
]
SeedsOption = Annotated[str | None, typer.Option(help="Seeds of each setting, such as 0,1,2.", show_default="0")]
SamplesOption = Annotated[
    int | None, typer.Option("--samples", "-S", help="Samples for each prediction.", show_default="50")
]
EvaluateOption = Annotated[
    bool, typer.Option("--evaluate", help="Score the test images, too; nothing is chosen by them.")
]
PartOption = Annotated[
    str | None,
    typer.Option(
        metavar="INDEX/COUNT", help="Only these runs, 1/10 to 10/10: for job arrays.", show_default="all runs"
    ),
]
DryOption = Annotated[bool, typer.Option("--dry", help="Run nothing: list what would be run, and its cost.")]


@takes_run(without=["seed"])
def sweep(
    options: dict[str, Json],
    *,
    grid: GridOption = None,
    random: RandomOption = None,
    draw_seed: DrawSeedOption = None,
    seeds: SeedsOption = None,
    folder: Annotated[Path, typer.Option("--out", help="Where runs and tables go.")] = Path("sweeps/sweep"),
    samples: SamplesOption = None,
    evaluate: EvaluateOption = False,
    part: PartOption = None,
    dry: DryOption = False,
    jobs: JobsOption = None,
    engine: EngineOption = "local",
    address: AddressOption = None,
    gpus: GpusOption = 0.0,
    data: DataOption = None,
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train many settings with several seeds, and rank them by the hold-out.

    All combinations of --grid, or --random draws. Stop it at any time: the same command continues, and nothing is run
    twice. The ranking uses held-out training images, a tenth unless --holdout is given; test images are used only with
    --evaluate, and never for ranking. The tables are table.csv, table.json and report.html in --out. A --config file
    may have tables [grid] and [sweep].

    Example: calgp sweep --method cnn-gp-sorf --epochs 3 --grid method.keep=0.5,0.9 --grid lr=1e-3,3e-3 --seeds 0,1,2
    """
    from calgp.cli import bars, job_tables
    from calgp.search import sweep as sweeping
    from calgp.search.engines import find_engine
    from calgp.search.jobs import Paths

    wanted = sweeping.described(
        options, grid or [], random=random, draw_seed=draw_seed, samples=samples, evaluate=evaluate or None,
        seeds=seeds and _seeds(seeds),
    )  # fmt: skip
    chosen = sweeping.Part.parse(part) if part else None
    workers = find_engine(engine, jobs=jobs, address=address, gpus=gpus)
    todo = sweeping.missing_jobs(wanted, Paths(folder / "runs", data=data), chosen)
    if dry:
        return out.print(job_tables.planned_table(wanted, todo), job_tables.cost(todo, jobs or 1))
    open_fabric("auto", "32-true", threads)
    with bars.overall_bar() as watch:
        failures = sweeping.run_sweep(wanted, folder, data=data, part=chosen, engine=workers, watch=watch)
    if chosen is None or not sweeping.missing_jobs(wanted, Paths(folder / "runs")):  # the last part writes them
        _write_found(wanted, folder, failures, as_json=as_json)
    check_all_ran(failures)


def _write_found(wanted: "Sweep", folder: Path, failures: dict[str, str], *, as_json: bool) -> None:
    """Tables and report of all that was found, into files and onto the terminal."""
    import shlex

    from calgp.cli import job_tables
    from calgp.search import sweep as sweeping

    found = sweeping.found_by(wanted, folder)
    command = shlex.join(["calgp", *sys.argv[1:]])
    written = sweeping.write_sweep(wanted, found, folder, command=command, failures=failures)
    if as_json:
        return print(json.dumps(written))
    out.print(job_tables.sweep_table(found))
    out.print(f"Report: {folder / 'report.html'}", soft_wrap=True)
    out.print(f"Best on the hold-out: {written['best']}" if written["best"] else "", soft_wrap=True)


def _seeds(text: str) -> list[int]:
    if not all(part.strip().isdecimal() for part in text.split(",")):
        raise CalgpError(f"Invalid --seeds {text}: must be whole numbers, such as 0,1,2.")
    return [int(part) for part in text.split(",")]
