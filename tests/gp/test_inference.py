import copy
import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn

import reference
from calgp.errors import CalgpError
from calgp.gp import (
    UNMASKED,
    Bound,
    DeepGP,
    Latent,
    MaskedLinear,
    Masking,
    Model,
    Noise,
    Predictive,
    RandomFeatureGP,
    Softmax,
    predict,
    predict_batches,
)
from calgp.gp.cholesky import covariance_root

SEED_ONLY = {"rtol": 0, "atol": 1e-5}  # what may differ with chunks and batches: float32 sums in another order


class Toy(Model):
    """Batch norm, a linear map, a deep process: small, but with everything that prediction must leave alone."""

    def __init__(self, masking=Masking(), *, frequencies="variational", seed=0, integrate=False):
        super().__init__()
        self.integrate = integrate
        generator = torch.Generator().manual_seed(seed)
        self.norm = nn.BatchNorm1d(6)
        self.first = MaskedLinear(6, 8, masking=UNMASKED, bias=True, std=0.5, generator=generator)
        options = {"frequencies": frequencies, "masking": masking, "generator": generator}
        self.gp = DeepGP([RandomFeatureGP(8, 5, **options), RandomFeatureGP(13, 4, n_rf=30, **options)])
        with torch.no_grad():
            self.gp.layers[-1].weights.weight.mul_(30)  # predictions that differ from sample to sample
        self.likelihood = Softmax()

    def stem(self, x):
        return self.first(self.norm(x)).relu()

    def sample(self, h, noise):
        if self.integrates(noise):
            return self.gp.latent(h, noise)
        return Latent(self.gp(h, noise).unflatten(0, (-1, len(h))))

    def kl(self):
        return self.first.kl() + self.gp.kl()


class Point(Model):
    """A network without any mask."""

    def __init__(self):
        super().__init__()
        self.linear = MaskedLinear(6, 4, masking=UNMASKED, bias=True, generator=torch.Generator().manual_seed(0))
        self.likelihood = Softmax()

    def sample(self, h, noise):
        return Latent(self.linear(h, noise).unsqueeze(0))

    def kl(self):
        return torch.zeros(())


def images(n=12, seed=0):
    return torch.randn(n, 6, generator=torch.Generator().manual_seed(seed))


def explicit(model, x, samples, seed=0):
    """Probabilities of each sample on its own, [S, N, Q], float64: what prediction averages."""
    model.sites()
    model = copy.deepcopy(model).eval()
    with torch.no_grad():
        logits = [model(x, Noise(seed, torch.tensor([s]), torch.arange(len(x)))).mean[0] for s in range(samples)]
    return reference.softmax(torch.stack(logits).double().numpy())


# Prediction


@pytest.mark.parametrize("masking", [Masking(), Masking(0.8, "shared"), Masking(0.7, inverted=True)])
def test_prediction_averages_probabilities_over_samples(masking):
    """Eq. (10) over explicit samples, in NumPy; the average of logits is something else."""
    model, x = Toy(masking), images()
    p = explicit(model, x, 50)
    result = predict(model, x, passes=50)
    np.testing.assert_allclose(result.probs, p.mean(0), atol=2e-6)  # float32
    of_mean_logits = reference.softmax(np.log(p).mean(0))
    assert np.abs(result.probs.numpy() - of_mean_logits).max() > 0.05
    assert result.samples == 50


def test_uncertainties_equal_numpys():
    model, x = Toy(), images()
    p = explicit(model, x, 30, seed=5)
    result = predict(model, x, passes=30, seed=5)
    mean = p.mean(0)
    entropy, expected = reference.entropy(mean), np.mean([reference.entropy(sample) for sample in p], 0)
    close = {"rtol": 1e-4, "atol": 5e-6}  # float32, differences of sums of squares
    np.testing.assert_allclose(result.entropy, entropy, **close)
    np.testing.assert_allclose(result.expected_entropy, expected, **close)
    np.testing.assert_allclose(result.mutual_information, entropy - expected, **close)
    np.testing.assert_allclose(result.variance, p.var(0, ddof=1), **close)
    np.testing.assert_allclose(result.spread, p.std(0, ddof=1), rtol=1e-3, atol=3e-3)
    np.testing.assert_allclose(result.monte_carlo_error, p.std(0, ddof=1) / math.sqrt(30), rtol=1e-3, atol=6e-4)
    np.testing.assert_array_equal(result.labels, mean.argmax(-1))
    np.testing.assert_allclose(result.confidence, mean.max(-1), **close)
    assert (result.mutual_information > 0.01).any()


