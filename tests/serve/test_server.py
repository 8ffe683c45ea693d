"""A process as an operator starts it: SIGTERM, overload, mistakes on the command line."""

import asyncio
import signal
import socket
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from datetime import datetime
from pathlib import Path

import httpx2 as httpx
import pytest
from typer.testing import CliRunner

from calgp import cli
from calgp.errors import CalgpError
from calgp.serve.server import SHUTDOWN
from forked import Started
from golden import sampled_run

from .conftest import NEVER, RAW, Connection, png, until


def wait_until_ready(process: Started, address: str) -> None:
    def ready() -> bool:
        assert process.poll() is None, process.printed
        with suppress(httpx.TransportError):
            return httpx.get(f"{address}/readyz", timeout=NEVER).status_code == 200
        return False

    until(ready)


@pytest.fixture
def start():
    """Starts `calgp serve` of a run that samples, with options, waits until it is ready, and ends it after the test."""
    with ExitStack() as running:

        def run(*options: str) -> tuple[Started, str]:
            port = free_port()
            command = ["serve", sampled_run().path, "--device", "cpu", "--port", port, *options]
            process = running.enter_context(Started("-m", "calgp", *command))
            wait_until_ready(process, f"http://127.0.0.1:{port}")
            return process, f"http://127.0.0.1:{port}"

        yield run


@pytest.fixture
def opened():
    """Closes what a test has opened, whatever its end."""
    with ExitStack() as stack:
        yield stack


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


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
        async with httpx.AsyncClient(base_url=address, timeout=NEVER, limits=limits) as client:
            found = await asyncio.gather(*(ask(client, 200) for _ in range(60)))
            assert (await ask(client, 5))[0] == 200  # it recovers
            return found

    async def terminate() -> list[int]:
        async with httpx.AsyncClient(base_url=address, timeout=NEVER) as client:
            asked = [asyncio.create_task(ask(client, 1000)) for _ in range(6)]
            while True:  # until all are accepted, though some may be answered by then
                lines = (await client.get("/metrics")).text.splitlines()
                queued = next(float(line.split()[1]) for line in lines if line.startswith("calgp_queue_images "))
                if queued + sum(each.done() for each in asked) >= 6:
                    break
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
    assert process.wait() in (0, -signal.SIGTERM)
    assert "Application shutdown complete" in process.printed and "Traceback" not in process.printed


def documented(address: str) -> str:
    """The Python example of docs/serve.md, with another address."""
    text = (Path(__file__).parents[2] / "docs" / "serve.md").read_text()
    return text.split("```python\n")[1].split("```")[0].replace("http://127.0.0.1:8000", address)


@pytest.mark.slow
def test_sigterm_ends_within_its_time_whatever_clients_do(start, opened, digits):
    """Silent clients, slow heads and bodies, streams that nobody reads, and a worker that decodes for ever."""
    limits = ("seconds=3", "client=2", "samples=10000000")
    process, address = start("--threads", "1", *(word for limit in limits for word in ("--limit", limit)))
    clients = [opened.enter_context(Connection(address, receive_buffer=4096)) for _ in range(8)]
    clients[1].send(b"GET /healthz HTTP/1.1\r\nHost: loc")
    clients[2].post("/v1/predict", b"\x89PNG", length=10_000)
    clients[3].post("/v1/predict/stream?samples=10000000&every=1", png(digits[0]))
    clients[4].post("/v1/predict?samples=10000000", png(digits[0]))
    for client in clients[5:7]:
        client.send(b"GET /v1/gallery HTTP/1.1\r\nHost: localhost\r\n\r\n" * 50)  # answers that nobody takes

    def begun() -> bool:
        """A request is there, or has been there: on a slow machine its time may be over."""
        found = httpx.get(f"{address}/metrics", timeout=NEVER).text
        return 'path="/v1/predict' in found or "calgp_open_requests 0.0" not in found

    until(begun)
    process.send_signal(signal.SIGTERM)
    process.wait()
    assert "Traceback" not in process.printed
    began, ended = (logged(process.printed, what) for what in ("Shutting down", "Finished server process"))
    assert (ended - began).total_seconds() < 3 + SHUTDOWN + 10  # timers are late on a busy machine; clients never end


def logged(printed: str, what: str) -> datetime:
    """When the server's log says something for the first time."""
    line = next(line for line in printed.splitlines() if what in line)
    return datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f")


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
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    with Started("-c", textwrap.dedent(code), port, sampled_run().path) as process:
        wait_until_ready(process, address)
        with ThreadPoolExecutor(3) as pool:
            asking = [
                pool.submit(httpx.post, f"{address}/v1/predict?samples=1000000&seed={seed}",
                            content=png(digits[0]), headers=RAW, timeout=NEVER)
                for seed in range(3)
            ]  # fmt: skip
            statuses = [each.result().status_code for each in asking]
        assert process.wait() == 1 and statuses == [503] * 3, process.printed
        assert "The model's thread died" in process.printed


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
