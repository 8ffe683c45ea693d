"""Embeddings in run folders: evaluated, calibrated, decided on, reported and exported as images are."""

import json

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from typer.testing import CliRunner

import calgp
from calgp import CalgpError, GPClassifier
from calgp.cli import app
from calgp.embeddings import load_embeddings
from calgp.embeddings.run import VectorRun, fit_folder, vector_images
from folders import exported


def call(*arguments):
    found = CliRunner().invoke(app, [str(each) for each in arguments])
    return found.exit_code, found.output if found.exception is None else str(found.exception)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """scikit-learn's digits: 600 rows with names of classes, and rows far away without labels."""
    folder = tmp_path_factory.mktemp("embeddings")
    x, y = load_digits(return_X_y=True)
    names = np.array(["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"])
    np.savez(folder / "train.npz", X=x[:600].astype(np.float32), y=names[y[:600]])
    np.savez(folder / "test.npz", X=x[600:1000].astype(np.float32), y=names[y[600:1000]])
    np.save(folder / "strange.npy", 16 - x[1000:1200].astype(np.float32))
    return folder


@pytest.fixture(scope="module")
def run(files):
    return fit_folder(files / "run", files / "train.npz", files / "test.npz", holdout=0.25, seed=0, made_by=None)


def test_the_folder_evaluates_as_the_classifier_that_it_holds(files, run):
    found = calgp.load(files / "run")
    assert isinstance(found, VectorRun) and found.card.train_images == 450
    evaluation = found.evaluate()
    x, y, classes = load_embeddings(files / "test.npz")
    labels = GPClassifier.load(files / "run" / "model.safetensors").predict(x)
    assert evaluation.own.scores.err == pytest.approx((labels != np.array(classes)[y]).mean())
    assert evaluation.n == 400 and evaluation.own.scores.err < 0.1
    outside = found.evaluate(f"embeddings:{files / 'strange.npy'}")
    assert outside.outside and outside.n == 200 and 0 < outside.ood["entropy"].auroc.value <= 1
    far = found.predict(load_embeddings(files / "strange.npy").X).outlier_score
    assert far.median() > found.predict(x).outlier_score.quantile(0.95)
    prediction = found.predict(x[:5])
    np.testing.assert_allclose(prediction.probs.numpy(), found.classifier.predict_proba(x[:5]), atol=1e-6)
    assert prediction.outlier_score.shape == (5,)


def test_strangers_are_told_by_every_outlier_score_and_called_so_at_the_stated_rate(files, run):
    """AUROC by counting pairs; the threshold of held-out rows flags a twentieth of the rows like them."""
    found, strange = calgp.load(files / "run"), f"embeddings:{files / 'strange.npy'}"
    found.evaluate()
    assert found.evaluate().flagged is None
    x, far = (load_embeddings(files / name).X for name in ("test.npz", "strange.npy"))
    outside = found.evaluate(strange).ood
    assert set(outside) == {
        "entropy",
        "mutual_information",
        "confidence",
        "combined",
        "density",
        "direction",
        "neighbours",
        "variance",
    }
    for name, number in outside.items():
        inside, beyond = (found.classifier.outlier_score(each, name.replace("_", "-")) for each in (x, far))
        # the same rows in batches of another size: scores that are nearly equal may change places
        assert number.auroc.value == pytest.approx((beyond[:, None] > inside).mean(), abs=2e-3), name
    decided = found.decide(false_alarm=0.05)
    assert decided.outliers.n == 150
    assert 0.005 < found.evaluate().flagged.share < 0.12 and found.evaluate(strange).flagged.share > 0.9
    assert calgp.load(files / "run").predict(far).outliers.double().mean() > 0.9
    assert "called outliers by combined" in call("evaluate", files / "run", "--source", strange)[1]
    (files / "run" / "decisions.json").unlink()


def test_commands_calibrate_decide_evaluate_report_and_verify(files, run):
    folder = files / "run"
    assert call("calibrate", folder, "--share", 0.5)[0] == 0
    status, output = call("decide", folder, "--coverage", 0.9)
    assert status == 0, output
    plain = json.loads(CliRunner().invoke(app, ["evaluate", str(folder), "--json"]).stdout)
    assert plain["calibrator"] == "temperature" and plain["decisions"]["sets"]["covered"] > 0.8
    page = calgp.load(folder).report().read_text()
    assert "GPClassifier" in page and "450 embeddings of 64 numbers" in page
    states = {check.what: check.state for check in calgp.load(folder).verify()}
    assert states["training images"] == "not checked"
    assert states[f"embeddings:{files / 'test.npz'}, temperature"] == "same bits"


