import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from calgp.data import Corruption, load
from calgp.errors import CalgpError
from calgp.gp import predict
from calgp.posthoc import decisions
from calgp.posthoc.decisions import (
    PredictionSets,
    Selection,
    clopper_pearson,
    keyed_uniform,
    risk_coverage,
    uncertainty,
)
from calgp.runs import RunFolder, ensemble
from calgp.runs.evaluation import columns_of
from calgp.runs.record import to_json
from calgp.training import train_run
from folders import active_decisions, calibrate, decide, evaluate, held_out, predict_files, predictions
from small_run import small

WANTED = {"error": 0.4, "confidence": 0.8, "coverage": 0.8, "empty": True}


@pytest.fixture
def copy(trained, tmp_path) -> RunFolder:
    """A run with a hold-out of 40 images, with neither calibrator nor decisions."""
    return RunFolder(shutil.copytree(trained.path, tmp_path / "copy"))


@pytest.fixture(scope="module")
def decided(tmp_path_factory, fabric) -> RunFolder:
    """A run that has learned something, with a threshold and sets, evaluated inside, outside, corrupted. Read only."""
    folder = RunFolder(tmp_path_factory.mktemp("decided") / "run")
    train_run(small(method="cnn", train_size=800, steps=120, holdout=0.25), folder, fabric)
    decide(folder, fabric, passes=4, error=0.1, confidence=0.8, coverage=0.8, empty=True)
    for source in ("digits", "letters"):
        evaluate(folder, fabric, source=source, passes=4)
    evaluate(folder, fabric, passes=4, corruption=Corruption("rotation", 5))
    return folder


@pytest.mark.parametrize("score", decisions.SCORES)
@pytest.mark.parametrize("kind", decisions.KINDS)
def test_the_file_holds_what_a_direct_fit_finds(copy, fabric, score, kind):
    options = WANTED | {"score": score, "sets": kind, "by_class": False}
    found = decide(copy, fabric, passes=4, seed=2, **options)
    assert json.loads((copy.path / "decisions.json").read_text()) == to_json(found) and found == copy.decisions()
    images = held_out(copy)
    predicted = predict(copy.model(), [(images.pixels(), images.rows)], passes=4, seed=2)
    wrong = predicted.labels != images.y
    selection = Selection.fit(uncertainty(columns_of(predicted), score), wrong, error=0.4, confidence=0.8, score=score)
    u = keyed_uniform(images.x)
    sets = PredictionSets.fit(predicted.log_probs, images.y, coverage=0.8, kind=kind, empty=True, uniform=u)
    mine = active_decisions(copy)
    assert (mine.selection.answered, mine.selection.wrong) == (selection.answered, selection.wrong)
    assert mine.selection.threshold == pytest.approx(selection.threshold, abs=1e-5)  # other batches: other rounding
    assert mine.sets.thresholds == pytest.approx(sets.thresholds, abs=1e-5)
    assert (found.n, found.samples, found.seed, found.calibration) == (40, 4, 2, None)


def test_evaluation_says_how_the_promises_are_kept(decided):
    stored = predictions(decided, "digits")
    found, made = decided.evaluation("digits").decisions, active_decisions(decided)
    assert found.made == made == decided.decisions()
    answered = stored["confidence"].double() > 1 - made.selection.threshold
    wrong = (stored["label"] != stored["y"])[answered]
    assert 0 < found.selection.answered == int(answered.sum()) < 1000
    assert found.selection.wrong == int(wrong.sum())
    assert found.selection.error == pytest.approx(wrong.double().mean().item())
    assert found.selection.interval == clopper_pearson(int(wrong.sum()), int(answered.sum()))
    sets = made.sets.apply(stored["log_probs"], keyed_uniform(load("digits", "test").x))
    covered = sets[torch.arange(1000), stored["y"]]
    assert found.sets.covered == pytest.approx(covered.double().mean().item())
    assert found.sets.mean_size == pytest.approx(sets.sum(1).double().mean().item())
    assert found.sets.sizes == tuple(np.bincount(sets.sum(1), minlength=11).tolist())
    three = stored["y"] == 3
    assert found.sets.by_class.covered[3] == pytest.approx(covered[three].double().mean().item())
    assert found.sets.by_class.n == (100,) * 10
    assert stored["abstained"].equal(~answered) and stored["covered"].equal(covered)
    assert stored["set_size"].equal(sets.sum(1))


