import json
import shutil

import numpy as np
import pytest
import torch

from calgp.data import load
from calgp.errors import CalgpError
from calgp.gp import predict
from calgp.runs import RunFolder, compare, ensemble
from calgp.training import train_run
from folders import calibrate, evaluate, held_out, predict_files
from small_run import small


@pytest.fixture(scope="module")
def members(tmp_path_factory, fabric) -> list[RunFolder]:
    """Three runs of two methods, with the same hold-out. Read only."""
    root, folders = tmp_path_factory.mktemp("members"), []
    for name, method, seed in (("a", "cnn", 0), ("b", "cnn", 1), ("c", "cnn-mcd", 2)):
        folder = RunFolder(root / name)
        train_run(small(method=method, seed=seed, steps=15, holdout=0.2, split_seed=0), folder, fabric)
        folders.append(folder)
    return folders


@pytest.fixture(scope="module")
def twins(members, tmp_path_factory) -> RunFolder:
    """The ensemble of the two CNNs. Read only."""
    ensemble(members[:2], folder := RunFolder(tmp_path_factory.mktemp("ensemble") / "twins"))
    return folder


def images():
    return load("digits", "test").take(torch.arange(30))


def test_it_predicts_the_average_of_its_members(twins, members):
    found = images()
    data = [(found.pixels(), found.rows)]
    result = predict(twins.model(), data, passes=50)
    probs = np.stack([predict(member.model(), data, passes=50).probs.numpy() for member in members[:2]])
    np.testing.assert_allclose(result.probs, probs.mean(0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(result.spread, probs.std(0, ddof=1), rtol=1e-3, atol=1e-6)
    assert result.samples == 2 and (result.mutual_information > 0).any()


def test_members_of_different_methods_mix(members, tmp_path):
    card = ensemble(members, folder := RunFolder(tmp_path / "mixed"))
    assert card.label == folder.card().label == "ensemble of cnn, cnn, cnn-mcd"
    result = predict(folder.model(), images().pixels(), passes=4)
    assert result.samples == 12
    torch.testing.assert_close(result.probs.sum(-1), torch.ones(30))


def test_it_lists_relative_paths_and_moves_with_its_members(members, tmp_path):
    for member in members[:2]:
        shutil.copytree(member.path, tmp_path / "here" / member.name)
    folders = [RunFolder(tmp_path / "here" / member.name) for member in members[:2]]
    ensemble(folders, RunFolder(tmp_path / "here" / "both"))
    text = (tmp_path / "here" / "both" / "run.json").read_text()
    assert [member["path"] for member in json.loads(text)["members"]] == ["../a", "../b"]
    assert str(tmp_path) not in json.dumps({**json.loads(text), "environment": {}})
    before = predict(RunFolder(tmp_path / "here" / "both").model(), images().pixels()).log_probs
    (tmp_path / "here").rename(tmp_path / "there")
    assert predict(RunFolder(tmp_path / "there" / "both").model(), images().pixels()).log_probs.equal(before)


def test_evaluate_predict_calibrate_and_compare_work_on_it(twins, members, fabric, tmp_path):
    for source in [*members[:2], twins]:
        shutil.copytree(source.path, tmp_path / source.name)
    ensemble([RunFolder(tmp_path / "a"), RunFolder(tmp_path / "b")], folder := RunFolder(tmp_path / "both"))
    plain = evaluate(folder, fabric, passes=2)
    assert plain.own.scores.n == 1000 and plain.calibrator is None
    assert set(folder.card().holdout_rows) == set(members[0].card().holdout_rows)
    found = calibrate(folder, fabric, passes=2)
    held = held_out(folder)
    probs = np.mean([predict(m.model(), [(held.pixels(), held.rows)]).probs.numpy() for m in members[:2]], 0)
    assert found.before.mnll == pytest.approx(-np.log(probs[np.arange(40), held.y.numpy()]).mean(), rel=1e-4)
    assert evaluate(folder, fabric, passes=2).calibrator == "temperature"
    rows = {row.method: row for row in compare([folder])}
    assert set(rows) == {"ensemble of 2 cnn", "ensemble of 2 cnn + temperature"}
    from PIL import Image

    Image.fromarray(load("digits", "test").x[0, 0].numpy()).save(tmp_path / "digit.png")
    assert predict_files(folder, [tmp_path / "digit.png"], fabric).predictive.samples == 2


def test_members_that_hold_out_nothing_together_cannot_be_calibrated_on(members, tmp_path, fabric):
    train_run(small(method="cnn", seed=5, steps=1), other := RunFolder(tmp_path / "other"), fabric)
    ensemble([members[0], other], folder := RunFolder(tmp_path / "both"))
    assert folder.card().holdout_rows == ()
    with pytest.raises(CalgpError, match="split-seed 0"):
        calibrate(folder, fabric)


def test_only_what_all_members_hold_out_is_calibrated_on(members, tmp_path, fabric):
    train_run(
        small(method="cnn", seed=5, steps=1, holdout=0.1, split_seed=0), other := RunFolder(tmp_path / "other"), fabric
    )
    ensemble([members[0], other], folder := RunFolder(tmp_path / "both"))
    common = set(members[0].card().holdout_rows) & set(other.card().holdout_rows)
    assert len(common) == 20  # of 40: the smaller part of one class's shuffle is in the larger
    assert set(held_out(folder).rows.tolist()) == common


def test_members_must_agree_in_classes_and_images(members, tmp_path, fabric):
    other = RunFolder(shutil.copytree(members[1].path, tmp_path / "other"))
    path = other.path / "run.json"
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data | {"classes": list("abcdefghij")}))
    with pytest.raises(CalgpError, match=r"a, b, c, .* same classes"):
        ensemble([members[0], other], RunFolder(tmp_path / "both"))
    path.write_text(json.dumps(data | {"task": data["task"] | {"height": 32}}))
    with pytest.raises(CalgpError, match="1 × 32 × 28"):
        ensemble([members[0], other], RunFolder(tmp_path / "both"))
    assert not (tmp_path / "both").exists()