def test_monte_carlo_error_is_the_scatter_of_repeated_predictions():
    """Over 60 seeds; the scatter of 60 numbers is known to 9 %, its mean over 48 to far less."""
    model, x = Toy(), images()
    results = [predict(model, x, passes=20, seed=seed) for seed in range(60)]
    found = torch.stack([result.probs for result in results]).var(0).mean().sqrt()
    stated = torch.stack([result.monte_carlo_error.square() for result in results]).mean().sqrt()
    assert found.item() == pytest.approx(stated.item(), rel=0.15)


@pytest.mark.parametrize("memory", [1, 2_000, 20_000, 10**9])
def test_memory_does_not_change_the_answer(memory):
    model, x = Toy(), images()
    whole, chunked = predict(model, x, passes=33), predict(model, x, passes=33, memory=memory)
    for name in ("log_probs", "expected_entropy", "variance"):
        torch.testing.assert_close(getattr(chunked, name), getattr(whole, name), **SEED_ONLY)


def test_memory_decides_how_many_rows_and_samples_are_computed_at_a_time():
    model, x = Toy(), images()
    sizes = []
    handle = model.gp.register_forward_hook(lambda module, inputs, f: sizes.append(len(f)))
    predict(model, x, passes=33, memory=1)
    assert sizes == [1] + [1] * (33 * 12)  # the first measures what a sample of a row takes
    sizes.clear()
    predict(model, x, passes=33)
    assert sizes == [1, 33 * 12]
    sizes.clear()
    one = 4 * 30 * 4  # four times the largest of a layer's results for one sample of a row: 30 numbers of 4 bytes
    predict(model, x, passes=33, memory=33 * 5 * one)
    assert sizes == [1, 33 * 5, 33 * 5, 33 * 2]
    sizes.clear()
    predict(model, x[:1], passes=33, memory=10 * one)
    assert sizes == [1, 10, 10, 10, 3]
    handle.remove()


@pytest.mark.parametrize("size", [1, 5, 12])
def test_batches_and_order_do_not_change_the_answer(size):
    model, x = Toy(), images()
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    batches = [(x[rows], rows) for rows in order.split(size)]
    whole, parts = predict(model, x, passes=7), predict(model, batches, passes=7)
    torch.testing.assert_close(parts.log_probs, whole.log_probs[order], **SEED_ONLY)
    torch.testing.assert_close(parts.variance, whole.variance[order], **SEED_ONLY)


def test_fewer_samples_are_a_prefix_of_more():
    """The first 20 of 50, and the other 30, recomputed one by one, make the 50."""
    model, x = Toy(), images()
    twenty, fifty = predict(model, x, passes=20), predict(model, x, passes=50)
    p = explicit(model, x, 50)
    np.testing.assert_allclose(twenty.probs, p[:20].mean(0), atol=2e-6)
    rest = p[20:].mean(0)
    np.testing.assert_allclose(fifty.probs, 0.4 * twenty.probs.numpy() + 0.6 * rest, atol=2e-6)


def test_same_seed_same_answer_other_seed_another():
    model, x = Toy(), images()
    assert torch.equal(predict(model, x, passes=5, seed=1).log_probs, predict(model, x, passes=5, seed=1).log_probs)
    assert not torch.allclose(predict(model, x, passes=5, seed=1).probs, predict(model, x, passes=5, seed=2).probs)


