"""A Gaussian process whose mean is the network: its covariance by definition, and what `upgrade` makes of it."""

import json

import numpy as np
import pytest
import torch
from torch import nn

import calgp
import reference
from calgp import CalgpError
from calgp.data import load
from calgp.upgraded import UpgradedClassifier, fixed_mean
from calgp.upgraded.fixed_mean import FixedMeanGP, candidates
from folders import exported

from .conftest import blobs


def problem(n=40, d=3, seed=0):
    """Features of different scales, and logits, in double precision."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, d, generator=g).double() * torch.tensor([1.0, 5.0, 0.1]), torch.randn(n, 4, generator=g)


def variance(gp, c):
    return gp.logit_covariance(c)[:, 0, 0]


def curvatures(f):
    """p̂ (1 − p̂) of each row, and its bound: in the order of `candidates`, which has two variances of each."""
    top = [reference.softmax(row).max() for row in f.double().numpy()]
    own = np.array([p * (1 - p) for p in top])
    return [own, own, np.full_like(own, 0.25), np.full_like(own, 0.25)]


def test_the_covariance_is_that_of_the_dense_matrix(monkeypatch):
    """For every lengthscale, curvature and variance, by naive NumPy; 40 features, so that its loops end."""
    monkeypatch.setattr(fixed_mean, "N_RF", 20)
    (c, f), (new, _) = problem(), problem(5, seed=1)
    found = list(candidates(c, f))
    assert len(found) == 12 and len({(gp.lengthscale, gp.precision) for gp in found}) == 6
    for gp, h in zip(found, 3 * curvatures(f), strict=True):
        given = (each.numpy() for each in (new, gp.centre, gp.omega))
        expected = reference.fixed_mean_variance(c.numpy(), h, *given, 1 / gp.precision)
        np.testing.assert_allclose(variance(gp, new).numpy(), expected, rtol=1e-8)
        covariance = gp.logit_covariance(new)
        assert covariance.equal(covariance[:, :1, :1] * torch.eye(4).double())  # classes are independent


def test_many_features_are_the_exact_process(monkeypatch):
    """k − kᵀ (K + H⁻¹)⁻¹ k of the RBF kernel; 1,000 frequencies estimate k to about √(1 / 1,000) σ²."""
    monkeypatch.setattr(fixed_mean, "N_RF", 1000)
    (c, f), (new, _) = problem(8), problem(20, seed=1)
    gp, scale = next(candidates(c, f)), c.std(0, correction=0)
    sigma = gp.precision**-0.5
    both = torch.cat([c, new]).div(scale).numpy()
    k = reference.rbf(both, both, sigma, gp.lengthscale)
    noise = np.diag(1 / curvatures(f)[0])
    expected = np.diag(k[8:, 8:] - k[8:, :8] @ np.linalg.inv(k[:8, :8] + noise) @ k[:8, 8:])
    assert expected.min() < 0.8 / gp.precision  # data do matter there
    np.testing.assert_allclose(variance(gp, new).numpy(), expected, atol=0.08 / gp.precision)


def test_some_rows_of_very_many_stand_for_all(monkeypatch):
    """The same row again and again: half of them, counted twice, are all of them."""
    c, f = (each.repeat(50, 1) for each in problem(8))
    new = problem(20, seed=1)[0]
    whole = variance(next(candidates(c, f)), new)
    monkeypatch.setattr(fixed_mean, "ROWS", 399)
    torch.testing.assert_close(variance(next(candidates(c, f)), new), whole, rtol=0.02, atol=0)


def test_far_from_data_the_variance_returns_to_that_of_the_prior_and_at_one_image_it_is_closed_form(monkeypatch):
    """At the only training image σ² / (1 + h σ²), h = ¼ of two equal logits. Far away features have products ~ 1/√m."""
    monkeypatch.setattr(fixed_mean, "N_RF", 300)
    c, f = torch.zeros(1, 3), torch.zeros(1, 2)
    for gp in candidates(c, f):
        prior = 1 / gp.precision
        assert variance(gp, c).item() == pytest.approx(prior / (1 + prior / 4), rel=1e-4)
        far = variance(gp, torch.full((1, 3), 1000.0) + torch.arange(50)[:, None])
        assert (far <= prior * 1.0001).all() and far.mean() > 0.98 * prior


def test_with_many_data_what_is_missing_far_away_is_the_share_of_features_that_they_determine(monkeypatch):
    """Far phases are uniform: E φᵀ Σ φ = tr Σ / m."""
    monkeypatch.setattr(fixed_mean, "N_RF", 100)
    c, f = problem(400)
    for gp in candidates(c, f):
        g = torch.Generator().manual_seed(2)
        far = gp.centre + 1e4 * c.std(0) * torch.randn(2000, 3, generator=g).double()
        expected = gp.root.square().sum() / len(gp.root)  # tr R Rᵀ
        assert variance(gp, far).mean().item() == pytest.approx(expected.item(), rel=0.03)  # of 2,000


def test_a_feature_that_never_changes_and_data_without_distances_do_no_harm(monkeypatch):
    monkeypatch.setattr(fixed_mean, "N_RF", 50)
    c = torch.cat([torch.ones(30, 1), torch.zeros(30, 1)], 1)
    for gp in candidates(c, torch.zeros(30, 2)):
        assert variance(gp, torch.tensor([[1.0, 0.0], [9.0, 9.0]])).isfinite().all()


@pytest.fixture(scope="module")
def upgraded(network):
    return calgp.upgrade(network, blobs(1000, 1), train=blobs(300, 0), posterior="gp", outliers="variance")


def test_labels_stay_and_probabilities_are_no_worse_than_with_a_temperature(network, upgraded):
    found = upgraded.evaluate(blobs(5000, 2))
    assert isinstance(upgraded.posterior, FixedMeanGP) and upgraded.fitted.structure == "gp"
    assert upgraded.predict(blobs(500, 3)[0]).predictive.labels.equal(network(blobs(500, 3)[0]).argmax(1))
    assert found.scores.err == found.before.err
    assert found.scores.mnll <= found.temperature_alone.mnll + 0.002  # of 5,000, where the standard error is 0.01
    assert found.scores.ece < 0.03 < found.before.ece


def test_its_variance_is_an_outlier_score_with_a_threshold(upgraded):
    far = blobs(500, 9)[0] - 4
    found = upgraded.evaluate(blobs(1000, 2), outside=far).ood
    assert found["variance"].auroc > 0.99
    prediction = upgraded.predict(far)
    assert prediction.outlier_score.equal(variance(upgraded.posterior, upgraded.network(far)[0]).double())
    false = upgraded.predict(blobs(5000, 4)[0]).outliers.float().mean()
    assert prediction.outliers.float().mean() > 0.95 and false < 0.08  # 0.05 on average; of 500 its deviation is 0.01


def test_saved_and_loaded_it_predicts_the_same_bits(network, upgraded, tmp_path):
    upgraded.save(tmp_path / "upgraded.safetensors")
    loaded, x = UpgradedClassifier.load(tmp_path / "upgraded.safetensors", network), blobs(100, 7)[0]
    before, after = upgraded.predict(x), loaded.predict(x)
    for name in ("probs", "mutual_information", "outlier_score", "sets", "outliers"):
        assert getattr(before, name).equal(getattr(after, name)), name
    assert loaded.fitted == upgraded.fitted


@pytest.mark.parametrize(
    "options, message",
    [
        ({"posterior": "gpp"}, "There is no posterior 'gpp'; did you mean 'gp'"),
        ({"posterior": "gp", "structure": "full"}, "Invalid structure='full': it is of Laplace's Hessian"),
        ({"posterior": "gp", "train": None}, "posterior='gp' needs the data that the network was trained on"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(network, options, message):
    with pytest.raises(CalgpError, match=message):
        calgp.upgrade(network, blobs(200, 1), **{"train": blobs(300, 0)} | options)


@pytest.mark.slow
def test_from_a_run_folder_onnx_and_the_server_say_the_same(tmp_path):
    onnxruntime, testclient = (pytest.importorskip(name) for name in ("onnxruntime", "starlette.testclient"))
    from calgp.serve import create_app

    torch.manual_seed(0)
    images = load("digits", "test")
    network = nn.Sequential(nn.Flatten(), nn.Linear(784, 20), nn.ReLU(), nn.Linear(20, 10))
    held, train = ((images.pixels()[rows], images.y[rows]) for rows in (slice(250), slice(250, None)))
    calgp.upgrade(network, held, train=train, classes=images.classes, posterior="gp", outliers="variance").save(
        tmp_path / "mine", source="digits"
    )
    exported("export", tmp_path / "mine", "--out", tmp_path / "mine.onnx")
    run, x = calgp.load(tmp_path / "mine"), images.pixels()[:40]
    expected = run.predict(x)
    session = onnxruntime.InferenceSession(str(tmp_path / "mine.onnx"), providers=["CPUExecutionProvider"])
    probs, score = session.run(["probabilities", "outlier_score"], {"images": x.numpy()})
    np.testing.assert_allclose(probs, expected.probs.numpy(), atol=1e-5)
    np.testing.assert_allclose(score, expected.outlier_score.numpy(), rtol=1e-4)
    about = json.loads(session.get_modelmeta().custom_metadata_map["calgp"])
    assert about["outlier_threshold"]["threshold"] == run.outlier_threshold.threshold
    with testclient.TestClient(create_app(run), base_url="http://localhost") as client:
        grey = (255 * x[7, 0]).round().int().tolist()
        (answer,) = client.post("/v1/predict", json={"images": [{"grey": grey}]}).json()["predictions"]
    assert answer["probabilities"] == pytest.approx(expected.probs[7].tolist(), abs=1e-6)
    assert answer["outlier_score"] == pytest.approx(expected.outlier_score[7].item(), rel=1e-4)
