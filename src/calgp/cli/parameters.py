"""Parameters that several commands share: single ones, and groups that a command takes as one object."""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument, Option

from calgp.cli.shared import check_run, check_seed, open_fabric, require_positive
from calgp.json_values import Json

Run = Annotated[
    str, Argument(metavar="RUN", help="A run folder, or `shipped`: the run in the package.", callback=check_run)
]
Data = Annotated[
    Path | None, Option("--data", help="The folder of image sets.", show_default="$CALGP_DATA, else the user's cache")
]
Devices = Annotated[
    int, Option("--devices", help="Processes on this machine, one for each device; see docs/scaling.md.")
]
Device = Annotated[str, Option("--device", help="auto, cpu, cuda, cuda:1, mps …")]
Threads = Annotated[int | None, Option("--threads", help="CPU threads.", show_default="all cores")]
AsJson = Annotated[bool, Option("--json", help="Print JSON for programs instead of a table.")]
Uncalibrated = Annotated[bool, Option("--uncalibrated", help="Use the probabilities before calibration.")]
Jobs = Annotated[
    int | None,
    Option(
        help="Runs or files made at the same time, each in a process of one thread.",
        show_default="this process makes them; with Ray one for each core",
    ),
]
Address = Annotated[
    str | None, Option(help="Address of a Ray cluster, such as auto or HOST:6379.", show_default="one is started here")
]
Gpus = Annotated[float, Option(help="GPUs for each run or file on a Ray cluster; 0.25 is a quarter.")]


@dataclass(frozen=True)
class Sampling:
    """How a prediction is made, as the methods of `Classifier` take it."""

    passes: Annotated[
        int | None,
        Option(
            "--passes",
            "-S",
            help="Forward passes, one sample each.",
            show_default="1 where the last layer is integrated, else 50",
        ),
    ] = None
    engine: Annotated[
        Literal["moments", "samples"] | None,
        Option("--engine", help="moments (last layer integrated) or samples (Monte Carlo).", show_default="as trained"),
    ] = None
    seed: Annotated[int, Option(help="Seed of the masks.", callback=check_seed)] = 0

    def __post_init__(self) -> None:
        require_positive("passes", 1 if self.passes is None else self.passes)


@dataclass(frozen=True)
class Compute:
    """The device of a command that computes, and its threads."""

    device: Device = "auto"
    threads: Threads = None

    def open(self, processes: int | None = None, precision: str = "32-true") -> Any:
        return open_fabric(self.device, precision, self.threads, processes)


@dataclass(frozen=True)
class Workers:
    """Where many runs or files are made, and how many at a time."""

    jobs: Jobs = None
    engine: Annotated[str, Option(help="Where runs or files are made: local, or ray (pip install calgp\\[ray]).")] = (
        "local"
    )
    address: Address = None
    gpus: Gpus = 0.0

    def find(self) -> Any:
        from calgp.search.engines import find_engine

        return find_engine(self.engine, jobs=self.jobs, address=self.address, gpus=self.gpus)


@dataclass(frozen=True)
class Csv:
    """A table as a CSV file, too."""

    csv: Annotated[Path | None, Option(help="Write everything to this CSV file, too.", show_default="none")] = None
    escape_csv: Annotated[
        bool, Option(help="Put ' in front of text that a spreadsheet would run as a formula (= + - @).")
    ] = True

    def write(self, rows: Iterable[Mapping[str, Json]]) -> None:
        """Write rows of plain data, if a file was named."""
        from calgp.cli.tables import write_csv

        if self.csv is not None:
            write_csv(self.csv, list(rows), escape=self.escape_csv)


GROUPS = (Sampling, Compute, Workers, Csv)


def with_groups(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command as typer needs it: a flag for each field of a parameter that is one of the groups above."""
    parameters, groups = list[inspect.Parameter](), dict[str, Any]()
    for each in inspect.signature(command, eval_str=True).parameters.values():
        if each.annotation not in GROUPS:
            parameters.append(each)
            continue
        groups[each.name] = each.annotation
        parameters += [
            inspect.Parameter(one.name, each.KEYWORD_ONLY, default=one.default, annotation=one.type)
            for one in fields(each.annotation)
        ]

    @functools.wraps(command)
    def wrapper(**given: Any) -> Any:
        for name, group in groups.items():
            given[name] = group(**{each.name: given.pop(each.name) for each in fields(group)})
        return command(**given)

    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {each.name: each.annotation for each in parameters}
    return wrapper
