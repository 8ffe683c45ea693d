import numpy as np
import pytest
import torch
from torch import nn

import reference
from calgp.errors import CalgpError
from calgp.gp import UNMASKED, MaskedConv2d, Masking, Noise, name_sites, predict
from calgp.methods import METHODS
from calgp.nets import BACKBONES, ResNet, Task
from calgp.nets.resnet import Block

SMALL = ResNet(n=1, widths=(4, 6, 9), pad_to=8)
ROUNDING = {"rtol": 1e-10, "atol": 1e-11}  # float64, ten layers of sums in another order


def build(spec, task, masking=UNMASKED, seed=0):
    return spec.build(task, masking, generator=torch.Generator().manual_seed(seed))


def images(n, *shape, seed=0):
    return torch.randn(n, *shape, generator=torch.Generator().manual_seed(seed))


def features(net, x, noise=None):
    return net(net.stem(x), noise)


def unsettled(net, seed=0):
    """Batch norm with statistics and weights that are not those it starts with."""
    generator = torch.Generator().manual_seed(seed)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.running_mean, module.bias.data):
                tensor.copy_(0.3 * torch.randn(tensor.shape, generator=generator))
            for tensor in (module.running_var, module.weight.data):
                tensor.copy_(0.5 + torch.rand(tensor.shape, generator=generator))
    return net


@pytest.mark.parametrize("n", [1, 2, 5])
def test_there_are_six_n_plus_one_convolutions(n):
    net = build(ResNet(n=n), Task(3, 32, 32, 10))
    assert sum(isinstance(module, MaskedConv2d) for module in net.modules()) == 6 * n + 1


def test_number_of_features_of_table_1():
    net = build(BACKBONES["resnet"], Task(3, 32, 32, 10)).eval()
    assert net.spec.n == 5
    assert net.out_features == 64
    assert features(net, images(2, 3, 32, 32)).shape == (2, 64)


def test_stages_halve_the_image_and_double_the_channels():
    net, shapes = build(ResNet(n=1), Task(3, 32, 32, 10)).eval(), []
    for block in net.blocks:
        block.register_forward_hook(lambda module, inputs, output: shapes.append(tuple(output.shape[1:])))
    features(net, images(1, 3, 32, 32))
    assert shapes == [(16, 32, 32), (32, 16, 16), (64, 8, 8)]


@pytest.mark.parametrize("channels", [1, 3, 5])
@pytest.mark.parametrize("size", [(32, 32), (9, 9), (7, 13), (33, 40), (1, 1)])
def test_any_number_of_channels_and_any_image_size(channels, size):
    net = build(SMALL, Task(channels, *size, 10), Masking()).eval()
    name_sites(net)
    noise = Noise(0, torch.arange(3), torch.arange(2))
    c = features(net, images(2, channels, *size), noise)
    assert c.shape == (6, 9)
    assert c.isfinite().all()


def test_masks_are_before_every_convolution_but_the_first():
    task = Task(3, 8, 8, 10)
    blocks = [f"blocks.{i}.convolution{j}.mask" for i in range(3) for j in (1, 2)]
    assert list(name_sites(build(SMALL, task, Masking()))) == blocks
    first = ResNet(n=1, widths=(4, 6, 9), pad_to=8, mask_first=True)
    assert list(name_sites(build(first, task, Masking()))) == ["first.mask", *blocks]


@pytest.mark.parametrize("mask_first", [False, True])
def test_samples_are_what_each_would_be_alone(mask_first):
    spec = ResNet(n=2, widths=(4, 6, 9), pad_to=8, mask_first=mask_first)
    net = unsettled(build(spec, Task(3, 9, 8, 10), Masking())).double().eval()
    name_sites(net)
    x = images(3, 3, 9, 8).double()
    together = features(net, x, Noise(0, torch.arange(4), torch.arange(3))).unflatten(0, (4, 3))
    for s in range(4):
        alone = features(net, x[[1]], Noise(0, torch.tensor([s]), torch.tensor([1])))
        torch.testing.assert_close(together[s, 1], alone[0], **ROUNDING)


def test_the_stem_is_exactly_what_no_sample_changes():
    net = build(SMALL, Task(3, 8, 8, 10), Masking()).eval()
    x, calls = images(2, 3, 8, 8), []
    net.blocks[0].convolution1.mask.register_forward_hook(lambda module, inputs, output: calls.append(inputs[0]))
    stem = net.stem(x)
    assert calls == []
    assert torch.equal(stem, net.stem(x))
    net(stem)
    assert calls[0] is stem


def norm(layer, h):
    mean, var, scale, shift = (
        tensor.detach().numpy()[:, None, None]
        for tensor in (layer.running_mean, layer.running_var, layer.weight, layer.bias)
    )
    return (h - mean) / np.sqrt(var + 1e-3) * scale + shift


@pytest.mark.parametrize("size", [(8, 8), (9, 11)])
def test_network_equals_the_straightforward_one(size):
    """Pre-activation blocks in NumPy, with batch norm's running statistics."""
    net = unsettled(build(ResNet(n=2, widths=(4, 6, 9), pad_to=8), Task(3, *size, 10))).double().eval()
    x = images(2, 3, *size).double()
    h = reference.conv_same(x.numpy(), net.first.weight.detach().numpy(), None, 1)
    h = np.maximum(norm(net.first_norm, h), 0)
    for i, block in enumerate(net.blocks):
        stride = 2 if i in (2, 4) else 1
        inside = h if i == 0 else np.maximum(norm(block.norm1, h), 0)
        inside = reference.conv_same(inside, block.convolution1.weight.detach().numpy(), None, stride)
        inside = np.maximum(norm(block.norm2, inside), 0)
        inside = reference.conv_same(inside, block.convolution2.weight.detach().numpy(), None, 1)
        h = inside + shortcut(h, stride, inside.shape[1] - h.shape[1])
    h = np.maximum(norm(net.last_norm, h), 0).mean((2, 3))
    np.testing.assert_allclose(features(net, x).detach(), h, **ROUNDING)


