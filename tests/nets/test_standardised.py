import numpy as np
import pytest
import torch

from calgp.errors import CalgpError
from calgp.gp import UNMASKED
from calgp.methods import METHODS
from calgp.nets import LeNet, ResNet, Standardised, Task, standardisers
from calgp.nets.standardised import channel_moments

RGB = torch.randint(256, (50, 3, 9, 7), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
RGB[:, 1] //= 2
SMALL = {"lenet": LeNet(channels=(4, 8)), "lenet-cifar": LeNet(channels=(4, 4), pool=3, normalise=True)}
SMALL |= {"resnet": ResNet(n=1, widths=(4, 8, 8))}


def test_moments_are_those_of_the_pixels():
    mean, std = channel_moments(RGB)
    pixels = RGB.numpy() / 255
    # double precision on both sides
    np.testing.assert_allclose(mean, pixels.mean((0, 2, 3)), rtol=1e-12)
    np.testing.assert_allclose(std, pixels.std((0, 2, 3)), rtol=1e-12)


def test_the_network_sees_mean_0_and_deviation_1_and_a_constant_channel_as_0():
    x = RGB.clone()
    x[:, 2] = 77
    features = Standardised(SMALL["lenet"]).build(Task(3, 9, 7, 5), UNMASKED, generator=torch.Generator())
    features.fit(x)
    seen = []
    features.network.stem = lambda x: seen.append(x)
    features.stem(x.float() / 255)
    std, mean = torch.std_mean(seen[0], (0, 2, 3), correction=0)
    assert torch.allclose(mean, torch.zeros(3), atol=1e-5)  # float32, 3150 pixels
    assert torch.allclose(std[:2], torch.ones(2), atol=1e-5)
    assert seen[0][:, 2].abs().max() < 1e-6


def test_until_it_is_fitted_it_is_the_network_itself():
    task, x = Task(3, 9, 7, 5), RGB.float() / 255
    plain, wrapped = (
        backbone.build(task, UNMASKED, generator=torch.Generator().manual_seed(1))
        for backbone in (SMALL["lenet"], Standardised(SMALL["lenet"]))
    )
    assert plain(plain.stem(x)).equal(wrapped(wrapped.stem(x)))
    assert wrapped.out_features == plain.out_features and Standardised(SMALL["lenet"]).hidden == SMALL["lenet"].hidden


@pytest.mark.parametrize("method", [name for name in METHODS if name != "cgp"])
def test_every_method_with_a_network_can_be_normalised(method):
    model = METHODS[method].build(Task(3, 9, 7, 5), Standardised(SMALL["lenet"]), generator=torch.Generator())
    (features,) = standardisers(model)
    features.fit(RGB)
    assert {"features.mean", "features.std"} <= model.state_dict().keys()


@pytest.mark.parametrize("backbone", SMALL)
@pytest.mark.parametrize("shape", [(1, 20, 20), (3, 28, 28), (1, 64, 64), (3, 96, 128), (1, 1, 4)])
def test_networks_take_images_of_any_size(backbone, shape):
    features = SMALL[backbone].build(Task(*shape, classes=3), UNMASKED, generator=torch.Generator())
    assert features(features.stem(torch.rand(2, *shape))).shape == (2, features.out_features)


def test_a_method_without_a_network_refuses(tmp_path):
    from calgp.runs import RunFolder, from_json
    from calgp.training import train_run

    run = from_json({"method": "cgp", "normalise": "standard", "train_size": 100, "steps": 1})
    with pytest.raises(CalgpError, match="cgp has no network to normalise images for"):
        train_run(run, RunFolder(tmp_path / "run"))
