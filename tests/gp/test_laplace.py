import math

import numpy as np
import pytest
import torch

import reference
from calgp.gp import UNMASKED, LaplaceGP, Latent, RandomFeatureGP, Theta
from calgp.gp.cholesky import inverse_root
from calgp.gp.laplace import accumulate, constant_one, mean_field_logits, per_class, shared


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def process(d=5, outputs=3, n_rf=16, **options):
    generator = torch.Generator().manual_seed(7)
    options = {"frequencies": "gaussian", "masking": UNMASKED, "generator": generator} | options
    return RandomFeatureGP(d, outputs, n_rf=n_rf, **options)


def gaussian(noise):
    """Curvature of a Gaussian likelihood."""
    return lambda f: torch.full_like(f[:, :1], 1 / noise)


def fitted_to(targets, c, noise, **options):
    """A process with the mode of W for y = f + N(0, noise), in weight space; and its Laplace Gaussian."""
    gp = LaplaceGP(process(outputs=targets.shape[1], **options)).double()
    phi = gp.process.phi(c).detach().numpy()
    mode = np.linalg.solve(phi.T @ phi + noise * np.eye(phi.shape[1]), phi.T @ targets.numpy())
    with torch.no_grad():
        gp.process.weights.weight.copy_(torch.as_tensor(mode))
    gp.fit(c.split(7), gaussian(noise))
    return gp


