import itertools
import json
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import reference
from calgp.data import load
from calgp.errors import CalgpError
from calgp.posthoc.decisions import (
    KINDS,
    SCORES,
    PredictionSets,
    Selection,
    binomial_cdf,
    clopper_pearson,
    conformal_quantile,
    conformity,
    keyed_uniform,
    risk_coverage,
    uncertainty,
)
from calgp.runs import FittedDecisions, shipped_run
from calgp.runs.record import parse, to_json

SPLITS = 200
CHANCE = 1e-4  # that a right implementation fails a test of chance, were its seed not fixed


def predictions(n=300, classes=5, seed=0):
    """Log-probabilities that the labels are drawn from, and uniform numbers."""
    generator = torch.Generator().manual_seed(seed)
    log_probs = (2 * torch.randn(n, classes, generator=generator, dtype=torch.float64)).log_softmax(1)
    y = torch.multinomial(log_probs.exp(), 1, generator=generator).squeeze(1)
    return log_probs, y, torch.rand(n, generator=generator, dtype=torch.float64)


@pytest.fixture(scope="module")
def real():
    """The shipped run's predictions of 1,000 test digits: columns, and a uniform number for each image."""
    folder = shipped_run()
    columns = folder.predictions("digits", None, classes=10)
    return columns | {"uniform": keyed_uniform(load("digits", "test").x)}


# --- uncertainty and the risk–coverage curve -----------------------------------------------------------------------


def test_uncertainty_is_one_less_confidence_entropy_or_mutual_information(real):
    assert set(SCORES) == {"confidence", "entropy", "mutual-information"}
    torch.testing.assert_close(uncertainty(real), 1 - real["confidence"].double())
    assert uncertainty(real, "entropy").equal(real["entropy"].double())
    assert uncertainty(real, "mutual-information").equal(real["mutual_information"].double())
    with pytest.raises(CalgpError, match="no score 'luck'; known: confidence, entropy, mutual-information"):
        uncertainty(real, "luck")


def test_the_curve_is_that_of_a_naive_loop():
    generator = torch.Generator().manual_seed(0)
    scores, wrong = torch.rand(200, generator=generator), torch.rand(200, generator=generator) < 0.3
    curve = risk_coverage(scores, wrong)
    expected = reference.risk_coverage(scores.tolist(), wrong.tolist())
    np.testing.assert_allclose(curve.risk, expected, rtol=1e-12)
    np.testing.assert_allclose(curve.coverage, np.arange(1, 201) / 200)
    assert curve.aurc == pytest.approx(np.mean(expected), rel=1e-12)


def test_equal_uncertainties_count_as_the_mean_over_all_orders():
    scores, wrong = [0.1, 0.2, 0.2, 0.2, 0.5, 0.5], [False, True, False, False, True, False]
    curves = [
        reference.risk_coverage([d + 1e-6 * e for d, e in zip(scores, order, strict=True)], wrong)
        for order in itertools.permutations(range(6))
    ]
    found = risk_coverage(torch.tensor(scores), torch.tensor(wrong))
    np.testing.assert_allclose(found.risk, np.mean(curves, 0), rtol=1e-12)


def test_the_best_order_has_no_excess_and_the_worst_the_most():
    wrong = torch.tensor([False] * 90 + [True] * 10)
    assert risk_coverage(torch.arange(100), wrong).excess == pytest.approx(0, abs=1e-15)
    worst = risk_coverage(-torch.arange(100), wrong)
    every = [risk_coverage(torch.rand(100, generator=torch.Generator().manual_seed(s)), wrong) for s in range(20)]
    assert all(0 < curve.excess < worst.excess for curve in every)


def test_the_best_area_is_near_its_closed_form():
    """Geifman et al. (2019): AURC* ≈ r + (1 − r) ln(1 − r), by an integral instead of the sum: O(1/n) apart."""
    wrong = torch.arange(20_000) >= 17_000
    r = 0.15
    assert risk_coverage(torch.arange(20_000), wrong).aurc == pytest.approx(r + (1 - r) * math.log(1 - r), abs=1e-4)


def test_uncertainty_that_says_nothing_has_the_error_rate_at_every_coverage():
    curve = risk_coverage(torch.zeros(50), torch.arange(50) < 10)
    torch.testing.assert_close(curve.risk, torch.full((50,), 0.2, dtype=torch.float64))


