import copy
import io
import math
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import reference
from calgp.gp import (
    FREQUENCIES,
    KERNELS,
    UNMASKED,
    Fixed,
    Masking,
    MeanField,
    Noise,
    Sorf,
    Theta,
    Variational,
    draw_frequencies,
    gaussian,
    make_kernel,
    name_sites,
    orthogonal,
)
from calgp.gp import frequencies as frequencies_module

DRAWS = {"gaussian": gaussian, "orthogonal": orthogonal}


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def features(n, d, *, seed=0):
    return torch.randn(n, d, generator=seeded(seed), dtype=torch.float64)


def kernel_with(name, d, *, ard=False):
    kernel = make_kernel(name, d, Theta(sigma=1.3, ard=ard)).double()
    if ard:
        with torch.no_grad():
            kernel.log_lengthscale.copy_(torch.linspace(0.2, 1.4, d))
    return kernel


def gram(kernel, frequencies, c):
    """ΦΦᵀ."""
    phi = kernel.expand(frequencies.double()(c, kernel.lengthscale))
    return (phi @ phi.mT).detach()


# ΦΦᵀ → K


@pytest.mark.parametrize("n_rf", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 11)), 16])
@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize(("name", "ard"), [(name, ard) for name in KERNELS for ard in (False, True)])
def test_expansion_is_unbiased(name, ard, draw, n_rf):
    """The average over independent draws lies within five standard errors of k; 30 numbers in each of 48 cases."""
    c, kernel, generator = features(4, 5), kernel_with(name, 5, ard=ard), seeded(1)
    draws = torch.stack([gram(kernel, Fixed(DRAWS[draw](5, n_rf, generator=generator)), c) for _ in range(800)])
    error = draws.mean(0) - kernel.covariance(c, c).detach()
    standard_error = draws.std(0) / math.sqrt(len(draws))
    # the diagonal of rbf has no variance at all: sin² + cos² = 1, up to rounding
    assert (error.abs() <= 5 * standard_error + 1e-7).all()
    assert (standard_error <= 0.15 * kernel.covariance(c, c).diagonal().max()).all()  # or it would prove little


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize(("name", "ard"), [(name, ard) for name in KERNELS for ard in (False, True)])
def test_error_falls_with_the_root_of_the_number_of_frequencies(name, ard, draw):
    """log RMSE against log N_RF has slope −½ ± 0.1.

    Over 48 draws each RMSE is known to about 10 %, over a factor of 64 in N_RF that leaves 0.03 in the slope: three of
    these. N_RF are multiples of d = 6, since orthogonal blocks are independent only as wholes.
    """
    c, kernel, generator = features(5, 6), kernel_with(name, 6, ard=ard), seeded(2)
    k = kernel.covariance(c, c).detach()
    sizes = [12, 48, 192, 768]
    rmse = [
        torch.stack([gram(kernel, Fixed(DRAWS[draw](6, n_rf, generator=generator)), c) - k for _ in range(48)])
        .square()
        .mean()
        .sqrt()
        .item()
        for n_rf in sizes
    ]
    slope = np.polyfit(np.log(sizes), np.log(rmse), 1)[0]
    assert slope == pytest.approx(-0.5, abs=0.1)


@pytest.mark.parametrize("name", KERNELS)
def test_sorf_error_falls_with_the_number_of_blocks(name):
    """d = 100 padded to 128; up to 16 blocks, where the noise (not yet the bias of order 1/d') rules the error."""
    c, kernel, generator = features(5, 100), kernel_with(name, 100), seeded(2)
    k = kernel.covariance(c, c).detach()
    sizes = [128, 512, 2048]
    rmse = [
        torch.stack([gram(kernel, Sorf(100, n_rf, generator=generator), c) - k for _ in range(24)]).square().mean()
        for n_rf in sizes
    ]
    slope = 0.5 * np.polyfit(np.log(sizes), np.log(rmse), 1)[0]
    assert slope == pytest.approx(-0.5, abs=0.15)


