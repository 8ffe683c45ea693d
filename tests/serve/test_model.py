"""The model behind the server: one pass where the last layer is integrated, samples elsewhere."""

import json

import numpy as np
import pytest
import torch
from lightning_fabric import Fabric
from starlette.testclient import TestClient

from calgp.runs import Classifier, RunFolder, from_json
from calgp.serve import create_app
from calgp.training import train_run

from .conftest import RAW, png


def trained(folder, **options) -> Classifier:
    network = {"name": "lenet", "channels": [4, 8], "hidden": [16]}
    run = from_json({"backbone": network, "train_size": 100, "steps": 2, "batch_size": 50} | options)
    fabric = Fabric(accelerator="cpu", devices=1)
    train_run(run, found := RunFolder(folder), fabric)
    return Classifier.load(found, fabric=fabric)


@pytest.mark.parametrize(
    ("method", "engine", "passes"),
    [
        ("cnn-gp-sorf", "moments", "1 pass"), ("cnn-gp-mf", "moments", "1 pass"), ("cnn", "samples", "1 pass"),
        ("cnn-mcd", "samples", "20 samples"), ("gpdnn", "samples", "20 samples"),
    ],
)  # fmt: skip
def test_one_pass_where_it_is_enough(tmp_path, digits, method, engine, passes):
    """Whatever number of samples is asked for, and without sampling until a label is decided."""
    classifier = trained(tmp_path, method=method)
    with TestClient(create_app(classifier), base_url="http://localhost") as client:
        about = client.get("/v1/model").json()
        response = client.post("/v1/predict?samples=20&seed=3", content=png(digits[0]), headers=RAW).json()
        lines = client.post("/v1/predict/stream?samples=20&error=0.5&draws=true", content=png(digits[0]), headers=RAW)
        metrics = client.get("/metrics").text
    (found,), last = response["predictions"], json.loads(lines.text.splitlines()[-1])
    one = passes == "1 pass"
    assert (about["engine"], about["random"], about["default_samples"]) == (engine, not one, 1 if one else 50)
    assert found["passes"] == passes and found["samples"] == (1 if one else 20)
    x = torch.from_numpy(digits[:1, None]).float() / 255
    expected = classifier.predict(x, passes=1 if one else 20, seed=3).probs[0].numpy()
    np.testing.assert_allclose(found["probabilities"], expected, atol=1e-5)  # float32 sums in another order
    if one:
        assert len(lines.text.splitlines()) == 1 and last["total"] == 1
        assert last["predictions"][0]["label_is_decided"] is None
        assert "calgp_samples_total 2.0" in metrics
    assert (max(found["spread"]) > 0) == (method != "cnn")
