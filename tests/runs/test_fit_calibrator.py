import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from calgp import metrics
from calgp.data import from_dataset, load
from calgp.errors import CalgpError
from calgp.gp import Passes, predict
from calgp.methods import METHODS, Cnn
from calgp.nets import BACKBONES
from calgp.posthoc.calibration import CALIBRATORS, Temperature
from calgp.runs import Run, RunFolder, TrainingData, compare
from calgp.runs.fit_calibrator import fitted_on, with_caution
from calgp.runs.record import to_json
from calgp.training import train_run
from folders import calibrate, evaluate, held_out, predict_files, predictions, tensors
from small_run import small


@pytest.fixture
def copy(trained, tmp_path) -> RunFolder:
    """A run with a hold-out of 40 images, not calibrated yet."""
    shutil.copytree(trained.path, tmp_path / "copy")
    return RunFolder(tmp_path / "copy")


@pytest.fixture(scope="module")
def calibrated(trained, tmp_path_factory, fabric) -> RunFolder:
    """The run with a temperature, evaluated inside and outside, calibrated and not. Read only."""
    path = tmp_path_factory.mktemp("calibrated") / "run"
    shutil.copytree(trained.path, path)
    calibrate(folder := RunFolder(path), fabric, passes=4)
    for source in ("digits", "letters"):
        evaluate(folder, fabric, source=source, passes=4)
    return folder


def test_the_hold_out_is_cut_again_as_it_was(trained):
    card, images = trained.card(), held_out(trained)
    assert images.rows.tolist() == list(card.holdout_rows)
    whole = load("digits", "train")
    places = [whole.rows.tolist().index(row) for row in images.rows.tolist()]
    assert images.x.equal(whole.x[places]) and images.y.equal(whole.y[places])


@pytest.mark.parametrize("name", CALIBRATORS)
def test_the_file_holds_what_a_direct_fit_finds(copy, fabric, name):
    found = calibrate(copy, fabric, calibrator=name, passes=4, seed=2)
    images = held_out(copy)
    before = predict(copy.model(), [(images.pixels(), images.rows)], passes=4, seed=2).log_probs
    assert json.loads((copy.path / "calibration.json").read_text()) == to_json(found) and found == copy.calibration()
    assert (found.calibrator, found.n, found.samples, found.seed) == (name, 40, 4, 2)
    outcomes = metrics.outcomes(before, images.y)
    assert found.before.mnll == pytest.approx(metrics.mnll(outcomes).item(), rel=1e-5)
    assert found.before.ece == pytest.approx(metrics.ece(outcomes).item(), abs=1e-5)
    after = metrics.outcomes(copy.calibration().fitted.apply(before), images.y)
    assert found.after.mnll == pytest.approx(metrics.mnll(after).item(), rel=1e-4)
    if name in ("temperature", "vector"):  # they minimise it; one against the rest, normalised, does not
        assert found.after.mnll < found.before.mnll


def test_a_calibrator_that_does_no_good_beyond_its_hold_out_is_warned_about():
    images = load("digits", "test").balanced(60, seed=0)
    generator = torch.Generator().manual_seed(0)
    right = torch.nn.functional.one_hot(images.y, 10)  # as sure as it is right
    before = (torch.randn(60, 10, generator=generator) + 3 * right).log_softmax(1)
    how = Passes(1, "moments")
    found = with_caution(fitted_on(before, images, "isotonic", how, seed=0))
    assert found.after.mnll < found.before.mnll < found.crossed.mnll
    assert f"{found.crossed.mnll:.4f} with, cross-validated" in found.warning
    sharper = with_caution(fitted_on((3 * before).log_softmax(1), images, "temperature", how, seed=0))
    assert sharper.crossed.mnll < sharper.before.mnll and sharper.warning is None


def test_evaluation_applies_it_and_keeps_both_results(calibrated, trained):
    names = {path.name for path in calibrated.path.glob("scores-*")}
    assert names == {f"scores-{source}{by}.json" for source in ("digits", "letters") for by in ("", ".temperature")}
    plain, scaled = (predictions(calibrated, "digits", name) for name in (None, "temperature"))
    beta = 1 / calibrated.calibration().parameters["temperature"]
    expected = plain["log_probs"].double().numpy() * beta
    expected -= np.log(np.exp(expected).sum(1, keepdims=True))
    np.testing.assert_allclose(scaled["log_probs"], expected, atol=1e-5)
    assert scaled["label"].equal(plain["label"])
    uncalibrated, found = (
        next(e for e in calibrated.evaluations() if e.source == "digits" and e.calibrator == name)
        for name in (None, "temperature")
    )
    assert found.own.scores.err == uncalibrated.own.scores.err
    assert found.own.scores.mnll == pytest.approx(
        -expected[np.arange(1000), load("digits", "test").y.numpy()].mean(), rel=1e-5
    )
    assert found.calibration == calibrated.calibration() and uncalibrated.calibration is None


