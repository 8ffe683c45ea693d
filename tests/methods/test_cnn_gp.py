import dataclasses
import math

import numpy as np
import pytest
import torch
from jaxtyping import config

import reference
from calgp.data import load
from calgp.errors import CalgpError
from calgp.gp import Bound, Masking, Noise, predict
from calgp.methods import METHODS, CnnGp
from calgp.nets import BACKBONES, LeNet, ResNet, Task
from calgp.training.loop import order

SMALL = LeNet(channels=(3, 2), hidden=(16,))
DEEP = ResNet(n=1, widths=(3, 4, 5), pad_to=8)
TASK, TINY = Task(1, 28, 28, 5), Task(3, 8, 8, 4)


def build(method, backbone=SMALL, task=TASK, seed=0):
    return method.build(task, backbone, generator=torch.Generator().manual_seed(seed))


def images(n=4, task=TASK, seed=0):
    return torch.randn(n, task.channels, task.height, task.width, generator=torch.Generator().manual_seed(seed))


def test_functions_are_the_process_at_the_features():
    model, x = build(CnnGp(keep=1.0, keep_filters=1.0, frequencies="sorf")).double(), images().double()
    c = model.features(model.features.stem(x))
    torch.testing.assert_close(model(x).mean, model.gp(c).unsqueeze(0))
    (layer,) = model.gp.layers
    expected = layer.phi(c).detach().numpy() @ layer.weights.weight.detach().numpy()
    np.testing.assert_allclose(model(x).mean[0].detach(), expected, rtol=1e-10)


def test_sites_of_the_papers_rf_and_sorf():
    features = ["features.convolutions.1.mask"]
    rf = ["gp.layers.0.frequencies.mask", "gp.layers.0.weights.mask"]
    assert list(build(CnnGp(frequencies="variational")).sites()) == features + rf
    assert list(build(CnnGp(frequencies="sorf")).sites()) == features + rf[1:]


def test_samples_of_a_model_are_what_each_would_be_alone():
    model = build(CnnGp(depth=2, width=3), DEEP, TINY).double().eval()
    model.sites()
    x = images(3, TINY).double()
    together = model(x, Noise(0, torch.arange(4), torch.arange(3))).mean
    assert together.shape == (4, 3, 4)
    for s in range(4):
        alone = model(x[[2]], Noise(0, torch.tensor([s]), torch.tensor([2]))).mean
        torch.testing.assert_close(together[s, 2], alone[0, 0], rtol=1e-10, atol=1e-10)


def test_keeps_of_weights_filters_and_frequencies_are_separate():
    model = build(CnnGp(keep=0.3, keep_filters=0.8, keep_omega=0.9, granularity="shared", inverted=True))
    found = {name: mask.masking for name, mask in model.sites().items()}
    assert found == {
        "features.convolutions.1.mask": Masking(0.8, "shared", True),
        "gp.layers.0.frequencies.mask": Masking(0.9, "shared", True),
        "gp.layers.0.weights.mask": Masking(0.3, "shared", True),
    }


def test_every_parameter_is_counted_once_in_the_kl():
    """∂KL/∂M by the kind of parameter: M (no mask, biases), π_ψ M, π_w M, π_Ω M; batch norm and θ not at all."""
    method = CnnGp(depth=2, width=3, keep=0.3, keep_filters=0.8, keep_omega=0.9, lengthscale=2.0)
    model = build(method, DEEP, TINY).double()
    model.kl().backward()
    counted = set()
    for name, parameter in model.named_parameters():
        if "norm" in name or "log_" in name:
            assert parameter.grad is None
            continue
        factor = (
            1.0 if name == "features.first.weight" else
            0.8 if name.startswith("features") else
            0.9 if "frequencies" in name else
            0.3
        )  # fmt: skip
        torch.testing.assert_close(parameter.grad, factor * parameter.detach(), rtol=1e-12, atol=1e-12)
        counted.add(factor)
    assert len(counted) == 4


@pytest.mark.parametrize("ard", [False, True])
def test_kl_of_a_small_model_by_enumerating_all_masks(ard):
    """Differences of E_q[−log p(Ψ, ε, W)] between models are differences of `kl`."""
    found = []
    for seed in range(2):
        method = CnnGp(keep=0.3, keep_filters=0.8, keep_omega=0.6, n_rf=3, ard=ard, lengthscale=1.0 + seed)
        model = build(method, ResNet(n=1, widths=(2, 2, 3), pad_to=4), Task(1, 4, 4, 2), seed).double()
        values = {name: p.detach().numpy() for name, p in model.named_parameters()}
        cost = reference.minus_log_normal(values["features.first.weight"], 1.0)
        for name, value in values.items():
            if "convolution" in name:
                cost += reference.expected_minus_log_prior(value.swapaxes(0, 1), 0.8)
        cost += reference.expected_minus_log_prior(values["gp.layers.0.frequencies.epsilon"], 0.6)
        cost += reference.expected_minus_log_prior(values["gp.layers.0.weights.weight"], 0.3)
        found.append(model.kl().item() - cost)
    assert found[0] == pytest.approx(found[1], abs=1e-5)


