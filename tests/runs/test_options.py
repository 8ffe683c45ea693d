"""Options of a training for images of one's own: class weights, augmentation, normalisation, early stopping."""

import json
import os
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch

from calgp.data import Images, load
from calgp.errors import CalgpError
from calgp.gp import Bound, Noise
from calgp.nets import Task, standardisers
from calgp.runs import Interrupted, RunFolder, TrainingData, from_json, to_json
from calgp.runs.build import build
from calgp.runs.description import from_folder
from calgp.runs.evaluation import score
from calgp.runs.training_data import class_weights
from calgp.search.jobs import key
from calgp.training import resumable, train_run
from folders import held_out, predict_files, tensors
from small_run import small

TINY = {"backbone": {"name": "lenet", "channels": [2, 4], "hidden": [8]}, "size": 12, "train_size": 100}

FORMER = {
    "backbone": "lenet", "holdout": 0.0, "epochs": 10.0, "learning_rate": 1e-3, "schedule": "constant", "augment": [],
    "crop": 4, "calibration": False,
}  # fmt: skip


def interrupting(at):
    def interrupt(step):
        if step.step == at:
            os.kill(os.getpid(), signal.SIGINT)

    return interrupt


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # integrate and scale were not there: off
        ({"method": {"name": "cnn-gp-sorf", "integrate": False, "scale": None, "keep_filters": 0.5}},
         "4bea8f4dd33dcd69"),
        ({"method": "cnn-cal", "backbone": "lenet-cifar", "source": "cifar10", "holdout": 0.1}, "43fe8f41f67eaf26"),
        ({"method": "cnn-mcd", "source": "mnist", "train_size": 1000, "steps": 500, "seed": 2, "learning_rate": 3e-3,
          "schedule": "one-cycle"}, "34df0f9a2e1c37f1"),
        ({"method": {"name": "cgp", "inducing": 20}, "holdout": 0.2, "split_seed": 1, "kl_weight": 0.5, "size": 16,
          "colour": "grey"}, "3fbb05994f6f1e37"),
        ({"method": "gpdnn", "backbone": {"name": "resnet", "n": 2}}, "1b015b923261db0c"),
    ],
)  # fmt: skip
def test_keys_of_runs_without_the_new_options_are_those_of_before_they_were_there(options, expected):
    """The values, and the defaults, are those of commit 141bd20."""
    assert key(from_json(FORMER | options)) == expected


def test_the_new_options_make_other_keys_and_survive_json():
    changes = (
        {"class_weights": "balanced"}, {"class_weights": (1.0, 2.0)}, {"augment": ("flip",)}, {"augment": ("crop",)},
        {"crop": 2}, {"normalise": "standard"}, {"patience": 3, "holdout": 0.1},
    )  # fmt: skip
    runs = [from_json({})] + [from_json(change) for change in changes]
    assert len({key(run) for run in runs}) == len(runs)
    for run in runs:
        assert from_json(json.loads(json.dumps(to_json(run)))) == run
    older = to_json(runs[0])
    for name in ("class_weights", "augment", "crop", "normalise", "patience", "minutes", "calibration"):
        del older[name]
    assert from_folder(older) == replace(runs[0], augment=(), crop=4, calibration=False)  # as they were then


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"class_weights": "even"}, "class_weights='even'"),
        ({"class_weights": [1, -1]}, r"class_weights=\[1, -1\]: must be .* a number of at least 0"),
        ({"class_weights": [0, 0]}, "must not be all 0"),
        ({"class_weights": [1, float("nan")]}, "a number of at least 0"),
        (
            {"augment": ["rotate"]},
            "augment=.*: must be auto, none, flip, crop, cutout, mixup or augmix, with commas between several, "
            "such as auto",
        ),
        ({"crop": 0}, "crop=0"),
        ({"normalise": "zca"}, "normalise='zca'"),
        ({"patience": 0}, "patience=0"),
        ({"patience": 3, "holdout": 0}, "early stopping needs held-out images"),
    ],
)
def test_what_cannot_be_is_refused_by_name(options, says):
    with pytest.raises(CalgpError, match=says):
        from_json(options)


def uneven() -> Images:
    images = load("digits", "train").resized(12)
    wanted = {0: 60, 1: 20, 2: 10}
    index = torch.cat([(images.y == q).nonzero().squeeze(1)[:count] for q, count in wanted.items()])
    part = images.take(index)
    return Images(part.x, part.y, ("zero", "one", "two", "three"), part.rows)


def test_balanced_weights_are_those_of_scikit_learn_and_sum_to_n_over_the_images():
    from sklearn.utils.class_weight import compute_class_weight

    images = uneven()
    weights = class_weights(from_json({"class_weights": "balanced"}), images)
    expected = compute_class_weight("balanced", classes=np.arange(3), y=images.y.numpy())
    assert weights.tolist() == pytest.approx([*expected, 0.0], rel=1e-6)  # float32; no image has the fourth class
    assert float(weights[images.y].sum()) == pytest.approx(len(images), rel=1e-6)


