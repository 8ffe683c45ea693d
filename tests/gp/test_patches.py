import subprocess
import sys

import numpy as np
import pytest
import torch

import reference
from calgp.gp import InducingPatches, SparseGP, Theta
from calgp.gp import patches as module

EXACT = {"rtol": 1e-10, "atol": 1e-13}  # float64, sums in another order; distances by a product


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def inducing(image=(1, 6, 7), size=4, *, patch=3, channels="joint", seed=0, **options):
    """Inducing patches in float64, with weights that are not all the same."""
    made = InducingPatches(
        image,
        size,
        patch=patch,
        channels=channels,
        theta=Theta(1.4, 1.2, learn=True),
        generator=torch.Generator().manual_seed(seed),
        **options,
    ).double()
    with torch.no_grad():
        made.weights.copy_(1 + 0.5 * randn(*made.weights.shape, seed=seed + 1))
    return made


def theta(made):
    """w, and σ, ℓ."""
    w = made.weights.detach().numpy() / len(made.weights)
    return w, made.kernel.sigma.item(), made.kernel.lengthscale.item()


every_kind = pytest.mark.parametrize(
    ("image", "channels"), [((1, 6, 7), "joint"), ((3, 5, 4), "joint"), ((3, 5, 4), "additive")]
)


@every_kind
def test_patches_are_the_windows_of_the_image(image, channels):
    made, x = inducing(image, channels=channels), randn(2, *image)
    for i in range(2):
        expected = np.stack(reference.patches_of(x[i].numpy(), 3, channels))
        assert np.array_equal(made.patches(x)[i], expected)
        assert len(expected) == len(made.weights)


@every_kind
def test_covariances_equal_the_naive_double_loops(image, channels):
    made, x = inducing(image, channels=channels), randn(3, *image)
    w, sigma, lengthscale = theta(made)
    z = made.points.detach().numpy()
    with torch.no_grad():
        uu, fu, ff = made(x)
    np.testing.assert_allclose(uu, reference.rbf(z, z, sigma, lengthscale), **EXACT)
    for i in range(3):
        pixels = x[i].numpy()
        cross = [reference.patch_cross_covariance(pixels, z_m, w, 3, channels, sigma, lengthscale) for z_m in z]
        np.testing.assert_allclose(fu[i], cross, **EXACT)
        variance = reference.patch_covariance(pixels, pixels, w, 3, channels, sigma, lengthscale)
        np.testing.assert_allclose(ff[i], variance, **EXACT)


def test_a_patch_as_large_as_the_image_makes_it_the_plain_rbf_kernel():
    made, x = inducing((2, 3, 3)), randn(5, 2, 3, 3)
    with torch.no_grad():
        made.weights.fill_(1.0)
        _, fu, ff = made(x)
        torch.testing.assert_close(fu, made.kernel.covariance(x.flatten(1), made.points), **EXACT)
        torch.testing.assert_close(ff, made.kernel.sigma.square().expand(5), **EXACT)


def test_moments_of_the_sparse_process_equal_those_of_all_patches_summed():
    """f = Wg: condition g at every patch of both images on u, then add up; the marginals are those of f."""
    made, x = inducing(), randn(2, 1, 6, 7)
    gp = SparseGP(made, 1).double()
    with torch.no_grad():
        gp.mean.copy_(randn(4, 1, seed=5))
        gp.scale.copy_(0.3 * randn(1, 4, 4, seed=6))
        mean, variance = gp(x)
        patches, (w, *_) = made.patches(x).flatten(0, 1), theta(made)
        k_uu, k_gu, k_gg = (
            made.kernel.covariance(*pair).numpy()
            for pair in ((made.points, made.points), (patches, made.points), (patches, patches))
        )
        root = gp.root[0].numpy()
    k_uu = k_uu + 1e-6 * np.mean(np.diag(k_uu)) * np.eye(4)
    a = np.linalg.solve(np.linalg.cholesky(k_uu), k_gu.T).T
    sums = np.kron(np.eye(2), w)  # [2, 2 P]
    np.testing.assert_allclose(mean[:, 0], sums @ a @ gp.mean[:, 0].detach().numpy(), rtol=1e-8)
    covariance = sums @ (k_gg - a @ a.T + a @ root @ root.T @ a.T) @ sums.T
    np.testing.assert_allclose(variance[:, 0], np.diag(covariance), rtol=1e-8)


