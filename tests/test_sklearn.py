"""ConvGPClassifier: scikit-learn's own checks, the same numbers as calgp.train, and the tools that people use."""

import math

import joblib
import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.metrics import log_loss
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from calgp import METHODS, CalgpError, ConvGPClassifier, Predictive
from calgp.data import Images, load
from calgp.gp.inference import DRAWS
from calgp.methods import CnnMcd
from calgp.nets import LeNet
from calgp.runs import RunFolder, TrainingData, from_json
from calgp.training import train_run
from folders import evaluate, predict_files

TINY = {"backbone": "lenet", "backbone_options": {"channels": (4,), "hidden": (16,)}, "device": "cpu", "passes": 5}
# The checks fit it more than a hundred times, on images of 1 × 2 pixels and the like: a network that pads them to no
# more than 4 × 4. In double precision, since they want probabilities to be the same to 1e-7 in any order of X.
CHECKED = ConvGPClassifier(
    backbone="resnet", backbone_options={"n": 1, "widths": (8,), "pad_to": 4}, method_options={"n_rf": 32}, passes=5,
    epochs=5, batch_size=30, learning_rate=0.05, normalise="standard", device="cpu", precision="64-true",
)  # fmt: skip
DIGITS = load("digits", "train").balanced(60, 0).resized(12)
X, Y = DIGITS.x[:, 0].numpy(), DIGITS.y.numpy()


def estimator(**options) -> ConvGPClassifier:
    return ConvGPClassifier(**(TINY | {"epochs": 1, "batch_size": 20, "random_state": 3} | options))


@pytest.fixture(scope="module")
def fitted() -> ConvGPClassifier:
    """Read only."""
    return estimator(epochs=4, learning_rate=0.01).fit(X, Y)


@pytest.mark.slow
@parametrize_with_checks([CHECKED])
def test_scikit_learns_own_checks(estimator, check):
    """All of them: none is exempted."""
    check(estimator)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(value.equal(b[key]) for key, value in a.items())


@pytest.mark.parametrize(
    ("options", "described"),
    [
        ({}, {}),
        ({"method": "cnn-mcd", "method_options": {"keep": 0.75}, "class_weight": "balanced", "augment": ("flip",)},
         {"method": {"name": "cnn-mcd", "keep": 0.75}, "class_weights": "balanced", "augment": ["flip"]}),
        ({"method": "cnn-cal", "early_stopping": True, "patience": 1, "validation_fraction": 0.5, "epochs": 4.0,
          "normalise": "standard"},
         {"method": "cnn-cal", "patience": 1, "holdout": 0.5, "epochs": 4.0, "normalise": "standard"}),
    ],
)  # fmt: skip
def test_the_numbers_are_those_of_calgp_train(tmp_path, fabric, options, described):
    found = estimator(**options).fit(X, Y)
    common = {"backbone": {"name": "lenet"} | TINY["backbone_options"], "epochs": 1.0, "batch_size": 20, "seed": 3}
    run, folder = from_json(common | described), RunFolder(tmp_path / "run")
    data = TrainingData.cut(Images.of(DIGITS.x, DIGITS.y, DIGITS.classes), run)
    model = train_run(run, folder, fabric, data=data).model
    assert same(found.model_.state_dict(), model.state_dict())
    assert found.calibration_ == folder.calibration()
    found_mnll, expected = ([r.mnll for r in log if r.kind == "holdout"] for log in (found.history_, folder.log()))
    assert found_mnll == expected


@pytest.fixture(scope="module")
def fabric():
    from lightning_fabric import Fabric

    return Fabric(accelerator="cpu", devices=1)