# --- binomial ------------------------------------------------------------------------------------------------------


def tail(k, n, p):
    """P(Binomial(n, p) ≤ k) by whole numbers: a float is a fraction."""
    up, down = Fraction(p).as_integer_ratio()
    return float(Fraction(sum(math.comb(n, i) * up**i * (down - up) ** (n - i) for i in range(k + 1)), down**n))


@pytest.mark.parametrize(
    ("k", "n", "p"),
    [(0, 10, 0.1), (3, 10, 0.9), (10, 10, 0.5), (11, 10, 0.5), (9, 10, 1.0), (0, 10, 0.0), (12, 900, 0.01)],
)
def test_the_binomial_tail_is_the_sum_of_its_terms(k, n, p):
    assert binomial_cdf(k, n, p) == pytest.approx(tail(min(k, n), n, p), rel=1e-12)


@pytest.mark.parametrize(("k", "n"), [(1, 2), (7, 300), (299, 300)])
def test_both_ends_of_the_interval_leave_half_the_rest_beyond(k, n):
    low, high = clopper_pearson(k, n, 0.9)
    assert 1 - tail(k - 1, n, low) == pytest.approx(0.05, rel=1e-9)  # k or more would be seen so rarely
    assert tail(k, n, high) == pytest.approx(0.05, rel=1e-9)


@pytest.mark.parametrize(("k", "n"), [(0, 1), (1, 1), (0, 300), (7, 300), (300, 300), (19, 1000)])
@pytest.mark.parametrize("confidence", [0.9, 0.95, 0.999])
def test_the_interval_is_scipy_s(k, n, confidence):
    expected = stats.binomtest(k, n).proportion_ci(confidence, method="exact")
    assert clopper_pearson(k, n, confidence) == pytest.approx((expected.low, expected.high), rel=1e-8, abs=1e-12)


def test_nothing_seen_says_nothing():
    assert clopper_pearson(0, 0) == (0, 1)


# --- thresholds ----------------------------------------------------------------------------------------------------


def test_the_empirical_threshold_answers_the_most_that_the_hold_out_allows():
    scores = torch.tensor([0.5, 0.1, 0.3, 0.2, 0.4, 0.6])
    wrong = torch.tensor([True, False, True, False, False, False])
    found = Selection.fit(scores, wrong, error=0.25, confidence=None)
    assert (found.answered, found.wrong) == (4, 1)  # 0.1, 0.2, 0.3 (wrong), 0.4
    assert found.abstains(scores).tolist() == [True, False, False, False, False, True]
    every = [(wrong[scores < t].double().mean().item(), (scores < t).sum().item()) for t in (*scores.tolist(), 1)]
    assert found.answered == max(n for risk, n in every if risk <= 0.25)


def test_equal_uncertainties_are_answered_together_or_not_at_all():
    scores = torch.tensor([0.1, 0.1, 0.2, 0.2, 0.2])
    found = Selection.fit(scores, torch.tensor([False, False, False, True, False]), error=0.1, confidence=None)
    assert found.answered == 2 and found.abstains(scores).tolist() == [False, False, True, True, True]


def test_a_model_that_is_good_enough_answers_everything():
    found = Selection.fit(torch.rand(400), torch.zeros(400, dtype=torch.bool), error=0.01)
    assert found.threshold is None and found.answered == 400 and found.warning is None
    assert not found.abstains(torch.tensor([0.0, 1.0, 1e9])).any()


def test_the_guaranteed_threshold_passes_the_exact_bound():
    """Whatever share of δ it had, the chosen count passes Clopper and Pearson's one-sided bound at the whole of δ."""
    generator = torch.Generator().manual_seed(1)
    scores = torch.rand(3000, generator=generator)
    wrong = torch.rand(3000, generator=generator) < 0.1 * scores**2
    found = Selection.fit(scores, wrong, error=0.02, confidence=0.9)
    answered = ~found.abstains(scores)
    assert (found.answered, found.wrong) == (int(answered.sum()), int((wrong & answered).sum()))
    assert stats.beta.ppf(0.9, found.wrong + 1, found.answered - found.wrong) <= 0.02
    assert found.answered < Selection.fit(scores, wrong, error=0.02, confidence=None).answered


