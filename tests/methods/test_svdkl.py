import copy
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from lightning_fabric import Fabric

import reference
from calgp.data import Images, load
from calgp.errors import CalgpError
from calgp.gp import Bound, Noise, predict
from calgp.methods import Svdkl
from calgp.methods.svdkl import GridProcesses, Squash
from calgp.nets import LeNet, ResNet, Task
from calgp.runs import Interrupted, Run, RunFolder
from calgp.training import train_run

SMALL = LeNet(channels=(3, 2), hidden=(16,))
DEEP = ResNet(n=1, widths=(3, 4, 5), pad_to=8)
TASK, TINY = Task(1, 28, 28, 5), Task(3, 8, 8, 4)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def build(method=Svdkl(reduced=6, grid=12), backbone=SMALL, task=TASK, seed=0):
    return method.build(task, backbone, generator=seeded(seed))


def random_images(n=20, task=TASK, seed=0):
    shape = (n, task.channels, task.height, task.width)
    x = torch.randint(0, 256, shape, dtype=torch.uint8, generator=seeded(seed))
    return Images.of(x, torch.arange(n) % task.classes, tuple(map(str, range(task.classes))))


def processes(width=4, grid=12, seed=0):
    """With q, ℓ and σ drawn at random, in float64."""
    made, generator = GridProcesses(width, grid).double(), seeded(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return made


def variational(made):
    """m, L (S = L Lᵀ) and K of each process, in NumPy; K has GPyTorch's 10⁻³ on its diagonal."""
    q = made.strategy._variational_distribution
    lower = np.tril(q.chol_variational_covar.detach().numpy())
    points = made.strategy.inducing_points.numpy()
    raw_sigma, raw_lengthscale = (
        made.prior.covariance.raw_outputscale,
        made.prior.covariance.base_kernel.raw_lengthscale,
    )
    variances = np.log1p(np.exp(raw_sigma.detach().numpy()))  # softplus
    lengthscales = np.log1p(np.exp(raw_lengthscale.detach().numpy().reshape(-1)))
    priors = [
        reference.rbf(points, points, v**0.5, scale) + 1e-3 * np.eye(len(points))
        for v, scale in zip(variances, lengthscales, strict=True)
    ]
    return q.variational_mean.detach().numpy(), lower, priors


# The processes on their grids


@pytest.mark.parametrize("grid", [8, 12, 64])
def test_moments_equal_the_dense_computation(grid):
    """Mean V m and variance diag(V S Vᵀ), V by a double loop."""
    made = processes(grid=grid)
    x = 0.95 * (2 * torch.rand(30, 4, generator=seeded(1), dtype=torch.float64) - 1)
    x[0], x[1] = 0.95, -0.95  # the edges
    mean, variance = made(x)
    m, lower, _ = variational(made)
    for k in range(4):
        v = reference.cubic_interpolation(x[:, k].numpy(), made.strategy.grid.squeeze(-1).numpy())
        np.testing.assert_allclose(v.sum(1), 1, rtol=1e-9)
        np.testing.assert_allclose(mean[:, k].detach(), v @ m[k], rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(variance[:, k].detach(), np.diag(v @ lower[k] @ lower[k].T @ v.T), rtol=1e-9)


def test_variance_is_gpytorchs_own():
    made = processes()
    x = 1.9 * torch.rand(9, 4, generator=seeded(1), dtype=torch.float64) - 0.95
    torch.testing.assert_close(made(x)[1], made.strategy(x.mT.unsqueeze(-1)).variance.mT, rtol=1e-10, atol=0)


@pytest.mark.parametrize("grid", [8, 20])
def test_kl_is_the_closed_form(grid):
    made = processes(grid=grid)
    expected = sum(reference.gaussian_kl(*parts) for parts in zip(*variational(made), strict=True))
    assert made.kl().item() == pytest.approx(expected, rel=1e-9)


def test_processes_start_as_the_identity_with_the_priors_spread():
    made = GridProcesses(3, 32).double()
    x = torch.linspace(-0.95, 0.95, 50, dtype=torch.float64).unsqueeze(-1).expand(-1, 3)
    mean, variance = made(x)
    torch.testing.assert_close(mean, x, rtol=0, atol=1e-6)  # cubic interpolation keeps lines; the grid is float32
    _, lower, priors = variational(made)
    np.testing.assert_allclose(lower @ lower.swapaxes(-1, -2), priors, atol=1e-6)
    np.testing.assert_allclose(variance.detach(), np.log(2), rtol=0.01)  # softplus(0)


def test_parameters_are_read_again_at_every_call_in_evaluation_too():
    made, x = processes().eval(), torch.zeros(1, 4, dtype=torch.float64)
    mean, kl = made(x)[0], made.kl()
    with torch.no_grad():
        made.strategy._variational_distribution.variational_mean.add_(1)
    torch.testing.assert_close(made(x)[0], mean + 1)
    assert made.kl() != kl
    for _ in range(2):  # a second backward needs a second graph
        (made.kl() + made(x)[1].sum()).backward()


def test_extreme_inputs_stay_on_the_grid_with_finite_gradients():
    made, squash = GridProcesses(3, 8), Squash(3)
    c = torch.tensor([[1e30, -1e30, 0.0], [1e4, -1e4, 50.0]], requires_grad=True)
    mean, variance = made(squash(c))
    (mean.sum() + variance.sum()).backward()
    assert c.grad.isfinite().all() and mean.isfinite().all() and (variance > 0).all()


# The model


def test_latent_is_over_the_reduced_features_and_the_likelihood_mixes_them():
    model, x = build().double().eval(), random_images(3).pixels().double()
    latent = model(x)
    assert latent.mean.shape == latent.variance.shape == (1, 3, 6)
    c = model.features(model.stem(x)) @ model.reduction.weight
    u = 0.95 * torch.tanh((c - model.squash.shift) * model.squash.log_scale.exp())
    mean, variance = model.processes(u)
    torch.testing.assert_close(latent.mean[0], mean)
    torch.testing.assert_close(latent.variance[0], variance)
    assert model.likelihood.mixing.shape == (6, 5)
    torch.testing.assert_close(model.kl(), model.processes.kl())  # filters have no prior, as in the original


def test_predictions_average_the_softmax_of_mixed_gaussians():
    model, x = build(), random_images(4).pixels()
    latent = model.eval()(x)
    mean, deviation = (v[0].detach().double().numpy() for v in (latent.mean, latent.variance.sqrt()))
    g = mean + deviation * np.random.default_rng(0).standard_normal((40_000, 4, 6))
    expected = reference.softmax(g @ model.likelihood.mixing.detach().double().numpy()).mean(0)
    # five standard errors of probabilities whose deviation is below 0.3, from 200 · 16 and 40,000 draws
    np.testing.assert_allclose(
        predict(model, x, passes=200).probs, expected, atol=5 * 0.3 * (1 / 3200 + 1 / 4e4) ** 0.5
    )


def test_few_features_are_not_reduced():
    model = build(backbone=DEEP, task=TINY)
    assert isinstance(model.reduction, torch.nn.Identity)
    assert model(random_images(2, TINY).pixels()).mean.shape == (1, 2, 5)


def test_a_single_image_can_be_a_batch_of_training():
    model, images = build(), random_images(1)
    sum(Bound(model, n=1)(images.pixels(), images.y)).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("backbone", [SMALL, DEEP], ids=["lenet", "resnet"])
def test_start_spreads_the_training_features_over_the_grid(backbone):
    task = TASK if backbone is SMALL else TINY
    model, images = build(backbone=backbone, task=task).train(), random_images(task=task)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    before = torch.get_rng_state()
    Svdkl().start(model, images, generator=seeded(0))
    assert torch.equal(before, torch.get_rng_state())
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, state[name])}
    assert changed == {"squash.shift", "squash.log_scale"}  # and not batch norm's statistics
    with torch.no_grad():
        c = model.reduction(model.features(model.stem(images.pixels())))
        u = model.squash(c)
    lively = c.std(0) > 0.1 * c.std(0).mean()
    assert lively.any()
    torch.testing.assert_close(u.mean(0), torch.zeros(u.shape[1]), rtol=0, atol=0.15)
    # tanh of deviation ½ is some 0.42; how much exactly, the features' distribution says
    assert ((u.std(0) > 0.3) & (u.std(0) < 0.6))[lively].all()