def test_entropy_is_calibrated_and_mutual_information_is_the_samples_own(calibrated):
    plain, scaled = (predictions(calibrated, "digits", name) for name in (None, "temperature"))
    p = scaled["log_probs"].double().exp()
    np.testing.assert_allclose(scaled["entropy"], -(p * p.log()).sum(1), rtol=1e-4)
    assert not torch.allclose(scaled["entropy"], plain["entropy"], rtol=0.01)
    assert scaled["mutual_information"].equal(plain["mutual_information"])
    assert scaled["spread"].equal(plain["spread"])


def test_outside_images_are_compared_with_inside_ones_calibrated_alike(calibrated):
    inside, outside = (predictions(calibrated, name, "temperature")["entropy"] for name in ("digits", "letters"))
    found = next(each for each in calibrated.evaluations() if each.outside and each.calibrator == "temperature")
    assert found.ood["entropy"].auroc.value == pytest.approx(metrics.ood(inside, outside).auroc)


def test_uncalibrated_gives_the_probabilities_as_trained(calibrated, trained, fabric, tmp_path):
    folder = RunFolder(shutil.copytree(calibrated.path, tmp_path / "copy"))
    found = evaluate(folder, fabric, passes=4, calibrated=False)
    assert found.calibrator is None
    first = next(each for each in trained.evaluations() if each.source == "digits")
    assert found.own.scores == first.own.scores


def test_predicted_files_are_calibrated_too(calibrated, fabric, tmp_path):
    Image.fromarray(load("digits", "test").x[0, 0].numpy()).save(tmp_path / "digit.png")
    scaled, plain = (
        predict_files(calibrated, [tmp_path], fabric, passes=4, calibrated=flag).predictive for flag in (True, False)
    )
    temperature = calibrated.calibration().parameters["temperature"]
    torch.testing.assert_close(scaled.log_probs, (plain.log_probs / temperature).log_softmax(-1))
    assert scaled.mutual_information.equal(plain.mutual_information)


def test_a_comparison_has_a_row_for_each(calibrated):
    rows = {row.method: row for row in compare([calibrated])}
    assert set(rows) == {"cnn-gp-sorf", "cnn-gp-sorf + temperature"}
    assert rows["cnn-gp-sorf"].metrics["err"] == rows["cnn-gp-sorf + temperature"].metrics["err"]
    assert rows["cnn-gp-sorf"].metrics["mnll"] != rows["cnn-gp-sorf + temperature"].metrics["mnll"]
    assert rows["cnn-gp-sorf"].auroc["letters"] != rows["cnn-gp-sorf + temperature"].auroc["letters"]


def test_a_run_without_a_hold_out_is_refused_with_a_way_to_get_one(tmp_path, fabric):
    train_run(small(steps=1), folder := RunFolder(tmp_path / "run"), fabric)
    with pytest.raises(CalgpError, match=r"--holdout 0\.1"):
        calibrate(folder, fabric)
    assert folder.calibration() is None
    images = load("digits", "train").balanced(50, seed=77)  # images of one's own choice serve as well
    assert calibrate(folder, fabric, held_out=images, passes=2).n == 50


def test_a_hold_out_of_other_classes_or_form_is_refused(copy, fabric):
    with pytest.raises(CalgpError, match="must be the same"):
        calibrate(copy, fabric, held_out=load("letters", "test"))
    with pytest.raises(CalgpError, match="1 × 20 × 20"):
        calibrate(copy, fabric, held_out=load("digits", "test", size=20))


def test_an_unknown_calibrator_and_an_unfinished_run_are_refused(copy, fabric):
    with pytest.raises(CalgpError, match="no calibrator 'magic'"):
        calibrate(copy, fabric, calibrator="magic")
    copy.remove("model.safetensors")
    with pytest.raises(CalgpError, match="no finished model"):
        calibrate(copy, fabric)


@pytest.mark.parametrize("change", [{"holdout_rows": [1, 2, 3]}, {"checksum": "0"}])
def test_other_images_than_those_of_the_run_are_refused(copy, fabric, change):
    path = copy.path / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CalgpError, match="not those that"):
        calibrate(copy, fabric)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"calibrator": "temperature", "parameters": {"temperature": -1}}'])