def test_prediction_leaves_the_model_and_the_generators_bit_for_bit():
    model, x = Toy(), images()
    model.train()
    model.norm.eval()
    model.gp.layers[0].eval()  # a mixed state
    model(x).mean.sum().backward()
    state = copy.deepcopy(model.state_dict())
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    modes = {name: module.training for name, module in model.named_modules()}
    assert set(modes.values()) == {True, False}
    torch.manual_seed(3)
    rng = torch.get_rng_state()
    predict(model, x, passes=9)
    assert torch.equal(rng, torch.get_rng_state())
    assert modes == {name: module.training for name, module in model.named_modules()}
    assert state.keys() == model.state_dict().keys()
    assert {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"} <= state.keys()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert (parameter.grad is None) == (gradient is None)
        assert gradient is None or torch.equal(parameter.grad, gradient)
    assert not any(module._forward_hooks for module in model.modules())


def test_batch_norm_in_training_mode_does_not_make_predictions_depend_on_the_batch():
    model, x = Toy(), images()
    model.train()
    whole = predict(model, x, passes=3)
    half = predict(model, x[:6], passes=3)
    torch.testing.assert_close(whole.log_probs[:6], half.log_probs, **SEED_ONLY)


def test_between_batches_the_model_and_the_gradients_are_the_callers():
    model, x = Toy().train(), images()
    for _ in predict_batches(model, [(x[:6], torch.arange(6)), (x[6:], torch.arange(6, 12))], passes=2):
        assert model.training
        assert torch.is_grad_enabled()


def test_an_error_inside_leaves_the_model_as_it_was():
    model = Toy().train()
    with pytest.raises(CalgpError, match="cannot take images of shape"):
        predict(model, torch.ones(3, 7), passes=2)
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks for module in model.modules())


def test_a_network_without_masks_needs_one_sample_and_has_no_variance():
    model, x = Point(), images()
    result = predict(model, x, passes=50)
    assert result.samples == 1
    assert (result.variance == 0).all()
    assert (result.mutual_information <= 1e-6).all()  # two ways to one number, in float32
    np.testing.assert_allclose(result.probs, explicit(model, x, 1)[0], atol=1e-6)


@pytest.mark.parametrize("scale", [1e3, 1e5])
def test_extreme_logits_predict_finite_log_probabilities_that_sum_to_one(scale):
    model, x = Toy(), images()
    with torch.no_grad():
        model.gp.layers[-1].weights.weight.mul_(scale)
    result = predict(model, x, passes=20)
    assert result.log_probs.isfinite().all()
    assert result.log_probs.min() < -100
    np.testing.assert_allclose(result.probs.sum(-1), 1, rtol=1e-5)
    for name in ("entropy", "expected_entropy", "mutual_information", "variance", "monte_carlo_error"):
        assert getattr(result, name).isfinite().all()


def test_parts_are_joined_in_order():
    model, x = Toy(), images()
    parts = [predict(model, [(x[rows], rows)], passes=3) for rows in torch.arange(12).split(5)]
    joined = Predictive.cat(parts)
    torch.testing.assert_close(joined.log_probs, predict(model, x, passes=3).log_probs, **SEED_ONLY)
    assert joined.samples == 3


def test_some_sample_is_needed():
    with pytest.raises(ValueError, match="passes ≥ 1"):
        predict(Toy(), images(), passes=0)


def test_float64_models_predict_in_float64():
    result = predict(Toy().double(), images().double(), passes=2)
    assert result.log_probs.dtype == torch.float64


# The bound


