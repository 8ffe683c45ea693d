"""Against torch's own module; tests/nets/test_lenet.py has the naive NumPy version."""

import pytest
import torch
from torch import nn

from calgp.nets.lenet import ResponseNorm

TORCHS = nn.LocalResponseNorm(9, 0.001, 0.75, 1.0)


@pytest.mark.parametrize("channels", [1, 5, 9, 64])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["first", "last"])
def test_values_and_gradients_are_those_of_torch(channels, layout):
    """Fewer channels than neighbours, and more; values so large that the norm matters."""
    generator = torch.Generator().manual_seed(0)
    x, gradient = (
        (50 * torch.randn(3, channels, 4, 5, generator=generator, dtype=torch.float64)).to(memory_format=layout)
        for _ in range(2)
    )
    found, expected = [], []
    for module, results in ((ResponseNorm(), found), (TORCHS, expected)):
        there = x.clone().requires_grad_()
        y = module(there)
        y.backward(gradient)
        results += [y.detach(), there.grad, module(x)]
    assert (expected[0] - x).abs().max() > 1
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-11)  # sums of nine squares in another order


def test_a_gradient_of_the_gradient_is_refused():
    """The formula of the backward pass is not differentiated: an error, not a wrong number."""
    x = torch.randn(1, 3, 2, 2, requires_grad=True)
    (first,) = torch.autograd.grad(ResponseNorm()(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_mixed_precision_is_as_exact_as_its_type():
    """bf16 has 8 bits: 2⁻⁸ of the values, for each of the roundings on the way (a square, a sum, two roots)."""
    x = 20 * torch.randn(2, 64, 4, 4, generator=torch.Generator().manual_seed(0))
    x.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = ResponseNorm()(x)
    y.sum().backward()
    torch.testing.assert_close(y.float(), TORCHS(x), rtol=4 * 2**-8, atol=0)
    assert x.grad.isfinite().all()
