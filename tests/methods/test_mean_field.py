import dataclasses

import numpy as np
import pytest
import torch
from jaxtyping import config
from torch.distributions import Normal, kl_divergence

import reference
from calgp.errors import CalgpError
from calgp.gp import Noise, predict
from calgp.methods import MeanFieldGp
from calgp.nets import LeNet, ResNet, Task

SMALL = LeNet(channels=(3, 2), hidden=(16,))
DEEP = ResNet(n=1, widths=(3, 4, 5), pad_to=8)
TASK, TINY = Task(1, 28, 28, 5), Task(3, 8, 8, 4)


def build(method, backbone=SMALL, task=TASK, seed=0):
    return method.build(task, backbone, generator=torch.Generator().manual_seed(seed))


def images(n=4, task=TASK, seed=0):
    return torch.rand(n, task.channels, task.height, task.width, generator=torch.Generator().manual_seed(seed))


def test_sites_are_the_weights_and_on_request_filters_and_frequencies():
    assert list(build(MeanFieldGp()).sites()) == ["gp.layers.0.weights.draw"]
    everything = MeanFieldGp(filters=True, frequencies="variational", depth=2, width=3)
    assert list(build(everything).sites()) == [
        "features.convolutions.1.draw",
        "gp.layers.0.frequencies.draw",
        "gp.layers.0.weights.draw",
        "gp.layers.1.frequencies.draw",
        "gp.layers.1.weights.draw",
    ]
    first = list(build(everything, dataclasses.replace(DEEP, mask_first=True), TINY).sites())
    assert first[0] == "features.first.draw" and len(first) == 1 + 6 + 4


@pytest.mark.parametrize("backbone", [SMALL, DEEP], ids=["lenet", "resnet"])
def test_kl_counts_every_parameter_once(backbone):
    """Gaussian weights by torch's own KL; points by ½‖·‖²; batch norm and θ not at all."""
    task = TASK if backbone is SMALL else TINY
    method = MeanFieldGp(filters=True, frequencies="variational", depth=2, width=3, n_rf=8, lengthscale=2.0)
    model = build(method, backbone, task).double()
    parameters, expected = dict(model.named_parameters()), 0.0
    for name, mean in parameters.items():
        if "norm" in name or "log_" in name:
            continue
        deviation = parameters.get(name.rpartition(".")[0] + ".log_deviation") if "bias" not in name else None
        if deviation is None:
            expected += 0.5 * mean.square().sum().item()
        else:
            prior = Normal(torch.zeros_like(mean), 1.0)  # of Ω it is ε that has it, whatever ℓ
            expected += kl_divergence(Normal(mean, deviation.exp()), prior).sum().item()
    assert model.kl().item() == pytest.approx(expected, rel=1e-10)


def test_functions_are_gaussian_with_the_moments_of_the_bayesian_linear_model():
    """With points for all but W: E f = ΦM, Var f = Φ² σ², from the features of one pass."""
    model, x = build(MeanFieldGp(deviation=0.7)).double(), images().double()
    model.sites()
    layer = model.gp.layers[0]
    phi = layer.phi(model.features(model.features.stem(x))).detach().numpy()
    noise = Noise(0, torch.arange(5000), torch.arange(4))
    draws = model(x, noise._replace(integrate=False)).mean.detach().numpy()
    mean = phi @ layer.weights.weight.detach().numpy()
    variance = np.repeat(0.7**2 * (phi**2).sum(-1, keepdims=True), 5, 1)
    assert (abs(draws.mean(0) - mean) < 5 * np.sqrt(variance / 5000)).all()
    assert (abs(draws.var(0) / variance - 1) < 5 * np.sqrt(2 / 5000)).all()
    latent = model(x, noise)  # integrated, these moments are all that is known: one component, nothing drawn
    np.testing.assert_allclose(latent.mean[0].detach(), mean, rtol=1e-10)
    np.testing.assert_allclose(latent.variance[0].detach(), variance, rtol=1e-6)  # log σ was stored in float32
    assert len(latent.mean) == 1


def test_only_the_weights_are_drawn_after_one_pass_of_the_network():
    model, x = build(MeanFieldGp()), images(3)
    rows = []
    model.gp.layers[0].frequencies.register_forward_hook(lambda module, inputs, output: rows.append(len(output)))
    predict(model, x, passes=20)
    assert max(rows) == 3  # N, not S · N


def test_predictions_are_the_average_of_softmaxes_of_samples():
    model, x = build(MeanFieldGp(filters=True)), images(3)
    result = predict(model, x, passes=7, engine="samples", seed=3)
    with torch.no_grad():
        f = model.eval()(x, Noise(3, torch.arange(7), torch.arange(3), integrate=False)).mean.numpy()
    np.testing.assert_allclose(result.probs, reference.softmax(f).mean(0), atol=1e-6)


def test_one_pass_is_the_average_over_all_weights_where_only_they_are_random():
    """f is exactly Gaussian here: 256 quasi-random points against 20,000 samples."""
    model, x = build(MeanFieldGp(deviation=3.0, lengthscale=1.0)), images(3)
    exact, one, several = (
        predict(model, x, passes=passes, engine=engine)
        for passes, engine in ((20_000, "samples"), (1, "moments"), (16, "moments"))
    )
    assert exact.spread.max() > 0.05 and one.samples == several.samples == 256
    error = 5 * exact.monte_carlo_error + 2e-3
    assert ((one.probs - exact.probs).abs() < error).all()
    torch.testing.assert_close(several.probs, one.probs, rtol=0, atol=1e-6)  # the same points in 16 parts


def test_in_100_classes_of_colour_images_and_in_float64():
    model = build(MeanFieldGp(filters=True), DEEP, Task(3, 8, 8, 100)).double()
    result = predict(model, images(3, Task(3, 8, 8, 100)).double(), passes=3)
    assert result.log_probs.dtype == torch.float64 and result.log_probs.shape == (3, 100)
    assert result.log_probs.isfinite().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"deviation": 0.0}, "deviation=0.0"),
        ({"deviation_filters": -1.0}, "deviation_filters=-1.0"),
        ({"depth": 0}, "depth=0"),
        ({"n_rf": 0}, "n_rf=0"),
        ({"lengthscale": 0.0}, "lengthscale=0.0: must be none or a number above 0"),
        ({"frequencies": "fourier"}, "frequencies='fourier'"),
        ({"kernel": "arc-cosine-0"}, "kernel='arc-cosine-0'"),
    ],
)
def test_wrong_options_raise_an_error_that_names_them(options, message, monkeypatch):
    monkeypatch.setattr(config, "jaxtyping_disable", True)  # as users run it, without run-time checks of types
    with pytest.raises(CalgpError, match=message):
        MeanFieldGp(**options)