def test_entropy_and_probabilities_are_those_of_the_predictive(fitted):
    predictive = fitted.predictive(X)
    assert isinstance(predictive, Predictive)
    assert predictive.samples == 5 * (DRAWS // 5)  # draws of f in all passes
    probs = fitted.predict_proba(X)
    assert np.array_equal(probs, predictive.probs.numpy()) and probs.dtype == np.float32
    assert np.array_equal(fitted.predict(X), fitted.classes_[probs.argmax(1)])
    by_hand = -(probs.astype(np.float64) * np.log(probs.astype(np.float64))).sum(1)
    np.testing.assert_allclose(fitted.entropy(X), by_hand, atol=1e-6)  # float32
    assert fitted.entropy(X).max() <= math.log(10) + 1e-6
    assert fitted.score(X, Y) == np.mean(fitted.predict(X) == Y)


def test_a_prediction_does_not_depend_on_the_other_images(fitted):
    order = np.random.default_rng(0).permutation(len(X))
    # batches of other sizes add in other orders: float32
    np.testing.assert_allclose(fitted.predict_proba(X[order]), fitted.predict_proba(X)[order], atol=1e-6)
    np.testing.assert_allclose(fitted.predict_proba(X[7:8]), fitted.predict_proba(X)[7:8], atol=1e-6)


def test_the_same_images_in_every_arrangement(fitted):
    expected = estimator().fit(X, Y)
    flat = estimator(image_shape=(12, 12)).fit(X.reshape(60, -1), Y)
    assert flat.n_features_in_ == 144
    for other in (flat, *(estimator().fit(shaped, Y) for shaped in (X[..., None], X[:, None]))):
        assert other.image_shape_ == (1, 12, 12)
        assert same(other.model_.state_dict(), expected.model_.state_dict())
    colours = np.random.default_rng(0).integers(256, size=(60, 8, 9, 3), dtype=np.uint8)
    last, first, flat = (
        estimator(image_shape=shape).fit(images, Y)
        for shape, images in (
            (None, colours), (None, colours.transpose(0, 3, 1, 2)), ((8, 9, 3), colours.reshape(60, -1))
        )
    )  # fmt: skip
    assert last.image_shape_ == (3, 8, 9)
    assert same(last.model_.state_dict(), first.model_.state_dict())
    assert same(last.model_.state_dict(), flat.model_.state_dict())


@pytest.mark.parametrize(
    ("shape", "options", "says"),
    [
        ((20, 3, 8, 3), {}, "could have 1, 3 or 4 channels first or last; say channels="),
        ((20, 8, 8, 8), {}, "has no 1, 3 or 4 channels"),
        ((20, 8, 8, 8), {"channels": "middle"}, "Invalid channels='middle': must be first, last or auto"),
        ((20, 2, 8, 8, 3), {}, "X has 5 dimensions"),
        ((20, 10), {"image_shape": (3, 3)}, "does not fit 10 numbers an image"),
        ((20, 10), {"image_shape": (10,)}, "does not fit 10 numbers an image"),
        ((20, 10), {"pixel_range": (1, 0)}, "black below white"),
        ((20, 10), {"class_weight": {"cat": 2}}, r"class_weight names \['cat'\], which y has not"),
    ],
)
def test_what_is_ambiguous_or_cannot_be_is_refused(shape, options, says):
    with pytest.raises(ValueError, match=says):
        estimator(**options).fit(np.zeros(shape), np.arange(20) % 2)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"method": "gp"}, "There is no method 'gp'"),
        ({"method_options": {"dept": 3}}, "no option 'dept'"),
        ({"device": "abacus"}, "Invalid --device abacus: must be auto, cpu"),
        ({"early_stopping": True, "validation_fraction": 0.0}, "early stopping needs held-out images"),
        ({"class_weight": "even"}, "class_weights='even'"),
    ],
)
def test_options_are_refused_as_everywhere_in_calgp(options, says):
    with pytest.raises(CalgpError, match=says):
        estimator(**options).fit(X, Y)


def test_said_channels_decide():
    assert estimator(channels="last").fit(np.zeros((20, 3, 8, 3)), np.arange(20) % 2).image_shape_ == (3, 3, 8)
    assert estimator(channels="first").fit(np.zeros((20, 3, 8, 3)), np.arange(20) % 2).image_shape_ == (3, 8, 3)
    assert estimator(channels="last").fit(np.zeros((20, 8, 8, 5)), np.arange(20) % 2).image_shape_ == (5, 8, 8)


def test_pixels_are_uint8_or_numbers_of_a_range():
    expected = estimator().fit(X, Y)
    assert expected.pixel_range_ is None
    in_one = estimator().fit(X / 255, Y)
    assert in_one.pixel_range_ == (0, 1)
    spread = np.where(X > 253, 255, X)  # so that the range is all of 0 … 255
    expected_spread = estimator().fit(spread, Y)
    stretched = estimator().fit(spread.astype(np.float32) - 100, Y)
    assert spread.dtype == np.uint8 and stretched.pixel_range_ == (-100, 155)
    assert same(stretched.model_.state_dict(), expected_spread.model_.state_dict())
    said = estimator(pixel_range=(0, 255)).fit(X.astype(int), Y)
    for other in (in_one, said):
        assert same(other.model_.state_dict(), expected.model_.state_dict())
    assert np.array_equal(in_one.predict_proba(X / 255), expected.predict_proba(X))
    assert np.array_equal(in_one.predict_proba(np.full((1, 12, 12), 7.0)), in_one.predict_proba(np.ones((1, 12, 12))))
    with pytest.raises(ValueError, match="pixels of float64; fit has seen uint8"):
        expected.predict(X / 255)
    with pytest.raises(ValueError, match="pixels of uint8; fit has seen numbers from"):
        in_one.predict(X)
    with pytest.raises(ValueError, match="images of 1 × 12 × 10; fit has seen 1 × 12 × 12"):
        expected.predict(X[:, :, :10])


