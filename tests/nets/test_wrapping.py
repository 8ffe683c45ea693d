import copy
import functools
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from architectures import ARCHITECTURES, OPTIONAL
from calgp.data import load
from calgp.errors import CalgpError
from calgp.gp import (
    UNMASKED,
    Bound,
    InducingPoints,
    LaplaceGP,
    MaskedConv2d,
    Masking,
    MeanField,
    Noise,
    RandomFeatureGP,
    SparseGP,
    Theta,
    make_kernel,
    name_sites,
    predict,
)
from calgp.methods import METHODS
from calgp.nets import NETWORKS, Headed, Task, wrap

DIGITS = Task(1, 28, 28, 10)
TASK = Task(3, 8, 8, 4)
HALF = Masking()
every_architecture = pytest.mark.parametrize("name", ARCHITECTURES)


@pytest.fixture(autouse=True)
def _fresh_registry():
    before = dict(NETWORKS)
    NETWORKS.clear()
    torch.manual_seed(0)
    yield
    NETWORKS.clear()
    NETWORKS.update(before)


@pytest.fixture(scope="module")
def digits():
    return load("digits", "train").balanced(40, 0)


@pytest.fixture(scope="module")
def made():
    """Each architecture, made once: wrapping copies it."""
    return functools.cache(lambda name: ARCHITECTURES[name].make())


@pytest.fixture(scope="module")
def built(made, digits):
    """CNN+GP(SORF) on each, built once, as a training starts; without statistics of batch norm features would be 0."""

    @functools.cache
    def build(name):
        torch.manual_seed(0)
        spec = wrap(made(name), name=name)
        model = METHODS["cnn-gp-sorf"].build(DIGITS, spec, generator=torch.Generator().manual_seed(0))
        spec.start(model, digits, generator=torch.Generator().manual_seed(0))
        return model

    return lambda name: copy.deepcopy(build(name))


class Residual(nn.Module):
    """A stem, two residual blocks with batch norm, pooling, a classifier."""

    def __init__(self, width=6, classes=5):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True))
            for _ in range(2)
        )
        self.classifier = nn.Linear(width, classes)

    def forward(self, x):
        h = self.norm(self.first(x)).relu_()
        for block in self.blocks:
            h = h + block(h)
        return self.classifier(h.mean((2, 3)))


