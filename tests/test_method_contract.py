"""What holds for every method there is; a new one is tested by being listed in METHODS."""

import dataclasses
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from calgp.errors import CalgpError
from calgp.gp import Bound, Noise, NumericalError, predict
from calgp.methods import METHODS
from calgp.nets import LeNet, ResNet, Task
from calgp.nets.wrap import wrap

LENET = LeNet(channels=(8, 8), hidden=(32,))
RESNET = ResNet(n=1, widths=(4, 8, 8), pad_to=8)
TASKS = {"grey-10": Task(1, 28, 28, 10), "colour-100": Task(3, 32, 32, 100), "grey-2": Task(1, 28, 28, 2)}
TOY = Task(1, 8, 8, 3)

PRESETS = {"cnn-gp-rf", "cnn-dgp", "cnn-gp-rf-paper", "cnn-gp-sorf-paper", "cnn-cal", "gpdnn-mcd"}
every_method = pytest.mark.parametrize(  # presets are other options of a class of which another method is quick
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in PRESETS)) for name in METHODS]
)


def build(name, task=TOY, backbone=RESNET, seed=0):
    return METHODS[name].build(task, backbone, generator=torch.Generator().manual_seed(seed))


def images(n, task=TOY, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(n, task.channels, task.height, task.width, generator=generator)


def blobs(n, task=TOY):
    """A bright spot whose place tells the class, in noise."""
    y = torch.arange(n) % task.classes
    x = 0.5 * images(n, task)
    for i, label in enumerate(y.tolist()):
        x[i, :, 2 * label : 2 * label + 3, 2 * label : 2 * label + 3] += 2
    return x, y


@every_method
@pytest.mark.parametrize("task", TASKS)
def test_it_builds_and_predicts_probabilities(name, task):
    model = build(name, TASKS[task], LENET)
    result = predict(model, images(3, TASKS[task]), passes=3)
    assert result.log_probs.shape == (3, TASKS[task].classes)
    assert result.log_probs.dtype == torch.float32
    assert result.log_probs.isfinite().all()
    torch.testing.assert_close(result.probs.sum(-1), torch.ones(3), rtol=0, atol=1e-5)
    for column in ("entropy", "expected_entropy", "variance", "mutual_information", "monte_carlo_error"):
        assert getattr(result, column).isfinite().all()


@pytest.mark.slow
@every_method
@pytest.mark.parametrize("backbone", [LENET, RESNET], ids=["lenet", "resnet"])
def test_some_steps_lower_the_estimate_of_the_bound(name, backbone):
    task = TOY if backbone is RESNET else Task(1, 28, 28, 3)
    model, (x, y) = build(name, task, backbone), blobs(48, task)
    bound, rows = Bound(model, n=len(y)), torch.arange(len(y))
    optimiser = torch.optim.Adam(bound.parameters(), lr=3e-3)

    def estimate():
        with torch.no_grad():
            return sum(bound(x, y, Noise(10**6, torch.arange(4), rows))).item()

    before = estimate()
    for step in range(15):
        optimiser.zero_grad()
        loss = sum(bound(x, y, Noise(step, torch.arange(1), rows)))
        loss.backward()
        assert loss.isfinite()
        optimiser.step()
    assert estimate() < before
    assert all(p.isfinite().all() for p in model.parameters())


@every_method
def test_same_generator_gives_the_same_model_and_leaves_torchs_own_alone(name):
    before = torch.get_rng_state()
    one, same, other = (build(name, seed=seed).state_dict() for seed in (0, 0, 1))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(one[key], same[key]) for key in one)
    assert any(not torch.equal(one[key], other[key]) for key in one)


@every_method
def test_state_dict_in_a_fresh_model_gives_the_same_predictions(name):
    model, x = build(name), images(5)
    with torch.no_grad():
        model.train()(x)  # batch norm's statistics have moved
    fresh = build(name, seed=1)
    fresh.load_state_dict(model.state_dict())
    one, other = (predict(m, x, passes=4, seed=2) for m in (model, fresh))
    assert torch.equal(one.log_probs, other.log_probs)


ENGINES = {
    "one-pass": {"passes": 1, "engine": "moments"},
    "passes": {"passes": 3, "engine": "moments"},
    "samples": {"passes": 3, "engine": "samples"},
}
every_engine = pytest.mark.parametrize("engine", ENGINES)