def test_labels_may_be_words_and_weights_go_by_them():
    words = np.array(["cat", "dog", "emu"])[np.arange(60) % 3]
    found = estimator(class_weight={"dog": 5.0}).fit(X, words)
    assert found.classes_.tolist() == ["cat", "dog", "emu"]
    assert found.run_.class_weights == (1.0, 5.0, 1.0) and found.card_.classes == ("cat", "dog", "emu")
    assert set(found.predict(X)) <= {"cat", "dog", "emu"}


def test_methods_and_networks_may_be_values():
    by_name = estimator(method="cnn-mcd").fit(X, Y)
    by_value = estimator(method=CnnMcd(), backbone=LeNet(), backbone_options={"channels": (4,), "hidden": (16,)})
    assert same(clone(by_value).fit(X, Y).model_.state_dict(), by_name.model_.state_dict())
    assert estimator(method=METHODS["cnn-cal"]).fit(X, Y).calibrator_ is not None


def test_random_state_decides_and_none_is_new_each_time():
    first = estimator(random_state=np.random.RandomState(0)).fit(X, Y)
    assert first.run_.seed == np.random.RandomState(0).randint(2**31 - 1)
    assert estimator(random_state=None).fit(X, Y).run_.seed != estimator(random_state=None).fit(X, Y).run_.seed


def test_early_stopping_keeps_the_best_epoch():
    found = estimator(early_stopping=True, patience=2, validation_fraction=0.4, epochs=40, learning_rate=0.3).fit(X, Y)
    scored = {record.step: record.mnll for record in found.history_ if record.kind == "holdout"}
    kept = next(record for record in found.history_ if record.kind == "kept")
    assert len(scored) < 40  # a learning rate of 0.3 gets worse soon
    assert kept.mnll == scored[kept.step] == min(scored.values())


def test_verbose_tells_of_each_epoch(capsys):
    estimator(epochs=2).fit(X, Y)
    assert capsys.readouterr().out == ""
    estimator(epochs=2, verbose=1).fit(X, Y)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["step 3 of 6", "step 6 of 6"]


def test_a_saved_run_folder_predicts_the_same(fitted, tmp_path):
    from PIL import Image

    folder = fitted.save(tmp_path / "run")
    assert folder.card().run == fitted.run_ and folder.finished
    assert same(folder.model().state_dict(), fitted.model_.state_dict())
    Image.fromarray(X[0]).save(tmp_path / "0.png")
    predicted = predict_files(folder, [tmp_path / "0.png"], passes=5, seed=3).predictive  # its row is 0, too
    np.testing.assert_allclose(predicted.probs, fitted.predict_proba(X[:1]), atol=1e-6)  # float32
    scores = evaluate(folder, images=DIGITS, source="mine", passes=5).own.scores
    assert 0 <= scores.err <= 1
    with pytest.raises(CalgpError, match="already holds a run"):
        fitted.save(tmp_path / "run")


def test_it_works_in_a_pipeline_and_a_grid():
    pipeline = make_pipeline(MinMaxScaler(), estimator(image_shape=(12, 12)))
    grid = {"convgpclassifier__method": ["cnn", "cnn-gp-sorf"], "convgpclassifier__epochs": [1]}
    search = GridSearchCV(pipeline, grid, cv=2, scoring="neg_log_loss", error_score="raise").fit(X.reshape(60, -1), Y)
    assert search.best_params_["convgpclassifier__method"] in grid["convgpclassifier__method"]
    assert log_loss(Y, search.predict_proba(X.reshape(60, -1))) < 10


def test_it_can_be_calibrated_by_scikit_learn():
    calibrated = CalibratedClassifierCV(estimator(), cv=2).fit(X, Y)
    np.testing.assert_allclose(calibrated.predict_proba(X).sum(1), 1, atol=1e-6)  # float32


def test_a_fitted_estimator_survives_joblib(fitted, tmp_path):
    joblib.dump(fitted, tmp_path / "estimator.joblib")
    read = joblib.load(tmp_path / "estimator.joblib")
    assert np.array_equal(read.predict_proba(X), fitted.predict_proba(X))
    assert read.get_params() == fitted.get_params()
    again = clone(read).set_params(passes=2)
    assert not hasattr(again, "model_") and again.passes == 2


@pytest.mark.slow
def test_folds_in_processes_score_the_same():
    alone, shared = (
        cross_val_score(estimator(), X, Y, cv=2, n_jobs=jobs, scoring="neg_log_loss") for jobs in (None, 2)
    )
    # workers may have another number of threads, which add in another order: float32
    np.testing.assert_allclose(shared, alone, rtol=1e-4)
