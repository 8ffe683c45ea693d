"""Intervals over seeds and test images: closed forms, and how often equal methods are told apart."""

import functools
import math

import numpy as np
import pytest
import torch
from scipy import stats

from calgp import metrics
from calgp.metrics import Outcomes
from calgp.paper import verdicts
from calgp.paper.intervals import Estimate, estimate, seed_error
from calgp.paper.rows import PAPER, Resampled, Row, difference

CHECKSUM, IMAGES = "the same images", 300


def test_interval_of_seeds_is_students():
    # s = 0.01, n = 3: half = t₂ s / √3
    found = estimate([0.10, 0.11, 0.12], test_error=0.0)
    assert found.half() == pytest.approx(stats.t.ppf(0.975, 2) * 0.01 / math.sqrt(3))


def test_seeds_and_test_images_add_in_quadrature():
    seeds, both = estimate([0.10, 0.11, 0.12], 0.0), estimate([0.10, 0.11, 0.12], 0.03)
    assert both.half() == pytest.approx(math.hypot(seeds.half() or 0, stats.norm.ppf(0.975) * 0.03))


def test_the_correction_for_many_comparisons_has_students_quantiles():
    """The normal quantiles of forty comparisons would widen by 1.65; Student's with two degrees of freedom by 6.6."""
    found = Estimate(0.1, seed_error=0.01, freedom=2, test_error=0.0)
    assert found.half(40) == pytest.approx(0.01 * stats.t.ppf(1 - 0.025 / 40, 2))
    assert (found.half(40) or 0) / (found.half() or 1) == pytest.approx(6.56, abs=0.01)


def test_one_seed_has_the_interval_of_its_test_images_and_says_so():
    found = estimate([0.1], test_error=0.02)
    assert found.one_seed
    assert found.half() == pytest.approx(stats.norm.ppf(0.975) * 0.02)
    assert estimate([0.1, 0.2], test_error=None).half() is None


def test_the_variance_of_seeds_is_pooled():
    error, freedom = seed_error([0.1, 0.2], [0.5, 0.6])
    assert (error, freedom) == (pytest.approx(math.sqrt(0.005)), 2)  # s² = 0.005, 1/2 + 1/2
    assert seed_error([0.1, 0.2], [0.5]) == (pytest.approx(math.sqrt(0.005 * 1.5)), 1)
    assert seed_error([0.1], [0.5]) == (None, 0)


@pytest.mark.parametrize("freedom", [2, 4])
@pytest.mark.parametrize("share", [0.0, 0.1, 1.0, 10.0])  # variance over test images, that of seeds being 1
def test_equal_normal_numbers_are_distinguished_in_at_most_5_percent(freedom, share):
    """100,000 differences; also in families of 40, where Welch and Satterthwaite's quantile fails by far."""
    chance = np.random.default_rng(0)
    value = chance.normal(size=100_000) * math.sqrt(1 + share)
    squared = chance.chisquare(freedom, 100_000) / freedom

    def rate(comparisons: int) -> float:
        alpha = 0.025 / comparisons
        t, z = stats.t.ppf(1 - alpha, freedom), stats.norm.ppf(1 - alpha)
        half = Estimate(0, 1.0, freedom, math.sqrt(share)).half(comparisons)
        assert half == pytest.approx(math.hypot(t, z * math.sqrt(share)))  # the formula below is the code's
        return comparisons * np.mean(np.abs(value) > np.sqrt(t**2 * squared + z**2 * share))

    assert rate(1) <= 0.05 + 4 * math.sqrt(0.05 / 100_000)
    assert rate(40) <= 0.05 + 4 * math.sqrt(40 * 0.05 / 100_000)


def test_one_quantile_by_welch_and_satterthwaite_would_be_too_narrow():
    chance = np.random.default_rng(0)
    squared, share = chance.chisquare(2, 100_000) / 2, 0.1
    value = chance.normal(size=100_000) * math.sqrt(1 + share)
    freedom = (squared + share) ** 2 / (squared**2 / 2)

    def rate(comparisons: int) -> float:
        quantile = stats.t.ppf(1 - 0.025 / comparisons, freedom)
        return comparisons * np.mean(np.abs(value) > quantile * np.sqrt(squared + share))

    assert rate(1) > 0.07
    assert rate(40) > 0.5


# the whole way, from simulated predictions of single images to a verdict ----------------------------------------------


def outcomes(
    chance: np.random.Generator, hardness: np.ndarray, seed_effect: float, better: tuple[float, ...] = (0.0,)
) -> list[Outcomes]:
    """Runs on images of class 1: some images are hard for all runs, a run is better or worse as a whole, and each
    prediction varies. The probabilities are somewhat over-confident."""
    logit = np.concatenate([
        1.5 + more + seed_effect * chance.normal() - 1.5 * hardness + 0.7 * chance.normal(size=len(hardness))
        for more in better
    ])  # fmt: skip
    log_probs = -np.log1p(np.exp(1.3 * np.stack([logit, -logit], 1))).astype(np.float32)
    whole = metrics.outcomes(torch.from_numpy(log_probs), torch.ones(len(logit), dtype=torch.long))
    images = torch.arange(len(hardness))
    return [whole.take(images + run * len(hardness)) for run in range(len(better))]