def test_frequencies_are_as_many_as_inputs_unless_given():
    d = build(CnnGp()).features.out_features
    deep = build(CnnGp(depth=3, width=7, ratio=2)).gp.layers
    assert [(layer.in_features, layer.out_features, layer.n_rf) for layer in deep] == [
        (d, 7, 2 * d),
        (7 + d, 7, 2 * (7 + d)),
        (7 + d, 5, 2 * (7 + d)),
    ]
    assert build(CnnGp(n_rf=11)).gp.layers[0].n_rf == 11
    assert build(CnnGp(depth=2), DEEP, TINY).gp.layers[0].out_features == 5  # hidden width d by default


def test_lengthscale_is_the_root_of_d_and_one_in_the_papers_presets():
    d = build(CnnGp()).features.out_features
    assert build(CnnGp()).gp.layers[0].kernel.lengthscale.item() == pytest.approx(math.sqrt(d))
    for name in ("cnn-gp-rf-paper", "cnn-gp-sorf-paper"):
        assert build(METHODS[name]).gp.layers[0].kernel.lengthscale.item() == 1


@pytest.mark.parametrize(
    ("options", "learned"),
    [
        ({}, set()),
        ({"learn_theta": True}, {"log_sigma"}),
        ({"learn_theta": True, "ard": True}, {"log_lengthscale"}),
        ({"learn_theta": True, "kernel": "rbf"}, {"log_sigma", "log_lengthscale"}),
        ({"learn_theta": True, "kernel": "rbf", "per_output": True}, {"log_sigma", "log_lengthscale"}),
    ],
)
def test_theta_is_learned_only_on_request_and_then_gets_gradients(options, learned):
    model = build(CnnGp(frequencies="sorf", **options))
    model(images()).mean.square().sum().backward()
    kernel = model.gp.layers[0].kernel
    assert {name for name, p in kernel.named_parameters() if p.grad is not None and p.grad.any()} == learned
    outputs = 5 if options.get("per_output") else None
    assert kernel.log_sigma.shape == ((5, 1) if outputs else (1,))


def test_published_sizes():
    """CNN+GP on LeNet: 4096 features and as many frequencies; SORF keeps three signs for each, RF a whole matrix."""
    task = Task(1, 28, 28, 10)
    sorf = build(CnnGp(frequencies="sorf"), BACKBONES["lenet"], task).gp.layers[0]
    assert sorf.frequencies.signs.shape == (3, 1, 4096)
    assert sorf.weights.weight.shape == (4096, 10)
    rf = build(CnnGp(frequencies="variational"), BACKBONES["lenet"], task).gp.layers[0]
    assert rf.frequencies.epsilon.shape == (4096, 4096)


@pytest.mark.parametrize("granularity", ["element", "channel", "shared"])
def test_prediction_keeps_batch_norm_and_does_not_depend_on_the_batch(granularity):
    model, x = build(CnnGp(granularity=granularity), DEEP, TINY).train(), images(6, TINY)
    model(x)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    whole, part = predict(model, x, passes=4), predict(model, [(x[3:], torch.arange(3, 6))], passes=4)
    torch.testing.assert_close(whole.log_probs[3:], part.log_probs, rtol=0, atol=1e-5)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert model.training


# --- the last layer integrated


def test_a_deep_process_has_hidden_layers_at_their_mean_or_drawn_and_the_last_integrated():
    """By hand from the features: hidden functions at π Φ M, Φ of the last layer, and its moments."""
    method = CnnGp(frequencies="sorf", depth=3, width=4, keep=0.3, keep_filters=1.0, lengthscale=1.0)
    model, x = build(method).double(), images().double()
    model.sites()
    with torch.no_grad():
        c = fed = model.features(model.features.stem(x))
        for layer in model.gp.layers[:-1]:
            fed = torch.cat([0.3 * layer.phi(fed) @ layer.weights.weight, c], -1)
        last = model.gp.layers[-1]
        phi, m = last.phi(fed), last.weights.weight
        one = model(x, Noise(0, torch.arange(1), torch.arange(4), mean=True, integrate=True))
        drawn = model(x, Noise(0, torch.arange(6), torch.arange(4), integrate=True))
        torch.testing.assert_close(one.mean[0], 0.3 * phi @ m)
        torch.testing.assert_close(one.covariance[0], 0.21 * torch.einsum("ni,iq,ir->nqr", phi.square(), m, m))
        # drawn: each sample's hidden functions by their own masks, and the same moments given these
        rows = torch.arange(4)
        for s in range(6):
            noise, fed = Noise(0, torch.tensor([s]), rows), c
            for layer in model.gp.layers[:-1]:
                fed = torch.cat([layer(fed, noise), c], -1)
            phi = last.phi(fed)
            torch.testing.assert_close(drawn.mean[s], 0.3 * phi @ m)
            torch.testing.assert_close(drawn.covariance[s], 0.21 * torch.einsum("ni,iq,ir->nqr", phi.square(), m, m))
    assert (drawn.mean.std(0) > 0.01 * one.mean[0].abs().mean()).all()


