import dataclasses

import numpy as np
import pytest
import torch
from jaxtyping import config
from lightning_fabric import Fabric

import reference
from calgp.data import Images, load
from calgp.errors import CalgpError
from calgp.gp import Bound, predict
from calgp.methods import CnnLaplace
from calgp.methods import laplace as laplace_module
from calgp.nets import LeNet, ResNet, Task
from calgp.runs import Run, RunFolder
from calgp.training import train_run

SMALL = LeNet(channels=(3, 2), hidden=(16,))
DEEP = ResNet(n=1, widths=(3, 4, 5), pad_to=8)
TASK, TINY = Task(1, 28, 28, 5), Task(3, 8, 8, 4)
FEW = CnnLaplace(n_rf=16)


def build(method=FEW, backbone=SMALL, task=TASK, seed=0):
    return method.build(task, backbone, generator=torch.Generator().manual_seed(seed))


def random_images(n=20, task=TASK, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 256, (n, task.channels, task.height, task.width), dtype=torch.uint8, generator=generator)
    return Images.of(x, torch.arange(n) % task.classes, tuple(map(str, range(task.classes))))


def finished(method=FEW, backbone=SMALL, task=TASK):
    model = build(method, backbone, task)
    method.finish(model, random_images(task=task))
    return model


@pytest.mark.parametrize("covariance", ["shared", "per-class", "gaussian"])
@pytest.mark.parametrize("backbone", [SMALL, DEEP], ids=["lenet", "resnet"])
def test_finish_sums_over_the_whole_training_set(covariance, backbone, monkeypatch):
    monkeypatch.setattr(laplace_module, "BATCH", 7)  # 20 images in three batches
    task, method = TASK if backbone is SMALL else TINY, dataclasses.replace(FEW, covariance=covariance)
    model, images = build(method, backbone, task).double().train(), random_images(task=task)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    method.finish(model, images)
    assert model.training  # as it was, with batch norm's statistics, which were used
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, state[name])}
    assert changed == {"gp.root", "gp.fitted"}
    model.eval()
    x, new = (random_images(task=task, seed=seed).pixels().double() for seed in (0, 1))
    phi, phi_new = (model.gp.process.phi(model.features(model.stem(v))).detach().numpy() for v in (x, new))
    latent = model(new)
    f = phi @ model.gp.process.weights.weight.detach().numpy()
    p = reference.softmax(f)
    for q in range(task.classes):
        h = {"shared": (p * (1 - p)).max(1), "per-class": p[:, q] * (1 - p[:, q]), "gaussian": np.ones(20)}[covariance]
        expected = reference.laplace_variance(phi, h, phi_new)
        np.testing.assert_allclose(latent.variance[0, :, q].detach(), expected, rtol=1e-8)
    np.testing.assert_allclose(latent.mean[0].detach(), phi_new @ model.gp.process.weights.weight.detach().numpy())


def test_it_is_trained_as_a_point_with_a_prior():
    model, images = build().double(), random_images()
    x, y = images.pixels().double(), images.y
    nll, kl = Bound(model, n=20)(x, y)
    p = reference.softmax(model(x).mean[0].detach().numpy())
    assert nll.item() == pytest.approx(reference.mnll(p, y.numpy()))
    parameters = [p for name, p in model.named_parameters() if "log_" not in name]
    assert kl.item() == pytest.approx(sum(0.5 * p.square().sum().item() for p in parameters) / 20)


def test_a_finished_model_predicts_from_one_pass_whatever_the_batches_and_by_the_seed():
    model, x = finished(), random_images(6).pixels()
    passes = []
    model.features.register_forward_hook(lambda module, inputs, output: passes.append(len(output)))
    whole = predict(model, x, passes=6, seed=1)
    assert passes == [1, 1, 6] and model.sites() == {}  # a row twice, to see what samples change; then all, once
    order = torch.tensor([5, 0, 3, 1, 4, 2])
    parts = predict(model, [(x[rows], rows) for rows in order.split(4)], passes=6, seed=1)
    torch.testing.assert_close(parts.log_probs, whole.log_probs[order], rtol=0, atol=1e-5)
    assert not torch.equal(whole.log_probs, predict(model, x, passes=6, seed=2).log_probs)
    assert (whole.variance > 0).all()


