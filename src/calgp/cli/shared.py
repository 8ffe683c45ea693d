"""What the commands share: consoles, options that are not of a run, devices and run folders."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from calgp.cli.terminal import Terminal
from calgp.errors import CalgpError, path_error
from calgp.run import SEED

out = Terminal()
err = Terminal(stderr=True)

MOST_THREADS = 1024  # more are no processor's, and torch would start them all

# options that several commands share
DataOption = Annotated[
    Path | None,
    typer.Option("--data", help="The folder of image sets.", show_default="$CALGP_DATA, else the user's cache"),
]
DeviceOption = Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:1, mps …")]
DevicesOption = Annotated[
    int, typer.Option("--devices", help="Processes on this machine, one for each device; see docs/scaling.md.")
]
ThreadsOption = Annotated[int | None, typer.Option("--threads", help="CPU threads.", show_default="all cores")]
PassesOption = Annotated[
    int | None,
    typer.Option(
        "--passes",
        "-S",
        help="Forward passes, one sample each.",
        show_default="1 where the last layer is integrated, else 50",
    ),
]
PredictionEngineOption = Annotated[
    Literal["moments", "samples"] | None,
    typer.Option(
        "--engine", help="moments (last layer integrated) or samples (Monte Carlo).", show_default="as trained"
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of a table.")]
EscapeOption = Annotated[
    bool,
    typer.Option(help="Put ' in front of text that a spreadsheet would run as a formula (= + - @)."),
]
UncalibratedOption = Annotated[bool, typer.Option("--uncalibrated", help="Use the probabilities before calibration.")]
JobsOption = Annotated[
    int | None,
    typer.Option(
        help="Runs at the same time, each in a process of one thread.", show_default="1; with Ray one for each core"
    ),
]
EngineOption = Annotated[str, typer.Option(help="Where runs are made: local, or ray (pip install calgp\\[ray]).")]
AddressOption = Annotated[
    str | None,
    typer.Option(help="Address of a Ray cluster, such as auto or HOST:6379.", show_default="one is started here"),
]
GpusOption = Annotated[float, typer.Option(help="GPUs for each run on a Ray cluster; 0.25 is a quarter.")]
ShardJobsOption = Annotated[
    int | None,
    typer.Option(
        help="Files made at the same time, each by a process of one thread.",
        show_default="this process makes all; with Ray one for each core",
    ),
]
ShardEngineOption = Annotated[str, typer.Option(help="Where files are made: local, or ray (pip install calgp\\[ray]).")]
ShardGpusOption = Annotated[float, typer.Option(help="GPUs for each file on a Ray cluster; 0.25 is a quarter.")]


def check_run(name: str) -> str:
    """Refuse a run folder that is not there, before anything is imported that takes long."""
    if name != "shipped" and not Path(name).exists():
        raise path_error("run folder", Path(name))
    return name


RunArgument = Annotated[
    str,
    typer.Argument(metavar="RUN", help="A run folder, or `shipped`: the run in the package.", callback=check_run),
]


NO_MEMORY = (  # what torch, oneDNN, the loader of libraries and Python's own importer say, in their words
    "out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory", "bad_alloc",
    "could not create a primitive", "failed to map segment", "error return without exception set",
)  # fmt: skip


def out_of_memory(error: Exception) -> bool:
    """Whether an error says that there is no memory left, on whatever device."""
    return isinstance(error, MemoryError) or any(words in str(error).lower() for words in NO_MEMORY)


def is_rank_zero() -> bool:
    """Whether this process writes to the terminal: it is the only one, or the first of those torchrun has started."""
    return int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", 0))) == 0


def open_fabric(device: str, precision: str, threads: int | None, processes: int | None = None) -> Any:
    """Where it runs: the device and the floating type are Fabric's business. `processes`: those that it may take."""
    import logging
    import warnings

    import torch

    from calgp.runs import open_device, tune_process
    from calgp.runs.devices import ranks

    if processes is None and ranks() > 1:
        raise CalgpError("Invalid command under torchrun: must be train, evaluate or predict; start others without it.")
    if processes is not None:
        require_positive("devices", processes)
    logging.getLogger("lightning_fabric").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning_fabric")
    tune_process()
    if threads is not None:
        if not 1 <= threads <= MOST_THREADS:
            raise CalgpError(
                f"Invalid threads={threads}: must be at least 1 and at most {MOST_THREADS}, such as {os.cpu_count()}."
            )
        torch.set_num_threads(threads)
    return open_device(device, precision, processes=processes or 1)


def open_folder(name: str) -> Any:
    shipped = check_run(name) == "shipped" and not Path(name).exists()
    from calgp import runs

    return runs.shipped_run() if shipped else runs.RunFolder(name)


def writable(folder: Any) -> Any:
    """The shipped run is part of the package: what is made of it goes into a copy in this directory, whole or not."""
    import shutil
    import tempfile

    from calgp import runs
    from calgp.runs.writing import wrap_os_errors

    if folder.path != runs.shipped_run().path:
        return folder
    copy = runs.RunFolder(Path("runs") / "shipped")
    with wrap_os_errors(copy.path):
        copy.path.parent.mkdir(exist_ok=True)
        if not copy.path.exists():
            with tempfile.TemporaryDirectory(dir=copy.path.parent, prefix=".") as aside:
                Path(shutil.copytree(folder.path, Path(aside) / "shipped")).rename(copy.path)
    return copy


def check_sampling(passes: int | None, seed: int) -> None:
    require_positive("passes", 1 if passes is None else passes)
    if seed not in SEED:
        raise CalgpError(f"Invalid seed={seed}: must be a whole number {SEED}, such as 0.")


def check_all_ran(failures: Mapping[str, str], again: str = "the same command") -> None:
    if failures:
        raise CalgpError(f"Not everything could be run; {again} tries again. " + " ".join(failures.values()))


def require_positive(name: str, value: int) -> None:
    if value < 1:
        raise CalgpError(f"Invalid {name}={value}: must be at least 1.")
