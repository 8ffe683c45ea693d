"""Outlier scores against scikit-learn, SciPy and closed forms."""

import json
import math

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal
from sklearn.covariance import EmpiricalCovariance, LedoitWolf
from sklearn.neighbors import NearestNeighbors

import reference
from calgp.errors import CalgpError
from calgp.gp import Predictive
from calgp.metrics import ood
from calgp.posthoc.outliers import (
    OUTLIER_SCORES,
    Combined,
    Density,
    Direction,
    Neighbours,
    Threshold,
    find,
    from_state,
    left_out_scores,
    surprise,
)

FEATURES = ("density", "direction", "neighbours")  # scores that read them


def clusters(n=300, d=6, classes=3, seed=0, dtype=torch.float64):
    """Correlated Gaussians around a mean for each class, of different scales in each feature."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(d, d, generator=generator, dtype=torch.float64) * torch.logspace(-1, 1, d, dtype=torch.float64)
    means = 3 * torch.randn(classes, d, generator=generator, dtype=torch.float64) + 5
    y = torch.arange(n) % classes
    return (means[y] + torch.randn(n, d, generator=generator, dtype=torch.float64) @ mix).to(dtype), y


def test_density_is_that_of_a_mixture_of_gaussians():
    x, y = clusters()
    test, _ = clusters(n=50, seed=1)
    means = np.stack([x[y == c].mean(0).numpy() for c in range(3)])
    covariance = EmpiricalCovariance(assume_centered=True).fit(x.numpy() - means[y]).covariance_
    log_density = [multivariate_normal(mean, covariance).logpdf(test.numpy()) + math.log(1 / 3) for mean in means]
    expected = -np.logaddexp.reduce(log_density)
    np.testing.assert_allclose(Density.fit(x, y, shrinkage=0).score(test), expected, rtol=1e-9)


def test_far_from_all_classes_the_density_is_the_mahalanobis_distance():
    x, y = clusters()
    far = torch.full((1, 6), 300.0, dtype=torch.float64)
    means = np.stack([x[y == c].mean(0).numpy() for c in range(3)])
    fitted = EmpiricalCovariance(assume_centered=True).fit(x.numpy() - means[y])
    squared = min(fitted.mahalanobis(far.numpy() - mean)[0] for mean in means)
    # −log p = d²/2 + constants of the order of the log determinant
    assert Density.fit(x, y, shrinkage=0).score(far).item() == pytest.approx(squared / 2, rel=0.01)


@pytest.mark.parametrize("n", [12, 60, 2000])
def test_shrinkage_is_ledoit_and_wolfs(n):
    x, y = clusters(n=n)
    standard = (x - x.mean(0)) / x.std(0, correction=0)
    within = torch.cat([standard[y == c] - standard[y == c].mean(0) for c in range(3)])
    expected = LedoitWolf(assume_centered=True).fit(within.numpy()).shrinkage_
    assert Density.fit(x, y).shrinkage == pytest.approx(expected, rel=1e-9)


def test_density_exists_with_fewer_rows_than_features_and_with_constant_ones():
    x, y = clusters(n=9, d=20)
    x[:, 3] = 7
    x[:, 4] = x[:, 5]
    density = Density.fit(x, y)
    assert density.score(x).isfinite().all()
    strange = x[:1].clone()
    strange[0, 3] = 8  # a feature that never changed
    assert density.score(strange) > density.score(x[:1])


def test_features_that_say_the_class_alone_have_distances_as_they_are():
    x = torch.tensor([[0.0, 1.0], [0.0, 1.0], [2.0, 1.0], [2.0, 1.0]])
    density = Density.fit(x, torch.tensor([0, 0, 1, 1]))
    assert density.score(torch.tensor([[0.0, 9.0]])) > density.score(x[:1])


@pytest.mark.parametrize("k", [1, 10])
def test_neighbours_are_scikit_learns(k):
    x, y = clusters()
    test, _ = clusters(n=50, seed=1)
    centre, scale = x.mean(0), x.std(0, correction=0)
    unit = [((each - centre) / scale).numpy() for each in (x, test)]
    unit = [each / np.linalg.norm(each, axis=1, keepdims=True) for each in unit]
    distance, _ = NearestNeighbors(n_neighbors=k, algorithm="brute").fit(unit[0]).kneighbors(unit[1])
    # products of float32: a distance of 0.01 has an error of about 1e-7 / 0.01
    np.testing.assert_allclose(Neighbours.fit(x, y, k=k).score(test), distance[:, -1], atol=2e-5)


def test_neighbours_keep_no_more_rows_than_asked_for_and_the_same_share():
    x, y = clusters(n=400)
    kept = Neighbours.fit(x, y, k=10, most=200)
    assert kept.rows.shape == (200, 6) and kept.k == 5
    assert Neighbours.fit(x[:4], y[:4], k=10).k == 4
    whole = Neighbours.fit(x, y, k=10)
    test = torch.cat([clusters(n=100, seed=1)[0], 100 * torch.randn(100, 6, dtype=torch.float64)])
    correlation = np.corrcoef(kept.score(test), whole.score(test))[0, 1]
    assert correlation > 0.9  # half of the rows tell nearly the same


def predictive(latent=None):
    samples = torch.tensor([[[0.9, 0.1], [0.5, 0.5]], [[0.7, 0.3], [0.5, 0.5]]], dtype=torch.float64)
    found = Predictive.of(samples.log())
    return Predictive(found.log_probs, found.expected_entropy, found.variance, 2, latent_variance=latent)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("confidence", [0.2, 0.5]),
        ("entropy", [-(0.8 * math.log(0.8) + 0.2 * math.log(0.2)), math.log(2)]),
        # H[(0.8, 0.2)] − ½ (H[(0.9, 0.1)] + H[(0.7, 0.3)]), and samples that agree
        ("mutual-information", [0.5004024 - (0.3250830 + 0.6108643) / 2, 0]),
        ("variance", [2 * 0.02, 0]),  # unbiased, of 0.9 and 0.7
    ],
)
def test_scores_of_a_predictive_by_hand(name, expected):
    score = find(name).fit(torch.zeros(2, 3), torch.tensor([0, 1]))
    np.testing.assert_allclose(score.score(None, predictive()), expected, atol=1e-7)


def test_the_variance_is_that_of_the_function_where_it_is_known():
    latent = torch.tensor([3.0, 4.0])
    assert find("variance").fit(latent[:, None], latent.long()).score(None, predictive(latent)).tolist() == [3, 4]
    assert Predictive.cat([predictive(latent), predictive(latent)]).latent_variance.tolist() == [3, 4, 3, 4]


@pytest.mark.parametrize("name", FEATURES)
def test_scores_tell_far_from_near(name):
    x, y = clusters(n=600)
    inside, _ = clusters(n=200, seed=0)
    outside = 5 - 20 * torch.randn(200, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    score = find(name).fit(x[200:], y[200:])
    assert ood(score.score(inside), score.score(outside)).auroc > 0.75


def combined(x, y):
    generator = torch.Generator().manual_seed(3)
    return Combined.of(x, y, torch.rand(len(y), generator=generator))


def test_surprise_is_minus_the_log_of_the_share_beyond():
    generator = torch.Generator().manual_seed(0)
    ordinary = torch.rand(200, generator=generator, dtype=torch.float64).sort().values
    scores = torch.linspace(-0.5, ordinary[179].item(), 50, dtype=torch.float64)
    shares = [(1 + (ordinary >= score).sum().item()) / 201 for score in scores]
    torch.testing.assert_close(surprise(ordinary, scores), -torch.tensor(shares, dtype=torch.float64).log())
    beyond = surprise(ordinary, torch.linspace(0.8, 3, 400, dtype=torch.float64))
    assert (beyond.diff() >= 0).all() and beyond.diff().max() < 0.2  # it rises, without a jump where the tail begins


@pytest.mark.parametrize("n", [1, 2, 6, 7])
def test_surprise_of_few_or_equal_scores_is_finite_and_rises(n):
    for ordinary in (torch.zeros(n, dtype=torch.float64), torch.arange(n, dtype=torch.float64)):
        found = surprise(ordinary, torch.tensor([-1.0, 0.0, 0.5, 100.0], dtype=torch.float64))
        assert found.isfinite().all() and (found.diff() >= 0).all() and found[0] == 0


def test_the_tail_of_exponential_scores_is_theirs():
    """Scores with P(s > t) = e^−t: the surprise is t, also where no ordinary score is; n = 5,000, its tail 500."""
    ordinary = -torch.rand(5000, generator=torch.Generator().manual_seed(0), dtype=torch.float64).log().sort().values
    far = torch.tensor([5.0, 10.0, 20.0], dtype=torch.float64)
    torch.testing.assert_close(surprise(ordinary.sort().values, far), far, rtol=4 / 500**0.5, atol=0)


def test_left_out_scores_are_those_of_the_other_folds():
    x, y = clusters(n=90)
    found = left_out_scores(Density.fit, x, y, folds=3)
    order = y.argsort(stable=True)
    for fold in range(3):
        out = set(order[fold::3].tolist())
        rest = torch.tensor([row for row in range(90) if row not in out])
        row = min(out)
        torch.testing.assert_close(found[row], Density.fit(x[rest], y[rest]).score(x[row : row + 1])[0])
    # left out, rows are less expected than fitted on
    assert found.mean() > Density.fit(x, y).score(x).mean()


def test_combined_notices_unusual_features_and_unsure_predictions():
    x, y = clusters(n=400)
    score = combined(x, y)
    sure, unsure = (Predictive.of(torch.tensor([[[p, 1 - p]]]).log()) for p in (0.99, 0.5))
    usual, unusual = x[:1], x[:1] + 100
    at = {
        (name, other): score.score(features, each).item()
        for name, features in (("usual", usual), ("unusual", unusual))
        for other, each in (("sure", sure), ("unsure", unsure))
    }
    assert at["usual", "sure"] < min(at["usual", "unsure"], at["unusual", "sure"])
    assert max(at["usual", "unsure"], at["unusual", "sure"]) < at["unusual", "unsure"]
    with pytest.raises(CalgpError, match="needs inputs that were not trained on"):
        find("combined").fit(x, y)


def test_combined_by_hand():
    """Shares P counted one by one among inputs that were left out: (1 + how many are at least as high) / (n + 1)."""
    x, y = clusters(n=400)
    unseen, _ = clusters(n=100, seed=5)
    entropy = torch.linspace(0, 0.69, 100, dtype=torch.float64)
    score = Combined.of(x, y, entropy, unseen)
    parts = score.parts()
    assert list(parts) == ["combined", *FEATURES] and parts["combined"] is score
    given = Predictive.of(torch.tensor([[[0.8, 0.2]] * 3]).log())
    shares = []
    ordinary = (entropy, *(parts[name].score(unseen) for name in FEATURES))
    values = (given.entropy, *(parts[name].score(x[:3]) for name in FEATURES))
    for usual, value in zip(ordinary, values, strict=True):
        beyond = (usual[:, None] >= value.double()).sum(0)
        assert (beyond > 10).all()  # beyond a tenth there is a tail, which has a test of its own
        shares.append(((beyond + 1) / 101).double().numpy())
    np.testing.assert_allclose(score.score(x[:3], given), reference.combined_outlier_score(*shares, noticed=0.1))
    for name in ("density", "direction"):
        torch.testing.assert_close(parts[name].score(x), find(name).fit(x, y).score(x))


def test_files_of_older_versions_are_fishers_combination_of_three():
    x, y = clusters(n=400)
    score = combined(x, y)
    rows = torch.tensor([0, 1, 3])  # without `direction`
    settings = {key: value for key, value in score.settings().items() if key in ("k", "log_volume", "shrinkage")}
    tensors = {key: value for key, value in score.tensors().items() if not key.startswith("direction")}
    old = from_state("combined", settings, tensors | {"unseen": score.unseen[rows]})
    assert list(old.parts()) == ["combined", "density", "neighbours"]
    given = Predictive.of(torch.tensor([[[0.8, 0.2]] * 400]).log())
    found = (given.entropy, *(find(name).fit(x, y).score(x) for name in ("density", "neighbours")))
    expected = sum(surprise(*pair) for pair in zip(score.unseen[rows], (each.double() for each in found), strict=True))
    torch.testing.assert_close(old.score(x, given), expected)


def test_ordinary_scatter_of_features_moves_combined_little_and_their_tails_all_the_way():
    """A score of features that a tenth of ordinary inputs exceed adds log 1.9, not log 10; in the tail s − log 10."""
    x, y = clusters(n=2000)
    score = combined(x, y)
    z = torch.cat([x[:200], x[:1] + 2, x[:1] + 1e4])
    given = Predictive.of(torch.tensor([[[0.8, 0.2]] * len(z)]).log())
    found = (given.entropy.double(), *(score.parts()[name].score(z) for name in FEATURES))
    unsure, *unusual = (surprise(*pair) for pair in zip(score.unseen, found, strict=True))
    added = score.score(z, given) - unsure
    scatter = (torch.stack(unusual)[:, :200] <= math.log(10)).all(0)
    assert scatter.sum() > 100 and added[:200][scatter].max() <= 3 * math.log(1.9)
    shares = [np.exp(-each[:-1].numpy()) for each in (unsure, *unusual)]
    np.testing.assert_allclose((unsure + added)[:-1], reference.combined_outlier_score(*shares, noticed=0.1))
    assert unusual[0][-1] > 1e5  # 1/P overflows, the score does not
    assert added[-1].item() == pytest.approx(sum(each[-1].item() for each in unusual) - 3 * math.log(10), rel=1e-4)


def test_direction_is_the_density_of_unit_vectors_and_log_lengths():
    x, y = clusters(n=300)
    test, _ = clusters(n=50, seed=1)
    polar = [
        np.c_[each / np.linalg.norm(each, axis=1, keepdims=True), np.log(np.linalg.norm(each, axis=1))]
        for each in (x.numpy(), test.numpy())
    ]
    expected = Density.fit(torch.from_numpy(polar[0]), y).score(torch.from_numpy(polar[1]))
    torch.testing.assert_close(Direction.fit(x, y).score(test), expected)


def test_direction_is_not_fooled_by_short_features():
    """Long features of ordinary inputs, and short ones that point elsewhere, close to the mean of a Gaussian."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(600) % 2
    length = 1 + 9 * torch.rand(600, 1, generator=generator)
    x = length * (torch.eye(8)[y] + 0.05 * torch.randn(600, 8, generator=generator))
    strange = torch.eye(8)[2:].repeat(20, 1) * (1 + 0.1 * torch.rand(120, 1, generator=generator))
    auroc = {
        name: ood(score.score(x), score.score(strange)).auroc
        for name, score in ((name, find(name).fit(x, y)) for name in ("density", "direction"))
    }
    assert auroc["direction"] > 0.999


