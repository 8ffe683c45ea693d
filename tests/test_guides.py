"""README and the pages of the documentation, followed to the letter, but for the number of steps."""

import base64
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from typer.testing import CliRunner

from calgp import cli
from calgp.data import load
from folders import exported

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
GUIDES = DOCS / "guides"
BLOCK = re.compile(r"```(python|bash|toml)\n(.*?)```", re.S)

# What a command gets in addition, so that it takes seconds: the last value of an option counts.
SMALLER = {
    "train": ["--steps", "2", "--batch-size", "10", "--devices", "1", "--workers", "1"],
    "sweep": ["--steps", "1", "--train-size", "100", "--seeds", "0", "--jobs", "1", "-S", "2"],
    "tune": ["--steps", "1", "--train-size", "1000", "--pilots", "1", "--jobs", "1", "-S", "2"],
    "reproduce": ["--list"],  # tests/paper runs the experiments
}
LENET = ["--backbone", "lenet", "--set", "backbone.channels=[4,8]", "--set", "backbone.hidden=[16]"]
# What stands for the reader's data, machines and patience.
YOURS = {
    "--source mnist": "--source digits --train-size 600",
    "--source notmnist": "--source letters",
    "--method cnn-laplace": "--method cnn-laplace --train-size 200",
    "--holdout 0.1 --no-calibration": "--holdout 0.5 --no-calibration",
    "tune mnist": "tune digits --methods cnn",
    "--methods cnn-gp-sorf,cnn-mcd,cnn-cal": "--methods cnn-gp-sorf,cnn",
    'source = "mnist"': 'source = "digits"',
    "epochs = 3": "steps = 1",
    "--random 20": "--random 2",
    "random = 20": "random = 2",
    "seeds = [0, 1, 2]": "seeds = [0]",
    "--network timm:resnet18": "--network network.py:make",
    "http://our-server:5000": "mlruns",
    "shards:/data/train-{0000..0099}.tar": "shards:shards/train-{000000..000000}.tar",
    "stream:/data/photos": "stream:photos",
    "shards:/data/photos": "folder:photos",
    "'/data/scans-{0000..0099}.tar'": "photos",
    "--engine ray --address auto": "--jobs 1",
    "--on ray --address auto": "--jobs 1",
    "/shared/": "",
    "$SLURM_ARRAY_TASK_ID/10": "1/10",
    "minutes=5": "steps=2, batch_size=10",
    'backbone=backbone)': 'backbone=backbone, steps=2, batch_size=10)',
    "watch=watch)": "watch=watch, steps=2, batch_size=10)",
    "Budget(pilots=4, steps=90)": "Budget(pilots=1, steps=1)",
}  # fmt: skip
NETWORK = """
import torch
from torch import nn

def make(channels=1):
    convolutions = nn.Conv2d(channels, 4, 5, 2), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU()
    network = nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(36, 10))
    network.preprocessing = {"size": 20}
    return network
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """What pages take for granted: a folder of 600 images, single images, predictions, a network, a trained run."""
    here = tmp_path_factory.mktemp("world")
    digits = load("digits", "train")
    for name, label in (("cat", 3), ("dog", 6)):
        (here / "photos" / name).mkdir(parents=True)
        for number, pixels in enumerate(digits.x[digits.y == label][:330]):
            Image.fromarray(pixels[0].numpy()).convert("RGB").save(here / "photos" / name / f"{number}.png")
    test = load("digits", "test")
    for name in ("new.jpg", "photo.png", "two.png"):
        Image.fromarray(test.x[test.y == 2][0, 0].numpy()).save(here / name)
    probs = np.random.default_rng(0).dirichlet(np.ones(3), 200)
    np.savez(here / "predictions.npz", probs=probs, y=probs.argmax(1))
    (here / "nets.py").write_text(NETWORK)
    (here / "network.py").write_text(NETWORK.replace("channels=1", "channels=3"))
    small = ["--source", "digits", "--train-size", "600", "--holdout", "0.1", *SMALLER["train"], "--no-calibration"]
    small += LENET
    for name in ("mnist", "digits"):
        result = CliRunner().invoke(cli.app, ["train", *small, "--out", str(here / "runs" / name)])
        assert result.exit_code == 0, (result.output, result.exception)
    return here


def run_command(line):
    """A line of a shell block: what it prints, if it is a command of calgp that ends by itself."""
    words = shlex.split(line, comments=True)
    if "calgp" not in words or {"pip", "#SBATCH", "serve"} & set(words):
        return ""  # tests/serve has the server
    words = words[words.index("calgp") + 1 :]
    name = words[2] if words[0] == "--network" else words[0]
    for option in ("--epochs", "--minutes"):  # either of them, or steps
        if name in ("train", "sweep") and option in words:
            del words[words.index(option) : words.index(option) + 2]
    if name == "train" and not {"--backbone", "--network", "--continue"} & set(words):  # the default takes seconds
        words += LENET
    if name == "train" and "--out" in words and "--continue" not in words:  # pages show several ways to train a run
        shutil.rmtree(words[words.index("--out") + 1], ignore_errors=True)
    if name == "export":
        return exported(*words)
    result = CliRunner().invoke(cli.app, words + SMALLER.get(name, []))
    assert result.exit_code == 0, (line, result.output, result.exception)
    return result.output


def follow(page, scope=None):
    """Run all blocks of a page in their order: Python in one scope. What was printed by the commands, together."""
    scope, printed = {} if scope is None else scope, ""
    text = page.read_text(encoding="utf-8")
    for old, new in YOURS.items():
        text = text.replace(old, new)
    toml = [block for language, block in BLOCK.findall(text) if language == "toml"]
    for out in set(re.findall(r"--out (\S+)|out=\"(\S+?)\"", text)):
        shutil.rmtree("".join(out), ignore_errors=True)  # the page makes it
    if toml:
        Path("sweep.toml").write_text(toml[0])
    for language, block in BLOCK.findall(text):
        if language == "python":
            exec(compile(block, page.name, "exec"), scope)  # noqa: S102 (our own page)
        for line in block.replace("\\\n", " ").splitlines() if language == "bash" else []:
            printed += run_command(line)
    return printed


SHORT = ["corruptions.md", "guides/out-of-distribution.md", "guides/reading-a-report.md", "reproduce.md"]
LONG = [
    "../README.md", "api/index.md", "index.md", "methods.md", "results.md", "scaling.md", "guides/decisions.md",
    "guides/deployment.md",
    "guides/large-data.md", "guides/own-network.md", "guides/sweeps.md", "guides/trackers.md", "guides/tuning.md",
]  # fmt: skip
ELSEWHERE = {  # with a test of their own: below, in test_docs.py, test_embed.py, test_hub.py and serve/test_server.py
    "ece.md", "files.md", "metrics.md", "serve.md", "guides/embeddings.md", "guides/image-folders.md",
    "guides/own-images.md", "guides/pretrained-network.md", "guides/scikit-learn.md", "guides/trained-model.md",
}  # fmt: skip


def test_no_page_is_left_out():
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md") if BLOCK.search(path.read_text())}
    assert pages | {"../README.md"} == {*SHORT, *LONG, *ELSEWHERE}


@pytest.mark.filterwarnings("ignore")  # tensorboard's and MLflow's imports, and MLflow's store of files, warn
@pytest.mark.parametrize("name", [*SHORT, *(pytest.param(name, marks=pytest.mark.slow) for name in LONG)])
def test_commands_and_snippets_run(name, world, tmp_path, monkeypatch):
    here = tmp_path / "here"
    shutil.copytree(world, here)
    monkeypatch.chdir(here)
    monkeypatch.syspath_prepend(str(here))
    page, scope = DOCS / name, {}
    if name == "../README.md":  # test_examples.py runs its Python
        text = re.sub(r"```python\n.*?```", "", page.read_text(), flags=re.S)
        page = here / "README.md"
        page.write_text(text)
    if name == "guides/decisions.md":
        scope = probabilities()
    if name == "guides/own-network.md":
        scope["make_network"] = lambda: scope["network"]
    printed = follow(page, scope)
    if name in ("index.md", "guides/out-of-distribution.md"):
        assert_printed(page, printed)


def assert_printed(page, printed):
    """Every line of a page's first block of output was printed, with these numbers: to 0.002, for other machines."""
    block = re.search(r"```text\n(.*?)```", page.read_text(), re.S)[1]
    numbers = re.compile(r"\d+\.\d+")
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    for line in block.splitlines():
        line = " ".join(line.split())
        if line == "…":
            continue
        same = [each for each in lines if numbers.sub("#", each) == numbers.sub("#", line)]
        assert same, (line, printed)
        errors = [
            max(
                (abs(float(a) - float(b)) for a, b in zip(numbers.findall(each), numbers.findall(line), strict=True)),
                default=0,
            )
            for each in same
        ]
        assert min(errors) <= 0.002, (line, same)


