import dataclasses

import numpy as np
import pytest
import torch

from calgp.data import load
from calgp.gp import Mixture, Passes, Sampling, label_is_decided, predict
from calgp.gp.sampling import BETS
from calgp.methods import METHODS
from calgp.nets import LeNet, Task
from golden import sampled_run

ROUNDING = {"rtol": 0, "atol": 1e-5}  # what may differ with chunks: float32 sums in another order


@pytest.fixture(scope="module")
def model():
    return sampled_run().model().eval()


@pytest.fixture(scope="module")
def x():
    return load("digits", "test").pixels(slice(0, 4))


def test_instalments_give_what_predict_gives(model, x):
    sampling = Sampling(model, x, torch.arange(4), seed=3)
    drawn = torch.cat([sampling.draw(count) for count in (1, 5, 6)])
    found, wanted = sampling.predictive(), predict(model, x, passes=12, seed=3)
    assert sampling.drawn == found.samples == 12
    torch.testing.assert_close(found.probs, wanted.probs, **ROUNDING)
    torch.testing.assert_close(found.spread, wanted.spread, **ROUNDING)
    torch.testing.assert_close(found.expected_entropy, wanted.expected_entropy, **ROUNDING)
    torch.testing.assert_close(drawn.mean(0), wanted.probs, **ROUNDING)


def test_those_that_leave_change_nothing_for_those_that_stay(model, x):
    sampling = Sampling(model, x, torch.arange(4), seed=0)
    sampling.draw(3)
    sampling.keep(torch.tensor([1, 3]))
    sampling.draw(3)
    wanted = predict(model, x, passes=6, seed=0)
    assert len(sampling) == 2
    torch.testing.assert_close(sampling.predictive().probs, wanted.probs[[1, 3]], **ROUNDING)
    torch.testing.assert_close(sampling.predictive().spread, wanted.spread[[1, 3]], **ROUNDING)


def test_a_sample_of_an_ensemble_is_the_mean_of_its_members(x):
    members = [sampled_run().model() for _ in range(2)]
    sampling = Sampling(Mixture(members).eval(), x, torch.arange(4), seed=0)
    drawn = sampling.draw(5)
    assert drawn.shape == (5, 4, 10)
    torch.testing.assert_close(drawn.mean(0), sampling.predictive().probs, **ROUNDING)


@pytest.mark.parametrize("name", ["gpdnn", "gpdnn-mcd", "cnn-gp-sorf", "cnn-gp-mf"])
@pytest.mark.parametrize("engine", ["samples", "moments"])
@pytest.mark.parametrize("members", [1, 2])
def test_a_sample_is_the_same_alone_and_among_others(name, engine, members, x):
    """Where a sample is a Gaussian of which f is drawn: its probabilities are the average of its own draws."""
    method, task = dataclasses.replace(METHODS[name], lengthscale=0.1), Task(1, 28, 28, 10)  # functions that vary
    generators = [torch.Generator().manual_seed(seed) for seed in range(members)]
    models = [method.build(task, LeNet(channels=(4, 4)), generator=generator) for generator in generators]
    model = models[0] if members == 1 else Mixture(models)
    how = Passes(6, engine)
    together = Sampling(model.eval(), x, torch.arange(4), seed=3, how=how).draw(6)
    sampling = Sampling(model, x, torch.arange(4), seed=3, how=how)
    torch.testing.assert_close(torch.cat([sampling.draw(1) for _ in range(6)]), together, **ROUNDING)
    torch.testing.assert_close(together.mean(0), predict(model, x, passes=6, engine=engine, seed=3).probs, **ROUNDING)
    assert (together.std(0) > 1e-4).any()


def test_nothing_is_known_before_the_first_sample(model, x):
    with pytest.raises(ValueError, match="no sample"):
        Sampling(model, x, torch.arange(4), seed=0).predictive()


def naive_settled(probs: np.ndarray, error: float) -> list[bool]:
    found = []
    for n in range(probs.shape[1]):
        p = probs[:, n]
        leading = p.mean(0).argmax()
        won = True
        for other in set(range(p.shape[1])) - {leading}:
            capitals = [np.prod([1 + bet * (row[leading] - row[other]) for row in p]) for bet in BETS]
            won &= np.mean(capitals) >= (p.shape[1] - 1) / error
        found.append(bool(won))
    return found


def test_settling_is_its_naive_version():
    generator = np.random.default_rng(0)
    sharpness = np.geomspace(0.5, 30, 60)[None, :, None]
    probs = np.exp(sharpness * (generator.random((20, 60, 4)) + np.array([0.8, 0, 0, 0])))
    probs /= probs.sum(-1, keepdims=True)
    wanted = naive_settled(probs, 0.05)
    assert 10 < sum(wanted) < 50
    assert label_is_decided(torch.from_numpy(probs), 0.05).tolist() == wanted


def test_unanimous_samples_settle_soon_and_level_ones_never():
    sure = torch.tensor([0.98, 0.01, 0.01]).expand(1000, 1, 3)
    # with λ = 1 alone the capital is 1.97^S / 5, so that ln(2 / 0.01 · 5) / ln 1.97 = 10.2 samples are needed
    assert not label_is_decided(sure[:10], 0.01)
    assert label_is_decided(sure[:11], 0.01)
    assert not label_is_decided(torch.full((1000, 1, 3), 1 / 3), 0.01)
    assert label_is_decided(torch.ones(1, 1, 1), 0.01)  # a single class is certain


@pytest.mark.parametrize("scale", [2.0, 20.0])
def test_wrong_labels_are_settled_on_no_more_often_than_promised(scale):
    """The hardest case: two classes of nearly equal mean, the second a little ahead; 600 trials, 16 looks at each."""
    generator = torch.Generator().manual_seed(0)
    trials, most, error = 600, 128, 0.2
    noise = torch.randn(most, trials, 3, generator=generator, dtype=torch.float64)
    probs = (scale * noise + torch.tensor([0.0, 0.02 * scale, -1.0])).softmax(-1)
    wrong, open_ = torch.zeros(trials, dtype=torch.bool), torch.ones(trials, dtype=torch.bool)
    for samples in range(8, most + 1, 8):
        now = label_is_decided(probs[:samples], error) & open_
        wrong |= now & (probs[:samples].mean(0).argmax(-1) != 1)
        open_ &= ~now
    rate = wrong.double().mean().item()
    assert 0 < rate <= error  # some do err, or the test would show nothing; the promise holds with room to spare