def test_what_is_random_only_in_the_last_layer_has_one_component():
    model, x = build(CnnGp(frequencies="sorf", keep_filters=1.0)), images()
    model.sites()
    noise = Noise(0, torch.arange(5), torch.arange(4))
    assert model(x, noise).mean.shape == (1, 4, 5)
    assert model(x, noise._replace(integrate=False)).mean.shape == (5, 4, 5)
    one, several = (predict(model, x, passes=passes, engine="moments") for passes in (1, 16))
    assert one.samples == several.samples == 256
    torch.testing.assert_close(several.probs, one.probs, rtol=0, atol=1e-6)  # the same points in 16 parts


@pytest.fixture(scope="module")
def trained():
    """400 steps on the embedded digits; 1,024 features of the process."""
    train, method = load("digits", "train"), CnnGp(frequencies="sorf", lengthscale=1.0, keep_filters=0.8)
    model = method.build(Task(1, 28, 28, 10), LeNet(channels=(8, 16)), generator=torch.Generator().manual_seed(0))
    bound, optimiser = Bound(model, len(train)), torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(400):
        optimiser.param_groups[0]["lr"] = 1e-2 * (1 + math.cos(math.pi * step / 400)) / 2
        index = order(len(train), 50, step, 0)
        loss = sum(bound(train.pixels(index), train.y[index], Noise(-1, torch.tensor([step]), train.rows[index])))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert model.gp.layers[0].n_rf == 1024
    return model.eval()


def by_masks(model, x, samples):
    """The average over samples of the masks of W, filters at their mean, and its standard error.

    Masks come in pairs z, 1 − z, each of them fair. All images have the same ones: of each they are independent.
    """
    (layer,) = model.gp.layers
    noise = Noise(0, torch.arange(1), torch.arange(len(x)), mean=True)
    z = (torch.rand(samples // 2, layer.n_rf, generator=torch.Generator().manual_seed(1)) < 0.5).float()
    means, errors = [], []
    with torch.no_grad():
        for phi in layer.phi(model.features(model.stem(x), noise)):
            terms = phi[:, None] * layer.weights.weight  # [m, Q]
            f = z @ terms
            pairs = (f.softmax(-1) + (terms.sum(0) - f).softmax(-1)) / 2
            means.append(pairs.mean(0))
            errors.append(pairs.std(0) / math.sqrt(len(pairs)))
    return torch.stack(means), torch.stack(errors)


@pytest.mark.slow
def test_one_pass_gives_the_probabilities_of_10000_samples_of_the_masks_of_w(trained):
    """To 1e-3 for 95 % of the images, beyond what the 10,000 samples are themselves uncertain of."""
    test = load("digits", "test").balanced(400, 0)
    x = test.pixels()
    one = predict(trained, x)
    assert (one.labels == test.y).float().mean() > 0.95
    exact, error = by_masks(trained, x, 10_000)
    difference = (one.probs - exact).abs()
    assert (difference - 2 * error).amax(-1).quantile(0.95) < 1e-3
    assert difference.amax(-1).quantile(0.9) < 1.3e-3 and difference.max() < 5e-3
    # not because nothing was there to integrate: masks of W at their mean are further off
    noise = Noise(0, torch.arange(1), torch.arange(len(x)), mean=True, integrate=True)
    with torch.no_grad():
        point = trained(x, noise).mean[0].softmax(-1)
    assert (point - exact).abs().amax(-1).quantile(0.95) > 0.02


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": 0}, "depth=0"),
        ({"n_rf": 0}, "n_rf=0"),
        ({"ratio": -1}, "ratio=-1"),
        ({"width": 0}, "width=0"),
        ({"keep": 0.0}, "keep=0.0"),
        ({"keep_filters": 1.5}, "keep_filters=1.5"),
        ({"keep_omega": -0.5}, "keep_omega=-0.5"),
        ({"lengthscale": 0.0}, "lengthscale=0.0: must be none or a number above 0"),
        ({"sigma": -1.0}, "sigma=-1.0: must be a number above 0"),
        ({"granularity": "pixel"}, "granularity"),
        ({"frequencies": "fourier"}, "frequencies='fourier'"),
        ({"kernel": "matern"}, "kernel='matern'"),
        ({"kernel": "arc-cosine-0"}, "no gradient"),
        ({"per_output": True}, "per_output"),
    ],
)
def test_wrong_options_raise_an_error_that_names_them(options, message, monkeypatch):
    monkeypatch.setattr(config, "jaxtyping_disable", True)  # as users run it, without run-time checks of types
    with pytest.raises(CalgpError, match=message):
        CnnGp(**options)
    with pytest.raises(CalgpError, match=message):
        dataclasses.replace(CnnGp(), **options)