def test_rows_are_the_numbers_of_the_file_and_keep_their_labels(files):
    images = vector_images(f"embeddings:{files / 'test.npz'}", ("two", "one"))
    x, y, classes = load_embeddings(files / "test.npz")
    assert images.classes == classes  # others than the run's: outside
    found = images.x.numpy().reshape(len(x), -1).view(np.float32)
    np.testing.assert_array_equal(found, x)
    assert images.y.tolist() == y.tolist()


def test_exported_vectors_give_the_probabilities_and_the_score_of_python(files, run, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    x = load_embeddings(files / "test.npz").X
    fit_folder(tmp_path / "run", files / "train.npz", files / "test.npz", holdout=0.25, seed=0, made_by=None)
    worst = json.loads(exported("export", tmp_path / "run", "--out", tmp_path / "digits.onnx", "--json"))[
        "worst_difference"
    ]
    assert worst.pop("outlier_score") <= run.classifier.scores_["combined"].step and max(worst.values()) <= 1e-5
    session = onnxruntime.InferenceSession(str(tmp_path / "digits.onnx"), providers=["CPUExecutionProvider"])
    probs, score = session.run(["probabilities", "outlier_score"], {"embeddings": x})
    np.testing.assert_allclose(probs, run.classifier.predict_proba(x), atol=1e-5)
    # it counts rows: rounding may move it by one; most are not moved
    differences = abs(score - run.classifier.outlier_score(x))
    assert differences.max() <= run.classifier.scores_["combined"].step and np.median(differences) < 1e-5
    assert session.run(["probabilities"], {"embeddings": x[:1]})[0].shape == (1, 10)


def test_fit_makes_a_folder_with_a_report_and_tests_on_a_fifth(files, tmp_path):
    status, output = call("fit", files / "train.npz", "--out", tmp_path / "mine")
    assert status == 0, output
    assert (tmp_path / "mine" / "report.html").is_file() and "ERR" in output
    run = calgp.load(tmp_path / "mine")
    assert run.card.train_images == 480 and run.folder.evaluations()[0].n == 120
    status, output = call("decide", tmp_path / "mine", "--coverage", 0.9)
    assert status == 1 and "no held-out rows" in output


def test_parquet_has_lists_or_a_column_each_feature(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    x, y = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32), ["a", "b"] * 3
    parquet.write_table(pyarrow.table({"embeddings": [*x.tolist()], "label": y}), tmp_path / "lists.parquet")
    columns = {f"x{place}": x[:, place] for place in range(3)}
    parquet.write_table(pyarrow.table({**columns, "y": y}), tmp_path / "columns.parquet")
    for name in ("lists", "columns"):
        found = load_embeddings(tmp_path / f"{name}.parquet")
        np.testing.assert_array_equal(found.X, x)
        assert found.classes == ("a", "b") and found.y.tolist() == [0, 1] * 3
    (tmp_path / "damaged.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(CalgpError, match=r"is no \.parquet file"):
        load_embeddings(tmp_path / "damaged.parquet")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["fit", "--out", "new"], "a file or folder of them, or --network and --source"),
        (["fit", "train.npz", "--out", "new", "--network", "timm:resnet18"], "one names a network, one its images"),
        (["fit", "train.npz", "--out", "m.safetensors", "--holdout", "0.1"], "of a run folder"),
        (["fit", "train.npz", "--out", "new", "--predictions", "p.npz"], "a run folder keeps its own"),
        (["fit", "strange.npy", "--out", "new"], "has no labels"),
        (["evaluate", "run", "--source", "digits"], "must be embeddings:PATH"),
        (["predict", "run", "train.npz"], "takes embeddings [N, 64], not images"),
        (["export", "run", "--to", "torch-export"], "exported to onnx only"),
        (["evaluate", "run", "--passes", "50"], "one pass is all"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(files, run, monkeypatch, arguments, message):
    monkeypatch.chdir(files)
    status, output = call(*arguments)
    assert status == 1 and message in " ".join(output.split()), output


def test_a_folder_whose_parts_do_not_fit_is_refused(files, run, tmp_path):
    other = fit_folder(tmp_path / "other", files / "train.npz", None, holdout=0, seed=1, made_by=None)
    x = torch.randn(40, 64).numpy()
    GPClassifier().fit(x, ["a", "b"] * 20).save(other.folder.path / "model.safetensors")
    with pytest.raises(CalgpError, match="other classes or embeddings than run"):
        calgp.load(other.folder.path)
