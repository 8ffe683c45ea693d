"""The guides, followed to the letter, but for the number of epochs."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from calgp import cli

GUIDES = Path(__file__).parents[1] / "docs" / "guides"


@pytest.mark.slow
def test_own_images(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    guide = (GUIDES / "own-images.md").read_text()
    blocks = re.findall(r"```(python|bash)\n(.*?)```", guide, re.S)
    for language, block in sorted(blocks, key=lambda each: "def photograph" not in each[1]):  # these first
        if language == "python":
            exec(compile(re.sub(r"epochs=\d+", "epochs=1", block), "own-images.md", "exec"), {})  # noqa: S102
        for line in block.replace("\\\n", "").splitlines() if language == "bash" else []:
            command = shlex.split(line)
            command += ["--epochs", "1"] * (command[1] == "train")
            result = CliRunner().invoke(cli.app, command[1:])
            assert command[0] == "calgp" and result.exit_code == 0, (line, result.output, result.exception)
    assert "folder:strangers" in Path("runs/photos/report.html").read_text()
    assert len(Path("predictions.csv").read_text().splitlines()) > 2