@pytest.mark.parametrize("classes", [2, 100])
def test_two_and_a_hundred_classes_of_colour_images_in_float64(classes):
    model = build(backbone=DEEP, task=Task(3, 8, 8, classes)).double()
    result = predict(model, random_images(3, Task(3, 8, 8, 2)).pixels().double(), passes=2)
    assert result.log_probs.shape == (3, classes) and result.log_probs.dtype == torch.float64
    assert result.log_probs.isfinite().all()


def test_a_copy_is_a_model_of_its_own():
    model, x = build(), random_images(2).pixels()
    twin = copy.deepcopy(model)
    kl = twin.kl().item()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    assert twin.kl().item() == kl != model.kl().item()
    assert not torch.equal(predict(model, x, passes=1).log_probs, predict(twin, x, passes=1).log_probs)


# Runs


def run(**options):
    method, backbone = Svdkl(reduced=8, grid=8), LeNet(channels=(3, 4), hidden=(8,))
    return Run(method, backbone, train_size=100, batch_size=30, **{"steps": 6, "learning_rate": 3e-3} | options)


def test_an_interrupted_run_resumes_to_the_same_bits_and_is_stored(tmp_path):
    fabric = Fabric(accelerator="cpu", devices=1)
    whole, folder = train_run(run(), RunFolder(tmp_path / "whole"), fabric).model, RunFolder(tmp_path / "parts")

    def interrupt(step):
        if step.step == 3:
            os.kill(os.getpid(), signal.SIGINT)  # Ctrl-C

    with pytest.raises(Interrupted):
        train_run(run(), folder, fabric, watch=interrupt)
    resumed = train_run(run(), folder, fabric, resume=True).model.state_dict()
    loaded = folder.model()
    for key, value in whole.state_dict().items():
        assert value.equal(resumed[key]) and value.equal(loaded.state_dict()[key]), key
    x = load("digits", "test").pixels(slice(5))
    assert torch.equal(predict(whole, x, passes=3).log_probs, predict(loaded, x, passes=3).log_probs)