def images(n=5, task=TASK, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(n, task.channels, task.height, task.width, generator=generator)


def noise(samples=2, rows=5, seed=0):
    return Noise(seed, torch.arange(samples), torch.arange(rows))


def features(network, *, task=TASK, masking=HALF, **options):
    return wrap(network, **options).build(task, masking)


def entering(network, name, x):
    """What enters a module of a network, as it was before it was wrapped."""
    found = []
    handle = network.get_submodule(name).register_forward_pre_hook(lambda module, args: found.append(args[0]))
    with torch.no_grad():
        network(x)
    handle.remove()
    return found[0]


# ------------------------------------------------------------------------------------------- real architectures


@every_architecture
def test_masked_layers_are_those_counted_by_hand_and_each_fires_in_training_and_in_prediction(name, built):
    model = built(name)
    wrapped = model.features
    assert len(wrapped.sites) == ARCHITECTURES[name].sites
    assert wrapped.out_features == ARCHITECTURES[name].width
    masks = {key: module for key, module in model.sites().items() if key.startswith("features.")}
    assert len(masks) == sum(wrapped.sites.values())
    fired = []
    for mask in masks.values():
        mask.register_forward_hook(lambda module, *_: fired.append(module))
    for training in (True, False):
        fired.clear()
        with torch.no_grad():
            model.train(training)(images(4, DIGITS), noise(2, 4))
        assert sorted(map(id, fired)) == sorted(map(id, masks.values()))


@every_architecture
def test_the_features_are_what_entered_the_classifier_and_the_network_is_left_alone(name, made):
    network, x = made(name), images(3, DIGITS)
    before = copy.deepcopy(network.state_dict())
    classifier = [key for key, module in network.named_modules() if isinstance(module, nn.Linear)][-1]
    expected = entering(network, classifier, x)
    wrapped = features(network, task=DIGITS, mask="none").eval()
    with torch.no_grad():
        torch.testing.assert_close(wrapped(wrapped.stem(x)), expected, rtol=1e-5, atol=0)  # float32, the same sums
    assert all(before[key].equal(value) for key, value in network.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in network.modules())


@every_architecture
def test_some_steps_lower_the_bound_on_digits_and_the_state_gives_the_same_predictions(name, built, made, digits):
    x, y, rows = digits.pixels(), digits.y, torch.arange(40)
    model = built(name)
    bound, optimiser = Bound(model, n=4000), torch.optim.Adam(model.parameters(), lr=1e-2)

    def estimate():
        with torch.no_grad():
            nll, kl = bound(x, y, Noise(10**6, torch.arange(4), rows))
            return torch.stack([nll, nll + kl])

    before = estimate()
    for step in range(12):
        optimiser.zero_grad()
        sum(bound(x, y, Noise(step, torch.arange(1), rows))).backward()
        optimiser.step()
    assert (estimate() < before).all()  # and not by the KL alone
    fresh = METHODS["cnn-gp-sorf"].build(DIGITS, wrap(made(name)), generator=torch.Generator().manual_seed(1))
    fresh.load_state_dict(model.state_dict())
    one, other = (predict(m, x[:4], samples=3, seed=2) for m in (model, fresh))
    assert torch.equal(one.log_probs, other.log_probs)


@every_architecture
def test_predictions_depend_on_the_seed_and_not_on_batches_memory_or_the_stem(name, built):
    model, x = built(name), images(4, DIGITS)
    whole = predict(model, x, samples=4, seed=1).log_probs
    order = torch.tensor([3, 0, 2, 1])
    parts = predict(model, [(x[rows], rows) for rows in order.split(3)], samples=4, seed=1, memory=1).log_probs
    torch.testing.assert_close(parts, whole[order], rtol=0, atol=1e-5)
    assert (whole - predict(model, x, samples=4, seed=2).log_probs).abs().max() > 1e-3
    assert model.features.stem_module is not None
    model.features.stem_module = None  # all of the network for every sample
    torch.testing.assert_close(predict(model, x, samples=4, seed=1).log_probs, whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", OPTIONAL)
def test_networks_of_libraries_that_may_be_there(name):
    library, make = OPTIONAL[name]
    try:
        __import__(library)
    except Exception as error:
        pytest.skip(f"{library} does not import here: {error}")
    task = Task(3, 64, 64, 10)
    model = METHODS["cnn-gp-sorf"].build(task, wrap(make()))
    layers = [m for m in make().modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    assert len(model.features.sites) == len(layers) - 2  # the first and the classifier
    assert predict(model, images(2, task), samples=2).variance.max() > 0


# ---------------------------------------------------------------------------------------------------- masks


@pytest.mark.parametrize("granularity", ["element", "channel", "shared"])
@pytest.mark.parametrize("inverted", [False, True])
def test_a_masked_convolution_is_that_of_the_papers_networks(granularity, inverted):
    network = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 7, 5, padding=2), nn.Flatten())
    masking = Masking(0.75, granularity, inverted)
    wrapped = features(network, masking=masking, keep=None, features="1")
    ours = MaskedConv2d(4, 7, 5, masking=masking)
    ours.load_state_dict(network[1].state_dict())
    ours.mask.site = name_sites(wrapped)["network.1.calgp_masks.0"].site
    expected = ours(network[0](images()), noise()).mean((2, 3))
    torch.testing.assert_close(wrapped.eval()(wrapped.stem(images()), noise()), expected, rtol=1e-5, atol=1e-6)
    own, other = wrapped.kl(), ours.kl() + 0.5 * sum(p.square().sum() for p in network[0].parameters())
    torch.testing.assert_close(own, other)


class ChannelsLast(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 1), nn.Linear(4, 7)

    def forward(self, x):
        return self.second(self.first(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ChannelsFirst(ChannelsLast):
    def __init__(self):
        super().__init__()
        self.second = nn.Conv2d(4, 7, 1)

    def forward(self, x):
        return self.second(self.first(x))


@pytest.mark.parametrize("granularity", ["element", "channel", "shared"])
def test_a_linear_layer_on_channels_last_images_is_a_convolution_of_one_pixel(granularity):
    last, first = ChannelsLast(), ChannelsFirst()
    first.load_state_dict({key: value.view(first.state_dict()[key].shape) for key, value in last.state_dict().items()})
    options = {"masking": Masking(0.5, granularity), "keep": None, "features": ""}
    one, other = (features(net, **options).eval() for net in (last, first))
    c, d = (each(each.stem(images()), noise()) for each in (one, other))
    torch.testing.assert_close(c, d, rtol=1e-5, atol=1e-6)


def test_windows_of_an_image_have_its_masks():
    class Windows(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 4, 1), nn.Linear(4, 4, bias=False)

        def forward(self, x):
            h = self.first(x).unfold(2, 4, 4).unfold(3, 4, 4)  # [N, C, 2, 2, 4, 4]
            h = h.permute(0, 2, 3, 4, 5, 1).flatten(0, 2)  # windows of an image behind each other
            return self.second(h).unflatten(0, (-1, 4)).mean((1, 2, 3))

    network = Windows()
    wrapped = features(network, masking=Masking(0.5, "channel"), keep=None, features="").eval()
    z = name_sites(wrapped)["network.second.calgp_masks.0"].draw(torch.ones(10, 4), noise())  # [S, N, C]
    expected = (network.first(images()).mean((2, 3)) * z) @ network.second.weight.mT
    torch.testing.assert_close(wrapped(wrapped.stem(images()), noise()), expected.flatten(0, 1), rtol=1e-5, atol=1e-6)


def test_inverted_masks_leave_a_linear_networks_mean_as_it_was():
    network = nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.Linear(16, 8), nn.Linear(8, 3))
    wrapped, plain = features(network).eval(), features(network, mask="none").eval()
    assert wrapped.masking == Masking(0.9, "element", inverted=True)
    samples = wrapped(wrapped.stem(images()), noise(4000)).unflatten(0, (4000, 5))
    error = samples.std(0) / 4000**0.5
    assert ((samples.mean(0) - plain.stem(images())).abs() < 5 * error).all()  # five standard errors


def test_a_layer_called_twice_has_a_mask_a_call_by_element_and_one_by_channel_and_costs_once():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.shared = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3, padding=1, bias=False)

        def forward(self, x):
            return self.shared(self.shared(self.first(x)))

    network = Twice()
    cost = HALF.kl(network.shared.weight) + sum(UNMASKED.kl(p) for p in network.first.parameters())
    for granularity, count in (("element", 2), ("channel", 1), ("shared", 1)):
        masking = Masking(0.5, granularity)
        wrapped = features(network, masking=masking, keep=None, features="").eval()
        assert wrapped.sites == {"shared": 2}
        masks = list(name_sites(wrapped).values())
        assert len(masks) == count
        torch.testing.assert_close(wrapped.kl(), cost)
        h = network.first(images()).repeat(2, 1, 1, 1)
        for mask in (masks[0], masks[-1]):
            h = network.shared(mask(h, noise()))
        c = wrapped(wrapped.stem(images()), noise())
        torch.testing.assert_close(c, h.mean((2, 3)), rtol=1e-5, atol=1e-6)
    one, other = (mask.draw(torch.ones(5, 4, 8, 8), noise()) for mask in name_sites(features(network)).values())
    assert not one.equal(other)


def test_tied_weights_stay_tied_and_cost_once():
    network = nn.Sequential(
        nn.Flatten(), nn.Linear(192, 6), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.Linear(6, 2)
    )
    network[4].weight = network[2].weight
    wrapped = features(network, keep=None)
    assert list(wrapped.sites) == ["2", "4"]
    assert wrapped.network[4].weight is wrapped.network[2].weight
    biases = [network[i].bias for i in (1, 2, 4)]
    expected = UNMASKED.kl(network[1].weight) + HALF.kl(network[2].weight) + sum(map(UNMASKED.kl, biases))
    torch.testing.assert_close(wrapped.kl(), expected)


@pytest.mark.parametrize(
    ("options", "sites"),
    [
        ({}, ["blocks.0.0", "blocks.1.0"]),
        ({"mask_first": True}, ["first", "blocks.0.0", "blocks.1.0"]),
        ({"mask": "convolutions"}, ["blocks.0.0", "blocks.1.0"]),
        ({"mask": ["blocks.1"]}, ["blocks.1.0"]),
        ({"mask": ["first", "blocks.1.0"]}, ["first", "blocks.1.0"]),
        ({"mask": lambda name: name.endswith(".0")}, ["blocks.0.0", "blocks.1.0"]),
        ({"mask": lambda name: True}, ["first", "blocks.0.0", "blocks.1.0"]),
        ({"mask": "none"}, []),
    ],
)
def test_which_layers_are_masked(options, sites):
    assert list(features(Residual(), **options).sites) == sites


def test_masks_are_those_of_pretrained_weights_or_of_the_method_and_none_where_it_has_none():
    assert features(Residual()).masking == Masking(0.9, "element", inverted=True)
    assert features(Residual(), keep=None).masking == HALF
    assert features(Residual(), keep=0.5, granularity="channel", inverted=False).masking == Masking(0.5, "channel")
    assert not features(Residual(), masking=UNMASKED).sites
    with pytest.raises(CalgpError, match="Gaussian weights need layers of their own"):
        features(Residual(), masking=MeanField())


# ---------------------------------------------------------------------------------------------- stem and features


def test_the_stem_is_the_last_module_before_the_first_mask_and_runs_once_for_all_samples():
    layers = [nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 8), nn.Tanh()]
    wrapped = features(nn.Sequential(*layers), mask="linear", features="").eval()
    assert wrapped.stem_module == "3"
    rows = []
    wrapped.network[2].register_forward_hook(lambda module, args, output: rows.append(len(output)))
    wrapped(wrapped.stem(images()), noise(50))
    assert rows == [5, 1]  # and a blank in the place of 250 images


