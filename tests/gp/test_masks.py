import math

import numpy as np
import pytest
import torch

import reference
from calgp.gp import UNMASKED, Mask, MaskedConv2d, MaskedLinear, Masking, Noise, name_sites, same_padding
from calgp.gp.masks import half_norm, truncated_normal

GRANULARITIES = ["element", "channel", "shared"]


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


def keyed(rows, samples=1, seed=0):
    return Noise(seed, torch.arange(samples), torch.arange(rows))


def sited(module):
    name_sites(module)
    return module


def z_of(masking, *shape, samples=1):
    """The mask itself: what ones become."""
    return sited(Mask(masking, image=len(shape) == 4))(torch.ones(shape), keyed(shape[0], samples))


# How z is drawn


def test_element_masks_of_images_vary_over_examples_channels_and_pixels():
    z = z_of(Masking(), 6, 5, 4, 4)
    for axis in range(4):
        assert not torch.equal(z, z.narrow(axis, 0, 1).expand_as(z))


def test_channel_masks_of_images_are_constant_over_pixels_and_vary_over_examples():
    z = z_of(Masking(granularity="channel"), 6, 50, 4, 4)
    assert torch.equal(z, z[..., :1, :1].expand_as(z))
    assert len(z[:, :, 0, 0].unique(dim=0)) == 6


def test_shared_masks_of_images_are_constant_over_examples_and_pixels():
    z = z_of(Masking(granularity="shared"), 6, 50, 4, 4)
    assert torch.equal(z, z[:1, :, :1, :1].expand_as(z))
    assert 0 < z.mean() < 1


def test_on_vectors_element_and_channel_are_the_same_and_shared_is_one_for_all():
    assert torch.equal(z_of(Masking(), 6, 50), z_of(Masking(granularity="channel"), 6, 50))
    z = z_of(Masking(granularity="shared"), 6, 50)
    assert torch.equal(z, z[:1].expand_as(z))


@pytest.mark.parametrize("keep", [0.5, 0.3, 0.9])
@pytest.mark.parametrize("shape", [(40, 8, 16, 16), (400, 200)])
def test_inverted_masks_have_mean_one(keep, shape):
    z = z_of(Masking(keep, inverted=True), *shape)
    assert set(z.unique().tolist()) == {0.0, torch.tensor(1.0).div(keep).item()}
    deviation = math.sqrt((1 - keep) / keep / z.numel())
    assert z.mean().item() == pytest.approx(1, abs=4.5 * deviation + 2**-17 / keep)


def test_masks_are_on_in_evaluation_too():
    mask = Mask(Masking()).eval()
    assert (mask(torch.ones(4, 100)) == 0).any()


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_first_mask_makes_samples_of_rows_and_the_second_keeps_them(granularity):
    """N rows become S · N, sample by sample; each sample is what it would be alone."""
    first, second = Mask(Masking(granularity=granularity)), Mask(Masking(granularity=granularity))
    first.site, second.site = 1, 2
    h = randn(5, 30)
    both = second(first(h, keyed(5, samples=3)), keyed(5, samples=3))
    assert both.shape == (15, 30)
    for s in range(3):
        alone = Noise(0, torch.tensor([s]), torch.arange(5))
        assert torch.equal(both.unflatten(0, (3, 5))[s], second(first(h, alone), alone))


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("shape", [(6, 40), (6, 5, 4, 4), (6, 3, 40)])
def test_an_image_keeps_its_mask_wherever_it_stands(granularity, shape):
    mask = sited(Mask(Masking(0.3, granularity)))
    h, order = randn(*shape), torch.tensor([4, 0, 5])
    whole = mask(h, keyed(6))
    part = mask(h[order], Noise(0, torch.arange(1), order))
    assert torch.equal(part, whole[order])


def test_keyed_noise_needs_sites():
    with pytest.raises(RuntimeError, match="name_sites"):
        Mask(Masking())(torch.ones(2, 3), keyed(2))


def test_keep_one_is_no_mask_and_no_site():
    mask = Mask(UNMASKED)
    h = torch.ones(2, 3)
    before = torch.get_rng_state()
    assert mask(h) is h
    assert torch.equal(before, torch.get_rng_state())
    assert name_sites(MaskedLinear(3, 2, masking=UNMASKED)) == {}


def test_sites_are_named_by_their_place_and_differ():
    net = torch.nn.Sequential(MaskedLinear(3, 3), MaskedLinear(3, 3))
    sites = name_sites(net)
    assert list(sites) == ["0.mask", "1.mask"]
    assert sites["0.mask"].site != sites["1.mask"].site


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masking", [Masking(0.3), Masking(0.3, inverted=True)])
def test_floating_type_follows_the_input(dtype, masking):
    assert Mask(masking)(torch.ones(3, 5, dtype=dtype)).dtype == dtype
    assert Mask(masking, image=True)(torch.ones(3, 5, 2, 2, dtype=dtype)).dtype == dtype


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_memory_layout_does_not_matter(granularity):
    mask, h = sited(Mask(Masking(granularity=granularity), image=True)), randn(3, 5, 4, 6)
    channels_last = h.contiguous(memory_format=torch.channels_last)
    assert torch.equal(mask(h, keyed(3)), mask(channels_last, keyed(3)))