def test_parts_of_the_bound_are_the_mean_negative_log_likelihood_and_the_kl_per_datum():
    model, x, y = Toy(Masking(0.3)).double().eval(), images().double(), torch.arange(12) % 4
    bound = Bound(model, n=500)
    noise = Noise(1, torch.arange(1), torch.arange(12))
    nll, kl = bound(x, y, noise)
    p = reference.softmax(model(x, noise).mean[0].detach().numpy())
    assert nll.item() == pytest.approx(-np.mean([np.log(p[i, y[i]]) for i in range(12)]), rel=1e-10)
    squares = 0.5 * sum(v.square().sum().item() for v in (model.first.weight, model.first.bias))
    for layer in model.gp.layers:
        squares += 0.15 * layer.weights.weight.square().sum().item()
        squares += 0.15 * layer.frequencies.epsilon.square().sum().item()
    assert kl.item() == pytest.approx(squares / 500, rel=1e-10)


def test_three_samples_give_the_average_of_three_bounds():
    model, x, y = Toy().double().eval(), images().double(), torch.arange(12) % 4
    bound, rows = Bound(model, n=500), torch.arange(12)
    together, _ = bound(x, y, Noise(1, torch.arange(3), rows))
    alone = [bound(x, y, Noise(1, torch.tensor([s]), rows))[0].item() for s in range(3)]
    assert together.item() == pytest.approx(np.mean(alone), rel=1e-12)
    assert len({round(value, 6) for value in alone}) == 3


def test_bound_without_keys_draws_from_torchs_generator():
    bound, x, y = Bound(Toy().eval(), n=12), images(), torch.arange(12) % 4

    def nll(seed):
        torch.manual_seed(seed)
        return bound(x, y)[0].item()

    assert nll(0) == nll(0)
    assert nll(0) != nll(1)


def test_gradient_of_the_bound_reaches_every_trainable_parameter():
    bound, x, y = Bound(Toy(), n=12), images(), torch.arange(12) % 4
    sum(bound(x, y)).backward()
    for name, parameter in bound.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("frequencies", ["variational", "sorf"])
def test_minimising_lowers_the_bound_and_its_kl(frequencies):
    model, x, y = Toy(frequencies=frequencies), images(40), (images(40)[:, 0] > 0).long()
    bound, rows = Bound(model, n=40), torch.arange(40)
    optimiser = torch.optim.Adam(bound.parameters(), lr=0.01)

    def estimate():
        with torch.no_grad():
            return sum(bound(x, y, Noise(99, torch.arange(50), rows))).item()

    before, kl_before = estimate(), bound.model.kl().item()
    for step in range(40):
        optimiser.zero_grad()
        sum(bound(x, y, Noise(step, torch.arange(1), rows))).backward()
        optimiser.step()
    assert estimate() < 0.8 * before
    assert bound.model.kl().item() < kl_before


def test_kl_alone_has_its_minimum_at_zero_weights():
    """Without data the best q is the prior's centre: M → 0, as π/2 ‖M‖² says."""
    model = Toy(frequencies="sorf")
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    start = model.kl().item()
    for _ in range(40):
        optimiser.zero_grad()
        model.kl().backward()
        optimiser.step()
    assert model.kl().item() < 1e-6 * start


def test_sites_of_a_bound_are_those_of_its_model():
    """The bound names masks as prediction does: wrapping changes no key."""
    model = Toy()
    before = {name: mask.site for name, mask in model.sites().items()}
    Bound(model, n=1)
    assert {name: mask.site for name, mask in model.sites().items()} == before
    assert list(before) == [f"gp.layers.{i}.{part}.mask" for i in (0, 1) for part in ("frequencies", "weights")]


def test_a_long_tensor_is_predicted_in_batches_that_change_nothing():
    x = torch.randn(230, 6, generator=torch.Generator().manual_seed(0))
    whole = predict(Toy(), [(x, torch.arange(230))], passes=3)
    torch.testing.assert_close(predict(Toy(), x, passes=3).log_probs, whole.log_probs, **SEED_ONLY)


def test_nothing_to_predict_and_impossible_seeds_are_refused():
    with pytest.raises(ValueError, match="no images"):
        predict(Toy(), [])
    for seed in (-1, 2**63):
        with pytest.raises(ValueError, match="seed"):
            predict(Toy(), torch.zeros(1, 6), seed=seed)


