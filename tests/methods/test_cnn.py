import numpy as np
import pytest
import torch
from torch.nn import functional as F

import reference
from calgp.errors import CalgpError
from calgp.gp import Bound, Noise, predict
from calgp.methods import Cnn, CnnMcd
from calgp.nets import BACKBONES, LeNet, ResNet, Task

SMALL = LeNet(channels=(4, 4), hidden=(16, 12))
TASK = Task(1, 28, 28, 5)


def build(backbone=SMALL, task=TASK, seed=0):
    return Cnn().build(task, backbone, generator=torch.Generator().manual_seed(seed))


def images(n=4, seed=0):
    return torch.randn(n, 1, 28, 28, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("backbone", "task", "widths"),
    [
        (BACKBONES["lenet"], Task(1, 28, 28, 10), [4096, 1024, 10]),
        (BACKBONES["lenet-cifar"], Task(3, 32, 32, 10), [4096, 384, 192, 10]),
        (ResNet(n=1), Task(3, 32, 32, 100), [64, 100]),
    ],
)
def test_fully_connected_widths(backbone, task, widths):
    layers = build(backbone, task).layers
    assert [layers[0].weight.shape[0]] + [layer.weight.shape[1] for layer in layers] == widths


def test_logits_are_those_of_the_features_through_the_fully_connected_layers():
    """ReLU between the layers, none after the last."""
    model, x = build().double(), images().double()
    h = model.features(model.features.stem(x)).detach().numpy()
    for i, layer in enumerate(model.layers):
        h = (np.maximum(h, 0) if i else h) @ layer.weight.detach().numpy() + layer.bias.detach().numpy()
    np.testing.assert_allclose(model(x).mean.detach()[0], h, rtol=1e-10, atol=1e-12)


def test_it_has_no_masks_and_is_the_same_at_every_call():
    model, x = build(), images()
    assert model.sites() == {}
    assert torch.equal(model(x).mean, model(x).mean)


def test_its_bound_is_the_cross_entropy():
    model, x, y = build(), images(), torch.tensor([0, 4, 2, 2])
    nll, kl = Bound(model, n=7)(x, y)
    assert kl == 0
    torch.testing.assert_close(nll, F.cross_entropy(model(x).mean[0], y))


def test_it_predicts_its_softmax_from_one_sample_without_variance():
    model, x = build(), images()
    result = predict(model, x, passes=50, seed=3)
    assert result.samples == 1
    assert (result.variance == 0).all()
    assert (result.mutual_information < 1e-6).all()  # two ways to one number, in float32
    np.testing.assert_allclose(result.probs, reference.softmax(model(x).mean[0].detach().numpy()), atol=1e-6)


def test_fully_connected_weights_start_at_the_scale_of_their_inputs():
    """Truncated normal of in^-½ (0.88 of it after the cut), so that logits start near unit scale."""
    layer = build(BACKBONES["lenet"], Task(1, 28, 28, 10)).layers[0]
    assert layer.weight.std().item() == pytest.approx(0.88 / 64, rel=0.02)


# --- CNN+MCD -------------------------------------------------------------------------------------------------------

MCD = {"keep": 0.75, "keep_filters": 0.5}


def build_mcd(seed=0, **options):
    return CnnMcd(**(MCD | options)).build(TASK, SMALL, generator=torch.Generator().manual_seed(seed))


def test_every_layer_but_the_first_has_a_mask():
    sites = build_mcd().sites()
    assert list(sites) == ["features.convolutions.1.mask", "layers.0.mask", "layers.1.mask", "layers.2.mask"]
    assert [mask.masking.keep for mask in sites.values()] == [0.5, 0.75, 0.75, 0.75]


@pytest.mark.parametrize("granularity", ["element", "channel", "shared"])
@pytest.mark.parametrize("inverted", [False, True])
def test_prediction_is_the_average_of_hand_written_passes(granularity, inverted):
    """Every sample by a loop in NumPy: masks taken from the model's own sites, multiplied in by hand."""
    model, x, samples = build_mcd(granularity=granularity, inverted=inverted).double(), images().double(), 3
    predicted = predict(model, x, passes=samples, seed=5)
    stem = model.stem(x).detach()
    probs = []
    for sample in range(samples):
        noise = Noise(5, torch.tensor([sample]), torch.arange(len(x)))
        z = {name: mask(torch.ones(shape(name, len(x), model, stem)).double(), noise) for name, mask in sites(model)}
        convolution = model.features.convolutions[1]
        h = F.conv2d(stem * z["features.convolutions.1.mask"], convolution.weight, convolution.bias, padding=2)
        h = F.max_pool2d(h, 2).relu().flatten(1).detach().numpy()
        for i, layer in enumerate(model.layers):
            mask = z[f"layers.{i}.mask"].numpy()
            h = (np.maximum(h, 0) if i else h) * mask @ layer.weight.detach().numpy() + layer.bias.detach().numpy()
        probs.append(reference.softmax(h))
    np.testing.assert_allclose(predicted.probs, np.mean(probs, 0), rtol=1e-9)
    np.testing.assert_allclose(predicted.variance, np.var(probs, 0, ddof=1), rtol=1e-7, atol=1e-12)
    assert predicted.samples == samples
    assert (predicted.variance.sum(-1) > 0).all()


def sites(model):
    return model.sites().items()


def shape(name, n, model, stem):
    return stem.shape if "convolutions" in name else (n, model.layers[int(name.split(".")[1])].weight.shape[0])


