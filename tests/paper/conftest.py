"""Everything that the paper room can run, run once."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import pytest

from folders import made_once
from forked import python


def _reproduce(name: str, folder: Path) -> None:
    python("-m", "calgp", "reproduce", name, "--scale", "smoke", "--out", folder, "--results", folder / "results",
           check=True)  # fmt: skip


@pytest.fixture(scope="session")
def figure3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`calgp reproduce fig3` at smoke scale: its folder, with runs, results and a page. Read only."""
    return made_once(tmp_path_factory, "figure3", partial(_reproduce, "fig3"))


@pytest.fixture(scope="session")
def reproduced(figure3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`calgp reproduce all` at smoke scale, which finds figure 3 done. Read only: tests take copies."""

    def make(folder: Path) -> None:
        shutil.copytree(figure3, folder)
        _reproduce("all", folder)

    return made_once(tmp_path_factory, "reproduced", make)