def test_a_stem_ends_where_nothing_goes_around_it():
    wrapped = features(Residual(), mask=["blocks.1"]).eval()
    assert wrapped.stem_module == "norm"  # what blocks.0 gives is added to what enters it
    assert wrapped.train().stem(images()).equal(images())  # batch norm must see each image once


def test_what_goes_around_a_module_makes_an_earlier_one_the_stem_or_none():
    class Around(Residual):
        def forward(self, x):
            return torch.cat([super().forward(x), x.mean((2, 3))], 1)

    network = Around()
    wrapped = features(network, features="").eval()
    assert wrapped.stem_module is None
    assert wrapped.stem(images()).equal(images())
    assert wrapped(images(), noise()).shape == (10, 5 + 3)


def test_without_masks_all_of_the_network_is_the_stem():
    network = Residual()
    wrapped = features(network, mask="none").eval()
    c = wrapped.stem(images())
    torch.testing.assert_close(c, entering(network.eval(), "classifier", images()))
    assert wrapped(c, noise(50)) is c


def test_features_by_name_stop_there_and_what_lies_behind_learns_nothing():
    network = Residual()
    wrapped = features(network, features="blocks.0", mask="none")
    assert wrapped.out_features == 6
    learned = {name for name, parameter in wrapped.network.named_parameters() if parameter.requires_grad}
    on_the_way = ("first.", "norm.", "blocks.0.")
    assert learned == {name for name, _ in network.named_parameters() if name.startswith(on_the_way)}
    ran = []
    wrapped.network.blocks[1].register_forward_hook(lambda *_: ran.append(1))
    h = network.eval().norm(network.first(images())).relu()
    torch.testing.assert_close(wrapped.eval().stem(images()), network.blocks[0](h).mean((2, 3)))
    assert not ran


