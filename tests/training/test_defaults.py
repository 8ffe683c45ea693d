"""What a run does that names nothing: the images decide, and run.json says what they decided."""

import os
import shutil
import signal
import time
from dataclasses import replace

import pytest
import torch

from calgp.data import Images, load
from calgp.errors import CalgpError
from calgp.methods import METHODS
from calgp.nets import BACKBONES, Compact
from calgp.posthoc.calibration import FLAT, Prior, Temperature
from calgp.runs import Interrupted, Run, RunFolder, TrainingData, environment, from_json
from calgp.runs.fit_calibrator import cross_fitted, prior_of
from calgp.runs.results import NoteRecord
from calgp.training import defaults as defaults_module
from calgp.training import resolved, train_run
from folders import classifier

DIGITS = load("digits", "train")
TINY = {"backbone": {"name": "lenet", "channels": [4, 8], "hidden": [16]}, "batch_size": 50, "learning_rate": 5e-3}


def coloured(n: int, side: int = 32) -> Images:
    x = torch.randint(256, (n, 3, side, side), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return Images.of(x, torch.arange(n) % 4, tuple("abcd"))


@pytest.mark.parametrize(
    ("options", "precision"),
    [
        ({"steps": 10_000, "backbone": "compact"}, "bf16-mixed"),
        ({"steps": 9_999, "backbone": "compact"}, "32-true"),
        ({"minutes": 20, "backbone": "compact"}, "bf16-mixed"),
        ({"minutes": 19, "backbone": "compact"}, "32-true"),
        ({"steps": 10_000, "backbone": "resnet"}, "32-true"),
    ],
)
def test_long_trainings_of_compact_are_in_bf16_where_the_processor_has_it(options, precision, monkeypatch):
    run = from_json(options)
    data = TrainingData.cut(DIGITS, run)
    for has_it in (True, False):
        monkeypatch.setattr(environment, "_cpu_info", lambda: f"flags : avx512f{' avx512_bf16' * has_it}")  # noqa: B023
        found = defaults_module.default_precision(resolved(run, data), data, torch.device("cpu"))
        assert found == (precision if has_it else "32-true")


@pytest.mark.parametrize(("n", "held_out"), [(490, 0), (500, 50), (1000, 100)])
def test_a_tenth_is_held_out_of_500_images_and_more(n, held_out):
    data = TrainingData.cut(DIGITS.balanced(n, 0), from_json({}))
    assert len(data.train) == n - held_out
    assert (0 if data.held_out is None else len(data.held_out)) == held_out
    if held_out:
        assert torch.bincount(data.held_out.y).tolist() == [held_out // 10] * 10
    assert TrainingData.cut(DIGITS.balanced(n, 0), from_json({"holdout": 0})).held_out is None


def test_everything_that_is_open_is_decided_by_the_images():
    run, data = from_json({}), TrainingData.cut(DIGITS, from_json({}))
    found = resolved(run, data)
    assert (found.backbone, found.holdout, found.augment, found.crop) == (
        Compact(widths=(32, 64, 128)),
        0.1,
        ("crop",),
        3,
    )
    assert (found.steps, found.epochs, found.calibration) == (1350, None, True)
    assert resolved(found, data) == found
    colours = TrainingData.cut(coloured(40), run)
    found = resolved(run, colours)
    assert (found.backbone, found.holdout, found.augment, found.crop) == (Compact(), 0.0, ("crop",), 4)
    assert (found.steps, found.calibration) == (1000, False)
    assert resolved(run, TrainingData.cut(coloured(2500), run)).steps == 60 * 23  # epochs of 2,250 images
    assert resolved(from_json({"augment": ["flip"]}), colours).backbone == Compact(mirror=True)
    assert resolved(run, TrainingData.cut(coloured(8, side=16), run)).augment == ("crop",)
    assert resolved(run, TrainingData.cut(coloured(8, side=15), run)).augment == ()


def test_the_side_that_files_were_stretched_to_is_the_run_s():
    """Later commands need not look at the files of the training images again to know it."""
    run, images = from_json({}), replace(coloured(40), side=32)
    assert resolved(run, TrainingData.cut(images, run)).size == 32
    assert resolved(run, TrainingData.cut(coloured(40), run)).size is None
    assert resolved(replace(run, size=8), TrainingData.cut(images, run)).size == 8


def test_what_is_given_stays():
    given = from_json(
        {"backbone": "resnet", "holdout": 0.2, "augment": ["none"], "crop": 2, "epochs": 3,
         "calibration": False}
    )  # fmt: skip
    assert given.augment == ()
    assert resolved(given, TrainingData.cut(coloured(600), given)) == given


@pytest.mark.parametrize("words", [("auto", "flip"), ("none", "crop")])
def test_auto_and_none_stand_alone(words):
    with pytest.raises(CalgpError, match="must stand alone"):
        from_json({"augment": words})


@pytest.mark.parametrize(("n", "steps"), [(100, 1000), (3000, 1000), (10_000, 3000), (50_000, 15_000), (10**6, 30_000)])
def test_steps_are_30_epochs_within_limits(n, steps):
    assert from_json({}).total_steps(n) == steps


def test_methods_have_their_own_rate_unless_one_is_given():
    assert Run(METHODS["cnn"], BACKBONES["lenet"]).learning_rate == 3e-3
    assert Run(METHODS["cnn-gp-sorf"], BACKBONES["lenet"]).learning_rate == 6e-3
    assert Run(METHODS["cnn-gp-sorf"], BACKBONES["lenet"], learning_rate=0.01).learning_rate == 0.01


@pytest.mark.parametrize("name", METHODS)
def test_the_papers_methods_stay_as_they_were_published(name):
    ours = {"cnn-gp-rf", "cnn-gp-sorf", "cnn-dgp", "cnn-gp-mf", "cnn-laplace"}
    data = TrainingData.cut(DIGITS.balanced(600, 0), from_json({}))
    assert resolved(Run(METHODS[name], BACKBONES["auto"]), data).calibration == (name in ours)


def test_a_finished_run_names_what_was_chosen_and_is_calibrated(tmp_path, fabric):
    run = from_json(TINY | {"train_size": 800, "steps": 60})
    trained, folder = train_run(run, RunFolder(tmp_path / "run"), fabric), RunFolder(tmp_path / "run")
    kept = folder.card().run
    assert kept == resolved(run, TrainingData.of(run, None)) and kept.holdout == 0.1 and kept.calibration
    calibration = folder.calibration()
    assert trained.calibration == calibration and calibration.n == 80 and calibration.crossed is not None
    assert calibration.crossed.mnll < calibration.before.mnll
    assert calibration.after.mnll <= calibration.crossed.mnll  # fitted on the very images


def test_a_hold_out_that_cannot_tell_leaves_the_temperature_out_and_says_so(tmp_path, fabric):
    run = from_json(TINY | {"train_size": 200, "steps": 5, "holdout": 0.1})
    folder = RunFolder(tmp_path / "run")
    assert train_run(run, folder, fabric).calibration is None and folder.calibration() is None
    (note,) = (each for each in folder.log() if isinstance(each, NoteRecord))
    assert note.kind == "uncalibrated" and "20 held-out images are too few" in note.why


def test_only_the_default_method_on_its_own_network_has_a_prior_away_from_one():
    priors = {
        (method, backbone): prior_of(Run(METHODS[method], BACKBONES[backbone]))
        for method in ("cnn-gp-sorf", "cnn-gp-sorf-paper", "cnn-cal") for backbone in ("compact", "lenet")
    }  # fmt: skip
    assert {chosen for chosen, prior in priors.items() if prior != FLAT} == {
        ("cnn-gp-sorf", "compact"), ("cnn-gp-sorf", "lenet"),
    }  # fmt: skip
    assert priors["cnn-gp-sorf", "compact"].mean < priors["cnn-gp-sorf", "lenet"].mean == 1


def test_without_calibration_there_is_none(tmp_path, fabric):
    run, folder = from_json(TINY | {"train_size": 800, "steps": 5, "calibration": False}), RunFolder(tmp_path / "run")
    assert train_run(run, folder, fabric).calibration is None
    assert len(folder.card().holdout_rows) == 80 and all(each.kind != "uncalibrated" for each in folder.log())


@pytest.mark.parametrize("prior", [FLAT, Prior(0.8, 0.2)])
def test_folds_are_calibrated_by_the_others(prior):
    generator = torch.Generator().manual_seed(0)
    log_probs = (3 * torch.randn(50, 4, generator=generator)).log_softmax(-1)
    y = torch.randint(4, (50,), generator=generator)
    found = cross_fitted(log_probs, y, "temperature", folds=5, prior=prior)
    place = y.argsort(stable=True).argsort()  # of each image in the order of classes
    for fold in range(5):
        others = place % 5 != fold
        fitted = Temperature.fit(log_probs[place.argsort()][torch.arange(50) % 5 != fold], y.sort().values[
            torch.arange(50) % 5 != fold], prior)  # fmt: skip
        torch.testing.assert_close(found[~others], fitted.apply(log_probs[~others]))


def test_minutes_become_steps_that_a_resumed_run_keeps(tmp_path, fabric, monkeypatch):
    monkeypatch.setattr(defaults_module, "_seconds_a_step", lambda *_, **__: (0.5, 0))
    run, folder = from_json(TINY | {"train_size": 100, "minutes": 0.2, "holdout": 0.1}), RunFolder(tmp_path / "run")

    def interrupt(step):
        if step.step == 4:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted):
        train_run(run, folder, fabric, watch=interrupt)
    begun = RunFolder(shutil.copytree(folder.path, tmp_path / "begun"))
    begun.remove("checkpoint.safetensors")
    kept = folder.card().run
    assert (kept.minutes, kept.steps) == (0.2, 10)  # 95 % of 12 seconds, less the 12 steps that were timed
    monkeypatch.setattr(defaults_module, "_seconds_a_step", lambda *_, **__: (1.0, 0))  # another machine
    resumed = train_run(kept, folder, fabric, resume=True).model.state_dict()
    again = train_run(run, begun, fabric).model.state_dict()  # killed before its first checkpoint
    whole = train_run(kept, RunFolder(tmp_path / "whole"), fabric).model.state_dict()
    assert begun.card().run == kept
    for key, value in whole.items():
        assert value.equal(resumed[key]) and value.equal(again[key])


@pytest.mark.slow
def test_a_budget_in_minutes_ends_about_there(tmp_path, fabric):
    run = from_json(TINY | {"train_size": 100, "minutes": 0.05})
    clock = time.process_time()
    steps = train_run(run, RunFolder(tmp_path / "run"), fabric).card.run.steps
    # of this processor, not of the clock: others may take it away once the steps have been counted
    assert steps > 1 and time.process_time() - clock < 2 * 3


@pytest.mark.slow
def test_the_default_does_not_lose_to_other_methods_on_digits(tmp_path, fabric):
    """All without any option but the data and the budget; MNLL of the same test images, image by image."""
    names = ("cnn-gp-sorf", "cnn-cal", "cnn")
    images, runs = load("digits", "test"), {}
    for name in names:
        run = from_json({"method": name, "train_size": 1000, "steps": 200})
        runs[name] = resolved(run, TrainingData.of(run, None))
    # the same training, behind which the one has a temperature
    assert replace(runs["cnn-cal"], method=METHODS["cnn"]) == runs["cnn"]
    trained = {name: train_run(runs[name], RunFolder(tmp_path / name), fabric) for name in names[:2]}
    assert trained["cnn-cal"].calibration is not None
    trained["cnn"] = classifier(trained["cnn-cal"].folder, fabric, calibrated=False)
    nlls = {
        name: -each.predict(images.x.numpy()).predictive.log_probs.gather(1, images.y[:, None]).squeeze(1)
        for name, each in trained.items()
    }
    for other in names[1:]:
        difference = nlls["cnn-gp-sorf"] - nlls[other]
        assert difference.mean() < 1.96 * difference.std() / len(difference) ** 0.5, other


def test_replacing_an_option_keeps_the_others():
    run = from_json({})
    assert replace(run, seed=3) == from_json({"seed": 3})
