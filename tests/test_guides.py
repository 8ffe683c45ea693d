"""The guides, followed to the letter, but for the number of epochs."""

import re
import shlex
from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_digits
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


@pytest.mark.slow
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


def test_decisions():
    """The part for probabilities of any model, with numbers that were drawn."""
    generator = torch.Generator().manual_seed(0)
    log_probs = torch.randn(2000, 5, generator=generator).mul(3).log_softmax(1)
    y = torch.multinomial(log_probs.exp(), 1, generator=generator)[:, 0]  # so they are calibrated
    x = torch.randint(256, (2000, 1, 4, 4), generator=generator, dtype=torch.uint8)
    uncertainty = 1 - log_probs.exp().amax(1)
    scope = {
        "uncertainty": uncertainty[:1000], "wrong": (log_probs.argmax(1) != y)[:1000], "log_probs": log_probs[:1000],
        "y": y[:1000], "x": x[:1000], "new_uncertainty": uncertainty[1000:], "new_log_probs": log_probs[1000:],
        "new_x": x[1000:],
    }  # fmt: skip
    exec(compile(python_blocks("decisions.md")[0], "decisions.md", "exec"), scope)  # noqa: S102
    covered = scope["sets"].apply(log_probs[1000:], scope["keyed_uniform"](x[1000:]))[torch.arange(1000), y[1000:]]
    assert covered.float().mean() > 0.87
    assert scope["selection"].abstains(uncertainty[1000:]).any()


@pytest.mark.slow
def test_scikit_learn(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    X, y = load_digits(return_X_y=True)
    scope = {"X": X[:1000], "y": y[:1000], "X_test": X[1000:], "y_test": y[1000:]}
    exec(compile(python_blocks("scikit-learn.md")[0], "scikit-learn.md", "exec"), scope)  # noqa: S102
    assert scope["classifier"].score(X[1000:], y[1000:]) > 0.8
    assert Path("runs/mine/run.json").is_file()