@pytest.mark.parametrize("precision", ["64-true", "bf16-mixed"])
def test_other_precisions_train(tmp_path, precision):
    folder = RunFolder(tmp_path / "run")
    model = train_run(run(), folder, Fabric(accelerator="cpu", devices=1, precision=precision)).model
    assert np.isfinite(folder.log()[-1].nll)
    assert all(p.isfinite().all() for p in model.parameters())


# GPyTorch itself


def test_its_settings_and_torchs_are_as_they_were():
    import gpytorch

    chosen = (
        "max_cholesky_size",
        "cholesky_jitter",
        "fast_computations",
        "max_preconditioner_size",
        "skip_posterior_variances",
    )

    def settings():
        values = [vars(getattr(gpytorch.settings, name)) for name in chosen]
        return [{k: v for k, v in value.items() if k.startswith("_global")} for value in values]

    before = settings(), torch.get_num_threads(), torch.get_default_dtype(), torch.get_rng_state()
    model, images = build(), random_images(4)
    sum(Bound(model, n=4)(images.pixels(), images.y, Noise(0, torch.arange(1), images.rows))).backward()
    assert settings() == before[0]
    assert (torch.get_num_threads(), torch.get_default_dtype()) == before[1:3]
    assert torch.equal(torch.get_rng_state(), before[3])


def test_without_it_only_building_fails_and_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "gpytorch", None)
    with pytest.raises(CalgpError, match=r"pip install 'calgp\[svdkl\]'"):
        build()


@pytest.mark.slow
def test_the_package_and_the_list_of_methods_do_not_import_it():
    script = "import calgp, sys; calgp.METHODS; from calgp import cli; assert 'gpytorch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize(
    ("options", "message"), [({"reduced": 0}, "reduced=0"), ({"grid": 7}, "grid=7"), ({"grid": 801}, "grid=801")]
)
def test_wrong_options_raise_an_error_that_names_them(options, message):
    with pytest.raises(CalgpError, match=message):
        Svdkl(**options)
