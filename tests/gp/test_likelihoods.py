import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats

import reference
from calgp.gp import Bound, Gaussian, Latent, MixedSoftmax, Model, Noise, RobustMax, Softmax


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


def largest_by_scipy(mean, deviation, y):
    """P(f_y is the largest) for independent Gaussians, by adaptive integration."""
    others = [q for q in range(len(mean)) if q != y]

    def integrand(f):
        below = np.prod([stats.norm.cdf(f, mean[q], deviation[q]) for q in others])
        return stats.norm.pdf(f, mean[y], deviation[y]) * below

    edge = 12 * deviation[y]
    return integrate.quad(integrand, mean[y] - edge, mean[y] + edge, points=[mean[y]], epsabs=1e-12, limit=200)[0]


@pytest.mark.parametrize("classes", [2, 3, pytest.param(10, marks=pytest.mark.slow)])
def test_robust_max_equals_integration(classes):
    """Deviations within a factor of three, means within their reach: the accuracy that the docstring promises."""
    generator = torch.Generator().manual_seed(classes)
    mean = torch.randn(1, 6, classes, generator=generator, dtype=torch.float64)
    variance = (0.5 + torch.rand(1, 6, classes, generator=generator, dtype=torch.float64)).square()
    y = torch.arange(6) % classes
    likelihood = RobustMax(epsilon=0.01)
    value = likelihood.expected_log_prob(Latent(mean, variance), y)
    probs = likelihood.log_probs(Latent(mean, variance)).exp()[0]
    for i in range(6):
        exact = [largest_by_scipy(mean[0, i].numpy(), variance[0, i].sqrt().numpy(), q) for q in range(classes)]
        assert sum(exact) == pytest.approx(1, abs=1e-9)
        expected = exact[y[i]] * math.log(0.99) + (1 - exact[y[i]]) * math.log(0.01 / (classes - 1))
        assert value[i].item() == pytest.approx(expected, abs=1e-3 * math.log(100 * classes))
        np.testing.assert_allclose(probs[i], [p * 0.99 + (1 - p) * 0.01 / (classes - 1) for p in exact], atol=1e-3)


def test_robust_max_of_two_classes_in_closed_form():
    """P(f₀ > f₁) = Φ((μ₀ − μ₁) / sqrt(σ₀² + σ₁²))."""
    f = gaussian_latent(n=20)
    exact = stats.norm.cdf((f.mean[0, :, 0] - f.mean[0, :, 1]) / f.variance[0].sum(-1).sqrt())
    probs = RobustMax(epsilon=0.05, nodes=60).log_probs(f).exp()[0, :, 0]
    np.testing.assert_allclose(probs, 0.95 * exact + 0.05 * (1 - exact), atol=1e-4)


def test_robust_max_agrees_with_draws():
    f, likelihood = gaussian_latent(components=2, classes=4), RobustMax(epsilon=0.1)
    y, draws = torch.tensor([0, 1, 2, 3]), 40_000
    winners = f.points(draws, keyed(4, samples=2)).unflatten(0, (2, draws)).argmax(-1)  # [2, draws, N]
    share = torch.nn.functional.one_hot(winners, 4).double().mean(1)
    error = 5 * 0.5 / draws**0.5  # five standard errors of a share
    torch.testing.assert_close(
        likelihood.log_probs(f).exp(), 0.9 * share + 0.1 / 3 * (1 - share), rtol=0, atol=error + 1e-3
    )
    right = (winners == y).double().mean((0, 1))
    expected = right * math.log(0.9) + (1 - right) * math.log(0.1 / 3)
    torch.testing.assert_close(likelihood.expected_log_prob(f, y), expected, rtol=0, atol=(error + 1e-3) * math.log(27))


def test_robust_max_of_points_is_the_largest_and_ties_share():
    f = torch.tensor([[[1.0, 2.0, 0.0], [3.0, 3.0, 0.0], [0.0, 0.0, 0.0], [1e4, -1e4, 1e4]]])
    expected = torch.tensor([[0, 1, 0], [0.5, 0.5, 0], [1 / 3, 1 / 3, 1 / 3], [0.5, 0, 0.5]])
    probs = RobustMax(epsilon=0.01).log_probs(Latent(f)).exp()[0]
    torch.testing.assert_close(probs, expected * 0.99 + (1 - expected) * 0.005, rtol=0, atol=1e-4)  # 20 nodes
    y = torch.tensor([1, 0, 2, 1])
    value = RobustMax(epsilon=0.01).expected_log_prob(Latent(f), y)
    share = expected[torch.arange(4), y]
    torch.testing.assert_close(value, share * math.log(0.99) + (1 - share) * math.log(0.005), rtol=0, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("classes", [2, 100])
def test_robust_max_is_finite_with_its_gradients_and_sums_to_one(dtype, classes):
    generator = torch.Generator().manual_seed(0)
    mean = torch.cat([scale * torch.randn(3, 4, classes, generator=generator, dtype=dtype) for scale in (1, 100)])
    variance = torch.rand(6, 4, classes, generator=generator, dtype=dtype) ** 8  # from 1 down to nothing
    mean.requires_grad_(), variance.requires_grad_()
    log_probs = RobustMax().log_probs(Latent(mean, variance))
    assert log_probs.dtype == dtype
    assert log_probs.isfinite().all()
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(6, 4, dtype=dtype), rtol=0, atol=1e-5)
    value = RobustMax().expected_log_prob(Latent(mean, variance), torch.arange(4) % classes)
    (value.sum() + log_probs.sum()).backward()
    assert value.isfinite().all() and mean.grad.isfinite().all() and variance.grad.isfinite().all()


