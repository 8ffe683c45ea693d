"""GPClassifier: scikit-learn's own checks, calibrated probabilities where they are known, files, and clear errors."""

import copy

import joblib
import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegressionCV
from sklearn.metrics import log_loss, roc_auc_score
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from calgp import CalgpError, GPClassifier, Predictive
from calgp.embeddings import Inputs
from calgp.embeddings.hyperparameters import _climb
from calgp.posthoc.checks import stratified_folds
from calgp.posthoc.outliers import OUTLIER_SCORES, Density

DIGITS, LABELS = load_digits(return_X_y=True)
DIGITS = DIGITS.astype(np.float32)


@pytest.mark.slow
@parametrize_with_checks([GPClassifier()])
def test_scikit_learns_own_checks(estimator, check):
    """All of them, without an option: none is exempted."""
    check(estimator)


def bent(n, seed, d=6):
    """Labels drawn from known probabilities, which no linear rule gives."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, d))
    logits = np.stack([2 * X[:, 0] * X[:, 1], X[:, 2] ** 2, np.zeros(n)], 1)
    probs = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    y = (probs.cumsum(1) < rng.uniform(size=(n, 1))).sum(1)
    return X, y, probs


@pytest.fixture(scope="module")
def fitted() -> GPClassifier:
    """Read only."""
    return GPClassifier().fit(DIGITS[:300], LABELS[:300])


@pytest.mark.slow
def test_it_finds_what_no_linear_rule_can():
    (X, y, _), (X_test, y_test, truth) = bent(600, 0), bent(2000, 1)
    found = log_loss(y_test, GPClassifier().fit(X, y).predict_proba(X_test))
    linear = log_loss(
        y_test,
        LogisticRegressionCV(max_iter=500, scoring="neg_log_loss", l1_ratios=(0.0,), use_legacy_attributes=False)
        .fit(X, y)
        .predict_proba(X_test),
    )
    entropy = log_loss(y_test, truth)
    assert found < entropy + 0.4 * (linear - entropy)  # most of what there is to gain


@pytest.mark.slow
def test_with_more_rows_than_inducing_inputs_it_is_nearly_as_good():
    (X, y, _), (X_test, y_test, _) = bent(600, 0), bent(2000, 1)
    exact, some = (log_loss(y_test, GPClassifier(inducing=m).fit(X, y).predict_proba(X_test)) for m in (600, 200))
    assert some < exact + 0.05


@pytest.mark.slow
def test_on_digits_it_is_no_worse_than_tuned_logistic_regression():
    X, y, X_test, y_test = DIGITS[:600], LABELS[:600], DIGITS[600:], LABELS[600:]
    tuned = make_pipeline(
        StandardScaler(),
        LogisticRegressionCV(
            Cs=8, cv=5, scoring="neg_log_loss", max_iter=500, l1_ratios=(0.0,), use_legacy_attributes=False
        ),
    )
    found = GPClassifier().fit(X, y)
    assert log_loss(y_test, found.predict_proba(X_test)) < log_loss(y_test, tuned.fit(X, y).predict_proba(X_test))
    assert found.score(X_test, y_test) > 0.93


def test_the_choice_is_the_best_of_what_was_tried():
    X, y, _ = bent(600, 0)
    found = GPClassifier().fit(X, y)
    best = min(found.tried_, key=lambda each: each.mnll)
    assert (found.choice_.transform, found.choice_.kernel) == (best.transform, best.kernel)
    assert {each.kernel.radial for each in found.tried_} == {0.0, 0.5, 1.0}
    assert {each.transform for each in found.tried_} == {"plain", "root"}
    assert found.choice_.kernel.radial  # what bends is needed here


def test_predictions_are_those_of_the_predictive(fitted):
    predictive = fitted.predictive(DIGITS[300:400])
    assert isinstance(predictive, Predictive)
    probs = fitted.predict_proba(DIGITS[300:400])
    assert np.array_equal(probs, predictive.probs.numpy()) and probs.dtype == np.float32
    assert np.array_equal(fitted.predict(DIGITS[300:400]), probs.argmax(1))
    np.testing.assert_allclose(fitted.entropy(DIGITS[300:400]), -(probs * np.log(probs)).sum(1), atol=1e-5)
    assert (predictive.mutual_information > 0).all() and (predictive.latent_variance > 0).all()


def test_double_precision_gives_the_same_to_single_precision(fitted):
    single, double = (fitted.predict_proba(DIGITS[300:400].astype(dtype)) for dtype in (np.float32, np.float64))
    assert double.dtype == np.float64
    np.testing.assert_allclose(single, double, atol=1e-4)  # products with 1/√eigenvalue in float32
    again = GPClassifier().fit(DIGITS[:300].astype(np.float64), LABELS[:300])
    np.testing.assert_allclose(again.predict_proba(DIGITS[300:400]), single, atol=0.02)  # L-BFGS ends elsewhere


def test_a_prediction_does_not_depend_on_the_other_rows(fitted):
    X = DIGITS[300:400].astype(np.float64)
    np.testing.assert_allclose(fitted.predict_proba(X[::-1])[::-1], fitted.predict_proba(X), atol=1e-9)
    np.testing.assert_allclose(fitted.predict_proba(X[7:8]), fitted.predict_proba(X)[7:8], atol=1e-9)


@pytest.mark.parametrize("score", OUTLIER_SCORES)
def test_every_score_tells_noise_from_digits(fitted, score):
    noise = np.random.default_rng(0).integers(0, 17, size=(300, 64)).astype(np.float32)
    inside, outside = fitted.outlier_score(DIGITS[300:600], score), fitted.outlier_score(noise, score)
    assert inside.shape == (300,)
    found = roc_auc_score(np.repeat([0, 1], 300), np.concatenate([inside, outside]))
    assert found > (0.98 if score in ("variance", "density", "direction", "neighbours", "combined") else 0.85)


def test_a_score_that_an_older_file_does_not_have_is_refused(fitted):
    old = copy.copy(fitted)
    old.scores_ = {name: score for name, score in fitted.scores_.items() if name != "direction"}
    with pytest.raises(CalgpError, match="without the score 'direction': fit it again"):
        old.outlier_score(DIGITS[:2], "direction")


def test_the_density_is_fitted_on_the_inputs_of_the_process(fitted):
    x = torch.from_numpy(DIGITS[:300])
    expected = Density.fit(fitted.inputs_(x), torch.from_numpy(LABELS[:300])).score(fitted.inputs_(x))
    # rows are added up in another order
    np.testing.assert_allclose(fitted.outlier_score(DIGITS[:300], "density"), expected, rtol=1e-6)


@pytest.mark.parametrize("words", [True, False])
def test_a_file_predicts_the_same(tmp_path, words):
    labels = np.array(["zero", "one", "two"])[LABELS[LABELS < 3]] if words else LABELS[LABELS < 3]
    X = DIGITS[LABELS < 3]
    found = GPClassifier(inducing=100).fit(X[:200], labels[:200])
    read = GPClassifier.load(found.save(tmp_path / "deep" / "model.safetensors"))
    assert np.array_equal(read.predict_proba(X), found.predict_proba(X))
    assert np.array_equal(read.predict(X), found.predict(X)) and read.classes_.dtype == found.classes_.dtype
    for score in OUTLIER_SCORES:
        assert np.array_equal(read.outlier_score(X, score), found.outlier_score(X, score))
    assert read.choice_ == found.choice_ and read.tried_ == found.tried_ and read.get_params()["inducing"] == 100
    with pytest.raises(ValueError, match="63 features, but GPClassifier is expecting 64"):
        read.predict(X[:, :63])


def test_files_that_are_none_are_refused(tmp_path, fitted):
    with pytest.raises(CalgpError, match="There is no file"):
        GPClassifier.load(tmp_path / "nothing")
    path = fitted.save(tmp_path / "model")
    (tmp_path / "cut").write_bytes(path.read_bytes()[:1000])
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(1)}, tmp_path / "other")
    for name in ("cut", "other"):
        with pytest.raises(CalgpError, match=r"is no file of GPClassifier\.save, or it is damaged"):
            GPClassifier.load(tmp_path / name)


@pytest.mark.parametrize(
    ("X", "y", "says"),
    [
        (np.full((30, 3), np.nan), np.arange(30) % 2, "contains NaN"),
        (np.full((30, 3), np.inf), np.arange(30) % 2, "contains infinity"),
        (np.zeros((30, 3)), np.zeros(30), "at least two classes; y has only one class, 0.0"),
        (np.zeros((30, 3)), np.array(["cat", None] * 15, object), "labels of types NoneType and str: must be of one"),
        (np.zeros((30, 3)), np.arange(29) % 2, "inconsistent numbers of samples"),
        (np.zeros((30, 3, 2)), np.arange(30) % 2, "dim 3"),
        (np.zeros((30, 3)), np.linspace(0, 1, 30), "Unknown label type: continuous"),
    ],
)
def test_data_that_cannot_be_used_are_refused(X, y, says):
    with pytest.raises(ValueError, match=says):
        GPClassifier().fit(X, y)


def test_names_and_options_that_cannot_be_are_refused(fitted):
    with pytest.raises(CalgpError, match="did you mean 'density'"):
        fitted.outlier_score(DIGITS, "desnity")
    with pytest.raises(CalgpError, match="Invalid inducing=0"):
        GPClassifier(inducing=0).fit(DIGITS, LABELS)


@pytest.mark.parametrize("X", [np.ones((40, 3)), np.random.default_rng(0).normal(size=(3, 2)), np.zeros((4, 1))])
def test_inputs_that_tell_nothing_give_the_shares_of_the_classes(X):
    y = np.arange(len(X)) % 2
    probs = GPClassifier().fit(X, y).predict_proba(np.concatenate([X, X + 1]))
    assert np.isfinite(probs).all()
    np.testing.assert_allclose(probs.sum(1), 1, atol=1e-9)


@pytest.mark.parametrize("classes", [150, pytest.param(1000, marks=pytest.mark.slow)])
def test_many_classes(classes):
    rng = np.random.default_rng(0)
    means = rng.normal(size=(classes, 32)).astype(np.float32)
    y = np.arange(3 * classes) % classes
    X = means[y] + 0.3 * rng.normal(size=(3 * classes, 32)).astype(np.float32)
    found = GPClassifier(inducing=classes).fit(X, y)
    assert found.score(means, np.arange(classes)) > 0.95
    np.testing.assert_allclose(found.predict_proba(means[:10]).sum(1), 1, atol=1e-5)


@pytest.mark.slow
def test_scikit_learns_tools_take_it(fitted, tmp_path):
    assert cross_val_score(GPClassifier(), DIGITS[:200], LABELS[:200], cv=2).min() > 0.8
    joblib.dump(fitted, tmp_path / "it")
    assert np.array_equal(joblib.load(tmp_path / "it").predict_proba(DIGITS[:9]), fitted.predict_proba(DIGITS[:9]))
    assert not hasattr(clone(fitted), "process_")
    same, other = (GPClassifier(random_state=seed).fit(DIGITS[:300], LABELS[:300]) for seed in (0, 1))
    assert np.array_equal(same.predict_proba(DIGITS), fitted.predict_proba(DIGITS))
    assert not np.array_equal(other.predict_proba(DIGITS), fitted.predict_proba(DIGITS))


# --- inside ----------------------------------------------------------------------------------------------------------


def test_inputs_are_scikit_learns_standardised_ones():
    expected = StandardScaler().fit_transform(DIGITS.astype(np.float64)) / 8  # √64
    x = torch.from_numpy(DIGITS)
    np.testing.assert_allclose(Inputs.fit("plain", x)(x.double()), expected, atol=1e-9)
    rooted = StandardScaler().fit_transform(np.sqrt(DIGITS.astype(np.float64))) / 8
    np.testing.assert_allclose(Inputs.fit("root", x)(x.double()), rooted, atol=1e-6)  # √ in float32


def test_folds_leave_out_each_row_once_and_about_the_same_of_each_class():
    y = torch.tensor([0] * 50 + [1] * 23 + [2] * 1)
    folds = torch.stack(stratified_folds(y, 5))
    assert folds.sum(0).eq(1).all()
    for label, size in ((0, 10), (1, 23 / 5)):
        counts = folds[:, y == label].sum(1)
        assert counts.min() >= int(size) and counts.max() <= size + 1


@pytest.mark.parametrize("best", [0.1, 1.0, 3.0, 100.0])
@pytest.mark.parametrize("first", [0.1, 5.0, 1000.0])
def test_climbing_finds_the_minimum_of_what_has_only_one(best, first):
    assert _climb((0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0), first, lambda value: abs(np.log(value / best))) == best
