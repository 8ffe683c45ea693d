import math

import numpy as np
import pytest
import torch

import reference
from calgp.gp import (
    RBF,
    Bound,
    Covariances,
    Gaussian,
    Inducing,
    InducingPoints,
    Latent,
    Model,
    NumericalError,
    SparseGP,
    Theta,
    make_kernel,
)

KERNELS = ("rbf", "arc-cosine-1", "arc-cosine-2")


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def with_posterior(gp, seed=3):
    """The same GP with some other q(v) than the prior."""
    with torch.no_grad():
        gp.mean.copy_(randn(*gp.mean.shape, seed=seed))
        gp.scale.copy_(0.3 * randn(*gp.scale.shape, seed=seed + 1))
    return gp


def sparse(kernel="rbf", *, m=6, d=3, outputs=2, ard=False, sigma=1.3, lengthscale=1.1, points=None):
    kernel = make_kernel(kernel, d, Theta(lengthscale, sigma, ard, learn=True)).double()
    if ard:
        with torch.no_grad():
            kernel.log_lengthscale.copy_(torch.linspace(-0.5, 0.5, d))
    points = randn(m, d, seed=1) if points is None else points
    return with_posterior(SparseGP(InducingPoints(kernel, points), outputs).double())


def naive_kernel(kernel, c1, c2):
    theta = kernel.sigma.item(), kernel.lengthscale.detach().numpy()
    if isinstance(kernel, RBF):
        return reference.rbf(c1.numpy(), c2.numpy(), *theta)
    return reference.arc_cosine(c1.numpy(), c2.numpy(), kernel.order, *theta)


