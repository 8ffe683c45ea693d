import pytest
import torch
from torch.nn import functional as F

from calgp.gp import Masking, Noise, name_sites
from calgp.gp.masks import UNMASKED, MaskedConv2d
from calgp.gp.narrow import is_narrow, narrow_convolution, side_by_side


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize(("n", "side"), [(10, 3), (7, 7), (1, 5), (4, 8)])
def test_the_gradients_are_those_of_the_convolution(n, side):
    h, weight, gradient = drawn(n, 16, side, side), drawn(32, 16, 3, 3, seed=1), drawn(n, 32, side, side, seed=2)
    h = h.contiguous(memory_format=torch.channels_last)
    ours, exact = ([each.clone().to(kind).requires_grad_() for each in (h, weight)] for kind in (None, torch.float64))
    y = narrow_convolution(*ours)
    y.backward(gradient)
    F.conv2d(exact[0], exact[1], padding=1).backward(gradient.double())
    assert y.equal(F.conv2d(h, weight, padding=1))
    for mine, right in zip(ours, exact, strict=True):  # sums in float32, rounded once to the 8 bits of bf16
        assert mine.grad is not None and right.grad is not None
        error = (mine.grad.double() - right.grad).abs()
        assert (error <= 2**-8 * right.grad.abs() + 1e-4 * right.grad.abs().max()).all()


def test_images_beside_each_other_do_not_touch():
    h = drawn(6, 2, 3, 3)
    rows = side_by_side(h)
    assert rows.shape == (1, 2, 3, 24)
    assert rows.unflatten(-1, (6, 4))[0, ..., :3].permute(2, 0, 1, 3).equal(h)
    assert not rows.unflatten(-1, (6, 4))[..., 3].any()


@pytest.mark.parametrize("masking", [UNMASKED, Masking(0.9)])
def test_a_layer_trains_by_it_in_bf16_alone(masking):
    layer = MaskedConv2d(16, 8, 3, masking=masking, bias=False, generator=torch.Generator().manual_seed(0))
    name_sites(layer)
    h, noise = drawn(6, 16, 7, 7), Noise(0, torch.zeros(1, dtype=torch.int64), torch.arange(6))
    with torch.autocast("cpu", torch.bfloat16):
        mixed = layer(h, noise)
    assert "NarrowConvolution" in type(mixed.grad_fn).__name__ and mixed.dtype == torch.bfloat16
    plain = layer(h.float(), noise)
    assert "NarrowConvolution" not in type(plain.grad_fn).__name__
    torch.testing.assert_close(mixed.float(), plain, rtol=0.02, atol=0.02)  # weights rounded to 8 bits
    mixed.float().square().sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.dtype == torch.float32
    with torch.no_grad():
        assert not is_narrow(h, layer.weight)
    assert not is_narrow(drawn(6, 16, 9, 9), layer.weight)
