"""The API as a client sees it: forms of images, agreement with the command line and Python, streams, problems."""

import base64
import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from PIL import Image
from starlette.testclient import TestClient
from typer.testing import CliRunner

from calgp import cli
from calgp.data import load
from calgp.runs import Classifier, RunFolder
from calgp.serve import create_app
from calgp.serve.batching import MOST_UNREAD
from calgp.serve.model_info import GalleryResponse, ModelResponse
from calgp.serve.schemas import PredictionResponse, Problem, StreamLine
from folders import decide

from .conftest import RAW, png, sampled

ROUNDING = 1e-5  # what may differ with the images in a batch: float32 sums in another order


def probabilities(response) -> np.ndarray:
    assert response.status_code == 200, response.text
    found = PredictionResponse.model_validate_json(response.content)
    return np.array([each.probabilities for each in found.predictions])


def test_all_forms_of_an_image_give_one_answer(client, digits):
    address, file = "/v1/predict?samples=4&seed=1", png(digits[0])
    encoded = base64.b64encode(file).decode()
    responses = [
        client.post(address, content=file, headers=RAW),
        client.post(address, files=[("images", ("a.png", file, "image/png"))]),
        client.post(address, json={"images": [{"base64": encoded}]}),
        client.post(address, json={"images": [{"grey": digits[0].tolist()}]}),
        client.post(address, json={"images": [{"rgb": np.stack([digits[0]] * 3, -1).tolist()}]}),
    ]
    first, *others = map(probabilities, responses)
    assert all((other == first).all() for other in others)


def test_http_command_line_and_python_agree(client, digits, tmp_path):
    """Three images with S = 6 and seed 5, in any order, alone and while others ask for other things."""
    for row in range(3):
        Image.fromarray(digits[row]).save(tmp_path / f"{row}.png")
    files = [("images", (path.name, path.read_bytes())) for path in sorted(tmp_path.glob("*.png"))]
    python = sampled().predict(torch.from_numpy(digits[:3, None]).float() / 255, passes=6, seed=5)
    command = [
        "predict",
        str(sampled().folder.path),
        str(tmp_path),
        "-S",
        "6",
        "--seed",
        "5",
        "--json",
        "--device",
        "cpu",
    ]
    rows = json.loads(CliRunner().invoke(cli.app, command).stdout)
    by_command = np.array([[row["probabilities"][name] for name in "0123456789"] for row in rows])

    def ask(number: int) -> np.ndarray:
        if number % 3 == 0:
            return probabilities(client.post("/v1/predict?samples=6&seed=5", files=files))
        other = f"/v1/predict?samples={2 + number}&seed={5 + number % 2}"
        client.post(other, content=png(digits[number]), headers=RAW)
        return python.probs.numpy()

    with ThreadPoolExecutor(8) as pool:
        by_http = [probabilities(client.post("/v1/predict?samples=6&seed=5", files=files)), *pool.map(ask, range(12))]
    for found in [by_command, *by_http]:
        np.testing.assert_allclose(found, python.probs.numpy(), rtol=0, atol=ROUNDING)
    turned = probabilities(client.post("/v1/predict?samples=6&seed=5", files=files[::-1]))
    np.testing.assert_allclose(turned[::-1], python.probs.numpy(), rtol=0, atol=ROUNDING)
    alone = probabilities(client.post("/v1/predict?samples=6&seed=5", files=files[2:]))
    np.testing.assert_allclose(alone[0], python.probs[2].numpy(), rtol=0, atol=ROUNDING)


def test_the_parts_of_the_uncertainty_add_up(client, digits):
    response = client.post("/v1/predict?samples=20", files=[("images", png(each)) for each in digits[:4]])
    for each in PredictionResponse.model_validate_json(response.content).predictions:
        p = np.array(each.probabilities)
        assert each.label == str(p.argmax()) and each.confidence == p.max()
        assert each.entropy == pytest.approx(-(p[p > 0] * np.log(p[p > 0])).sum(), abs=1e-5)
        assert each.aleatoric + each.epistemic == pytest.approx(each.entropy, abs=1e-5)
        np.testing.assert_allclose(np.array(each.monte_carlo_error) * 20**0.5, each.spread, rtol=1e-5, atol=1e-9)
        assert (each.samples, each.label_is_decided, each.conformal_set, each.abstain) == (20, None, None, None)