def test_orthogonal_frequencies_have_less_variance_than_gaussian_ones():
    c, kernel = features(5, 16), kernel_with("rbf", 16)
    k = kernel.covariance(c, c).detach()
    errors = {
        name: torch.stack([gram(kernel, Fixed(draw(16, 16, generator=seeded(i))), c) - k for i in range(100)])
        .square()
        .mean()
        for name, draw in DRAWS.items()
    }
    assert errors["orthogonal"] < 0.8 * errors["gaussian"]


@pytest.fixture(scope="module")
def sorf_bias():
    """|E[ΦΦᵀ] − K| relative to the variances, for each kernel and d', over 2^20 frequencies from independent signs.

    Vectors with one or two entries are the hard case: flat ones are already mixed by the first transform.
    """
    worst = {}
    for d in (16, 64, 256):
        c = torch.zeros(3, d)
        c[0, 0], c[1, 0], c[1, 1], c[2, 1], c[2, 2] = 1, 0.6, 0.8, -0.8, 0.6
        c *= math.sqrt(d)
        projected = Sorf(d, 2**20, generator=seeded(1))(c, torch.tensor([math.sqrt(d)]))
        for name in KERNELS:
            kernel = make_kernel(name, d, Theta())
            with torch.no_grad():
                k, phi = kernel.covariance(c, c), kernel.expand(projected)
                scale = k.diagonal().sqrt()
                worst[name, d] = ((phi @ phi.mT - k) / (scale[:, None] * scale)).abs().max().item()
    return worst


@pytest.mark.parametrize("name", KERNELS)
def test_sorf_bias_falls_with_the_padded_dimension(name, sorf_bias):
    """O(1/d'): by at least two where d' grows fourfold, until Monte Carlo noise (2e-3 for order 1) hides it."""
    assert sorf_bias[name, 64] < sorf_bias[name, 16] / 2
    assert sorf_bias[name, 256] < max(sorf_bias[name, 64] / 2, 3e-3)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("d", [64, 256])
def test_sorf_bias_is_under_five_percent_from_64_dimensions_on(name, d, sorf_bias):
    assert sorf_bias[name, d] < 0.05


# SORF


