import pytest
import torch
from small_networks import DIGITS, HALF, TASK, Residual, features
from torch import nn

from calgp.data import load
from calgp.errors import CalgpError
from calgp.gp import UNMASKED, Masking, MeanField
from calgp.methods import METHODS
from calgp.nets.wrap import NETWORKS, wrap


class Uncopied(Residual):
    def __init__(self):
        super().__init__()
        self.kept = torch.ones(1, requires_grad=True) * 2


@pytest.mark.parametrize(
    ("network", "options", "message"),
    [
        (Residual, {"mask": "some"}, "Invalid mask='some': must be one of all, convolutions, linear, none"),
        (Residual, {"mask": []}, r"Invalid mask=\(\)"),
        (Residual, {"keep": 0.0}, "Invalid keep="),
        (Residual, {"mean": (0.5,)}, r"Invalid mean=\(0.5,\), std=\(\): must be a number a channel each"),
        (Residual, {"mean": (0, 0), "std": (1, 1)}, "cannot take images of 3 × 8 × 8: .* mean and std for these"),
        (Residual, {"statistics": -1}, "Invalid statistics=-1"),
        (lambda: 3, {}, "must give an nn.Module, not 3"),
        (lambda: features(Residual()).network, {}, "not scripted, compiled or wrapped already"),
        (lambda: torch.jit.freeze(torch.jit.script(nn.Conv2d(3, 2, 1).eval())), {}, "not scripted, compiled"),
        (lambda: torch.compile(Residual()), {}, "not scripted, compiled"),
        (Uncopied(), {}, "cannot be copied .*; give wrap a function that makes it"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_what_cannot_be_wrapped_is_refused(network, options, message):
    with pytest.raises(CalgpError, match=message):
        features(network, **options)


def test_an_unknown_option_is_an_error():
    with pytest.raises(TypeError, match="unexpected keyword argument 'kept'"):
        wrap(Residual(), kept=0.5)


def test_names_are_given_once_and_an_unknown_network_is_asked_for():
    networks = [Residual(), Residual()]
    one, other, same = (wrap(each).network for each in (*networks, networks[0]))
    assert (one, other, same) == ("residual", "residual-2", "residual")
    spec = wrap(networks[0], name="mine")
    assert spec == wrap(networks[1], name="mine")
    NETWORKS.clear()
    with pytest.raises(CalgpError, match=r"calgp.wrap\(network, name='mine'\)"):
        spec.build(TASK, HALF)
    with pytest.raises(CalgpError, match="must be a module, or a function that makes one"):
        wrap(3)
    with pytest.raises(CalgpError, match="must be a module, or a function that makes one"):
        wrap(Residual.__mro__[-1]())


def test_a_function_makes_a_fresh_network_from_the_generator_and_leaves_torchs_own_alone():
    spec, before = wrap(Residual), torch.get_rng_state()
    one, same, other = (
        spec.build(TASK, HALF, generator=torch.Generator().manual_seed(seed)).network.first.weight for seed in (0, 0, 1)
    )
    assert one.equal(same) and not one.equal(other)
    assert before.equal(torch.get_rng_state())


def test_masks_are_those_of_pretrained_weights_or_of_the_method_and_none_where_it_has_none():
    assert features(Residual()).masking == Masking(0.9, "element", inverted=True)
    assert features(Residual(), keep=None).masking == HALF
    assert features(Residual(), keep=0.5, granularity="channel", inverted=False).masking == Masking(0.5, "channel")
    assert not features(Residual(), masking=UNMASKED).sites
    with pytest.raises(CalgpError, match="Gaussian weights need layers of their own"):
        features(Residual(), masking=MeanField())


def test_a_training_starts_by_estimating_them():
    digits = load("digits", "train").balanced(40, 0)
    network = nn.Sequential(nn.Conv2d(1, 4, 5), nn.ReLU(), nn.Conv2d(4, 4, 5), nn.BatchNorm2d(4))
    for statistics, changed in ((30, True), (0, False)):
        spec = wrap(network, features="", statistics=statistics)
        model = METHODS["cnn-gp-sorf"].build(DIGITS, spec)
        spec.start(model, digits, generator=torch.Generator().manual_seed(0))
        assert model.features.network[3].running_mean.any() == changed
        assert model.features.training
