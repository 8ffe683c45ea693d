import copy
import pickle

import pytest
import torch
from small_networks import HALF, TASK, Residual, entering, features, images, noise
from torch import nn
from torch.nn import functional as F

from calgp.errors import CalgpError
from calgp.gp import (
    UNMASKED,
    Bound,
    InducingPoints,
    LaplaceGP,
    MaskedConv2d,
    Masking,
    Noise,
    RandomFeatureGP,
    SparseGP,
    Theta,
    make_kernel,
    name_sites,
    predict,
)
from calgp.methods import METHODS
from calgp.nets import FeaturesWithHead
from calgp.nets.wrap import wrap
from calgp.nets.wrap.features import MOST_STEMS

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
    one, other = (
        mask.draw(torch.ones(5, 4, 8, 8), noise()) for mask in name_sites(features(network, features="")).values()
    )
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


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 4, 1), nn.Conv1d(4, 4, 1)

    def forward(self, x):
        return self.two(self.one(x).flatten(2))


class Pooled(nn.Module):
    """A convolution gives the logits of each pixel, or, `first`, of their average."""

    num_classes = 5

    def __init__(self, first):
        super().__init__()
        self.body, self.drop, self.classifier = nn.Conv2d(3, 6, 3), nn.Dropout(0.5), nn.Conv2d(6, 5, 1)
        self.first = first

    def forward(self, x):
        h = self.drop(self.body(x))
        h = self.classifier(h.mean((2, 3), keepdim=True)) if self.first else self.classifier(h)
        return h.mean((2, 3))


class NotCalled(Residual):
    def __init__(self):
        super().__init__()
        self.other = nn.Linear(6, 5)


class TwoClassifiers(Residual):
    def __init__(self):
        super().__init__()
        self.other = nn.Linear(6, 5)

    def forward(self, x):
        h = self.norm(self.first(x)).mean((2, 3))
        return self.classifier(h) + self.other(h)


@pytest.mark.parametrize(
    ("network", "options", "message"),
    [
        (Pooled(False), {}, r"not found: the network gives \(2, 5\), .* body and classifier, .*features='drop'"),
        (TwoClassifiers, {}, "first and other|classifier and other"),
        (lambda: nn.Sequential(*Residual().blocks[0][:1], nn.ReLU()), {}, "cannot take images of 3 × 8 × 8: "),
        (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), {}, "not found: .* features='…'"),
        (Tokens, {}, r"Invalid features, \(2, 4, 64\): must be vectors .* or images"),
        (Tokens, {"features": "two"}, r"Invalid features, \(2, 4, 64\)"),
        (Residual, {"features": "layer9"}, "Invalid features='layer9': must name a module called, such as first, norm"),
        (NotCalled, {"features": "other"}, "Invalid features='other': must name a module called, such as first"),
        (nn.Flatten, {}, "calls no convolution and no linear layer"),
        (lambda: nn.BatchNorm2d(3), {}, "calls no convolution and no linear layer"),
    ],
)
def test_features_that_are_not_found_are_asked_for(network, options, message):
    with pytest.raises(CalgpError, match=message):
        features(network, **options)


def test_a_convolution_of_each_pixel_is_no_classifier_and_one_of_their_average_is():
    network = Pooled(False)
    wrapped = features(network, features="drop", mask="none").eval()
    torch.testing.assert_close(wrapped.stem(images()), network.body(images()).mean((2, 3)))
    wrapped = features(Pooled(True), mask="none").eval()
    assert wrapped.out_features == 6
    assert isinstance(wrapped.network.classifier, nn.Identity)


def test_a_network_that_says_it_has_no_classifier_gives_features():
    network = Residual()
    network.num_classes, network.classifier = 0, nn.Linear(6, 3)
    assert features(network).out_features == 3
    network.num_classes = 3
    assert features(network).out_features == 6