def test_robust_max_draws_nothing():
    f = gaussian_latent()
    assert torch.equal(RobustMax().log_probs(f, keyed(4, seed=1)), RobustMax().log_probs(f, keyed(4, seed=2)))


@pytest.mark.parametrize("wrong", [{"epsilon": 0.0}, {"epsilon": 1.0}, {"nodes": 0}])
def test_robust_max_needs_a_share_and_nodes(wrong):
    with pytest.raises(ValueError, match="must"):
        RobustMax(**wrong)


def test_gaussian_likelihood_equals_the_expectation_by_quadrature():
    f, noise = gaussian_latent(components=3), 0.3
    y = torch.randn(4, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    nodes, weights = np.polynomial.hermite_e.hermegauss(20)
    expected = np.zeros(4)
    for s, i, q in np.ndindex(3, 4, 2):
        draws = f.mean[s, i, q].item() + math.sqrt(f.variance[s, i, q].item()) * nodes
        expected[i] += stats.norm.logpdf(y[i, q].item(), draws, math.sqrt(noise)) @ weights / weights.sum() / 3
    # σ² is stored in float32 first
    np.testing.assert_allclose(Gaussian(noise).double().expected_log_prob(f, y).detach(), expected, rtol=1e-6)


def test_gaussian_likelihood_needs_only_the_variances_of_a_covariance():
    """The squares of a sum over functions: what varies together makes no difference to its mean."""
    a = torch.randn(1, 4, 2, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    mean, covariance, y = gaussian_latent().mean, a @ a.mT, torch.zeros(4, 2, dtype=torch.float64)
    found = Gaussian(0.3).double().expected_log_prob(Latent(mean, covariance=covariance), y)
    alone = Latent(mean, covariance.diagonal(dim1=-2, dim2=-1))
    torch.testing.assert_close(found, Gaussian(0.3).double().expected_log_prob(alone, y))
    draws = Latent(Latent(mean, covariance=covariance).points(40_000, keyed(4)))
    error = 5 * 2**0.5 * covariance.diagonal(dim1=-2, dim2=-1).sum(-1) / 0.3 / 200 + 0.05  # of 40,000 draws
    assert ((found - Gaussian(0.3).double().expected_log_prob(draws, y)).abs() < error).all()


def test_robust_max_refuses_functions_that_vary_together():
    f = Latent(torch.zeros(1, 2, 3), covariance=torch.eye(3).expand(1, 2, 3, 3))
    with pytest.raises(TypeError, match="have a covariance; use softmax"):
        RobustMax().log_probs(f)


def test_gaussian_likelihood_of_points_is_the_normal_density_and_takes_one_target_each():
    f, y = latent(samples=1, classes=1), torch.linspace(-1, 1, 5, dtype=torch.float64)
    value = Gaussian(2.0).double().expected_log_prob(f, y).detach()
    np.testing.assert_allclose(value, stats.norm.logpdf(y, f.mean[0, :, 0], math.sqrt(2.0)), rtol=1e-6)


def test_the_best_noise_is_the_mean_squared_error_and_is_learned():
    f, y = gaussian_latent(n=50, classes=1), torch.randn(50, generator=torch.Generator().manual_seed(0)).double()
    best = ((y - f.mean[0, :, 0]).square() + f.variance[0, :, 0]).mean().item()
    likelihood = Gaussian(best).double()
    (gradient,) = torch.autograd.grad(likelihood.expected_log_prob(f, y).sum(), likelihood.log_variance)
    assert gradient.item() == pytest.approx(0, abs=1e-4)  # 50 times the rounding of float32


def test_a_gaussian_likelihood_has_a_bound_but_no_classes():
    class Line(Model):
        def __init__(self):
            super().__init__()
            self.likelihood, self.slope = Gaussian(), torch.nn.Parameter(torch.ones(1))

        def sample(self, h, noise):
            return Latent((h * self.slope)[None, :, None])

        def kl(self):
            return self.slope.square().sum() / 2

    x = torch.tensor([1.0, 2.0])
    nll, kl = Bound(Line(), n=2)(x, torch.tensor([1.0, 3.0]))
    assert nll.item() == pytest.approx((math.log(2 * math.pi) + 0.5) / 2)
    assert kl.item() == pytest.approx(0.25)
    with pytest.raises(TypeError, match="no classes"):
        Gaussian().log_probs(Line()(x))
