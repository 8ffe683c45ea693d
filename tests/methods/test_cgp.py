import dataclasses

import numpy as np
import pytest
import torch

import reference
from calgp.data import Images, load
from calgp.errors import CalgpError
from calgp.gp import Bound, Noise, RobustMax, Softmax, predict
from calgp.methods import METHODS, Cgp
from calgp.nets import BACKBONES, LeNet, Task
from calgp.training.loop import order

TASK, COLOUR = Task(1, 10, 9, 3), Task(3, 8, 8, 3)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def build(method=Cgp(inducing=6, patch=3), task=TASK, seed=0, backbone=BACKBONES["lenet"]):
    return method.build(task, backbone, generator=seeded(seed))


def images(n=4, task=TASK, seed=0):
    return torch.rand(n, task.channels, task.height, task.width, generator=seeded(seed))


def labelled(n, task=TASK, seed=0):
    x = (255 * images(n, task, seed)).to(torch.uint8)
    return Images.of(x, torch.arange(n) % task.classes, tuple(str(q) for q in range(task.classes)))


def keyed(n, samples=1, seed=0):
    return Noise(seed, torch.arange(samples), torch.arange(n))


def test_it_is_one_gaussian_from_the_sparse_process_on_patches():
    model, x = build(), images()
    mean, variance = model.gp(x)
    latent = model(x, keyed(4, samples=5))
    assert torch.equal(latent.mean, mean.unsqueeze(0)) and torch.equal(latent.variance, variance.unsqueeze(0))
    assert model.sites() == {}


def test_its_prior_variance_is_the_mean_covariance_of_patches():
    model, x = build(Cgp(inducing=6, patch=3, sigma=1.0)), images(2)
    w = np.full(8 * 7, 1 / 56)
    for i in range(2):
        expected = reference.patch_covariance(x[i].numpy(), x[i].numpy(), w, 3, "joint", 1.0, 3.0)
        np.testing.assert_allclose(model(x).variance[0, i].detach(), expected, rtol=1e-4)  # float32; ℓ = √9


def test_the_backbone_takes_no_part():
    one, other = (build(backbone=backbone).state_dict() for backbone in (BACKBONES["lenet"], LeNet(channels=(2,))))
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_its_cost_is_that_of_the_inducing_patches_alone():
    model = build()
    assert model.kl() == 0
    with torch.no_grad():
        model.gp.mean.fill_(1.0)
    assert model.kl().item() == pytest.approx(0.5 * 6 * 3)


def test_weights_are_learned_or_fixed():
    assert build().gp.inducing.weights.requires_grad
    assert not build(Cgp(inducing=6, patch=3, weighted=False)).gp.inducing.weights.requires_grad


@pytest.mark.parametrize(("channels", "width", "count"), [("joint", 27, 36), ("additive", 9, 108)])
def test_colours_jointly_or_one_by_one(channels, width, count):
    model = build(Cgp(inducing=6, patch=3, channels=channels), COLOUR)
    assert model.gp.inducing.points.shape == (6, width)
    assert model.gp.inducing.weights.shape == (count,)
    assert predict(model, images(2, COLOUR), passes=2).log_probs.isfinite().all()


@pytest.mark.parametrize("channels", ["joint", "additive"])
def test_inducing_patches_start_at_distinct_patches_of_the_training_images(channels):
    method = Cgp(inducing=20, patch=3, channels=channels)
    model, train = build(method, COLOUR), labelled(5, COLOUR)
    method.start(model, train, generator=seeded(1))
    points = model.gp.inducing.points.detach().numpy()
    there = np.concatenate([reference.patches_of(x, 3, channels) for x in train.pixels().numpy()])
    assert all((there == point).all(1).any() for point in points)
    assert len(np.unique(points, axis=0)) == 20


def test_black_images_with_a_spot_give_each_patch_once():
    """Of the 5 · 56 patches 271 are black; the ten distinct ones are the inducing patches, the others stay as drawn."""
    x = torch.zeros(5, 1, 10, 9, dtype=torch.uint8)
    x[0, 0, 5, 5] = 255
    method = Cgp(inducing=14, patch=3)
    model = build(method)
    drawn = model.gp.inducing.points.detach().clone()
    method.start(model, Images.of(x, torch.arange(5) % 3, tuple("012")), generator=seeded())
    points = model.gp.inducing.points.detach()
    assert len(points[:10].unique(dim=0)) == 10 and (points[:10].sum(1) <= 1).all()
    assert torch.equal(points[10:], drawn[10:])


