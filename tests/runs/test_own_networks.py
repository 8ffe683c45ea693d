"""Runs of networks that calgp does not know: trained, kept, and loaded only where they are given again."""

import dataclasses
import json
import os
import signal
import sys

import pytest
import torch
from torch import nn

from calgp.errors import CalgpError
from calgp.gp import predict
from calgp.methods import METHODS
from calgp.nets import BACKBONES
from calgp.nets.wrap import NETWORKS, Wrapped, wrap
from calgp.runs import Interrupted, Run, RunFolder, from_json, to_json
from calgp.training import train_run
from folders import evaluate, tensors


@pytest.fixture(autouse=True)
def _fresh_registry():
    before = dict(NETWORKS)
    NETWORKS.clear()
    torch.manual_seed(0)
    yield
    NETWORKS.clear()
    NETWORKS.update(before)


def tied():
    """Batch norm, and two layers that share their weights."""
    network = nn.Sequential(
        nn.Conv2d(1, 4, 5, stride=3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(256, 8), nn.ReLU(),
        nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 10),
    )  # fmt: skip
    network[8].weight = network[6].weight
    return network


def run(**options):
    spec = wrap(tied(), name="tied", **options)
    return Run(METHODS["cnn-gp-sorf"], spec, train_size=100, batch_size=50, steps=4, holdout=0.1)


def test_a_run_is_kept_with_its_tied_weights_and_loaded_where_the_network_is_given(tmp_path, fabric):
    folder, x = RunFolder(tmp_path / "run"), torch.rand(5, 1, 28, 28)
    model = train_run(run(), folder, fabric).model
    expected = predict(model, x, passes=4).log_probs
    NETWORKS.clear()
    assert folder.card().network == "Wrapped network=tied"  # what it is can be read, and nothing more
    with pytest.raises(CalgpError, match=r"'tied' is somebody's own and not known here: give it with calgp\.wrap"):
        folder.model()
    torch.manual_seed(5)
    wrap(tied(), name="tied")
    loaded = folder.model()
    assert loaded.features.network[6].weight is loaded.features.network[8].weight
    assert predict(loaded, x, passes=4).log_probs.equal(expected)
    assert evaluate(folder, fabric, passes=2).own.scores.err <= 1
    stored = tensors(folder, "model.safetensors")
    assert stored["features.network.6.weight"].equal(stored["features.network.8.weight"])
    wrap(
        nn.Sequential(nn.Conv2d(1, 4, 5), nn.ReLU(), nn.Conv2d(4, 9, 5), nn.Flatten(), nn.Linear(3600, 2)), name="tied"
    )
    with pytest.raises(CalgpError, match="does not fit the model"):
        folder.model()


@pytest.mark.parametrize("freeze", [False, True])
def test_a_run_resumes_to_the_same_bits(tmp_path, fabric, freeze):
    this = run(freeze=freeze)
    whole = train_run(this, RunFolder(tmp_path / "whole"), fabric).model.state_dict()
    folder = RunFolder(tmp_path / "parts")

    def interrupt(step):
        if step.step == 2:
            os.kill(os.getpid(), signal.SIGINT)  # Ctrl-C

    with pytest.raises(Interrupted):
        train_run(this, folder, fabric, watch=interrupt)
    resumed = train_run(this, folder, fabric, resume=True).model.state_dict()
    assert all(value.equal(resumed[key]) for key, value in whole.items())
    statistics = whole["features.network.1.running_mean"]
    assert statistics.any()  # estimated again, frozen or not


def test_as_data_it_is_a_name_and_options():
    spec = wrap(tied, name="tied", mask=lambda name: name == "6", mean=[0.5], std=[0.25], freeze=True)
    described = json.loads(json.dumps(to_json(Run(METHODS["cnn-mcd"], spec))))
    assert from_json(described).backbone == spec
    assert described["backbone"]["mask"] == ["6"]
    label = Run(METHODS["cnn-mcd"], spec).backbone_label
    assert label == "Wrapped network=tied mask=('6',) freeze=True mean=(0.5,) std=(0.25,)"
    with pytest.raises(CalgpError, match="mask"):
        from_json({"backbone": {"kind": "Wrapped", "network": "tied", "mask": "some"}})
    with pytest.raises(CalgpError, match="no option 'factory'"):
        from_json({"backbone": {"kind": "Wrapped", "network": "tied", "factory": "os:getcwd"}})


@pytest.mark.parametrize("name", ["antigravity:main", "trap:make", "trap.py:make", "../trap.py", "__import__('trap')"])
def test_a_hostile_run_folder_imports_nothing(tmp_path, fabric, monkeypatch, name):
    (tmp_path / "trap.py").write_text("raise SystemExit('executed')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    folder = RunFolder(tmp_path / "run")
    train_run(run(), folder, fabric)
    data = json.loads((folder.path / "run.json").read_text())
    data["run"]["backbone"]["network"] = name
    (folder.path / "run.json").write_text(json.dumps(data))
    before = set(sys.modules)
    with pytest.raises(CalgpError, match="not known here"):
        folder.model()
    assert set(sys.modules) == before


def test_a_backbone_of_ones_own_can_have_a_name_in_the_table(monkeypatch):
    monkeypatch.setitem(BACKBONES, "mine", wrap(tied, name="mine"))
    found = from_json({"backbone": {"name": "mine", "freeze": True}})
    assert found.backbone == dataclasses.replace(BACKBONES["mine"], freeze=True)
    assert isinstance(found.backbone, Wrapped)
    assert found.backbone_label == "mine freeze=True"
