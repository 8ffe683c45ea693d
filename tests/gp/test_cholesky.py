import math

import pytest
import torch

from calgp.gp import NumericalError
from calgp.gp.cholesky import JITTERS, cholesky


def matrix(eigenvalues, *, dtype=torch.float64):
    """A symmetric matrix with these eigenvalues."""
    n = len(eigenvalues)
    basis, _ = torch.linalg.qr(torch.randn(n, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    return (basis * torch.tensor(eigenvalues, dtype=torch.float64) @ basis.mT).to(dtype)


def added(k):
    """What was added to the diagonal, in units of the mean variance."""
    factor = cholesky(k)
    return ((factor @ factor.mT - k.double()).diagonal().mean() / k.double().diagonal().mean()).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_the_factor_of_a_good_matrix_with_the_smallest_jitter(dtype):
    k = matrix([1.0, 2.0, 3.0, 4.0], dtype=dtype)
    factor = cholesky(k)
    assert factor.dtype == torch.float64
    assert torch.equal(factor, factor.tril()) and (factor.diagonal() > 0).all()
    expected = k.double() + 1e-6 * 2.5 * torch.eye(4, dtype=torch.float64)
    # the mean variance is 2.5 to the precision of k; the sum itself is exact to float64
    torch.testing.assert_close(factor @ factor.mT, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("lowest", "jitter"), [(-1e-7, 1e-6), (-3e-6, 1e-5), (-3e-5, 1e-4), (-3e-4, 1e-3), (-3e-3, 1e-2)]
)
def test_jitter_grows_until_an_indefinite_matrix_is_saved(lowest, jitter):
    """Eigenvalues 1, 1, 1, 1 + … have a mean variance near 1, so the jitter must exceed −lowest."""
    assert added(matrix([1.0, 1.0, 1.0, 1.0 - lowest, lowest])) == pytest.approx(jitter, rel=0.3)


def test_jitter_is_relative_to_the_scale_of_the_matrix():
    k = matrix([1.0, 1.0, 1.0, -3e-5])
    assert added(1e8 * k) == pytest.approx(added(k), rel=1e-4)
    assert added(1e-8 * k) == pytest.approx(added(k), rel=1e-4)


def test_a_singular_matrix_of_repeated_points_is_saved():
    assert added(torch.ones(50, 50)) == pytest.approx(JITTERS[0], rel=1e-3)


@pytest.mark.parametrize(
    "k",
    [
        matrix([1.0, 1.0, 1.0, -0.5]),
        -torch.eye(3),
        torch.zeros(3, 3),
        torch.full((3, 3), math.nan),
        torch.tensor([[1.0, math.nan], [math.nan, 1.0]]),
        torch.full((2, 2), math.inf),
    ],
    ids=["indefinite", "negative", "zero", "nan", "nan-beside", "infinite"],
)
def test_what_cannot_be_saved_is_an_error_that_says_so(k):
    with pytest.raises(NumericalError, match="covariance of the inducing variables"):
        cholesky(k)


def test_its_gradient_is_right():
    base = matrix([0.5, 1.0, 2.0])
    lower = torch.tensor([[0.3, 0, 0], [0.1, 0.2, 0], [0.4, 0.5, 0.6]], dtype=torch.float64, requires_grad=True)
    # the jitter's scale is detached: 1e-6 of the gradient
    assert torch.autograd.gradcheck(lambda a: cholesky(base + a @ a.mT), lower, atol=1e-5)
