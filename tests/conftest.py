"""The order of the tests, what each leaves as it was, and where the real image sets are."""

from __future__ import annotations

import functools
import gc
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import typer.testing
from lightning_fabric.utilities import registry

# what never changes and takes longer than most tests: all commands with their options, the plugins of all packages
typer.testing._get_command = functools.cache(typer.testing._get_command)
registry.entry_points = functools.cache(registry.entry_points)
gc.disable()  # a quarter of the seconds of collecting 5,600 tests would be looking for garbage among modules
pytest_plugins = ["small_run"]  # its fixtures
PACKED = Path(__file__).parents[2] / "shared" / "data"
# each has a test of more than twenty seconds: at the end it would keep one process busy while the others wait
FIRST = {"test_attacks.py", "test_defaults.py", "test_docs.py", "test_kills.py", "test_reproduce.py"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in FIRST)


def pytest_collection_finish() -> None:
    gc.enable()
    gc.freeze()


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """$CALGP_DATA, else the sets packed beside the repository, unpacked once for all test processes."""
    if named := os.environ.get("CALGP_DATA"):
        return Path(named)
    if not (PACKED / "unpack.py").is_file():
        pytest.skip("the real image sets are not here: set CALGP_DATA to the folder that holds them")
    if importlib.util.find_spec("pillow_jxl") is None:
        pytest.skip("unpacking the real image sets needs pillow-jxl-plugin")
    return _unpacked(Path(tempfile.gettempdir()) / "calgp-data")


@pytest.fixture(autouse=True)
def denormal_numbers():
    """A command that a test calls in this process takes denormal numbers for zero from then on; others want them."""
    yield
    torch.set_flush_denormal(False)


@pytest.fixture(autouse=True)
def known_networks():
    """A command with --network that a test calls in this process adds to BACKBONES; other tests list what is there."""
    from calgp.nets import BACKBONES

    before = dict(BACKBONES)
    yield
    BACKBONES.clear()
    BACKBONES.update(before)


def _unpacked(target: Path) -> Path:
    import fcntl

    target.mkdir(exist_ok=True)
    done = target / ".complete"
    with (target / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the second of two test processes waits for the first
        if not done.exists():
            subprocess.run([sys.executable, str(PACKED / "unpack.py"), str(target)], check=True, capture_output=True)
            done.touch()
    return target
