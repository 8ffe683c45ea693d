"""Per-image scores: what is kept is what was predicted, to half precision, and hostile files are refused."""

import dataclasses
import gzip
import json

import pytest
import torch
from safetensors.torch import load, save

from calgp import metrics
from calgp.errors import CalgpError
from calgp.metrics import Outcomes
from calgp.runs import RunFolder
from calgp.search.image_scores import MOST_BYTES, ImageScores, image_scores, image_scores_name, packed

N = 10_000


def made_up(n: int = N, classes: int = 10) -> ImageScores:
    generator = torch.Generator().manual_seed(0)
    log_probs = (6 * torch.randn(n, classes, generator=generator)).log_softmax(-1)
    y = torch.where(
        torch.rand(n, generator=generator) < 0.9,
        log_probs.argmax(-1),
        torch.randint(classes, (n,), generator=generator),
    )
    found = metrics.outcomes(log_probs, y)
    return ImageScores(found.entropy, found.entropy / 2, found)


@pytest.fixture
def kept(tmp_path, trained):
    """A folder with small results of a real run alone, and the evaluation that they are of."""
    folder = trained
    (evaluation,) = [each for each in folder.evaluations() if not each.outside]
    target = RunFolder(tmp_path / "kept")
    target.path.mkdir()
    (target.path / "run.json").write_bytes((folder.path / "run.json").read_bytes())
    found = image_scores(folder, evaluation)
    assert found is not None
    (target.path / image_scores_name(target, evaluation)).write_bytes(packed(found))
    return target, evaluation, found


def test_ten_thousand_images_take_less_than_100_kilobytes():
    assert len(packed(made_up())) < 100_000


def test_the_same_scores_give_the_same_bytes():
    assert packed(made_up()) == packed(made_up())


def test_what_is_kept_is_what_was_predicted(kept):
    folder, evaluation, before = kept
    after = image_scores(folder, evaluation)
    assert after is not None and after.outcomes is not None and before.outcomes is not None
    assert torch.equal(after.outcomes.correct, before.outcomes.correct)
    for name in ("label_log_prob", "brier", "entropy"):
        torch.testing.assert_close(
            getattr(after.outcomes, name), getattr(before.outcomes, name), rtol=2**-10, atol=1e-6, check_dtype=False
        )
    for name in ("err", "mnll", "brier", "confidence"):
        scores = metrics.scores(after.outcomes).to_dict()
        assert scores[name] == pytest.approx(getattr(evaluation.own.scores, name), rel=1e-3), name


def test_confidences_near_one_keep_their_digits():
    """Half precision has no number between 0.9995 and 1, but many near 0."""
    confidence = torch.tensor([0.99999, 1.0, 0.5])
    column = torch.zeros(3)
    scores = ImageScores(
        column, column, Outcomes(confidence, torch.ones(3, dtype=torch.bool), column, column, column, 2)
    )
    stored = load(gzip.decompress(packed(scores)))["one_minus_confidence"].double()
    assert stored.tolist() == [pytest.approx(1e-5, rel=2e-3), 0.0, 0.5]


def test_without_files_there_are_no_scores(kept, tmp_path):
    folder, evaluation, _ = kept
    (folder.path / image_scores_name(folder, evaluation)).unlink()
    assert image_scores(folder, evaluation) is None


def changed(path, change):
    tensors = load(gzip.decompress(path.read_bytes()))
    path.write_bytes(gzip.compress(save(change(tensors))))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: {k: v for k, v in t.items() if k != "brier"}, "its columns are"),
        (lambda t: t | {"more": t["brier"].clone()}, "its columns are"),
        (lambda t: t | {"brier": t["brier"].float()}, "no column"),
        (lambda t: t | {"brier": t["brier"][:-1].clone()}, "no column"),
        (lambda t: t | {"entropy": t["entropy"] * float("nan")}, "no column"),
        (lambda t: t | {"one_minus_confidence": t["brier"] + 2}, "no probabilities"),
        (lambda t: t | {"correct": t["correct"][:-1].clone()}, "one bit"),
        (lambda t: t | {"correct": 255 - t["correct"]}, "not those of the scores"),
    ],
)
def test_files_that_do_not_fit_are_refused(kept, change, says):
    folder, evaluation, _ = kept
    changed(folder.path / image_scores_name(folder, evaluation), change)
    with pytest.raises(CalgpError, match=says):
        image_scores(folder, evaluation)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no gzip at all",
        gzip.compress(b"no tensors", mtime=0),
        gzip.compress(bytes(MOST_BYTES + 1), mtime=0),  # small on the disk, large in memory
        gzip.compress(json.dumps({}).encode(), mtime=0)[:-4],
    ],
)
def test_damaged_files_are_refused(kept, content):
    folder, evaluation, _ = kept
    (folder.path / image_scores_name(folder, evaluation)).write_bytes(content)
    with pytest.raises(CalgpError, match="cannot be read"):
        image_scores(folder, evaluation)


def test_scores_of_more_images_than_the_file_has_are_refused(kept):
    folder, evaluation, _ = kept
    with pytest.raises(CalgpError, match="no column of"):
        image_scores(folder, dataclasses.replace(evaluation, n=2**39))


def test_outside_images_have_entropies_alone():
    scores = dataclasses.replace(made_up(100), outcomes=None)
    assert set(load(gzip.decompress(packed(scores)))) == {"entropy", "mutual_information"}
