"""Bodies of requests: what decoding may cost, and that a worker process costs one request at most."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2 as httpx
import numpy as np
import pytest

from calgp.serve import Limits
from hostile_images import jpeg

from .conftest import RAW, Connection, png, sampled, serving

LIMITS = Limits(decode=2, decoders=1, bodies=3 * 2**20, body=2**20 + 1000, json_body=2**20)


@pytest.fixture(scope="module")
def address():
    with serving(sampled(), LIMITS) as address:
        yield address


def ask(address: str, body: bytes, kind: str = "image/png") -> httpx.Response:
    return httpx.post(f"{address}/v1/predict?samples=1", content=body, headers={"content-type": kind}, timeout=30)


def workers() -> list[int]:
    """Process ids of the children of this process that decode for the server with one decoder."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = (folder / "stat").read_text().rsplit(")", 1)[1].split()[1]
            if int(parent) == os.getpid() and b'"decoders": 1,' in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except (FileNotFoundError, ProcessLookupError):
            pass
    return found


def test_a_jpeg_of_many_scans_is_refused_and_stops_nobody(address, digits):
    """20,000 scans in 0.3 MB kept all predictions waiting for more than half a minute."""
    start = time.monotonic()
    response = ask(address, jpeg(20_000), "image/jpeg")
    assert response.status_code == 413 and "scans" in response.json()["detail"]
    assert ask(address, png(digits[0])).status_code == 200
    assert time.monotonic() - start < 5


@pytest.mark.slow
def test_a_worker_that_takes_too_long_is_ended_and_costs_its_request_alone(address, digits):
    ask(address, png(digits[0]))
    (worker,) = workers()
    os.kill(worker, signal.SIGSTOP)  # as if it worked for ever
    response = ask(address, png(digits[0]))
    assert response.status_code == 413 and "within 2 seconds" in response.json()["detail"]
    assert ask(address, png(digits[0])).status_code == 200
    assert worker not in workers()


def test_a_worker_that_dies_costs_its_request_alone(address, digits):
    ask(address, png(digits[0]))
    (worker,) = workers()
    os.kill(worker, signal.SIGSTOP)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(ask, address, png(digits[0]))
        time.sleep(0.3)  # it waits for the worker by now
        second = pool.submit(ask, address, png(digits[0]))
        os.kill(worker, signal.SIGKILL)
        assert first.result().status_code == 422
        assert second.result().status_code == 200


def test_json_has_a_limit_of_its_own_and_is_parsed_elsewhere(address):
    """4 MB of lists kept the event loop for four seconds."""
    lists = b'{"images":[{"grey":[' + b",".join([b"[0]"] * 262_000) + b"]}]}"
    assert LIMITS.json_body - 1000 < len(lists) < LIMITS.json_body
    response = ask(address, lists + b" " * 1000, "application/json; charset=utf-8")
    assert response.status_code == 413 and "1,048,576 bytes" in response.json()["detail"]
    slowest, done, begun = 0.0, threading.Event(), time.monotonic()

    def attack() -> None:
        assert ask(address, lists, "application/json").status_code == 413  # a side of 262,000 pixels
        done.set()

    thread = threading.Thread(target=attack)
    thread.start()
    with httpx.Client() as client:
        while not done.is_set():
            start = time.monotonic()
            assert client.get(f"{address}/healthz").status_code == 200
            slowest = max(slowest, time.monotonic() - start)
    whole = time.monotonic() - begun
    thread.join()
    assert slowest < whole / 2  # a loop that parses answers nobody until it is done; a busy machine is slow in both


def test_many_objects_are_refused_before_they_are_parsed(client):
    response = client.post("/v1/predict", json={"images": [{"grey": [[0]]}] * 33})
    assert response.status_code == 413 and "32 images" in response.json()["detail"]


def test_the_bytes_of_all_bodies_together_are_bounded(address, digits):
    """Four clients that keep their bodies open are too many for a fifth, until they leave."""
    clients = [Connection(address) for _ in range(3)]
    for each in clients:
        each.post("/v1/predict", bytes(2**20 - 1000), length=2**20)
    time.sleep(0.5)  # they are received by now
    response = ask(address, bytes(2**19))
    assert response.status_code == 503 and response.headers["retry-after"] == "1"
    for each in clients:
        each.close()
    for _ in range(100):
        if ask(address, png(digits[0])).status_code == 200:
            break
        time.sleep(0.05)
    else:
        raise AssertionError("their bytes are still counted")


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