@pytest.mark.parametrize("ard", [False, True])
@pytest.mark.parametrize("kernel", KERNELS)
def test_moments_equal_the_conditional_written_out_in_numpy(kernel, ard):
    """By u itself, unwhitened: q(u) = N(Lm, L S Lᵀ), mean K_fu K⁻¹ μ, variance k_ff − K_fu K⁻¹ (K − Σ) K⁻¹ K_uf."""
    gp, c = sparse(kernel, ard=ard), randn(5, 3, seed=2)
    with torch.no_grad():
        mean, variance = gp(c)
    z = gp.inducing.points.detach()
    k_uu, k_fu, k_ff = (naive_kernel(gp.inducing.kernel, *pair) for pair in ((z, z), (c, z), (c, c)))
    k_uu += 1e-6 * np.mean(np.diag(k_uu)) * np.eye(6)
    factor = np.linalg.cholesky(k_uu)
    for q in range(2):
        root = gp.root[q].detach().numpy()
        mu, sigma = factor @ gp.mean[:, q].detach().numpy(), factor @ root @ root.T @ factor.T
        weights = k_fu @ np.linalg.inv(k_uu)
        # arccos on the diagonal of K_uu loses half of the digits (test_kernels); the inverse multiplies that
        np.testing.assert_allclose(mean[:, q], weights @ mu, rtol=1e-5, atol=1e-5)
        expected = np.diag(k_ff - weights @ (k_uu - sigma) @ weights.T)
        np.testing.assert_allclose(variance[:, q], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("default")  # gpytorch's own warnings are not ours to judge
@pytest.mark.parametrize("ard", [False, True])
def test_moments_and_kl_equal_gpytorchs(ard):
    import gpytorch

    class Theirs(gpytorch.models.ApproximateGP):
        def __init__(self, points, kernel, outputs, jitter):
            shape = torch.Size([outputs])
            q = gpytorch.variational.CholeskyVariationalDistribution(len(points), batch_shape=shape)
            strategy = gpytorch.variational.VariationalStrategy(
                self, points.repeat(outputs, 1, 1), q, jitter_val=jitter
            )
            super().__init__(strategy)
            self.mean_module, self.covar_module = gpytorch.means.ZeroMean(), kernel

        def forward(self, x):
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    gp, c = sparse(ard=ard, m=5, lengthscale=0.7), randn(7, 3, seed=2)
    ours = gp.inducing.kernel
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=3 if ard else None)).double()
    kernel.outputscale, kernel.base_kernel.lengthscale = ours.sigma.detach() ** 2, ours.lengthscale.detach()
    jitter = 1e-6 * ours.sigma.item() ** 2
    theirs = Theirs(gp.inducing.points.detach(), kernel, 2, jitter).double().eval()
    q = theirs.variational_strategy._variational_distribution
    with torch.no_grad():
        q.variational_mean.copy_(gp.mean.mT)
        q.chol_variational_covar.copy_(gp.root)
        theirs.variational_strategy.variational_params_initialized.fill_(1)  # else a first call sets q(v) to the prior
        result = theirs(c)
        mean, variance = gp(c)
        # 1e-8: gpytorch's distances. It adds the jitter to the variance of f as well
        torch.testing.assert_close(mean, result.mean.mT, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(variance, result.variance.mT - jitter, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(gp.kl(), theirs.variational_strategy.kl_divergence().sum(), rtol=1e-10, atol=0)


def test_kl_equals_torchs_own():
    gp = sparse(outputs=3)
    posterior = torch.distributions.MultivariateNormal(gp.mean.mT, scale_tril=gp.root)
    prior = torch.distributions.MultivariateNormal(torch.zeros(6).double(), torch.eye(6).double())
    torch.testing.assert_close(gp.kl(), torch.distributions.kl_divergence(posterior, prior).sum())


def test_it_starts_at_the_prior_where_the_cost_is_zero():
    gp, c = SparseGP(InducingPoints(RBF(3, Theta(sigma=2.0)).double(), randn(6, 3)), 2).double(), randn(5, 3, seed=1)
    mean, variance = gp(c)
    assert gp.kl() == 0
    assert (mean == 0).all()
    torch.testing.assert_close(variance, torch.full_like(variance, 4.0), rtol=1e-6, atol=0)  # σ², stored in float32


def test_what_lies_above_the_diagonal_of_the_root_takes_no_part():
    gp, c = sparse(), randn(5, 3, seed=2)
    before = gp(c)[1], gp.kl()
    with torch.no_grad():
        gp.scale += torch.ones_like(gp.scale).triu(1)
    assert torch.equal(gp(c)[1], before[0]) and torch.equal(gp.kl(), before[1])


class Regression(Model):
    """A sparse GP with real targets: the bound is Titsias's when q is optimal."""

    def __init__(self, gp, noise):
        super().__init__()
        self.gp, self.likelihood = gp, Gaussian(noise).double()

    def sample(self, h, noise):
        mean, variance = self.gp(h)
        return Latent(mean.unsqueeze(0), variance.unsqueeze(0))

    def kl(self):
        return self.gp.kl()


def optimal(gp, x, y, noise):
    """q(v) = N(m, S) with S = (I + AᵀA/σ²)⁻¹, m = S Aᵀ y / σ², A = K_fu L⁻ᵀ: the best one for a Gaussian likelihood."""
    with torch.no_grad():
        uu, fu, _ = gp.inducing(x)
        factor = torch.linalg.cholesky(uu + 1e-6 * uu.diagonal().mean() * torch.eye(len(uu)))
        a = torch.linalg.solve_triangular(factor, fu.mT, upper=False).mT
        covariance = torch.linalg.inv(torch.eye(len(uu)).double() + a.mT @ a / noise)
        root = torch.linalg.cholesky(covariance)
        gp.mean.copy_(covariance @ a.mT @ y / noise)
        gp.scale.copy_(root.tril(-1) + root.diagonal().log().diag_embed())
    return gp


def test_regression_in_parts_is_the_best_posterior():
    noise, x = 0.2, randn(15, 3)
    y = torch.stack([x[:, 0].sin(), x[:, 1]], -1)
    expected, gp = optimal(sparse(m=4), x, y, noise), sparse(m=4)
    gp.regress(zip(x.split(6), y.split(6), strict=True), noise=noise)
    torch.testing.assert_close(gp.mean, expected.mean)
    torch.testing.assert_close(gp.root, expected.root)


def test_with_the_data_as_inducing_points_it_is_the_exact_gp_regression():
    noise, x, new = 0.1, randn(12, 3), randn(5, 3, seed=9)
    y = torch.stack([x[:, 0].sin(), x[:, 1] * x[:, 2]], -1)
    gp = optimal(sparse(points=x.clone()), x, y, noise)
    kernel = gp.inducing.kernel
    with torch.no_grad():
        mean, variance = gp(new)
        k, cross = kernel.covariance(x, x) + noise * torch.eye(12), kernel.covariance(new, x)
        exact = cross @ torch.linalg.solve(k, y)
        exact_variance = kernel.diagonal(new) - (cross * torch.linalg.solve(k, cross.mT).mT).sum(-1)
        # the jitter of 1e-6 is noise that the exact GP does not have; the condition of K multiplies it by up to 1/0.1
        torch.testing.assert_close(mean, exact, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(variance[:, 0], exact_variance, rtol=1e-4, atol=1e-4)
        # and the bound is the evidence
        nll, kl = Bound(Regression(gp, noise), n=12)(x, y)
        evidence = sum(
            torch.distributions.MultivariateNormal(torch.zeros(12).double(), k).log_prob(y[:, q]) for q in range(2)
        )
        assert -12 * (nll + kl).item() == pytest.approx(evidence.item(), abs=1e-3)
        assert -12 * (nll + kl) < evidence


def test_with_fewer_inducing_points_the_bound_is_titsias_2009():
    """log N(y; 0, Q_ff + σ²I) − tr(K_ff − Q_ff) / 2σ², in NumPy."""
    noise, x = 0.2, randn(15, 3)
    y = x[:, :1].sin()
    gp = optimal(sparse(m=4, outputs=1), x, y, noise)
    z, kernel = gp.inducing.points.detach(), gp.inducing.kernel
    k_uu, k_fu = naive_kernel(kernel, z, z), naive_kernel(kernel, x, z)
    k_uu += 1e-6 * np.mean(np.diag(k_uu)) * np.eye(4)
    q_ff = k_fu @ np.linalg.solve(k_uu, k_fu.T)
    covariance = q_ff + noise * np.eye(15)
    _, log_determinant = np.linalg.slogdet(covariance)
    quadratic = (y[:, 0].numpy() @ np.linalg.solve(covariance, y[:, 0].numpy())).item()
    evidence = -0.5 * (quadratic + log_determinant + 15 * math.log(2 * math.pi))
    expected = evidence - (15 * kernel.sigma.item() ** 2 - np.trace(q_ff)) / (2 * noise)
    with torch.no_grad():
        nll, kl = Bound(Regression(gp, noise), n=15)(x, y)
    # σ² of the likelihood is stored in float32 first
    assert -15 * (nll + kl).item() == pytest.approx(expected, rel=1e-5)


def test_no_other_posterior_has_a_higher_bound():
    noise, x = 0.2, randn(10, 3)
    y = x[:, :1].sin()
    model = Regression(optimal(sparse(m=4, outputs=1), x, y, noise), noise)
    loss = sum(Bound(model, n=10)(x, y))
    gradients = torch.autograd.grad(loss, [model.gp.mean, model.gp.scale])
    for gradient in gradients:
        torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-6)  # stored σ², see above


@pytest.mark.parametrize("kernel", KERNELS)
def test_repeated_inducing_points_and_repeated_inputs_stay_finite_in_float32(kernel):
    points = randn(4, 3, dtype=torch.float32).repeat(5, 1)  # 20 points, 4 of them distinct: K_uu has rank 4
    gp = sparse(kernel, points=points).float()
    c = torch.cat([points, torch.zeros(1, 3), 1e3 * torch.ones(1, 3)]).requires_grad_()
    mean, variance = gp(c)
    assert mean.dtype == variance.dtype == torch.float32
    assert (variance >= 0).all()
    (mean.sum() + variance.sum() + gp.kl()).backward()
    for tensor in (mean, variance, c.grad, *(p.grad for p in gp.parameters() if p.requires_grad)):
        assert tensor.isfinite().all()


def test_features_that_are_not_numbers_are_an_error_of_their_own():
    gp = sparse()
    with torch.no_grad():
        gp.inducing.points[0, 0] = math.nan
    with pytest.raises(NumericalError):
        gp(randn(2, 3))


def test_float32_agrees_with_float64():
    gp, c = sparse(m=20, lengthscale=2.0), randn(8, 3, seed=2)
    mean, variance = gp(c)
    single = gp.float()(c.float())
    # 24 bits of K_uu, through L⁻¹: the square root of a condition of up to 1e6
    torch.testing.assert_close(single[0].double(), mean, rtol=5e-3, atol=5e-3)
    torch.testing.assert_close(single[1].double(), variance, rtol=5e-3, atol=5e-3)


def test_half_precision_around_it_changes_nothing():
    gp, c = sparse(m=20).float(), randn(8, 3, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = gp(c)
    assert all(torch.equal(one, other) for one, other in zip(mixed, gp(c), strict=True))


def test_any_inducing_variables_will_do():
    """The integral of f as the only inducing variable: here f = a x, a ~ N(0, 1), u = a; knowing u is knowing f."""

    class Slope(Inducing):
        size = 1

        def prior(self):
            return torch.ones(1, 1).double()

        def forward(self, x):
            return Covariances(self.prior(), x[:, None], x.square())

    gp = SparseGP(Slope(), 1).double()
    with torch.no_grad():
        gp.mean.fill_(3.0)
        gp.scale.fill_(math.log(0.5))
    x = torch.tensor([-1.0, 2.0, 0.0]).double()
    mean, variance = gp(x)
    torch.testing.assert_close(mean[:, 0], 3 * x, rtol=1e-5, atol=0)  # the jitter is 1e-6
    torch.testing.assert_close(variance[:, 0], 0.25 * x.square(), rtol=1e-5, atol=0)


def test_gradients_reach_kernel_points_and_posterior():
    gp = sparse(ard=True)

    def moments(c, points, log_lengthscale, log_sigma, mean, scale):
        given = {
            "inducing.points": points,
            "inducing.kernel.log_lengthscale": log_lengthscale,
            "inducing.kernel.log_sigma": log_sigma,
            "mean": mean,
            "scale": scale,
        }
        return torch.func.functional_call(gp, given, (c,))

    kernel = gp.inducing.kernel
    inputs = [randn(3, 3), gp.inducing.points, kernel.log_lengthscale, kernel.log_sigma, gp.mean, gp.scale]
    # the jitter's scale is detached: 1e-6 of a gradient
    assert torch.autograd.gradcheck(moments, [x.detach().clone().requires_grad_() for x in inputs], atol=1e-4)