@pytest.mark.parametrize(("error", "confidence"), [(0.01, 0.95), (0.05, 0.9), (0.001, 0.99)])
def test_the_least_hold_out_that_can_show_a_target_is_named(error, confidence):
    least = next(n for n in itertools.count(1) if (1 - error) ** n <= 1 - confidence)
    right = torch.zeros(least, dtype=torch.bool)
    assert Selection.fit(torch.rand(least), right, error=error, confidence=confidence).answered == least
    found = Selection.fit(torch.rand(least - 1), right[1:], error=error, confidence=confidence)
    assert f"at least {least:,} held-out images" in found.warning
    assert found.threshold == 0 and found.abstains(torch.zeros(3)).all()


def test_a_target_out_of_reach_abstains_from_everything_and_says_so():
    generator = torch.Generator().manual_seed(0)
    wrong = torch.rand(1000, generator=generator) < 0.5
    found = Selection.fit(torch.rand(1000, generator=generator), wrong, error=0.1)
    assert found.answered == 0 and "No threshold shows" in found.warning and "abstains from everything" in found.warning
    same = Selection.fit(torch.zeros(1000), wrong, error=0.1)
    assert "same uncertainty" in same.warning


def draws(columns, n, seed):
    """A hold-out drawn with replacement: the columns are then the whole population, and true errors are known."""
    index = torch.randint(len(columns["y"]), (n,), generator=torch.Generator().manual_seed(seed))
    return {name: value[index] for name, value in columns.items()}


def true_error(selection, columns, score):
    answered = ~selection.abstains(uncertainty(columns, score))
    return (columns["label"] != columns["y"])[answered].double().mean().item() if answered.any() else 0.0


@pytest.mark.parametrize("score", SCORES)
def test_the_guarantee_holds_over_draws_of_the_hold_out(real, score):
    """P(true error > target) ≤ δ: of 200 draws more than the binomial's 1 − 10⁻⁴ quantile would refute it."""
    error, delta, broken, answered = 0.01, 0.1, 0, []
    for seed in range(SPLITS):
        held_out = draws(real, 800, seed)
        wrong = held_out["label"] != held_out["y"]
        found = Selection.fit(uncertainty(held_out, score), wrong, error=error, confidence=1 - delta, score=score)
        broken += true_error(found, real, score) > error
        answered.append(found.answered / 800)
    assert broken <= stats.binom.ppf(1 - CHANCE, SPLITS, delta)
    assert np.mean(answered) > 0.5  # and it is no empty promise: this run errs on 1.9 % of all


def test_the_empirical_threshold_has_no_guarantee(real):
    """Why it is not the default: the target is missed far more often than one time in twenty."""
    broken = 0
    for seed in range(SPLITS):
        held_out = draws(real, 800, seed)
        wrong = held_out["label"] != held_out["y"]
        broken += (
            true_error(Selection.fit(uncertainty(held_out), wrong, error=0.01, confidence=None), real, "confidence")
            > 0.01
        )
    assert broken > stats.binom.ppf(1 - CHANCE, SPLITS, 0.05)


def test_a_search_over_thresholds_that_all_fail_finds_one_no_more_often_than_promised():
    """Doubt tells nothing and the error is just above the target: every threshold is a mistake. δ still holds."""
    generator, found, delta = torch.Generator().manual_seed(0), 0, 0.1
    for _ in range(400):
        wrong = torch.rand(600, generator=generator) < 0.051
        found += (
            Selection.fit(torch.rand(600, generator=generator), wrong, error=0.05, confidence=1 - delta).answered > 0
        )
    assert found <= stats.binom.ppf(1 - CHANCE, 400, delta)


# --- conformal sets ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_those_of_a_naive_loop(kind):
    log_probs, _, u = predictions(n=50)
    log_probs[0] = torch.tensor([0.2] * 5).log()  # equal ones
    found = conformity(log_probs, kind, u)
    for i, probs in enumerate(log_probs.exp().tolist()):
        for k in range(5):
            draw = u[i].item() if kind == "aps" else 0.0
            expected = reference.lac_score(probs, k) if kind == "lac" else reference.aps_score(probs, k, draw)
            assert found[i, k].item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(n=st.integers(1, 400), percent=st.integers(1, 99))
def test_the_quantile_is_the_exact_order_statistic(n, percent):
    scores = torch.randperm(n, generator=torch.Generator().manual_seed(n)).double()
    k = reference.conformal_rank(n, percent, 100)
    if k > n:
        least = math.ceil(percent / (100 - percent) - 1e-12)
        with pytest.raises(CalgpError, match=f"at least {least} held-out images; there are {n}"):
            conformal_quantile(scores, percent / 100)
    else:
        assert conformal_quantile(scores, percent / 100) == k - 1  # the scores are 0 … n − 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("by_class", [False, True])
