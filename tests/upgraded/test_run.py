"""An upgraded classifier in a run folder: a classifier like any other, read without pickle and without its code."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner

import calgp
from calgp import CalgpError
from calgp.cli import app
from calgp.data import load
from calgp.nets.last_layer import LastLayer
from calgp.nets.program import Program, describe
from calgp.runs import RunFolder
from calgp.upgraded.run import UpgradedRun
from folders import exported

MEAN, STD = [0.1], [0.3]


def network():
    """A small network with batch norm, dropout and a residual sum, trained for a moment."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Sequential(nn.Conv2d(1, 8, 5, stride=3), nn.BatchNorm2d(8), nn.ReLU())
            self.more = nn.Conv2d(8, 8, 3, padding=1)
            self.drop, self.head = nn.Dropout(0.2), nn.Linear(8 * 16, 10)

        def forward(self, x):
            h = self.stem(x)
            h = nn.functional.max_pool2d(h + self.more(h).relu(), 2)
            return self.head(self.drop(h.flatten(1)))

    torch.manual_seed(0)
    found, images = Net(), load("digits", "train")
    optimiser = torch.optim.Adam(found.parameters(), lr=5e-3)
    for step in range(60):
        rows = torch.arange(100 * step, 100 * step + 100) % len(images)
        loss = nn.functional.cross_entropy(found((images.pixels(rows) - MEAN[0]) / STD[0]), images.y[rows])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return found.eval()


@pytest.fixture(scope="module")
def upgraded():
    images = load("digits", "test")
    x, y = (images.pixels() - MEAN[0]) / STD[0], images.y
    return calgp.upgrade(network(), (x[:250], y[:250]), classes=images.classes)


