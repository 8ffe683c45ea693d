import dataclasses

import numpy as np
import pytest
import torch
from jaxtyping import config
from sklearn.cluster import KMeans
from torch.nn.functional import conv2d, max_pool2d

from calgp.data import Images, load
from calgp.errors import CalgpError
from calgp.gp import Bound, Latent, Noise, RobustMax, Softmax, predict
from calgp.methods import METHODS, Gpdnn
from calgp.nets import LeNet, ResNet, Task
from calgp.training.loop import order

SMALL = LeNet(channels=(3, 4), hidden=(16,))
DEEP = ResNet(n=1, widths=(3, 4, 5), pad_to=8)
TASK, TINY = Task(1, 28, 28, 5), Task(3, 8, 8, 4)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def build(method=Gpdnn(inducing=7), backbone=SMALL, task=TASK, seed=0):
    return method.build(task, backbone, generator=seeded(seed))


def images(n=4, task=TASK, seed=0):
    return torch.rand(n, task.channels, task.height, task.width, generator=seeded(seed))


def labelled(n, task=TASK):
    x = (255 * images(n, task)).to(torch.uint8)
    return Images.of(x, torch.arange(n) % task.classes, tuple(str(q) for q in range(task.classes)))


def keyed(n, samples=1, seed=0):
    return Noise(seed, torch.arange(samples), torch.arange(n))


def test_functions_are_the_sparse_process_at_the_features():
    model, x = build(), images()
    mean, variance = model.gp(model.features(model.features.stem(x)))
    latent = model(x)
    assert torch.equal(latent.mean, mean.unsqueeze(0)) and torch.equal(latent.variance, variance.unsqueeze(0))


def test_without_masks_there_is_one_gaussian_and_with_them_one_for_each_sample():
    assert build().sites() == {}
    assert build()(images(), keyed(4, samples=3)).variance.shape == (1, 4, 5)
    masked = build(Gpdnn(inducing=7, keep_filters=0.5))
    assert list(masked.sites()) == ["features.convolutions.1.mask"]
    assert masked(images(), keyed(4, samples=3)).variance.shape == (3, 4, 5)


def test_samples_of_a_masked_model_are_what_each_would_be_alone():
    model = build(Gpdnn(inducing=7, keep_filters=0.5), DEEP, TINY).double().eval()
    model.sites()
    x = images(3, TINY).double()
    together = model(x, keyed(3, samples=4))
    for s in range(4):
        alone = model(x[[2]], Noise(0, torch.tensor([s]), torch.tensor([2])))
        torch.testing.assert_close(together.mean[s, 2], alone.mean[0, 0])
        torch.testing.assert_close(together.variance[s, 2], alone.variance[0, 0])


@pytest.mark.parametrize("keep", [1.0, 0.5])
def test_the_prior_of_filters_and_their_masks_are_separate_choices(keep):
    """So that each can be changed alone: half the squared norm of the filters, times π, is in the bound or is not."""
    free, bound = (build(Gpdnn(keep_filters=keep, filter_prior=prior)) for prior in (False, True))
    assert bool(free.sites()) is bool(bound.sites()) is (keep < 1)
    assert free.kl() == free.gp.kl()
    assert bound.kl().item() == pytest.approx((bound.gp.kl() + bound.features.kl()).item())
    assert bound.features.kl() > 0


def test_filters_have_a_prior_only_where_they_have_masks():
    """Bradshaw et al. learn the network by maximum likelihood; MCD infers it."""
    plain, masked = build(), build(Gpdnn(inducing=7, keep_filters=0.5))
    assert plain.kl() == 0  # q(v) starts at the prior
    assert torch.equal(masked.kl(), masked.features.kl()) and masked.kl() > 0
    for model in (plain, masked):
        with torch.no_grad():
            model.gp.mean.fill_(2.0)
    np.testing.assert_allclose(plain.kl().item(), 0.5 * 4 * 7 * 5)  # ½ mᵀm
    torch.testing.assert_close(masked.kl() - masked.features.kl(), plain.kl(), rtol=1e-4, atol=0)