def shortcut(h, stride, widening):
    """Means of 2 × 2 pixels (of those that are there), and zero channels on both sides."""
    if stride == 2:
        rows, columns = (range(0, side, 2) for side in h.shape[2:])
        h = np.stack([np.stack([h[:, :, i : i + 2, j : j + 2].mean((2, 3)) for j in columns], 2) for i in rows], 2)
    low = widening // 2
    return np.pad(h, [(0, 0), (low, widening - low), (0, 0), (0, 0)])


def test_shortcut_puts_zero_channels_on_both_sides():
    block = Block(16, 32, stride=2, activated=False, posterior=UNMASKED, generator=None)
    out = block._shortcut(torch.ones(1, 16, 4, 4))
    assert out.shape == (1, 32, 2, 2)
    assert (out[:, 8:24] == 1).all()
    assert (out[:, :8] == 0).all() and (out[:, 24:] == 0).all()


def test_evaluation_uses_running_statistics_and_leaves_them():
    net = unsettled(build(SMALL, Task(3, 8, 8, 10))).eval()
    state = {name: value.clone() for name, value in net.state_dict().items()}
    x = images(6, 3, 8, 8)
    whole, part = features(net, x), features(net, x[:2])
    torch.testing.assert_close(whole[:2], part, rtol=1e-4, atol=1e-5)  # float32: does not depend on the batch
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())
    net.train()
    assert not torch.allclose(features(net, x)[:2], part, atol=1e-2)
    assert not torch.equal(net.state_dict()["first_norm.running_mean"], state["first_norm.running_mean"])


def test_small_images_are_padded():
    net = build(ResNet(n=1), Task(1, 28, 28, 10)).eval()
    x = images(1, 1, 28, 28)
    padded = nn.functional.pad(x, (2, 2, 2, 2))
    torch.testing.assert_close(features(net, x), features(net, padded))


def test_memory_layout_does_not_matter():
    net, x = build(SMALL, Task(3, 8, 8, 10), Masking()).eval(), images(2, 3, 8, 8)
    name_sites(net)
    noise = Noise(0, torch.arange(2), torch.arange(2))
    expected = features(net, x, noise)
    torch.testing.assert_close(features(net, x.contiguous(memory_format=torch.channels_last), noise), expected)
    in_memory = net.to(memory_format=torch.channels_last)
    torch.testing.assert_close(features(in_memory, x, noise), expected, rtol=1e-4, atol=1e-4)  # float32, other sums


def test_kl_counts_each_filter_once_and_batch_norm_not_at_all():
    net = build(SMALL, Task(3, 8, 8, 10), Masking(0.3)).double()
    net.kl().backward()
    for name, parameter in net.named_parameters():
        if "norm" in name:
            assert parameter.grad is None
        else:
            factor = 1 if name == "first.weight" else 0.3
            torch.testing.assert_close(parameter.grad, factor * parameter.detach())


def test_weights_start_with_xavier_from_the_generator_alone():
    before = torch.get_rng_state()
    one, same = (build(ResNet(n=1), Task(3, 32, 32, 10)) for _ in range(2))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(
        nn.utils.parameters_to_vector(one.parameters()), nn.utils.parameters_to_vector(same.parameters())
    )
    weight = one.blocks[2].convolution2.weight  # 64 → 64: uniform within √(6 / (2 · 64 · 9))
    assert weight.abs().max().item() == pytest.approx((6 / 1152) ** 0.5, rel=1e-3)


def test_some_block_is_needed():
    with pytest.raises(CalgpError, match="n=0: must be a whole number from 1"):
        ResNet(n=0)


def test_batch_moments_make_predictions_depend_on_the_batch_and_running_ones_do_not():
    x = images(6, 1, 8, 8)
    for moments, alike in ((False, True), (True, False)):
        net = build(ResNet(n=1, widths=(4, 6, 9), pad_to=8, batch_moments=moments), Task(1, 8, 8, 3)).eval()
        assert torch.allclose(features(net, x)[:3], features(net, x[:3]), atol=1e-6) is alike
        assert any("running" in name for name in net.state_dict()) is not moments


def test_batch_moments_are_those_of_the_batch_that_was_given_one_sample_at_a_time():
    """By hand: each sample is a pass over all 100 images, whose moments batch norm takes."""
    backbone, task = ResNet(n=1, widths=(4, 6, 9), pad_to=8, batch_moments=True), Task(1, 8, 8, 3)
    model = METHODS["cnn-gp-sorf-paper"].build(task, backbone, generator=torch.Generator().manual_seed(0)).eval()
    x, rows = images(150, 1, 8, 8), torch.arange(150)
    model.sites()
    with torch.no_grad():
        by_hand = torch.cat([
            torch.stack([
                model(x[part], Noise(7, torch.tensor([s]), rows[part])).mean[0].softmax(-1) for s in range(5)
            ]).mean(0)
            for part in (slice(0, 100), slice(100, 150))
        ])  # fmt: skip
    torch.testing.assert_close(predict(model, x, passes=5, seed=7).probs, by_hand, rtol=0, atol=1e-5)