@pytest.fixture(scope="module")
def folder(upgraded, tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "mine"
    upgraded.save(path, source="digits", mean=MEAN, std=STD)
    return path


def test_loaded_from_its_folder_it_predicts_as_before(upgraded, folder):
    x = load("digits", "test").pixels()[250:300]
    run, before = calgp.load(folder), upgraded.predict((x - MEAN[0]) / STD[0])
    assert isinstance(run, UpgradedRun) and run.classes == upgraded.classes
    found = run.predict(x)
    # one graph instead of modules: the same kernels, but sums may be joined otherwise
    torch.testing.assert_close(found.probs, before.probs, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.outlier_score, before.outlier_score, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.mutual_information, before.mutual_information, rtol=0, atol=1e-5)
    assert found.labels == before.labels and found.sets.shape == (50, 10)
    alone = run.predict(x[7])
    torch.testing.assert_close(alone.probs[0], found.probs[7], rtol=0, atol=1e-6)


def test_a_parallel_network_is_saved_as_the_one_inside(upgraded, tmp_path):
    images, inner = load("digits", "test"), upgraded.network.network
    parallel = nn.DataParallel(inner)
    x = (images.pixels() - MEAN[0]) / STD[0]
    found = calgp.upgrade(parallel, (x[:100], images.y[:100]), classes=images.classes)
    found.save(tmp_path / "parallel", mean=MEAN, std=STD)
    expected = found.predict(x[100:120]).probs
    torch.testing.assert_close(
        calgp.load(tmp_path / "parallel").predict(images.pixels()[100:120]).probs, expected, rtol=0, atol=1e-5
    )
    assert not inner.training and {each.device.type for each in inner.parameters()} == {"cpu"}


def test_commands_take_it_evaluate_report_predict_and_verify(folder, tmp_path):
    command = CliRunner().invoke
    found = command(app, ["evaluate", str(folder), "--json"])
    assert found.exit_code == 0, found.output
    plain = json.loads(found.stdout)
    run = calgp.load(folder)
    images = load("digits", "test")
    wrong = (run.predict(images.pixels()).predictive.labels != images.y).float().mean().item()
    assert plain["scores"]["err"] == pytest.approx(wrong) and plain["decisions"]["sets"]["covered"] > 0.8
    outside = command(app, ["evaluate", str(folder), "--source", "letters", "--json"])
    assert json.loads(outside.stdout)["ood"]["entropy"]["auroc"] is not None, outside.output
    assert "AUROC by combined" in command(app, ["evaluate", str(folder), "--source", "letters"]).output
    page = run.report(tmp_path / "report.html").read_text()
    assert "entropy and features</th>" in page and "are called outliers by entropy and features" in page
    assert "Net, upgraded" in page and "elsewhere" in page
    file = tmp_path / "digit.png"
    Image.fromarray((255 * images.pixels()[3, 0].numpy()).round().astype(np.uint8)).save(file)
    rows = json.loads(command(app, ["predict", str(folder), str(file), "--json"]).stdout)
    assert rows[0]["label"] == run.predict(images.pixels()[3]).labels[0]
    states = [check.state for check in run.verify()]
    assert states[0] == "not checked" and set(states[1:]) == {"same bits"}


def test_evaluation_has_every_outlier_score_of_python(upgraded, folder):
    """The numbers of the folder are those of `UpgradedClassifier.evaluate`, which reads tensors."""
    images, letters = load("digits", "test"), load("letters", "test")
    run = calgp.load(folder)
    inside, found = run.evaluate(), run.evaluate("letters")
    x, z = ((each.pixels() - MEAN[0]) / STD[0] for each in (images, letters))
    expected = upgraded.evaluate((x, images.y), outside=z).ood
    assert {name.replace("-", "_") for name in expected} == set(found.ood)
    for name, each in expected.items():
        number = found.ood[name.replace("-", "_")].auroc
        # pairs of scores closer than the rounding of a graph that is joined otherwise
        assert number.value == pytest.approx(each.auroc, abs=1e-3), name
        assert number.interval[0] < number.value < number.interval[1]
    assert found.ood["combined"].auroc.value > found.ood["network_confidence"].auroc.value
    share = run.predict(images.pixels()).outliers.double().mean().item()
    assert inside.flagged.share == pytest.approx(share) and inside.flagged.false_alarm == 0.05
    assert inside.flagged.interval[0] < 0.05 and found.flagged.share > 3 * inside.flagged.share


def test_a_folder_without_a_source_takes_the_first_that_has_its_classes(upgraded, tmp_path):
    """Else images of other classes would have nothing to be compared with."""
    upgraded.save(tmp_path / "mine", mean=MEAN, std=STD)
    with pytest.raises(CalgpError, match="does not know its test images: give a source"):
        calgp.load(tmp_path / "mine").evaluate()
    assert calgp.load(tmp_path / "mine").evaluate("letters").ood is None
    assert not calgp.load(tmp_path / "mine").evaluate("digits").outside
    assert calgp.load(tmp_path / "mine").evaluate("letters").inside == "digits"


def test_exported_it_gives_probabilities_and_the_outlier_score(folder, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    run, path = calgp.load(folder), tmp_path / "mine.onnx"
    worst = json.loads(exported("export", folder, "--out", path, "--json"))["worst_difference"]
    assert worst.pop("outlier_score") <= run.upgraded.outlier.step and max(worst.values()) <= 1e-5
    x = load("digits", "test").pixels()[:40]
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    probs, score = session.run(["probabilities", "outlier_score"], {"images": x.numpy()})
    expected = run.predict(x)
    np.testing.assert_allclose(probs, expected.probs.numpy(), atol=1e-5)
    # it counts images, some of which are these: rounding may move it by one; most are not moved
    differences = abs(score - expected.outlier_score.numpy())
    assert differences.max() <= run.upgraded.outlier.step and np.median(differences) < 1e-4


def test_served_it_answers_as_predict_does(folder):
    testclient = pytest.importorskip("starlette.testclient")
    from calgp.serve import create_app

    run, x = calgp.load(folder), load("digits", "test").pixels()[300]
    pixels = (255 * x[0]).round().int().tolist()
    strange = torch.randint(256, (28, 28), generator=torch.Generator().manual_seed(0)).tolist()
    with testclient.TestClient(create_app(run), base_url="http://localhost") as client:
        images = [{"grey": pixels}, {"grey": strange}]
        answer, noise = client.post("/v1/predict", json={"images": images}).json()["predictions"]
        model = client.get("/v1/model").json()
    expected = run.predict(torch.stack([x, torch.tensor(strange)[None] / 255]))
    assert answer["probabilities"] == pytest.approx(expected.probs[0].tolist(), abs=1e-6)
    assert answer["passes"] == "1 pass" and answer["conformal_set"] == expected.class_sets[0]
    scores, limit = [answer["outlier_score"], noise["outlier_score"]], model["outliers"]["threshold"]
    assert scores == pytest.approx(expected.outlier_score.tolist(), abs=run.upgraded.outlier.step)
    assert [answer["outlier"], noise["outlier"]] == [score > limit for score in scores]
    assert model["outliers"] == {"score": "combined", "threshold": limit, "false_alarm": 0.05}


def test_nothing_in_the_folder_is_executed(folder, tmp_path):
    """The program is a list of torch's operations by name; any other name is refused before anything runs."""
    names = sorted(path.name for path in folder.iterdir() if not path.name.startswith((".", "scores", "predictions")))
    assert names == ["decisions.json", "model.safetensors", "run.json"]
    with safe_open(folder / "model.safetensors", "pt") as file:
        described = json.loads(file.metadata()["calgp"])
    tensors = load_file(folder / "model.safetensors")
    hostile = tmp_path / "hostile"
    hostile.mkdir()
    (hostile / "run.json").write_bytes((folder / "run.json").read_bytes())
    for name in ("aten.from_file.default", "os.system", "operator.__import__", "aten.__class__.mro", "prims.view_of"):
        changed = json.loads(json.dumps(described))
        changed["program"]["steps"][0][1] = name
        save_file(tensors, hostile / "model.safetensors", {"calgp": json.dumps(changed)})
        with pytest.raises(CalgpError, match="is no operation of torch that a program may have"):
            calgp.load(hostile)
    changed = json.loads(json.dumps(described))
    changed["program"]["steps"][0][2] = [{"node": "nobody"}]
    save_file(tensors, hostile / "model.safetensors", {"calgp": json.dumps(changed)})
    with pytest.raises(CalgpError, match="needs 'nobody', which is not there"):
        calgp.load(hostile)


def test_attention_and_layer_norm_become_a_program():
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.norm = nn.Conv2d(3, 16, 4, stride=4), nn.LayerNorm(16)
            self.attention, self.head = nn.MultiheadAttention(16, 2, batch_first=True), nn.Linear(16, 5)

        def forward(self, x):
            h = self.norm(self.embed(x).flatten(2).mT)
            h = h + self.attention(h, h, h, need_weights=False)[0]
            return self.head(nn.functional.gelu(h).mean(1))

    torch.manual_seed(0)
    module, x = Tokens().eval(), torch.rand(9, 3, 16, 16)
    last = LastLayer.find(module, x)
    steps, tensors = describe(last, (3, 16, 16))
    with torch.no_grad():
        features, logits = Program(json.loads(json.dumps(steps)), tensors)(x)
    torch.testing.assert_close(logits, last(x).logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(features, last(x).features, rtol=1e-5, atol=1e-5)


def test_what_cannot_be_is_refused_in_a_sentence(upgraded, folder, tmp_path):
    run = calgp.load(folder)
    with pytest.raises(CalgpError, match="calibrated already"):
        run.calibrate()
    with pytest.raises(CalgpError, match="keeps no hold-out"):
        run.decide(coverage=0.9)
    with pytest.raises(CalgpError, match="one pass is all"):
        run.predict(torch.zeros(1, 1, 28, 28), passes=50)
    with pytest.raises(CalgpError, match="cannot be a member of an ensemble"):
        RunFolder(folder).model()
    with pytest.raises(CalgpError, match="is there already"):
        upgraded.save(folder)
    with pytest.raises(CalgpError, match="a number for each of 1 channels"):
        upgraded.save(tmp_path / "new", mean=[0.1, 0.2, 0.3])
    vectors = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    with pytest.raises(CalgpError, match="networks that take images"):
        calgp.upgrade(vectors, (torch.randn(60, 4), torch.arange(60) % 3)).save(tmp_path / "vectors")
