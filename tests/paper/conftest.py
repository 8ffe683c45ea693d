"""Everything that the paper room can run, run once."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from calgp import cli
from folders import made_once


@pytest.fixture(scope="session")
def reproduced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`calgp reproduce all` at smoke scale: its folder, with runs, results and pages. Read only: tests take copies."""

    def make(folder: Path) -> None:
        arguments = ["reproduce", "all", "--scale", "smoke", "--out", str(folder), "--results", str(folder / "results")]
        result = CliRunner().invoke(cli.app, arguments)
        if result.exception is not None:
            raise result.exception

    return made_once(tmp_path_factory, "reproduced", make)
