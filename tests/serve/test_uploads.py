"""Bodies of requests: what decoding may cost, and that a worker process costs one request at most."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import anyio
import httpx2 as httpx
import numpy as np
import pytest

from calgp.serve import Limits
from calgp.serve.decoders import Decoders
from hostile_images import jpeg

from .conftest import NEVER, RAW, Connection, metric, png, sampled, serving, until

LIMITS = Limits(decoders=1, bodies=3 * 2**20, body=2**20 + 1000, json_body=2**20)
LIMITS = replace(LIMITS, decode=NEVER, client=NEVER, seconds=NEVER)  # no time runs out


@pytest.fixture(scope="module")
def address():
    with serving(sampled(), LIMITS) as address:
        yield address


def ask(address: str, body: bytes, kind: str = "image/png") -> httpx.Response:
    return httpx.post(f"{address}/v1/predict?samples=1", content=body, headers={"content-type": kind}, timeout=NEVER)


def workers(limits: Limits) -> list[int]:
    """Process ids of the children of this process that decode for the server with these limits."""
    found, options = [], json.dumps(asdict(limits)).encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = (folder / "stat").read_text().rsplit(")", 1)[1].split()[1]
            if int(parent) == os.getpid() and options in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except (FileNotFoundError, ProcessLookupError):
            pass
    return found


def test_a_jpeg_of_many_scans_is_refused_and_stops_nobody(address, digits):
    """20,000 scans in 0.3 MB kept all predictions waiting for more than half a minute."""
    response = ask(address, jpeg(20_000), "image/jpeg")
    assert response.status_code == 413 and "scans" in response.json()["detail"]  # not: within so many seconds
    assert ask(address, png(digits[0])).status_code == 200


def test_the_start_of_a_worker_is_not_counted(digits, tmp_path, monkeypatch):
    """A worker starts for longer than it may decode: on a busy machine the first requests were refused."""
    (tmp_path / "sitecustomize.py").write_text("import time; time.sleep(4)")  # which Python imports as it starts
    monkeypatch.syspath_prepend(tmp_path)

    async def first_image() -> tuple[int, ...]:
        decoders = Decoders((28, 28), "grey", replace(LIMITS, decode=3.0))
        await decoders.start()
        try:
            return (await decoders.decode(bytearray(png(digits[0])), "image/png")).shape
        finally:
            await decoders.stop()

    start = time.monotonic()
    assert anyio.run(first_image) == (1, 1, 28, 28)
    assert time.monotonic() - start > 4


LISTS = b'{"images":[{"grey":[' + b",".join([b"[0]"] * 262_000) + b"]}]}"


@pytest.mark.slow
def test_a_worker_that_takes_too_long_is_ended_and_costs_its_request_alone(digits):
    """Only the worker parses JSON: 4 MB of lists kept the event loop for four seconds."""
    limits = replace(LIMITS, decode=5.0, bodies=LIMITS.bodies + 1)  # so that its workers can be recognised
    with serving(sampled(), limits) as address:
        ask(address, png(digits[0]))
        (worker,) = workers(limits)
        os.kill(worker, signal.SIGSTOP)  # as if it worked for ever
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(ask, address, LISTS, "application/json")
            while not asked.done():
                assert httpx.get(f"{address}/healthz", timeout=NEVER).status_code == 200
        response = asked.result()
        assert response.status_code == 413 and "within 5 seconds" in response.json()["detail"]
        assert ask(address, png(digits[0])).status_code == 200
        assert worker not in workers(limits)


def test_a_worker_that_dies_costs_its_request_alone(address, digits):
    ask(address, png(digits[0]))
    (worker,) = workers(LIMITS)
    os.kill(worker, signal.SIGSTOP)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(ask, address, png(digits[0]))
        until(lambda: metric(address, "calgp_open_requests") == 1)
        for _ in range(20):  # answers, while which the event loop has given it to the worker
            assert metric(address, "calgp_open_requests") == 1
        second = pool.submit(ask, address, png(digits[0]))
        os.kill(worker, signal.SIGKILL)
        assert first.result().status_code == 422
        assert second.result().status_code == 200


def test_json_has_a_limit_of_its_own(address):
    assert LIMITS.json_body - 1000 < len(LISTS) < LIMITS.json_body
    response = ask(address, LISTS + b" " * 1000, "application/json; charset=utf-8")
    assert response.status_code == 413 and "1,048,576 bytes" in response.json()["detail"]
    response = ask(address, LISTS, "application/json")
    assert response.status_code == 413 and "1 × 262000 pixels" in response.json()["detail"]


def test_many_objects_are_refused_before_they_are_parsed(client):
    response = client.post("/v1/predict", json={"images": [{"grey": [[0]]}] * 33})
    assert response.status_code == 413 and "32 images" in response.json()["detail"]


def test_the_bytes_of_all_bodies_together_are_bounded(address, digits):
    """Four clients that keep their bodies open are too many for a fifth, until they leave."""
    clients = [Connection(address) for _ in range(3)]
    for each in clients:
        each.post("/v1/predict", bytes(2**20 - 1000), length=2**20)
    response = until(lambda: _with_status(503, ask(address, bytes(2**19))))  # 422 before they are all received
    assert response.headers["retry-after"] == "1"
    for each in clients:
        each.close()
    until(lambda: _with_status(200, ask(address, png(digits[0]))))


def _with_status(status: int, response: httpx.Response) -> httpx.Response | None:
    return response if response.status_code == status else None


def test_a_worker_needs_no_torch_and_has_bounded_memory():
    code = (
        "import sys; from calgp.serve.image_worker import prepare_process; from calgp.serve.limits import Limits\n"
        "assert 'torch' not in sys.modules and 'fastapi' not in sys.modules\n"
        "prepare_process(Limits(pixels=1)); bytearray(100 * 2**20)\n"
        "try: bytearray(200 * 2**20)\n"
        "except MemoryError: sys.exit(7)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 7


@pytest.mark.slow
def test_a_large_photograph_is_taken(client):
    """Twelve megapixels, as a telephone has them, in their most expensive form."""
    photograph = np.zeros((3000, 4000, 4), np.uint8)
    response = client.post("/v1/predict?samples=1", content=png(photograph), headers=RAW)
    assert response.status_code == 200
