"""What the documentation shows runs as it stands."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from calgp.data import load
from forked import python

ROOT = Path(__file__).parents[1]


SHORTER = {"epochs=3,": "steps=60,", "epochs=5)": "epochs=2)", "steps=100,": "steps=40,"}


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_the_examples_run(path, tmp_path):
    """With fewer steps."""
    code = path.read_text()
    for length, shorter in SHORTER.items():
        code = code.replace(length, shorter)
    (tmp_path / path.name).write_text(code)
    result = python(tmp_path / path.name, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout


def digits_cnn(train) -> nn.Module:
    """A small CNN for digits, trained for 300 steps; in double precision, so that every processor finds the same."""
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(1, 16, 5, 2), nn.ReLU(), nn.Conv2d(16, 32, 5, 2), nn.ReLU(), nn.Flatten(),
        nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10),
    ).double()  # fmt: skip
    optimiser = torch.optim.Adam(network.parameters(), 2e-3)
    for _ in range(300):
        batch = torch.randint(len(train[1]), (100,))
        optimiser.zero_grad()
        nn.functional.cross_entropy(network(train[0][batch].double()), train[1][batch]).backward()
        optimiser.step()
    return network.float().eval()


def numbers(text: str) -> list[float]:
    return [float(each) for each in re.findall(r"\d+\.?\d*", text)]


@pytest.mark.slow
def test_the_readme_examples_print_what_it_shows(tmp_path, monkeypatch, capsys):
    """In their order; the trained network of the last one, and its data, are the reader's."""
    monkeypatch.chdir(tmp_path)
    readme = (ROOT / "README.md").read_text()
    folder, embeddings, trained = re.findall(r"```python\n(.*?)```", readme, re.S)
    shown_embeddings, shown_trained = re.findall(r"```text\n(.*?)```", readme, re.S)[-2:]
    images = load("digits", "train").take(torch.arange(3000))
    train, held_out = ((part.pixels(), part.y) for part in images.split(0.25, seed=0))
    strangers = [load(name, "test").pixels(slice(0, 3)) for name in ("digits", "letters")]
    names = {"network": digits_cnn(train), "train": train, "held_out": held_out, "x": torch.cat(strangers)}
    printed = []
    for code in (folder.replace('out="runs/first"', 'out="runs/first", steps=5'), embeddings, trained):
        exec(compile(code, "README.md", "exec"), names)  # noqa: S102 (our own README)
        printed.append(capsys.readouterr().out)
    assert re.fullmatch(
        r".*% wrong, MNLL .*, ECE .*\ncalled outliers: .*% of the digits, .*% of the letters\n", printed[0]
    )
    assert numbers(printed[1]) == pytest.approx(numbers(shown_embeddings), rel=0.01)  # another processor rounds
    (confidence, score), (shown, shown_score) = (
        (found[:6], found[6:]) for found in map(numbers, (printed[2], shown_trained))
    )
    assert confidence == pytest.approx(shown, abs=0.05)  # 300 steps later
    assert score == pytest.approx(shown_score, abs=0.3)
