"""A frozen module gives what it gave, and leaves what it was copied from alone."""

import pytest
import torch
from torch import nn

from calgp.gp import (
    RBF,
    UNMASKED,
    InducingPatches,
    InducingPoints,
    LaplaceGP,
    MaskedConv2d,
    RandomFeatureGP,
    SparseGP,
    Theta,
    bound_filters,
    freeze,
)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def random(gp):
    with torch.no_grad():
        gp.mean.normal_(generator=seeded(1))
        gp.scale.normal_(std=0.3, generator=seeded(2))
    return gp


def laplace():
    gp = LaplaceGP(RandomFeatureGP(4, 3, n_rf=16, masking=UNMASKED, generator=seeded()))
    c = torch.randn(20, 4, generator=seeded(3))
    gp.fit([c], lambda f: torch.ones_like(f[:, :1]))
    return gp


def bounded():
    net = nn.Sequential(MaskedConv2d(1, 4, 3, masking=UNMASKED, generator=seeded()))
    bound_filters(net, 0.5)
    return net


POINTS = torch.randn(12, 4, generator=seeded(4))
MODULES = {
    "points": lambda: random(SparseGP(InducingPoints(RBF(4, Theta(learn=True)), POINTS), 3)),
    "patches": lambda: random(SparseGP(InducingPatches((1, 6, 6), 9, patch=3, generator=seeded()), 3)),
    "laplace": laplace,
    "spectral": bounded,
}
INPUTS = {"points": (7, 4), "laplace": (7, 4)}


@pytest.mark.parametrize("name", MODULES)
def test_freezing_changes_no_result(name):
    module = MODULES[name]()
    x = torch.rand(INPUTS.get(name, (7, 1, 6, 6)), generator=seeded(5))
    before = module(x)
    frozen = freeze(module)
    before, after, again = ([part for part in found if part is not None] for found in (before, frozen(x), module(x)))
    for ours, theirs in zip(before, after, strict=True):
        # float32 sums in another order; variances are differences of numbers near 1
        torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=3e-6)
    for ours, theirs in zip(before, again, strict=True):
        assert torch.equal(ours, theirs)
    assert not any(parameter.requires_grad for parameter in frozen.parameters())
    assert any(parameter.requires_grad for parameter in module.parameters())


def test_what_is_kept_of_a_factor_is_no_part_of_the_state():
    gp = MODULES["points"]()
    keys = set(gp.state_dict())
    freeze(gp)(torch.rand(7, 4))
    assert set(gp.state_dict()) == keys
