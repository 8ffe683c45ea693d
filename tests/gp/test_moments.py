"""The masks of a linear layer, integrated: moments by enumeration and by draws, and what is drawn from them."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck

import reference
from calgp.gp import (
    DeepGP,
    Latent,
    MaskedConv2d,
    MaskedLinear,
    Masking,
    MeanField,
    Noise,
    RandomFeatureGP,
    Softmax,
    Theta,
    name_sites,
)
from calgp.gp.likelihoods import covariance_root
from calgp.gp.masks import weighted_gram


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


def enumerated(layer, h):
    """Mean and covariance of the outputs by all 2^m masks, weighed by their probabilities."""
    keep, inverted = layer.mask.masking.keep, layer.mask.masking.inverted
    masks, weights = reference.all_masks(h.shape[-1], keep)
    m = layer.weight.detach().numpy()
    f = np.stack([(h.numpy() * (z / keep if inverted else z)) @ m for z in masks])  # [masks, B, out]
    mean = np.einsum("k,kbq->bq", weights, f)
    return mean, np.einsum("k,kbq,kbr->bqr", weights, f - mean, f - mean)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("inverted", [False, True])
@pytest.mark.parametrize("keep", [0.5, 0.25, 0.875, 1.0])
def test_moments_are_those_of_all_masks(keep, inverted, bias):
    layer = MaskedLinear(7, 3, masking=Masking(keep, inverted=inverted), bias=bias, generator=seeded(0)).double()
    h = randn(4, 7, seed=1)
    mean, covariance = layer.mean(h), layer.covariance(h)
    expected_mean, expected_covariance = enumerated(layer, h)
    shift = layer.bias.detach().numpy() if bias else 0
    np.testing.assert_allclose(mean.detach(), expected_mean + shift, atol=1e-14)
    np.testing.assert_allclose(covariance.detach(), expected_covariance, atol=1e-14)


def test_weighted_gram_is_the_sum_over_inputs():
    w, m = randn(5, 6).square(), randn(6, 4, seed=1)
    expected = torch.einsum("bi,iq,ir->bqr", w, m, m)
    torch.testing.assert_close(weighted_gram(w, m), expected, rtol=1e-13, atol=1e-13)


def test_without_masks_there_is_a_point():
    layer = MaskedLinear(6, 3, masking=Masking(1.0), generator=seeded(0)).double()
    h = randn(4, 6)
    mean, covariance = layer.mean(h), layer.covariance(h)
    assert torch.equal(mean, layer(h)) and (covariance == 0).all()
    points = Latent(mean[None], covariance=covariance[None]).points(8)
    torch.testing.assert_close(points, mean.expand(8, -1, -1), rtol=0, atol=1e-5)  # a deviation of √TINY


@pytest.mark.parametrize("n_rf", [64, 1024])
def test_draws_of_a_large_layer_have_the_moments(n_rf):
    """A million masks: the standard error of a mean is σ / 1000, of a variance √2 σ² / 1000."""
    layer = RandomFeatureGP(16, 3, n_rf=n_rf, theta=Theta(lengthscale=1.0), generator=seeded(0)).double()
    phi = layer.phi(randn(1, 16, seed=1)).detach()
    mean, covariance = layer.weights.mean(phi), layer.weights.covariance(phi)
    name_sites(layer)
    with torch.no_grad():
        draws = torch.cat([
            layer.weights(phi, Noise(0, torch.arange(first, first + 50_000), torch.zeros(1, dtype=torch.int64)))
            for first in range(0, 1_000_000, 50_000)
        ])  # fmt: skip
    deviation = covariance[0].diagonal().sqrt()
    assert ((draws.mean(0) - mean[0]).abs() < 5 * deviation / 1000).all()
    difference = torch.cov(draws.mT) - covariance[0]
    assert (difference.abs() < 5 * math.sqrt(2) / 1000 * torch.outer(deviation, deviation)).all()


def test_f_becomes_gaussian_as_features_become_many():
    """The Kolmogorov distance between f and its Gaussian falls as 1/√m, and stays below Berry and Esseen's bound."""
    distances = []
    for m in (8, 64, 512, 4096):
        layer = MaskedLinear(m, 1, generator=seeded(0)).double()
        h = randn(1, m, seed=1).abs() / math.sqrt(m)
        mean, covariance = layer.mean(h), layer.covariance(h)
        name_sites(layer)
        noise = Noise(0, torch.arange(40_000), torch.zeros(1, dtype=torch.int64))
        with torch.no_grad():
            f = ((layer(h, noise) - mean) / covariance[0, 0, 0].sqrt()).flatten().sort().values
        uniform = (torch.arange(len(f)) + 0.5) / len(f)
        distances.append((torch.special.ndtr(f) - uniform).abs().max().item())
        terms = (h[0] * layer.weight[:, 0]).abs().detach()
        bound = 0.56 * 0.5**3 * terms.pow(3).sum() / (0.5**2 * terms.square().sum()) ** 1.5  # E|z − ½|³ = ⅛
        assert distances[-1] < bound + 1.63 / math.sqrt(len(f))  # the bound, and 99 % of the chance of 40,000 draws
    assert distances[0] > 5 * distances[-1]
    assert distances[-1] < 0.01


