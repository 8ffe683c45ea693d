"""What the commands share: consoles, options, and what turns flags into things."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from calgp.errors import CalgpError

out = Console()
err = Console(stderr=True)

# options that several commands share
DataOption = Annotated[
    Path | None, typer.Option("--data", help="Where image sets lie; else $CALGP_DATA, else the user's cache.")
]
DeviceOption = Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:1, mps …")]
DevicesOption = Annotated[
    int, typer.Option("--devices", help="So many processes of this machine, one a device; see docs/scaling.md.")
]
ThreadsOption = Annotated[int | None, typer.Option("--threads", help="CPU threads; all cores unless given.")]
SamplesOption = Annotated[int, typer.Option("--samples", "-S", help="Draws of the masks to average over.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of a table.")]
UncalibratedOption = Annotated[
    bool, typer.Option("--uncalibrated", help="The probabilities as trained, though the run has been calibrated.")
]
JobsOption = Annotated[
    int | None, typer.Option(help="Runs at a time, in processes of one thread each; 1, or with Ray one a core.")
]
EngineOption = Annotated[str, typer.Option(help="Where runs are made: local, or ray (pip install calgp\\[ray]).")]
AddressOption = Annotated[
    str | None, typer.Option(help="Of a Ray cluster, such as auto or HOST:6379; else it is started here.")
]
GpusOption = Annotated[float, typer.Option(help="What a run asks of a Ray cluster: 1, or 0.25 for a quarter.")]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="A run folder, or `shipped`: the run in the package.")]


def speaks() -> bool:
    """Whether this process tells the user: of several that do one thing together, the first."""
    return int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", 0))) == 0


def open_fabric(device: str, precision: str, threads: int | None, processes: int | None = None) -> Any:
    """Where it runs: the device and the floating type are Fabric's business. `processes`: those that it may take."""
    import logging
    import warnings

    import torch

    from calgp.runs import open_device, tune_process
    from calgp.runs.devices import ranks

    if processes is None and ranks() > 1:
        raise CalgpError("Only train, evaluate and predict can share their work; start this command without torchrun.")
    logging.getLogger("lightning_fabric").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning_fabric")
    tune_process()
    if threads is not None:
        require_positive("threads", threads)
        torch.set_num_threads(threads)
    return open_device(device, precision, processes=processes or 1)


def run_options(config: Path | None, given: dict[str, Any], settings: list[str]) -> dict[str, Any]:
    """Options of a run: the file's, then the flags', then --set's."""
    from calgp.runs.run import assign

    options: dict[str, Any] = {} if config is None else _toml(config)
    options |= given
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key:
            raise CalgpError(f"--set {setting!r} is not of the form NAME=VALUE, such as method.depth=3.")
        assign(options, key, parsed(text))
    return options


def parsed(text: str) -> Any:
    """JSON where it is JSON, else text: 3, 0.5, true, null, [1, 2], sorf."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _toml(path: Path) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib  # pyright: ignore[reportMissingImports]
    from calgp.runs.reading import LARGEST_JSON, read_bytes

    try:
        return tomllib.loads(read_bytes(path, LARGEST_JSON).decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CalgpError(f"{path} cannot be read as TOML: {str(error)[:300]}.") from None


def open_folder(name: str) -> Any:
    from calgp import runs

    shipped = name == "shipped" and not Path(name).exists()
    folder = runs.shipped_run() if shipped else runs.RunFolder(name)
    folder.card()
    return folder


def writable(folder: Any) -> Any:
    """The shipped run is part of the package: what is made of it goes into a copy in this directory, whole or not."""
    import shutil
    import tempfile

    from calgp import runs
    from calgp.runs.writing import reporting

    if folder.path != runs.shipped_run().path:
        return folder
    copy = runs.RunFolder(Path("runs") / "shipped")
    with reporting(copy.path):
        copy.path.parent.mkdir(exist_ok=True)
        if not copy.path.exists():
            with tempfile.TemporaryDirectory(dir=copy.path.parent, prefix=".") as aside:
                Path(shutil.copytree(folder.path, Path(aside) / "shipped")).rename(copy.path)
    return copy


def check_sampling(samples: int, seed: int) -> None:
    require_positive("samples", samples)
    if not 0 <= seed < 2**63:
        raise CalgpError(f"seed={seed} cannot be; it is a whole number from 0 to 2^63 - 1.")


def require_positive(name: str, value: int) -> None:
    if value < 1:
        raise CalgpError(f"{name}={value} cannot be; it must be at least 1.")