def test_calibrated_probabilities_leave_what_the_samples_said():
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    before = predict(Toy(), x, passes=8)
    flatter = (before.log_probs / 2).log_softmax(-1)
    after = before.calibrated(flatter).calibrated(flatter)  # twice is the same as once
    assert after.probs.equal(flatter.exp()) and after.entropy.gt(before.entropy).all()
    for name in ("mutual_information", "expected_entropy", "spread", "monte_carlo_error"):
        assert getattr(after, name).equal(getattr(before, name)), name
    assert before.mutual_information.max() > 1e-3
    halves = Predictive.cat(
        predict(Toy(), [(x[rows], rows)], passes=8).calibrated(flatter[rows]) for rows in torch.arange(5).split(3)
    )
    torch.testing.assert_close(halves.mutual_information, after.mutual_information, rtol=0, atol=1e-5)


class OneGaussian(Point):
    """A network without any mask whose latent functions are Gaussian."""

    def sample(self, h, noise):
        mean = self.linear(h, noise).unsqueeze(0)
        return Latent(mean, torch.ones_like(mean))


@pytest.mark.parametrize("memory", [1, 10**4, 10**6])
def test_draws_of_a_gaussian_fit_in_the_memory_and_do_not_change_with_it(memory):
    model, x, sizes = OneGaussian(), images(), []
    whole = predict(model, x, passes=33)
    assert whole.samples == 33 * model.likelihood.draws
    log_probs = model.likelihood.log_probs
    model.likelihood.log_probs = lambda *args: sizes.append(log_probs(*args).numel()) or log_probs(*args)
    bounded = predict(model, x, passes=33, memory=memory)
    one_sample_of_a_row = 16 * 4  # draws and classes
    assert max(sizes[2:]) <= max(memory // 64, one_sample_of_a_row)  # 16 times the bytes of the result
    for name in ("log_probs", "expected_entropy", "variance"):
        torch.testing.assert_close(getattr(bounded, name), getattr(whole, name), **SEED_ONLY)


def test_a_point_is_computed_once_whatever_the_memory():
    result = predict(Point(), images(), passes=50, memory=1)
    assert result.samples == 1
    torch.testing.assert_close(result.log_probs, predict(Point(), images(), passes=50).log_probs)


# Passes: with the last layer integrated, once or several times, and without

ENGINES = {
    "one pass": {"passes": 1, "engine": "moments"},
    "passes": {"passes": 5, "engine": "moments"},
    "samples": {"passes": 5, "engine": "samples"},
}
every_engine = pytest.mark.parametrize("how", ENGINES.values(), ids=ENGINES)
SAME = {"rtol": 0, "atol": 1e-11}  # the same draws: float64 sums in another order
COLUMNS = ("log_probs", "expected_entropy", "variance")


@every_engine
@pytest.mark.parametrize("memory", [1, 5_000, 50_000])
@pytest.mark.parametrize("size", [1, 5, 12])
def test_draws_are_the_same_whatever_batch_order_and_chunk(how, size, memory):
    model, x = Toy(integrate=True).double(), images().double()
    whole = predict(model, x, seed=3, **how)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    parts = predict(model, [(x[rows], rows) for rows in order.split(size)], seed=3, memory=memory, **how)
    assert parts.samples == whole.samples
    for name in COLUMNS:
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name)[order], **SAME)


@every_engine
def test_the_same_seed_gives_the_same_bits_and_another_seed_other_draws(how):
    model, x = Toy(integrate=True), images()
    one, same, other = (predict(model, x, seed=seed, **how) for seed in (1, 1, 2))
    assert all(torch.equal(getattr(one, name), getattr(same, name)) for name in COLUMNS)
    assert not torch.allclose(one.probs, other.probs)


@every_engine
def test_every_engine_gives_all_that_is_known_of_uncertainty(how):
    """Entropy = expected entropy + mutual information; deviations of probabilities are theirs over the draws."""
    result = predict(Toy(integrate=True), images(), **how)
    torch.testing.assert_close(result.entropy, result.expected_entropy + result.mutual_information)
    assert (result.mutual_information > 1e-4).any() and (result.variance > 1e-4).any()
    assert (result.variance <= 0.25 * result.samples / (result.samples - 1)).all()


