import numpy as np
import pytest
import torch

import reference
from calgp.gp import hadamard_transform
from calgp.gp.constants import constant


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
