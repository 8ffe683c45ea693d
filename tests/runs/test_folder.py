import json
import os
import shutil
import sys
from dataclasses import replace

import pytest
import torch

from calgp.errors import CalgpError
from calgp.gp import predict
from calgp.runs import RunFolder, shipped_run
from calgp.runs.environment import environment
from calgp.runs.folder import slug
from calgp.runs.writing import write_whole
from folders import predictions


@pytest.fixture
def copy(trained, tmp_path) -> RunFolder:
    shutil.copytree(trained.path, tmp_path / "copy")
    return RunFolder(tmp_path / "copy")


def test_a_loaded_model_predicts_as_the_trained_one(trained):
    stored = predictions(trained, "digits")
    from calgp.data import load

    images = load("digits", "test")
    predicted = predict(trained.model(), [(images.pixels(slice(0, 50)), images.rows[:50])], passes=4, seed=0)
    # batches of 50 and of 100 may differ by rounding only
    torch.testing.assert_close(predicted.log_probs, stored["log_probs"][:50], atol=1e-5, rtol=0)


def test_run_json_describes_the_run(trained):
    card = trained.card()
    assert card.run.train_size == 200
    assert card.classes == tuple("0123456789")
    assert card.environment.torch == torch.__version__


def edit(folder, **changes):
    path = folder.path / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_another_format_names_who_wrote_it(copy):
    edit(copy, format=99, environment={"calgp": "9.9"})
    with pytest.raises(CalgpError, match=r"format 99, written by calgp 9\.9"):
        copy.card()


@pytest.mark.parametrize("text", ["", "[]", "null", "{", '{"format": 1}', '{"format": 1, "run": 3}', "\xff"])
def test_a_damaged_run_json_is_refused(copy, text):
    (copy.path / "run.json").write_text(text, encoding="latin-1")
    with pytest.raises(CalgpError):
        copy.card()


def test_no_run_folder_says_so(tmp_path):
    with pytest.raises(CalgpError, match="no run folder"):
        RunFolder(tmp_path).card()


def test_a_truncated_model_is_refused(copy):
    path = copy.path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CalgpError, match="cannot be read"):
        copy.model()


def test_a_model_of_another_shape_is_refused(copy):
    data = json.loads((copy.path / "run.json").read_text())
    data["run"]["backbone"]["channels"] = [4, 16]
    (copy.path / "run.json").write_text(json.dumps(data))
    with pytest.raises(CalgpError, match="does not fit"):
        copy.model()


def test_an_unfinished_run_has_no_model(copy):
    copy.remove("model.safetensors")
    with pytest.raises(CalgpError, match="no finished model"):
        copy.model()


def test_the_log_leaves_out_cut_lines_and_keeps_the_later_of_two(copy):
    with (copy.path / "log.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 20, "nll": 7.0, "kl": 0.0, "rate": 0.1}\n{"kind": "tra')
    log = copy.log()
    assert [record.nll for record in log if record.kind == "train" and record.step == 20] == [7.0]
    assert [record.step for record in log] == sorted(record.step for record in log)


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    path = tmp_path / "file"
    write_whole(path, b"old")
    with pytest.raises(TypeError):
        write_whole(path, "not bytes")  # type: ignore[arg-type]
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_folder_that_cannot_be_made_says_why(trained, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CalgpError, match="Cannot write in"):
        RunFolder(tmp_path / "file" / "run").create(trained.card())


@pytest.mark.parametrize(("source", "name"), [("digits", "digits"), ("folder:/a b/../c", "folder-a-b-c")])
def test_a_source_becomes_a_safe_file_name(source, name):
    assert slug(source) == name


def test_the_shipped_run_is_small_and_predicts_as_it_did():
    from calgp.data import load

    folder = shipped_run()
    assert sum(file.stat().st_size for file in folder.path.iterdir()) < 2_000_000
    images = load("digits", "test").take(torch.arange(20))
    predicted = predict(folder.model(), [(images.pixels(), images.rows)], seed=0)  # in one pass
    stored = predictions(folder, "digits")
    # another machine may add in another order; float32 through two convolutions and 4096 features
    torch.testing.assert_close(predicted.probs, stored["log_probs"][:20].exp(), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("argument", "kept"), [("L\udcf6we", "L?we"), ("x" * 5000, "x" * 4000)], ids=["no UTF-8", "very long"]
)
def test_a_command_that_json_cannot_keep_leaves_a_run_that_can_be_read(trained, tmp_path, monkeypatch, argument, kept):
    """`calgp train --out` with the bytes of another encoding trained well, and the run could never be read again."""
    monkeypatch.setattr(sys, "argv", ["calgp", argument])
    folder = RunFolder(tmp_path / "run")
    folder.create(replace(trained.card(), environment=environment()))
    assert folder.card().environment.command == ("calgp", kept)


def test_what_could_not_be_read_again_is_not_written(trained, tmp_path, monkeypatch):
    card, folder = trained.card(), RunFolder(tmp_path / "run")
    for classes, said in (
        (("L\udcf6we", *card.classes[1:]), "is no UTF-8; rename it"),
        (("x" * 5000,) * 10, "read again"),
    ):
        with pytest.raises(CalgpError, match=rf"run\.json cannot be written.*{said}"):
            folder.create(replace(card, classes=classes))
    monkeypatch.setattr("calgp.runs.folder.LARGEST_JSON", 100)
    with pytest.raises(CalgpError, match="and 100 can be read"):
        folder.create(card)
    assert not (folder.path / "run.json").exists()