@pytest.mark.parametrize("inverted", [False, True])
def test_its_kl_weighs_masked_weights_by_what_their_masks_keep(inverted):
    """π/2 ‖M‖² (inverted 1/(2π) ‖M'‖²) for masked weights, ½ ‖·‖² for the first convolution and all biases."""
    model = build_mcd(inverted=inverted).double()
    filters, linear = (0.5, 0.75) if not inverted else (1 / 0.5, 1 / 0.75)
    expected = 0.0
    for name, parameter in model.named_parameters():
        masked = name.endswith("weight") and not name.startswith("features.convolutions.0")
        factor = (filters if name.startswith("features") else linear) if masked else 1.0
        expected += factor / 2 * (parameter.detach().numpy() ** 2).sum()
    assert model.kl().item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("inverted", [False, True])
def test_activations_keep_their_scale_behind_the_masks(inverted):
    """The mean square of the first hidden layer's inputs and outputs, over many masks; 0.88² is what the cut leaves."""
    method = CnnMcd(keep=0.25, keep_filters=0.25, inverted=inverted)
    layer = method.build(Task(1, 28, 28, 10), BACKBONES["lenet"], generator=torch.Generator().manual_seed(0)).layers[0]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        h = torch.randn(200, 4096)
        f = layer(h) - layer.bias
    assert f.square().mean().item() == pytest.approx(0.88**2, rel=0.03)


@pytest.mark.parametrize("options", [{"keep": 0.0}, {"keep_filters": 1.5}])
def test_masks_that_cannot_be_are_refused(options):
    with pytest.raises(CalgpError, match=r"Invalid keep(_filters)?=(0\.0|1\.5): must be a number from"):
        CnnMcd(**options)


# --- CNN+MCD with the masks of its last layer integrated


def last_inputs(model, x):
    """What the last layer takes with all masks before it at their mean, π: by hand."""
    stem, convolution = model.stem(x), model.features.convolutions[1]
    h = F.max_pool2d(F.conv2d(0.5 * stem, convolution.weight, convolution.bias, padding=2), 2).relu().flatten(1)
    for layer in model.layers[:-1]:
        h = (0.75 * h @ layer.weight + layer.bias).relu()
    return h


def test_one_pass_has_hidden_layers_at_their_mean_and_the_moments_of_all_masks_of_the_last():
    """12 inputs of the last layer: 4,096 masks, each as likely as 0.75^kept 0.25^dropped."""
    model, x = build_mcd().double().eval(), images().double()
    latent = model(x, Noise(0, torch.arange(1), torch.arange(4), mean=True, integrate=True))
    masks, weights = reference.all_masks(12, 0.75)
    last = model.layers[-1]
    with torch.no_grad():
        f = (torch.from_numpy(masks)[:, None] * last_inputs(model, x)) @ last.weight + last.bias
    f = f.numpy()  # [masks, N, Q]
    mean = np.einsum("k,knq->nq", weights, f)
    np.testing.assert_allclose(latent.mean[0].detach(), mean, rtol=1e-10, atol=1e-12)
    covariance = np.einsum("k,knq,knr->nqr", weights, f - mean, f - mean)
    np.testing.assert_allclose(latent.covariance[0].detach(), covariance, rtol=1e-10, atol=1e-12)


def test_one_pass_predicts_by_draws_of_that_gaussian():
    model, x = build_mcd().double().eval(), images().double()
    with torch.no_grad():
        for layer in model.layers:
            layer.weight.mul_(2)  # probabilities that are not all the same
        h, last = last_inputs(model, x), model.layers[-1]
        mean = 0.75 * h @ last.weight + last.bias
        covariance = 3 / 16 * torch.einsum("ni,iq,ir->nqr", h.square(), last.weight, last.weight)
        root = torch.linalg.cholesky(covariance + 1e-12 * torch.eye(5))
    epsilon = torch.randn(100_000, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    f = mean + torch.einsum("nqr,kr->knq", root, epsilon)
    result = predict(model, x, passes=1, engine="moments")
    assert result.samples == 256 and result.variance.max() > 1e-3
    # 256 quasi-random points, 100,000 random ones
    torch.testing.assert_close(result.probs, f.softmax(-1).mean(0), rtol=0, atol=4e-3)


def test_several_passes_draw_all_but_the_last_layer():
    model, x = build_mcd(integrate=True), images()
    model.sites()
    latent = model(x, Noise(0, torch.arange(6), torch.arange(4)))
    assert latent.mean.shape == (6, 4, 5) and latent.covariance.shape == (6, 4, 5, 5)
    assert (latent.mean.std(0) > 1e-4).all()
    exact, integrated = (
        predict(model, x, passes=passes, engine=engine) for passes, engine in ((4000, "samples"), (200, "moments"))
    )
    # 200 passes vary less than 200 samples do; 12 inputs are not quite Gaussian
    error = 5 * (exact.variance / 200).sqrt() + 0.01
    assert ((integrated.probs - exact.probs).abs() < error).all()


def test_it_is_sampled_unless_it_was_trained_with_its_last_layer_integrated():
    x = images()
    sampled, integrated = build_mcd(), build_mcd(integrate=True)
    assert torch.equal(predict(sampled, x).log_probs, predict(sampled, x, passes=50, engine="samples").log_probs)
    assert torch.equal(predict(integrated, x).log_probs, predict(sampled, x, passes=1, engine="moments").log_probs)
    assert sampled(x).is_points and integrated(x).covariance is not None