def test_a_stream_ends_with_what_one_answer_would_say(client, digits):
    files = [("images", png(each)) for each in digits[:2]]
    response = client.post("/v1/predict/stream?samples=10&every=4&draws=true", files=files)
    assert response.headers["content-type"] == "application/x-ndjson"
    steps = [StreamLine.model_validate_json(line) for line in response.text.splitlines()]
    assert [(step.samples, step.done, step.total) for step in steps] == [(4, False, 10), (8, False, 10), (10, True, 10)]
    whole = probabilities(client.post("/v1/predict?samples=10", files=files))
    np.testing.assert_allclose([each.probabilities for each in steps[-1].predictions], whole, rtol=0, atol=ROUNDING)
    for row in range(2):
        draws = np.concatenate([step.draws[row] for step in steps])
        assert draws.shape == (10, 10)
        np.testing.assert_allclose(draws.mean(0), whole[row], rtol=0, atol=ROUNDING)


def test_a_stream_has_a_line_every_so_often_and_fewer_where_they_are_not_taken_in_time(client, digits):
    """The model does not wait for the event loop, which skips lines on a busy machine, but never the last."""
    lines = client.post("/v1/predict/stream?samples=40", content=png(digits[0]), headers=RAW).text.splitlines()
    steps = [StreamLine.model_validate_json(line) for line in lines]
    samples = [step.samples for step in steps]
    assert samples[:MOST_UNREAD] == [1, 2, 3, 4]
    assert samples == sorted(set(samples)) and samples[-1] == 40
    assert [step.done for step in steps] == [False] * (len(steps) - 1) + [True]
    assert all(step.draws is None for step in steps)


def test_sampling_stops_when_the_label_is_decided(client, digits):
    """Whoever else is in the batch: easy digits need 16 samples, white noise more than 32."""
    noise = np.random.default_rng(0).integers(0, 256, (28, 28), np.uint8)
    files = [("images", png(each)) for each in (digits[0], noise)]
    found = PredictionResponse.model_validate_json(
        client.post("/v1/predict?samples=32&error=0.01", files=files).content
    )
    easy, hard = found.predictions
    assert easy.label_is_decided and easy.samples == 16
    assert not hard.label_is_decided and hard.samples == 32
    alone = probabilities(client.post("/v1/predict?samples=16", content=png(digits[0]), headers=RAW))
    np.testing.assert_allclose(easy.probabilities, alone[0], rtol=0, atol=ROUNDING)
    last = client.post("/v1/predict/stream?samples=32&error=0.01&every=7", files=files).text.splitlines()[-1]
    assert [each.samples for each in StreamLine.model_validate_json(last).predictions] == [16, 32]


def test_the_model_is_described(client):
    found = ModelResponse.model_validate_json(client.get("/v1/model").content)
    assert found.classes == list("0123456789") and found.random and found.limits.samples == 1000
    inside, outside = found.evaluations
    assert inside.source == "digits" and sum(inside.reliability.count) == inside.n == 1000
    assert outside.outside and outside.reliability is None and outside.ood["entropy"].auroc.value > 0.8


def test_the_gallery_is_in_order(client):
    found = GalleryResponse.model_validate_json(client.get("/v1/gallery").content)
    assert len(found.most_certain) == len(found.least_certain) == 12
    assert max(each.entropy for each in found.most_certain) < min(each.entropy for each in found.least_certain)
    assert all(each.wrong and each.image.startswith("data:image/png") for each in found.confidently_wrong)


def test_decisions_are_those_of_the_command_line(digits, tmp_path):
    folder = RunFolder(shutil.copytree(sampled().folder.path, tmp_path / "run"))
    held_out = load("digits", "test").take(torch.arange(200, 400))
    decide(folder, held_out=held_out, passes=4, error=0.2, confidence=0.8, coverage=0.99)
    noise = np.random.default_rng(0).integers(0, 256, (28, 28), np.uint8)
    images = [png(each) for each in (*digits[:3], noise)]
    for place, content in enumerate(images):
        (tmp_path / f"{place}.png").write_bytes(content)
    classifier = Classifier.load(folder, fabric=sampled().fabric)
    with TestClient(create_app(classifier), base_url="http://localhost") as client:
        response = client.post("/v1/predict?samples=5", files=[("images", each) for each in images])
        found = PredictionResponse.model_validate_json(response.content).predictions
        assert client.get("/v1/model").json()["decisions"]["sets"]["coverage"] == 0.99
    expected = classifier.predict([tmp_path / f"{place}.png" for place in range(4)], passes=5)
    assert [each.abstain for each in found] == expected.abstains.tolist() and found[-1].abstain is not None
    assert [each.conformal_set for each in found] == expected.class_sets and len(expected.class_sets[-1]) > 1


