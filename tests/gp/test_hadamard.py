import numpy as np
import pytest
import torch

import reference
from calgp.gp import hadamard_transform
from calgp.gp.constants import constant
from calgp.gp.hadamard import CACHE, _plain, alternating_product


@pytest.mark.parametrize("d", [1, 2, 4, 16, 64, 128, 256, 1024, 4096])
def test_transform_equals_the_dense_matrix(d):
    x = torch.randint(-8, 9, (3, d), generator=torch.Generator().manual_seed(d)).double()
    # whole numbers below 2^53: no rounding at all
    np.testing.assert_array_equal(hadamard_transform(x), x.numpy() @ reference.hadamard(d))


@pytest.mark.parametrize("d", [8, 128, 8192])
def test_transforming_twice_gives_d_times_the_input(d):
    x = torch.randint(-8, 9, (2, 3, d), generator=torch.Generator().manual_seed(d)).double()
    assert torch.equal(hadamard_transform(hadamard_transform(x)), d * x)


@pytest.mark.parametrize("d", [8, 256])
def test_gradient_is_the_transform_of_the_gradient(d):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, d, generator=generator, dtype=torch.float64, requires_grad=True)
    outside = torch.randn(2, d, generator=generator, dtype=torch.float64)
    (gradient,) = torch.autograd.grad(hadamard_transform(x), x, outside)
    torch.testing.assert_close(gradient, hadamard_transform(outside))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_floating_type_is_kept(dtype):
    assert hadamard_transform(torch.ones(2, 128, dtype=dtype)).dtype == dtype


def test_training_works_after_a_first_call_in_inference_mode():
    """A kept matrix that was born in inference mode could not be saved for the backward pass."""
    x = torch.ones(2, 32, dtype=torch.float16)  # a type that no other test uses: nothing is kept for it yet
    with torch.inference_mode():
        hadamard_transform(x)
    trained = x.clone().requires_grad_()
    hadamard_transform(trained).sum().backward()
    assert trained.grad[0].tolist() == [32.0] + [0.0] * 31  # H̃ of ones: the first row sums to d, the others to 0


def test_constants_are_made_once():
    calls = []

    @constant
    def ones(d: int):
        calls.append(d)
        return torch.ones(d)

    assert ones(2) is ones(2)
    assert len(ones(3)) == 3
    assert calls == [2, 3]


def problem(rows, blocks, d, dtype=torch.float64):
    generator = torch.Generator().manual_seed(rows + d)
    x = torch.randn(rows, 1, d, generator=generator, dtype=dtype).expand(-1, blocks, -1)
    return x, [torch.randn(blocks, d, generator=generator, dtype=dtype) for _ in range(3)]


@pytest.mark.parametrize(("rows", "blocks", "d"), [(5, 1, 1), (5, 3, 2), (7, 1, 64), (3, 2, 128), (2, 1, 8192)])
def test_product_in_the_cache_equals_the_explicit_matrices(rows, blocks, d):
    x, (d0, d1, d2) = problem(rows, blocks, d)
    h = reference.hadamard(d)
    expected = [[(x[i, b].numpy() * d0[b].numpy()) @ h * d1[b].numpy() @ h * d2[b].numpy() for b in range(blocks)]
                for i in range(rows)]  # fmt: skip
    np.testing.assert_allclose(alternating_product(x, d0, d1, d2), expected, rtol=1e-11, atol=1e-11 * d)


@pytest.mark.parametrize("more", [0, 1])
def test_product_in_the_cache_equals_the_plain_one_over_many_chunks_of_rows(more):
    d = 1024
    rows = 5 * CACHE * torch.get_num_threads() // (8 * d) + more  # a last chunk of one row, or none
    x, diagonals = problem(rows, 1, d)
    torch.testing.assert_close(alternating_product(x, *diagonals, None), _plain(x, *diagonals, None))


def test_no_rows_give_no_rows():
    x, diagonals = problem(0, 2, 64)
    assert alternating_product(x, *diagonals).shape == (0, 2, 64)


@pytest.mark.parametrize("first", [True, False])
def test_first_and_second_gradients_equal_the_plain_ones(first):
    def gradients(product):
        x, diagonals = problem(3, 2, 128)
        x = x.clone().requires_grad_()
        diagonals[0].requires_grad_(first)
        wanted = [x, diagonals[0]][: 1 + first]
        once = torch.autograd.grad(product(x, *diagonals, None).tanh().sum(), wanted, create_graph=True)
        return [*once, *torch.autograd.grad(sum(g.square().sum() for g in once), wanted)]

    for ours, plain in zip(gradients(alternating_product), gradients(_plain), strict=True):
        torch.testing.assert_close(ours, plain)


def test_gradients_by_finite_differences():
    x, diagonals = problem(2, 2, 8)
    x, first = x.clone().requires_grad_(), diagonals[0].requires_grad_()
    assert torch.autograd.gradcheck(lambda x, first: alternating_product(x, first, *diagonals[1:], None), (x, first))


def test_functional_transforms_see_the_product():
    x, diagonals = problem(4, 2, 64)
    x = x.clone()

    def row(r):
        return alternating_product(r.unsqueeze(0), *diagonals).squeeze(0)

    torch.testing.assert_close(torch.func.vmap(row)(x), _plain(x, *diagonals))
    jacobian = torch.func.jacrev(row)(x[0])
    torch.testing.assert_close(torch.einsum("abij,ij->ab", jacobian, x[0]), row(x[0]))  # it is linear


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_product_keeps_the_floating_type(dtype):
    x, diagonals = problem(3, 1, 64, dtype)
    ours = alternating_product(x, *diagonals)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours, _plain(x, *diagonals))
