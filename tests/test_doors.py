"""One trained classifier asked through every door: the same image has the same calibrated probabilities."""

from __future__ import annotations

import json

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image
from starlette.testclient import TestClient
from typer.testing import CliRunner

import calgp
from calgp import cli
from calgp.data import load
from calgp.serve import create_app
from calgp.sklearn import ConvGPClassifier
from folders import exported

CLOSE = {"rtol": 0, "atol": 1e-6}  # float32; images of a batch, and one alone, go through other kernels


@pytest.fixture(scope="module")
def estimator() -> ConvGPClassifier:
    """Trained by scikit-learn's door, with a temperature of its hold-out."""
    train = load("digits", "train").balanced(600, seed=0)
    small = {"channels": [4, 8], "hidden": [16]}
    options = {"steps": 60, "learning_rate": 5e-3, "augment": (), "batch_size": 50}
    found = ConvGPClassifier(backbone="lenet", backbone_options=small, random_state=0, **options)
    return found.fit(train.x[:, 0].numpy(), train.y.numpy())


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Five test digits as files, and as the array that they hold."""
    folder, x = tmp_path_factory.mktemp("photos"), load("digits", "test").x[:5, 0].numpy()
    for number, digit in enumerate(x):
        Image.fromarray(digit).save(folder / f"{number}.png")
    return sorted(folder.iterdir()), x


@pytest.fixture(scope="module")
def run(estimator, tmp_path_factory):
    """What the estimator saves."""
    folder = tmp_path_factory.mktemp("doors") / "run"
    estimator.save(folder)
    return folder


def in_python(run, paths, x):
    return calgp.load(run).predict(paths).probs.numpy()


def of_a_tensor(run, paths, x):
    return calgp.load(run).predict(torch.from_numpy(x)[:, None].float() / 255).probs.numpy()


def on_the_command_line(run, paths, x):
    done = CliRunner().invoke(cli.app, ["predict", str(run), *map(str, paths), "--json"])
    return np.array([list(row["probabilities"].values()) for row in json.loads(done.stdout)])


def into_a_folder(run, paths, x):
    out = run.parent / "predictions"
    done = CliRunner().invoke(cli.app, ["predict", str(run), *map(str, paths), "--out", str(out), "--jobs", "1"])
    assert done.exit_code == 0, done.output
    (file,) = out.glob("*.npz")
    return np.exp(np.load(file)["log_probs"])


def by_http(run, paths, x):
    with TestClient(create_app(calgp.load(run)), base_url="http://localhost") as client:
        answer = client.post("/v1/predict", files=[("images", path.read_bytes()) for path in paths]).json()
    return np.array([each["probabilities"] for each in answer["predictions"]])


def by_onnx(run, paths, x):
    exported("export", run, "--out", run.parent / "run.onnx")
    session = onnxruntime.InferenceSession(run.parent / "run.onnx", providers=["CPUExecutionProvider"])
    return session.run(["probabilities"], {"images": x[:, None].astype(np.float32) / 255})[0]


def of_pillow_images(run, paths, x):
    return calgp.load(run).predict([Image.fromarray(each) for each in x]).probs.numpy()


@pytest.mark.parametrize(
    "door", [in_python, of_a_tensor, of_pillow_images, on_the_command_line, into_a_folder, by_http, by_onnx]
)
def test_every_door_gives_the_probabilities_of_the_estimator(door, estimator, run, photos):
    paths, x = photos
    expected = estimator.predict_proba(x)
    np.testing.assert_allclose(door(run, paths, x), expected, **CLOSE)


def test_the_calibrator_moves_what_the_doors_say(estimator, run, photos):
    assert estimator.calibrator_ is not None
    plain = calgp.runs.Classifier.load(calgp.runs.RunFolder(run), calibrated=False).predict(photos[0]).probs.numpy()
    assert np.abs(plain - estimator.predict_proba(photos[1])).max() > 0.01
