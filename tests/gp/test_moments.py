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
    MaskedLinearPerOutput,
    Masking,
    MeanField,
    Noise,
    RandomFeatureGP,
    Softmax,
    Theta,
    name_sites,
)
from calgp.gp.cholesky import _cholesky_by_columns, covariance_root
from calgp.gp.masks import BUCKETS, MOST_OUTPUTS, weighted_gram


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


@pytest.mark.parametrize("outputs", [3, MOST_OUTPUTS + 1])
def test_without_masks_there_is_a_point(outputs):
    layer = MaskedLinear(6, outputs, masking=Masking(1.0), generator=seeded(0)).double()
    h = randn(4, 6)
    mean, covariance = layer.mean(h), layer.covariance(h)
    assert torch.equal(mean, layer(h)) and (covariance == 0).all()
    latent = layer.latent(h)
    assert latent.is_points and torch.equal(latent.mean[0], mean)
    per_output = MaskedLinearPerOutput(6, outputs, masking=Masking(1.0), generator=seeded(0)).double()
    own = per_output.latent(h[:, None].expand(-1, outputs, -1))
    assert own.is_points
    torch.testing.assert_close(own.mean[0], mean)
    points = Latent(mean[None], covariance=covariance[None]).points(8)
    torch.testing.assert_close(points, mean.expand(8, -1, -1), rtol=0, atol=1e-5)  # a deviation of √TINY


@pytest.mark.parametrize("n_rf", [64, pytest.param(256, marks=pytest.mark.slow)])
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


@pytest.mark.slow
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


def kolmogorov(terms, keep):
    """sup |F − Φ| for the standardised Σ_i z_i a_i, by inversion of its characteristic function (Gil-Pelaez 1951).

    F(x) − Φ(x) = −(1/π) ∫₀^∞ Im[e^(−itx) (φ(t) − e^(−t²/2))] / t dt. For 64 terms or more of different sizes φ is below
    1e-5 beyond t = 12, and what the steps of 0.02 and the grid of x miss is less.
    """
    deviation = math.sqrt(keep * (1 - keep) * (terms**2).sum())
    t, x = np.arange(0.02, 12, 0.02), np.linspace(-4, 4, 801)
    angle = np.outer(t, terms / deviation)
    log_phi = np.log(1 - keep + keep * np.exp(1j * angle)).sum(1) - 1j * keep * angle.sum(1)
    difference = (np.exp(log_phi) - np.exp(-(t**2) / 2)) / t
    return np.abs((np.exp(-1j * np.outer(x, t)) * difference).imag.sum(1) * 0.02 / math.pi).max()


@pytest.mark.parametrize(("keep", "order"), [(0.25, 1 / 2), (0.5, 1)])
def test_the_exact_distance_between_f_and_its_gaussian_falls_with_the_number_of_features(keep, order):
    """As 1/√m in the worst case, terms of one sign; as 1/m where masks are symmetric (π = ½), having no skewness.

    Both stay below Berry and Esseen's bound 0.56 Σ E|z_i a_i − π a_i|³ / (Σ Var)^1.5 (Shevtsova 2010).
    """
    sizes, distances = (64, 256, 1024, 4096), []
    for m in sizes:
        terms = (randn(m, seed=1) * randn(m, seed=2)).abs().numpy()  # of features and weights
        distances.append(kolmogorov(terms, keep))
        third = keep * (1 - keep) * (keep**2 + (1 - keep) ** 2)  # E|z − π|³
        bound = 0.56 * third * (terms**3).sum() / (keep * (1 - keep) * (terms**2).sum()) ** 1.5
        assert distances[-1] < bound
    slope = np.polyfit(np.log(sizes), np.log(distances), 1)[0]
    assert slope == pytest.approx(-order, abs=0.15)  # moments of 64 terms with heavy tails are not those of 4,096
    assert distances[-1] < (5e-3 if keep == 0.25 else 3e-4)


def test_the_exact_distance_is_that_of_draws():
    """300,000 masks of 64 features: the distance of their distribution is known to 1.63 / √300,000 (99 %)."""
    terms = (randn(64, seed=1) * randn(64, seed=2)).abs()
    z = torch.rand(300_000, 64, generator=seeded(3), dtype=torch.float64) < 0.25
    f = ((z.double() @ terms - 0.25 * terms.sum()) / math.sqrt(3 / 16 * terms.square().sum())).sort().values
    found = (torch.special.ndtr(f) - (torch.arange(len(f)) + 0.5) / len(f)).abs().max().item()
    assert found == pytest.approx(kolmogorov(terms.numpy(), 0.25), abs=1.63 / math.sqrt(len(f)))