@every_method
@every_engine
def test_predictions_depend_on_the_seed_and_not_on_batches_or_memory(name, engine):
    model, x, how = build(name).double(), images(6).double(), ENGINES[engine]
    whole = predict(model, x, seed=1, **how)
    order = torch.tensor([5, 0, 3, 1, 4, 2])
    parts = predict(model, [(x[rows], rows) for rows in order.split(4)], seed=1, memory=1, **how)
    assert parts.samples == whole.samples
    for column in ("log_probs", "expected_entropy", "variance"):
        # the same draws in double precision: only the order of sums differs
        torch.testing.assert_close(getattr(parts, column), getattr(whole, column)[order], rtol=0, atol=1e-10)
    same_for_all_seeds = torch.equal(whole.log_probs, predict(model, x, seed=2, **how).log_probs)
    nothing_is_drawn = not model.sites() and model(x).is_points
    assert same_for_all_seeds == nothing_is_drawn


NETWORKS = {
    "lenet": LENET,
    "resnet": RESNET,
    "resnet-batch-moments": dataclasses.replace(RESNET, batch_moments=True),
}


@pytest.mark.slow
@every_method
@pytest.mark.parametrize("network", NETWORKS)
def test_memory_does_not_change_the_prediction(name, network):
    """Also where batch norm takes the moments of the batch: what is split to fit memory must not be its batches."""
    task = Task(1, 28, 28, 3) if network == "lenet" else TOY
    model, x = build(name, task, NETWORKS[network]), images(12, task)
    batches = [*zip(x.split(8), torch.arange(12).split(8), strict=True)]
    whole = predict(model, batches, passes=2, seed=1, memory=2**40)
    for memory in (1, 100_000):  # an image and a sample at a time; some images, or some samples
        part = predict(model, batches, passes=2, seed=1, memory=memory)
        torch.testing.assert_close(part.log_probs, whole.log_probs, rtol=0, atol=1e-5)
        torch.testing.assert_close(part.variance, whole.variance, rtol=0, atol=1e-5)


@every_method
@every_engine
def test_memory_does_not_change_what_depends_on_the_batch(name, engine):
    model, x = build(name, TOY, NETWORKS["resnet-batch-moments"]), images(6)
    whole, part = (predict(model, x, seed=1, memory=memory, **ENGINES[engine]) for memory in (2**40, 1))
    assert part.samples == whole.samples
    torch.testing.assert_close(part.log_probs, whole.log_probs, rtol=0, atol=1e-5)
    torch.testing.assert_close(part.variance, whole.variance, rtol=0, atol=1e-5)


@every_method
def test_prediction_leaves_model_and_generator_bit_for_bit(name):
    model, x = build(name).train(), images(4)
    next(model.children()).eval()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    before = torch.get_rng_state()
    predict(model, x, passes=3)
    assert torch.equal(before, torch.get_rng_state())
    assert modes == [module.training for module in model.modules()]
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def small_network():
    torch.manual_seed(0)
    layers = (
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 6, 3, stride=2),
        nn.BatchNorm2d(6),
    )
    return nn.Sequential(*layers, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3))


@every_method
@pytest.mark.parametrize("backbone", ["resnet", "wrapped"])
@pytest.mark.parametrize("mode", ["training", "evaluation"])
def test_threads_that_share_a_model_predict_what_one_does(name, backbone, mode, monkeypatch):
    """Four at a time, each other images: batch norm's mode, hooks, caches and names of sites are the model's own."""
    network = RESNET if backbone == "resnet" else wrap(small_network)
    try:
        model = build(name, TOY, network).train(mode == "training")
    except CalgpError as error:  # Gaussian weights in anybody's network
        pytest.skip(str(error))
    inputs = [images(5, seed=seed) for seed in range(4)]
    alone = [predict(model, x, passes=3, seed=1).log_probs for x in inputs]
    state = {key: value.clone() for key, value in model.state_dict().items()}
    written = watch_writes(monkeypatch) if mode == "evaluation" else []
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads take turns at every opportunity
    try:
        with ThreadPoolExecutor(4) as pool:
            found = [pool.submit(predict, model, x, passes=3, seed=1) for x in inputs * 3]
            found = [each.result().log_probs for each in found]
    finally:
        sys.setswitchinterval(interval)
    for expected, now in zip(alone * 3, found, strict=True):
        torch.testing.assert_close(now, expected, rtol=0, atol=1e-6)  # the order of sums alone may differ
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert all(module.training == (mode == "training") for module in (model, model.likelihood))
    assert not written