@pytest.mark.slow
def test_the_exported_program_prints_what_the_guide_says(world, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(world / "two.png", tmp_path)
    exported("export", "shipped", "--out", "digits.onnx")
    command, expected = re.search(r"\$ python (.*)\n(two\.png .*)\n", (GUIDES / "deployment.md").read_text()).groups()
    found = subprocess.run([sys.executable, *command.split()], capture_output=True, text=True, check=True)
    assert found.stdout.split()[:2] == expected.split()[:2]
    assert [float(x) for x in found.stdout.split()[2:]] == pytest.approx(
        [float(x) for x in expected.split()[2:]], abs=2e-4
    )


@pytest.mark.slow
def test_own_images(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    guide = "".join((GUIDES / name).read_text() for name in ("image-folders.md", "own-images.md"))
    blocks = re.findall(r"```(python|bash)\n(.*?)```", guide, re.S)
    for language, block in blocks:
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


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_requests_of_the_server_page_are_answered(world):
    """Each line of curl in docs/serve.md, with another address and a whole image."""
    from calgp.runs import load as load_run
    from serve.conftest import serving

    image = base64.b64encode((world / "two.png").read_bytes()).decode()
    lines = re.findall(r"^curl .*", (DOCS / "serve.md").read_text(), re.M)
    assert len(lines) == 4
    with serving(load_run("shipped")) as address:
        for line in lines:
            line = line.replace("http://127.0.0.1:8000", address).replace("iVBORw0…", image)
            line = line.replace("a.png", "two.png").replace("b.jpg", "new.jpg")
            found = subprocess.run(
                shlex.split(line, comments=True), cwd=world, capture_output=True, text=True, check=True
            )
            assert json.loads(found.stdout)["predictions"][0]["label"] in "0123456789", line


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


def probabilities():
    """What guides/decisions.md has of another model: numbers that were drawn."""
    generator = torch.Generator().manual_seed(0)
    log_probs = torch.randn(2000, 5, generator=generator).mul(3).log_softmax(1)
    y = torch.multinomial(log_probs.exp(), 1, generator=generator)[:, 0]  # so they are calibrated
    x = torch.randint(256, (2000, 1, 4, 4), generator=generator, dtype=torch.uint8)
    uncertainty = 1 - log_probs.exp().amax(1)
    return {
        "uncertainty": uncertainty[:1000], "wrong": (log_probs.argmax(1) != y)[:1000], "log_probs": log_probs[:1000],
        "y": y[:1000], "x": x[:1000], "new_uncertainty": uncertainty[1000:], "new_log_probs": log_probs[1000:],
        "new_x": x[1000:], "new_y": y[1000:],
    }  # fmt: skip


def test_decisions():
    """The part for probabilities of any model."""
    scope = probabilities()
    exec(compile(python_blocks("decisions.md")[0], "decisions.md", "exec"), scope)  # noqa: S102
    sets = scope["sets"].apply(scope["new_log_probs"], scope["keyed_uniform"](scope["new_x"]))
    assert sets[torch.arange(1000), scope["new_y"]].float().mean() > 0.87
    assert scope["selection"].abstains(scope["new_uncertainty"]).any()


@pytest.mark.slow
def test_scikit_learn(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    X, y = load_digits(return_X_y=True)
    scope = {"X": X[:1000], "y": y[:1000], "X_test": X[1000:], "y_test": y[1000:]}
    code = python_blocks("scikit-learn.md")[0].replace("epochs=20", "epochs=6")
    exec(compile(code, "scikit-learn.md", "exec"), scope)  # noqa: S102
    assert scope["classifier"].score(X[1000:], y[1000:]) > 0.8
    assert Path("runs/mine/run.json").is_file()