def test_draws_average_the_softmax_of_the_gaussian():
    model, x = finished(), random_images(4).pixels()
    latent = model.eval()(x)
    mean, deviation = latent.mean[0].detach().double().numpy(), latent.variance[0].detach().double().sqrt().numpy()
    f = mean + deviation * np.random.default_rng(0).standard_normal((40_000, 4, 5))
    expected = reference.softmax(f).mean(0)
    # five standard errors of probabilities whose deviation is below 0.3, from 200 · 16 and 40,000 draws
    np.testing.assert_allclose(
        predict(model, x, passes=200).probs, expected, atol=5 * 0.3 * (1 / 3200 + 1 / 4e4) ** 0.5
    )


def test_mean_field_is_one_point_that_no_seed_changes():
    draws, points = finished(), finished(dataclasses.replace(FEW, predictive="mean-field"))
    x = random_images(4).pixels()
    latent = draws.eval()(x)
    f = latent.mean[0].detach().numpy() / np.sqrt(1 + np.pi / 8 * latent.variance[0].detach().numpy())
    one, other = (predict(points, x, passes=5, seed=seed) for seed in (0, 1))
    np.testing.assert_allclose(one.probs, reference.softmax(f), atol=1e-6)
    assert torch.equal(one.log_probs, other.log_probs)


def test_a_trained_run_is_finished_stored_and_loaded(tmp_path):
    run = Run(FEW, LeNet(channels=(4, 8), hidden=(16,), spectral=0.9), train_size=100, batch_size=20, steps=8)
    folder = RunFolder(tmp_path / "run")
    model = train_run(run, folder, Fabric(accelerator="cpu", devices=1)).model
    loaded = folder.model()
    assert loaded.gp.fitted and loaded.gp.root.any()
    x = load("digits", "test").pixels(slice(5))
    assert torch.equal(predict(model, x, passes=3).log_probs, predict(loaded, x, passes=3).log_probs)


@pytest.mark.parametrize("classes", [2, 100])
def test_two_and_a_hundred_classes_of_colour_images_in_float64(classes):
    task = Task(3, 8, 8, classes)
    for covariance in ("shared", "per-class"):
        method = CnnLaplace(n_rf=12, covariance=covariance)
        model = build(method, DEEP, task).double()
        method.finish(model, random_images(2 * classes, task))
        result = predict(model, random_images(3, task, seed=1).pixels().double(), passes=2)
        assert result.log_probs.shape == (3, classes) and result.log_probs.dtype == torch.float64
        assert result.log_probs.isfinite().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_rf": 0}, "n_rf=0"),
        ({"frequencies": "variational"}, "frequencies='variational'"),
        ({"kernel": "arc-cosine-0"}, "kernel='arc-cosine-0'"),
        ({"covariance": "diagonal"}, "covariance='diagonal'"),
        ({"predictive": "probit"}, "predictive='probit'"),
        ({"sigma": 0.0}, "sigma=0.0: must be a number above 0"),
    ],
)
def test_wrong_options_raise_an_error_that_names_them(options, message, monkeypatch):
    monkeypatch.setattr(config, "jaxtyping_disable", True)  # as users run it, without run-time checks of types
    with pytest.raises(CalgpError, match=message):
        CnnLaplace(**options)


def test_covariances_that_would_not_fit_are_refused_before_they_are_made():
    with pytest.raises(CalgpError, match="needs 12 GB; use covariance='shared'"):
        build(CnnLaplace(n_rf=4096, covariance="per-class"), task=Task(3, 32, 32, 100))