def test_health_and_metrics(client, digits):
    assert client.get("/healthz").json() == client.get("/readyz").json() == {"status": "ok"}
    client.post("/v1/predict?samples=3", content=png(digits[0]), headers=RAW)
    found = client.get("/metrics").text
    assert 'calgp_requests_total{path="/v1/predict",status="200"}' in found
    assert "calgp_queue_images 0.0" in found and "calgp_entropy_nats_bucket" in found


@pytest.mark.parametrize(
    ("status", "request_"),
    [
        (404, {"method": "GET", "url": "/no/such"}),
        (405, {"method": "GET", "url": "/v1/predict"}),
        (415, {"content": b"x", "headers": {"content-type": "text/plain"}}),
        (415, {"content": b"x"}),
        (422, {"content": b"", "headers": RAW}),
        (422, {"content": b"GIF89a", "headers": RAW}),
        (422, {"content": b"{", "headers": {"content-type": "application/json"}}),
        (422, {"content": b"[" * 100_000, "headers": {"content-type": "application/json"}}),
        (422, {"json": {"images": []}}),
        (422, {"json": {"images": [{"base64": "????"}]}}),
        (422, {"json": {"images": [{"grey": [[0, 1], [2]]}]}}),
        (422, {"json": {"images": [{"grey": [[0, 256]]}]}}),
        (422, {"json": {"images": [{"grey": [[0.5]]}]}}),
        (422, {"json": {"images": [{"path": "/etc/passwd"}]}}),
        (422, {"content": b"x", "headers": {"content-type": "multipart/form-data"}}),
        (422, {"content": b"x", "headers": {"content-type": "multipart/form-data; boundary=a"}}),
        (422, {"data": {"images": "text"}, "files": {"other": b""}}),
        (422, {"url": "/v1/predict?samples=0", "content": b"", "headers": RAW}),
        (422, {"url": "/v1/predict?samples=1001", "content": b"", "headers": RAW}),
        (422, {"url": "/v1/predict?seed=-1", "content": b"", "headers": RAW}),
        (422, {"url": "/v1/predict?error=1", "content": b"", "headers": RAW}),
        (413, {"json": {"images": [{"grey": [[0]]}] * 33}}),
        (413, {"json": {"images": [{"grey": [[0] * 8193]}]}}),
        (413, {"content": b"0" * (4 * 2**20 + 1), "headers": RAW}),
        (413, {"content": iter([b"0" * 2**20] * 5), "headers": RAW}),
    ],
)  # fmt: skip
def test_whatever_is_wrong_is_a_problem(client, status, request_):
    response = client.request(**{"method": "POST", "url": "/v1/predict"} | request_)
    found = Problem.model_validate_json(response.content)
    assert (response.status_code, found.status) == (status, status), response.text
    assert response.headers["content-type"] == "application/problem+json"
    assert "Traceback" not in response.text and "0x" not in response.text and "passwd" not in response.text


def test_only_the_decoders_that_are_needed_see_an_image(client, digits, tmp_path):
    for suffix, status in (("png", 200), ("jpeg", 200), ("webp", 200), ("bmp", 422), ("gif", 422), ("tiff", 422)):
        Image.fromarray(digits[0]).save(file := tmp_path / f"digit.{suffix}")
        response = client.post("/v1/predict?samples=1", content=file.read_bytes(), headers=RAW)
        assert response.status_code == status, suffix


def test_an_image_that_unfolds_to_too_much_is_refused_before_it_unfolds(client):
    bomb = png(np.zeros((6000, 6000), np.uint8))  # 36 million pixels in 35 kB
    assert len(bomb) < 50_000
    response = client.post("/v1/predict", content=bomb, headers=RAW)
    assert response.status_code == 413 and "6000 × 6000" in response.json()["detail"]


def test_the_page_has_no_inline_script_and_its_files_are_there(client):
    page = client.get("/")
    assert page.status_code == 200 and "<script>" not in page.text and " style=" not in page.text
    for name in ("app.js", "style.css"):
        assert f"/static/{name}" in page.text and client.get(f"/static/{name}").status_code == 200
    assert client.get("/static/../app.py").status_code == 404
    assert client.get("/static/%2e%2e/app.py").status_code == 404
