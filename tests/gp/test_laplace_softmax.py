"""The vector GP against its own equations in dense NumPy, and scikit-learn's kernels and logistic regression."""

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF
from sklearn.linear_model import LogisticRegression

from calgp.gp.laplace_softmax import Basis, Mode, VectorGP, VectorKernel, find_mode, minimise, weight_root

BENT = VectorKernel(linear=0.5, radial=2.0, lengthscale=0.7)


def points(n=60, d=4, classes=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    u = torch.randn(n, d, generator=generator, dtype=torch.float64) / d**0.5
    y = (u[:, 0] * u[:, 1] > 0).long() + (u[:, 2] > 0.3).long()
    return u, y.clamp_max(classes - 1)


def test_the_kernel_is_scikit_learns():
    u, v = points()[0].numpy(), points(seed=1)[0].numpy()
    expected = 0.5 * u @ v.T + 2 * RBF(0.7)(u, v)
    np.testing.assert_allclose(BENT.covariance(torch.tensor(u), torch.tensor(v)), expected, rtol=1e-12)
    np.testing.assert_allclose(BENT.diagonal(torch.tensor(u)), np.diag(0.5 * u @ u.T + 2 * RBF(0.7)(u)), rtol=1e-12)


def test_an_exact_basis_gives_the_covariance_at_all_inputs():
    u, _ = points()
    basis, phi = Basis.exact(BENT, u)
    torch.testing.assert_close(phi @ phi.mT, BENT.covariance(u, u), atol=1e-6, rtol=0)  # SMALLEST of 100 or so
    torch.testing.assert_close(basis(u), phi, atol=1e-8, rtol=0)
    gram = phi.mT @ phi
    assert (gram - gram.diagonal().diag()).abs().max() < 1e-9
    other, _ = points(seed=1)
    torch.testing.assert_close(basis(other) @ phi.mT, BENT.covariance(other, u), atol=1e-4, rtol=0)


def test_a_basis_of_some_inputs_is_nystroems():
    u, _ = points()
    z = u[:20]
    basis, phi = Basis.of(BENT, z, u)
    k = BENT.covariance(u, z)
    nystroem = k @ torch.linalg.solve(BENT.covariance(z, z), k.mT)
    torch.testing.assert_close(phi @ phi.mT, nystroem, atol=1e-5, rtol=0)
    torch.testing.assert_close(basis(u), phi, atol=1e-10, rtol=0)
    gram = phi.mT @ phi
    assert (gram - gram.diagonal().diag()).abs().max() < 1e-9
    residual = basis.residual(u, phi)
    torch.testing.assert_close(residual[:20], torch.zeros(20, dtype=torch.float64), atol=1e-6, rtol=0)
    torch.testing.assert_close(residual, (BENT.covariance(u, u) - nystroem).diagonal().clamp_min(0), atol=1e-5, rtol=0)


def test_at_the_mode_f_is_the_covariance_times_the_errors():
    """K⁻¹ (f − b) / σ² = onehot(y) − p, and the errors of each class sum to b / σ_b²."""
    u, y = points()
    _, phi = Basis.exact(BENT, u)
    mode = find_mode(phi, y, 3, 4.0, tolerance=1e-9, steps=500)
    f = mode(phi)
    errors = torch.nn.functional.one_hot(y, 3) - f.softmax(1)
    torch.testing.assert_close(f - mode.bias, 4.0 * BENT.covariance(u, u) @ errors, atol=1e-6, rtol=0)
    torch.testing.assert_close(errors.sum(0), mode.bias / 100, atol=1e-6, rtol=0)


def test_with_a_linear_kernel_it_is_logistic_regression():
    """C is the prior variance, but for the bias, which scikit-learn leaves without a prior."""
    u, y = points(n=200)
    _, phi = Basis.exact(VectorKernel(linear=1.0), u)
    found = find_mode(phi, y, 3, 5.0, tolerance=1e-9, steps=500)(phi).softmax(1)
    expected = LogisticRegression(C=5.0, tol=1e-10, max_iter=10_000).fit(u, y).predict_proba(u)
    np.testing.assert_allclose(found, expected, atol=2e-3)  # the bias has a prior of deviation 10 here


def test_a_warm_start_ends_at_the_same_mode():
    u, y = points()
    _, phi = Basis.exact(BENT, u)
    cold = find_mode(phi, y, 3, 4.0, tolerance=1e-9, steps=500)
    warm = find_mode(phi, y, 3, 4.0, start=Mode(cold.weight + 0.1, cold.bias - 1), tolerance=1e-9, steps=500)
    torch.testing.assert_close(warm.weight, cold.weight, atol=1e-7, rtol=0)


def test_in_the_coordinates_of_a_mode_nearby_it_is_the_same_mode():
    """Nearby: that of half of the rows, with another σ²."""
    u, y = points(n=400, d=6)
    _, phi = Basis.exact(BENT, u)
    near = find_mode(phi[:200], y[:200], 3, 100.0, tolerance=1e-9, steps=1000)
    plain = find_mode(phi, y, 3, 30.0, tolerance=1e-9, steps=1000)
    turned = find_mode(phi, y, 3, 30.0, start=near, root=weight_root(phi, near, 30.0), tolerance=1e-9, steps=1000)
    assert (near(phi) - plain(phi)).abs().max() > 1
    torch.testing.assert_close(turned(phi), plain(phi), atol=1e-6, rtol=0)


@pytest.mark.parametrize("inducing", [60, 15])
def test_the_variance_is_laplaces(inducing):
    """v = k** − k*ᵀ (K + H⁻¹)⁻¹ k*, with K of the approximation and what it leaves of k** added."""
    u, y = points()
    test, _ = points(n=10, seed=1)
    basis, phi = Basis.exact(BENT, u) if inducing == 60 else Basis.of(BENT, u[:inducing], u)
    mode = find_mode(phi, y, 3, 4.0, tolerance=1e-9, steps=500)
    p = mode(phi).softmax(1).numpy()
    h = (p * (1 - p)).max(1)
    k, cross = 4 * (phi @ phi.mT).numpy(), 4 * (basis(test) @ phi.mT).numpy()
    expected = 4 * BENT.diagonal(test).numpy() - (cross @ np.linalg.solve(k + np.diag(1 / h), cross.T)).diagonal()
    latent = VectorGP.fit(basis, phi, mode, 4.0).latent(test)
    assert latent.mean.shape == latent.marginal_variance.shape == (1, 10, 3)
    np.testing.assert_allclose(latent.marginal_variance[0, :, 0], expected, rtol=1e-6)


def test_far_from_all_inputs_the_variance_is_the_priors():
    u, y = points()
    basis, phi = Basis.exact(VectorKernel(radial=1.0), u)
    process = VectorGP.fit(basis, phi, find_mode(phi, y, 3, 4.0), 4.0)
    far = torch.full((1, 4), 100.0, dtype=torch.float64)
    assert process.latent(far).marginal_variance[0, 0, 0].item() == pytest.approx(4.0, rel=1e-9)
    assert process.latent(u).marginal_variance.max() < 4.0


def test_the_minimum_of_a_badly_scaled_quadratic():
    scale = torch.logspace(0, 3, 20, dtype=torch.float64)
    found = minimise(
        lambda x: ((scale * (x - 1).square()).sum().item() / 2, scale * (x - 1)),
        torch.zeros(20, dtype=torch.float64), tolerance=1e-8, steps=500,
    )  # fmt: skip
    torch.testing.assert_close(found, torch.ones(20, dtype=torch.float64), atol=1e-8, rtol=0)
