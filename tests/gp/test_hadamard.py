import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad

import reference
from calgp.gp import hadamard, hadamard_transform
from calgp.gp.constants import constant
from calgp.gp.hadamard import CACHE, THREADS, _plain, alternating_product, has_fast_transform, padded_size

POWERS = [1, 2, 4, 16, 64, 128, 256, 1024, 4096]
WITH_FACTORS = [12, 20, 28, 24, 40, 56, 112, 192, 320, 448, 768, 1280, 1536]


@pytest.fixture(params=["fht-cpu", "torch"])
def backend(request, monkeypatch):
    """Every test that asks for it runs once by fht-cpu and once by torch alone."""
    if request.param == "torch":
        monkeypatch.setattr(hadamard, "fht", None)
    elif hadamard.fht is None:
        pytest.skip("fht-cpu is not installed")
    return request.param


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.skipif(sys.platform != "linux", reason="fht-cpu is used on Linux alone")
def test_the_tests_have_fht_cpu():
    assert has_fast_transform(torch.ones(1))
    assert has_fast_transform(torch.ones(1, dtype=torch.float64))


def test_other_types_devices_and_many_threads_are_left_to_torch():
    assert not has_fast_transform(torch.ones(1, dtype=torch.bfloat16))
    assert not has_fast_transform(torch.ones(1, device="meta"))
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS + 1)
    try:
        assert not has_fast_transform(torch.ones(1))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("d", POWERS + WITH_FACTORS)
def test_transform_equals_the_dense_matrix(d, backend, threads):
    x = torch.randint(-8, 9, (3, d), generator=torch.Generator().manual_seed(d)).double()
    # whole numbers below 2^53: no rounding at all
    np.testing.assert_array_equal(hadamard_transform(x), x.numpy() @ reference.hadamard(d))


@pytest.mark.parametrize("d", POWERS[:-2] + WITH_FACTORS)
def test_matrix_is_a_symmetric_hadamard_matrix(d):
    h = hadamard_transform(torch.eye(d, dtype=torch.float64))
    assert set(h.unique().tolist()) <= {-1.0, 1.0}
    assert torch.equal(h, h.mT)
    assert torch.equal(h @ h.mT, d * torch.eye(d, dtype=torch.float64))


@pytest.mark.parametrize("d", [8, 128, 5120, 8192])
def test_transforming_twice_gives_d_times_the_input(d, backend):
    x = torch.randint(-8, 9, (2, 3, d), generator=torch.Generator().manual_seed(d)).double()
    assert torch.equal(hadamard_transform(hadamard_transform(x)), d * x)


@pytest.mark.parametrize("d", [3, 6, 36, 44, 100])
def test_sizes_without_a_known_matrix_are_refused(d):
    with pytest.raises(ValueError, match=f"Invalid size {d}: must be .* such as {padded_size(d)}"):
        hadamard_transform(torch.ones(d))


def test_padded_sizes_are_the_next_that_there_are():
    sizes = sorted([2**k for k in range(14)] + [m * 2**k for m in (12, 20, 28) for k in range(4, 10)])
    for d in range(1, 6000):
        assert padded_size(d) == next(size for size in sizes if size >= d)
    assert [padded_size(d) for d in (384, 768, 1280, 1536)] == [384, 768, 1280, 1536]


@pytest.mark.parametrize("d", [8, 256, 320])
def test_gradient_is_the_transform_of_the_gradient(d, backend):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, d, generator=generator, dtype=torch.float64, requires_grad=True)
    outside = torch.randn(2, d, generator=generator, dtype=torch.float64)
    (gradient,) = torch.autograd.grad(hadamard_transform(x), x, outside)
    torch.testing.assert_close(gradient, hadamard_transform(outside))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_floating_type_is_kept(dtype):
    assert hadamard_transform(torch.ones(2, 128, dtype=dtype)).dtype == dtype


@pytest.mark.parametrize("d", [128, 320])
def test_input_stays_as_it_is(d, backend):
    """fht-cpu works in place; its place is ours."""
    x = torch.ones(2, d)
    hadamard_transform(x)
    alternating_product(x, None, None)
    assert torch.equal(x, torch.ones(2, d))


def test_training_works_after_a_first_call_in_inference_mode():
    """A kept matrix that was born in inference mode could not be saved for the backward pass."""
    x = torch.ones(2, 32, dtype=torch.float16)  # a type that no other test uses: nothing is kept for it yet
    with torch.inference_mode():
        hadamard_transform(x)
    trained = x.clone().requires_grad_()
    hadamard_transform(trained).sum().backward()
    assert trained.grad[0].tolist() == [32.0] + [0.0] * 31  # H̃ of ones: the first row sums to d, the others to 0