@pytest.mark.parametrize("ard", [False, True])
@pytest.mark.parametrize(
    ("d", "n_rf"),
    [
        (8, 8),
        (8, 3),
        (8, 24),
        (8, 19),
        (5, 8),
        (5, 5),
        (5, 29),
        (1, 4),
        (100, 300),
        (128, 100),
        (180, 400),
        (384, 384),
        (1025, 1300),
    ],
)
def test_sorf_equals_the_explicit_dense_matrix(d, n_rf, ard):
    """Padding, truncation (N_RF below d'), blocks (above), and both; by a product, and for d = 1025 by transforms."""
    sorf = Sorf(d, n_rf, generator=seeded(d)).double()
    lengthscale = torch.linspace(0.5, 2, d).double() if ard else torch.tensor([0.7]).double()
    dense = reference.sorf(sorf.signs.numpy(), n_rf)[:d]
    c = features(4, d)
    assert set(sorf.signs.unique().tolist()) <= {-1, 1}
    np.testing.assert_allclose(sorf(c, lengthscale), c.numpy() / lengthscale.numpy() @ dense, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("d", [32, 384])
def test_sorf_frequencies_are_orthogonal_with_norm_root_d(d):
    omega = Sorf(d, d, generator=seeded(0)).double()(torch.eye(d).double(), torch.ones(1).double())
    torch.testing.assert_close(omega.mT @ omega, d * torch.eye(d).double())


def test_sorf_draws_independent_blocks():
    signs = Sorf(256, 1024, generator=seeded(0)).signs.flatten(0, 1).double()  # [12, 256]
    correlation = signs @ signs.mT / 256 - torch.eye(12)
    assert correlation.abs().max() < 5 / math.sqrt(256)  # 66 pairs, each N(0, 1/256)


class _Largest(TorchDispatchMode):
    """The size of the largest storage behind a tensor that any operation gives, in numbers of it."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor):
                self.numel = max(self.numel, t.untyped_storage().nbytes() // t.element_size())
        return out


@pytest.mark.parametrize("n_rf", [4096, 65_536, 100_000])
def test_sorf_never_makes_omega_nor_the_hadamard_matrix(n_rf):
    d = 65_536  # Ω alone would be 16 GiB
    with _Largest() as largest:
        sorf = Sorf(d, n_rf, generator=seeded(0))
        projected = sorf(torch.ones(1, d), torch.tensor([256.0]))
    assert projected.shape == (1, n_rf)
    assert projected.isfinite().all()
    stored = sum(t.numel() for t in (*sorf.parameters(), *sorf.buffers()))
    assert stored <= 3 * (n_rf + d)
    assert largest.numel <= 3 * (n_rf + d)


# Where Ω is small, a product with it is SORF


@pytest.fixture
def by_transforms(monkeypatch):
    """No Ω is small enough from here on."""
    return lambda: monkeypatch.setattr(frequencies_module, "DENSE", 0)


@pytest.mark.parametrize("learned", [True, False])
@pytest.mark.parametrize("shape", [(1,), (20,), (3, 1), (3, 20)], ids=["isotropic", "ard", "outputs", "ard-outputs"])
@pytest.mark.parametrize("rows", [1, 50])
def test_product_and_transforms_agree_with_all_their_gradients(rows, shape, learned, by_transforms):
    sorf = Sorf(20, 70, generator=seeded(0))
    lengthscale = torch.rand(shape, generator=seeded(1), dtype=torch.float64).add(0.5).requires_grad_(learned)
    c = features(rows, 20, seed=2).requires_grad_()
    wanted = [c, lengthscale][: 1 + learned]

    def results():
        out = sorf(c, lengthscale)
        return [out, *torch.autograd.grad(out.tanh().sum(), wanted)]

    dense = results()
    assert sorf._made is not None
    by_transforms()
    for one, other in zip(dense, results(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def small_sorf(seed):
    return Sorf(20, 70, generator=seeded(seed))


def projected(sorf, c=None):
    c = features(3, 20) if c is None else c
    return sorf(c, c.new_full((1,), 2.0))


def test_product_is_made_of_the_signs_that_are_there():
    """After loading, assigning, in place; also where a copy is made between the change and the next call."""
    expected, other = projected(small_sorf(1)), small_sorf(1)
    for change in (
        lambda sorf: sorf.load_state_dict(other.state_dict()),
        lambda sorf: sorf.load_state_dict(other.state_dict(), assign=True),
        lambda sorf: sorf.signs.copy_(other.signs),
        lambda sorf: setattr(sorf, "signs", other.signs),
    ):
        sorf = small_sorf(0)
        assert not torch.equal(projected(sorf), expected)
        change(sorf)
        copies = copy.deepcopy(sorf), copy.copy(sorf), pickle.loads(pickle.dumps(sorf))  # noqa: S301
        for found in (sorf, *copies):
            assert torch.equal(projected(found), expected)


def test_product_follows_functional_calls():
    sorf, other = small_sorf(0), small_sorf(1)
    ell, c = torch.full((1,), 2.0).double(), features(3, 20)
    projected(sorf)
    assert torch.equal(torch.func.functional_call(sorf, other.state_dict(), (c, ell)), projected(other))
    assert not torch.equal(projected(sorf), projected(other))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_product_follows_the_type_of_the_features(dtype):
    sorf = small_sorf(0)
    exact = projected(sorf)
    for found in (projected(sorf, features(3, 20).to(dtype)), projected(sorf.to(dtype), features(3, 20).to(dtype))):
        assert found.dtype == dtype
        # 20 products of numbers of size 1 that are rounded before
        torch.testing.assert_close(found.double(), exact, rtol=0, atol=20 * torch.finfo(dtype).eps)


def test_product_follows_the_device():
    sorf = small_sorf(0)
    projected(sorf)
    assert projected(sorf.to("meta"), features(3, 20).to("meta")).is_meta


def test_omega_is_made_once_and_saved_nowhere():
    sorf = small_sorf(0)
    stored = io.BytesIO()
    torch.save(sorf, stored)
    size = len(stored.getvalue())
    projected(sorf)
    made = sorf._made.omega
    projected(sorf)
    assert sorf._made.omega is made
    assert list(sorf.state_dict()) == ["signs"]
    stored = io.BytesIO()
    torch.save(sorf, stored)
    assert len(stored.getvalue()) == size


def test_training_works_after_an_omega_made_in_inference_mode():
    sorf = small_sorf(0)
    with torch.inference_mode():
        projected(sorf)
    c = features(3, 20).requires_grad_()
    projected(sorf, c).sum().backward()
    assert c.grad.isfinite().all()


def test_signs_born_in_inference_mode_serve():
    with torch.inference_mode():
        sorf = small_sorf(0)
        assert torch.equal(projected(sorf), projected(small_sorf(0)))
        sorf.load_state_dict(small_sorf(1).state_dict())
        assert torch.equal(projected(sorf), projected(small_sorf(1)))


def test_omega_is_exact_under_autocast():
    """What is kept must not be of the precision of the moment."""
    sorf = small_sorf(0)
    with torch.autocast("cpu", torch.bfloat16):
        projected(sorf, features(3, 20).float())
    torch.testing.assert_close(sorf._made.omega, small_sorf(0)._omega(torch.float32), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # of torch's own
@pytest.mark.parametrize("d", [20, 320, 1025])
def test_functional_transforms_see_sorf(d):
    """First called inside of a transform: what is kept must not be a tensor of that transform."""
    ell, c = torch.full((1,), 2.0).double(), features(3, d)
    sorf = Sorf(d, d, generator=seeded(0))
    gradient = torch.func.grad(lambda c: sorf(c, ell).tanh().sum())(c)
    wanted = c.clone().requires_grad_()
    torch.testing.assert_close(gradient, torch.autograd.grad(sorf(wanted, ell).tanh().sum(), wanted)[0])
    torch.testing.assert_close(torch.func.vmap(lambda c: sorf(c, ell))(c), sorf(c, ell))
    _, tangent = torch.func.jvp(lambda c: sorf(c, ell), (c,), (torch.ones_like(c),))
    torch.testing.assert_close(tangent, sorf(torch.ones_like(c), ell))  # it is linear


@pytest.mark.slow
@pytest.mark.parametrize("d", [20, 320])
def test_compiled_and_exported_sorf_is_the_same(d, unchecked):
    torch.compiler.reset()
    ell, c = torch.full((1,), 2.0), features(3, d).float()
    sorf = Sorf(d, d, generator=seeded(0))
    expected = sorf(c, ell)
    compiled = torch.compile(sorf, fullgraph=True, backend="aot_eager")(c, ell)
    exported = torch.export.export(sorf, (c, ell)).module()(c, ell)
    # float32, added in another order
    torch.testing.assert_close(compiled, expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(exported, expected, rtol=0, atol=1e-4)


def test_several_threads_of_python_share_a_layer():
    sorf, c = small_sorf(0), features(3, 20)
    expected = projected(small_sorf(0))
    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(found, expected) for found in pool.map(lambda _: projected(sorf, c), range(40)))


@pytest.mark.parametrize(
    ("d", "n_rf"),
    [pytest.param(1280, 1280, marks=pytest.mark.slow), (150, 300), pytest.param(1100, 2100, marks=pytest.mark.slow)],
)
def test_signs_of_earlier_versions_keep_their_size(d, n_rf):
    """They were padded to a power of two."""
    padded = 2 ** math.ceil(math.log2(d))
    shape = 3, math.ceil(n_rf / padded), padded
    signs = (torch.randint(0, 2, shape, generator=seeded(1)) * 2 - 1).to(torch.int8)
    sorf = Sorf(d, n_rf, generator=seeded(0))
    assert sorf.signs.shape != shape
    torch.nn.ModuleDict({"sorf": sorf}).load_state_dict({"sorf.signs": signs})
    c = features(2, d)
    dense = reference.sorf(signs.numpy(), n_rf)[:d]
    np.testing.assert_allclose(sorf(c, torch.ones(1).double()), c.numpy() @ dense, rtol=1e-11, atol=1e-11)


def test_signs_of_other_layers_are_refused():
    with pytest.raises(RuntimeError, match="size mismatch for signs"):
        Sorf(1280, 1280).load_state_dict(Sorf(768, 1280).state_dict())


# Draws


@pytest.mark.parametrize(("d", "n_rf"), [(6, 6), (6, 4), (6, 15)])
def test_orthogonal_blocks_are_orthogonal(d, n_rf):
    epsilon = orthogonal(d, n_rf, generator=seeded(0)).double()
    for start in range(0, n_rf, d):
        block = epsilon[:, start : start + d]
        products = block.mT @ block
        torch.testing.assert_close(products, products.diagonal().diag(), rtol=0, atol=1e-5)  # kept in float32


def test_orthogonal_columns_have_chi_squared_lengths():
    """‖ε_j‖² has mean d and variance 2d."""
    squared = torch.cat([orthogonal(8, 8, generator=seeded(i)).square().sum(0) for i in range(500)])
    assert squared.mean().item() == pytest.approx(8, abs=5 * math.sqrt(16 / 4000))
    assert squared.var().item() == pytest.approx(16, rel=0.15)  # kurtosis 4.5: standard error 3 %


@pytest.mark.parametrize("kind", FREQUENCIES)
def test_same_generator_gives_the_same_frequencies(kind):
    def draw(seed):
        return draw_frequencies(kind, 5, 7, masking=UNMASKED, generator=seeded(seed))

    c, ell = torch.ones(3, 5), torch.ones(1)
    assert torch.equal(draw(0)(c, ell), draw(0)(c, ell))
    assert not torch.equal(draw(0)(c, ell), draw(1)(c, ell))


def test_unknown_frequencies_are_refused():
    with pytest.raises(ValueError, match="sorf"):
        draw_frequencies("fourier", 5, 7, masking=UNMASKED)


def test_variational_frequencies_start_at_a_draw_from_their_prior():
    """Ω = CΩ at C = I has the standard deviation 1/ℓ; what is stored has 1."""
    frequencies = draw_frequencies("variational", 40, 500, masking=UNMASKED, generator=seeded(0))
    omega = frequencies(torch.eye(40), torch.tensor([4.0]))
    assert omega.std().item() == pytest.approx(0.25, rel=5 / math.sqrt(2 * 20_000))
    assert frequencies.epsilon.std().item() == pytest.approx(1, rel=5 / math.sqrt(2 * 20_000))


@pytest.mark.parametrize("masking", [UNMASKED, MeanField(0.1)], ids=["masks", "mean-field"])
def test_a_step_of_adam_changes_inferred_frequencies_as_little_at_any_lengthscale(masking):
    """In units of their prior's width: stored as ε/ℓ, at ℓ = √d = 64 a step of 0.006 would be 0.4 of it."""
    d = 4096
    for lengthscale in (1.0, math.sqrt(d)):
        frequencies = draw_frequencies("variational", d, 3, masking=masking, generator=seeded(0))
        ell, probe = torch.tensor([lengthscale]), torch.randn(50, d, generator=seeded(1)) / math.sqrt(d)
        noise = Noise(0, torch.zeros(1, dtype=torch.int64), torch.arange(50))
        name_sites(frequencies)
        optimiser = torch.optim.Adam(frequencies.parameters(), lr=6e-3)
        before = ell * frequencies(probe, ell, noise)
        before.square().sum().backward()
        optimiser.step()
        change = (ell * frequencies(probe, ell, noise) - before).norm() / before.norm()
        assert change < 0.05, lengthscale


# Gradients


@pytest.mark.parametrize("kind", ["sorf", "gaussian", "orthogonal"])
@pytest.mark.parametrize(("ard", "outputs"), [(False, None), (True, None), (False, 2), (True, 2)])
@pytest.mark.parametrize("name", ["arc-cosine-1", "arc-cosine-2", "rbf"])
def test_gradients_of_the_expansion_with_respect_to_features_and_theta(name, ard, outputs, kind):
    kernel = make_kernel(name, 3, Theta(ard=ard, outputs=outputs)).double()
    frequencies = draw_frequencies(kind, 3, 5, masking=UNMASKED, generator=seeded(0)).double()
    shape = kernel.log_lengthscale.shape
    start = 0.3 * torch.randn(shape, generator=seeded(4), dtype=torch.float64)

    class Chain(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.kernel = kernel

        def forward(self, c):
            return self.kernel.expand(frequencies(c, self.kernel.lengthscale))

    def phi(c, log_sigma, log_lengthscale):
        theta = {"kernel.log_sigma": log_sigma, "kernel.log_lengthscale": log_lengthscale}
        return torch.func.functional_call(Chain(), theta, (c,))

    inputs = [features(4, 3, seed=3), kernel.log_sigma.detach().clone(), start]
    assert gradcheck(phi, [x.requires_grad_() for x in inputs])


def test_order_zero_passes_no_gradient_to_the_features():
    kernel = kernel_with("arc-cosine-0", 3)
    c = features(2, 3).requires_grad_()
    phi = kernel.expand(Fixed(gaussian(3, 5, generator=seeded(0)).double())(c, kernel.lengthscale))
    assert not phi.requires_grad


# KL


@pytest.mark.parametrize("kind", ["sorf", "gaussian", "orthogonal"])
def test_frequencies_drawn_from_their_prior_cost_nothing(kind):
    frequencies = draw_frequencies(kind, 5, 7, masking=Masking(), generator=seeded(0))
    assert frequencies.kl() == 0


@pytest.mark.parametrize("inverted", [False, True])
@pytest.mark.parametrize("keep", [0.5, 0.3, 0.9])
def test_kl_of_variational_frequencies_by_enumerating_all_masks(keep, inverted):
    """E_q[−log N(ε; 0, 1)] depends on M_ε as `kl` does: the same up to one constant."""
    d, n_rf = 4, 3
    masking = Masking(keep, inverted=inverted)
    for seed in range(4):
        m = features(d, n_rf, seed=seed)
        constant = Variational(m, masking=masking).kl().item() - reference.expected_minus_log_prior(
            m.numpy(), keep, inverted
        )
        assert constant == pytest.approx(-0.5 * d * n_rf * math.log(2 * math.pi), abs=1e-10)


@pytest.mark.parametrize("ard", [False, True])
@pytest.mark.parametrize("keep", [0.5, 0.3, 0.9])
def test_that_kl_is_equation_16_without_the_change_of_variables(keep, ard):
    """Eq. (16), with the ½ that its log term lacks, of M_Ω = Λ^-½ M_ε: Σ_i [ℓ_i² π_Ω/2 ‖M_Ω,i·‖² − N_RF log ℓ_i].

    By −N_RF Σ_i log ℓ_i the entropy of q(Ω) is that of q(ε).
    """
    d, n_rf = 4, 3
    for seed in range(4):
        m = features(d, n_rf, seed=seed)
        lengthscale = np.exp(0.4 * features(1, d if ard else 1, seed=10 + seed)[0].numpy()) * np.ones(d)
        equation = reference.expected_minus_log_prior(
            m.numpy() / lengthscale[:, None], keep, std=1 / lengthscale[:, None]
        )
        jacobian = -n_rf * np.log(lengthscale).sum()
        constant = Variational(m, masking=Masking(keep)).kl().item() - (equation - jacobian)
        assert constant == pytest.approx(-0.5 * d * n_rf * math.log(2 * math.pi), abs=1e-10)


@pytest.mark.parametrize("ard", [False, True])
@pytest.mark.parametrize("inverted", [False, True])
def test_variational_projection_is_that_of_masked_rows(inverted, ard, every_mask):
    """CΩ with Ω = Λ^-½ diag(z) M (or diag(z/π) M), for every z."""
    keep, m, c = 0.3, features(3, 4), features(2, 3, seed=1)
    lengthscale = torch.tensor([0.5, 2.0, 3.0] if ard else [2.0], dtype=torch.float64)
    projected = Variational(m, masking=Masking(keep, inverted=inverted))(c, lengthscale).unflatten(0, (8, 2))
    for z, rows in zip(reference.all_masks(3, keep)[0], projected, strict=True):
        omega = np.diag(1 / (lengthscale.numpy() * np.ones(3))) @ np.diag(z / keep if inverted else z) @ m.numpy()
        np.testing.assert_allclose(rows.detach(), c.numpy() @ omega, atol=1e-14)