@pytest.mark.parametrize("rank", [0, 1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_root_of_a_singular_covariance_is_one(rank, dtype):
    a = randn(5, 4, rank, seed=3).to(dtype)
    covariance = a @ a.mT
    root = covariance_root(covariance)
    assert root.isfinite().all() and root.dtype == dtype
    scale = covariance.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(1e-6)[:, None, None]
    assert ((root @ root.mT - covariance).abs() / scale).max() < 5e-6


@pytest.mark.parametrize("outputs", [2, 10, MOST_OUTPUTS])
@pytest.mark.parametrize("inputs", [512, 4096])
def test_covariances_that_rounding_makes_indefinite_have_a_root(inputs, outputs):
    """Weights of rank one, such as M₁ = −M₂ of two classes: summed in single precision, an eigenvalue is negative."""
    roots, lowest = [], 0.0
    for seed in range(5):
        m = (randn(inputs, 1, seed=seed) @ randn(1, outputs, seed=100 + seed)).float()
        covariance = 0.25 * weighted_gram(randn(50, inputs, seed=200 + seed).float().square(), m)
        lowest = min(lowest, torch.linalg.eigvalsh(covariance.double()).min().item())
        root = covariance_root(covariance)
        roots.append((root @ root.mT - covariance).abs().amax((1, 2)) / covariance.diagonal(dim1=1, dim2=2).sum(-1))
    assert lowest < 0
    assert torch.stack(roots).max() < 2e-5  # a millionth of the trace, or ten where rounding is worse


def test_a_root_does_not_depend_on_the_matrices_beside_it():
    """One that needs a larger δ has it for itself."""
    a = randn(3, 4, 4)
    covariance = a @ a.mT
    covariance[1] = -1e-5 * torch.eye(4)  # worse than any rounding
    covariance[1, 0, 0] = 1.0
    for each, alone in zip(covariance_root(covariance), covariance, strict=True):
        assert torch.equal(each, covariance_root(alone)) and each.isfinite().all()


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_what_is_not_finite_has_no_root_and_spoils_no_other(wrong):
    covariance = torch.eye(3).repeat(3, 1, 1)
    covariance[1] = wrong
    root = covariance_root(covariance)
    assert root[1].isnan().all() and root[[0, 2]].isfinite().all()


def test_the_root_for_exports_is_finite_where_rounding_makes_a_covariance_indefinite():
    m = (randn(4096, 1, seed=3) @ randn(1, 10, seed=103)).float()
    covariance = 0.25 * weighted_gram(randn(50, 4096, seed=203).float().square(), m).double()
    trace = covariance.diagonal(dim1=1, dim2=2).sum(-1)[:, None, None]
    root = _cholesky_by_columns(covariance + 1e-6 * trace * torch.eye(10), 5e-7 * trace)
    assert ((root @ root.mT - covariance).abs() / trace).max() < 2e-5


@pytest.mark.parametrize("case", ["no feature reaches a class", "more classes than features", "opposites", "keep = 1"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_singular_covariances_train_and_predict(case, dtype):
    """Draws have the spread that they should, and gradients are finite, whatever the precision."""
    inputs, outputs = (2, 5) if case == "more classes than features" else (300, 2 if case == "opposites" else 5)
    masking = Masking(1.0 if case == "keep = 1" else 0.5)
    layer = MaskedLinear(inputs, outputs, masking=masking, std=0.5, generator=seeded(0))
    with torch.no_grad():
        if case == "no feature reaches a class":
            layer.weight[:, 2] = 0
        if case == "opposites":
            layer.weight[:, 1] = -layer.weight[:, 0]
    layer = layer.to(dtype)
    h = randn(20, inputs, seed=1).to(dtype).requires_grad_()
    latent, y = layer.latent(h), torch.arange(20) % outputs
    noise = Noise(0, torch.arange(1), torch.arange(20))
    Softmax().expected_log_prob(latent, y, noise).sum().backward()
    assert layer.weight.grad.isfinite().all() and h.grad.isfinite().all() and layer.weight.grad.any()
    points = latent.points(4000, noise).detach().double()
    exact = layer.mask.masking.spread * weighted_gram(h.detach().double().square(), layer.weight.detach().double())
    expected = exact.diagonal(dim1=1, dim2=2)
    error = {torch.float32: 0, torch.bfloat16: 0.02}[dtype]  # bfloat16 has three digits
    largest = expected.amax(-1, keepdim=True)
    bound = (5 * math.sqrt(2 / 2000) + error) * expected + 2e-5 * largest  # 2,000 pairs; δ
    assert ((points - latent.mean.detach()).square().mean(0) - expected).abs().le(bound + 1e-5).all()


def test_mixed_precision_keeps_the_covariance_in_single_precision():
    layer, h = MaskedLinear(300, 2, std=0.5, generator=seeded(0)), randn(20, 300, seed=1).float()
    with torch.no_grad():
        layer.weight[:, 1] = -layer.weight[:, 0]
        with torch.autocast("cpu", torch.bfloat16):
            found = layer.latent(h)
    assert found.mean.dtype == torch.bfloat16 and found.covariance.dtype == torch.float32
    torch.testing.assert_close(found.covariance[0], layer.covariance(h).detach())


def test_gradients_of_the_moments():
    layer = MaskedLinear(5, 3, masking=Masking(0.3), bias=True, generator=seeded(0)).double()

    def moments(h, m, bias):
        return torch.func.functional_call(_Moments(layer), {"layer.weight": m, "layer.bias": bias}, (h,))

    assert gradcheck(moments, [x.requires_grad_() for x in (randn(2, 5), randn(5, 3, seed=1), randn(3, seed=2))])


def test_gradients_of_the_moments_with_an_own_theta_per_output():
    layer = MaskedLinearPerOutput(4, 3, masking=Masking(0.3), generator=seeded(0)).double()

    def moments(h):
        found = layer.latent(h)
        return found.mean, found.covariance

    assert gradcheck(moments, [randn(2, 3, 4).requires_grad_()])


@pytest.mark.parametrize("inputs", [5, 300], ids=["plain", "in two steps"])
def test_gradients_of_random_sums(inputs):
    layer = MaskedLinear(inputs, MOST_OUTPUTS + 1, generator=seeded(0)).double()
    name_sites(layer)
    noise, direction = Noise(3, torch.arange(1), torch.arange(2)), randn(MOST_OUTPUTS + 1, seed=4)

    def sums(h, m):
        layer_ = _Latent(layer)
        return torch.func.functional_call(layer_, {"layer.weight": m}, (h, noise)) @ direction

    inputs_ = randn(2, inputs), randn(inputs, MOST_OUTPUTS + 1, seed=1)
    assert gradcheck(sums, [x.requires_grad_() for x in inputs_], fast_mode=True)


@pytest.mark.parametrize("case", ["no feature reaches a class", "more classes than features", "opposites"])
def test_gradients_of_draws_at_singular_covariances(case):
    """With respect to the weights, whose changes keep the covariance one; δ is a millionth, so the steps are small."""
    m = {
        "no feature reaches a class": torch.cat([randn(5, 2), torch.zeros(5, 1).double()], 1),
        "more classes than features": randn(2, 3),
        "opposites": randn(5, 1) * torch.tensor([1.0, -1.0]).double(),
    }[case]
    h, noise = randn(2, len(m), seed=1), Noise(3, torch.arange(1), torch.arange(2))

    def points(m):
        covariance = 0.25 * weighted_gram(h.square(), m)
        return Latent((h @ m)[None], covariance=covariance[None]).points(4, noise)

    assert gradcheck(points, [m.requires_grad_()], eps=1e-8, atol=1e-4, rtol=1e-3)


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


class _Latent(_Moments):
    def forward(self, h, noise):
        return self.layer.latent(h, noise, draws=4).mean


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


@pytest.mark.slow
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


def test_moments_with_an_own_theta_per_output_are_those_of_all_masks():
    """All outputs share the mask: f_q = Σ_i z_i φ_qi M_iq."""
    layer = RandomFeatureGP(3, 2, n_rf=5, theta=Theta(outputs=2), masking=Masking(0.3), generator=seeded(0)).double()
    with torch.no_grad():
        layer.kernel.log_lengthscale += torch.tensor([[0.0], [0.5]])
    c = randn(4, 3)
    terms = (layer.phi(c) * layer.weights.weight.mT).detach().numpy()  # [B, out, in]
    masks, weights = reference.all_masks(terms.shape[-1], 0.3)
    f = np.einsum("ki,bqi->kbq", masks, terms)
    mean = np.einsum("k,kbq->bq", weights, f)
    covariance = np.einsum("k,kbq,kbr->bqr", weights, f - mean, f - mean)
    found = layer.latent(c)
    np.testing.assert_allclose(found.mean[0].detach(), mean, atol=1e-13)
    np.testing.assert_allclose(found.covariance[0].detach(), covariance, atol=1e-13)


def test_many_outputs_are_points_with_the_moments_of_all_masks():
    """Without Q² covariances: antithetic pairs E f ± δ, whose average over all signs has the covariance."""
    layer = MaskedLinear(4, MOST_OUTPUTS + 1, masking=Masking(0.3), generator=seeded(0)).double()
    name_sites(layer)
    h, rows = randn(2, 4), torch.arange(2)
    found = layer.latent(h.repeat(4000, 1), Noise(0, torch.arange(4000), rows), draws=4).by_sample(2)
    assert found.is_points and found.mean.shape == (16_000, 2, MOST_OUTPUTS + 1)
    torch.testing.assert_close(found.mean.mean(0), layer.mean(h), rtol=0, atol=1e-12)  # exact: pairs
    delta = (found.mean[:8000] - layer.mean(h)).transpose(0, 1)  # the first of each pair
    covariance = delta.mT @ delta / 8000
    expected = layer.covariance(h)
    scale = expected.diagonal(dim1=-2, dim2=-1).sqrt()
    bound = 5 * math.sqrt(2 / 8000) * scale[..., :, None] * scale[..., None, :]  # of 8,000 draws
    assert ((covariance - expected).abs() < bound).all()


@pytest.mark.parametrize("classes", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_the_moments_of_many_classes_are_right_though_inputs_share_signs_in_groups(classes):
    """512 features, so signs in two steps. Of f in 12 directions u: mean exact, covariance (Mu)ᵀ diag(h²) (Mv) / 4.

    4,000 samples have signs of their own; for no kind of signs a product of two draws varies more than for Gaussians,
    whose sample covariance has the standard error √(2 / 4000) σ_u σ_v at most.
    """
    layer, samples = MaskedLinear(512, classes, generator=seeded(0)).double(), 4000
    assert BUCKETS < 512
    name_sites(layer)
    directions, h = randn(classes, 12, seed=1), randn(1, 512, seed=2)
    delta = []
    with torch.no_grad():
        for first in range(0, samples, 200):
            noise = Noise(0, torch.arange(first, first + 200), torch.arange(1))
            points = layer.latent(h.expand(200, -1), noise, draws=2).mean  # [2, 200, classes]
            torch.testing.assert_close(points.mean(0), layer.mean(h).expand(200, -1), rtol=0, atol=1e-12)
            delta.append((points[0] - layer.mean(h)) @ directions)
        delta = torch.cat(delta)
        projected = layer.weight @ directions
        expected = 0.25 * projected.mT @ (h.T.square() * projected)
    deviation = expected.diagonal().sqrt()
    error = math.sqrt(2 / samples) * torch.outer(deviation, deviation)
    assert ((delta.mT @ delta / samples - expected).abs() < 5 * error).all()
    assert (delta.mean(0).abs() < 5 * deviation / math.sqrt(samples)).all()


@pytest.mark.slow
@pytest.mark.parametrize("classes", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_points_of_many_classes_predict_as_masks_do(classes):
    """32 points, of which 16 are independent, against 2,000 masks, at 1,024 features and 40 inputs.

    The mean square error of the largest probability is that of 16 to 32 draws, of the size of a draw's variance / 24.
    """
    layer = MaskedLinear(1024, classes, std=0.25, generator=seeded(0))
    name_sites(layer)
    h = (1.1 * randn(40, 1024, seed=1).abs()).float()
    with torch.no_grad():
        points = layer.latent(h, Noise(0, torch.arange(1), torch.arange(40)), draws=32).mean
        exact = torch.zeros(40, classes)
        for first in range(0, 2000, 100):
            f = layer(h, Noise(1, torch.arange(first, first + 100), torch.arange(40)))
            exact += f.unflatten(0, (-1, 40)).softmax(-1).sum(0) / 2000
    top = exact.argmax(-1, keepdim=True)
    draws = points.softmax(-1).gather(2, top.expand(32, -1, -1)).squeeze(-1)  # [32, 40]
    variance = draws.var(0).mean()
    assert variance > 0.02  # there is something to average
    error = (draws.mean(0) - exact.gather(1, top).squeeze(-1)).square().mean()
    assert variance / 100 < error < variance / 12


def test_points_of_many_classes_for_samples_that_begin_here():
    """Nothing before was drawn: N rows become S · N, each as it would be alone."""
    layer = MaskedLinear(200, MOST_OUTPUTS + 1, generator=seeded(0)).double()
    name_sites(layer)
    h, rows = randn(3, 200), torch.arange(3)
    found = layer.latent(h, Noise(0, torch.arange(5), rows), draws=4).by_sample(3).mean.unflatten(0, (4, 5))
    for s in range(5):
        alone = layer.latent(h[[2]], Noise(0, torch.tensor([s]), rows[[2]]), draws=4).mean
        torch.testing.assert_close(found[:, s, 2], alone[:, 0], rtol=0, atol=1e-12)


def test_with_half_of_the_inputs_kept_points_are_draws_of_masks():
    """π = ½, few inputs: ½ ± ½ ε is 0 or 1; a point is the output for a mask, its partner that of the other inputs."""
    layer = MaskedLinear(3, MOST_OUTPUTS + 1, masking=Masking(0.5), generator=seeded(0)).double()
    name_sites(layer)
    h = randn(1, 3)
    masks, _ = reference.all_masks(3, 0.5)
    possible = torch.from_numpy(masks) * h @ layer.weight  # [8, out]
    noise = Noise(0, torch.arange(50), torch.arange(1))
    points = layer.latent(h.expand(50, -1), noise, draws=2).by_sample(1).mean[:, 0]
    distance = (points[:, None] - possible).abs().amax(-1).min(1)
    assert (distance.values < 1e-12).all() and len(distance.indices.unique()) == 8


@pytest.mark.parametrize("q", [1, 2, 10])
def test_the_factor_for_exports_is_choleskys(q):
    a = randn(5, q, q)
    a = a @ a.mT + 0.1 * torch.eye(q, dtype=torch.float64)
    torch.testing.assert_close(_cholesky_by_columns(a), torch.linalg.cholesky(a), rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("known", ["covariance", "variance"])
def test_quasi_random_draws_are_the_same_for_all_rows_and_integrate_well(known):
    """E softmax(f) of Gaussians f of the size that trained models have, against 400,000 draws, whatever the batch.

    For 95 % of them the largest error of a probability is below 4e-3; that of 256 random draws is 2e-2.
    """
    scale = 1 + torch.arange(40)[:, None] / 20  # deviations from 1 to 3
    mean, a = scale * 2 * randn(40, 10), scale[..., None] * randn(40, 10, 10, seed=1) / math.sqrt(10)
    covariance = a @ a.mT if known == "covariance" else torch.diag_embed((a @ a.mT).diagonal(dim1=1, dim2=2))
    latent = {
        "covariance": Latent(mean[None], covariance=covariance[None]),
        "variance": Latent(mean[None], covariance[None].diagonal(dim1=2, dim2=3)),
    }[known]
    noise = Noise(0, torch.arange(1), torch.arange(40), draws=256)
    found = Softmax().log_probs(latent, noise)
    assert found.shape == (256, 40, 10)
    part = Latent(*(None if each is None else each[:, 20:] for each in latent))
    alone = Softmax().log_probs(part, noise._replace(rows=torch.arange(7, 27)))
    torch.testing.assert_close(found[:, 20:], alone, rtol=0, atol=1e-12)  # rounding alone
    exact, root = torch.zeros(40, 10, dtype=torch.float64), covariance_root(covariance)
    for seed in range(20):
        epsilon = torch.randn(10_000, 10, generator=seeded(seed), dtype=torch.float64)
        deviation = torch.einsum("nqr,kr->knq", root, epsilon)
        exact += ((mean + deviation).softmax(-1).mean(0) + (mean - deviation).softmax(-1).mean(0)) / 40
    error = (found.exp().mean(0) - exact).abs().amax(-1)
    assert error.quantile(0.95) < 4e-3
    random = Softmax(draws=256).log_probs(latent, noise._replace(draws=None)).exp().mean(0)
    assert error.square().mean() < (random - exact).abs().amax(-1).square().mean() / 16
