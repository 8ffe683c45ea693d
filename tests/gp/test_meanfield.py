import math

import numpy as np
import pytest
import torch
from torch.distributions import Normal, kl_divergence

import reference
from calgp.gp import (
    DeepGP,
    MeanField,
    MeanFieldConv2d,
    MeanFieldFrequencies,
    MeanFieldLinear,
    MeanFieldLinearPerOutput,
    Noise,
    RandomFeatureGP,
    Theta,
    name_sites,
)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


def keyed(rows, samples=1, seed=0):
    return Noise(seed, torch.arange(samples), torch.arange(rows))


def spread(module, seed=5):
    """The module in float64, with a different σ for every weight, and with sites."""
    module = module.double()
    generator = seeded(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("log_deviation"):
                parameter.copy_(torch.rand(parameter.shape, generator=generator) - 1.5)
    name_sites(module)
    return module


def numpy(tensor):
    return tensor.detach().numpy()


def posterior(module, std=1.0):
    return Normal(module.weight, module.log_deviation.exp()), Normal(torch.zeros_like(module.weight), std)


# KL


@pytest.mark.parametrize("bias", [False, True])
def test_kl_of_a_linear_layer_is_that_of_torchs_distributions(bias):
    layer = spread(MeanFieldLinear(6, 4, bias=bias, generator=seeded(0)))
    expected = kl_divergence(*posterior(layer)).sum().item()
    if bias:  # a point: what depends on it
        expected += 0.5 * (numpy(layer.bias) ** 2).sum()
    assert layer.kl().item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("bias", [False, True])
def test_kl_of_a_convolution_is_that_of_torchs_distributions(bias):
    layer = spread(MeanFieldConv2d(3, 4, 3, bias=bias, generator=seeded(0)))
    expected = kl_divergence(*posterior(layer)).sum().item() + (0.5 * (numpy(layer.bias) ** 2).sum() if bias else 0)
    assert layer.kl().item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("lengthscale", [[2.5], [0.5, 1.0, 2.0, 4.0, 0.1]], ids=["one", "ard"])
def test_kl_of_frequencies_is_against_their_prior(lengthscale):
    """KL[q(Ω) ‖ Π N(0, ℓ_i⁻²)] with Ω = Λ^-½ ε is that of ε against N(0, 1), whatever ℓ."""
    layer = spread(MeanFieldFrequencies(randn(5, 7), deviation=0.3))
    inverse = (1 / torch.tensor(lengthscale, dtype=torch.float64)).unsqueeze(-1).expand(5, 7)
    omega = Normal(inverse * layer.epsilon, inverse * layer.log_deviation.exp())
    expected = kl_divergence(omega, Normal(torch.zeros_like(inverse), inverse)).sum()
    torch.testing.assert_close(layer.kl(), expected, rtol=1e-12, atol=0)


def test_kl_is_zero_at_the_prior_and_nowhere_below():
    layer = MeanFieldLinear(6, 4, deviation=1.0).double()
    with torch.no_grad():
        layer.weight.zero_()
    assert layer.kl().item() == 0
    assert spread(layer).kl() > 0


# Moments


def test_moments_of_a_linear_layer_in_closed_form():
    """E f_q = Σ_i h_i M_iq + b_q, Var f_q = Σ_i h_i² σ_iq²."""
    layer, h = spread(MeanFieldLinear(6, 4, bias=True, generator=seeded(0))), randn(5, 6)
    mean, variance = layer.moments(h)
    m, s, b = numpy(layer.weight), numpy(layer.log_deviation.exp()), numpy(layer.bias)
    for i in range(5):
        for q in range(4):
            assert mean[i, q].item() == pytest.approx(sum(h[i, k] * m[k, q] for k in range(6)) + b[q])
            assert variance[i, q].item() == pytest.approx(sum((h[i, k] * s[k, q]) ** 2 for k in range(6)))


def within_errors(draws, mean, variance, errors=5.0):
    """Draws have the mean and the variance, within so many standard errors of each."""
    count = len(draws)
    assert (abs(draws.mean(0) - mean) <= errors * np.sqrt(variance / count)).all()
    assert (abs(draws.var(0, ddof=1) - variance) <= errors * variance * np.sqrt(2 / count)).all()


def test_draws_of_a_linear_layer_are_those_of_drawn_weights():
    """Local reparameterisation against W drawn by NumPy: means, variances, and the variance of the sum of logits."""
    layer, h = spread(MeanFieldLinear(6, 4, bias=True, generator=seeded(0))), randn(3, 6)
    draws = numpy(layer(h, keyed(3, samples=20_000)).unflatten(0, (-1, 3)))
    m, s, b = numpy(layer.weight), numpy(layer.log_deviation.exp()), numpy(layer.bias)
    w = m + s * np.random.default_rng(0).standard_normal((20_000, *m.shape))
    naive = np.einsum("ik,skq->siq", h.numpy(), w) + b
    mean, variance = h.numpy() @ m + b, h.numpy() ** 2 @ s**2
    within_errors(naive, mean, variance)
    within_errors(draws, mean, variance)
    within_errors(draws.sum(-1), mean.sum(-1), variance.sum(-1))  # outputs are independent: variances add
    across = np.corrcoef(draws[:, 0, 0], draws[:, 1, 0])[0, 1]
    assert abs(across) < 5 / math.sqrt(20_000)  # each example has its own W


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("window", [2, 3])
def test_draws_of_a_convolution_have_the_moments_of_drawn_filters(stride, window):
    layer = spread(MeanFieldConv2d(3, 2, window, stride=stride, generator=seeded(0)))
    x = randn(2, 3, 5, 4)
    draws = numpy(layer(x, keyed(2, samples=8000)).unflatten(0, (-1, 2)))
    m, s, b = numpy(layer.weight), numpy(layer.log_deviation.exp()), numpy(layer.bias)
    mean = reference.conv_same(x.numpy(), m, b, stride)
    variance = reference.conv_same(x.numpy() ** 2, s**2, None, stride)
    assert draws.shape[1:] == mean.shape
    within_errors(draws, mean, variance)
    psi = m + s * np.random.default_rng(1).standard_normal((2000, *m.shape))
    within_errors(np.stack([reference.conv_same(x.numpy(), p, b, stride) for p in psi]), mean, variance)


def test_own_features_per_output_have_their_own_moments():
    layer, h = spread(MeanFieldLinearPerOutput(6, 4, generator=seeded(0))), randn(2, 4, 6)
    draws = numpy(layer(h, keyed(2, samples=20_000)).unflatten(0, (-1, 2)))
    m, s = numpy(layer.weight), numpy(layer.log_deviation.exp())
    mean, variance = np.einsum("iqk,kq->iq", h, m), np.einsum("iqk,kq->iq", h.numpy() ** 2, s**2)
    within_errors(draws, mean, variance)


def test_a_process_with_gaussian_weights_has_the_kernels_variance_at_the_prior():
    """f = ΦW with W ~ N(0, 1): E f² = ΦΦᵀ, the covariance that the features stand for."""
    process = RandomFeatureGP(5, 3, n_rf=64, masking=MeanField(1.0), generator=seeded(0)).double()
    with torch.no_grad():
        process.weights.weight.zero_()
    c = randn(4, 5)
    _, variance = process.weights.moments(process.phi(c))
    expected = (process.phi(c) @ process.phi(c).mT).diagonal()
    torch.testing.assert_close(variance, expected.unsqueeze(-1).expand(4, 3))


# Samples, sites, robustness


def deep(**options):
    first = RandomFeatureGP(6, 4, n_rf=8, masking=MeanField(0.3), generator=seeded(0), **options)
    return DeepGP([first, RandomFeatureGP(10, 3, n_rf=8, masking=MeanField(0.3), generator=seeded(1), **options)])


@pytest.mark.parametrize("frequencies", ["sorf", "variational"])
def test_samples_are_what_each_would_be_alone(frequencies):
    process, c = spread(deep(frequencies=frequencies)), randn(4, 6)
    together = process(c, keyed(4, samples=5)).unflatten(0, (5, 4))
    assert len(together.unique()) == together.numel()
    for s in range(5):
        alone = process(c[[2]], Noise(0, torch.tensor([s]), torch.tensor([2])))
        torch.testing.assert_close(together[s, 2], alone[0], rtol=1e-10, atol=1e-10)


def test_sites_are_the_places_where_noise_is_drawn():
    assert list(name_sites(deep(frequencies="variational"))) == [
        "layers.0.frequencies.draw",
        "layers.0.weights.draw",
        "layers.1.frequencies.draw",
        "layers.1.weights.draw",
    ]
    assert list(name_sites(deep())) == ["layers.0.weights.draw", "layers.1.weights.draw"]


def test_keyed_noise_needs_sites():
    with pytest.raises(RuntimeError, match="name_sites"):
        MeanFieldLinear(3, 2)(torch.ones(2, 3), keyed(2))


def test_memory_layout_does_not_matter():
    layer, x = spread(MeanFieldConv2d(3, 4, 3, generator=seeded(0))), randn(2, 3, 6, 5)
    last = x.contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(layer(x, keyed(2)), layer(last, keyed(2)), rtol=1e-12, atol=1e-12)


def test_gradients_of_a_patch_of_zeros_are_finite():
    """Its variance is 0, where the root has no gradient."""
    layer, x = MeanFieldConv2d(2, 3, 3, generator=seeded(0)), torch.zeros(2, 2, 4, 4, requires_grad=True)
    layer(x).square().sum().backward()
    assert x.grad.isfinite().all() and all(p.grad.isfinite().all() for p in layer.parameters())


def test_gradients_of_draws_equal_differences():
    layer, h = spread(MeanFieldLinear(4, 3, generator=seeded(0))), randn(2, 4).requires_grad_()
    m, s = layer.weight, layer.log_deviation
    assert torch.autograd.gradcheck(lambda *_: layer(h, keyed(2, samples=2)), (h, m, s))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_floating_type_follows_the_input(dtype):
    assert MeanFieldLinear(3, 2).to(dtype)(torch.ones(4, 3, dtype=dtype)).dtype == dtype
    assert MeanFieldConv2d(3, 2, 3).to(dtype)(torch.ones(4, 3, 5, 5, dtype=dtype)).dtype == dtype


def test_frequencies_start_at_a_draw_from_their_prior_with_a_share_of_its_deviation():
    options = {"n_rf": 400, "frequencies": "variational", "theta": Theta(lengthscale=4.0), "generator": seeded(0)}
    frequencies = RandomFeatureGP(100, 2, masking=MeanField(0.5), **options).frequencies
    assert frequencies.epsilon.std().item() == pytest.approx(1, rel=0.02)  # standard error 0.35 %
    torch.testing.assert_close(frequencies.log_deviation.exp(), torch.full((100, 400), 0.5))


@pytest.mark.parametrize("deviation", [0.0, -1.0, math.inf, math.nan])
def test_deviation_must_be_positive(deviation):
    with pytest.raises(ValueError, match="positive"):
        MeanField(deviation)