@every_kind
def test_derivatives_in_images_patches_weights_and_theta(image, channels):
    made = inducing(image, size=3, channels=channels)

    def covariances(x, points, weights, log_sigma, log_lengthscale):
        given = {
            "points": points,
            "weights": weights,
            "kernel.log_sigma": log_sigma,
            "kernel.log_lengthscale": log_lengthscale,
        }
        return torch.func.functional_call(made, given, (x,))

    kernel = made.kernel
    inputs = [randn(2, *image), made.points, made.weights, kernel.log_sigma, kernel.log_lengthscale]
    assert torch.autograd.gradcheck(covariances, [tensor.detach().clone().requires_grad_() for tensor in inputs])


@pytest.mark.parametrize("part", [1, 7, 60, 1000])
@every_kind
def test_parts_change_neither_values_nor_derivatives(image, channels, part, monkeypatch):
    made, x = inducing(image, channels=channels), randn(3, *image)

    def everything():
        made.zero_grad()
        _, fu, ff = made(x)
        (fu.square().sum() + ff.square().sum()).backward()
        return [fu, ff, *(p.grad.clone() for p in made.parameters())]

    whole = everything()
    monkeypatch.setattr(module, "PART", part)
    for one, other in zip(whole, everything(), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-10, atol=1e-12)


def test_weights_start_as_a_mean_over_patches_and_can_be_fixed():
    made = InducingPatches((1, 6, 6), 3, patch=3, weighted=False, theta=Theta(1.0, 2.0, learn=True))
    assert not made.weights.requires_grad
    black = torch.zeros(2, 1, 6, 6)
    torch.testing.assert_close(made(black).ff.detach(), torch.full((2,), 4.0))  # all patches equal: the variance of g
    assert InducingPatches((1, 6, 6), 3).weights.requires_grad


def test_without_weights_an_image_and_its_parts_elsewhere_are_the_same():
    """A spot that moves within black surroundings has the same patches: f cannot tell, unless weights can."""
    x = torch.zeros(2, 1, 12, 12, dtype=torch.float64)
    x[0, 0, 4, 4] = x[1, 0, 6, 7] = 1.0
    made = inducing((1, 12, 12))
    assert (made(x).fu[0] - made(x).fu[1]).abs().max() > 1e-3
    with torch.no_grad():
        made.weights.fill_(1.0)
    fu, ff = made(x)[1:]
    torch.testing.assert_close(fu[0], fu[1], **EXACT)
    torch.testing.assert_close(ff[0], ff[1], **EXACT)


def test_float32_agrees_with_float64():
    made, x = inducing((3, 12, 12), 20, patch=5), torch.rand(4, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    double = made(x.double())
    single = made.float()(x)
    for one, other in zip(single, double, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-6)


MEASURE = """
import resource, torch
from calgp.gp import InducingPatches, SparseGP
def step(n, side):
    gp = SparseGP(InducingPatches((1, side, side), 50), 2)
    mean, variance = gp(torch.rand(n, 1, side, side))
    (mean.sum() + variance.sum()).backward()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
step(2, 10)
before = step(2, 36)
print(step(40, 36) - before)
"""


@pytest.mark.slow
def test_memory_grows_with_the_patches_and_not_with_their_squares():
    """40 images of 1024 patches: the covariances of all pairs would take 160 MB in float32.

    What may grow is the patches themselves and what is as large: 40 · 1024 · 25 numbers are 4 MB; there are about 10.
    """
    result = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True)
    assert float(result.stdout) < 80  # 22 were measured, and 188 for everything at once


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"patch": 7}, "fit"),
        ({"patch": 0}, "fit"),
        ({"channels": "other"}, "joint"),
        ({"theta": Theta(ard=True)}, "one ℓ"),
        ({"theta": Theta(outputs=2)}, "one ℓ"),
    ],
)
def test_what_cannot_be_is_refused(wrong, message, unchecked):
    with pytest.raises(ValueError, match=message):
        InducingPatches((1, 6, 6), 3, **wrong)