def test_outside_images_have_no_true_class_and_are_described_by_answers_and_sizes(decided):
    found = decided.evaluation("letters").decisions
    known = [
        {name for name, value in vars(part).items() if value is not None} for part in (found.selection, found.sets)
    ]
    assert known == [{"answered", "share"}, {"mean_size", "sizes"}]
    assert found.selection.share < decided.evaluation("digits").decisions.selection.share
    assert "covered" not in predictions(decided, "letters")


def test_corrupted_images_are_decided_on_too_and_break_the_promise(decided):
    (worse,) = decided.shifted()
    plain = decided.evaluation("digits").decisions
    assert worse.decisions.made == plain.made
    assert worse.decisions.sets.covered < min(0.8, plain.sets.covered)


def test_every_evaluation_has_the_area_under_risk_and_coverage(decided):
    stored = predictions(decided, "digits")
    found = decided.evaluation("digits").selective
    assert set(found) == set(decisions.SCORES)
    for name, areas in found.items():
        curve = risk_coverage(uncertainty(stored, name), stored["label"] != stored["y"])
        assert vars(areas) == pytest.approx({"aurc": curve.aurc, "excess": curve.excess})
    assert decided.evaluation("letters").selective == {}
    assert "selective" not in json.loads((decided.path / "scores-letters.json").read_text())


def test_files_get_sets_and_may_be_left_unanswered_wherever_they_stand(decided, fabric, tmp_path):
    images = load("digits", "test")
    for number in range(6):
        Image.fromarray(images.x[number, 0].numpy()).save(tmp_path / f"{number}.png")
    found = predict_files(decided, [tmp_path], fabric, passes=4)
    assert len(found.names) == len(found) == 6 and found.abstains.shape == (6,) and found.sets.shape == (6, 10)
    made = active_decisions(decided)
    assert found.abstains.equal(made.selection.abstains(uncertainty(columns_of(found.predictive))))
    assert found.sets.equal(made.sets.apply(found.predictive.log_probs, keyed_uniform(images.x[:6])))


def test_a_run_without_decisions_decides_nothing(trained, fabric, tmp_path):
    Image.fromarray(load("digits", "test").x[0, 0].numpy()).save(tmp_path / "digit.png")
    found = predict_files(trained, [tmp_path], fabric, passes=2)
    assert found.abstains is found.sets is found.class_sets is None
    assert trained.evaluation("digits").decisions is None and trained.decisions() is None


# --- with a calibrator ---------------------------------------------------------------------------------------------


def test_images_that_the_calibrator_has_seen_are_not_decided_on(copy, fabric):
    calibrate(copy, fabric, passes=4, share=0.5, seed=3)
    found = decide(copy, fabric, passes=4, **WANTED)
    assert copy.calibration().n == found.n == 20
    images = held_out(copy)
    left, fitted = images.split(0.5, 3)
    assert set(left.rows.tolist()).isdisjoint(fitted.rows.tolist())
    plain = predict(copy.model(), [(left.pixels(), left.rows)], passes=4).log_probs
    log_probs = copy.calibration().fitted.apply(plain)
    sets = PredictionSets.fit(log_probs, left.y, coverage=0.8, empty=True, uniform=keyed_uniform(left.x))
    assert active_decisions(copy).sets.thresholds == pytest.approx(sets.thresholds, abs=1e-5)
    calibration = copy.calibration()
    assert vars(found.calibration) == {"calibrator": calibration.calibrator, "parameters": calibration.parameters}


def test_a_calibrator_of_all_images_is_fitted_again_on_half_of_them(copy, fabric):
    by_hand = calibrate(copy, fabric, passes=4, share=0.5, seed=3)
    wanted = decide(copy, fabric, passes=4, **WANTED)
    calibrate(copy, fabric, passes=4, seed=3)
    assert copy.calibration().n == 40
    found = decide(copy, fabric, passes=4, **WANTED)
    assert copy.calibration() == by_hand and active_decisions(copy) is not None
    assert (found.sets, found.selection, found.n) == (wanted.sets, wanted.selection, 20)
    assert "fitted again on half of it (20 images)" in found.warning
    assert "fitted again" not in (wanted.warning or "")


def test_a_calibration_of_an_older_version_counts_as_one_on_all_images(copy, fabric):
    calibrate(copy, fabric, passes=4, share=0.5)
    path = copy.path / "calibration.json"
    found = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in found.items() if key not in ("of", "share")}))
    assert "fitted again" in decide(copy, fabric, passes=4, **WANTED).warning