def test_direction_reads_no_more_rows_than_asked_for_and_features_without_length():
    x, y = clusters(n=400)
    x[:3] = 0
    score = Direction.fit(x, y, most=200)
    assert score.score(x).isfinite().all() and not score.centre.equal(Direction.fit(x, y).centre)
    drawn = torch.randperm(400, generator=torch.Generator().manual_seed(0))[:200].sort().values
    torch.testing.assert_close(score.score(x), Direction.fit(x[drawn], y[drawn]).score(x))


@pytest.mark.parametrize("name", OUTLIER_SCORES)
def test_a_score_survives_json_and_tensors(name):
    x, y = clusters(dtype=torch.float32)
    score = combined(x, y) if name == "combined" else find(name).fit(x, y)
    settings = json.loads(json.dumps(score.settings()))
    again = from_state(name, settings, {key: value.clone() for key, value in score.tensors().items()})
    given = predictive(torch.tensor([1.0, 2.0]))
    assert again.score(x[:2], given).equal(score.score(x[:2], given))
    assert score.score(x[:2], given).dtype == torch.float64 and score.summary
    with pytest.raises(CalgpError, match="written by another version or is damaged"):
        from_state(name, settings | {"more": 1}, score.tensors())


def test_a_score_does_not_depend_on_the_batch(monkeypatch):
    x, y = clusters()
    for name in FEATURES:
        score = find(name).fit(x, y)
        expected = score.score(x)
        monkeypatch.setattr("calgp.posthoc.feature_outliers.ROWS", 1)
        torch.testing.assert_close(score.score(x), expected, atol=1e-3, rtol=1e-9)  # neighbours: √ε at distance 0
        monkeypatch.undo()
        assert score.score(x[:0]).shape == (0,)


