"""A process as an operator starts it: SIGTERM, overload, mistakes on the command line."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2 as httpx
import pytest
from typer.testing import CliRunner

from calgp import cli
from calgp.errors import CalgpError
from golden import sampled_run

from .conftest import RAW, Connection, png


def wait_until_ready(process: subprocess.Popen, address: str) -> None:
    for _ in range(1200):
        try:
            if httpx.get(f"{address}/readyz").status_code == 200:
                return
        except httpx.TransportError:
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.05)
    raise AssertionError("the server is not ready after a minute")


@pytest.fixture
def start():
    """Starts `calgp serve` of a run that samples, with options, waits until it is ready, and ends it after the test."""
    running = []

    def run(*options: str) -> tuple[subprocess.Popen, str]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        run = str(sampled_run().path)
        command = [sys.executable, "-m", "calgp", "serve", run, "--device", "cpu", "--port", str(port), *options]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | {"COLUMNS": "200"}
        )
        running.append(process)
        address = f"http://127.0.0.1:{port}"
        wait_until_ready(process, address)
        return process, address

    yield run
    for process in running:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.mark.slow
def test_overload_is_shed_quickly_and_sigterm_finishes_what_was_accepted(start, digits, tmp_path, monkeypatch, capsys):
    process, address = start("--threads", "1", "--limit", "queue=8", "--limit", "requests=64")
    body = png(digits[0])

    async def ask(client: httpx.AsyncClient, samples: int) -> tuple[int, float]:
        clock = time.perf_counter()
        response = await client.post(f"/v1/predict?samples={samples}", content=body, headers=RAW)
        assert response.status_code == 200 or int(response.headers["retry-after"]) >= 1
        return response.status_code, time.perf_counter() - clock

    async def overload() -> list[tuple[int, float]]:
        limits = httpx.Limits(max_connections=100)
        async with httpx.AsyncClient(base_url=address, timeout=60, limits=limits) as client:
            found = await asyncio.gather(*(ask(client, 100) for _ in range(60)))
            assert (await ask(client, 5))[0] == 200  # it recovers
            return found

    async def terminate() -> list[int]:
        async with httpx.AsyncClient(base_url=address, timeout=60) as client:
            asked = [asyncio.create_task(ask(client, 200)) for _ in range(6)]
            while "calgp_queue_images 6.0" not in (await client.get("/metrics")).text:
                await asyncio.sleep(0.01)
            process.send_signal(signal.SIGTERM)
            return [status for status, _ in await asyncio.gather(*asked)]

    (tmp_path / "digit.png").write_bytes(body)
    monkeypatch.chdir(tmp_path)
    exec(documented(address), {})  # noqa: S102
    assert capsys.readouterr().out.startswith("9 0.99")
    answers = asyncio.run(overload())
    accepted = [seconds for status, seconds in answers if status == 200]
    shed = [seconds for status, seconds in answers if status == 503]
    assert len(accepted) + len(shed) == 60 and len(accepted) >= 8 and len(shed) >= 20
    assert sorted(shed)[len(shed) // 2] < max(accepted)  # who is refused need not wait as long as who is served
    assert asyncio.run(terminate()) == [200] * 6
    output = process.communicate(timeout=30)[0]
    assert "Application shutdown complete" in output and "Traceback" not in output
    assert process.returncode in (0, -signal.SIGTERM)


def documented(address: str) -> str:
    """The Python example of docs/serve.md, with another address."""
    text = (Path(__file__).parents[2] / "docs" / "serve.md").read_text()
    return text.split("```python\n")[1].split("```")[0].replace("http://127.0.0.1:8000", address)


@pytest.mark.slow
def test_sigterm_ends_within_its_time_whatever_clients_do(start, digits):
    """Silent clients, slow heads and bodies, streams that nobody reads, and a worker that decodes for ever."""
    process, address = start("--threads", "1", "--limit", "seconds=4", "--limit", "client=2")
    clients = [Connection(address, receive_buffer=4096) for _ in range(8)]
    clients[1].send(b"GET /healthz HTTP/1.1\r\nHost: loc")
    clients[2].post("/v1/predict", b"\x89PNG", length=10_000)
    clients[3].post("/v1/predict/stream?samples=1000&every=1", png(digits[0]))
    clients[4].post("/v1/predict?samples=1000", png(digits[0]))
    for client in clients[5:7]:
        client.send(b"GET /v1/gallery HTTP/1.1\r\nHost: localhost\r\n\r\n" * 50)  # answers that nobody takes
    time.sleep(1)
    clock = time.monotonic()
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=60)[0]
    assert time.monotonic() - clock < 4 + 5 + 3  # seconds, what shutting down may take, and a busy machine
    assert "Traceback" not in output and "Finished server process" in output
    for client in clients:
        client.close()


@pytest.mark.slow
def test_a_process_whose_model_dies_ends(digits):
    """Its thread is ended by an exception while requests wait: they get 503, the probes fail, the status is not 0."""
    code = """
        import ctypes, threading, time, sys
        from calgp.runs import load
        from calgp.serve import Limits, serve

        def kill():
            while not (found := [each for each in threading.enumerate() if each.name == "calgp-model"]):
                time.sleep(0.01)
            worker = found[0]._target.__self__
            while worker.queued < 3:
                time.sleep(0.01)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(found[0].ident), ctypes.py_object(SystemExit))

        threading.Thread(target=kill, daemon=True).start()
        limits = Limits(samples=10**6, seconds=3600)  # nobody is refused since others take long
        serve(load(sys.argv[2]), port=int(sys.argv[1]), limits=limits, threads=1)
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-c", textwrap.dedent(code), str(port), str(sampled_run().path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            address = f"http://127.0.0.1:{port}"
            wait_until_ready(process, address)
            with ThreadPoolExecutor(3) as pool:
                asking = [
                    pool.submit(httpx.post, f"{address}/v1/predict?samples=1000000&seed={seed}",
                                content=png(digits[0]), headers=RAW, timeout=120)
                    for seed in range(3)
                ]  # fmt: skip
                statuses = [each.result().status_code for each in asking]
            output = process.communicate(timeout=60)[0]
        finally:
            process.kill()  # else its pipes would be found open in a later test
    assert statuses == [503] * 3 and process.returncode == 1, output
    assert "The model's thread died" in output


def test_a_port_that_is_taken_is_named_before_the_model_is_loaded(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        error = CliRunner().invoke(cli.app, ["serve", "--demo", "--port", str(port)]).exception
    assert isinstance(error, CalgpError) and f"Cannot serve on 127.0.0.1:{port}" in str(error)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "Invalid RUN: must be one run folder"),
        (["shipped", "--demo"], "Invalid RUN: must be one run folder"),
        (["--demo", "--limit", "samples=0"], "at least 1"),
        (["--demo", "--token-file", "nowhere"], "cannot be read"),
        (["nowhere"], "no run folder"),
    ],
)
def test_mistakes_get_one_sentence(arguments, sentence):
    error = CliRunner().invoke(cli.app, ["serve", *arguments]).exception
    assert isinstance(error, CalgpError) and sentence in str(error)


def test_what_is_missing_is_named(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("calgp.serve")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fastapi", None)  # as if it were not installed
    error = CliRunner().invoke(cli.app, ["serve", "--demo"]).exception
    assert isinstance(error, CalgpError) and "calgp[serve]" in str(error) and "fastapi" in str(error)
