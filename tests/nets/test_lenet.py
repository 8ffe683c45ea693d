import numpy as np
import pytest
import torch
from torch import nn

import reference
from calgp.errors import CalgpError
from calgp.gp import UNMASKED, Masking, Noise, name_sites
from calgp.nets import BACKBONES, LeNet, Task

MNIST, CIFAR = Task(1, 28, 28, 10), Task(3, 32, 32, 10)
ROUNDING = {"rtol": 1e-10, "atol": 1e-12}  # float64, sums of up to 1600 terms in another order


def build(spec, task, masking=UNMASKED, seed=0):
    return spec.build(task, masking, generator=torch.Generator().manual_seed(seed))


def images(task, n=2, seed=0):
    return torch.randn(n, task.channels, task.height, task.width, generator=torch.Generator().manual_seed(seed))


def features(net, x, noise=None):
    return net(net.stem(x), noise)


@pytest.mark.parametrize(
    ("name", "task", "d"),
    [("lenet", MNIST, 4096), ("lenet-cifar", CIFAR, 4096), ("lenet-3", CIFAR, 1024), ("lenet-cifar", MNIST, 4096)],
)
def test_number_of_features_of_table_1(name, task, d):
    net = build(BACKBONES[name], task)
    assert net.out_features == d
    assert features(net, images(task)).shape == (2, d)


@pytest.mark.parametrize("task", [Task(2, 32, 32, 3), Task(5, 40, 33, 3), Task(1, 7, 50, 3)])
@pytest.mark.parametrize("pool", [2, 3])
def test_any_number_of_channels_and_any_image_size(task, pool):
    net = build(LeNet(channels=(3, 4), pool=pool), task)
    assert features(net, images(task)).shape == (2, net.out_features)


def test_masks_are_before_every_convolution_but_the_first():
    spec = LeNet(channels=(2, 3, 4))
    assert list(name_sites(build(spec, CIFAR, Masking()))) == ["convolutions.1.mask", "convolutions.2.mask"]


def test_masks_can_be_before_the_first_too():
    net = build(LeNet(channels=(2, 3), mask_first=True), CIFAR, Masking())
    assert list(name_sites(net)) == ["convolutions.0.mask", "convolutions.1.mask"]
    x = images(CIFAR)
    noise = Noise(0, torch.arange(3), torch.arange(2))
    assert net.stem(x).shape == (2, 3, 32, 32)
    assert features(net, x, noise).shape == (6, net.out_features)


@pytest.mark.parametrize("mask_first", [False, True])
@pytest.mark.parametrize("granularity", ["element", "channel", "shared"])
def test_samples_are_what_each_would_be_alone(mask_first, granularity):
    net = build(LeNet(channels=(3, 4), mask_first=mask_first), MNIST, Masking(0.5, granularity)).double()
    name_sites(net)
    x = images(MNIST, 3).double()
    together = features(net, x, Noise(0, torch.arange(4), torch.arange(3))).unflatten(0, (4, 3))
    for s in range(4):
        alone = features(net, x[[1]], Noise(0, torch.tensor([s]), torch.tensor([1])))
        torch.testing.assert_close(together[s, 1], alone[0], **ROUNDING)


def test_the_stem_is_exactly_what_no_sample_changes():
    """It is the same with and without masks, and the next thing that happens is the first mask."""
    masked, plain = (build(LeNet(channels=(3, 4)), MNIST, masking) for masking in (Masking(), UNMASKED))
    plain.load_state_dict(masked.state_dict())
    x = images(MNIST)
    assert torch.equal(masked.stem(x), plain.stem(x))
    calls = []
    masked.convolutions[1].mask.register_forward_hook(lambda module, inputs, output: calls.append(inputs[0]))
    stem = masked.stem(x)
    assert calls == []
    masked(stem)
    assert calls[0] is stem


def weights(convolution):
    return convolution.weight.detach().numpy(), convolution.bias.detach().numpy()