def test_the_lengthscale_starts_at_the_median_distance_of_patches_unless_it_is_given():
    method, train = Cgp(inducing=6, patch=3), labelled(3)
    model = build(method)
    method.start(model, train, generator=seeded())
    patches = np.concatenate([reference.patches_of(x, 3, "joint") for x in train.pixels().numpy()])
    distances = [np.linalg.norm(a - b) for i, a in enumerate(patches) for b in patches[:i]]
    expected = np.quantile(distances, 0.5, method="lower")  # torch's median
    assert model.gp.inducing.kernel.lengthscale.item() == pytest.approx(expected, rel=1e-4)
    given = dataclasses.replace(method, lengthscale=2.5)
    model = build(given)
    given.start(model, train, generator=seeded())
    assert model.gp.inducing.kernel.lengthscale.item() == pytest.approx(2.5)


def test_functions_start_at_a_classification_of_the_training_images():
    """Before the first step, digits that were not seen are told apart far better than by chance."""
    train, test = (load("digits", part).balanced(300, 0).resized(14) for part in ("train", "test"))
    method = Cgp(inducing=100)
    model = build(method, Task(1, 14, 14, 10))
    method.start(model, train, generator=seeded())
    with torch.no_grad():
        right = model(test.pixels()).mean[0].argmax(-1) == test.y
    assert right.float().mean() > 0.6


def test_the_start_is_a_function_of_the_generator():
    method, train = Cgp(inducing=6, patch=3), labelled(9)
    before, points = torch.get_rng_state(), []
    for seed in (1, 1, 2):
        model = build(method)
        method.start(model, train, generator=seeded(seed))
        points.append(model.gp.inducing.points)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(points[0], points[1]) and not torch.equal(points[0], points[2])


@pytest.mark.slow
@pytest.mark.parametrize("likelihood", ["softmax", "robust-max"])
def test_the_bound_rises_on_the_embedded_digits(likelihood):
    train = load("digits", "train").resized(14)
    method = Cgp(inducing=40, likelihood=likelihood)
    model = build(method, Task(1, 14, 14, 10))
    method.start(model, train, generator=seeded())
    bound = Bound(model, len(train))
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-2)
    losses = []
    for step in range(80):
        index = order(len(train), 50, step, 0)
        loss = sum(bound(train.pixels(index), train.y[index], Noise(-1, torch.tensor([step]), train.rows[index])))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert np.mean(losses[-10:]) < 0.8 * np.mean(losses[:10])
    test = load("digits", "test").balanced(100, 0).resized(14)
    wrong = predict(model, test.pixels(), passes=5).labels != test.y
    assert wrong.float().mean() < 0.6  # chance is 0.9


@pytest.mark.parametrize("classes", [2, 100])
def test_float64_two_and_a_hundred_classes(classes):
    task = Task(3, 8, 8, classes)
    model = build(Cgp(inducing=6, patch=3, channels="additive"), task).double()
    result = predict(model, images(3, task).double(), passes=2)
    assert result.log_probs.dtype == torch.float64
    np.testing.assert_allclose(result.probs.sum(-1), 1, rtol=1e-9)


def test_likelihoods_by_name():
    assert isinstance(build().likelihood, Softmax)
    assert isinstance(build(Cgp(likelihood="robust-max")).likelihood, RobustMax)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"inducing": 0}, "inducing=0"),
        ({"patch": 0}, "patch=0"),
        ({"channels": "grey"}, "channels='grey': must be joint or additive"),
        ({"likelihood": "probit"}, "likelihood='probit': must be softmax or robust-max"),
        ({"lengthscale": -1.0}, "lengthscale=-1.0: must be none or a number above 0"),
    ],
)
def test_impossible_options_are_refused_by_name(wrong, message):
    with pytest.raises(CalgpError, match=message):
        Cgp(**wrong)


def test_patches_larger_than_the_images_are_refused():
    with pytest.raises(CalgpError, match=r"10 × 10 do not fit into images of 10 × 9"):
        build(Cgp(patch=10))


def test_the_listed_one():
    assert METHODS["cgp"] == Cgp() and (METHODS["cgp"].inducing, METHODS["cgp"].patch) == (500, 5)