# --- threshold -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "rate"), [(19, 0.05), (100, 0.05), (37, 0.1)])
def test_false_alarms_are_no_more_often_than_stated(n, rate):
    """Over hold-outs; of a continuous score the expected rate is exactly 1 − ⌈(n + 1)(1 − rate)⌉ / (n + 1)."""
    generator = torch.Generator().manual_seed(0)
    rates = []
    for _ in range(2000):
        threshold = Threshold.fit(torch.rand(n, generator=generator, dtype=torch.float64), false_alarm=rate)
        rates.append(1 - threshold.threshold)  # of uniform scores
    expected = 1 - math.ceil((n + 1) * (1 - rate) - 1e-9) / (n + 1)
    assert expected <= rate + 1e-12
    assert np.mean(rates) == pytest.approx(expected, abs=4 * np.std(rates) / math.sqrt(2000))


def test_ties_are_not_flagged():
    threshold = Threshold.fit(torch.zeros(20), false_alarm=0.05)
    assert threshold.flags(torch.tensor([0.0, 1e-9])).tolist() == [False, True]


@pytest.mark.parametrize(
    ("scores", "rate", "says"),
    [
        (torch.zeros(18), 0.05, "needs at least 19 held-out inputs; there are 18"),
        (torch.zeros(18), 0.0, "Invalid false_alarm=0: must be a share"),
        (torch.zeros(18), math.nan, "Invalid false_alarm=nan"),
        (torch.tensor([math.nan]), 0.5, "without NaN"),
        (torch.zeros(3, 2), 0.5, r"scores \[N\]"),
    ],
)
def test_a_threshold_that_cannot_be_is_refused(scores, rate, says):
    with pytest.raises(CalgpError, match=says):
        Threshold.fit(scores, false_alarm=rate)


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FEATURES)
def test_features_that_cannot_be_are_refused(name):
    x, y = clusters(n=30)
    with pytest.raises(CalgpError, match="NaN or infinite"):
        find(name).fit(x * math.nan, y)
    with pytest.raises(CalgpError, match=r"on \[30, 6\] and \[29\]"):
        find(name).fit(x, y[:-1])
    with pytest.raises(CalgpError, match=r"reads features \[N, 6\], as it was fitted on; came \[30, 5\]"):
        find(name).fit(x, y).score(x[:, :5])
    with pytest.raises(CalgpError, match="came none"):
        find(name).fit(x, y).score(None)


def test_names_and_predictives_that_are_missing_are_reported():
    with pytest.raises(CalgpError, match="did you mean 'density'"):
        find("densty")
    with pytest.raises(CalgpError, match="'entropy' reads a predictive"):
        find("entropy").fit(torch.zeros(1, 1), torch.zeros(1)).score(torch.zeros(1, 1))
    with pytest.raises(CalgpError, match="Invalid k=0"):
        Neighbours.fit(torch.zeros(1, 1), torch.zeros(1), k=0)
