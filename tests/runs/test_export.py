"""Files that need no calgp give what calgp gives: ONNX Runtime at its default settings, torch.export, and refusals."""

import dataclasses
import inspect
import json
import subprocess
import sys
import textwrap
import zlib
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from jaxtyping import config
from lightning_fabric import Fabric
from PIL import Image
from typer.testing import CliRunner

from architectures import ARCHITECTURES
from calgp import cli, wrap
from calgp.data import Images, load
from calgp.errors import CalgpError
from calgp.gp import Bound, Latent, Mixture, Noise, Predictive, predict
from calgp.gp.predictive import SampleMoments
from calgp.methods import METHODS
from calgp.nets import LeNet, ResNet, Task
from calgp.posthoc import calibration
from calgp.runs import Card, Classifier, RunFolder, from_json
from calgp.runs.environment import environment
from calgp.runs.record import to_json
from folders import calibrate, decide, export, predict_files

module = sys.modules["calgp.runs.export"]
LENET = LeNet(channels=(4, 4), hidden=(8,))
RESNET = ResNet(n=1, widths=(4, 8), pad_to=8)
SMALL = {"inducing": 12, "n_rf": 32, "reduced": 6, "grid": 16}  # options, where a method has them
# two backbones, 2 and 100 classes, 1 and 3 channels, a canvas larger than the image and one that is not square
CASES = {
    "cnn-gp-rf": (LENET, Task(1, 28, 28, 10)),
    "cnn-gp-sorf": (RESNET, Task(3, 8, 8, 100)),
    "cnn-dgp": (LENET, Task(3, 9, 12, 3)),
    "cnn-gp-rf-paper": (RESNET, Task(1, 8, 8, 2)),
    "cnn-gp-sorf-paper": (LENET, Task(1, 8, 8, 2)),
    "cnn-gp-mf": (RESNET, Task(3, 8, 8, 3)),
    "cnn-laplace": (RESNET, Task(1, 8, 8, 100)),
    "svdkl": (RESNET, Task(1, 8, 8, 3)),
    "cnn": (RESNET, Task(3, 8, 8, 100)),
    "cnn-cal": (LENET, Task(3, 32, 32, 2)),
    "cnn-mcd": (RESNET, Task(1, 7, 8, 10)),
    "gpdnn": (LENET, Task(1, 8, 8, 3)),
    "gpdnn-mcd": (RESNET, Task(3, 8, 8, 2)),
    "cgp": (LENET, Task(3, 8, 8, 3)),
}
NAMES = ("probabilities", "entropy", "expected_entropy", "mutual_information", "spread")
SAMPLES, SEED = 3, 5
# what the project promises of probabilities and entropy; float32 itself is good for some 1e-6 here
CLOSE = {"rtol": 0, "atol": 1e-5}


@pytest.fixture(scope="module", autouse=True)
def unchecked():
    """Without the run-time checks of shapes in calgp.gp, which torch cannot trace: as users run it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "jaxtyping_disable", True)
        for kind in (Latent, Predictive, SampleMoments):  # wrapped methods of classes that are made in a trace stop it
            for name, method in list(vars(kind).items()):
                if inspect.isfunction(method):
                    patch.setattr(kind, name, inspect.unwrap(method))
                elif isinstance(method, property):
                    patch.setattr(kind, name, property(inspect.unwrap(method.fget)))
        yield


def fitted(name, task, backbone, seed=0, **options):
    """A model after some steps, so that its probabilities are not all the same."""
    known = {field.name for field in dataclasses.fields(METHODS[name])}
    small = {key: value for key, value in SMALL.items() if key in known}
    method = dataclasses.replace(METHODS[name], **small | options)
    generator = torch.Generator().manual_seed(seed)
    model = method.build(task, backbone, generator=generator).to(memory_format=torch.channels_last)
    train = blobs(48, task)
    method.start(model, train, generator=generator)
    bound, optimiser = Bound(model, n=len(train)), torch.optim.Adam(model.parameters(), lr=5e-3)
    for step in range(10):
        optimiser.zero_grad()
        nll, _ = bound(train.pixels(), train.y, Noise(step, torch.arange(1), train.rows))
        nll.backward()
        optimiser.step()
    method.finish(model, train)
    if name.startswith(("cnn-gp-rf", "cnn-gp-sorf")):  # ten steps leave these near uniform
        model.gp.layers[-1].weights.weight.data.mul_(20)
    return model


def in_memory(model, task) -> Classifier:
    """A classifier without a folder; its description is not the model's."""
    classes = tuple(map(str, range(task.classes)))
    card = Card(from_json({}), task, classes, train_images=48, checksum="", holdout_rows=(), environment=environment())
    return Classifier(model, card, fabric=Fabric(accelerator="cpu", devices=1))


