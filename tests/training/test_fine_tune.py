"""`calgp train --network`: a pretrained network with a GP head, trained on; its run folder needs the network no more.

A network is followed by torch.export in processes of their own, as users' are: the checks of types are not to be.
"""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import calgp
from calgp import cli
from calgp.data import load
from calgp.errors import CalgpError
from calgp.nets import program_features
from calgp.nets.pretrained_backbone import PROGRAMS
from calgp.runs import RunFolder
from calgp.training.loop import make_optimiser
from folders import exported, made_once
from forked import python

NETWORK = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.Hardswish())

    def forward(self, x):
        return x + self.layers(x)

def make():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 5, 2), nn.BatchNorm2d(8), nn.ReLU6(), Block(), nn.Dropout(0.5), nn.AdaptiveAvgPool2d(3)]
    network = nn.Sequential(*layers, nn.Flatten(), nn.Linear(72, 4))
    for each in network.modules():
        if isinstance(each, nn.BatchNorm2d):
            nn.init.uniform_(each.running_mean, -0.1, 0.1)
            nn.init.uniform_(each.running_var, 0.5, 1.5)
    network.preprocessing = {"size": 20, "mean": [0.5] * 3, "std": [0.25] * 3}
    return network
"""
GRADIENTS = """
import torch
from network import make
from calgp.gp import UNMASKED
from calgp.nets import Pretrained, Task
from calgp.nets.pretrained import find_network

network, task = make().eval(), Task(3, 20, 20, classes=2)
extractor = find_network("network.py:make")
spec = Pretrained("network.py:make").follow(extractor, task)
features = spec.build(task, UNMASKED)
x = torch.rand(5, 3, 20, 20)
c, expected = features.stem(x), network[:-1]((x - 0.5) / 0.25)
weights = torch.randn_like(c)
(weights * c).sum().backward()
(weights * expected).sum().backward()
own = [each.grad for each in features.parameters() if each.requires_grad]
theirs = [each.grad for each in network[:-1].parameters()]
assert torch.allclose(c, expected, atol=1e-5)
assert len(own) == len(theirs) and all(torch.allclose(*pair, atol=1e-4) for pair in zip(own, theirs))
mirrored = spec.choose(task, mirror=True).build(task, UNMASKED)
assert mirrored.stem(x).equal(c)  # training sees images as they are
assert torch.allclose(mirrored.eval().stem(x), (c + features.stem(x.flip(-1))) / 2, atol=1e-5)
print("the same")
"""
STOPPED = """
import os, signal, calgp

def watch(step):
    if step.stage is None and step.step == 4:
        os.kill(os.getpid(), signal.SIGINT)

try:
    calgp.train("photos", network="network.py:make", out="stopped", epochs=2, holdout=0.2, batch_size=20, watch=watch)
except calgp.CalgpError as error:
    print(error)