def test_a_damaged_calibration_is_named_and_can_be_replaced(copy, fabric, text):
    (copy.path / "calibration.json").write_text(text)
    with pytest.raises(CalgpError, match=r"calibration\.json"):
        evaluate(copy, fabric, passes=1)
    assert evaluate(copy, fabric, passes=1, calibrated=False).scores is not None
    found = calibrate(copy, fabric, passes=1)  # as the message advises
    assert evaluate(copy, fabric, passes=1).calibration == found


# --- CNN+CAL -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cnn_cal(tmp_path_factory, fabric) -> RunFolder:
    folder = RunFolder(tmp_path_factory.mktemp("cal") / "run")
    train_run(small(method="cnn-cal", steps=40), folder, fabric)
    return folder


def test_cnn_cal_holds_out_a_tenth_of_each_class_and_calibrates_itself(cnn_cal, fabric):
    card = cnn_cal.card()
    assert card.run.holdout == 0.1 and len(card.holdout_rows) == 20
    images = held_out(cnn_cal)
    assert images.y.bincount().tolist() == [2] * 10
    found = cnn_cal.calibration()
    with torch.no_grad():
        log_probs = cnn_cal.model()(images.pixels()).mean[0].log_softmax(-1)
    assert found.parameters["temperature"] == pytest.approx(Temperature.fit(log_probs, images.y).temperature, rel=1e-4)
    assert calibrate(cnn_cal, fabric) == found  # `calgp calibrate` does the same


def test_cnn_cal_is_the_cnn_but_for_its_temperature(cnn_cal, tmp_path, fabric):
    train_run(small(method="cnn", steps=40, holdout=0.1), plain := RunFolder(tmp_path / "cnn"), fabric)
    ours, theirs = (tensors(folder, "model.safetensors") for folder in (cnn_cal, plain))
    assert all(ours[key].equal(theirs[key]) for key in ours)
    assert plain.calibration() is None


def test_results_of_cnn_cal_say_whether_they_are_calibrated(cnn_cal):
    card = cnn_cal.card()
    assert card.title("temperature") == "cnn-cal + temperature"
    assert card.title(None) == "cnn-cal, uncalibrated"


def test_a_method_that_calibrates_needs_a_hold_out():
    assert Run(METHODS["cnn-cal"], BACKBONES["lenet"]).holdout == 0.1
    assert Run(METHODS["cnn"], BACKBONES["lenet"]).holdout is None  # by the number of images
    assert Run(METHODS["cnn-cal"], BACKBONES["lenet"], holdout=0.3).holdout == 0.3
    with pytest.raises(CalgpError, match=r"--holdout 0\.1"):
        Run(METHODS["cnn-cal"], BACKBONES["lenet"], holdout=0.0)
    with pytest.raises(CalgpError, match="no calibrator 'magic'"):
        Cnn(calibrator="magic")


def test_data_without_a_hold_out_is_refused_before_training(tmp_path, fabric):
    images = load("digits", "train").balanced(100, seed=0)
    with pytest.raises(CalgpError, match="held-out images"):
        train_run(small(method="cnn-cal"), RunFolder(tmp_path / "run"), fabric, data=TrainingData(images, None))
    assert not (tmp_path / "run").exists()


def test_data_from_python_brings_its_own_hold_out(tmp_path, fabric):
    x = torch.rand(40, 1, 12, 12, generator=torch.Generator().manual_seed(0))
    rest, held_out = from_dataset(torch.utils.data.TensorDataset(x, torch.arange(40) % 2)).split(0.25, seed=0)
    folder = RunFolder(tmp_path / "run")
    run = dataclasses.replace(small(method={"name": "cnn-cal", "calibrator": "vector"}, steps=2), train_size=None)
    train_run(run, folder, fabric, data=TrainingData(rest, held_out))
    assert folder.calibration().calibrator == "vector" and folder.calibration().n == 10


def test_runs_of_one_split_seed_hold_out_the_same():
    one, other = (TrainingData.of(small(holdout=0.2, seed=seed, split_seed=7), None) for seed in (1, 2))
    assert one.held_out.rows.equal(other.held_out.rows) and one.train.rows.equal(other.train.rows)
    third = TrainingData.of(small(holdout=0.2, seed=7), None)  # without it, the seed decides
    assert third.held_out.rows.equal(one.held_out.rows)
    assert not TrainingData.of(small(holdout=0.2, seed=1), None).held_out.rows.equal(one.held_out.rows)