@pytest.mark.parametrize("rank", [0, 1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_root_of_a_singular_covariance_is_one(rank, dtype):
    a = randn(5, 4, rank, seed=3).to(dtype)
    covariance = a @ a.mT
    root = covariance_root(covariance)
    assert root.isfinite().all() and root.dtype == dtype
    scale = covariance.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(1e-6)[:, None, None]
    assert ((root @ root.mT - covariance).abs() / scale).max() < 5e-6


def test_gradients_of_draws_with_respect_to_features_and_weights():
    noise = Noise(3, torch.arange(1), torch.arange(2))

    def points(h, m):
        layer = MaskedLinear(5, 3, generator=seeded(0)).double()
        mean, covariance = torch.func.functional_call(_Moments(layer), {"layer.weight": m}, (h,))
        return Latent(mean[None], covariance=covariance[None]).points(4, noise)

    inputs = randn(2, 5), randn(5, 3, seed=1)
    assert gradcheck(points, [x.requires_grad_() for x in inputs])


class _Moments(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, h):
        return self.layer.mean(h), self.layer.covariance(h)


def test_draws_are_keyed_by_row_and_come_in_pairs():
    mean, a = randn(1, 6, 3), randn(1, 6, 3, 3, seed=1)
    latent, rows = Latent(mean, covariance=a @ a.mT), torch.tensor([4, 9, 2, 7, 0, 1])
    points = latent.points(8, Noise(5, torch.arange(1), rows))
    torch.testing.assert_close(points.mean(0), mean[0], rtol=0, atol=1e-12)  # antithetic
    part = Latent(mean[:, 2:4], covariance=(a @ a.mT)[:, 2:4]).points(8, Noise(5, torch.arange(1), rows[2:4]))
    torch.testing.assert_close(part, points[:, 2:4], rtol=0, atol=1e-12)


def test_draws_have_the_covariance():
    a = randn(3, 3, seed=1)
    latent = Latent(torch.zeros(1, 1, 3, dtype=torch.float64), covariance=(a @ a.mT)[None, None])
    draws = latent.points(40_000, Noise(0, torch.arange(1), torch.arange(1)))[:, 0]
    expected = a @ a.mT
    deviation = expected.diagonal().sqrt()
    assert (
        (torch.cov(draws.mT) - expected).abs() < 5 * math.sqrt(2 / 20_000) * torch.outer(deviation, deviation)
    ).all()


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_the_bounds_family_by_hand(alpha):
    f, y = randn(6, 4, 3), torch.tensor([0, 2, 1, 1])
    p = reference.softmax(f.numpy())[:, np.arange(4), y.numpy()]
    expected = np.log(p).mean(0) if alpha == 0 else np.log((p**alpha).mean(0)) / alpha
    np.testing.assert_allclose(Softmax(alpha=alpha).expected_log_prob(Latent(f), y), expected, rtol=1e-12)


def test_the_bounds_family_rises_with_alpha():
    """L_0 ≤ L_α ≤ L_1, by Jensen."""
    f, y = 3 * randn(16, 50, 4), torch.arange(50) % 4
    values = [Softmax(alpha=alpha).expected_log_prob(Latent(f), y) for alpha in (0.0, 0.2, 0.5, 1.0)]
    assert all((low <= high).all() for low, high in itertools.pairwise(values))


@pytest.mark.parametrize("options", [{"alpha": -0.1}, {"alpha": 1.5}, {"draws": 0}])
def test_an_alpha_that_is_none_is_refused(options):
    with pytest.raises(ValueError, match="must lie in"):
        Softmax(**options)


def test_many_outputs_are_drawn_without_their_covariance():
    """64 outputs, 32 draws: points in pairs, whose covariance over many draws is the closed form."""
    layer = MaskedLinear(6, 64, generator=seeded(0)).double()
    name_sites(layer)
    h, rows = randn(2, 6, seed=1), torch.arange(2)
    found = layer.latent(h, Noise(0, torch.arange(1), rows), draws=32)
    assert found.covariance is None and found.mean.shape == (32, 2, 64)
    torch.testing.assert_close(found.mean.mean(0), layer.mean(h), rtol=0, atol=1e-12)
    with torch.no_grad():
        draws = torch.stack([
            layer.latent(h, Noise(seed, torch.arange(1), rows), draws=32).mean[:16, 0] for seed in range(1250)
        ]).flatten(0, 1)  # fmt: skip
    expected = layer.covariance(h)[0].detach()
    deviation = expected.diagonal().sqrt()
    assert (
        (torch.cov(draws.mT) - expected).abs() < 6 * math.sqrt(2 / 20_000) * torch.outer(deviation, deviation)
    ).all()


@pytest.mark.parametrize("outputs", [3, 40], ids=["covariance", "draws"])
def test_latents_do_not_depend_on_the_batch(outputs):
    layer = RandomFeatureGP(5, outputs, n_rf=8, generator=seeded(0)).double()
    name_sites(layer)
    c, rows = randn(6, 5), torch.tensor([4, 9, 2, 7, 0, 1])
    whole = layer.latent(c, Noise(5, torch.arange(1), rows))
    part = layer.latent(c[2:4], Noise(5, torch.arange(1), rows[2:4]))
    for one, two in zip(whole, part, strict=True):
        assert (one is None) is (two is None)
        if one is not None:
            torch.testing.assert_close(one[:, 2:4], two, rtol=0, atol=1e-12)


@pytest.mark.parametrize("frequencies", ["sorf", "variational"])
def test_samples_of_what_comes_before_give_a_gaussian_each(frequencies):
    """S components: those of the masks on Ω, or of a hidden layer; W is integrated in each."""
    first = RandomFeatureGP(5, 4, n_rf=8, frequencies=frequencies, generator=seeded(0))
    deep = DeepGP([first, RandomFeatureGP(9, 3, n_rf=8, generator=seeded(1))]).double()
    name_sites(deep)
    c, rows = randn(6, 5), torch.arange(6)
    found = deep.latent(c, Noise(5, torch.arange(7), rows))
    assert found.mean.shape == (7, 6, 3) and found.covariance is not None and found.covariance.shape == (7, 6, 3, 3)
    alone = deep.latent(c[4:5], Noise(5, torch.tensor([2]), rows[4:5]))
    torch.testing.assert_close(found.mean[2, 4], alone.mean[0, 0], rtol=0, atol=1e-12)
    torch.testing.assert_close(found.covariance[2, 4], alone.covariance[0, 0], rtol=0, atol=1e-12)


def test_the_average_over_masks_of_w_is_the_mean_of_the_integrated_layer():
    layer = RandomFeatureGP(5, 3, n_rf=8, generator=seeded(0)).double()
    name_sites(layer)
    c = randn(2, 5)
    with torch.no_grad():
        draws = layer(c, Noise(0, torch.arange(40_000), torch.arange(2))).unflatten(0, (-1, 2))
    found = layer.latent(c, Noise(0, torch.arange(1), torch.arange(2)))
    deviation = found.covariance[0].diagonal(dim1=-2, dim2=-1).sqrt()
    assert ((draws.mean(0) - found.mean[0]).abs() < 5 * deviation / 200).all()


@pytest.mark.parametrize("inverted", [False, True])
@pytest.mark.parametrize("granularity", ["element", "channel", "shared"])
def test_at_their_mean_masks_scale_by_keep(granularity, inverted):
    masking = Masking(0.3, granularity, inverted)
    convolution = MaskedConv2d(2, 3, 3, masking=masking, bias=False, generator=seeded(0)).double()
    name_sites(convolution)
    x = randn(4, 2, 5, 5)
    found = convolution(x, Noise(0, torch.arange(1), torch.arange(4), mean=True))
    plain = torch.nn.functional.conv2d(x, convolution.weight, padding=1)
    torch.testing.assert_close(found, plain if inverted else 0.3 * plain, rtol=0, atol=1e-12)


def test_gaussian_weights_at_their_mean_and_integrated():
    layer = MeanField(0.2).linear(5, 3, generator=seeded(0)).double()
    name_sites(layer)
    h, noise = randn(4, 5), Noise(0, torch.arange(1), torch.arange(4))
    torch.testing.assert_close(layer(h, noise._replace(mean=True)), h @ layer.weight)
    found = layer.latent(h, noise)
    mean, variance = layer.moments(h)
    assert torch.equal(found.mean[0], mean) and torch.equal(found.variance[0], variance)


def test_an_own_theta_per_output_is_refused():
    layer = RandomFeatureGP(5, 3, theta=Theta(outputs=3), generator=seeded(0))
    with pytest.raises(ValueError, match="own θ per output"):
        layer.latent(torch.ones(2, 5))
