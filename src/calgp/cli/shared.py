"""What the commands share: what they print, checks of what is given, devices and run folders."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from calgp.cli.terminal import Terminal
from calgp.errors import CalgpError, name_error, nearest, path_error
from calgp.run import SEED

out = Terminal()
err = Terminal(stderr=True)
say = out.say  # sentences on the terminal; paths in them are neither broken nor coloured

PATH_KINDS = ("folder", "stream", "shards")  # of sources of one's own: KIND:PATH
MOST_THREADS = 1024  # more are no processor's, and torch would start them all


def note(text: str) -> None:
    """A sentence beside the results, on stderr."""
    err.say(f"Note: {text}")


def check_run(name: str) -> str:
    """Refuse a run folder that is not there, before anything is imported that takes long."""
    if name != "shipped" and not Path(name).exists():
        raise path_error("run folder", Path(name))
    return name


def check_seed(seed: int) -> int:
    if seed not in SEED:
        raise CalgpError(f"Invalid seed={seed}: must be a whole number {SEED}, such as 0.")
    return seed


def check_images(paths: list[Path]) -> None:
    if missing := [path for path in paths if not path.exists()]:
        raise path_error("image", missing[0])


def check_source(text: str) -> None:
    """Refuse a folder that is not there, or a mistyped kind, before anything is imported that takes long."""
    kind, colon, place = text.partition(":")
    if not (colon and place and text.isprintable()):
        return
    if kind not in PATH_KINDS and nearest(kind, PATH_KINDS):
        raise name_error("There is no kind of source", kind, PATH_KINDS)
    if kind in ("folder", "stream") and not os.path.exists(folder := os.path.expanduser(place)):
        raise path_error("image folder", Path(folder))


def require_positive(name: str, value: int) -> None:
    if value < 1:
        raise CalgpError(f"Invalid {name}={value}: must be at least 1.")


NO_MEMORY = (  # what torch, oneDNN, the loader of libraries and Python's own importer say, in their words
    "out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory", "bad_alloc",
    "could not create a primitive", "failed to map segment", "error return without exception set",
    "can't start new thread",
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
    from calgp.runs.environment import emulates_bf16

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
    fabric = open_device(device, precision, processes=processes or 1)
    if precision == "bf16-mixed" and fabric.device.type == "cpu" and emulates_bf16() and is_rank_zero():
        note("this processor has no bf16 instructions; --precision 32-true is faster here.")
    return fabric


def open_folder(name: str) -> Any:
    shipped = check_run(name) == "shipped" and not Path(name).exists()
    from calgp import runs

    return runs.shipped_run() if shipped else runs.RunFolder(name)


def writable(folder: Any) -> Any:
    """A run folder that may be written into: of the run in the package, a complete copy at runs/shipped."""
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


def check_all_ran(failures: Mapping[str, str], again: str = "the same command") -> None:
    if failures:
        raise CalgpError(f"Not everything could be run; {again} tries again. " + " ".join(failures.values()))
