import math

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck

import reference
from calgp.gp import KERNELS, RBF, ArcCosine, Theta, make_kernel

EXACT = {"rtol": 1e-11, "atol": 1e-12}  # float64; a few sums of d terms in another order
ARCCOS = {"rtol": 1e-7, "atol": 1e-7}  # arccos near ±1 loses half of the 16 digits of float64
SMOOTH = ("arc-cosine-1", "arc-cosine-2", "rbf")


def features(n, d, *, seed=0):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def kernel_with(name, d, *, ard=False, sigma=1.3, learn=False):
    """A kernel in float64 whose lengthscales, under ARD, differ from dimension to dimension."""
    kernel = make_kernel(name, d, Theta(sigma=sigma, lengthscale=0.8, ard=ard, learn=learn)).double()
    if ard:
        with torch.no_grad():
            kernel.log_lengthscale.copy_(torch.linspace(-0.7, 0.9, d))
    return kernel


def naive(name, c1, c2, kernel):
    theta = kernel.sigma.item(), kernel.lengthscale.detach().numpy()
    if name == "rbf":
        return reference.rbf(c1.numpy(), c2.numpy(), *theta)
    return reference.arc_cosine(c1.numpy(), c2.numpy(), int(name[-1]), *theta)


@pytest.mark.parametrize("ard", [False, True])
@pytest.mark.parametrize("name", KERNELS)
def test_covariance_equals_the_naive_double_loop(name, ard):
    c1, c2 = features(6, 5), features(4, 5, seed=1)
    kernel = kernel_with(name, 5, ard=ard)
    with torch.no_grad():
        np.testing.assert_allclose(kernel.covariance(c1, c2), naive(name, c1, c2, kernel), **EXACT)
        np.testing.assert_allclose(kernel.covariance(c1, c1), naive(name, c1, c1, kernel), **ARCCOS)


@pytest.mark.filterwarnings("default")  # gpytorch's own warnings are not ours to judge
@pytest.mark.parametrize("ard", [False, True])
def test_rbf_equals_gpytorch(ard):
    gpytorch = pytest.importorskip("gpytorch")
    kernel = kernel_with("rbf", 5, ard=ard)
    theirs = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=5 if ard else None)).double()
    theirs.outputscale = kernel.sigma.detach() ** 2
    theirs.base_kernel.lengthscale = kernel.lengthscale.detach()
    c1, c2 = features(6, 5), features(4, 5, seed=1)
    with torch.no_grad():
        np.testing.assert_allclose(kernel.covariance(c1, c2), theirs(c1, c2).to_dense(), rtol=1e-9)


@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize("alpha", [0.0, 0.3, math.pi / 2, 2.5, math.pi])
def test_arc_cosine_is_the_integral_over_rectified_projections(order, alpha):
    u, v = torch.tensor([[2.0, 0.0]]), 3 * torch.tensor([[math.cos(alpha), math.sin(alpha)]])
    kernel = ArcCosine(2, Theta(lengthscale=1.0), order=order).double()
    expected = 6.0**order * reference.arc_cosine_integral(alpha, order)
    # 200,000 steps over a kinked (order 0: jumping) integrand; float32 angles as inputs
    np.testing.assert_allclose(kernel.covariance(u.double(), v.double()).item(), expected, atol=2e-4)


@pytest.mark.parametrize(
    ("order", "at_zero", "at_right_angle", "at_pi"), [(0, 1, 0.5, 0), (1, 1, 1 / math.pi, 0), (2, 3, 0.5, 0)]
)
def test_arc_cosine_in_closed_form_at_zero_right_angle_and_pi(order, at_zero, at_right_angle, at_pi):
    kernel = ArcCosine(2, Theta(lengthscale=1.0), order=order).double()
    u = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    others = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
    np.testing.assert_allclose(kernel.covariance(u, others)[0], [at_zero, at_right_angle, at_pi], atol=1e-15)