@pytest.mark.parametrize("options", [{}, {"kernel": "rbf"}, {"frequencies": "sorf"}, {"n_rf": 60}])
def test_with_gaussian_noise_it_is_exact_regression_in_function_space(options):
    """Laplace is exact there: the Bayesian linear model on Φ is the process with covariance ΦΦᵀ."""
    c, new, noise = randn(20, 5), randn(6, 5, seed=1), 0.3
    y = randn(20, 3, seed=2)
    gp = fitted_to(y, c, noise, **options)
    phi, phi_new = (gp.process.phi(x).detach().numpy() for x in (c, new))
    mean, variance = reference.gp_regression(phi @ phi.T, phi_new @ phi.T, phi_new @ phi_new.T, y.numpy(), noise)
    latent = gp(new)
    np.testing.assert_allclose(latent.mean[0].detach(), mean, rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(latent.variance[0].detach(), np.repeat(variance[:, None], 3, 1), rtol=1e-9)


def test_the_mode_that_it_is_exact_at_is_the_one_that_kl_and_likelihood_have():
    c, noise, y = randn(20, 5), 0.3, randn(20, 3, seed=2)
    gp = fitted_to(y, c, noise)
    cost = (y - gp.process(c)).square().sum() / (2 * noise) + gp.kl()
    (gradient,) = torch.autograd.grad(cost, gp.process.weights.weight)
    assert gradient.abs().max() < 1e-10


@pytest.mark.parametrize("kernel", ["arc-cosine-1", "rbf"])
def test_with_many_features_it_is_regression_with_the_exact_kernel(kernel):
    c, new, noise = randn(15, 3), randn(8, 3, seed=1), 0.2
    y = randn(15, 1, seed=2)
    theta = {"lengthscale": 1.5, "sigma": 1.2}

    def k(a, b):
        if kernel == "rbf":
            return reference.rbf(a.numpy(), b.numpy(), 1.2, 1.5)
        return reference.arc_cosine(a.numpy(), b.numpy(), 1, 1.2, 1.5)

    mean, variance = reference.gp_regression(k(c, c), k(new, c), k(new, new), y.numpy(), noise)
    deviation = np.sqrt(variance)
    errors = []
    for n_rf in (20, 1000):
        latent = fitted_to(y, c, noise, d=3, n_rf=n_rf, kernel=kernel, theta=Theta(**theta))(new)
        of_means = (latent.mean[0, :, 0].detach().numpy() - mean[:, 0]) / deviation
        of_deviations = latent.variance[0, :, 0].detach().sqrt().numpy() / deviation - 1
        errors.append(np.sqrt(np.mean([of_means**2, of_deviations**2])))
    assert errors[1] < 0.1  # Monte Carlo, root mean square: some n_rf^-½ = 0.03, and K⁻¹ makes more of it
    assert errors[1] < errors[0] / 3  # √(1000 / 20) = 7 is expected


@pytest.mark.parametrize("classes", [2, 3, 100])
def test_variance_of_the_softmax_model_equals_numpys(classes):
    c, new = randn(12, 5), randn(4, 5, seed=1)
    for covariances, curvature in ((1, shared), (classes, per_class), (1, constant_one)):
        gp = LaplaceGP(process(outputs=classes), covariances=covariances).double()
        gp.fit(c.split(5), curvature)
        phi, phi_new = (gp.process.phi(x).detach().numpy() for x in (c, new))
        p = reference.softmax(gp.process(c).detach().numpy())
        h = {shared: p.max(1) * (1 - p.max(1)), constant_one: np.ones(12)}.get(curvature)
        for q in range(classes):
            weights = p[:, q] * (1 - p[:, q]) if h is None else h
            expected = reference.laplace_variance(phi, weights, phi_new)
            np.testing.assert_allclose(gp(new).variance[0, :, q].detach(), expected, rtol=1e-9)


def test_curvatures_are_the_diagonal_of_the_softmaxs_hessian_and_its_largest():
    f = randn(6, 4, seed=3)
    for i in range(6):
        hessian = torch.autograd.functional.hessian(lambda f: -f.log_softmax(-1)[2], f[i])
        torch.testing.assert_close(per_class(f)[i], hessian.diagonal())
        torch.testing.assert_close(shared(f)[i, 0], hessian.diagonal().max())
    assert (constant_one(f) == 1).all() and constant_one(f).shape == (6, 1)


def test_curvature_of_certain_predictions_is_finite_in_float32():
    f = torch.tensor([[300.0, -300.0, 0.0]])
    assert per_class(f).isfinite().all() and shared(f).item() >= 0


def test_batches_do_not_matter():
    c = randn(13, 5, dtype=torch.float32)
    gp = LaplaceGP(process())
    found = []
    for size in (13, 4, 1):
        gp.fit(c.split(size), shared)
        found.append(gp(c).variance)
    for other in found[1:]:
        torch.testing.assert_close(found[0], other, rtol=1e-5, atol=0)


def test_accumulation_is_in_double_precision():
    """1 + n · 2⁻³⁰: in single precision each step would be lost."""
    precision = torch.ones(1, 1, 1, dtype=torch.float64)
    for _ in range(100):
        accumulate(precision, torch.tensor([[1.0]]), torch.tensor([[2.0**-30]]))
    assert precision.item() == 1 + 100 * 2**-30


def test_root_of_the_covariance():
    a = randn(2, 6, 6)
    precision = torch.eye(6) + a @ a.mT
    root = inverse_root(precision)
    np.testing.assert_allclose(root @ root.mT, np.linalg.inv(precision.numpy()), rtol=1e-10, atol=1e-12)


def test_variance_shrinks_with_data_from_the_priors_and_grows_away_from_it():
    c = randn(40, 5)
    gp = LaplaceGP(process(n_rf=64)).double()
    gp.fit([c[:0]], constant_one)
    prior = gp(c).variance[0, :, 0]
    torch.testing.assert_close(prior, gp.process.phi(c).square().sum(-1))  # φᵀ φ ≈ k(x, x)
    gp.fit([c], constant_one)
    posterior = gp(c).variance[0, :, 0]
    assert (posterior < prior).all() and posterior.mean() < prior.mean() / 2
    torch.testing.assert_close(gp(10 * c).variance[0, :, 0], 100 * posterior)  # the arc-cosine kernel is homogeneous


def test_before_it_is_fitted_it_is_a_point_and_after_loading_a_gaussian():
    c = randn(9, 5, dtype=torch.float32)
    gp = LaplaceGP(process())
    assert gp(c).variance is None
    gp.fit([c], shared)
    fresh = LaplaceGP(process())
    fresh.load_state_dict(gp.state_dict())
    assert torch.equal(fresh(c).variance, gp(c).variance) and gp(c).variance.min() > 0


def test_mean_field_logits_are_the_mean_shrunk_by_the_variance():
    latent = Latent(randn(1, 4, 3), randn(1, 4, 3, seed=1).square())
    expected = latent.mean.numpy() / np.sqrt(1 + np.pi / 8 * latent.variance.numpy())
    points = mean_field_logits(latent)
    assert points.variance is None
    np.testing.assert_allclose(points.mean, expected, rtol=1e-14)
    assert mean_field_logits(Latent(latent.mean)) == Latent(latent.mean)


def test_mean_field_logits_approximate_the_average_of_the_logistic():
    """Of two classes, one of them at 0: E σ(f) by quadrature; the approximation is known to be good to 0.02."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    for mean in (-3.0, 0.5, 2.0):
        for variance in (0.1, 1.0, 9.0):
            exact = (1 / (1 + np.exp(-(mean + math.sqrt(variance) * nodes)))) @ weights / weights.sum()
            latent = Latent(torch.tensor([[[mean, 0.0]]]), torch.tensor([[[variance, 0.0]]]))
            assert mean_field_logits(latent).mean.softmax(-1)[0, 0, 0].item() == pytest.approx(exact, abs=0.02)


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="functions"):
        LaplaceGP(process(outputs=3), covariances=2)
    with pytest.raises(ValueError, match="functions"):
        LaplaceGP(process(outputs=3, theta=Theta(outputs=3)))