def test_images_are_normalised_by_channel():
    network = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1))
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.1, 0.3)
    wrapped = features(network, mask="none", features="", mean=mean, std=std)
    x = (images() - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    torch.testing.assert_close(wrapped.stem(images()), network(x).mean((2, 3)))
    assert not [key for key in wrapped.state_dict() if not key.startswith("network.")]
    with pytest.raises(CalgpError, match="for 2 channels"):
        features(network, mean=(0, 0), std=(1, 1), features="")


def test_images_that_the_network_changes_in_place_are_its_own():
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1)

        def forward(self, x):
            return self.two(F.relu(self.one(x.sub_(0.5)), inplace=True))

    for options in ({}, {"mask": "none"}, {"mask_first": True}):
        model = METHODS["cnn-gp-sorf"].build(TASK, wrap(InPlace(), features="", **options))
        x = images()
        first, again = predict(model, x, samples=3).log_probs, predict(model, x, samples=3, memory=1).log_probs
        torch.testing.assert_close(first, again, rtol=0, atol=1e-5)
        assert x.equal(images())


# ------------------------------------------------------------------------------------ freezing, batch norm, copies


def test_a_frozen_network_learns_nothing_and_its_cost_is_left_out():
    model = METHODS["cnn-gp-sorf"].build(TASK, wrap(Residual(), freeze=True))
    state = copy.deepcopy(model.features.state_dict())
    assert model.features.kl() == 0
    optimiser = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model.train()
    loss = sum(Bound(model, n=5)(images(), torch.arange(5) % 4, noise(1)))
    loss.backward()
    optimiser.step()
    assert all(value.equal(state[key]) for key, value in model.features.state_dict().items())
    assert model.gp.layers[0].weights.weight.grad.any()