def test_sets_hold_the_classes_whose_scores_are_small_enough(kind, by_class):
    log_probs, y, u = predictions(n=600)
    options = {"coverage": 0.8, "kind": kind, "by_class": by_class, "empty": True}
    sets = PredictionSets.fit(log_probs[:500], y[:500], uniform=u[:500], **options)
    found = sets.apply(log_probs[500:], u[500:])
    s, s_new = conformity(log_probs[:500], kind, u[:500]).numpy(), conformity(log_probs[500:], kind, u[500:]).numpy()
    for k in range(5):
        chosen = [i for i in range(500) if not by_class or y[i] == k]
        mine = sorted(s[i, y[i]] for i in chosen)
        threshold = mine[reference.conformal_rank(len(chosen), 8, 10) - 1]
        assert found[:, k].tolist() == (s_new[:, k] <= threshold).tolist()


def test_sets_may_be_empty_only_if_asked():
    log_probs, y, u = predictions(n=2000, classes=3)
    log_probs = (20 * log_probs).log_softmax(1)
    y = log_probs.argmax(1)  # always right: half of the images cover a half
    options = {"coverage": 0.5, "kind": "aps", "uniform": u}
    empty, full = (
        PredictionSets.fit(log_probs, y, empty=flag, **options).apply(log_probs, u) for flag in (True, False)
    )
    assert not empty.any(1).all() and full.any(1).all()
    gained = full & ~empty
    assert gained.any(1).equal(~empty.any(1))  # the empty ones alone
    assert gained.nonzero()[:, 1].equal(log_probs.argmax(1)[~empty.any(1)])  # by their most probable class
    covered = [sets.gather(1, y[:, None]).double().mean().item() for sets in (empty, full)]
    assert covered[0] == pytest.approx(0.5, abs=1e-3) and covered[1] == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("coverage", [0.9, 0.95])
def test_coverage_over_random_splits_is_that_of_its_exact_law(real, kind, coverage):
    """Of m images, those covered by n others are Beta-binomial(m, k, n + 1 − k), k = ⌈(n + 1) coverage⌉: only ranks
    matter, and all are equally likely in a random split of any 1,000 images whose scores differ.

    The mean over 200 splits must be within z σ / √200 of its own mean, z for a chance of 10⁻⁴ on two sides; its own
    mean is k / (n + 1) ≥ coverage. Where scores are equal, more may be covered, never less: LAC has some where a
    probability rounds to 1, far from these quantiles; aps-plain has most of them at 0, so it keeps the lower bound.
    """
    n, m = 500, 500
    shares = np.array([splits_coverage(real, kind, coverage, n, seed) for seed in range(SPLITS)])
    k = math.ceil((n + 1) * coverage)
    law = stats.betabinom(m, k, n + 1 - k)
    bound = stats.norm.isf(CHANCE / 2) * law.std() / m / math.sqrt(SPLITS)
    assert law.mean() / m >= coverage
    assert shares.mean() >= law.mean() / m - bound
    assert (shares * m).min() >= law.ppf(CHANCE / SPLITS)  # each split by itself
    if kind != "aps-plain":
        assert shares.mean() <= law.mean() / m + bound
        assert (shares * m).max() <= law.isf(CHANCE / SPLITS)
        spread = ((shares * m - law.mean()) ** 2).sum() / law.var()  # of 200 draws: about chi-squared
        assert stats.chi2.ppf(CHANCE, SPLITS) < spread < stats.chi2.isf(CHANCE, SPLITS)


def splits_coverage(columns, kind, coverage, n, seed, **options):
    order = torch.randperm(len(columns["y"]), generator=torch.Generator().manual_seed(seed))
    fit, test = order[:n], order[n:]
    log_probs, y, u = columns["log_probs"], columns["y"], columns["uniform"]
    sets = PredictionSets.fit(
        log_probs[fit], y[fit], coverage=coverage, kind=kind, empty=True, uniform=u[fit], **options
    )
    return sets.apply(log_probs[test], u[test]).gather(1, y[test, None]).double().mean().item()


