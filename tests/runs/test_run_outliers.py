"""The outlier score of a run that was trained here: fitted with it, kept in its folder, the same through every door."""

import copy
import json
import shutil

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from calgp import cli
from calgp.data import load
from calgp.errors import CalgpError
from calgp.runs import RunFolder
from calgp.runs import load as load_run
from calgp.runs.description import from_json
from calgp.runs.run_outliers import FILE, ONE_PASS, WIDTH, has_features, project, read_outliers
from calgp.serve.model import ServedModel
from calgp.training import train_run
from folders import exported
from forked import python

LETTERS, DIGITS = (load(name, "test").take(torch.arange(200)) for name in ("letters", "digits"))
SMALL = {"source": "digits", "backbone": "lenet", "train_size": 1200, "steps": 150, "augment": ("none",)}


@pytest.fixture(scope="module")
def trained(tmp_path_factory, fabric):
    return train_run(from_json(SMALL), RunFolder(tmp_path_factory.mktemp("outliers") / "run"), fabric)


def scores(classifier, images):
    return torch.cat([part.outlier_scores for part in classifier.predict_batches(
        [(images.pixels(part), images.rows[part]) for part in images.parts(64)]
    )])  # fmt: skip


def without_scores(classifier):
    """The same run as one without an outlier score."""
    other = copy.copy(classifier)
    other.outliers, other.outlier_names = None, ()
    return other


def test_a_default_training_fits_it_and_the_folder_gives_the_same(trained):
    loaded = load_run(trained.folder.path)
    assert loaded.outlier_names == trained.outlier_names == ("combined", "density", "direction", "neighbours")
    assert loaded.outlier_threshold == trained.outlier_threshold
    assert scores(loaded, LETTERS).equal(scores(trained, LETTERS))


def test_letters_are_further_than_digits(trained):
    inside, outside = (scores(trained, images)[:, 0] for images in (DIGITS, LETTERS))
    pairs = (outside[:, None] > inside).double() + 0.5 * (outside[:, None] == inside).double()
    assert pairs.mean() > 0.75  # by chance ½ ± .03


def test_features_are_those_of_the_one_pass_and_nothing_is_computed_twice(trained):
    x, rows = DIGITS.pixels(slice(0, 50)), torch.zeros(50, dtype=torch.long)
    with torch.no_grad():
        features = trained.model.features(trained.model.stem(x), ONE_PASS.noise(0, 0, 1, rows))
    assert features.shape[1] > WIDTH == trained.outliers.projection.shape[1]
    calls = {}
    for name, classifier in (("with", trained), ("without", without_scores(trained))):
        calls[name] = []
        handle = trained.model.features.register_forward_hook(lambda *_, seen=calls[name]: seen.append(1))
        (part,) = classifier.calibrated_by(None).predict_batches([(x, rows)])
        handle.remove()
        if name == "with":
            expected = trained.outliers.score.score(project(features, trained.outliers.projection), part)
            torch.testing.assert_close(
                part.outlier_scores[:, 0], expected, rtol=1e-4, atol=2 * trained.outliers.score.step
            )
    assert len(calls["with"]) == len(calls["without"])


def test_probabilities_do_not_depend_on_it(trained):
    data = [(DIGITS.pixels(part), DIGITS.rows[part]) for part in DIGITS.parts(64)]
    with_it, without = (
        torch.cat([part.log_probs for part in each.predict_batches(data)])
        for each in (trained, without_scores(trained))
    )
    assert with_it.equal(without)


def test_few_images_in_ten_are_called_outliers_of_their_own_class(trained):
    """5 % are promised on average over hold-outs; this one has 60 images, whose threshold has a deviation of 3 %."""
    flagged = trained.outlier_threshold.flags(scores(trained, load("digits", "test"))[:, 0])
    assert flagged.double().mean() < 0.05 + 4 * 0.03


