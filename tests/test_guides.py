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


def test_embeddings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for language, block in re.findall(r"```(python|bash)\n(.*?)```", (GUIDES / "embeddings.md").read_text(), re.S):
        if language == "python":
            exec(compile(block, "embeddings.md", "exec"), names)  # noqa: S102
        for line in block.splitlines() if language == "bash" else []:
            command = shlex.split(line)
            result = CliRunner().invoke(cli.app, command[1:])
            assert command[0] == "calgp" and result.exit_code == 0, (line, result.output, result.exception)
    assert names["classifier"].score(names["X_test"], names["y_test"]) > 0.9
    assert names["flagged"].double().mean() < 0.15
    page = Path("judged.html").read_text()
    assert "gp less linear" in page and page.count("<svg") == 4


def python_blocks(name):
    return re.findall(r"```python\n(.*?)```", (GUIDES / name).read_text(), re.S)


@pytest.mark.slow
def test_trained_model(tmp_path, monkeypatch):
    """The complete example, then what stands in front of it, with its variables."""
    monkeypatch.chdir(tmp_path)
    sketch, example = python_blocks("trained-model.md")
    scope = {}
    exec(compile(example, "trained-model.md", "exec"), scope)  # noqa: S102
    found, upgraded = scope["found"], scope["upgraded"]
    assert found.scores.err == found.before.err < 0.1
    assert found.scores.mnll < found.before.mnll
    assert found.ood["combined"].auroc > found.ood["network-confidence"].auroc
    scope["x"] = scope["train"].pixels()[:7]
    exec(compile(sketch, "trained-model.md", "exec"), scope)  # noqa: S102
    assert scope["p"].probs.shape == (7, 10) and len(scope["p"].class_sets) == 7
    assert upgraded.predict(scope["x"]).labels == scope["p"].labels


@pytest.mark.slow
def test_own_network_in_your_own_loop():
    scope = {}
    exec(compile(python_blocks("own-network.md")[0], "own-network.md", "exec"), scope)  # noqa: S102
    assert (scope["p"].labels == scope["test"].y).float().mean() > 0.9
