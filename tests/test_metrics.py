import itertools
import math
import subprocess
import sys
import textwrap
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, confusion_matrix, precision_recall_fscore_support, roc_auc_score

import reference
from calgp import metrics
from calgp.errors import CalgpError
from calgp.metrics import ECE_PRESETS, Outcomes, Reliability
from calgp.metrics._calibration import FEW, _cells

EXACT = {"rtol": 1e-12, "atol": 1e-12}  # float64 sums of some thousand terms, in another order
SINGLE = {"rtol": 2e-6, "atol": 2e-6}  # float32 has 24 bits; exp and log cost a few of the last


def predictions(n=500, classes=10, *, seed=0, dtype=torch.float64, sharpness=2.0):
    """Random predictions whose labels are drawn half from the predictions, half from nowhere."""
    generator = torch.Generator().manual_seed(seed)
    log_probs = (sharpness * torch.randn(n, classes, generator=generator, dtype=torch.float64)).log_softmax(-1)
    drawn = torch.multinomial(log_probs.exp(), 1, generator=generator)[:, 0]
    anything = torch.randint(classes, (n,), generator=generator)
    y = torch.where(torch.rand(n, generator=generator) < 0.5, drawn, anything)
    return log_probs.to(dtype), y


def tops(confidence, correct, *, dtype=torch.float64):
    """Outcomes of which only the confidence and the success are known."""
    confidence = torch.as_tensor(confidence, dtype=dtype)
    correct = torch.as_tensor(correct, dtype=torch.bool)
    return Outcomes(confidence, correct, confidence.log(), confidence, confidence, classes=10)


def same(a: Outcomes, b: Outcomes):
    return a.classes == b.classes and all(
        torch.equal(getattr(a, name), getattr(b, name))
        for name in ("confidence", "correct", "label_log_prob", "brier", "entropy")
    )


@pytest.mark.parametrize("classes", [2, 10, 63, 64, 1000])
def test_uniform_predictor(classes):
    n = 4 * classes
    log_probs = torch.full((n, classes), -math.log(classes), dtype=torch.float64)
    result = metrics.outcomes(log_probs, torch.arange(n) % classes)
    close = dict(rel=1e-9)
    assert metrics.mnll(result).item() == pytest.approx(math.log(classes), **close)
    assert metrics.brier(result).item() == pytest.approx(1 - 1 / classes, **close)
    assert metrics.brier(result, classes="mean").item() == pytest.approx((1 - 1 / classes) / classes, **close)
    assert metrics.entropy(log_probs).numpy() == pytest.approx(math.log(classes), **close)
    # all classes tie, so the first one is predicted, which is right once in Q
    assert metrics.error_rate(result).item() == pytest.approx(1 - 1 / classes, **close)
    assert metrics.ece(result).item() == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("bins", [1, 10, 15, 20])
def test_perfect_and_certain_classifier(bins):
    y = torch.arange(6)
    log_probs = torch.eye(6, dtype=torch.float64).log()
    result = metrics.outcomes(log_probs, y)
    assert metrics.error_rate(result) == metrics.mnll(result) == metrics.brier(result) == 0
    assert metrics.ece(result, bins=bins) == metrics.mce(result, bins=bins) == 0
    assert metrics.ece(result, bins=bins, confidence="midpoint").item() == pytest.approx(0.5 / bins)
    assert metrics.entropy(log_probs).abs().max() == 0


def test_certain_and_wrong_classifier():
    result = metrics.outcomes(torch.eye(4).log(), torch.tensor([1, 2, 3, 0]))
    assert metrics.error_rate(result) == metrics.ece(result) == metrics.mce(result) == 1
    assert metrics.brier(result) == 2
    assert metrics.mnll(result) == math.inf


def test_one_prediction():
    result = metrics.outcomes(torch.tensor([[0.3, 0.7]], dtype=torch.float64).log(), torch.tensor([1]))
    scores = metrics.scores(result).to_dict()
    entropy = -0.3 * math.log(0.3) - 0.7 * math.log(0.7)
    expected = dict(n=1, err=0, mnll=-math.log(0.7), ece=0.3, mce=0.3, brier=0.18, confidence=0.7, entropy=entropy)
    assert scores == pytest.approx(expected)


def test_brier_of_nearly_certain_predictions_keeps_its_digits():
    # 1 − p = 1e-6 in float32: p itself is known to 6e-8 only, yet its logarithm knows 1 − p to seven digits
    log_probs = torch.tensor([[math.log1p(-1e-6), math.log(1e-6)]])
    assert metrics.brier(metrics.outcomes(log_probs, torch.tensor([0]))).item() == pytest.approx(2e-12, rel=1e-5)


def test_calibrated_predictions_have_small_ece():
    # labels drawn from the predictions: each bin's gap has s.d. at most 0.5/√|B|, so ECE ≤ about M · 0.5/√(N M)
    log_probs = predictions(50_000, 3, sharpness=1.5)[0]
    y = torch.multinomial(log_probs.exp(), 1, generator=torch.Generator().manual_seed(1))[:, 0]
    assert metrics.ece(metrics.outcomes(log_probs, y)) < 0.5 * math.sqrt(20 / 50_000)