def test_what_the_owner_has_frozen_stays_frozen_and_costs_nothing():
    network = Residual()
    network.first.requires_grad_(False)
    expected = sum(HALF.kl(block[0].weight) + UNMASKED.kl(block[0].bias) for block in network.blocks)
    torch.testing.assert_close(features(network, keep=None).kl(), expected)


def test_statistics_of_batch_norm_are_those_behind_the_masks():
    wrapped = features(Residual(), mask_first=True, freeze=True)
    norm = wrapped.network.norm
    parts = [(images(4, seed=i), torch.arange(4) + 4 * i) for i in range(3)]
    wrapped.estimate_statistics(parts, seed=7)
    mask = name_sites(wrapped)["network.first.calgp_masks.0"]
    with torch.no_grad():
        h = [
            wrapped.network.first._conv_forward(
                mask(x, Noise(7, torch.zeros(1, dtype=torch.long), rows)),
                wrapped.network.first.weight,
                wrapped.network.first.bias,
            )
            for x, rows in parts
        ]
    torch.testing.assert_close(norm.running_mean, torch.stack([each.mean((0, 2, 3)) for each in h]).mean(0))
    torch.testing.assert_close(norm.running_var, torch.stack([each.var((0, 2, 3)) for each in h]).mean(0))
    assert norm.momentum == 0.1 and not norm.training


def test_a_training_starts_by_estimating_them():
    digits = load("digits", "train").balanced(40, 0)
    network = nn.Sequential(nn.Conv2d(1, 4, 5), nn.ReLU(), nn.Conv2d(4, 4, 5), nn.BatchNorm2d(4))
    for statistics, changed in ((30, True), (0, False)):
        spec = wrap(network, features="", statistics=statistics)
        model = METHODS["cnn-gp-sorf"].build(DIGITS, spec)
        spec.start(model, digits, generator=torch.Generator().manual_seed(0))
        assert model.features.network[3].running_mean.any() == changed
        assert model.features.training


def pickled(model):
    return pickle.loads(pickle.dumps(model))  # noqa: S301 (our own)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_copy_has_its_own_masks(copied):
    model = METHODS["cnn-gp-sorf"].build(TASK, wrap(Residual()))
    other = copied(model)
    expected = predict(model, images(), samples=3).log_probs
    assert predict(other, images(), samples=3).log_probs.equal(expected)
    own = {id(module) for module in model.modules()}
    hooks = [h for m in other.modules() for h in m._forward_pre_hooks.values()]
    assert len(hooks) == 2
    assert not any(id(hook.__self__) in own for hook in hooks)


