import numpy as np
import pytest
import torch
from torch.nn import functional as F

import reference
from calgp.gp import Bound, predict
from calgp.methods import Cnn
from calgp.nets import BACKBONES, LeNet, ResNet, Task

SMALL = LeNet(channels=(4, 4), hidden=(16, 12))
TASK = Task(1, 28, 28, 5)


def build(backbone=SMALL, task=TASK, seed=0):
    return Cnn().build(task, backbone, generator=torch.Generator().manual_seed(seed))


def images(n=4, seed=0):
    return torch.randn(n, 1, 28, 28, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("backbone", "task", "widths"),
    [
        (BACKBONES["lenet"], Task(1, 28, 28, 10), [4096, 1024, 10]),
        (BACKBONES["lenet-cifar"], Task(3, 32, 32, 10), [4096, 384, 192, 10]),
        (ResNet(n=1), Task(3, 32, 32, 100), [64, 100]),
    ],
)
def test_fully_connected_widths(backbone, task, widths):
    layers = build(backbone, task).layers
    assert [layers[0].weight.shape[0]] + [layer.weight.shape[1] for layer in layers] == widths


def test_logits_are_those_of_the_features_through_the_fully_connected_layers():
    """ReLU between the layers, none after the last."""
    model, x = build().double(), images().double()
    h = model.features(model.features.stem(x)).detach().numpy()
    for i, layer in enumerate(model.layers):
        h = (np.maximum(h, 0) if i else h) @ layer.weight.detach().numpy() + layer.bias.detach().numpy()
    np.testing.assert_allclose(model(x).mean.detach()[0], h, rtol=1e-10, atol=1e-12)


def test_it_has_no_masks_and_is_the_same_at_every_call():
    model, x = build(), images()
    assert model.sites() == {}
    assert torch.equal(model(x).mean, model(x).mean)


def test_its_bound_is_the_cross_entropy():
    model, x, y = build(), images(), torch.tensor([0, 4, 2, 2])
    nll, kl = Bound(model, n=7)(x, y)
    assert kl == 0
    torch.testing.assert_close(nll, F.cross_entropy(model(x).mean[0], y))


def test_it_predicts_its_softmax_from_one_sample_without_variance():
    model, x = build(), images()
    result = predict(model, x, samples=50, seed=3)
    assert result.samples == 1
    assert (result.variance == 0).all()
    assert (result.mutual_information < 1e-6).all()  # two ways to one number, in float32
    np.testing.assert_allclose(result.probs, reference.softmax(model(x).mean[0].detach().numpy()), atol=1e-6)


def test_fully_connected_weights_start_at_the_scale_of_their_inputs():
    """Truncated normal of in^-½ (0.88 of it after the cut), so that logits start near unit scale."""
    layer = build(BACKBONES["lenet"], Task(1, 28, 28, 10)).layers[0]
    assert layer.weight.std().item() == pytest.approx(0.88 / 64, rel=0.02)
