"""What the documentation shows runs as it stands."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from calgp.data import load
from forked import python

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_the_examples_run(path, tmp_path):
    result = python(path, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout


@pytest.mark.slow
def test_the_readme_examples_run(tmp_path, monkeypatch, capsys):
    """In their order; the trained network of the last one, and its data, are the reader's."""
    monkeypatch.chdir(tmp_path)
    folder, embeddings, trained = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    images = load("digits", "train").take(torch.arange(600))
    train, held_out = ((part.pixels(), part.y) for part in images.split(0.25, seed=0))
    torch.manual_seed(0)
    names = {"network": nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10))}
    names |= {"train": train, "held_out": held_out, "x": held_out[0][:3]}
    for code in (folder.replace("minutes=1", "steps=5"), embeddings, trained):
        exec(compile(code, "README.md", "exec"), names)  # noqa: S102 (our own README)
    printed = capsys.readouterr().out
    assert "err" in printed and "(997, 10)" in printed and "[3, 10]" in printed