@pytest.mark.parametrize("task", [MNIST, Task(2, 35, 32, 3)])
def test_mnist_network_equals_the_straightforward_one(task):
    """Zeros to 32 × 32; convolution, ReLU, pooling, twice, in NumPy and in that order."""
    net = build(LeNet(channels=(3, 4)), task).double()
    x = images(task).double()
    h = x.numpy()
    pads = [(max(32 - side, 0) // 2, max(32 - side, 0) - max(32 - side, 0) // 2) for side in h.shape[2:]]
    h = np.pad(h, [(0, 0), (0, 0), *pads])
    for convolution in net.convolutions:
        h = np.maximum(reference.conv_same(h, *weights(convolution), 1), 0)
        h = reference.max_pool_same(h, 2, 2)
    np.testing.assert_allclose(features(net, x).detach(), h.reshape(2, -1), **ROUNDING)


@pytest.mark.parametrize("task", [CIFAR, Task(2, 33, 34, 3)])
def test_cifar_network_equals_the_straightforward_one(task):
    """Convolution, ReLU, pooling 3/2, normalisation; then convolution, ReLU, normalisation, pooling, twice."""
    net = build(LeNet(channels=(12, 11, 4), pool=3, normalise=True), task).double()
    x = 3 * images(task).double()
    h = x.numpy()
    for i, convolution in enumerate(net.convolutions):
        h = np.maximum(reference.conv_same(h, *weights(convolution), 1), 0)
        steps = [lambda h: reference.max_pool_same(h, 3, 2), reference.local_response_norm]
        for step in steps if i == 0 else reversed(steps):
            h = step(h)
    np.testing.assert_allclose(features(net, x).detach(), h.reshape(2, -1), **ROUNDING)


def test_local_response_normalisation_is_tensorflows():
    net = build(LeNet(normalise=True), MNIST)
    x = 100 * torch.randn(2, 20, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = reference.local_response_norm(x.numpy())
    assert np.abs(expected - x.numpy()).max() > 1  # it does something here
    np.testing.assert_allclose(net.response_norm(x), expected, **ROUNDING)


@pytest.mark.parametrize("name", ["lenet", "lenet-cifar"])
def test_memory_layout_does_not_matter(name):
    net, x = build(BACKBONES[name], CIFAR, Masking()), images(CIFAR)
    name_sites(net)
    noise = Noise(0, torch.arange(2), torch.arange(2))
    expected = features(net, x, noise)
    torch.testing.assert_close(features(net, x.contiguous(memory_format=torch.channels_last), noise), expected)
    in_memory = net.to(memory_format=torch.channels_last)
    torch.testing.assert_close(features(in_memory, x, noise), expected, rtol=1e-4, atol=1e-4)  # float32, other sums


def test_kl_counts_each_filter_once_with_its_own_factor():
    """½ for the first convolution and for biases, π/2 for the other filters."""
    net = build(LeNet(channels=(2, 3, 4)), CIFAR, Masking(0.3)).double()
    net.kl().backward()
    for i, convolution in enumerate(net.convolutions):
        factor = 1 if i == 0 else 0.3
        torch.testing.assert_close(convolution.weight.grad, factor * convolution.weight.detach())
        torch.testing.assert_close(convolution.bias.grad, convolution.bias.detach())


def test_weights_come_from_the_generator_alone():
    before = torch.get_rng_state()
    one, same, other = (build(BACKBONES["lenet"], MNIST, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(
        nn.utils.parameters_to_vector(one.parameters()), nn.utils.parameters_to_vector(same.parameters())
    )
    assert not torch.equal(one.convolutions[0].weight, other.convolutions[0].weight)


def test_filters_start_with_the_authors_standard_deviation():
    """Truncated normal of 0.1: 0.088 after the cut."""
    net = build(BACKBONES["lenet"], MNIST)
    assert net.convolutions[1].weight.std().item() == pytest.approx(0.08796, rel=0.02)  # 51,200 numbers


@pytest.mark.parametrize("options", [{"channels": ()}, {"channels": (8, 0)}, {"pool": 1}, {"hidden": (0,)}])
def test_a_lenet_that_cannot_be_is_refused(options):
    with pytest.raises(CalgpError, match=rf"Invalid {next(iter(options))}=.*: must be a whole number from"):
        LeNet(**options)