def blobs(n, task):
    """A bright spot whose place tells the class, in noise."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(n) % task.classes
    x = torch.randint(0, 100, (n, task.channels, task.height, task.width), generator=generator, dtype=torch.uint8)
    for i, label in enumerate(y.tolist()):
        x[i, :, label % 3 * 2 : label % 3 * 2 + 3, label % 5 : label % 5 + 3] += 150
    return Images.of(x, y, tuple(map(str, range(task.classes))))


def columns(predictive: Predictive):
    return [getattr(predictive, "probs" if name == "probabilities" else name) for name in NAMES]


def run_onnx(path, x):
    """As a user does: nothing but the default settings."""
    return [torch.from_numpy(each) for each in onnxruntime.InferenceSession(path).run(None, {"images": x.numpy()})]


def same_draws(model, x):
    """What calgp gives if all images have row 0."""
    return predict(model, [(x, torch.zeros(len(x), dtype=torch.long))], passes=SAMPLES, seed=SEED)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_every_method_survives_onnx_and_default_optimisations(name, tmp_path):
    backbone, task = CASES[name]
    model, path = fitted(name, task, backbone), tmp_path / "model.onnx"
    before = torch.get_rng_state()
    done = in_memory(model, task).export(path, passes=SAMPLES, seed=SEED)
    assert torch.equal(before, torch.get_rng_state())
    assert max(done.worst.values()) <= 1e-5
    assert done.size == path.stat().st_size
    x = blobs(20, task).pixels()[:7]
    one = predict(model, x[:1], passes=SAMPLES, seed=SEED)  # as calgp predicts one image
    for expected, images in ((one, x[:1]), (same_draws(model, x), x)):
        found = run_onnx(path, images)
        for ours, theirs in zip(columns(expected), found, strict=True):
            torch.testing.assert_close(theirs, ours, **CLOSE)
    assert found[0].std(0).amax() > 10 * CLOSE["atol"]  # images differ: no comparison of uniform numbers
    random = bool(model.sites()) or model(x).variance is not None
    assert (found[-1].amax() > 1e-4) == random  # the uncertainty has survived
    assert bytes(str(Path(module.__file__).parent), "utf-8") not in path.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cnn-gp-sorf", "gpdnn"])
def test_torch_export_gives_the_same_without_calgp(name, tmp_path):
    backbone, task = CASES[name]
    model, path = fitted(name, task, backbone), tmp_path / "model.pt2"
    in_memory(model, task).export(path, to="torch-export", passes=SAMPLES, seed=SEED)
    x = blobs(20, task).pixels()[:7]
    torch.save([x, *columns(same_draws(model, x))], tmp_path / "expected.pt")
    code = """
        import sys; sys.modules["calgp"] = None
        import json, torch
        x, *expected = torch.load("expected.pt")
        extra = {"calgp.json": ""}
        program = torch.export.load("model.pt2", extra_files=extra).module()
        assert json.loads(extra["calgp.json"])["classes"] == [str(q) for q in range(expected[0].shape[1])]
        for images in (x, x[:1]):
            for ours, theirs in zip(expected, program(images), strict=True):
                torch.testing.assert_close(theirs, ours[: len(images)], rtol=0, atol=1e-5)
        """
    run_python(code, tmp_path)


def run_python(code, directory, *arguments):
    file = directory / "script.py"
    file.write_text(textwrap.dedent(code))
    done = subprocess.run([sys.executable, "-W", "ignore", file.name, *arguments], cwd=directory, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "backbone", "options"),
    [
        ("cnn-mcd", LENET, {"granularity": "channel", "keep": 0.9, "inverted": True}),
        ("cnn-mcd", dataclasses.replace(LENET, normalise=True, pool=3, mask_first=True, spectral=0.9), {}),
        ("cnn-laplace", RESNET, {"predictive": "draws", "covariance": "per-class"}),
    ],
    ids=["channel", "cifar-spectral", "laplace-draws"],
)
def test_options_that_change_the_graph_survive(name, backbone, options, tmp_path):
    task = Task(1, 8, 8, 3)
    model = fitted(name, task, backbone, **options)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    in_memory(model, task).export(tmp_path / "model.onnx", passes=SAMPLES, seed=SEED)
    x = blobs(7, task).pixels()
    for ours, theirs in zip(columns(same_draws(model, x)), run_onnx(tmp_path / "model.onnx", x), strict=True):
        torch.testing.assert_close(theirs, ours, **CLOSE)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())  # the model was copied


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet", "convnextv2", "mobilenetv2", "efficientnet", "vit"])
def test_wrapped_networks_survive(name, tmp_path):
    task, backbone = Task(1, 28, 28, 3), wrap(ARCHITECTURES[name].make, name=f"export-{name}")
    model = METHODS["cnn-gp-sorf"].build(task, backbone, generator=torch.Generator().manual_seed(0))
    in_memory(model, task).export(tmp_path / "model.onnx", passes=SAMPLES, seed=SEED)
    x = blobs(7, task).pixels()
    found = run_onnx(tmp_path / "model.onnx", x)
    for ours, theirs in zip(columns(same_draws(model, x)), found, strict=True):
        torch.testing.assert_close(theirs, ours, **CLOSE)
    assert found[-1].amax() > 1e-4


@pytest.mark.slow
def test_an_ensemble_is_exported_as_a_mixture(tmp_path):
    task = Task(1, 8, 8, 3)
    model = Mixture([fitted("cnn", task, LENET), fitted("cnn-gp-sorf", task, RESNET, seed=1)])
    in_memory(model, task).export(tmp_path / "model.onnx", passes=SAMPLES, seed=SEED)
    x = blobs(7, task).pixels()
    for ours, theirs in zip(columns(same_draws(model, x)), run_onnx(tmp_path / "model.onnx", x), strict=True):
        torch.testing.assert_close(theirs, ours, **CLOSE)


@pytest.mark.slow
def test_every_calibrator_can_be_traced_and_gives_what_it_gave():
    generator = torch.Generator().manual_seed(0)
    log_probs = (2 * torch.randn(300, 4, generator=generator)).log_softmax(-1)
    y = torch.multinomial((0.5 * log_probs).softmax(-1), 1, generator=generator).squeeze(1)
    fits = [kind.fit(log_probs, y) for kind in calibration.CALIBRATORS.values()]

    class All(torch.nn.Module):
        def forward(self, log_p):
            return [fit.transform(log_p) for fit in fits]

    with module._quiet():
        shapes = ({0: torch.export.Dim("N")},)
        program = torch.onnx.export(All(), (log_probs.double(),), dynamo=True, verbose=False, dynamic_shapes=shapes)
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
    found = session.run(None, {session.get_inputs()[0].name: log_probs[:50].double().numpy()})
    for fit, theirs in zip(fits, found, strict=True):
        # in double precision, but the exporter writes a number of Python's, such as T, as float32: 6e-8 of up to 10
        np.testing.assert_allclose(theirs, fit.apply(log_probs[:50].double()), rtol=0, atol=1e-6)


@pytest.fixture(scope="module")
def calibrated(trained, fabric, tmp_path_factory):
    """A calibrated run with decisions, and its file."""
    import shutil

    folder = RunFolder(tmp_path_factory.mktemp("export") / "run")
    shutil.copytree(trained.path, folder.path)
    calibrate(folder, fabric, calibrator="vector", passes=4, share=0.5)
    decide(folder, fabric, passes=4, coverage=0.5)
    return folder, export(folder, passes=SAMPLES, seed=SEED)


def test_the_file_says_what_it_is(calibrated):
    folder, done = calibrated
    assert done.path == folder.path / "model.onnx"
    meta = onnxruntime.InferenceSession(done.path).get_modelmeta().custom_metadata_map
    about = json.loads(meta["calgp"])
    assert about == done.metadata
    assert about["classes"] == list(folder.card().classes)
    assert about["input"]["shape"] == ["N", 1, 28, 28]
    assert (about["samples"], about["seed"], about["decisions"]) == (SAMPLES, SEED, to_json(folder.decisions()))
    assert about["calibrator"]["calibrator"] == "vector"
    assert list(about["outputs"]) == list(NAMES)


def test_the_program_beside_the_file_needs_no_calgp(calibrated, fabric, tmp_path):
    folder, done = calibrated
    assert done.program == done.path.with_name("model_predict.py")
    code = done.program.read_text(encoding="utf-8")
    Image.fromarray(load("digits", "test").x[3, 0].numpy()).save(tmp_path / "photo.png")
    printed = run_python(
        f'import sys; sys.modules["calgp"] = None\n{code}', tmp_path, str(done.path), str(tmp_path / "photo.png")
    )
    expected = predict_files(folder, [tmp_path / "photo.png"], fabric, passes=SAMPLES, seed=SEED)
    file, label, probability, entropy, information = printed.split()
    assert file == str(tmp_path / "photo.png") and [label] == expected.labels
    for text, value in ((probability, expected.confidence), (entropy, expected.entropy),
                        (information, expected.mutual_information)):  # fmt: skip
        assert float(text) == pytest.approx(value.item(), abs=1e-4)  # four digits are printed


@pytest.mark.slow
def test_the_command_says_how_far_the_file_is_from_torch(calibrated, tmp_path):
    folder, file = calibrated[0], tmp_path / "run.pt2"
    arguments = ["export", str(folder.path), "--to", "torch-export", "--out", str(file), "-S", "2"]
    said = CliRunner().invoke(cli.app, arguments)
    assert said.exit_code == 0, said.output
    assert "2 passes, seed 0" in said.output
    assert "Largest difference to torch over 32 images: probabilities" in said.output
    assert {each.name for each in tmp_path.iterdir()} == {"run.pt2", "run_predict.py"}


@pytest.mark.slow
def test_what_does_not_agree_is_not_kept(calibrated, tmp_path, monkeypatch):
    folder, _ = calibrated
    monkeypatch.setattr(module, "TOLERANCE", -1.0)
    with pytest.raises(CalgpError, match="not kept"):
        export(folder, tmp_path / "model.pt2", to="torch-export", passes=SAMPLES)
    assert not list(tmp_path.iterdir())


def test_an_unknown_target_is_refused(calibrated, tmp_path):
    with pytest.raises(CalgpError, match="onnx, torch-export"):
        export(calibrated[0], tmp_path / "x", to="tflite")


@pytest.mark.slow
def test_a_missing_package_is_named(calibrated, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(CalgpError, match=r"calgp\[export\]"):
        export(calibrated[0], tmp_path / "x.onnx", passes=1)


def test_what_has_no_prediction_of_its_own_is_refused(tmp_path):
    task, backbone = Task(1, 8, 8, 3), dataclasses.replace(RESNET, batch_moments=True)
    model = METHODS["cnn"].build(task, backbone)
    with pytest.raises(CalgpError, match="moments of the batch"):
        in_memory(model, task).export(tmp_path / "x.onnx")


@pytest.mark.slow
def test_what_onnx_cannot_say_is_refused_by_name(tmp_path):
    task = Task(1, 8, 8, 3)
    model = fitted("cgp", task, LENET, likelihood="robust-max")
    with pytest.raises(CalgpError, match=r"ONNX has nothing for aten.*torch-export"):
        in_memory(model, task).export(tmp_path / "x.onnx", passes=SAMPLES)
    assert not list(tmp_path.iterdir())


def test_masks_take_a_bit_each():
    z = (torch.rand(5, 1, 1001, generator=torch.Generator().manual_seed(0)) < 0.3).float()
    packed = module._pack(z)
    assert torch.equal(packed(), z)
    assert packed.bytes.numel() == 5 * 126
    assert len(zlib.compress(packed.bytes.numpy().tobytes())) > 400  # they are draws, not a pattern
    epsilon = torch.randn(2, 1, 3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(module._pack(epsilon)(), epsilon)
