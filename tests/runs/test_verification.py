"""What `verify` finds, and what it must not overlook."""

import json
import shutil

import pytest
import torch

from calgp.data import Corruption
from calgp.runs import RunFolder
from calgp.runs.writing import write_whole
from folders import calibrate, evaluate, metadata, tensors, verify


@pytest.fixture
def copy(trained, tmp_path) -> RunFolder:
    shutil.copytree(trained.path, tmp_path / "copy")
    return RunFolder(tmp_path / "copy")


def states(folder, fabric):
    return {check.what: check.state for check in verify(folder, fabric)}


def edit(folder, name, change):
    data = json.loads((folder.path / name).read_text())
    change(data)
    write_whole(folder.path / name, json.dumps(data).encode())


@pytest.mark.slow
def test_the_same_machine_has_the_same_bits_for_every_kind_of_evaluation(copy, fabric):
    calibrate(copy, fabric, passes=4)
    evaluate(copy, fabric, passes=4)
    evaluate(copy, fabric, passes=4, calibrated=False, corruption=Corruption("blur", 2, seed=1))
    (copy.path / "calibration.json").unlink()  # what an evaluation was calibrated with is kept in it
    before = {path: path.stat().st_mtime_ns for path in copy.path.iterdir()}
    assert states(copy, fabric) == dict.fromkeys(
        ("training images", "digits", "digits, temperature", "letters", "digits~blur-2"), "same bits"
    )
    assert before == {path: path.stat().st_mtime_ns for path in copy.path.iterdir()}  # nothing is written


def test_a_changed_weight_is_found(copy, fabric):
    changed = tensors(copy, "model.safetensors")
    changed["gp.layers.0.weights.weight"] += 1e-2
    copy.write_tensors("model.safetensors", changed)
    found = states(copy, fabric)
    assert found["training images"] == "same bits"
    assert found["digits"] == found["letters"] == "differs"


def test_a_changed_score_is_found(copy, fabric):
    edit(copy, "scores-digits.json", lambda data: data["scores"].update(mnll=data["scores"]["mnll"] - 0.01))
    assert states(copy, fabric)["digits"] == "differs"


def test_a_changed_last_bit_is_found_where_bits_are_promised_and_allowed_where_not(copy, fabric):
    name = copy.predictions_name("digits")
    changed = tensors(copy, name)
    changed["log_probs"] = changed["log_probs"].nextafter(torch.zeros(()))
    copy.write_tensors(name, changed, metadata(copy, name))
    assert states(copy, fabric)["digits"] == "differs"
    edit(copy, "scores-digits.json", lambda data: data["environment"].update(threads=64))
    assert states(copy, fabric)["digits"] == "within tolerance"


def test_other_images_are_found(copy, fabric):
    edit(copy, "run.json", lambda data: data.update(checksum="0" * 64))
    edit(copy, "scores-letters.json", lambda data: data.update(checksum="0" * 64))
    found = verify(copy, fabric)
    assert [check.detail for check in found if check.state == "differs"] == [
        "digits is not what the run was trained on",
        "letters is not what the run was evaluated on",
    ]


def test_what_is_not_here_is_not_checked(copy, fabric, tmp_path):
    edit(copy, "scores-letters.json", lambda data: data.update(source="mnist"))
    (check,) = [check for check in verify(copy, fabric, directory=tmp_path / "none") if check.what == "mnist"]
    assert check.state == "not checked" and check.detail