def test_features_kernel_points_and_posterior_are_all_learned():
    model, x = build(), images(6)
    with torch.no_grad():
        model.gp.mean.normal_(generator=seeded())
    sum(Bound(model, n=6)(x, torch.arange(6) % 5, keyed(6))).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.any(), name


@pytest.mark.parametrize(
    ("options", "learned"),
    [
        ({}, {"log_sigma", "log_lengthscale"}),
        ({"ard": True}, {"log_sigma", "log_lengthscale"}),
        ({"kernel": "arc-cosine-1"}, {"log_sigma"}),
        ({"kernel": "arc-cosine-1", "ard": True}, {"log_lengthscale"}),
    ],
)
def test_theta_is_learned_as_far_as_it_is_identifiable(options, learned):
    kernel = build(Gpdnn(inducing=7, **options)).gp.inducing.kernel
    assert {name for name, parameter in kernel.named_parameters() if parameter.requires_grad} == learned
    assert kernel.lengthscale.shape == ((4 * 8 * 8,) if options.get("ard") else (1,))


def test_likelihoods_by_name():
    assert isinstance(build().likelihood, Softmax)
    assert isinstance(build(Gpdnn(likelihood="robust-max")).likelihood, RobustMax)


def features_of(model, train):
    with torch.no_grad():
        return model.features(model.features.stem(train.pixels()))


def test_inducing_points_start_at_the_k_means_of_the_features():
    method, train = Gpdnn(inducing=7), labelled(60)
    model = build(method)
    method.start(model, train, generator=seeded(1))
    c, points = features_of(model, train), model.gp.inducing.points.detach()
    nearest = torch.cdist(c, points).argmin(1)
    assert len(nearest.unique()) == 7
    for m in range(7):  # what k-means means: a centre is the mean of what is nearest to it
        torch.testing.assert_close(points[m], c[nearest == m].mean(0), rtol=1e-4, atol=1e-4)

    def cost(centres):
        return torch.cdist(c, centres).amin(1).square().sum().item()

    best = KMeans(7, n_init=20, random_state=0).fit(c.numpy())
    assert cost(points) < 1.1 * best.inertia_


@pytest.mark.parametrize("kernel", ["rbf", "arc-cosine-1"])
def test_the_lengthscale_starts_at_the_scale_of_the_features_unless_it_is_given(kernel):
    method, train = Gpdnn(inducing=7, kernel=kernel), labelled(50)
    model = build(method)
    method.start(model, train, generator=seeded())
    c = features_of(model, train).numpy()
    sizes = (
        [np.linalg.norm(a - b) for i, a in enumerate(c) for b in c[:i]]
        if kernel == "rbf"
        else np.linalg.norm(c, axis=1)
    )
    # torch's median of an even number is the lower one of the middle two
    expected = np.quantile(sizes, 0.5, method="lower")
    assert model.gp.inducing.kernel.lengthscale.item() == pytest.approx(expected, rel=1e-4)
    given = dataclasses.replace(method, lengthscale=3.0)
    model = build(given)
    given.start(model, train, generator=seeded())
    assert model.gp.inducing.kernel.lengthscale.item() == pytest.approx(3.0)


def test_fewer_images_than_inducing_points_give_the_points_and_middles_between_them():
    method, train = Gpdnn(inducing=40), labelled(12)
    model = build(method)
    method.start(model, train, generator=seeded())
    c, points = features_of(model, train), model.gp.inducing.points.detach()
    candidates = torch.cat([c, (c[:, None] + c[None]).flatten(0, 1) / 2])
    # the same features, computed in another order of images: float32, 256 of them
    assert (points[:, None] - candidates).norm(dim=-1).amin(1).max() < 1e-4
    assert (c[:, None] - points).norm(dim=-1).amin(1).max() < 1e-4
    assert model(train.pixels()).variance.isfinite().all()


def test_images_that_are_all_the_same_are_no_obstacle():
    method = Gpdnn(inducing=5)
    train = Images.of(torch.zeros(30, 1, 28, 28, dtype=torch.uint8), torch.arange(30) % 5, tuple("01234"))
    model = build(method)
    method.start(model, train, generator=seeded())
    nll, kl = Bound(model, n=30)(train.pixels(), train.y, keyed(30))
    (nll + kl).backward()
    assert nll.isfinite() and all(p.grad.isfinite().all() for p in model.parameters())