def test_images_of_one_s_own_serve_both(copy, fabric):
    mine, others = load("digits", "train").balanced(100, seed=77).split(0.5, 0)
    calibrate(copy, fabric, passes=2, held_out=mine)
    assert decide(copy, fabric, passes=2, held_out=others, **WANTED).n == 50
    assert decide(copy, fabric, passes=2, held_out=mine, **WANTED).n == 25
    with pytest.raises(CalgpError, match="must be the same"):
        decide(copy, fabric, held_out=load("letters", "test"), **WANTED)


def test_decisions_are_used_only_on_the_probabilities_that_they_are_for(copy, fabric):
    decide(copy, fabric, passes=4, **WANTED)
    calibrate(copy, fabric, passes=4, share=0.5)
    assert active_decisions(copy) is None and active_decisions(copy, calibrated=False) is not None
    assert evaluate(copy, fabric, passes=4).decisions is None
    assert evaluate(copy, fabric, passes=4, calibrated=False).decisions is not None
    decide(copy, fabric, passes=4, **WANTED)
    assert active_decisions(copy) is not None and active_decisions(copy, calibrated=False) is None
    decide(copy, fabric, passes=4, calibrated=False, **WANTED)
    assert copy.decisions().n == 40  # the probabilities as trained know no calibrator: all are new to them


def test_an_ensemble_decides_on_what_all_its_members_hold_out(tmp_path, fabric):
    members = [RunFolder(tmp_path / name) for name in ("a", "b")]
    for seed, folder in enumerate(members):
        train_run(small(method="cnn", steps=10, holdout=0.2, seed=seed, split_seed=0), folder, fabric)
    ensemble(members, both := RunFolder(tmp_path / "both"))
    assert decide(both, fabric, passes=2, coverage=0.8).n == 40
    assert evaluate(both, fabric, passes=2).decisions.sets.covered > 0.5


# --- refusals and warnings -----------------------------------------------------------------------------------------


def test_a_target_out_of_reach_is_written_as_abstaining_from_everything(copy, fabric):
    found = decide(copy, fabric, passes=4, error=0.01)
    assert "at least 299 held-out images" in found.warning and "there are 40" in found.warning
    kept = evaluate(copy, fabric, passes=4).decisions
    assert vars(kept.selection) == {"answered": 0, "share": 0, "wrong": 0, "error": None, "interval": None}
    assert kept.sets is None


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "Nothing was asked for"),
        ({"error": 1.5}, "Invalid error=1.5: must be a share"),
        ({"coverage": 0.0}, "Invalid coverage=0: must be a share"),
        ({"error": 0.1, "confidence": 1.0}, "Invalid confidence=1: must be a share"),
        ({"error": 0.1, "score": "luck"}, "no score 'luck'"),
        ({"coverage": 0.9, "sets": "raps"}, "no sets 'raps'"),
        ({"coverage": 0.99}, "at least 99 held-out images; there are 40"),
        ({"coverage": 0.9, "by_class": True}, "at least 9 held-out images of class 0 .* there are 4"),
    ],
)
def test_what_cannot_be_decided_is_refused_and_nothing_written(copy, fabric, options, says):
    with pytest.raises(CalgpError, match=says):
        decide(copy, fabric, passes=2, **options)
    assert copy.decisions() is None


def test_a_run_without_a_hold_out_is_refused(tmp_path, fabric):
    train_run(small(steps=1), folder := RunFolder(tmp_path / "run"), fabric)
    with pytest.raises(CalgpError, match=r"--holdout 0\.1"):
        decide(folder, fabric, coverage=0.9)


def test_a_share_that_is_none_is_refused(copy, fabric):
    for share in (0.0, 1.5):
        with pytest.raises(CalgpError, match="share="):
            calibrate(copy, fabric, share=share)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"calibration": null, "selection": 1, "sets": null}'])
def test_damaged_decisions_are_named_and_can_be_replaced(copy, fabric, text):
    (copy.path / "decisions.json").write_text(text)
    with pytest.raises(CalgpError, match=r"decisions\.json"):
        evaluate(copy, fabric, passes=1)
    decide(copy, fabric, passes=2, coverage=0.8)
    assert evaluate(copy, fabric, passes=1).decisions is not None


def test_a_new_training_forgets_the_decisions_of_the_last(tmp_path, fabric):
    folder = RunFolder(tmp_path / "run")
    train_run(small(steps=1, holdout=0.2), folder, fabric)
    decide(folder, fabric, passes=1, coverage=0.5)
    folder.remove("model.safetensors")
    train_run(small(steps=1, holdout=0.2), folder, fabric)  # the same run, whose weights somebody has deleted
    assert folder.decisions() is None
