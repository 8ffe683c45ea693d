import copy
import functools
from collections import Counter
from fnmatch import fnmatchcase

import pytest
import torch
from small_networks import DIGITS, HALF, entering, features, images, noise
from torch import nn

from architectures import ARCHITECTURES, ZOO, follow_remedies, library
from calgp.data import load
from calgp.gp import UNMASKED, Bound, Noise, RandomFeatureGP, predict
from calgp.methods import METHODS
from calgp.nets import FeaturesWithHead, Task
from calgp.nets.wrap import wrap

every_architecture = pytest.mark.parametrize("name", ARCHITECTURES)


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


@pytest.mark.slow
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


@pytest.mark.slow
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
    one, other = (predict(m, x[:4], passes=3, seed=2) for m in (model, fresh))
    assert torch.equal(one.log_probs, other.log_probs)


@pytest.mark.slow
@every_architecture
def test_predictions_depend_on_the_seed_and_not_on_batches_memory_or_the_stem(name, built):
    model, x = built(name), images(4, DIGITS)
    whole = predict(model, x, passes=4, seed=1).log_probs
    order = torch.tensor([3, 0, 2, 1])
    parts = predict(model, [(x[rows], rows) for rows in order.split(3)], passes=4, seed=1, memory=1).log_probs
    torch.testing.assert_close(parts, whole[order], rtol=0, atol=1e-5)
    assert (whole - predict(model, x, passes=4, seed=2).log_probs).abs().max() > 1e-3
    assert model.features.stem_module is not None
    model.features.stem_module = None  # all of the network for every sample
    torch.testing.assert_close(predict(model, x, passes=4, seed=1).log_probs, whole, rtol=0, atol=1e-5)


def called_layers(network, x):
    """The layers that a network calls, in order."""
    called = {}
    hooks = [
        module.register_forward_pre_hook(lambda module, args, name=name: called.setdefault(name))
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d | nn.Conv1d)
    ]
    with torch.no_grad():
        network(x)
    for hook in hooks:
        hook.remove()
    return list(called)


def expected_sites(followed, x):
    """All layers that are called but the first, the classifier, and what is left unmasked."""
    layers = called_layers(followed.network, x)
    classifier = [] if "num_classes=0" in followed.remedies else layers[-1:]
    patterns = [pattern for name in followed.options.get("unmasked", []) for pattern in (name, f"{name}.*")]
    left_out = {name for name in layers if any(fnmatchcase(name, pattern) for pattern in patterns)}
    return [name for name in layers[1:] if name not in {*classifier, *left_out}]


@pytest.mark.slow
@pytest.mark.parametrize("entry", ZOO, ids=lambda entry: f"{entry.library}-{entry.name}")
def test_networks_of_timm_and_torchvision_are_wrapped_or_refused_with_a_remedy(entry):
    try:
        library(entry.library)
    except ImportError as error:
        pytest.skip(f"{entry.library} is not installed: {error}")
    task = Task(3, entry.size, entry.size, 4)
    followed, x = follow_remedies(entry, task), images(2, task)
    wrapped, expected = followed.features, expected_sites(followed, x)
    assert followed.remedies == entry.remedies
    assert wrapped.out_features == entry.width
    assert list(wrapped.sites) == expected
    torch.manual_seed(0)
    # a head without masks: what is random is the network
    model = FeaturesWithHead(wrapped, RandomFeatureGP(entry.width, 4, n_rf=32, masking=UNMASKED))
    y = rows = torch.arange(2)

    fired, masks = Counter(), model.sites()
    hooks = [mask.register_forward_hook(lambda module, *_: fired.update([id(module)])) for mask in masks.values()]
    sum(Bound(model, n=2)(x, y, Noise(0, torch.arange(1), rows))).backward()
    for hook in hooks:
        hook.remove()
    assert fired == {id(mask): 1 for mask in masks.values()}
    assert len(masks) == sum(wrapped.sites.values()) >= len(expected)
    masked = [wrapped.network.get_submodule(name).weight for name in expected]
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in masked)

    whole = predict(model, x, passes=2, seed=1).log_probs
    order = torch.tensor([1, 0])
    parts = predict(model, [(x[part], part) for part in order.split(1)], passes=2, seed=1, memory=1).log_probs
    torch.testing.assert_close(parts, whole[order], rtol=0, atol=1e-4)  # float32, other sums
    assert not predict(model, x, passes=2, seed=2).log_probs.equal(whole)

    fresh = wrap(followed.network, **followed.options).build(task, HALF)
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.zero_()
    fresh.load_state_dict(wrapped.state_dict())
    again = predict(FeaturesWithHead(fresh, model.head), x, passes=2, seed=1).log_probs
    assert again.equal(whole)
