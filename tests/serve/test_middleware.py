"""Who may ask, from where; what every answer carries; what the log does not."""

import asyncio
import json
import logging

import pytest
from starlette.testclient import TestClient

from calgp.errors import CalgpError
from calgp.serve import Limits, create_app, read_token

from .conftest import RAW, png, sampled

TOKEN = "0123456789abcdef-secret"  # noqa: S105


def test_only_local_names_are_answered(client):
    for host, status in (
        ("localhost", 200), ("LOCALHOST:8000", 200), ("127.0.0.1:1", 200), ("[::1]:8000", 200), ("evil.example", 421),
        ("localhost.evil.example", 421), ("", 421), ("[::2]", 421),
    ):  # fmt: skip
        assert client.get("/healthz", headers={"host": host}).status_code == status, host


def test_pages_of_other_origins_are_refused(client):
    for origin, status in (
        ("http://localhost", 200), ("http://evil.example", 403), ("null", 403), ("http://[", 400), ("//[::1", 400),
    ):  # fmt: skip
        response = client.get("/v1/model", headers={"origin": origin})
        assert response.status_code == status, origin
        assert "default-src 'none'" in response.headers["content-security-policy"]


def test_every_answer_has_the_headers(client):
    for path in ("/", "/static/app.js", "/v1/model", "/healthz", "/no/such"):
        headers = client.get(path).headers
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cross-origin-resource-policy"] == headers["cross-origin-opener-policy"] == "same-origin"
        assert headers["referrer-policy"] == "no-referrer"
        assert "server" not in headers


def test_a_token_is_asked_for_where_there_is_one(digits):
    app = create_app(sampled(), token=TOKEN)
    with TestClient(app, base_url="http://localhost") as client:
        for header, status in (
            (None, 401), (f"Bearer {TOKEN}", 200), (f"bearer {TOKEN}", 200), (f"Bearer {TOKEN}x", 401),
            ("Bearer ", 401), (f"Basic {TOKEN}", 401), ("Bearer é", 401),
        ):  # fmt: skip
            headers = {} if header is None else {"authorization": header.encode()}
            response = client.get("/v1/model", headers=headers)
            assert response.status_code == status, header
            assert status == 200 or response.headers["www-authenticate"] == "Bearer"
        assert client.post("/v1/predict", content=png(digits[0]), headers=RAW).status_code == 401
        assert client.get("/metrics").status_code == 401
        assert all(client.get(path).status_code == 200 for path in ("/", "/static/app.js", "/healthz", "/readyz"))
        assert client.get("/openapi.json").json()["paths"]["/v1/predict"]["post"]["security"] == [{"token": []}]


def test_the_token_is_read_from_a_file_or_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("CALGP_TOKEN", raising=False)
    assert read_token(None) is None
    (file := tmp_path / "token").write_text(TOKEN + "\n")
    assert read_token(file) == TOKEN
    monkeypatch.setenv("CALGP_TOKEN", "short")
    with pytest.raises(CalgpError, match="at least 16 characters"):
        read_token(None)
    with pytest.raises(CalgpError, match="cannot be read"):
        read_token(tmp_path / "none")


def test_a_failure_of_ours_is_a_problem_with_all_headers(client, caplog):
    """A route that fails, as a defect would."""
    client.app.add_api_route("/broken", lambda: 1 / 0)
    response = client.get("/broken")
    assert response.status_code == 500 and "log says more" in response.json()["detail"]
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert "ZeroDivisionError" in caplog.text and "Zero" not in response.text


def test_every_request_has_a_deadline(digits):
    """Also one whose route never ends."""
    app = create_app(sampled(), limits=Limits(seconds=0.2))

    async def never() -> None:
        await asyncio.sleep(1000)

    app.add_api_route("/never", never)
    with TestClient(app, base_url="http://localhost") as client:
        response = client.get("/never")
        assert response.status_code == 503 and "within 0.2 seconds" in response.json()["detail"]
        late = client.post("/v1/predict?samples=1000", files=[("images", png(each)) for each in digits])
        assert late.status_code == 503 and int(late.headers["retry-after"]) >= 1
        lines = client.post("/v1/predict/stream?samples=1000&every=1", content=png(digits[0]), headers=RAW).text
        assert json.loads(lines.splitlines()[-1])["status"] == 503
        assert "calgp_queue_images 0.0" in client.get("/metrics").text


def test_the_log_has_neither_images_nor_what_clients_invent(client, digits, caplog):
    with caplog.at_level(logging.INFO):
        client.post("/v1/predict?samples=1&seed=77", content=png(digits[0]), headers=RAW)
        client.post("/v1/predict", files=[("images", ("SECRET.png", png(digits[0])))])
        client.post("/v1/predict", json={"images": [{"base64": "U0VDUkVU"}]})
        client.get("/SECRET%0aforged")
    mine = [record.getMessage() for record in caplog.records if record.name.startswith(("calgp", "uvicorn"))]
    assert len(mine) == 4 and not any("SECRET" in line or "U0VDUkVU" in line or "forged" in line for line in mine)


def test_limits_are_read_and_checked():
    assert Limits.parse(["samples=7", "seconds=0.5"]) == Limits(samples=7, seconds=0.5)
    for setting, sentence in (
        ("nothing=1", "Invalid limit 'nothing': must be one of head, body"), ("samples=x", "NAME=NUMBER"),
        ("samples", "NAME=NUMBER"),
        ("samples=0", "at least 1"), ("seconds=nan", "Invalid limit seconds=nan"), ("queue=-1", "at least 1"),
    ):  # fmt: skip
        with pytest.raises(CalgpError, match=sentence):
            Limits.parse([setting])