@pytest.mark.parametrize("ard", [False, True])
@pytest.mark.parametrize("name", KERNELS)
def test_variance_on_the_diagonal_in_closed_form(name, ard):
    """k(c, c) = σ² (orders 0 and rbf), σ²‖u‖² (order 1), 3σ²‖u‖⁴ (order 2)."""
    c = features(7, 5)
    kernel = kernel_with(name, 5, ard=ard)
    squared = (c / kernel.lengthscale).square().sum(-1)
    expected = {"arc-cosine-1": squared, "arc-cosine-2": 3 * squared**2}.get(name, torch.ones(7))
    torch.testing.assert_close(
        kernel.covariance(c, c).diagonal(), kernel.sigma**2 * expected, **ARCCOS, check_dtype=False
    )
    torch.testing.assert_close(kernel.diagonal(c), kernel.sigma**2 * expected, **EXACT, check_dtype=False)


@pytest.mark.parametrize("name", KERNELS)
def test_variance_of_each_output_and_of_a_zero_vector(name):
    kernel = make_kernel(name, 4, Theta(outputs=3, ard=True)).double()
    with torch.no_grad():
        kernel.log_lengthscale.copy_(features(3, 4) / 3)
        kernel.log_sigma.copy_(features(3, 1, seed=1) / 3)
    c = torch.cat([features(5, 4, seed=2), torch.zeros(1, 4)])
    expected = kernel.covariance(c, c).diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(kernel.diagonal(c), expected, **ARCCOS)


def test_natural_lengthscales_bring_distances_or_norms_to_one():
    c = features(31, 5)
    distances = [np.linalg.norm(a - b) for i, a in enumerate(c.numpy()) for b in c.numpy()[:i]]  # 465 of them
    assert RBF(5).natural_lengthscale(c).item() == pytest.approx(np.median(distances))
    assert ArcCosine(5).natural_lengthscale(c).item() == pytest.approx(np.median(np.linalg.norm(c, axis=1)))


@pytest.mark.parametrize("name", KERNELS)
def test_covariance_is_positive_semidefinite(name):
    c = features(30, 4)
    lowest = torch.linalg.eigvalsh(kernel_with(name, 4).covariance(c, c).detach())[0]
    assert lowest > -1e-6  # the diagonal is right to 1e-7 relative, see ARCCOS


@pytest.mark.parametrize("name", KERNELS)
def test_float32_agrees_with_float64(name):
    c1, c2 = features(6, 5), features(4, 5, seed=1)
    kernel = kernel_with(name, 5)
    double = kernel.covariance(c1, c2)
    single = kernel.float().covariance(c1.float(), c2.float())
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), double, rtol=1e-4, atol=1e-5)  # 24 bits, arccos, fourth powers


@pytest.mark.parametrize("ard", [False, True])
@pytest.mark.parametrize("name", SMOOTH)
def test_gradients_of_the_covariance(name, ard):
    kernel = kernel_with(name, 3, ard=ard)

    def k(c1, c2, log_sigma, log_lengthscale):
        parameters = {"log_sigma": log_sigma, "log_lengthscale": log_lengthscale}
        return torch.func.functional_call(_Covariance(kernel), _prefixed(parameters), (c1, c2))

    inputs = features(4, 3), features(2, 3, seed=1), kernel.log_sigma.detach(), kernel.log_lengthscale.detach()
    assert gradcheck(k, [x.clone().requires_grad_() for x in inputs])


@pytest.mark.parametrize("ard", [False, True])
@pytest.mark.parametrize("name", SMOOTH)
def test_gradients_on_the_diagonal_where_both_inputs_are_the_same_tensor(name, ard):
    kernel = kernel_with(name, 3, ard=ard)
    # arccos near 1 limits the numerical derivative, not the analytical one: ~1e-8 / (2 · 1e-6)
    assert gradcheck(lambda c: kernel.covariance(c, c), features(4, 3).requires_grad_(), atol=1e-4)