@pytest.mark.parametrize("classes", [2, 3, 10, 100])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_scores_agree_with_naive_versions(classes, dtype):
    log_probs, y = predictions(400, classes, dtype=dtype)
    result = metrics.outcomes(log_probs, y)
    probs, labels = log_probs.double().exp().numpy(), y.numpy()
    confidence, correct = probs.max(1), probs.argmax(1) == labels
    tolerance = EXACT if dtype == torch.float64 else SINGLE

    def agree(ours, naive):
        torch.testing.assert_close(ours.double(), torch.as_tensor(naive, dtype=torch.float64), **tolerance)

    agree(metrics.error_rate(result), reference.error_rate(probs, labels))
    agree(metrics.mnll(result), reference.mnll(probs, labels))
    agree(metrics.brier(result), reference.brier(probs, labels))
    agree(metrics.brier(result, classes="mean"), reference.brier(probs, labels) / classes)
    agree(metrics.entropy(log_probs), reference.entropy(probs))
    agree(result.entropy, reference.entropy(probs))
    agree(metrics.ece(result), reference.ece(confidence, correct, 20))
    agree(metrics.ece(result, bins=7, confidence="midpoint"), reference.ece(confidence, correct, 7, "midpoint"))
    agree(metrics.mce(result, bins=5), reference.mce(confidence, correct, 5))
    agree(metrics.classwise_ece(log_probs, y), reference.classwise_ece(probs, labels, 20))


def test_reliability_agrees_with_naive_bins():
    log_probs, y = predictions(1000)
    result = metrics.outcomes(log_probs, y)
    table = metrics.reliability(result, bins=10)
    confidence, correct = result.confidence.numpy(), result.correct.numpy()
    for m, members in enumerate(reference.bins(confidence, 10)):
        assert table.count[m] == len(members)
        if len(members):
            assert table.accuracy[m].item() == pytest.approx(correct[members].mean())
            assert table.confidence[m].item() == pytest.approx(confidence[members].mean())
        else:
            assert table.accuracy[m].isnan() and table.confidence[m].isnan()
    assert table.midpoint.tolist() == pytest.approx([0.05 + 0.1 * m for m in range(10)])
    assert table.n == table.count.sum() == 1000


def test_equal_mass_bins_hold_the_same_number():
    result = metrics.outcomes(*predictions(1000))
    table = metrics.reliability(result, bins=20, binning="equal-mass")
    assert table.count.tolist() == [50] * 20
    parts = result.confidence.argsort().reshape(20, 50)
    gaps = result.confidence[parts].mean(1) - result.correct[parts].double().mean(1)
    torch.testing.assert_close(metrics.ece(result, binning="equal-mass"), gaps.abs().mean(), **EXACT)


def test_equal_mass_bins_keep_equal_confidences_together():
    result = tops([0.6] * 7 + [0.9] * 3, [True] * 5 + [False] * 5)
    assert metrics.reliability(result, bins=5, binning="equal-mass").count.tolist() == [7, 0, 0, 3, 0]
    assert metrics.ece(result, bins=5, binning="equal-mass").item() == pytest.approx(0.7 * abs(5 / 7 - 0.6) + 0.3 * 0.9)


