"""The scale of the prior, from the features of the training images."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.spatial.distance import pdist

from calgp.data import load
from calgp.gp import Noise, name_sites
from calgp.methods import METHODS
from calgp.nets import LeNet, ResNet, Task
from calgp.runs import RunFolder, from_json
from calgp.runs.description import from_folder
from calgp.training import train_run

TASK = Task(1, 28, 28, 10)
TRAIN = load("digits", "train").balanced(200, 0)
NETS = {"lenet": LeNet(channels=(4, 8), hidden=(16,)), "resnet": ResNet(n=1, widths=(4, 8, 8))}
SCALED = ["cnn-gp-rf", "cnn-gp-sorf", "cnn-dgp", "cnn-gp-mf", "cnn-laplace"]


def started(name, net="lenet", **options):
    """The model of a method before its first step, and its features of the training images, masks at their mean."""
    method = replace(METHODS[name], **options)
    model = method.build(TASK, NETS[net], generator=torch.Generator().manual_seed(0))
    name_sites(model)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    method.start(model, TRAIN, generator=torch.Generator().manual_seed(0))
    changed = {key for key, value in model.state_dict().items() if not value.equal(before[key])}
    with torch.no_grad():
        model.train()
        noise = Noise(0, torch.zeros(1, dtype=torch.long), torch.arange(len(TRAIN)), mean=True)
        c = model.features(model.stem(TRAIN.pixels()), noise)
    return model, c.double().numpy(), changed


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("scale", [16.0, 3.0])
@pytest.mark.parametrize("name", SCALED)
def test_functions_have_the_asked_deviation_on_training_images(name, scale, net):
    model, c, changed = started(name, net, scale=scale, sigma=0.7)
    assert changed and all(each.endswith("log_lengthscale") for each in changed)  # nor do batch norms remember
    kernel = (model.gp.process if name == "cnn-laplace" else model.gp.layers[0]).kernel
    lengthscale = kernel.lengthscale.item()
    norms = np.sort(np.linalg.norm(c, axis=1))
    median = norms[(len(norms) - 1) // 2]  # torch takes the lower of the two in the middle
    # features in batches of 250: with batch norm these are all 200 images
    assert 0.7 * median / lengthscale == pytest.approx(scale, rel=1e-4)


def test_each_layer_of_a_deep_gp_is_scaled_by_its_own_inputs():
    model, c, changed = started("cnn-dgp")
    assert len(changed) == 2
    noise = Noise(0, torch.zeros(1, dtype=torch.long), torch.arange(len(TRAIN)), mean=True)
    first, second = model.gp.layers
    with torch.no_grad():
        fed = torch.cat([first(torch.from_numpy(c).float(), noise), torch.from_numpy(c).float()], -1)
    deviation = second.kernel.diagonal(fed).sqrt().median().item()
    assert deviation == pytest.approx(16, rel=1e-4)


def test_rbf_has_the_median_distance_and_order_two_its_own_power():
    model, c, _ = started("cnn-gp-sorf", kernel="rbf")
    distances = np.sort(pdist(c))
    assert model.gp.layers[0].kernel.lengthscale.item() == pytest.approx(distances[(len(distances) - 1) // 2], rel=1e-3)
    model, c, _ = started("cnn-gp-sorf", kernel="arc-cosine-2")
    ratio = np.sort(np.linalg.norm(c, axis=1))[99] / model.gp.layers[0].kernel.lengthscale.item()
    assert ratio**2 == pytest.approx(16, rel=1e-4)


@pytest.mark.parametrize(
    ("options", "expected"), [({"lengthscale": 2.5}, 2.5), ({"scale": None}, math.sqrt(8 * 8 * 8))]
)
def test_a_given_lengthscale_wins_and_none_is_the_root_of_d(options, expected):
    model, _, changed = started("cnn-gp-sorf", **options)
    assert not changed and model.gp.layers[0].kernel.lengthscale.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", ["cnn-gp-rf-paper", "cnn-gp-sorf-paper"])
def test_the_papers_presets_keep_a_lengthscale_of_one(name):
    model, _, changed = started(name)
    assert not changed and model.gp.layers[0].kernel.lengthscale.item() == 1


def test_a_run_of_an_earlier_version_keeps_the_root_of_d():
    described = {"kind": "CnnGp", "frequencies": "sorf"}
    assert from_folder({"method": described}).method.scale is None


def test_blank_images_leave_the_lengthscale_as_it_was():
    blank = replace(TRAIN, x=torch.zeros_like(TRAIN.x))
    model = METHODS["cnn-gp-sorf"].build(TASK, LeNet(channels=(4,)), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model.features.convolutions[0].bias.zero_()
    name_sites(model)
    METHODS["cnn-gp-sorf"].start(model, blank, generator=torch.Generator().manual_seed(0))
    assert model.gp.layers[0].kernel.lengthscale.item() == pytest.approx(math.sqrt(4 * 16 * 16), rel=1e-6)


def test_the_lengthscale_is_stored_with_the_model(tmp_path):
    backbone = {"name": "lenet", "channels": [4, 8], "hidden": [16]}
    run = from_json({"backbone": backbone, "train_size": 100, "steps": 2})
    trained, folder = train_run(run, RunFolder(tmp_path / "run")), RunFolder(tmp_path / "run")
    found = [model.gp.layers[0].kernel.lengthscale.item() for model in (trained.model, folder.model())]
    assert found[0] == found[1] != pytest.approx(math.sqrt(8 * 8 * 8), rel=0.1)