def test_functions_start_at_a_classification_of_the_training_images():
    """The exact least-squares GP on one-hot targets, at a few digits that are the inducing points themselves."""
    train = load("digits", "train").balanced(50, 0)
    method, task = Gpdnn(inducing=50), Task(1, 28, 28, 10)
    model = build(method, LeNet(channels=(8, 16)), task)
    method.start(model, train, generator=seeded())
    c, kernel = features_of(model, train), model.gp.inducing.kernel
    targets = 3 * (torch.nn.functional.one_hot(train.y, 10) - 0.1)
    with torch.no_grad():
        k = kernel.covariance(c, c).double()
        exact = k @ torch.linalg.solve(k + torch.eye(50), targets.double())
        # float32, and a jitter of 1e-6 that the noise of 1 dwarfs
        torch.testing.assert_close(model(train.pixels()).mean[0].double(), exact, rtol=1e-3, atol=1e-3)
    assert (model(train.pixels()).mean[0].argmax(-1) == train.y).float().mean() > 0.8


@pytest.mark.parametrize("backbone", [SMALL, ResNet(n=1, widths=(3, 4, 5))], ids=["lenet", "resnet"])
def test_the_start_is_a_function_of_the_generator_and_leaves_network_and_torchs_generator_alone(backbone):
    method, train = Gpdnn(inducing=7, keep_filters=0.5), labelled(60)
    models = [build(method, backbone) for _ in range(3)]
    features = {key: value.clone() for key, value in models[0].features.state_dict().items()}
    before = torch.get_rng_state()
    for model, seed in zip(models, (1, 1, 2), strict=True):
        method.start(model, train, generator=seeded(seed))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(value, features[key]) for key, value in models[0].features.state_dict().items())
    points = [model.gp.inducing.points for model in models]
    assert torch.equal(points[0], points[1]) and not torch.equal(points[0], points[2])


def test_batch_norm_at_the_start_uses_what_the_first_steps_will_use():
    """Running statistics are still 0 and 1 then; features by them would have another scale."""
    method, train = Gpdnn(inducing=100), labelled(80)
    model = build(method, ResNet(n=1, widths=(3, 4, 5)))
    method.start(model, train, generator=seeded())
    with torch.no_grad():
        c = model.train().features(model.features.stem(train.pixels()))
    # with more inducing points than images they are among the points (the batches of the start are these 80)
    assert (c[:, None] - model.gp.inducing.points.detach()).norm(dim=-1).amin(1).max() < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        Gpdnn(inducing=20),
        Gpdnn(inducing=20, keep_filters=0.5),
        Gpdnn(inducing=20, kernel="arc-cosine-1"),
        Gpdnn(inducing=20, ard=True, likelihood="robust-max"),
    ],
    ids=["plain", "masked", "arc-cosine", "robust-max-ard"],
)
def test_the_bound_rises_on_the_embedded_digits(method):
    train = load("digits", "train")
    model = build(method, LeNet(channels=(8, 16)), Task(1, 28, 28, 10))
    method.start(model, train, generator=seeded())
    bound = Bound(model, len(train))
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for step in range(60):
        index = order(len(train), 50, step, 0)
        loss = sum(bound(train.pixels(index), train.y[index], Noise(-1, torch.tensor([step]), train.rows[index])))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert np.mean(losses[-10:]) < 0.8 * np.mean(losses[:10])
    test = load("digits", "test").balanced(100, 0)
    wrong = predict(model, test.pixels(), passes=5).labels != test.y
    assert wrong.float().mean() < 0.6  # chance is 0.9


def known(model, x):
    """The Gaussian f with filters at the mean of their masks, by hand."""
    convolution = model.features.convolutions[1]
    h = conv2d(0.5 * model.stem(x), convolution.weight, convolution.bias, padding=2)
    return model.gp(max_pool2d(h, 2).relu().flatten(1))