def test_images_are_normalised_by_channel():
    network = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1))
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.1, 0.3)
    wrapped = features(network, mask="none", features="", mean=mean, std=std)
    x = (images() - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    torch.testing.assert_close(wrapped.stem(images()), network(x).mean((2, 3)))
    assert not [key for key in wrapped.state_dict() if not key.startswith("network.")]


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
        first, again = predict(model, x, passes=3).log_probs, predict(model, x, passes=3, memory=1).log_probs
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


def pickled(model):
    return pickle.loads(pickle.dumps(model))  # noqa: S301 (our own)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_copy_has_its_own_masks(copied):
    model = METHODS["cnn-gp-sorf"].build(TASK, wrap(Residual()))
    other = copied(model)
    expected = predict(model, images(), passes=3).log_probs
    assert predict(other, images(), passes=3).log_probs.equal(expected)
    own = {id(module) for module in model.modules()}
    hooks = [h for m in other.modules() for h in m._forward_pre_hooks.values()]
    assert len(hooks) == 2
    assert not any(id(hook.__self__) in own for hook in hooks)


@pytest.mark.slow
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


@pytest.mark.parametrize("method", [name for name in METHODS if name != "cgp"])
def test_every_method_takes_a_wrapped_network(method):
    model, rows = METHODS[method].build(TASK, wrap(Residual())), torch.arange(8)
    x, y = images(8), torch.arange(8) % 4
    sum(Bound(model, n=8)(x, y, Noise(0, torch.arange(1), rows))).backward()
    assert any(p.grad is not None and p.grad.any() for p in model.features.parameters())
    result = predict(model, x, passes=3)
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
    model = FeaturesWithHead(wrapped, heads(wrapped.out_features)[head])
    sum(Bound(model, n=5)(images(), torch.arange(5) % 4, noise(2))).backward()
    assert model(images(), noise(3)).mean.shape == (3, 5, 4)
    assert model.kl() == wrapped.kl() + model.head.kl()
    whole = predict(model, images(), passes=4)
    part = predict(model, [(images()[2:], torch.arange(2, 5))], passes=4)
    torch.testing.assert_close(part.log_probs, whole.log_probs[2:], rtol=0, atol=1e-5)


class Integrated(nn.Module):
    """A head that says what is known of f with W integrated: a Gaussian with a covariance over classes."""

    def __init__(self, d):
        super().__init__()
        self.process = RandomFeatureGP(d, 4, n_rf=16)

    def forward(self, c, noise=None):
        return self.process.latent(c)

    def kl(self):
        return self.process.kl()


def test_a_head_may_give_a_covariance_over_classes():
    wrapped = features(Residual())
    model = FeaturesWithHead(wrapped, Integrated(wrapped.out_features))
    found = model(images(), noise(3))
    assert found.mean.shape == (3, 5, 4) and found.variance is None and found.covariance.shape == (3, 5, 4, 4)
    c = wrapped(wrapped.stem(images()), noise(3))
    expected = model.head.process.latent(c).covariance[0].unflatten(0, (3, 5))
    torch.testing.assert_close(found.covariance, expected)


class Cached(nn.Module):
    """Keeps in evaluation what it has computed once, as the attention of some networks does."""

    def __init__(self):
        super().__init__()
        self.scale, self.kept = nn.Parameter(torch.ones(6, 1, 1)), None

    def train(self, mode=True):
        self.kept = None
        return super().train(mode)

    def forward(self, h):
        if self.training:
            return h * self.scale.exp()
        self.kept = self.scale.exp() if self.kept is None else self.kept
        return h * self.kept


class Modes(Residual):
    def __init__(self):
        super().__init__()
        self.inner, self.cached, self.drop = nn.Conv2d(6, 6, 1), Cached(), nn.Dropout(0.5)

    def forward(self, x):
        h = self.drop(self.cached(self.norm(self.first(x))))
        return self.classifier((h if self.training else self.inner(h)).mean((2, 3)))


def test_training_concerns_batch_norm_and_modules_with_a_train_of_their_own():
    network = Modes()
    wrapped = features(network)
    training = {name for name, module in wrapped.network.named_modules() if module.training}
    assert training == {"norm", "cached", *(f"blocks.{i}.1" for i in range(2))}
    assert list(wrapped.sites) == ["inner"]
    for _ in range(2):  # a second pass back through what was kept would fail
        wrapped(wrapped.stem(images()), noise(1)).sum().backward()
    assert wrapped.network.cached.scale.grad.any()
    assert not any(module.training for module in wrapped.eval().modules())
    assert not any(module.training for module in features(network, freeze=True).network.modules())


def passes_to_wrap(network, **options):
    passes = []
    network.register_forward_pre_hook(lambda module, args: passes.append(len(args[0])))
    features(network, **options)
    return passes


def test_wrapping_runs_the_network_a_few_times():
    assert passes_to_wrap(Residual(), mask="none") == [2]
    assert passes_to_wrap(Residual()) == [2, 2, 1]  # the trial, the stem, and what follows it

    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(*(nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU()) for _ in range(30)))
            self.classifier = nn.Linear(3, 2)

        def forward(self, x):
            return self.classifier((self.body(x) + x).mean((2, 3)))

    assert len(passes_to_wrap(Around(), mask=["body.29"])) == 1 + 2 * MOST_STEMS


def test_the_trial_leaves_no_trace_in_statistics_modes_or_generators():
    network = Residual().eval()
    before, state = torch.get_rng_state(), copy.deepcopy(network.state_dict())
    wrapped = features(network)
    assert before.equal(torch.get_rng_state())
    kept = wrapped.network.state_dict()
    assert all(value.equal(kept[key]) for key, value in state.items() if not key.startswith("classifier"))
    assert wrapped.training and wrapped.network.norm.training