"""
TRAIN = ("train", "--network", "network.py:make", "--source", "folder:photos", "--epochs", "2", "--holdout", "0.2",
         "--batch-size", "20")  # fmt: skip


def script(text: str) -> str:
    done = python("-c", text)
    assert done.returncode == 0, done.stderr
    return done.stdout


def call(*command):
    result = CliRunner().invoke(cli.app, list(map(str, command)))
    return result.exit_code, result.output if result.exception is None else str(result.exception)


def make_place(folder: Path) -> None:
    """150 images of three classes, each of its own size, and a run of `calgp train --network` on them."""
    folder.mkdir()
    (folder / "network.py").write_text(NETWORK)
    digits, before = load("digits", "train"), Path.cwd()
    for label in (0, 1, 7):
        place = folder / "photos" / str(label)
        place.mkdir(parents=True)
        for k, row in enumerate((digits.y == label).nonzero()[:50, 0].tolist()):
            image = Image.fromarray(digits.x[row, 0].numpy()).convert("RGB")
            image.resize((28 + k % 5, 30)).save(place / f"{k:02d}.png")
    os.chdir(folder)
    try:
        exported(*TRAIN, "--out", "mine")
    finally:
        os.chdir(before)


@pytest.fixture
def place(tmp_path_factory, tmp_path, monkeypatch):
    """A copy of that folder, as the working directory."""
    shutil.copytree(made_once(tmp_path_factory, "fine-tuned", make_place), tmp_path / "place")
    monkeypatch.chdir(tmp_path / "place")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.environ.get("PYTHONPATH", ""), "."]))
    return tmp_path / "place"


@pytest.mark.slow
def test_a_run_needs_its_network_no_more(place):
    """Every command takes the folder in another process, without the file that made the network."""
    Path("network.py").unlink()
    before = calgp.load("mine")
    assert before.card.network == "network.py:make" and before.card.task.height == 20
    for command in (["evaluate", "mine"], ["predict", "mine", "photos/7"], ["report", "mine"], ["verify", "mine"]):
        status, output = call(*command)
        assert status == 0, (command, output)
    scores = calgp.load("mine").folder.evaluation(
        "folder:photos", None if before.calibration is None else "temperature"
    )
    assert scores.scores.err < 0.2  # it has learned: chance is 0.67
    drawn = before.predict("photos/7", passes=100, engine="samples")  # the masks of the head; the network runs once
    assert (drawn.probs - before.predict("photos/7").probs).abs().max() < 0.2
    exported("export", "mine", "--to", "onnx")
    x = np.random.default_rng(0).integers(0, 256, (4, 3, 20, 20), dtype=np.uint8)
    session = onnxruntime.InferenceSession("mine/model.onnx")
    given = session.run(["probabilities"], {session.get_inputs()[0].name: x.astype(np.float32) / 255})[0]
    assert np.abs(given - before.predict(x).probs.numpy()).max() < 1e-5


@pytest.mark.slow
def test_training_changes_weights_and_not_the_statistics_of_batch_norm(place):
    (features,) = program_features(calgp.load("mine").model)
    statistics = {name: each for name, each in named(features).items() if "running" in name}
    first = {}
    exec(compile(NETWORK, "network.py", "exec"), first)  # noqa: S102
    network = first["make"]()
    theirs = {name: each for name, each in network.named_buffers() if "running" in name}
    assert len(statistics) == len(theirs) == 4
    for mine, own in zip(statistics.values(), theirs.values(), strict=True):
        assert torch.equal(mine, own)
    trained = [each for each in features.parameters() if each.requires_grad]
    moved = [(mine - own).abs().max() for mine, own in zip(trained, network[:-1].parameters(), strict=True)]
    assert min(moved) > 0 and max(moved) < 0.05


def named(features) -> dict[str, torch.Tensor]:
    program = features.program
    return {name: getattr(program, own) for name, own in program.names.items()}


@pytest.mark.slow
def test_its_gradients_are_the_networks_own(place):
    assert script(GRADIENTS) == "the same\n"


@pytest.mark.slow
def test_a_stopped_training_goes_on_to_the_same_bits(place):
    assert "Stopped after step 4 of 10" in script(STOPPED)
    assert not Path("stopped/model.safetensors").exists()
    Path("network.py").unlink()  # what is resumed has its network, too
    exported("train", "--resume", "stopped")
    assert Path("stopped/model.safetensors").read_bytes() == Path("mine/model.safetensors").read_bytes()


@pytest.mark.slow
def test_rates_grow_with_depth(place):
    run = calgp.load("mine")
    groups = make_optimiser(run.card.run, run.model).param_groups
    shares = [group["share"] for group in groups]
    assert shares[0] == pytest.approx(0.05 * 0.1) and shares[-2:] == [pytest.approx(0.05), 0.25]
    assert shares == sorted(shares)
    in_order = [each for group in groups for each in group["params"]]
    expected = [each for each in run.model.parameters() if each.requires_grad]
    assert all(one is other for one, other in zip(in_order, expected, strict=True))  # checkpoints count by place


@pytest.mark.slow
def test_a_folder_with_another_program_is_refused(place):
    path = Path("mine/network.json")
    described = json.loads(path.read_text())
    assert described["steps"][0][1].startswith("aten.")
    path.write_text(json.dumps(described | {"width": 71}))
    with pytest.raises(CalgpError, match="it is not the network that run"):
        RunFolder("mine").card()
    path.unlink()
    PROGRAMS.clear()
    with pytest.raises(CalgpError, match="is missing: network"):
        calgp.load("mine")


def test_refused_options(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("network.py").write_text(NETWORK)
    ours = ("train", "--network", "network.py:make", "--source", "digits")
    for command, message in (
        ((*ours, "--backbone", "resnet"), "both name the network"),
        ((*ours, "--normalise", "standard"), "normalises images as it was trained"),
        ((*ours, "--method", "cgp"), "has no network"),
        (("train", "--weights", "w.safetensors"), "without --network"),
        (("train", "--network", "resnet18"), "there is none called 'resnet18'"),
        ((*ours, "--resume", "network.py"), "give no other options"),
    ):
        status, output = call(*command)
        assert status == 1 and message in output, (command, output)