def test_one_pass_has_filters_at_their_mean_and_integrates_the_process_there():
    model, x = build(Gpdnn(inducing=7, keep_filters=0.5)).double().eval(), images().double()
    with torch.no_grad():
        model.gp.mean.normal_(generator=seeded()).mul_(2)
        mean, variance = known(model, x)
    latent = model(x, keyed(4)._replace(mean=True, integrate=True))
    torch.testing.assert_close(latent.mean[0], mean)
    torch.testing.assert_close(latent.variance[0], variance)
    result = predict(model, x, passes=1, engine="moments")
    epsilon = torch.randn(100_000, 1, 5, generator=seeded(), dtype=torch.float64)
    exact = (mean + variance.sqrt() * epsilon).softmax(-1)
    # 256 quasi-random draws of five functions with deviations up to 1, against 100,000 random ones
    torch.testing.assert_close(result.probs, exact.mean(0), rtol=0, atol=4e-3)
    torch.testing.assert_close(result.variance, exact.var(0), rtol=0.1, atol=1e-4)
    assert result.samples == 256


def test_several_passes_draw_filters_and_integrate_the_process_in_each():
    model, x = build(Gpdnn(inducing=7, keep_filters=0.5)), images()
    with torch.no_grad():
        model.gp.mean.normal_(generator=seeded()).mul_(2)
    exact = predict(model, x, passes=1000, engine="samples")
    found = predict(model, x, passes=300, engine="moments")
    assert found.samples == 300 * 16
    # the same average over filters, of 300 samples of which the rest is known
    error = 5 * (exact.variance / 300).sqrt()
    assert ((found.probs - exact.probs).abs() < error).all()


def test_without_masks_one_pass_is_all_and_robust_max_draws_nothing():
    model, x = build(), images()
    assert predict(model, x, passes=1, engine="moments").samples == 256
    robust = build(Gpdnn(inducing=7, keep_filters=0.5, likelihood="robust-max"))
    one = predict(robust, x, passes=1, engine="moments")
    assert one.samples == 1 and torch.equal(one.probs, predict(robust, x, passes=1, engine="moments", seed=1).probs)


@pytest.mark.parametrize("task", [Task(1, 28, 28, 2), Task(3, 32, 32, 100)], ids=["two", "hundred-colour"])
@pytest.mark.parametrize("likelihood", ["softmax", "robust-max"])
def test_float64_two_and_a_hundred_classes(task, likelihood):
    model, x = build(Gpdnn(inducing=7, keep_filters=0.5, likelihood=likelihood), SMALL, task).double(), images(3, task)
    result = predict(model, x.double(), passes=2)
    assert result.log_probs.dtype == torch.float64
    np.testing.assert_allclose(result.probs.sum(-1), 1, rtol=1e-9)


def test_softmax_of_the_prior_is_the_same_for_all_classes():
    """At the start f ~ N(0, σ²) for each class: draws of the Latent alone decide, and their average is even."""
    result = predict(build(), images(2), passes=200)
    np.testing.assert_allclose(result.probs, 0.2, atol=0.02)  # 3,200 draws
    assert isinstance(build()(images(2)), Latent)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"inducing": 0}, "inducing=0"),
        ({"kernel": "matern"}, "kernel='matern': must be rbf or arc-cosine-1"),
        ({"likelihood": "probit"}, "likelihood='probit': must be softmax or robust-max"),
        ({"keep_filters": 0.0}, "keep_filters=0.0"),
        ({"lengthscale": -1.0}, "lengthscale=-1.0: must be none or a number above 0"),
        ({"sigma": 0.0}, "sigma=0.0: must be a number above 0"),
    ],
)
def test_impossible_options_are_refused_by_name(wrong, message):
    with pytest.raises(CalgpError, match=message):
        Gpdnn(**wrong)


def test_an_unknown_granularity_is_refused(monkeypatch):
    monkeypatch.setattr(config, "jaxtyping_disable", True)  # as users run it
    with pytest.raises(CalgpError, match="granularity"):
        Gpdnn(granularity="pixel")


def test_the_listed_variants():
    assert METHODS["gpdnn"] == Gpdnn() and METHODS["gpdnn"].inducing == 200
    assert METHODS["gpdnn-mcd"] == Gpdnn(keep_filters=0.5)