@pytest.mark.parametrize("kind", KINDS)
def test_sets_that_may_not_be_empty_cover_at_least_as_much(real, kind):
    log_probs, y, u = real["log_probs"], real["y"], real["uniform"]
    for coverage in (0.5, 0.9, 0.99):
        empty, full = (
            PredictionSets.fit(log_probs[:500], y[:500], coverage=coverage, kind=kind, empty=flag, uniform=u[:500])
            for flag in (True, False)
        )
        with_empty, without = (sets.apply(log_probs[500:], u[500:]) for sets in (empty, full))
        assert (without | with_empty).equal(without) and without.any(1).all()


def test_by_class_every_class_has_its_promise():
    """Marginal sets starve the class that the model neglects; one threshold a class does not."""
    log_probs, y, _ = predictions(n=40_000, classes=3)
    log_probs = (log_probs - torch.tensor([0.0, 0.0, 3.0])).log_softmax(1)  # the third class is named too seldom
    fit, test = slice(0, 20_000), slice(20_000, None)
    for by_class in (False, True):
        sets = PredictionSets.fit(log_probs[fit], y[fit], coverage=0.9, kind="lac", by_class=by_class, empty=True)
        covered = sets.apply(log_probs[test]).gather(1, y[test, None]).squeeze(1)
        shares = [covered[y[test] == q].double().mean().item() for q in range(3)]
        if by_class:
            for q, share in enumerate(shares):
                n, m = int((y[fit] == q).sum()), int((y[test] == q).sum())
                law = stats.betabinom(m, (k := math.ceil((n + 1) * 0.9)), n + 1 - k)
                assert law.ppf(CHANCE / 2) <= share * m <= law.isf(CHANCE / 2)
        else:
            assert shares[2] < 0.8  # promised on average only


def test_the_draw_of_an_image_is_its_own_wherever_it_stands():
    x = load("digits", "test").x
    u = keyed_uniform(x)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    assert keyed_uniform(x[order]).equal(u[order]) and keyed_uniform(x[7:8]).equal(u[7:8])
    assert not keyed_uniform(x, seed=1).equal(u)
    assert stats.kstest(u.numpy(), "uniform").pvalue > CHANCE
    assert abs(np.corrcoef(u.numpy(), keyed_uniform(x, seed=1).numpy())[0, 1]) < stats.norm.isf(CHANCE / 2) / 1000**0.5
    assert keyed_uniform(x.float() / 255).shape == (1000,)


@pytest.mark.parametrize("kind", ["lac", "aps"])
def test_sets_are_mapie_s(kind):
    """MAPIE's `lac` is ours. Its `aps` finds its threshold as ours does, from draws of a generator that is known; its
    sets with include_last_label=False then count every class in full (ours with u = 1), and none is empty.
    """
    from mapie.classification import SplitConformalClassifier
    from sklearn.base import BaseEstimator, ClassifierMixin

    class Known(ClassifierMixin, BaseEstimator):
        """Gives the probabilities of the row numbers that it is handed."""

        classes_ = np.arange(5)

        def fit(self, X, y):
            return self

        def predict_proba(self, X):
            return log_probs.exp().numpy()[X[:, 0].astype(int)]

        def predict(self, X):
            return self.predict_proba(X).argmax(1)

    log_probs, y, _ = predictions(n=1000)
    rows = np.arange(1000)[:, None]
    theirs = SplitConformalClassifier(
        Known(), confidence_level=0.95, conformity_score=kind, prefit=True, random_state=7
    ).conformalize(rows[:600], y[:600].numpy())
    more = {} if kind == "lac" else {"conformity_score_params": {"include_last_label": False}}
    _, sets = theirs.predict_set(rows[600:], **more)
    u = torch.from_numpy(1 - np.random.RandomState(7).uniform(size=600))  # theirs is taken away, ours is added
    ours = PredictionSets.fit(log_probs[:600], y[:600], coverage=0.95, kind=kind, empty=kind == "lac", uniform=u)
    assert (sets[:, :, 0] == ours.apply(log_probs[600:], torch.ones(400)).numpy()).all()


# --- as data, and refusals -----------------------------------------------------------------------------------------


@pytest.fixture
def both(real):
    wrong = real["label"] != real["y"]
    selection = Selection.fit(uncertainty(real), wrong, error=0.01)
    sets = PredictionSets.fit(real["log_probs"], real["y"], coverage=0.9, by_class=True, uniform=real["uniform"])
    return FittedDecisions(selection, sets)