def test_the_weighted_bound_is_the_bound_of_repeated_images():
    """−(1/m) Σ w_{y_k} E log p: a weight of 2 is the image there twice, of 0 the image not there. Masks are by row."""
    run, images = small(**TINY), uneven()
    model = build(run, Task(1, 12, 12, 4))
    weights = torch.tensor([0.0, 1.0, 2.0, 5.0])
    index = torch.tensor([0, 5, 60, 61, 62, 80, 81])

    def parts(index, weights=None):
        noise = Noise(0, torch.arange(3), images.rows[index])
        with torch.no_grad():
            nll, kl = Bound(model, 90, weights)(images.pixels(index), images.y[index], noise)
        return nll * len(index), kl

    weighted, kl = parts(index, weights)
    repeated, same = parts(index[2:].repeat_interleave(torch.tensor([1, 1, 1, 2, 2])))
    assert kl == same
    assert float(weighted) == pytest.approx(float(repeated), rel=1e-5)  # float32 sums of other orders


def test_weights_are_written_in_run_json_and_change_the_training(tmp_path, fabric):
    data = TrainingData(uneven(), None)
    states = {}
    for name, given in (("none", None), ("ones", [1, 1, 1, 1]), ("balanced", "balanced")):
        folder = RunFolder(tmp_path / name)
        run = small(**TINY, steps=3, class_weights=given)
        states[name] = train_run(run, folder, fabric, data=data).model.state_dict()
        card = folder.card()
        assert card.run.class_weights == (tuple(given) if isinstance(given, list) else given)
        assert card.class_weights == (None if given is None else pytest.approx(class_weights(run, data.train).tolist()))
    assert all(value.equal(states["ones"][key]) for key, value in states["none"].items())
    assert any(not value.equal(states["balanced"][key]) for key, value in states["none"].items())
    with pytest.raises(CalgpError, match=r"2 class weights were given for 4 classes \(zero, one, two, …\)"):
        train_run(small(**TINY, steps=3, class_weights=[1, 2]), RunFolder(tmp_path / "two"), fabric, data=data)


@pytest.mark.parametrize("method", ["cnn-gp-sorf", {"name": "gpdnn", "inducing": 10}])
def test_a_training_with_all_options_resumes_to_the_same_bits(tmp_path, fabric, method):
    run = small(**TINY, method=method, steps=12, holdout=0.2, patience=9, class_weights="balanced",
                augment=["flip", "crop"], crop=2, normalise="standard")  # fmt: skip
    whole = train_run(run, RunFolder(tmp_path / "whole"), fabric).model
    folder = RunFolder(tmp_path / "parts")
    with pytest.raises(Interrupted):
        train_run(run, folder, fabric, watch=interrupting(7))
    resumed = train_run(run, folder, fabric, resume=True).model
    for key_, value in whole.state_dict().items():
        assert value.equal(resumed.state_dict()[key_]), key_
    last = [
        json.loads((each.path / "log.jsonl").read_text().splitlines()[-1])
        for each in (folder, RunFolder(tmp_path / "whole"))
    ]
    assert last[0].keys() == last[1].keys()


def test_augmentation_changes_what_is_trained_and_not_what_is_scored(tmp_path, fabric):
    plain, changed = (
        train_run(small(**TINY, steps=4, augment=augment), RunFolder(tmp_path / name), fabric).model
        for name, augment in (("plain", []), ("changed", ["flip"]))
    )
    assert any(not value.equal(changed.state_dict()[key]) for key, value in plain.state_dict().items())
    images = load("digits", "test").balanced(50, 0).resized(12)
    changed.load_state_dict(plain.state_dict())
    assert score(plain, images, passes=3, seed=0) == score(changed, images, passes=3, seed=0)


def test_normalisation_is_stored_with_the_model_and_applied_to_files(tmp_path, fabric):
    from PIL import Image

    folder = RunFolder(tmp_path / "run")
    run = small(**TINY, steps=2, normalise="standard")
    model = train_run(run, folder, fabric).model
    images = TrainingData.of(run, None).train
    (features,) = standardisers(folder.model())
    pixels = images.pixels()
    assert features.mean.item() == pytest.approx(pixels.mean().item(), rel=1e-5)  # float32 sums
    assert features.std.item() == pytest.approx(pixels.std().item(), rel=1e-3)  # n or n - 1
    Image.fromarray(images.x[0, 0].numpy()).save(tmp_path / "digit.png")
    predicted = predict_files(folder, [tmp_path / "digit.png"], fabric, passes=3, engine="samples")
    noise = Noise(0, torch.arange(3), torch.zeros(1, dtype=torch.long), integrate=False)
    with torch.no_grad():
        by_hand = (images.pixels(slice(0, 1)) - features.mean) / features.std
        latent = model.sample(model.features.network.stem(by_hand), noise)
    expected = latent.mean.softmax(-1).mean(0)
    assert torch.allclose(predicted.probs, expected, atol=1e-6)  # float32