def test_torch_export_follows_a_wrapped_network():
    class Means(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = METHODS["cnn-gp-sorf"].build(TASK, wrap(Residual())).eval()
            self.model.sites()

        def forward(self, x):
            return self.model(x, noise(2, 3)).mean

    means = Means()
    with torch.no_grad():
        exported = torch.export.export(means, (images(3),), strict=False).module()
        torch.testing.assert_close(exported(images(3, seed=1)), means(images(3, seed=1)))


def test_a_function_makes_a_fresh_network_from_the_generator_and_leaves_torchs_own_alone():
    spec, before = wrap(Residual), torch.get_rng_state()
    one, same, other = (
        spec.build(TASK, HALF, generator=torch.Generator().manual_seed(seed)).network.first.weight for seed in (0, 0, 1)
    )
    assert one.equal(same) and not one.equal(other)
    assert before.equal(torch.get_rng_state())


@pytest.mark.parametrize("method", [name for name in METHODS if name != "cgp"])
def test_every_method_takes_a_wrapped_network(method):
    model, rows = METHODS[method].build(TASK, wrap(Residual())), torch.arange(8)
    x, y = images(8), torch.arange(8) % 4
    sum(Bound(model, n=8)(x, y, Noise(0, torch.arange(1), rows))).backward()
    assert any(p.grad is not None and p.grad.any() for p in model.features.parameters())
    result = predict(model, x, samples=3)
    torch.testing.assert_close(result.probs.sum(-1), torch.ones(8), rtol=0, atol=1e-5)


def heads(d):
    points = InducingPoints(make_kernel("rbf", d, Theta()), torch.randn(7, d))
    return {
        "random features": RandomFeatureGP(d, 4, n_rf=16),
        "sparse": SparseGP(points, 4),
        "laplace": LaplaceGP(RandomFeatureGP(d, 4, n_rf=16, masking=UNMASKED)),
    }


@pytest.mark.parametrize("head", heads(1))
def test_heads_on_wrapped_features_are_models(head):
    wrapped = features(Residual())
    model = Headed(wrapped, heads(wrapped.out_features)[head])
    sum(Bound(model, n=5)(images(), torch.arange(5) % 4, noise(2))).backward()
    assert model(images(), noise(3)).mean.shape == (3, 5, 4)
    assert model.kl() == wrapped.kl() + model.head.kl()
    whole = predict(model, images(), samples=4)
    part = predict(model, [(images()[2:], torch.arange(2, 5))], samples=4)
    torch.testing.assert_close(part.log_probs, whole.log_probs[2:], rtol=0, atol=1e-5)


# -------------------------------------------------------------------------------------------------- refusals


class Net(nn.Module):
    """Two convolutions and a classifier, with `between` to go wrong in."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.classifier = nn.Linear(4, 2)

    def forward(self, x):
        return self.classifier(self.between(self.two(self.one(x).relu())).mean((2, 3)))


class FunctionalLinear(Net):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def between(self, h):
        return F.linear(h.mT.mT.movedim(1, -1), self.inner.weight, self.inner.bias).movedim(-1, 1)


class FunctionalConvolution(Net):
    def __init__(self):
        super().__init__()
        self.filters = nn.Parameter(torch.randn(4, 4, 1, 1))

    def between(self, h):
        return F.conv2d(h, self.filters - self.filters.mean())


class Product(Net):
    def __init__(self):
        super().__init__()
        self.mixing = nn.Parameter(torch.randn(2, 4, 2))

    def between(self, h):
        return torch.einsum("nchw,cd->ndhw", h, self.mixing.transpose(0, 1).flatten(1))


class TiedOutside(Net):
    def __init__(self):
        super().__init__()
        self.early, self.late = nn.Linear(4, 4), nn.Linear(4, 4)
        self.late.weight = self.early.weight

    def between(self, h):
        h = F.linear(self.late(h.movedim(1, -1)), self.early.weight)
        return h.movedim(-1, 1)


class Uncopied(Net):
    def __init__(self):
        super().__init__()
        self.kept = torch.ones(1, requires_grad=True) * 2


class Attention(Net):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def between(self, h):
        tokens = h.flatten(2).mT
        return self.attention(tokens, tokens, tokens, need_weights=False)[0].mT.view_as(h)


class Recurrent(Net):
    def __init__(self):
        super().__init__()
        self.recurrent = nn.GRU(4, 4, batch_first=True)

    def between(self, h):
        return self.recurrent(h.flatten(2).mT)[0].mT.reshape(h.shape)


class EncoderLayer(Net):
    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)

    def between(self, h):
        return self.encoder(h.flatten(2).mT).mT.reshape(h.shape)


class Scaled(Net):
    def __init__(self):
        super().__init__()
        self.position, self.scale = nn.Parameter(torch.randn(1, 4, 8, 8)), nn.Parameter(torch.randn(4, 1, 1))

    def between(self, h):
        return (h + self.position) * self.scale


class SequenceFirst(Net):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def between(self, h):
        return self.inner(h.flatten(2)[:, :, :6].permute(2, 0, 1)).permute(1, 2, 0).unsqueeze(-1)


class Constant(Net):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def between(self, h):
        return h + self.inner(torch.ones(3, 4)).mean(0)[:, None, None]


class BatchDependent(Net):
    def between(self, h):
        return h - h.mean(0)


class AlwaysRandom(Net):
    def between(self, h):
        return h + torch.rand_like(h)


class FunctionalDropout(Net):
    def between(self, h):
        return F.dropout(h, training=self.training)


class RandomModule(Net):
    def __init__(self):
        super().__init__()
        self.depth = StochasticDepth()

    def between(self, h):
        return self.depth(h)


class StochasticDepth(nn.Module):
    def forward(self, h):
        return h * torch.rand(len(h), 1, 1, 1) if self.training else h


class OnlyInEvaluation(Net):
    def __init__(self):
        super().__init__()
        self.inner = nn.Conv2d(4, 4, 1)

    def between(self, h):
        return h if self.training else self.inner(h)


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 4, 1), nn.Conv1d(4, 4, 1)

    def forward(self, x):
        return self.two(self.one(x).flatten(2))


@pytest.mark.parametrize(
    ("network", "options", "message"),
    [
        (FunctionalLinear, {}, r"inner\.weight \(torch's linear in the network\)"),
        (FunctionalLinear, {"mask": "linear"}, r"inner\.weight"),
        (FunctionalLinear, {"mask": ["inner"]}, "mask has 'inner', but no layer of that name is called"),
        (TiedOutside, {"mask": ["late"]}, "Weights of the network meet the images outside of layers.*early"),
        (lambda: wrap(Uncopied()).build(TASK, HALF), {}, "cannot be copied"),
        (FunctionalConvolution, {}, r"filters \(torch's conv2d in the network\)"),
        (FunctionalConvolution, {"mask": "convolutions"}, "filters"),
        (Product, {}, r"mixing \(torch's einsum in the network\)"),
        (Attention, {}, r"in_proj_weight \(torch's multi_head_attention_forward in attention\)"),
        (Recurrent, {}, r"recurrent\.weight_ih_l0 \(torch's gru in recurrent\)"),
        (EncoderLayer, {}, r"in_proj_weight .* in encoder\.self_attn"),
        (SequenceFirst, {}, "inner .* does not have the images along its first axis"),
        (Constant, {}, "What enters inner does not depend on the images"),
        (BatchDependent, {}, "depends on the images beside it"),
        (AlwaysRandom, {}, "The network is random by itself"),
        (OnlyInEvaluation, {}, "not called as in its first pass: inner"),
        (Tokens, {}, "features of the network were not found: it gives a tensor of 3 × 4 × 64"),
        (Residual, {"features": "layer9"}, "no module 'layer9'.*there are first, norm"),
        (Residual, {"features": "blocks.0.1", "mask": ["blocks.1"]}, "mask has 'blocks.1'"),
        (Residual, {"mask": ["block"]}, "mask has 'block'"),
        (Residual, {"mask": "linear"}, "chooses no layer of the network: nothing in it would be random"),
        (Residual, {"mask": lambda name: False}, "chose no layer"),
        (Residual, {"mask": "some"}, "mask='some' is not known"),
        (Residual, {"mask": []}, "is not known"),
        (Residual, {"keep": 0.0}, "keep must lie"),
        (Residual, {"mean": (0.5,)}, "both have a number a channel"),
        (Residual, {"statistics": -1}, "they are counts"),
        (nn.Flatten, {}, "no parameters"),
        (lambda: nn.BatchNorm2d(3), {}, "no convolution and no linear layer"),
        (lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Conv2d(2, 2, 3)), {}, "cannot take images of 3 × 8 × 8: "),
        (lambda: 3, {}, "gave int, not an nn.Module"),
        (lambda: features(Residual()).network, {}, "masks of a wrapping already"),
        (lambda: torch.jit.freeze(torch.jit.script(nn.Conv2d(3, 2, 1).eval())), {}, "scripted or compiled"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_what_would_be_random_only_in_name_is_refused(network, options, message):
    with pytest.raises(CalgpError, match=message):
        features(network, **options)


@pytest.mark.parametrize(
    ("network", "options", "sites"),
    [
        (FunctionalLinear, {"mask": "convolutions"}, ["two"]),
        (Attention, {"mask": "convolutions"}, ["two"]),
        (EncoderLayer, {"mask": ["two"]}, ["two"]),
        (FunctionalConvolution, {"mask": ["two"]}, ["two"]),
        (SequenceFirst, {"mask": lambda name: name == "two"}, ["two"]),
        (Scaled, {}, ["two"]),
        (RandomModule, {}, ["two"]),
        (FunctionalDropout, {}, ["two"]),
    ],
)
def test_what_should_not_be_masked_may_be_anything(network, options, sites):
    wrapped = features(network, **options)
    assert list(wrapped.sites) == sites
    one, other = (wrapped.train()(wrapped.stem(images()), noise(1)) for _ in range(2))
    assert one.equal(other)  # what is random by itself is quiet
    one.sum().backward()
    assert all(p.grad is not None for p in wrapped.parameters())  # what is not masked is learned


def test_layers_of_an_encoder_that_torch_would_fuse_fire():
    wrapped = features(EncoderLayer, mask=["encoder.linear1", "encoder.linear2"]).eval()
    with torch.no_grad():
        c = wrapped(wrapped.stem(images()), noise())
    assert not c[:5].equal(c[5:])


def test_a_layer_that_is_called_for_some_images_only_is_found_when_it_happens():
    class Depends(Net):
        def between(self, h):
            return h if h.abs().sum() > 1e9 else self.two(h)

    wrapped = features(Depends).eval()
    assert wrapped.sites == {"two": 2}
    wrapped(wrapped.stem(images()), noise())
    with pytest.raises(CalgpError, match="not called as in its first pass: two"):
        wrapped(wrapped.stem(1e10 * images()), noise())


def test_a_pass_that_is_computed_again_without_its_masks_is_refused():
    class Checkpointed(Net):
        def between(self, h):
            return checkpoint(self.two, h, use_reentrant=False)

    wrapped = features(Checkpointed)
    with pytest.raises(CalgpError, match="outside of a pass"):
        wrapped(wrapped.stem(images()), noise(1)).sum().backward()
    with pytest.raises(CalgpError, match="outside of a pass"):
        wrapped.network(images())


def test_names_are_given_once_and_an_unknown_network_is_asked_for():
    networks = [Residual(), Residual()]
    one, other, same = (wrap(each).network for each in (*networks, networks[0]))
    assert (one, other, same) == ("residual", "residual-2", "residual")
    spec = wrap(networks[0], name="mine")
    assert spec == wrap(networks[1], name="mine")
    NETWORKS.clear()
    with pytest.raises(CalgpError, match=r"calgp.wrap\(network, name='mine'\)"):
        spec.build(TASK, HALF)
    with pytest.raises(CalgpError, match="wrap takes a module"):
        wrap(3)
    with pytest.raises(CalgpError, match="wrap takes a module"):
        wrap(Residual.__mro__[-1]())


def test_the_trial_leaves_no_trace_in_statistics_modes_or_generators():
    network = Residual().eval()
    before, state = torch.get_rng_state(), copy.deepcopy(network.state_dict())
    wrapped = features(network)
    assert before.equal(torch.get_rng_state())
    kept = wrapped.network.state_dict()
    assert all(value.equal(kept[key]) for key, value in state.items() if not key.startswith("classifier"))
    assert wrapped.training and wrapped.network.norm.training