def test_dropped_inputs_get_no_gradient():
    h = torch.ones(4, 50, requires_grad=True)
    mask = sited(Mask(Masking()))
    z = mask(h, keyed(4))
    z.sum().backward()
    assert torch.equal(h.grad, z.detach())


@pytest.mark.parametrize("wrong", [{"keep": 0.0}, {"keep": -0.1}, {"keep": 1.1}, {"keep": math.nan}])
def test_keep_must_be_a_probability_above_zero(wrong):
    with pytest.raises(ValueError, match="keep must lie in"):
        Masking(**wrong)


def test_unknown_granularity_is_refused(unchecked):
    with pytest.raises(ValueError, match="granularity"):
        Masking(granularity="pixel")


# Expectations and KL by enumeration of all masks


@pytest.mark.parametrize("keep", [0.5, 0.3, 0.9])
@pytest.mark.parametrize("inverted", [False, True])
def test_average_over_all_masks_of_a_linear_layer(keep, inverted, every_mask):
    """E[Wᵀh] = keep · Mᵀh, inverted Mᵀh; exactly, since every mask is counted."""
    m = 6
    layer = MaskedLinear(m, 3, masking=Masking(keep, inverted=inverted), generator=seeded(0)).double()
    h = randn(4, m)
    outputs = layer(h).detach().unflatten(0, (2**m, 4)).numpy()
    average = np.tensordot(reference.all_masks(m, keep)[1], outputs, 1)
    expected = (1 if inverted else keep) * (h @ layer.weight.detach())
    np.testing.assert_allclose(average, expected, atol=1e-13)


@pytest.mark.parametrize("keep", [0.5, 0.3])
@pytest.mark.parametrize("inverted", [False, True])
@pytest.mark.parametrize("stride", [1, 2])
def test_channel_masks_of_a_convolution_mask_its_filters(keep, inverted, stride, every_mask):
    """The masked image under the filters is the image under Ψ = diag(z) M, for every z; and so on average."""
    masking = Masking(keep, "channel", inverted)
    layer = MaskedConv2d(3, 4, 3, stride=stride, masking=masking, generator=seeded(0)).double()
    x = randn(2, 3, 5, 5)
    outputs = layer(x).detach().unflatten(0, (8, 2)).numpy()
    weight, bias = layer.weight.detach().numpy(), layer.bias.detach().numpy()
    masks, probabilities = reference.all_masks(3, keep)
    for z, output in zip(masks, outputs, strict=True):
        psi = weight * (z / keep if inverted else z)[:, None, None]
        np.testing.assert_allclose(output, reference.conv_same(x.numpy(), psi, bias, stride), atol=1e-13)
    mean = reference.conv_same(x.numpy(), (1 if inverted else keep) * weight, bias, stride)
    np.testing.assert_allclose(np.tensordot(probabilities, outputs, 1), mean, atol=1e-13)