def test_images_that_are_not_square_are_learned_and_predicted(tmp_path, fabric):
    from PIL import Image

    digits = load("digits", "train").balanced(40, 0)
    wide = Images.of(torch.cat([digits.x, digits.x.flip(3)], 3).repeat(1, 3, 1, 1), digits.y, digits.classes)
    folder = RunFolder(tmp_path / "run")
    train_run(small(steps=2), folder, fabric, data=TrainingData(wide, None))
    Image.fromarray(wide.x[0].permute(1, 2, 0).numpy()).resize((112, 56)).save(tmp_path / "wide.png")
    predicted = predict_files(folder, [tmp_path / "wide.png"], fabric, passes=2)
    assert predicted.names == (str(tmp_path / "wide.png"),) and predicted.probs.shape == (1, 10)


class Scripted:
    """Stands for the score of the hold-out: an MNLL an epoch, as given."""

    def __init__(self, monkeypatch, values):
        self.values, real = iter(values), resumable.score
        monkeypatch.setattr(
            resumable, "score", lambda *args, **kwargs: replace(real(*args, **kwargs), mnll=next(self.values))
        )


def epochs_of(folder: RunFolder) -> list[int]:
    return [record.step for record in folder.log() if record.kind == "holdout"]


def test_it_stops_after_patience_epochs_without_a_better_holdout_and_keeps_the_best_state(
    tmp_path, fabric, monkeypatch
):
    # 100 images, 20 held out, batches of 32: three steps an epoch
    run = small(**TINY, epochs=9, steps=None, holdout=0.2, patience=2, mc_samples=1)
    best = train_run(replace(run, patience=None, steps=6), RunFolder(tmp_path / "two epochs"), fabric).model
    with monkeypatch.context() as patch:
        Scripted(patch, [2.0, 1.0, 1.5, float("nan"), 0.5])
        kept = train_run(run, folder := RunFolder(tmp_path / "stopped"), fabric).model
    assert epochs_of(folder) == [3, 6, 9, 12]
    assert next(record for record in folder.log() if record.kind == "kept").step == 6
    for key_, value in best.state_dict().items():
        assert value.equal(kept.state_dict()[key_]), key_
        assert value.equal(tensors(folder, "model.safetensors")[key_]), key_
    assert folder.finished and not folder.interrupted


@pytest.mark.parametrize("at", [6, 10])
def test_early_stopping_resumes_exactly(tmp_path, fabric, monkeypatch, at):
    """Whether Ctrl-C comes at the end of the best epoch or within a later one."""
    run, values = small(**TINY, epochs=9, steps=None, holdout=0.2, patience=2), [2.0, 1.0, 1.5, 1.2, 0.5]
    with monkeypatch.context() as patch:
        Scripted(patch, values)
        whole = train_run(run, RunFolder(tmp_path / "whole"), fabric).model
    with monkeypatch.context() as patch:
        Scripted(patch, values)
        folder = RunFolder(tmp_path / "parts")
        with pytest.raises(Interrupted):
            train_run(run, folder, fabric, watch=interrupting(at))
        resumed = train_run(run, folder, fabric, resume=True).model
    assert epochs_of(folder) == [3, 6, 9, 12]
    assert all(value.equal(resumed.state_dict()[key_]) for key_, value in whole.state_dict().items())


def test_what_stops_is_not_what_calibrates(tmp_path, fabric):
    """Half of the hold-out each, both disjoint from the training images; run.json names the half that is left."""
    run = small(**TINY, steps=3, holdout=0.2, patience=2)
    data = TrainingData.of(run, None)
    parts = [set(images.rows.tolist()) for images in (data.train, data.held_out, data.stopping)]
    assert [len(part) for part in parts] == [80, 10, 10]
    assert len(set.union(*parts)) == 100
    train_run(run, folder := RunFolder(tmp_path / "run"), fabric)
    assert held_out(folder).rows.equal(data.held_out.rows)
    assert data.train.rows.equal(TrainingData.of(small(**TINY, holdout=0.2), None).train.rows)


def test_patience_says_what_it_needs(tmp_path, fabric):
    assert from_json({"patience": 3}).holdout == 0.1
    images = load("digits", "train").balanced(10, 0)
    with pytest.raises(CalgpError, match="1 image; patience needs two"):
        TrainingData.cut(images, from_json({"patience": 3}))
    with pytest.raises(CalgpError, match="needs images to stop by"):
        train_run(
            small(holdout=0.1, patience=3), RunFolder(tmp_path / "run"), fabric, data=TrainingData(images, images)
        )
