import json
import math
import shutil
from dataclasses import asdict

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset

from calgp import metrics
from calgp.data import Corruption, corrupted, from_dataset, load
from calgp.errors import CalgpError
from calgp.gp import predict
from calgp.runs import RunFolder, TrainingData, score
from calgp.runs.evaluation import test_images as images_for  # a name that pytest does not collect
from calgp.training import train_run
from folders import calibrate, evaluate, evaluate_unsaved, predict_files, predictions
from small_run import small


def test_scores_are_those_of_the_stored_predictions(trained):
    stored = predictions(trained, "digits")
    found = next(each for each in trained.evaluations() if each.source == "digits").own
    expected = metrics.scores(metrics.outcomes(stored["log_probs"], load("digits", "test").y)).to_dict()
    assert found.scores.to_dict() == pytest.approx(expected, rel=1e-6)
    for name, (low, high) in asdict(found.intervals).items():
        assert low <= getattr(found.scores, name) <= high or name == "ece"  # resampling raises the ECE
    assert sum(found.reliability.count) == 1000
    assert set(found.ece_variants) >= {"paper", "authors", "guo", "torchmetrics", "equal mass", "classwise"}


def test_histogram_of_the_entropy_is_that_of_the_stored_predictions(trained):
    stored = predictions(trained, "letters")["entropy"]
    found = trained.evaluation("letters")
    histogram = found.entropy_histogram
    expected, edges = np.histogram(stored.numpy(), 40, (0, math.log(10)))
    assert histogram.edges == pytest.approx(edges)
    assert sum(histogram.count) == 1000
    assert np.abs(np.array(histogram.count) - expected).sum() <= 4  # values at an edge, by rounding
    assert found.prediction_seconds > 0
    assert trained.evaluation("letters", "temperature") is None


def test_other_classes_are_outside_and_only_uncertainty_is_measured(trained):
    found = next(each for each in trained.evaluations() if each.source == "letters")
    assert found.outside and found.scores is None
    assert "scores" not in json.loads((trained.path / "scores-letters.json").read_text())
    with pytest.raises(CalgpError, match="letters has images of other classes than the run"):
        _ = found.own
    inside, outside = (predictions(trained, source)["entropy"] for source in ("digits", "letters"))
    auroc = found.ood["entropy"].auroc
    assert auroc.value == pytest.approx(metrics.ood(inside, outside).auroc)
    assert auroc.interval[0] < auroc.value < auroc.interval[1]


def test_mutual_information_is_part_of_the_entropy(trained):
    stored = predictions(trained, "digits")
    assert (stored["mutual_information"] >= 0).all()
    assert (stored["mutual_information"] <= stored["entropy"] + 1e-5).all()
    assert (stored["entropy"] <= math.log(10) + 1e-5).all()


def save_digits(place, names):
    """The first images of these digits, in a folder for each of `names`; the images in their order."""
    images = load("digits", "test")
    for name, label in names.items():
        (place / name).mkdir(parents=True)
        for number, x in enumerate(images.x[images.y == label][:3]):
            Image.fromarray(x[0].numpy()).save(place / name / f"{number}.png")
    return f"folder:{place}"


def test_images_of_some_of_the_classes_are_inside(trained, fabric, tmp_path):
    source = save_digits(tmp_path / "some", {"3": 3, "7": 7})
    images = images_for(trained.card(), source)
    assert images.classes == trained.card().classes and images.y.tolist() == [3, 3, 3, 7, 7, 7]
    found, _ = evaluate_unsaved(trained, fabric, source=source)
    assert not found.outside and found.scores is not None and found.scores.n == 6


def test_images_of_the_classes_and_of_others_together_are_refused(trained, tmp_path):
    with pytest.raises(CalgpError, match=r"has classes of the run \('3', …\) and others \('x', …\)"):
        images_for(trained.card(), save_digits(tmp_path / "mixed", {"3": 3, "x": 7}))


def test_unreadable_images_are_refused_or_left_out(trained, fabric, tmp_path):
    source = save_digits(tmp_path / "other", {"x": 3, "y": 7})
    (tmp_path / "other" / "x" / "1.png").write_text("no image")
    with pytest.raises(CalgpError, match=r"x/1\.png is not a readable image \(its format is not known\)"):
        evaluate_unsaved(trained, fabric, source=source)
    found, _ = evaluate_unsaved(trained, fabric, source=source, skip_unreadable=True)
    assert found.n == 5 and found.skip_unreadable