def test_one_pass_is_the_default_of_what_is_trained_with_its_last_layer_integrated():
    x = images()
    trained, sampled = Toy(integrate=True), Toy()
    assert torch.equal(predict(trained, x).log_probs, predict(trained, x, **ENGINES["one pass"]).log_probs)
    assert torch.equal(predict(sampled, x).log_probs, predict(sampled, x, passes=50, engine="samples").log_probs)
    assert torch.equal(predict(trained, x, engine="samples").log_probs, predict(sampled, x).log_probs)
    assert torch.equal(predict(sampled, x, engine="moments").log_probs, predict(trained, x).log_probs)


def at_their_mean(model, x):
    """Φ of the last layer with everything before it at its mean, by hand: masks are π."""
    first, last = model.gp.layers
    c = model.stem(x)
    hidden = first.kernel.expand(0.5 * c / first.kernel.lengthscale @ first.frequencies.epsilon) * 0.5
    fed = torch.cat([hidden @ first.weights.weight, c], -1)
    return last.kernel.expand(0.5 * fed / last.kernel.lengthscale @ last.frequencies.epsilon), last.weights.weight


def test_one_pass_has_everything_but_the_last_layer_at_its_mean():
    """And that integrated: as by 200,000 draws of N(π Φ M, π(1 − π) Σ_i Φ_i² M_i M_iᵀ)."""
    model, x = Toy(integrate=True).double().eval(), images().double()
    with torch.no_grad():
        phi, m = at_their_mean(model, x)
        covariance = 0.25 * torch.einsum("ni,iq,ir->nqr", phi.square(), m, m)
        root = torch.linalg.cholesky(covariance + 1e-9 * torch.eye(4))
    epsilon = torch.randn(100_000, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    deviation = torch.einsum("nqr,kr->knq", root, epsilon)
    f = torch.cat([0.5 * phi @ m + deviation, 0.5 * phi @ m - deviation])
    result = predict(model, x, **ENGINES["one pass"])
    assert result.samples == 256 and result.probs.max() > 0.4
    torch.testing.assert_close(result.probs, f.softmax(-1).mean(0), rtol=0, atol=5e-3)  # 256 quasi-random points
    assert (result.probs - f.softmax(-1).mean(0)).square().mean().sqrt() < 1e-3
    entropy = torch.special.entr(f.softmax(-1)).sum(-1).mean(0)
    torch.testing.assert_close(result.expected_entropy, entropy, rtol=0, atol=0.02)


def test_several_passes_draw_what_comes_before_and_integrate_the_last_layer_in_each():
    """By hand: a Gaussian for each sample of what comes before, its part of the quasi-random points for each."""
    model, x = Toy(integrate=True).double().eval(), images().double()
    result = predict(model, x, passes=8, engine="moments", seed=4)
    sobol = torch.quasirandom.SobolEngine(4, scramble=True, seed=4).draw(256, dtype=torch.float64)
    points = torch.special.ndtri(sobol).view(8, 32, 4)
    probs = torch.zeros(12, 4, dtype=torch.float64)
    for s in range(8):
        noise = Noise(4, torch.tensor([s]), torch.arange(12), integrate=True)
        with torch.no_grad():
            latent = model(x, noise)
        for n in range(12):
            order = latent.mean[0, n].argsort(descending=True)  # the largest mean has the first coordinate
            root = covariance_root(latent.covariance[0, n][order][:, order])
            f = latent.mean[0, n, order] + points[s] @ root.mT
            probs[n, order] += f.softmax(-1).mean(0) / 8
    torch.testing.assert_close(result.probs, probs, **SAME)
    assert result.samples == 256


def test_many_passes_with_the_last_layer_integrated_are_many_samples():
    """Rao and Blackwell: the same average, of which each pass knows a part exactly; 400 passes against 20,000."""
    model, x = Toy(), images()
    exact = predict(model, x, passes=20_000, engine="samples")
    found = predict(model, x, passes=400, engine="moments")
    samples = predict(model, x, passes=400, engine="samples")
    # 30 features: their Gaussian is off by up to 0.01
    bound = 5 * samples.monte_carlo_error + 0.01
    assert ((found.probs - exact.probs).abs() < bound).all()
    errors = [(each.probs - exact.probs).square().mean().sqrt() for each in (found, samples)]
    assert errors[0] < errors[1]


@pytest.mark.parametrize("how", [ENGINES["one pass"], ENGINES["passes"]], ids=["one pass", "passes"])
def test_what_is_kept_of_all_features_is_the_point_network(how):
    """keep → 1: the variance of masks is 1 − π, so probabilities come nearer in proportion; keep = 1 is the point."""
    x, distances = images().double(), []
    point = predict(Toy(Masking(1.0, inverted=True)).double(), x).probs
    for spare in (2**-6, 2**-9, 2**-12, 2**-15):
        model = Toy(Masking(1 - spare, inverted=True), integrate=True).double()
        distances.append((predict(model, x, **how).probs - point).abs().max().item())
    assert distances[-1] < 2e-3 and all(near < far for far, near in itertools.pairwise(distances))
    kept = predict(Toy(Masking(1.0, inverted=True), integrate=True).double(), x, **how)
    assert kept.samples == 1 and (kept.variance == 0).all()
    torch.testing.assert_close(kept.probs, point, rtol=0, atol=1e-15)


def test_a_gaussian_of_a_network_without_masks_is_integrated_by_all_points_whatever_the_passes():
    """They differ only in their points, of which there are as many as those of one pass, or more."""
    model, x = OneGaussian(), images()
    one, several = (predict(model, x, passes=passes, engine="moments") for passes in (1, 16))
    assert one.samples == 256 and several.samples == 16 * 16
    torch.testing.assert_close(one.probs, several.probs)  # the same sequence in other parts
    # f has a deviation of 1: 256 points are off by 2e-3, the 32,000 draws by 1e-3
    error = one.probs - predict(model, x, passes=2000, engine="samples").probs
    assert error.square().mean().sqrt() < 3e-3 and error.abs().max() < 8e-3


def test_images_that_a_model_cannot_take_are_refused_in_one_sentence():
    x = torch.rand(3, 6)
    for given, said in (
        ((255 * x).to(torch.uint8), "Invalid images of torch.uint8: must be of torch.float32, as the model is; divide"),
        (x.double(), "Invalid images of torch.float64: must be of torch.float32"),
        (x[:0], r"Invalid images of shape \[0, 6\]: must be one tensor"),
        (torch.rand(()), r"Invalid images of shape \[\]"),
        (torch.rand(3, 5), r"The model cannot take images of shape \[3, 5\]: "),
    ):
        with pytest.raises(CalgpError, match=said):
            predict(Toy(), given, passes=2)


def test_of_a_wrapper_the_module_inside_is_asked_for(unchecked):
    with pytest.raises(CalgpError, match=r"Invalid model, DataParallel.*give its `module`"):
        predict(nn.DataParallel(Toy()), torch.zeros(2, 6))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (np.zeros((2, 6), np.float32), "Invalid images, ndarray: must be one tensor of images"),
        ("photo.png", "Invalid images, str: must be one tensor"),
        ([torch.zeros(2, 6)], "Invalid batch, Tensor: must be images and their rows"),
        ([(torch.zeros(2, 6), "rows")], "Invalid batch, tuple: must be images and their rows"),
    ],
    ids=["array", "name", "no rows", "rows of text"],
)
def test_what_is_no_images_at_all_is_refused_in_one_sentence(given, said, unchecked):
    """Without the type checks of the tests, which would be first."""
    with pytest.raises(CalgpError, match=said):
        predict(Toy(), given)