def test_distances_survive_the_projection():
    """Of 500 pairs, by 256 signs: a standard deviation of √(2/256) of the squared distance."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1000, 2000, generator=generator)
    signs = (2 * torch.randint(2, (2000, 256), generator=generator) - 1).to(torch.int8)
    before, after = ((each[:500] - each[500:]).square().sum(1) for each in (x, project(x, signs)))
    assert (after / before - 1).std() == pytest.approx((2 / 256) ** 0.5, rel=0.15)  # of 500: ± 3 %
    assert (after / before).mean() == pytest.approx(1, abs=4 * (2 / 256 / 500) ** 0.5)


def test_python_command_line_and_server_say_the_same(trained, tmp_path):
    Image.fromarray(LETTERS.x[0, 0].numpy()).save(tmp_path / "a.png")
    told = trained.predict(tmp_path / "a.png")
    result = CliRunner().invoke(cli.app, ["predict", str(trained.folder.path), str(tmp_path / "a.png"), "--json"])
    (row,) = json.loads(result.stdout)
    served = ServedModel(trained)
    sampling = served.sampling(LETTERS.x[:1], 0)
    sampling.draw(1)
    (answer,) = served.answers(sampling.predictive(), LETTERS.x[:1], [None], 1)
    for score, flag in ((row["outlier_score"], row["outlier"]), (answer.outlier_score, answer.outlier)):
        assert score == pytest.approx(told.outlier_score.item(), rel=1e-5) and flag == told.outliers.item()


def test_by_elementary_operations_it_is_the_same(trained):
    """Of images that are not among the ordinary ones, whose scores are counted, but for rounding."""
    x, rows = LETTERS.pixels(), torch.zeros(len(LETTERS), dtype=torch.long)
    with torch.no_grad():
        features = trained.model.features(trained.model.stem(x), ONE_PASS.noise(0, 0, 1, rows))
    (part,) = trained.outliers.predict(trained.model, [(x, rows)], seed=0)
    found = trained.outliers.elementary(features, part)
    differences = (found - part.outlier_scores[:, 0]).abs()
    assert differences.median() < 1e-4 and differences.max() <= trained.outliers.score.step + 1e-4


@pytest.mark.slow
def test_exported_it_is_an_output_with_its_threshold(trained, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    exported("export", trained.folder.path, "--out", tmp_path / "run.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "run.onnx"), providers=["CPUExecutionProvider"])
    about = json.loads(session.get_modelmeta().custom_metadata_map["calgp"])
    assert list(about["outputs"]) == [each.name for each in session.get_outputs()]
    assert about["outputs"]["outlier_score"].startswith("[N] combined")
    assert about["outlier_threshold"] == vars(trained.outlier_threshold)
    x = torch.cat([DIGITS.pixels(), LETTERS.pixels()])
    probs, score = session.run(["probabilities", "outlier_score"], {"images": x.numpy()})
    expected = trained.predict(x)
    torch.testing.assert_close(torch.from_numpy(probs), expected.probs, rtol=0, atol=1e-5)
    # it counts ordinary images with a lower score: rounding may move an image past one of them
    differences = (torch.from_numpy(score) - expected.outlier_score).abs()
    assert differences.max() <= trained.outliers.score.step + 1e-4 and differences.quantile(0.95) < 1e-4
    Image.fromarray(LETTERS.x[0, 0].numpy()).save(tmp_path / "a.png")
    printed = python(tmp_path / "run_predict.py", tmp_path / "run.onnx", tmp_path / "a.png").stdout.split()
    alone = trained.predict(tmp_path / "a.png")
    assert float(printed[5]) == pytest.approx(alone.outlier_score.item(), abs=1e-3)
    assert (printed[6:] == ["outlier"]) == alone.outliers.item()


def test_evaluate_tells_how_well_each_score_separates(trained):
    trained.evaluate()
    found = trained.evaluate("letters")
    assert set(found.ood) == {"entropy", "mutual_information", "confidence", *trained.outlier_names}
    assert found.flagged.score == "combined" and found.flagged.false_alarm == 0.05
    assert found.flagged.share > trained.evaluate().flagged.share


@pytest.mark.parametrize(
    "changed", [{"train_size": 300, "steps": 3}, {"method": {"kind": "Cnn"}, "steps": 3}], ids=["few images", "a CNN"]
)
def test_runs_that_cannot_have_it_have_none(changed, tmp_path, fabric):
    classifier = train_run(from_json(SMALL | changed), RunFolder(tmp_path / "run"), fabric)
    assert classifier.outliers is None and not (tmp_path / "run" / FILE).exists()
    assert classifier.predict(DIGITS.pixels(slice(0, 2))).outlier_score is None


def test_a_damaged_file_is_named(trained, tmp_path):
    folder = RunFolder(shutil.copytree(trained.folder.path, tmp_path / "run"))
    path = folder.path / FILE
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(CalgpError, match=r"outliers.safetensors cannot be read .*checksum"):
        read_outliers(folder)
    found = trained.outliers
    folder.write_tensors(FILE, found.score.tensors(), {"score": "combined", "settings": {}, "threshold": {}})
    with pytest.raises(CalgpError, match="written by another version or is damaged"):
        read_outliers(folder)


def test_many_samples_have_no_score(trained):
    sampled = copy.copy(trained.model)
    sampled.integrate = False
    assert has_features(trained.model) and not has_features(sampled)
    assert trained.predict(DIGITS.pixels(slice(0, 2)), passes=3).outlier_score is None