def test_images_of_another_form_are_refused_or_converted(trained, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(5):
            Image.new("RGB", (40, 40), (number * 50, 0, 0)).save(tmp_path / name / f"{number}.png")
    source = f"folder:{tmp_path}"
    with pytest.raises(CalgpError, match="3 × 40 × 40, the run was trained on 1 × 28 × 28"):
        images_for(trained.card(), source)
    assert images_for(trained.card(), source, convert=True).x.shape == (
        10,
        1,
        28,
        28,
    )  # the whole folder: none is trained on


def test_image_files_get_the_predictions_of_the_same_pixels(trained, tmp_path, fabric):
    images = load("digits", "test")
    for number in range(3):
        Image.fromarray(images.x[number, 0].numpy()).save(tmp_path / f"{number}.png")
    predicted = predict_files(trained, [tmp_path], fabric, passes=4, seed=0)
    assert predicted.names == tuple(str(tmp_path / f"{number}.png") for number in range(3))
    batch = images.pixels(torch.arange(3)), torch.zeros(3, dtype=torch.long)  # all have the masks of row 0
    expected = predict(trained.model(), [batch], passes=4, seed=0)
    torch.testing.assert_close(predicted.predictive.log_probs, expected.log_probs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("value", [0, 255])
def test_constant_images_get_finite_probabilities(trained, tmp_path, fabric, value):
    Image.fromarray(np.full((28, 28), value, np.uint8)).save(tmp_path / "flat.png")
    predicted = predict_files(trained, [tmp_path / "flat.png"], fabric, passes=4)
    assert predicted.predictive.log_probs.isfinite().all() and predicted.entropy.isfinite().all()


def test_missing_empty_and_broken_images_are_named(trained, tmp_path, fabric):
    (tmp_path / "broken.png").write_bytes(b"no picture")
    (tmp_path / "empty").mkdir()
    for path, says in (("missing.png", "does not exist"), ("empty", "has no images"), ("broken.png", "broken.png")):
        with pytest.raises(CalgpError, match=says):
            predict_files(trained, [tmp_path / path], fabric, passes=2)


def test_another_seed_changes_little_but_something(trained):
    model, images = trained.model(), load("digits", "test").take(torch.arange(100))
    first, again, other = (score(model, images, passes=8, seed=seed) for seed in (0, 0, 1))
    assert first == again
    assert first.mnll != other.mnll
    assert first.mnll == pytest.approx(other.mnll, rel=0.2)


def test_evaluating_leaves_the_model_file_alone(trained, fabric):
    before = (trained.path / "model.safetensors").read_bytes()
    evaluate(trained, fabric, passes=2, source="letters")
    evaluate(trained, fabric, passes=4, source="letters")
    assert (trained.path / "model.safetensors").read_bytes() == before


@pytest.mark.slow
def test_a_corruption_is_of_the_images_and_of_nothing_else(trained, tmp_path, fabric):
    folder = RunFolder(shutil.copytree(trained.path, tmp_path / "run"))
    found = evaluate(folder, fabric, passes=4, corruption=Corruption("blur", 4))
    images = corrupted(load("digits", "test"), "blur", 4, seed=0)
    assert found.source == "digits~blur-4" and found.checksum == images.checksum()
    stored = predictions(folder, "digits", corruption="blur-4")
    plain = evaluate(folder, fabric, passes=4, images=images, source="blurred")
    assert found.own.scores == plain.own.scores and plain.corruption is None
    assert torch.equal(stored["log_probs"], predictions(folder, "blurred")["log_probs"])
    assert folder.shifted() == [found]
    assert [evaluation.source for evaluation in folder.evaluations()] == ["blurred", "digits", "letters"]


@pytest.mark.slow
def test_corrupted_images_of_a_calibrated_run_have_both_in_their_names(trained, tmp_path, fabric):
    folder = RunFolder(shutil.copytree(trained.path, tmp_path / "run"))
    calibrate(folder, fabric, passes=2)
    for calibrated in (True, False):
        evaluate(folder, fabric, passes=2, corruption=Corruption("jpeg", 1), calibrated=calibrated)
    names = {path.name for path in folder.path.glob("scores-*~*")}
    assert names == {"scores-digits~jpeg-1.json", "scores-digits~jpeg-1.temperature.json"}
    assert {found.calibrator for found in folder.shifted()} == {None, "temperature"}


def test_any_pytorch_data_set_trains_and_is_evaluated(tmp_path, fabric):
    x = torch.rand(60, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    y = torch.arange(60) % 2
    x[y == 0, ..., :6] *= 0.1
    x[y == 1, ..., 6:] *= 0.1  # bright on the left, bright on the right
    images = from_dataset(DataLoader(TensorDataset(x, y), batch_size=7), classes=["right", "left"])
    folder = RunFolder(tmp_path / "run")
    train_run(small(train_size=None, source="mine", steps=60), folder, fabric, data=TrainingData(images, None))
    found = evaluate(folder, fabric, images=images, source="mine", passes=4)
    assert not found.outside and found.n == 60
    assert found.own.scores.err < 0.2
    with pytest.raises(CalgpError, match="1 × 28 × 28"):
        evaluate(folder, fabric, images=load("digits", "test"), source="digits")