@functools.cache
def weights_of(images: int) -> torch.Tensor:
    """The same for all rows, as for all runs on the same images."""
    return metrics.resample_weights(images, seed=0)


def simulated_row(method: str, runs: list[Outcomes], panel: str = "p") -> Row:
    weights = weights_of(len(runs[0]))
    found = [metrics.scores(run).to_dict() for run in runs]
    resampled = [metrics.resampled_scores(run, weights) for run in runs]
    values = {name: tuple(scores[name] for scores in found) for name in PAPER}
    means = {name: torch.stack([each[name] for each in resampled]).mean(0) for name in PAPER}
    return Row(method, panel, None, values, resampled=Resampled(CHECKSUM, means))


def simulated_pair(chance, seeds: int, seed_effect: float, better: float = 0.0, panel: str = "p") -> list[Row]:
    hardness = chance.normal(size=IMAGES)
    runs = outcomes(chance, hardness, seed_effect, (better,) * seeds + (0.0,) * seeds)
    return [simulated_row("a", runs[:seeds], panel), simulated_row("b", runs[seeds:], panel)]


SETTINGS = [(2, 0.0), (2, 0.2), (3, 0.2), (3, 1.0)]  # seeds, effect of a seed


@pytest.mark.slow
@pytest.mark.parametrize(("seeds", "seed_effect"), SETTINGS)
def test_in_every_setting_at_most_5_percent_are_distinguished(seeds, seed_effect):
    """Of 1,000 pairs of methods that are the same up to a seed, by each metric.

    Where seeds alone matter the test is exact, so that two standard errors of chance are allowed.
    """
    chance, apart = np.random.default_rng(1), dict.fromkeys(PAPER, 0)
    for _ in range(1000):
        for part in verdicts.lower("a < b", ("a",), ("b",))(simulated_pair(chance, seeds, seed_effect)).parts:
            apart[part.metric] += part.state in ("held", "not held")
    assert max(apart.values()) <= 50 + 2 * math.sqrt(1000 * 0.05 * 0.95), apart


def test_a_clear_difference_is_found():
    chance = np.random.default_rng(1)
    found = 0
    for _ in range(20):
        rows = simulated_pair(chance, 3, 0.1, better=1.5)
        found += verdicts.lower("a < b", ("a",), ("b",), ("mnll",))(rows).state == "held"
    assert found >= 18


@pytest.mark.slow
def test_a_claim_over_many_panels_of_equal_methods_is_hardly_ever_decided():
    chance = np.random.default_rng(2)
    states = []
    for _ in range(60):
        rows = [row for place in range(6) for row in simulated_pair(chance, 2, 0.2, panel=str(place))]
        states.append(verdicts.lower("a < b", ("a",), ("b",), ("err", "ece"))(rows).state)
    assert sum(state != "undecided" for state in states) <= 3, states


def test_pairing_narrows_the_interval_of_methods_that_err_on_the_same_images():
    chance = np.random.default_rng(3)
    a, b = simulated_pair(chance, 2, 0.0)
    paired = difference(a, b, "mnll")
    alone = [float(row.resampled.metrics["mnll"].std()) for row in (a, b) if row.resampled]
    assert paired is not None and paired.test_error is not None
    assert paired.test_error < 0.9 * math.hypot(*alone)


def test_rows_of_other_images_are_not_paired():
    a, b = simulated_pair(np.random.default_rng(3), 2, 0.0)
    assert b.resampled is not None
    other = Row("b", "p", None, b.values, resampled=Resampled("other images", b.resampled.metrics))
    found = difference(a, other, "mnll")
    alone = [float(row.resampled.metrics["mnll"].std()) for row in (a, b) if row.resampled]
    assert found is not None and found.test_error == pytest.approx(math.hypot(*alone))


def test_the_paired_error_is_that_of_the_mean_difference_per_image():
    """For a mean, the bootstrap must agree with the closed form √(var(aᵢ − bᵢ) / N)."""
    chance = np.random.default_rng(4)
    hardness = chance.normal(size=2000)
    runs = outcomes(chance, hardness, 0.0, (0.0, 0.0))
    found = difference(simulated_row("a", runs[:1]), simulated_row("b", runs[1:]), "mnll")
    gaps = runs[1].label_log_prob - runs[0].label_log_prob
    assert found is not None and found.test_error == pytest.approx(float(gaps.std()) / math.sqrt(2000), rel=0.1)