@pytest.mark.parametrize("bins", [1, 2, 3, 7, 10, 15, 20, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_confidence_of_k_over_m_belongs_to_the_bin_that_ends_there(bins, dtype):
    edges = (torch.arange(1, bins + 1, dtype=torch.float64) / bins).to(dtype)
    one = torch.ones_like(edges)
    for confidence, shift in ((edges, 0), (torch.nextafter(edges, 0 * one), 0), (torch.nextafter(edges, 2 * one), 1)):
        inside = confidence <= 1
        if not inside.any():
            continue
        table = metrics.reliability(tops(confidence[inside], inside[inside], dtype=dtype), bins=bins)
        expected = [0] * shift + [1] * (bins - shift)
        assert table.count.tolist() == expected


def test_zero_belongs_to_the_first_bin_and_one_to_the_last():
    table = metrics.reliability(tops([0.0, 1.0], [False, True]), bins=4)
    assert table.count.tolist() == [1, 0, 0, 1]


def test_presets_agree_with_naive_versions():
    generator = torch.Generator().manual_seed(0)
    confidence = torch.rand(300, generator=generator, dtype=torch.float64)
    confidence[:30] = 1
    confidence[30:60] = torch.arange(30) % 20 / 20
    result = tops(confidence, torch.rand(300, generator=generator) < 0.6)
    values, correct = confidence.numpy(), result.correct.numpy()
    expected = {
        "paper": reference.ece(values, correct, 20, "midpoint"),
        "authors": reference.authors_ece(values, correct),
    }
    for name, value in expected.items():
        assert metrics.preset_ece(result, ECE_PRESETS[name]).item() == pytest.approx(value, rel=1e-12)


def test_authors_preset_loses_certain_predictions():
    certain = metrics.outcomes(torch.eye(4).log(), torch.tensor([1, 2, 3, 0]))
    assert metrics.preset_ece(certain, ECE_PRESETS["authors"]) == 0  # all wrong, and none of it counted
    assert metrics.preset_ece(certain, ECE_PRESETS["guo"]) == metrics.ece(certain) == 1


def guo_ece(confidence, correct, n_bins=15):
    """The loop of Guo's temperature_scaling (tensors, float32 edges from linspace)."""
    boundaries = torch.linspace(0, 1, n_bins + 1)
    total = 0.0
    for low, high in itertools.pairwise(boundaries):
        members = confidence.gt(low) & confidence.le(high)
        if members.any():
            gap = confidence[members].double().mean() - correct[members].double().mean()
            total += gap.abs().item() * members.double().mean().item()
    return total


def test_guo_preset_follows_his_loop_up_to_the_edges():
    edges = torch.linspace(0, 1, 16)[1:]
    confidence = torch.cat([edges, torch.rand(500, generator=torch.Generator().manual_seed(3))])
    result = tops(confidence, torch.arange(515) % 2 == 0, dtype=torch.float32)
    assert metrics.preset_ece(result, ECE_PRESETS["guo"]).item() == pytest.approx(
        guo_ece(result.confidence, result.correct), rel=1e-12
    )


def torchmetrics_ece(confidence, correct, n_bins=15):
    from torchmetrics.functional.classification.calibration_error import _ce_compute

    return _ce_compute(confidence, correct.to(confidence.dtype), n_bins)


def test_torchmetrics_preset_is_what_torchmetrics_computes():
    from torchmetrics.functional.classification import multiclass_calibration_error

    log_probs, y = predictions(2000)
    log_probs[:200] = torch.eye(10, dtype=torch.float64)[torch.arange(200) % 10].log()  # p = 1, often wrong
    result = metrics.outcomes(log_probs, y)
    theirs = multiclass_calibration_error(log_probs.exp(), y, num_classes=10, n_bins=15)
    # torchmetrics sums in float32
    assert metrics.preset_ece(result, ECE_PRESETS["torchmetrics"]).item() == pytest.approx(theirs.item(), rel=1e-6)


def test_torchmetrics_preset_agrees_at_the_edges():
    edges = torch.linspace(0, 1, 16)
    result = tops(edges.repeat(5), torch.arange(80) % 3 == 0, dtype=torch.float32)
    theirs = torchmetrics_ece(result.confidence, result.correct)
    assert metrics.preset_ece(result, ECE_PRESETS["torchmetrics"]).item() == pytest.approx(theirs.item(), rel=1e-5)


def test_torchmetrics_differs_only_where_confidence_is_one_or_an_edge():
    smooth = metrics.outcomes(*predictions(2000))
    theirs = torchmetrics_ece(smooth.confidence, smooth.correct, 20)
    assert metrics.ece(smooth).item() == pytest.approx(theirs.item(), rel=1e-9)
    # 0.97 (right) and 1 (wrong) share our last bin and cancel; torchmetrics gives p = 1 a bin of its own
    certain = tops([0.97, 1.0], [True, False])
    assert metrics.ece(certain).item() == pytest.approx(abs(0.985 - 0.5))
    assert torchmetrics_ece(certain.confidence, certain.correct, 20).item() == pytest.approx((0.03 + 1) / 2)


def test_netcal_agrees_away_from_edges_and_by_its_preset_on_them():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its imports
        from netcal.metrics import ECE

    def theirs(result, bins):  # binary form: netcal takes the confidence and whether it was right
        return ECE(bins=bins).measure(result.confidence.numpy(), result.correct.numpy().astype(int))

    smooth = metrics.outcomes(*predictions(2000))
    assert metrics.ece(smooth).item() == pytest.approx(theirs(smooth, 20), rel=1e-9)
    # on edges netcal's bins are [a, b), with 1 in the last; fourths are exact in binary, so no rounding is involved
    edges = tops([0.25, 0.25, 0.5, 0.75, 1.0, 0.6], [True, False, True, True, False, True])
    preset = replace(ECE_PRESETS["netcal"], bins=4)
    assert metrics.preset_ece(edges, preset).item() == pytest.approx(theirs(edges, 4), rel=1e-12)
    assert metrics.ece(edges, bins=4).item() != pytest.approx(theirs(edges, 4), rel=1e-3)


@pytest.mark.parametrize("classes", [2, 10, 100])
@pytest.mark.parametrize("chunk", [1, 64, 1 << 20])
def test_batches_and_chunks_change_nothing(classes, chunk, monkeypatch):
    log_probs, y = predictions(300, classes, dtype=torch.float32)
    whole = metrics.outcomes(log_probs, y)
    counts = metrics.classwise_reliability(log_probs, y)
    monkeypatch.setattr("calgp.metrics._outcomes.CPU_CHUNK", chunk)
    parts = list(zip(log_probs.split(77), y.split(77), strict=True))
    joined = Outcomes.cat(metrics.outcomes(*part) for part in parts)
    assert torch.equal(joined.confidence, whole.confidence) and torch.equal(joined.correct, whole.correct)
    assert torch.equal(joined.label_log_prob, whole.label_log_prob)
    # sums over classes may be associated otherwise at the ends of vectors: the last bit of float32
    torch.testing.assert_close(joined.brier, whole.brier, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(joined.entropy, whole.entropy, rtol=1e-6, atol=1e-6)
    merged = Reliability.merge(metrics.classwise_reliability(*part) for part in parts)
    assert torch.equal(merged.count, counts.count) and torch.equal(merged.correct, counts.correct)
    torch.testing.assert_close(merged.confidence_sum, counts.confidence_sum, **EXACT)
    assert merged.n == counts.n


def test_merged_reliability_is_that_of_the_whole():
    whole = metrics.outcomes(*predictions(1000))
    parts = [metrics.reliability(whole.take(index)) for index in torch.arange(1000).split(300)]
    merged, table = Reliability.merge(parts), metrics.reliability(whole)
    assert torch.equal(merged.count, table.count) and torch.equal(merged.correct, table.correct)
    torch.testing.assert_close(merged.ece(), table.ece(), **EXACT)


def test_reliabilities_with_different_bins_do_not_merge():
    result = metrics.outcomes(*predictions(100))
    with pytest.raises(CalgpError, match="same bin edges"):
        Reliability.merge([metrics.reliability(result, bins=10), metrics.reliability(result, bins=20)])


def test_outcomes_leave_their_input_alone():
    for n in (1, 50):
        log_probs, y = predictions(n)
        copy = log_probs.clone()
        metrics.outcomes(log_probs, y)
        metrics.classwise_ece(log_probs, y)
        metrics.entropy(log_probs)
        assert torch.equal(log_probs, copy)


def test_gradients_are_not_kept():
    log_probs, y = predictions(20)
    assert not metrics.outcomes(log_probs.requires_grad_(), y).brier.requires_grad


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_accepted_and_computed_in_float32(dtype):
    log_probs, y = predictions(500)
    result = metrics.outcomes(log_probs.to(dtype), y)
    assert result.brier.dtype == torch.float32
    # log p is known to eps · |log p| / 2
    assert metrics.mnll(result).item() == pytest.approx(metrics.mnll(metrics.outcomes(log_probs, y)).item(), rel=4e-3)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
def test_labels_may_be_any_integers(dtype):
    log_probs, y = predictions(50)
    assert same(metrics.outcomes(log_probs, y.to(dtype)), metrics.outcomes(log_probs, y))


def test_among_equal_maxima_the_first_counts():
    log_probs = torch.tensor([[0.4, 0.4, 0.2], [0.4, 0.4, 0.2], [0.4, 0.4, 0.2], [0.1, 0.1, 0.8]]).log()
    assert metrics.outcomes(log_probs, torch.tensor([0, 1, 2, 2])).correct.tolist() == [True, False, False, True]


confidences = st.lists(
    st.tuples(st.one_of(st.floats(0, 1), st.integers(0, 20).map(lambda k: k / 20)), st.booleans()),
    min_size=1,
    max_size=40,
)


@settings(deadline=None, max_examples=60)
@given(confidences, st.integers(1, 30))
def test_properties_of_ece(pairs, bins):
    result = tops(*zip(*pairs, strict=True))
    mean, midpoint = metrics.ece(result, bins=bins), metrics.ece(result, bins=bins, confidence="midpoint")
    assert 0 <= mean <= metrics.mce(result, bins=bins) + 1e-12 <= 1 + 1e-12
    assert abs(mean - midpoint) <= 0.5 / bins + 1e-12  # a bin's mean is within half a width of its middle
    # the triangle inequality over bins: ECE is at least the gap of the whole, which is ECE with one bin
    assert mean >= metrics.ece(result, bins=1) - 1e-12
    assert metrics.reliability(result, bins=bins).count.sum() == len(pairs)
    flipped = result.take(torch.arange(len(pairs)).flip(0))
    torch.testing.assert_close(metrics.ece(flipped, bins=bins), mean, **EXACT)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 30), st.integers(2, 80), st.integers(0, 2**31), st.floats(0.01, 50))
def test_properties_of_outcomes(n, classes, seed, sharpness):
    log_probs, y = predictions(n, classes, seed=seed, sharpness=sharpness)
    result = metrics.outcomes(log_probs, y)
    assert ((result.brier >= 0) & (result.brier <= 2)).all()
    assert ((result.entropy >= 0) & (result.entropy <= math.log(classes) + 1e-9)).all()
    assert ((result.confidence >= 1 / classes - 1e-9) & (result.confidence <= 1)).all()
    assert torch.equal(result.correct, log_probs.argmax(-1) == y)
    assert (result.label_log_prob.exp() <= result.confidence + 1e-12).all()


@pytest.mark.parametrize("levels", [3, 10, 1_000_000])
@pytest.mark.parametrize("sizes", [(1, 1), (1, 40), (200, 137), (60, 61)])
def test_detection_agrees_with_sklearn_and_naive_versions(levels, sizes):
    generator = torch.Generator().manual_seed(levels)
    inside = torch.randint(levels, (sizes[0],), generator=generator).double() / levels
    outside = torch.randint(levels, (sizes[1],), generator=generator).double() / levels + 1 / 3 * (levels > 3)
    found = metrics.ood(inside, outside)
    label = np.r_[np.zeros(sizes[0]), np.ones(sizes[1])]
    score = np.r_[inside.numpy(), outside.numpy()]
    assert found.auroc == pytest.approx(roc_auc_score(label, score), rel=1e-12)
    assert found.auroc == pytest.approx(reference.auroc(inside.numpy(), outside.numpy()), rel=1e-12)
    assert found.aupr_out == pytest.approx(average_precision_score(label, score), rel=1e-12)
    assert found.aupr_in == pytest.approx(average_precision_score(1 - label, -score), rel=1e-12)
    assert found.fpr95 == pytest.approx(reference.fpr95(inside.numpy(), outside.numpy()), rel=1e-12)


def test_detection_at_its_limits():
    low, high = torch.arange(5.0), torch.arange(5.0) + 10
    assert metrics.ood(low, high).to_dict() == dict(auroc=1, aupr_out=1, aupr_in=1, fpr95=0)
    worst = metrics.ood(high, low)
    assert (worst.auroc, worst.fpr95) == (0, 1)
    blind = metrics.ood(torch.zeros(30), torch.zeros(10))
    assert blind.to_dict() == dict(auroc=0.5, aupr_out=0.25, aupr_in=0.75, fpr95=1)
    infinite = metrics.ood(torch.tensor([-torch.inf, 0]), torch.tensor([torch.inf, torch.inf]))
    assert infinite.auroc == 1


def test_fpr95_needs_exactly_95_percent():
    # 19 of 20 outside scores are above all inside ones: 95 % are caught without any false alarm
    outside = torch.cat([torch.full((19,), 2.0), torch.tensor([0.0])])
    assert metrics.ood(torch.full((10,), 1.0), outside).fpr95 == 0
    assert metrics.ood(torch.full((10,), 1.0), outside[1:]).fpr95 == 1  # 18 of 19 are 94.7 %


def test_bootstrap_of_an_error_rate_is_binomial():
    # err ~ Binomial(N, e)/N over resamples: the interval is e ± 1.96 √(e(1−e)/N); 2,000 resamples know a 2.5 %
    # quantile to about 0.06 s.d. (√(0.025 · 0.975/2000)/φ(1.96)), and lattice steps of 1/N add 0.03: 0.25 is safe
    n, errors = 1000, 200
    result = tops(torch.full((n,), 0.8), torch.arange(n) >= errors)
    interval = metrics.bootstrap(result, metrics.error_rate, resamples=2000, seed=0)
    spread = math.sqrt(0.2 * 0.8 / n)
    assert interval.estimate.item() == pytest.approx(0.2)
    assert interval.low.item() == pytest.approx(0.2 - 1.96 * spread, abs=0.25 * spread)
    assert interval.high.item() == pytest.approx(0.2 + 1.96 * spread, abs=0.25 * spread)


def test_bootstrap_intervals_cover_the_truth_as_often_as_they_say():
    # 200 test sets with a true MNLL of 1 (exponential, N = 200): coverage 0.9 has s.d. √(0.9 · 0.1/200) = 0.021, and
    # the skew costs the percentile interval about 0.02; four s.d. either side of 0.89
    generator = torch.Generator().manual_seed(0)
    covered = 0
    for trial in range(200):
        loss = -torch.rand(200, generator=generator, dtype=torch.float64).log()
        result = replace(tops(loss.neg().exp(), torch.ones(200)), label_log_prob=-loss)
        interval = metrics.bootstrap(result, metrics.mnll, resamples=100, level=0.9, seed=trial)
        covered += bool(interval.low <= 1 <= interval.high)
    assert 0.80 <= covered / 200 <= 0.97


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("impossible", [False, True], ids=["finite", "a label of probability 0"])
def test_the_quick_bootstrap_of_scores_is_that_of_the_metrics(impossible, dtype, monkeypatch):
    """The same draws, summed in another order: to the last digits of float64. Some resamples at a time, or all."""
    log_probs, y = predictions(300)
    log_probs = log_probs.to(dtype)
    result = metrics.outcomes(log_probs, y)
    if impossible:  # about two thirds of the resamples have it
        result = replace(result, label_log_prob=result.label_log_prob.where(torch.arange(300) > 0, -torch.inf))
    functions = {"err": metrics.error_rate, "mnll": metrics.mnll, "ece": metrics.ece, "brier": metrics.brier}
    for held in (2**22, 1000):
        monkeypatch.setattr(sys.modules["calgp.metrics._bootstrap"], "WEIGHTS", held)
        found = metrics.bootstrap_scores(result, seed=3, resamples=50)
        for name, metric in functions.items():
            slow = metrics.bootstrap(result, metric, seed=3, resamples=50)
            for end in ("estimate", "low", "high"):
                torch.testing.assert_close(
                    getattr(found[name], end), getattr(slow, end), rtol=1e-12, atol=1e-14, equal_nan=True
                )


def test_bootstrap_depends_on_its_seed_only():
    result = metrics.outcomes(*predictions(200))

    def both(o):
        return torch.stack([metrics.ece(o), metrics.brier(o)])

    before = torch.random.get_rng_state()
    first, again, other = (metrics.bootstrap(result, both, resamples=50, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(first.low, again.low) and torch.equal(first.high, again.high)
    assert not torch.equal(first.low, other.low)
    assert first.low.shape == (2,) and (first.low <= first.high).all()


def test_the_papers_definition_is_credited_to_its_authors():
    source = Path(metrics.ece.__code__.co_filename).read_text()
    assert "Tran et al. (2018)" in source and "Milios" not in source


@pytest.mark.parametrize("preset", metrics.ECE_PRESETS)
def test_calibration_errors_are_sums_over_images(preset):
    """Σ_m |Σ_i excess_im| / N is the ECE by every definition; also of confidences of exactly 1."""
    log_probs = (3 * torch.randn(500, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).log_softmax(
        -1
    )
    log_probs[:20] = torch.tensor([0.0, -torch.inf, -torch.inf, -torch.inf])
    result = metrics.outcomes(log_probs, torch.arange(500) % 4)
    excess = metrics.bin_excess(result, metrics.ECE_PRESETS[preset])
    expected = metrics.preset_ece(result, metrics.ECE_PRESETS[preset])
    assert (excess.sum(0).abs().sum() / 500).item() == pytest.approx(expected.item(), abs=1e-6)


def test_scores_of_resamples_are_those_of_the_images_drawn():
    log_probs = torch.randn(200, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64).log_softmax(-1)
    result = metrics.outcomes(log_probs, torch.arange(200) % 3)
    weights = metrics.resample_weights(200, seed=0, resamples=5).double()
    found = metrics.resampled_scores(result, weights)
    for place, weight in enumerate(weights):
        drawn = metrics.scores(result.take(torch.arange(200).repeat_interleave(weight.long()))).to_dict()
        for name in ("err", "mnll", "ece", "brier"):
            assert found[name][place].item() == pytest.approx(drawn[name]), name
        assert found["gap"][place].item() == pytest.approx(drawn["confidence"] - 1 + drawn["err"])


def test_detection_of_resamples_is_that_of_the_images_drawn():
    generator = torch.Generator().manual_seed(2)
    inside, outside = torch.rand(80, generator=generator), 0.3 + torch.rand(60, generator=generator)
    weights = [metrics.resample_weights(n, seed=seed, resamples=4) for seed, n in enumerate((80, 60))]
    found = metrics.resampled_ood(inside, outside, *weights)
    for place, (w, v) in enumerate(zip(*weights, strict=True)):
        drawn = metrics.ood(inside.repeat_interleave(w.long()), outside.repeat_interleave(v.long())).to_dict()
        assert {name: values[place].item() for name, values in found.items()} == pytest.approx(drawn)


def two_methods(n: int = 2000) -> list[metrics.Outcomes]:
    """Two methods that err on much the same images. The first is exact, p(y | f) ∝ exp 3 f_y; the other too sure."""
    generator = torch.Generator().manual_seed(3)
    f, y = torch.randn(n, 4, generator=generator, dtype=torch.float64), torch.arange(n) % 4
    f += 3 * torch.nn.functional.one_hot(y, 4)
    other = f + 0.1 * torch.randn(n, 4, generator=generator, dtype=torch.float64)
    return [metrics.outcomes(each.log_softmax(-1), y) for each in (3 * f, 6 * other)]


def test_paired_scores_have_the_error_of_the_differences_image_by_image():
    first, second = two_methods()
    found = metrics.paired_scores(first, second, seed=0)
    columns = {"err": (~first.correct).double() - (~second.correct).double(), "brier": first.brier - second.brier}
    columns["mnll"] = second.label_log_prob - first.label_log_prob
    for name, column in columns.items():
        assert found[name].value == pytest.approx(column.mean().item())
        # 1,000 resamples know a deviation to 1/√2000 = 2.2 % of itself: four of those
        assert found[name].half == pytest.approx(1.96 * column.std().item() / math.sqrt(len(first)), rel=0.09), name
    alone = [metrics.bootstrap(each, metrics.error_rate, seed=0) for each in (first, second)]
    unpaired = math.hypot(*((each.high - each.low).item() / 2 for each in alone))
    assert found["err"].half < 0.5 * unpaired  # what pairing is for
    assert found["ece"].value == pytest.approx((metrics.ece(first) - metrics.ece(second)).item())


def test_a_difference_is_clear_where_its_interval_leaves_out_zero():
    first, second = two_methods()
    found = metrics.paired_scores(first, second, seed=0)
    assert all(found[name].is_clear and found[name].value < 0 for name in ("mnll", "ece"))
    same = metrics.paired_scores(first, first, seed=0)
    assert all(each.value == each.half == 0 and not each.is_clear for each in same.values())


def test_paired_detection_is_zero_for_the_same_scores_and_finds_a_better_one():
    generator = torch.Generator().manual_seed(0)
    inside, outside = torch.randn(400, generator=generator), torch.randn(300, generator=generator)
    better = metrics.paired_ood((inside, outside + 2), (inside, outside + 1), seed=0)["auroc"]
    one, two = (metrics.ood(inside, outside + shift).auroc for shift in (2, 1))
    assert better.value == pytest.approx(one - two) and better.is_clear
    assert metrics.paired_ood((inside, outside), (inside, outside), seed=0)["auroc"] == metrics.Difference(0.0, 0.0)


def test_pairs_of_other_images_are_refused():
    first, second = two_methods()
    with pytest.raises(CalgpError, match="2000 and 10 images"):
        metrics.paired_scores(first, second.take(torch.arange(10)), seed=0)
    with pytest.raises(CalgpError, match="same ones"):
        metrics.paired_ood((torch.rand(3), torch.rand(3)), (torch.rand(3), torch.rand(4)), seed=0)


def test_bootstrap_of_detection_resamples_both_sides():
    # AUROC of two normals one apart: Φ(1/√2); its s.e. by Hanley & McNeil for N = M = 500
    generator = torch.Generator().manual_seed(0)
    inside = torch.randn(500, generator=generator, dtype=torch.float64)
    outside = torch.randn(500, generator=generator, dtype=torch.float64) + 1
    interval = metrics.bootstrap_ood(inside, outside, resamples=500, seed=0)
    assert {name: value.estimate.item() for name, value in interval.items()} == metrics.ood(inside, outside).to_dict()
    a = interval["auroc"].estimate.item()
    pairs = a * (1 - a) + 499 * (a / (2 - a) - a**2) + 499 * (2 * a**2 / (1 + a) - a**2)
    error = math.sqrt(pairs / 500**2)
    # the formula assumes exponentials, and 500 resamples know the ends to 0.12 s.d.: a quarter is generous
    assert (interval["auroc"].high - interval["auroc"].low).item() == pytest.approx(2 * 1.96 * error, rel=0.25)


@pytest.mark.parametrize(
    ("log_probs", "y", "message"),
    [
        (torch.zeros(3), torch.zeros(3).long(), r"torch.float32 \[3\].*\[N, Q\]"),
        (torch.zeros(3, 1), torch.zeros(3).long(), "Q ≥ 2"),
        (torch.zeros(3, 2).long(), torch.zeros(3).long(), "torch.int64.*floating point"),
        (torch.full((3, 2), 0.5).log(), torch.zeros(2).long(), r"torch.int64 \[2\].*integers \[3\]"),
        (torch.full((3, 2), 0.5).log(), torch.zeros(3), "torch.float32"),
        (torch.full((3, 2), 0.5).log(), torch.eye(3, 2).long(), "argmax"),
        (torch.full((3, 2), 0.5).log(), torch.tensor([0, 1, 2]), "Invalid labels from 0 to 2.*from 0 to 1"),
        (torch.full((3, 2), 0.5).log(), torch.tensor([0, 1, -1]), "Invalid labels from -1 to 1"),
        (torch.full((3, 2), 0.5), torch.tensor([0, 1, 1]), r"these are probabilities: pass probs.log\(\)"),
        (
            torch.tensor([[0.5, 0.5]]).log().repeat(2, 1) + torch.tensor([[0], [3.0]]),
            torch.tensor([0, 1]),
            "in row 1.*logits",
        ),
        (torch.tensor([[torch.nan, 0.0]]), torch.tensor([0]), "sum nan in row 0"),
    ],
)
def test_what_cannot_be_used_is_refused_with_a_reason(log_probs, y, message):
    with pytest.raises(CalgpError, match=message):
        metrics.outcomes(log_probs, y)
    with pytest.raises(CalgpError, match=message):
        metrics.classwise_ece(log_probs, y)


def test_the_refused_row_is_named_whatever_the_chunk(monkeypatch):
    monkeypatch.setattr("calgp.metrics._outcomes.CPU_CHUNK", 32)
    log_probs, y = predictions(100)
    log_probs[77] += 1
    with pytest.raises(CalgpError, match="in row 77"):
        metrics.outcomes(log_probs, y)


def test_variants_are_named_never_silent():
    result = metrics.outcomes(*predictions(20))
    with pytest.raises(CalgpError, match="Invalid confidence='middle': must be one of 'mean', 'midpoint'"):
        metrics.ece(result, confidence="middle")  # pyright: ignore
    with pytest.raises(CalgpError, match="'equal-width', 'equal-mass'"):
        metrics.ece(result, binning="quantile")  # pyright: ignore
    with pytest.raises(CalgpError, match="'sum', 'mean'"):
        metrics.brier(result, classes="max")  # pyright: ignore
    with pytest.raises(CalgpError, match="bins=0"):
        metrics.ece(result, bins=0)


def test_nothing_cannot_be_scored():
    nothing = metrics.outcomes(torch.empty(0, 3), torch.empty(0, dtype=torch.long))
    for metric in (metrics.error_rate, metrics.mnll, metrics.brier, metrics.ece, metrics.scores):
        with pytest.raises(CalgpError, match="at least one"):
            metric(nothing)
    with pytest.raises(CalgpError):
        metrics.classwise_ece(torch.empty(0, 3), torch.empty(0, dtype=torch.long))
    with pytest.raises(CalgpError):
        Outcomes.cat([])
    with pytest.raises(CalgpError):
        Reliability.merge([])
    with pytest.raises(CalgpError):
        metrics.ood(torch.empty(0), torch.ones(3))
    with pytest.raises(CalgpError):
        metrics.bootstrap(nothing, metrics.mnll, seed=0)


@pytest.mark.slow
def test_memory_is_that_of_the_columns():
    # 20,000 × 1000 float16 predictions are 40 MB; in float32 each temporary of their size would be 80 MB. Chunks of
    # 2^17 probabilities need 0.5 MB a temporary, columns 17 bytes a row: 24 MB leave room for the allocator's slack.
    # ten such batches (200,000 rows) are joined, so whatever is kept by mistake shows ten times.
    program = """
        import resource, sys, torch
        from calgp import metrics
        torch.set_num_threads(1)
        unit = 1 if sys.platform == "darwin" else 1024
        def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        log_probs = torch.randn(20_000, 1000, dtype=torch.float16)
        for rows in log_probs.split(1000):
            rows.copy_(rows.float().log_softmax(-1))
        y = torch.arange(20_000) % 1000
        metrics.outcomes(log_probs[:500], y[:500])
        metrics.classwise_reliability(log_probs[:500], y[:500])
        before = peak()
        result = metrics.Outcomes.cat(metrics.outcomes(log_probs, y) for _ in range(10))
        metrics.classwise_reliability(log_probs, y)
        metrics.scores(result)
        print(len(result), peak() - before)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True)
    n, extra = map(int, done.stdout.split())
    assert n == 200_000
    assert extra < 24e6


@pytest.mark.parametrize("bins", [2, 20, 33, 34, 100])
@pytest.mark.parametrize(("closed", "side"), [("right", "left"), ("left", "right")])
@pytest.mark.parametrize("n", [500, FEW])
def test_cells_are_those_of_a_search_among_the_edges(bins, closed, side, n):
    """By comparisons of many confidences with few edges, else by bisection; confidences on the edges included."""
    edges = (torch.arange(1, bins, dtype=torch.float64) / bins).float()
    confidence = torch.cat([torch.rand(n, generator=torch.Generator().manual_seed(0)), edges, torch.tensor([0.0, 1.0])])
    found = _cells(confidence[None], edges, closed)
    np.testing.assert_array_equal(found[0], np.searchsorted(edges.numpy(), confidence.numpy(), side=side))
    assert found.dtype == torch.long


@pytest.mark.parametrize(("n", "classes"), [(1, 2), (40, 3), (500, 10), (300, 1000)])
def test_confusion_precision_and_recall_are_scikit_learns(n, classes):
    generator = torch.Generator().manual_seed(n)
    y, labels = (torch.randint(classes, (n,), generator=generator) for _ in range(2))
    found = metrics.confusion(labels, y, classes=classes)
    np.testing.assert_array_equal(found.matrix(), confusion_matrix(y, labels, labels=range(classes)))
    precision, recall, _, support = precision_recall_fscore_support(
        y, labels, labels=range(classes), zero_division=np.nan
    )
    by_class = found.by_class()
    assert [each.n for each in by_class] == support.tolist()
    for share, expected in (
        ([each.recall for each in by_class], recall),
        ([each.precision for each in by_class], precision),
    ):
        np.testing.assert_allclose(np.array(share, float), expected, rtol=1e-12)  # None is NaN


def test_mistakes_of_a_confusion_come_by_their_number():
    y, labels = torch.tensor([0, 0, 0, 1, 1, 1, 2]), torch.tensor([0, 1, 2, 2, 2, 0, 2])
    found = metrics.confusion(labels, y, classes=3)
    assert found.mistakes() == [(1, 2, 2), (0, 1, 1), (0, 2, 1), (1, 0, 1)]
    assert [each.mistaken_for for each in found.by_class()] == [(1, 1), (2, 2), None]


@pytest.mark.parametrize("entries", [((0, 2, 1),), ((-1, 0, 1),), ((0, 0, 0),), ((0, 0, 1), (0, 0, 2))])
def test_a_confusion_that_cannot_be_is_refused(entries):
    with pytest.raises(ValueError, match="entry"):
        metrics.Confusion(2, entries)


def test_labels_of_other_images_are_refused():
    with pytest.raises(CalgpError, match="as many labels as images"):
        metrics.confusion(torch.zeros(3, dtype=torch.long), torch.zeros(2, dtype=torch.long), classes=2)