def watch_writes(monkeypatch):
    """A list that gets the attributes which modules are given from now on; GPyTorch keeps what it computes."""
    written, give = [], nn.Module.__setattr__

    def note(module, name, value):
        if not type(module).__module__.startswith(("gpytorch", "linear_operator")) and name != "_made":
            written.append((type(module).__name__, name))
        give(module, name, value)

    monkeypatch.setattr(nn.Module, "__setattr__", note)
    return written


@every_method
@pytest.mark.parametrize("integrate", [False, True], ids=["drawn", "integrated"])
def test_stem_and_sample_are_the_model(name, integrate):
    """There is a component for each sample if the pass draws at any site, and else one; drawing is at every site."""
    model, x, drawn = build(name).eval(), images(4), set()
    for site, module in model.sites().items():
        module.register_forward_hook(lambda *_, site=site: drawn.add(site))
    noise = Noise(0, torch.arange(2), torch.arange(4), integrate=integrate)
    together = model(x, noise)
    assert together.mean.shape[:2] == (2 if drawn else 1, 4)
    for part, again in zip(together, model.sample(model.stem(x), noise), strict=True):
        assert part is again is None or torch.equal(part, again)
    integrated = set(model.sites()) - drawn
    assert all("weights" in site or "layers" in site for site in integrated)  # of the last layer
    assert len(integrated) <= integrate and not (integrated and together.is_points)


@every_method
def test_masks_at_their_mean_leave_one_component_and_draw_nothing(name):
    model, x = build(name).eval(), images(4)
    model.sites()
    seeds = [Noise(seed, torch.arange(1), torch.arange(4), integrate=True, mean=True) for seed in (0, 1)]
    one, other = (model(x, noise) for noise in seeds)
    assert one.mean.shape[:2] == (1, 4)
    for part, again in zip(one, other, strict=True):
        assert part is again is None or torch.equal(part, again)


@every_method
def test_kl_is_a_finite_number_and_takes_no_part_in_randomness(name):
    model = build(name)
    assert model.kl().shape == ()
    assert model.kl().isfinite()
    assert torch.equal(model.kl(), model.kl())


@every_method
def test_it_works_without_keys_in_anybodys_loop(name):
    model, (x, y) = build(name), blobs(6)
    sum(Bound(model, n=6)(x, y)).backward()
    assert any(p.grad is not None and p.grad.any() for p in model.parameters())


EXTREMES = {
    "all black": torch.zeros,
    "all white": torch.ones,
    "constant": lambda *shape: torch.full(shape, 0.5),
    "tiny": lambda *shape: torch.full(shape, 1e-40),
    "negative": lambda *shape: torch.full(shape, -3.0),
    "large": lambda *shape: torch.full(shape, 1e6),
    "huge": lambda *shape: torch.full(shape, 1e38),
}


@every_method
@pytest.mark.parametrize("backbone", [LENET, RESNET], ids=["lenet", "resnet"])
def test_extreme_images_get_finite_probabilities_or_a_refusal(name, backbone):
    """None of them silently: only what overflows on its way, far beyond any pixel, may be refused."""
    task = TOY if backbone is RESNET else Task(1, 28, 28, 3)
    model = build(name, task, backbone)
    for kind, make in EXTREMES.items():
        x = make(2, task.channels, task.height, task.width)
        try:
            result = predict(model, x, passes=3)
        except NumericalError as error:
            assert kind in ("large", "huge") and "no numbers; the pixels" in str(error)
            continue
        torch.testing.assert_close(result.probs.sum(-1), torch.ones(2), rtol=0, atol=1e-5, msg=kind)
        for column in ("probs", "entropy", "expected_entropy", "variance", "mutual_information"):
            assert getattr(result, column).isfinite().all(), (kind, column)


@every_method
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_pixels_that_are_no_numbers_are_refused_by_row(name, value):
    x = images(3)
    x[1, 0, 2, 2] = value
    with pytest.raises(CalgpError, match="image of row 7 has pixels that are no finite numbers"):
        predict(build(name), [(x, torch.tensor([5, 7, 9]))], passes=2)


@every_method
def test_it_is_a_frozen_value_with_a_summary(name):
    method = METHODS[name]
    assert method.summary
    assert dataclasses.replace(method) == method
    assert hash(method) == hash(dataclasses.replace(method))
    with pytest.raises(dataclasses.FrozenInstanceError):
        method.summary = "other"
