import numpy as np
import pytest
import torch

import reference
from calgp.gp import Latent, MixedSoftmax, Noise, Softmax


def latent(samples=4, n=5, classes=3, *, scale=1.0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return Latent(scale * torch.randn(samples, n, classes, generator=generator, dtype=dtype))


def test_log_probs_equal_numpys_softmax():
    f = latent()
    np.testing.assert_allclose(Softmax().log_probs(f).exp(), reference.softmax(f.mean.numpy()), rtol=1e-13)


def test_expected_log_prob_is_the_average_over_samples_of_the_labels_log_probability():
    f, y = latent(), torch.tensor([0, 2, 1, 1, 0])
    p = reference.softmax(f.mean.numpy())
    expected = [np.mean([np.log(p[s, i, y[i]]) for s in range(4)]) for i in range(5)]
    np.testing.assert_allclose(Softmax().expected_log_prob(f, y), expected, rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_extreme_logits_stay_finite_and_sum_to_one(dtype):
    f = torch.tensor([[[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4], [1e4, 1e4, -1e4], [3e4, 0.0, 0.0]]], dtype=dtype)
    log_probs = Softmax().log_probs(Latent(f))
    assert log_probs.isfinite().all()
    np.testing.assert_allclose(log_probs.double().exp().sum(-1), 1, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6)
    assert Softmax().expected_log_prob(Latent(f), torch.tensor([1, 0, 2, 2])).isfinite().all()
    assert log_probs[0, 0, 1].item() == pytest.approx(-2e4, rel=1e-2)  # log space: not log 0


def test_gradients_at_extreme_logits_are_finite():
    f = torch.tensor([[[1e4, -1e4, 0.0]]], requires_grad=True)
    Softmax().expected_log_prob(Latent(f), torch.tensor([1])).sum().backward()
    torch.testing.assert_close(f.grad, torch.tensor([[[-1.0, 1.0, 0.0]]]))  # one-hot less softmax


def gaussian_latent(components=1, n=4, classes=2):
    generator = torch.Generator().manual_seed(1)
    mean = torch.randn(components, n, classes, generator=generator, dtype=torch.float64)
    return Latent(mean, torch.rand(components, n, classes, generator=generator, dtype=torch.float64) + 0.1)


def keyed(n, samples=1, seed=0):
    return Noise(seed, torch.arange(samples), torch.arange(n))


def test_points_of_a_gaussian_have_its_mean_and_variance():
    f, draws = gaussian_latent(), 20_000
    points = f.points(draws, keyed(4))
    assert points.shape == (draws, 4, 2)
    # five standard errors of a mean and of a variance
    error = (f.variance / draws).sqrt()
    assert ((points.mean(0) - f.mean[0]).abs() < 5 * error[0]).all()
    assert ((points.var(0) / f.variance[0] - 1).abs() < 5 * (2 / draws) ** 0.5).all()


def test_each_component_has_its_own_draws_and_a_single_one_is_drawn_for_each_sample():
    assert gaussian_latent(components=3).points(5, keyed(4, samples=3)).shape == (15, 4, 2)
    points = gaussian_latent().points(5, keyed(4, samples=3))
    assert points.shape == (15, 4, 2) and len(points.unique()) == 15 * 4 * 2


def test_a_gaussian_is_integrated_as_by_quadrature():
    """Of two classes only the difference of the functions matters: Gauss–Hermite in one dimension is the truth."""
    f, y = gaussian_latent(), torch.tensor([0, 1, 1, 0])
    likelihood = Softmax(draws=40_000)
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)
    mean = (f.mean[0, :, 1] - f.mean[0, :, 0]).numpy()
    deviation = f.variance[0].sum(-1).sqrt().numpy()
    difference = mean[:, None] + deviation[:, None] * nodes  # f₁ − f₀
    log_p1 = -np.logaddexp(0, -difference)
    log_p = np.where(y[:, None].numpy() == 1, log_p1, log_p1 - difference)
    weights = weights / weights.sum()
    # standard deviations of the integrands are below 2: five errors of 40,000 draws are 0.05
    np.testing.assert_allclose(likelihood.expected_log_prob(f, y, keyed(4)), log_p @ weights, atol=0.05)
    p1 = likelihood.log_probs(f, keyed(4)).exp().mean(0)[:, 1]
    np.testing.assert_allclose(p1, np.exp(log_p1) @ weights, atol=0.0125)


def test_a_variance_of_zero_is_a_point_and_passes_a_finite_gradient():
    mean = torch.randn(1, 3, 2, generator=torch.Generator().manual_seed(0))
    variance = torch.zeros(1, 3, 2, requires_grad=True)
    y = torch.tensor([0, 1, 0])
    value = Softmax().expected_log_prob(Latent(mean, variance), y, keyed(3))
    torch.testing.assert_close(value, Softmax().expected_log_prob(Latent(mean), y))
    value.sum().backward()
    assert variance.grad.isfinite().all()


def test_mixtures_of_points_are_the_softmax_of_their_product():
    f = latent(classes=6)
    likelihood = MixedSoftmax(6, 3, generator=torch.Generator().manual_seed(0)).double()
    p = reference.softmax(f.mean.numpy() @ likelihood.mixing.detach().numpy())
    np.testing.assert_allclose(likelihood.log_probs(f).exp().detach(), p, rtol=1e-12)
    y = torch.tensor([0, 2, 1, 1, 0])
    expected = [np.mean([np.log(p[s, i, y[i]]) for s in range(4)]) for i in range(5)]
    np.testing.assert_allclose(likelihood.expected_log_prob(f, y).detach(), expected, rtol=1e-12)


def test_mixtures_of_gaussians_are_integrated_as_by_quadrature():
    """f₁ − f₀ = g (a₁ − a₀) is Gaussian with variance Σ v_k (a₁ − a₀)_k²: correlations of f count."""
    f, y = gaussian_latent(classes=5), torch.tensor([0, 1, 1, 0])
    likelihood = MixedSoftmax(5, 2, draws=40_000, generator=torch.Generator().manual_seed(0)).double()
    a = likelihood.mixing.detach().numpy()
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)
    mean, deviation = f.mean[0].numpy() @ (a[:, 1] - a[:, 0]), np.sqrt(f.variance[0].numpy() @ (a[:, 1] - a[:, 0]) ** 2)
    difference = mean[:, None] + deviation[:, None] * nodes
    log_p1 = -np.logaddexp(0, -difference)
    log_p = np.where(y[:, None].numpy() == 1, log_p1, log_p1 - difference)
    weights = weights / weights.sum()
    # as above: five errors of 40,000 draws
    value = likelihood.expected_log_prob(f, y, keyed(4)).detach()
    np.testing.assert_allclose(value, log_p @ weights, atol=0.05)
    p1 = likelihood.log_probs(f, keyed(4)).exp().mean(0)[:, 1].detach()
    np.testing.assert_allclose(p1, np.exp(log_p1) @ weights, atol=0.0125)