def test_what_is_no_ensemble_is_refused(members, twins, tmp_path, fabric):
    target = RunFolder(tmp_path / "both")
    with pytest.raises(CalgpError, match="at least two runs"):
        ensemble(members[:1], target)
    with pytest.raises(CalgpError, match="each of them once"):
        ensemble([members[0], members[0]], target)
    with pytest.raises(CalgpError, match="an ensemble itself"):
        ensemble([members[2], twins], target)
    with pytest.raises(CalgpError, match="already holds a run"):
        ensemble(members[:2], members[2])
    with pytest.raises(CalgpError, match="already holds a run"):
        train_run(small(), twins, fabric)
    unfinished = RunFolder(shutil.copytree(members[1].path, tmp_path / "unfinished"))
    unfinished.remove("model.safetensors")
    with pytest.raises(CalgpError, match="no finished model"):
        ensemble([members[0], unfinished], target)
    assert not target.path.exists()


def test_it_is_found_through_a_link(members, tmp_path):
    (tmp_path / "deep" / "er").mkdir(parents=True)
    ensemble(members[:2], folder := RunFolder(tmp_path / "deep" / "er" / "both"))
    (tmp_path / "link").symlink_to(folder.path)
    assert len(RunFolder(tmp_path / "link").model().members) == 2


def test_a_member_that_is_gone_is_named(members, tmp_path):
    gone = RunFolder(shutil.copytree(members[1].path, tmp_path / "gone"))
    ensemble([members[0], gone], folder := RunFolder(tmp_path / "both"))
    shutil.rmtree(gone.path)
    with pytest.raises(CalgpError, match=r"gone is no run folder"):
        folder.model()