def test_constants_made_under_a_transform_of_torch_func_are_not_kept():
    calls = []

    @constant
    def ones(d: int):
        calls.append(d)
        return torch.ones(d)

    torch.func.grad(lambda x: (x * ones(2)).sum())(torch.ones(2))
    ones(2), ones(2)
    assert calls == [2, 2]


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


@pytest.mark.parametrize(
    ("rows", "blocks", "d"),
    [(5, 1, 1), (5, 3, 2), (7, 1, 64), (3, 2, 128), (3, 2, 320), pytest.param(2, 1, 8192, marks=pytest.mark.slow)],
)
def test_product_in_the_cache_equals_the_explicit_matrices(rows, blocks, d, backend):
    x, (d0, d1, d2) = problem(rows, blocks, d)
    h = reference.hadamard(d)
    expected = [[(x[i, b].numpy() * d0[b].numpy()) @ h * d1[b].numpy() @ h * d2[b].numpy() for b in range(blocks)]
                for i in range(rows)]  # fmt: skip
    np.testing.assert_allclose(alternating_product(x, d0, d1, d2), expected, rtol=1e-11, atol=1e-11 * d)


@pytest.mark.parametrize("more", [0, 1])
@pytest.mark.parametrize("d", [1024, 1280])
def test_product_in_the_cache_equals_the_plain_one_over_many_chunks_of_rows(d, more, backend, threads):
    rows = 3 * CACHE * threads // (8 * d) + more  # a last chunk of one row, or none
    x, diagonals = problem(rows, 1, d)
    torch.testing.assert_close(alternating_product(x, *diagonals, None), _plain(x, *diagonals, None))


def test_no_rows_give_no_rows():
    x, diagonals = problem(0, 2, 64)
    assert alternating_product(x, *diagonals).shape == (0, 2, 64)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("d", [128, 192])
def test_first_and_second_gradients_equal_the_plain_ones(d, first, backend):
    def gradients(product):
        x, diagonals = problem(3, 2, d)
        x = x.clone().requires_grad_()
        diagonals[0].requires_grad_(first)
        wanted = [x, diagonals[0]][: 1 + first]
        once = torch.autograd.grad(product(x, *diagonals, None).tanh().sum(), wanted, create_graph=True)
        return [*once, *torch.autograd.grad(sum(g.square().sum() for g in once), wanted)]

    for ours, plain in zip(gradients(alternating_product), gradients(_plain), strict=True):
        torch.testing.assert_close(ours, plain)


@pytest.mark.parametrize("d", [8, 16, 12])
def test_gradients_by_finite_differences(d, backend):
    x, diagonals = problem(2, 2, d)
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
    mapped = torch.func.vmap(lambda first: alternating_product(x, first, *diagonals[1:]))(
        torch.stack([diagonals[0]] * 2)
    )
    torch.testing.assert_close(mapped, _plain(x, *diagonals).expand(2, -1, -1, -1))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # of torch's own
def test_forward_differentiation_sees_the_product():
    x, diagonals = problem(4, 2, 64)
    with forward_ad.dual_level():
        product = alternating_product(forward_ad.make_dual(x.clone(), torch.ones_like(x)), *diagonals)
        tangent = forward_ad.unpack_dual(product).tangent
    torch.testing.assert_close(tangent, _plain(torch.ones_like(x), *diagonals))  # it is linear


def test_several_threads_of_python_do_not_disturb_each_other(backend):
    x, diagonals = problem(50, 2, 512)
    expected = alternating_product(x, *diagonals)
    with ThreadPoolExecutor(4) as pool:
        for product in pool.map(lambda _: alternating_product(x, *diagonals), range(40)):
            assert torch.equal(product, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_product_keeps_the_floating_type(dtype, backend):
    """Numbers of a size of 64 after two transforms: 12 additions in a row, each rounded, or 2 sums rounded once."""
    x, diagonals = problem(3, 1, 64, dtype)
    ours = alternating_product(x, *diagonals)
    assert ours.dtype == dtype
    exact = _plain(x.double(), *(diagonal.double() for diagonal in diagonals))
    torch.testing.assert_close(ours.double(), exact, rtol=0, atol=12 * 64 * torch.finfo(dtype).eps)