@pytest.mark.parametrize("name", SMOOTH)
def test_gradient_of_the_variance_in_closed_form(name):
    """∂k(c, c)/∂c = 0 (rbf), 2σ²c/ℓ² (order 1), 12σ²‖c‖²c/ℓ⁴ (order 2), in float32 as well."""
    kernel = kernel_with(name, 3).float()
    c = features(5, 3).float().requires_grad_()
    (gradient,) = torch.autograd.grad(kernel.covariance(c, c).diagonal().sum(), c)
    ratio = (kernel.sigma**2 / kernel.lengthscale**2).detach()
    squared = (c / kernel.lengthscale).square().sum(-1, keepdim=True)
    expected = {"rbf": 0 * c, "arc-cosine-1": 2 * ratio * c, "arc-cosine-2": 12 * ratio * squared * c}[name]
    torch.testing.assert_close(gradient, expected.detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", SMOOTH)
def test_zero_and_opposite_and_repeated_vectors_have_finite_values_and_gradients(name, dtype):
    c = torch.tensor([[0.0, 0, 0], [1, 2, 3], [-1, -2, -3], [1, 2, 3], [0, 0, 0]], dtype=dtype, requires_grad=True)
    kernel = kernel_with(name, 3, ard=True, learn=True).to(dtype)
    k = kernel.covariance(c, c)
    k.sum().backward()
    assert k.isfinite().all()
    assert c.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in kernel.parameters() if p.requires_grad)
    if name != "rbf":
        assert (k[0] == 0).all()


@pytest.mark.parametrize("name", KERNELS)
def test_own_theta_for_each_output_stacks_single_kernels(name):
    kernel = make_kernel(name, 4, Theta(outputs=3, ard=True)).double()
    with torch.no_grad():
        kernel.log_lengthscale.copy_(features(3, 4) / 3)
        kernel.log_sigma.copy_(features(3, 1, seed=1) / 3)
    c1, c2 = features(5, 4, seed=2), features(6, 4, seed=3)
    stacked = kernel.covariance(c1, c2)
    for q in range(3):
        single = kernel_with(name, 4, ard=True)
        with torch.no_grad():
            single.log_lengthscale.copy_(kernel.log_lengthscale[q])
            single.log_sigma.copy_(kernel.log_sigma[q])
        torch.testing.assert_close(stacked[q], single.covariance(c1, c2), **EXACT)


@pytest.mark.parametrize(
    ("name", "ard", "learned"),
    [
        ("arc-cosine-1", False, {"log_sigma"}),
        ("arc-cosine-1", True, {"log_lengthscale"}),
        ("rbf", False, {"log_sigma", "log_lengthscale"}),
        ("rbf", True, {"log_sigma", "log_lengthscale"}),
    ],
)
def test_only_what_is_identifiable_is_learned(name, ard, learned):
    kernel = make_kernel(name, 4, Theta(ard=ard, learn=True))
    assert {n for n, p in kernel.named_parameters() if p.requires_grad} == learned
    fixed = make_kernel(name, 4, Theta(ard=ard))
    assert not any(p.requires_grad for p in fixed.parameters())


@pytest.mark.parametrize("order", [1, 2])
def test_isotropic_arc_cosine_knows_only_sigma_over_lengthscale_to_its_order(order):
    c = features(4, 3)
    one = ArcCosine(3, Theta(lengthscale=1.0, sigma=2.0), order=order).double()
    other = ArcCosine(3, Theta(lengthscale=3.0, sigma=2.0 * 3.0**order), order=order).double()
    # logarithms of σ and ℓ are stored in float32 first
    torch.testing.assert_close(one.covariance(c, c), other.covariance(c, c), rtol=1e-5, atol=1e-5)


def test_lengthscale_starts_at_the_root_of_d():
    torch.testing.assert_close(RBF(49).lengthscale.detach(), torch.tensor([7.0]))


@pytest.mark.parametrize("wrong", [{"lengthscale": 0.0}, {"lengthscale": -1.0}, {"sigma": 0.0}, {"sigma": math.inf}])
def test_theta_must_be_positive_and_finite(wrong):
    with pytest.raises(ValueError, match="positive and finite"):
        Theta(**wrong)


def test_unknown_kernels_are_refused():
    with pytest.raises(ValueError, match="arc-cosine-1"):
        make_kernel("matern", 3, Theta())
    with pytest.raises(ValueError, match="order"):
        ArcCosine(3, order=3)


class _Covariance(torch.nn.Module):
    def __init__(self, kernel):
        super().__init__()
        self.kernel = kernel

    def forward(self, c1, c2):
        return self.kernel.covariance(c1, c2)


def _prefixed(parameters):
    return {f"kernel.{name}": value for name, value in parameters.items()}


def test_of_order_zero_a_zero_vector_covaries_with_nothing():
    """Its features are all 0, since 0 is not above 0."""
    c = torch.tensor([[0.0, 0.0], [1.0, 2.0]])
    assert ArcCosine(2, order=0).covariance(c, c)[0].tolist() == [0, 0]
