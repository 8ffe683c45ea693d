import copy

import numpy as np
import pytest
import torch
from torch import nn

from calgp.gp import Masking, MeanField, SpectralBound, bound_filters, spectral_norm


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("shape", [(4, 9), (9, 4), (1, 5), (6, 6)])
def test_norm_equals_numpys(shape):
    matrix = randn(*shape)
    assert spectral_norm(matrix).item() == pytest.approx(np.linalg.norm(matrix.numpy(), 2), rel=1e-12)


def test_filters_above_the_bound_are_scaled_to_it_and_those_below_are_left():
    weight = randn(6, 3, 5, 5)
    norm = np.linalg.norm(weight.flatten(1).numpy(), 2)
    np.testing.assert_allclose(SpectralBound(0.9)(weight), weight.numpy() * (0.9 / norm), rtol=1e-12)
    assert torch.equal(SpectralBound(norm + 1)(weight), weight)


def test_gradients_equal_differences_on_both_sides_of_the_bound():
    weight = randn(3, 2, 2, 2).requires_grad_()
    for bound in (0.5, 100.0):
        assert torch.autograd.gradcheck(SpectralBound(bound), (weight,))


@pytest.mark.parametrize("weight", [torch.zeros(4, 2, 3, 3), torch.ones(4, 2, 3, 3), torch.eye(4).view(4, 4, 1, 1)])
def test_gradients_of_zero_and_of_equal_singular_values_are_finite(weight):
    weight = weight.clone().requires_grad_()
    SpectralBound(0.5)(weight).sin().sum().backward()
    assert weight.grad.isfinite().all()


def test_half_precision_keeps_its_type_and_mixed_precision_the_norm():
    assert SpectralBound(0.5)(randn(4, 2, 3, 3, dtype=torch.bfloat16)).dtype == torch.bfloat16
    weight = randn(4, 2, 3, 3, dtype=torch.float32)
    exact = SpectralBound(0.5)(weight)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(SpectralBound(0.5)(weight), exact)


@pytest.mark.parametrize("posterior", [Masking(), MeanField()], ids=["masks", "mean-field"])
def test_every_convolution_of_a_module_is_bounded_costed_saved_and_copied(posterior):
    def make(seed):
        generator = torch.Generator().manual_seed(seed)
        net = nn.Sequential(*(posterior.convolution(c, 4, 3, bias=False, generator=generator) for c in (2, 4)))
        bound_filters(net, 0.1)
        return net.to(memory_format=torch.channels_last)

    net, other = make(0), make(1)
    for convolution in net:
        assert spectral_norm(convolution.weight.flatten(1)).item() == pytest.approx(0.1, rel=1e-5)
        assert convolution.parametrizations.weight.original.norm() > 2 * convolution.weight.norm()
    plain = posterior.convolution(2, 4, 3, bias=False)
    with torch.no_grad():
        plain.weight.copy_(net[0].weight)
    torch.testing.assert_close(net[0].kl(), plain.kl())  # of the filters that are used
    other.load_state_dict(net.state_dict())
    for a, b in zip(net, other, strict=True):
        assert torch.equal(a.weight, b.weight)
    assert torch.equal(copy.deepcopy(net)[1].weight, net[1].weight)


@pytest.mark.parametrize("bound", [0.0, -1.0, float("inf"), float("nan")])
def test_a_bound_is_positive(bound):
    with pytest.raises(ValueError, match="positive"):
        SpectralBound(bound)
