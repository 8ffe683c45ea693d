import json
import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression

from calgp.errors import CalgpError
from calgp.posthoc.calibration import (
    CALIBRATORS,
    Isotonic,
    Platt,
    Prior,
    Temperature,
    VectorScaling,
    find,
    from_json,
    to_json,
)

every_calibrator = pytest.mark.parametrize("name", CALIBRATORS)


def predictions(n=400, classes=5, sharpness=3.0, seed=0, dtype=torch.float64):
    """Logits whose softmax the labels are drawn from, multiplied by `sharpness`."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(n, classes, generator=generator, dtype=torch.float64)
    y = torch.multinomial(logits.softmax(1), 1, generator=generator).squeeze(1)
    return (sharpness * logits).log_softmax(1).to(dtype), y


def mnll(log_probs, y):
    return -log_probs.double().gather(1, y[:, None]).mean().item()


def nll_at(temperatures, log_probs, y):
    """The mean negative log-likelihood of p̄^(1/T), normalised, in NumPy."""
    log_p, losses = log_probs.numpy(), []
    for temperature in temperatures:
        scaled = log_p / temperature
        top = scaled.max(1, keepdims=True)
        log_norm = top[:, 0] + np.log(np.exp(scaled - top).sum(1))
        losses.append((log_norm - scaled[np.arange(len(y)), y.numpy()]).mean())
    return np.array(losses)


# --- temperature ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [2, 10, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("sharpness", [0.3, 1.0, 3.0])
def test_temperature_is_the_best_of_a_fine_grid(classes, sharpness):
    log_probs, y = predictions(classes=classes, sharpness=sharpness)
    found = Temperature.fit(log_probs, y)
    grid = np.exp(np.linspace(math.log(0.05), math.log(20), 4001))  # 0.15 % apart
    nll = nll_at(grid, log_probs, y)
    assert found.temperature == pytest.approx(grid[nll.argmin()], rel=0.0016)
    assert mnll(found.apply(log_probs), y) <= nll.min() + 1e-12
    assert found.warning is None


@pytest.mark.parametrize(("n", "mean", "spread"), [(20, 1.0, 0.2), (20, 1.0, 1.0), (20, 0.8, 0.2), (400, 0.8, 0.2)])
def test_a_temperature_with_a_prior_is_the_most_probable_of_a_fine_grid(n, mean, spread):
    """β = 1/T ~ N(m, s²) before the hold-out: the sum of negative log-likelihoods plus (β − m)²/(2 s²)."""
    log_probs, y = predictions(n=n)
    grid = np.exp(np.linspace(math.log(0.05), math.log(20), 4001))
    loss = n * nll_at(grid, log_probs, y) + (1 / grid - mean) ** 2 / (2 * spread**2)
    found = Temperature.fit(log_probs, y, Prior(mean, spread)).temperature
    assert found == pytest.approx(grid[loss.argmin()], rel=0.0016)


def test_temperature_finds_the_one_that_was_applied():
    log_probs, y = predictions(n=20_000, sharpness=3.0)
    assert Temperature.fit(log_probs, y).temperature == pytest.approx(3, rel=0.05)  # of 20,000 labels


def test_the_loss_is_convex_in_the_inverse_temperature():
    log_probs, y = predictions()
    beta = np.linspace(0.05, 20, 2001)
    nll = nll_at(1 / beta, log_probs, y)
    assert (np.diff(nll, 2) >= -1e-10).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_temperature_leaves_labels_alone(dtype):
    log_probs, y = predictions(n=5000, dtype=dtype)
    calibrated = Temperature.fit(log_probs, y).apply(log_probs)
    assert calibrated.dtype == dtype
    assert calibrated.argmax(1).equal(log_probs.argmax(1))


def test_a_hold_out_without_a_mistake_changes_nothing_and_says_so():
    """Its optimum is T = 0: certainty of everything."""
    log_probs, _ = predictions()
    found = Temperature.fit(log_probs, log_probs.argmax(1))
    assert found.temperature == 1
    assert "no mistake" in found.warning
    torch.testing.assert_close(found.apply(log_probs), log_probs)
    found = Temperature.fit(log_probs, log_probs.argmax(1), Prior(0.8, 0.2))  # a prior has an optimum all the same
    assert 0.05 < found.temperature < 1 / 0.8 and found.warning is None


def test_a_mistake_that_is_almost_none_ends_at_the_sharp_edge_and_says_so():
    log_probs = torch.tensor([[0.6, 0.4], [0.50001, 0.49999]], dtype=torch.float64).log()
    found = Temperature.fit(log_probs, torch.tensor([0, 1]))
    assert found.temperature == 0.05
    assert "edge" in found.warning and "almost no mistake" in found.warning


def test_confidence_that_says_nothing_ends_at_the_blunt_edge_and_says_so():
    log_probs, _ = predictions()
    found = Temperature.fit(log_probs, log_probs.argmin(1))
    assert found.temperature == 20
    assert "edge" in found.warning and "next to nothing" in found.warning


def test_uniform_predictions_need_no_temperature():
    log_probs = torch.zeros(10, 3).log_softmax(1)
    found = Temperature.fit(log_probs, torch.arange(10) % 3)
    assert found.temperature == 1 and "all uniform" in found.warning
    torch.testing.assert_close(found.apply(log_probs), log_probs)


def test_one_image_is_enough():
    log_probs = torch.tensor([[0.7, 0.3]]).log()
    assert Temperature.fit(log_probs, torch.tensor([0])).temperature == 1
    assert Temperature.fit(log_probs, torch.tensor([1])).temperature == 20


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, 0.01])
def test_a_temperature_outside_its_range_cannot_be(temperature):
    with pytest.raises(CalgpError, match="Invalid temperature"):
        Temperature(temperature)


# --- vector scaling ------------------------------------------------------------------------------------------------


def vector_objective(parameters, log_p, y):
    """Mean negative log-likelihood and the regulariser, as the docstring has them, in NumPy."""
    scale, bias = parameters.reshape(2, -1)
    f = scale * log_p + bias
    top = f.max(1)
    nll = (top + np.log(np.exp(f - top[:, None]).sum(1)) - f[np.arange(len(y)), y]).sum()
    return (nll + ((scale - 1) ** 2 + bias**2).sum() / 2) / len(y)


@pytest.mark.parametrize("classes", [2, 4])
def test_vector_scaling_is_where_scipy_finds_the_minimum(classes):
    log_probs, y = predictions(n=300, classes=classes)
    log_probs = (log_probs + torch.linspace(0, 2, classes, dtype=torch.float64)).log_softmax(1)
    found = VectorScaling.fit(log_probs, y)
    start = np.concatenate([np.ones(classes), np.zeros(classes)])
    options = {"gtol": 1e-9, "ftol": 1e-15, "maxiter": 5000, "maxfun": 10**6}
    best = minimize(vector_objective, start, (log_probs.numpy(), y.numpy()), "L-BFGS-B", options=options)
    ours = vector_objective(np.array([*found.scale, *found.bias]), log_probs.numpy(), y.numpy())
    assert ours <= best.fun + 1e-10
    # SciPy's gradients are finite differences, so its own end is good to about 10⁻⁴
    np.testing.assert_allclose([*found.scale, *found.bias], best.x, atol=1e-3)
    assert found.warning is None and found.gradient < 1e-8


def test_vector_scaling_mends_a_bias_of_one_class():
    log_probs, y = predictions(n=5000, sharpness=1.0)
    biased = (log_probs + torch.tensor([3.0, 0, 0, 0, 0])).log_softmax(1)
    found = VectorScaling.fit(biased, y)
    assert mnll(found.apply(biased), y) < mnll(biased, y) - 0.2
    assert mnll(found.apply(biased), y) == pytest.approx(mnll(log_probs, y), abs=0.005)


def test_vector_scaling_exists_on_a_perfect_hold_out():
    log_probs, _ = predictions(n=50)
    found = VectorScaling.fit(log_probs, log_probs.argmax(1))
    assert np.abs([*found.scale, *found.bias]).max() < 20
    assert found.warning is None


def test_a_fit_that_did_not_converge_says_so():
    assert "stopped" in VectorScaling((1.0, 1.0), (0.0, 0.0), gradient=0.1).warning


def test_vector_scaling_works_where_gradients_are_off():
    log_probs, y = predictions(n=50)
    with torch.no_grad():
        found = VectorScaling.fit(log_probs, y)
    assert found == VectorScaling.fit(log_probs, y)


# --- Platt and isotonic --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [2, 4])
def test_platt_is_sklearns_logistic_regression_on_log_odds(classes):
    log_probs, y = predictions(classes=classes, sharpness=1.5)
    others, _ = predictions(classes=classes, seed=1)
    columns = []
    for q in range(classes):
        fit_odds, odds = (np.log(p) - np.log1p(-p) for p in (log_probs[:, q].exp().numpy(), others[:, q].exp().numpy()))
        regression = LogisticRegression(max_iter=1000).fit(fit_odds[:, None], y.numpy() == q)
        columns.append(regression.predict_proba(odds[:, None])[:, 1])
    expected = np.stack(columns, 1)
    expected /= expected.sum(1, keepdims=True)
    # the two ways to log-odds differ by rounding, and lbfgs stops within 10⁻⁴ of its optimum
    np.testing.assert_allclose(Platt.fit(log_probs, y).apply(others).exp(), expected, atol=1e-4)


@pytest.mark.parametrize("classes", [2, 4])
def test_isotonic_is_sklearns_regression_clipped_and_normalised(classes):
    log_probs, y = predictions(classes=classes, sharpness=1.5)
    others, _ = predictions(classes=classes, seed=1)
    expected = np.stack(
        [
            IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip")
            .fit(log_probs[:, q].exp().numpy(), y.numpy() == q)
            .predict(others[:, q].exp().numpy())
            for q in range(classes)
        ],
        1,
    ).clip(1 / (len(y) * classes))
    expected /= expected.sum(1, keepdims=True)
    np.testing.assert_allclose(Isotonic.fit(log_probs, y).apply(others).exp(), expected, rtol=1e-9)


def test_isotonic_gives_finite_losses_where_the_regression_says_zero():
    log_probs, _ = predictions(n=40, classes=3)
    found = Isotonic.fit(log_probs, log_probs.argmax(1))
    calibrated = found.apply(log_probs)
    assert calibrated.isfinite().all()
    assert calibrated.amin() == pytest.approx(math.log(1 / (40 * 3)), abs=0.02)  # and normalised


@pytest.mark.parametrize("name", ["platt", "isotonic"])
def test_a_class_that_the_hold_out_lacks_keeps_its_probability_and_is_named(name):
    log_probs, y = predictions(classes=4)
    seen = y != 2
    found = CALIBRATORS[name].fit(log_probs[seen], y[seen])
    assert "class 2 " in found.warning
    everything = CALIBRATORS[name].fit(log_probs, y)
    assert everything.warning is None
    # before normalisation: p₂ in, p₂ out
    certain = torch.tensor([[0.05, 0.05, 0.85, 0.05]]).log()
    assert found.apply(certain).argmax() == 2


def test_log_odds_of_the_most_certain_are_distinguished():
    """1 − p = 10⁻²⁰ and 10⁻³⁰ are both p = 1 in floating point."""
    log_probs = torch.tensor([[0.0, math.log(1e-20)], [0.0, math.log(1e-30)]], dtype=torch.float64)
    first, second = Platt((1.0, 1.0), (0.0, 0.0), ()).apply(log_probs)[:, 1]
    assert first.item() == pytest.approx(math.log(1e-20)) and second.item() == pytest.approx(math.log(1e-30))


# --- all of them ---------------------------------------------------------------------------------------------------


@every_calibrator
@pytest.mark.parametrize("classes", [2, 100])
def test_probabilities_sum_to_one_and_the_hold_out_is_predicted_better(name, classes):
    log_probs, y = predictions(n=1000, classes=classes, dtype=torch.float32)
    calibrated = CALIBRATORS[name].fit(log_probs, y).apply(log_probs)
    assert calibrated.dtype == torch.float32 and calibrated.isfinite().all()
    torch.testing.assert_close(calibrated.exp().sum(1), torch.ones(1000))
    assert mnll(calibrated, y) < mnll(log_probs, y)


@every_calibrator
def test_it_survives_json_to_the_bit(name):
    log_probs, y = predictions()
    calibrator = CALIBRATORS[name].fit(log_probs, y)
    again = from_json(json.loads(json.dumps(to_json(calibrator))))
    assert again == calibrator and type(again) is type(calibrator)
    assert again.apply(log_probs).equal(calibrator.apply(log_probs))


@every_calibrator
def test_extreme_log_probabilities_stay_finite(name):
    log_probs = torch.tensor([[0.0, -1e5, -math.inf], [-2e4, 0.0, -3e38], [-math.inf, -80.0, 0.0]])
    log_probs = log_probs.repeat(4, 1)
    y = torch.tensor([0, 1, 2, 1, 1, 2, 0, 1, 2, 0, 2, 2])  # some of the certain are wrong
    calibrated = CALIBRATORS[name].fit(log_probs, y).apply(log_probs)
    assert calibrated.isfinite().all()
    torch.testing.assert_close(calibrated.exp().sum(1), torch.ones(12))


@every_calibrator
def test_constant_predictions_are_no_trouble(name):
    log_probs = torch.tensor([[0.6, 0.3, 0.1]]).log().repeat(9, 1)
    calibrated = CALIBRATORS[name].fit(log_probs, torch.arange(9) % 3).apply(log_probs)
    assert calibrated.isfinite().all() and len(calibrated.unique(dim=0)) == 1


@every_calibrator
def test_one_class_alone_in_the_hold_out_is_no_trouble(name):
    log_probs, _ = predictions(n=6, classes=3)
    calibrator = CALIBRATORS[name].fit(log_probs, torch.ones(6, dtype=torch.int64))
    assert calibrator.apply(log_probs).isfinite().all()


@every_calibrator
@pytest.mark.parametrize(
    ("log_probs", "y", "says"),
    [
        (torch.randn(4, 3), torch.zeros(4, dtype=torch.int64), "log_softmax"),
        (torch.full((4, 3), math.nan), torch.zeros(4, dtype=torch.int64), "log_softmax"),
        (torch.zeros(4, 3).log_softmax(1), torch.zeros(5, dtype=torch.int64), r"\[4, 3\] and \[5\]"),
        (torch.zeros(4, 3).log_softmax(1), torch.full((4,), 3), "0 … 2"),
        (torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64), r"\[0, 3\]"),
    ],
)
def test_what_cannot_be_fitted_is_refused(name, log_probs, y, says):
    with pytest.raises(CalgpError, match=says):
        CALIBRATORS[name].fit(log_probs, y)


@pytest.mark.parametrize("name", ["vector", "platt", "isotonic"])
def test_another_number_of_classes_is_refused(name):
    calibrator = CALIBRATORS[name].fit(*predictions(classes=4))
    with pytest.raises(CalgpError, match=r"\[N, 4\]"):
        calibrator.apply(predictions(classes=5)[0])


@pytest.mark.parametrize(
    "data",
    [
        {"calibrator": "magic"},
        {},
        {"calibrator": "temperature"},
        {"calibrator": "temperature", "temperature": "hot"},
        {"calibrator": "temperature", "temperature": -1},
        {"calibrator": "temperature", "temperature": None},
        {"calibrator": "vector", "scale": [1, 2], "bias": [1, 2, 3], "gradient": 0},
        {"calibrator": "platt", "slope": [1, "a"], "intercept": [0, 0], "absent": []},
        {"calibrator": "isotonic", "knots": [[0, 1]], "values": [[0]], "floor": 0.1, "absent": []},
    ],
)
def test_damaged_files_are_refused(data):
    with pytest.raises(CalgpError):
        from_json(data)


def test_an_unknown_name_lists_those_there_are():
    with pytest.raises(CalgpError, match="temperature, vector, platt, isotonic"):
        find("magic")