@pytest.mark.parametrize("keep", [0.5, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("inverted", [False, True])
def test_kl_of_a_linear_layer_by_enumerating_all_masks(keep, inverted, monkeypatch, every_mask):
    """E_q[−log p(W)] + ½‖b‖² depends on M and b as `kl` does, W being what the layer really multiplies by."""
    m, masking = 4, Masking(keep, "shared", inverted)
    constants = []
    for seed in range(3):
        layer = MaskedLinear(m, 3, masking=masking, bias=True, std=1.0, generator=seeded(seed)).double()
        bias = layer.bias.detach().numpy()
        samples = (layer(torch.eye(m).double()).detach().numpy() - bias).reshape(-1, m, 3)  # every W there is
        probabilities = reference.all_masks(m, keep)[1] if keep < 1 else [1.0]
        cost = sum(p * reference.minus_log_normal(w, 1.0) for p, w in zip(probabilities, samples, strict=True))
        constants.append(layer.kl().item() - cost - reference.minus_log_normal(bias, 1.0))
    np.testing.assert_allclose(constants, constants[0], atol=1e-6)  # weights are drawn in float32
    assert constants[0] == pytest.approx(-0.5 * (m + 1) * 3 * math.log(2 * math.pi), abs=1e-6)


@pytest.mark.parametrize("keep", [0.5, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("inverted", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_kl_of_a_convolution_by_enumerating_all_masks(keep, inverted, bias):
    masking = Masking(keep, "channel", inverted)
    layer = MaskedConv2d(3, 2, 2, masking=masking, bias=bias, generator=seeded(0)).double()
    zero = MaskedConv2d(3, 2, 2, masking=masking, bias=bias).double()
    with torch.no_grad():
        for parameter in zero.parameters():
            parameter.zero_()

    def enumerated(conv):
        filters = conv.weight.detach().numpy().swapaxes(0, 1)  # z is over the input channels
        cost = reference.expected_minus_log_prior(filters, keep, inverted)
        return cost + (reference.minus_log_normal(conv.bias.detach().numpy(), 1.0) if bias else 0)

    assert (layer.kl() - zero.kl()).item() == pytest.approx(enumerated(layer) - enumerated(zero), abs=1e-12)


@pytest.mark.parametrize("keep", [0.5, 0.3])
def test_inverted_and_plain_are_the_same_distribution_and_cost_the_same(keep):
    """diag(z/π) M' with M' = πM is diag(z) M."""
    m = randn(4, 3)
    torch.testing.assert_close(Masking(keep).kl(m), Masking(keep, inverted=True).kl(keep * m))


# Padding and initial values


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("size", [(8, 8), (7, 7), (6, 9), (1, 2)])
@pytest.mark.parametrize("window", [1, 2, 3, 5])
def test_convolution_has_tensorflows_same_padding(stride, size, window):
    layer = MaskedConv2d(3, 4, window, stride=stride, masking=UNMASKED, generator=seeded(0)).double()
    x = randn(2, 3, *size)
    expected = reference.conv_same(x.numpy(), layer.weight.detach().numpy(), layer.bias.detach().numpy(), stride)
    np.testing.assert_allclose(layer(x).detach(), expected, atol=1e-13)
    assert layer(x).shape[2:] == tuple(math.ceil(side / stride) for side in size)


def test_same_padding_puts_the_odd_zero_last():
    h = same_padding(torch.ones(1, 1, 4, 4), 3, 2)
    assert h.shape == (1, 1, 5, 5)
    assert h[0, 0, -1].sum() == h[0, 0, :, -1].sum() == 0
    assert h[0, 0, 0, 0] == 1


def test_weights_start_truncated_normal():
    """Cut at two standard deviations, which leaves 0.8796 of the standard deviation (TensorFlow's truncated_normal)."""
    weight = truncated_normal((200, 200), 0.1, seeded(0))
    assert weight.abs().max() <= 0.2
    assert weight.std().item() == pytest.approx(0.08796, rel=0.02)  # standard error 0.35 %
    assert weight.mean().item() == pytest.approx(0, abs=5 * 0.088 / 200)


def test_vectors_with_more_axes_are_masked_over_the_last():
    """Φ with an own θ per output is [B, outputs, m]: all outputs share the mask."""
    z = z_of(Masking(), 6, 5, 50)
    assert torch.equal(z, z[:, :1].expand_as(z))
    assert len(z[:, 0].unique(dim=0)) == 6


@pytest.mark.parametrize("granularity", ["channel", "shared"])
@pytest.mark.parametrize("inverted", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("stride", "window", "size"), [(1, 5, 8), (2, 3, 8), (2, 3, 7), (1, 2, 6)])
def test_recombined_responses_equal_the_convolutions_of_masked_images(
    granularity, inverted, bias, stride, window, size
):
    """Without gradients many samples of one input are computed from the responses to its single channels."""
    masking = Masking(0.3, granularity, inverted)
    layer = sited(MaskedConv2d(3, 4, window, stride=stride, masking=masking, bias=bias, generator=seeded(1))).double()
    h, noise = randn(5, 3, size, size + 1), keyed(5, samples=7)
    direct = layer(h, noise)
    with torch.no_grad():
        assert layer._recombines(h, noise)
        recombined = layer(h.contiguous(memory_format=torch.channels_last), noise)
    assert recombined.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(recombined, direct)


def test_few_samples_or_masks_of_elements_or_later_layers_are_not_recombined():
    def recombines(granularity, rows, samples):
        layer = sited(MaskedConv2d(32, 4, 5, masking=Masking(0.5, granularity)))
        with torch.no_grad():
            return layer._recombines(torch.zeros(rows, 32, 8, 8), keyed(3, samples))

    assert recombines("channel", rows=3, samples=16)
    assert not recombines("channel", rows=3, samples=15)
    assert not recombines("element", rows=3, samples=50)
    assert not recombines("channel", rows=3 * 50, samples=50)  # an earlier mask has made the rows differ


def test_half_norm_and_its_gradients():
    weight = randn(3, 4).requires_grad_()
    assert half_norm(weight).item() == pytest.approx((weight.detach().numpy() ** 2).sum() / 2)
    assert torch.autograd.gradcheck(half_norm, (weight,)) and torch.autograd.gradgradcheck(half_norm, (weight,))