def test_decisions_are_small_data_and_come_back_to_the_bit(both):
    text = json.dumps(to_json(both), allow_nan=False)
    assert parse(FittedDecisions, json.loads(text)) == both and len(text) < 2000
    nothing = FittedDecisions(None, None)
    assert parse(FittedDecisions, to_json(nothing)) == nothing
    everything = Selection.fit(torch.rand(400), torch.zeros(400), error=0.01)
    assert parse(FittedDecisions, to_json(FittedDecisions(everything, None))).selection.threshold is None


def test_whole_numbers_beyond_64_bits_are_thresholds(both):
    data = to_json(both)
    data["selection"] |= {"threshold": 10**30}
    data["sets"] |= {"thresholds": [10**30] * 10}
    found = parse(FittedDecisions, json.loads(json.dumps(data)))
    log_probs = torch.zeros(2, 10).log_softmax(1)
    assert not found.selection.abstains(torch.tensor([0.5, 1.0])).any()
    assert found.sets.apply(log_probs, torch.full((2,), 0.5)).all()


@pytest.mark.parametrize(
    ("part", "change", "says"),
    [
        ("selection", {"score": "luck"}, "no score 'luck'"),
        ("selection", {"threshold": "0.5"}, "selection.threshold: .*number, not '0.5'"),
        ("selection", {"threshold": -1.0}, "threshold -1.0 is no uncertainty"),
        ("selection", {"threshold": 10**400}, "is no uncertainty"),
        ("sets", {"thresholds": [10**400] * 10}, "finite"),
        ("selection", {"error": None}, "selection.error: .*, not None"),
        ("selection", {"new": 1}, "selection.new: .*, not 1"),
        ("sets", {"kind": "raps"}, "no sets 'raps'"),
        ("sets", {"thresholds": [0.5]}, "sets: .*1 thresholds for 10 classes"),
        ("sets", {"thresholds": [True] * 10}, "sets.thresholds.0: .*number, not True"),
        ("sets", {"coverage": 2}, "Invalid coverage=2: must be a share"),
    ],
)
def test_damaged_decisions_are_refused(both, part, change, says):
    data = to_json(both)
    data[part] |= change
    with pytest.raises(CalgpError, match=says):
        parse(FittedDecisions, data)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda p, y: PredictionSets.fit(p, y, coverage=1.0), "Invalid coverage=1: must be a share"),
        (lambda p, y: PredictionSets.fit(p, y, coverage=math.nan), "Invalid coverage=nan"),
        (lambda p, y: PredictionSets.fit(p, y, coverage=0.9, kind="raps"), "no sets 'raps'; did you mean 'aps'"),
        (lambda p, y: PredictionSets.fit(p, y, coverage=0.9), "aps needs a uniform number for each of the 300"),
        (lambda p, y: PredictionSets.fit(p, y[1:], coverage=0.9, kind="lac"), r"must be \[300\]"),
        (lambda p, y: PredictionSets.fit(p, y + 3, coverage=0.9, kind="lac"), "from 3 to 7"),
        (lambda p, y: PredictionSets.fit(p[:8], y[:8], coverage=0.9, kind="lac"), "at least 9 held-out .* are 8"),
        (lambda p, y: PredictionSets.fit(p, y * 0, coverage=0.9, kind="lac", by_class=True), "images of class 1"),
        (lambda p, y: PredictionSets.fit(p.exp(), y, coverage=0.9, kind="lac"), "log_softmax"),
        (lambda p, y: PredictionSets.fit(p, y, coverage=0.9, kind="lac").apply(p[:, :4]), r"\[N, 5\]"),
        (lambda p, y: Selection.fit(p[:, 0], y == 0, error=0.0), "Invalid error=0"),
        (lambda p, y: Selection.fit(p[:, 0], y == 0, error=0.1, confidence=1.0), "Invalid confidence=1"),
        (lambda p, y: Selection.fit(p[:, 0], y[1:] == 0, error=0.1), "two columns"),
        (lambda p, y: Selection.fit(p[:, 0] * math.nan, y == 0, error=0.1), "NaN"),
        (lambda p, y: risk_coverage(p[:0, 0], y[:0] == 0), "at least one image"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_one_sentence(call, says):
    log_probs, y, _ = predictions()
    with pytest.raises(CalgpError, match=says):
        call(log_probs, y)
