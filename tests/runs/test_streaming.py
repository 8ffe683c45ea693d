"""Training, evaluation and what follows, on images that stay in their files: the same bits as in memory."""

import os
import signal
from dataclasses import replace

import pytest
from lightning_fabric import Fabric
from PIL import Image

from calgp.data import Corruption, load, shards
from calgp.data.shards import write_shards
from calgp.errors import CalgpError
from calgp.report.gallery import galleries
from calgp.runs import Interrupted, RunFolder, TrainingData
from calgp.runs.evaluation import test_images as images_of
from calgp.runs.training_data import held_out_images
from calgp.training import train_run
from folders import calibrate, decide, evaluate, evaluate_unsaved, verify
from small_run import small

OPTIONS = {"train_size": 150, "holdout": 0.25, "steps": 12, "normalise": "standard", "augment": ["crop"]}


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """300 embedded digits as a folder of classes."""
    root, images = tmp_path_factory.mktemp("digits"), load("digits", "train")
    for i in range(300):
        file = root / f"digit {int(images.y[i])}" / f"{i}.png"
        file.parent.mkdir(exist_ok=True)
        Image.fromarray(images.x[i, 0].numpy()).save(file)
    return root


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(value.equal(b[key]) for key, value in a.items())


@pytest.mark.slow
def test_a_streamed_training_has_the_bits_of_one_in_memory(digits, tmp_path, fabric: Fabric):
    found = {}
    for kind in ("folder", "stream"):
        source, folder = f"{kind}:{digits}", RunFolder(tmp_path / kind)
        model = train_run(small(source=source, **OPTIONS), folder, fabric).model
        calibrated = replace(calibrate(folder, fabric, share=0.5, passes=3), of=None)  # a checksum of another kind
        decided = decide(folder, fabric, coverage=0.7, error=0.5, confidence=None, passes=3)
        evaluate(folder, fabric, passes=3)
        assert {check.state for check in verify(folder, fabric)} == {"same bits"}
        _, predicted = evaluate_unsaved(folder, fabric, source=source, passes=3)
        holdout = [record for record in folder.log() if record.kind == "holdout"]
        shown = galleries(images_of(folder.card(), source), predicted.columns, folder.card().classes)
        results = (calibrated, decided, holdout, list(predicted.names or ()), shown)
        found[kind] = (model.state_dict(), predicted.columns | predicted.stored, results)
    kept, streamed = found["folder"], found["stream"]
    assert same(kept[0], streamed[0]) and same(kept[1], streamed[1])
    assert kept[2] == streamed[2]


def test_a_folder_that_was_trained_on_is_evaluated_by_its_test_part(digits, tmp_path, fabric):
    folder = RunFolder(tmp_path / "run")
    train_run(small(source=f"folder:{digits}", steps=1, train_size=100), folder, fabric)
    rows = set(load(f"folder:{digits}", "test").rows.tolist())
    for source in (f"folder:{digits}", f"stream:{digits}/", f"folder:{digits / '..' / digits.name}"):
        assert set(images_of(folder.card(), source).rows.tolist()) == rows


def test_a_validation_folder_is_the_hold_out(digits, tmp_path, fabric):
    for i, file in enumerate(sorted(digits.rglob("*.png"))):
        target = tmp_path / "photos" / ("train", "val", "test")[min(i % 5, 2)] / file.parent.name / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.read_bytes())
    run = small(source=f"stream:{tmp_path / 'photos'}", steps=2, train_size=None, holdout=0.1)
    data, folder = TrainingData.of(run, None), RunFolder(tmp_path / "run")
    assert data.held_out is not None and (len(data.train), len(data.held_out)) == (60, 60)
    train_run(run, folder, fabric)
    assert folder.card().holdout_rows == tuple(range(60, 120))
    assert held_out_images(folder.path, folder.card()).checksum() == data.held_out.checksum()
    calibrate(folder, fabric, passes=2)
    assert TrainingData.of(replace(run, holdout=0.0), None).held_out is None


def test_methods_that_look_at_images_before_and_after_training_do_so_in_files(digits, tmp_path, fabric):
    for method in ("cnn-laplace", "gpdnn"):
        states = [
            train_run(
                small(source=f"{kind}:{digits}", method={"name": method}, steps=2, train_size=100),
                RunFolder(tmp_path / f"{method}-{kind}"), fabric,
            ).model.state_dict()
            for kind in ("folder", "stream")
        ]  # fmt: skip
        assert same(*states)


def test_a_streamed_training_resumes_to_the_same_bits(digits, tmp_path, fabric):
    run = small(source=f"stream:{digits}", **OPTIONS)
    whole = train_run(run, RunFolder(tmp_path / "whole"), fabric).model
    folder = RunFolder(tmp_path / "parts")

    def interrupt(step):
        if step.step == 5:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted, match="step 5 of 12"):
        train_run(run, folder, fabric, watch=interrupt)
    assert same(train_run(run, folder, fabric, resume=True).model.state_dict(), whole.state_dict())


def test_other_files_are_not_resumed_with(digits, tmp_path, fabric):
    copy = tmp_path / "digits"
    for file in digits.rglob("*.png"):
        target = copy / file.relative_to(digits)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.read_bytes())
    run, folder = small(source=f"stream:{copy}", steps=6, train_size=None), RunFolder(tmp_path / "run")
    with pytest.raises(Interrupted):
        train_run(run, folder, fabric, watch=lambda step: step.step == 3 and os.kill(os.getpid(), signal.SIGINT))
    (copy / "digit 0" / "new.png").write_bytes(next(digits.rglob("*.png")).read_bytes())
    with pytest.raises(CalgpError, match="not those that"):
        train_run(run, folder, fabric, resume=True)


def test_an_image_damaged_on_the_way_ends_a_training_with_its_name(digits, tmp_path, fabric):
    copy = tmp_path / "digits"
    for file in digits.rglob("*.png"):
        target = copy / file.relative_to(digits)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.read_bytes()[:70] if file.name == "17.png" else file.read_bytes())
    with pytest.raises(CalgpError, match=r"1 of the images in .*/17.png is not a readable image"):
        train_run(small(source=f"stream:{copy}", train_size=None, steps=20), RunFolder(tmp_path / "run"), fabric)


@pytest.mark.slow
def test_a_training_from_shards_has_the_bits_of_one_in_memory_in_the_same_order(digits, tmp_path, fabric, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(shards, "WINDOW", 50)
    write_shards(digits, tmp_path / "shards", images_per_shard=40)
    run = small(source=f"shards:{tmp_path / 'shards'}", steps=12, train_size=None, holdout=0.2)
    data = TrainingData.of(run, None)
    assert len(data.train.order.counts) == 6 and sum(data.train.order.counts) == len(data.train) == 192
    held_out = data.held_out
    assert held_out is not None
    kept = TrainingData(*(replace(part, x=part.x[:]) for part in (data.train, held_out)))
    models = [
        train_run(run, RunFolder(tmp_path / name), fabric, data=each).model.state_dict()
        for name, each in (("streamed", None), ("kept", kept))
    ]
    assert same(*models)
    folder = RunFolder(tmp_path / "parts")
    with pytest.raises(Interrupted):
        train_run(run, folder, fabric, watch=lambda step: step.step == 8 and os.kill(os.getpid(), signal.SIGINT))
    assert same(train_run(run, folder, fabric, resume=True).model.state_dict(), models[0])
    evaluate(folder, fabric, passes=2)
    evaluate(folder, fabric, passes=2, corruption=Corruption("noise", 2))
    assert {check.state for check in verify(folder, fabric)} == {"same bits"}
