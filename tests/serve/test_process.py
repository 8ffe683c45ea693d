"""A process as an operator starts it: SIGTERM, overload, mistakes on the command line."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx2 as httpx
import pytest
from typer.testing import CliRunner

from calgp import cli
from calgp.errors import CalgpError

from .conftest import RAW, png


@pytest.fixture
def start():
    """Starts `calgp serve --demo` with options, waits until it is ready, and ends it after the test."""
    running = []

    def run(*options: str) -> tuple[subprocess.Popen, str]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [sys.executable, "-m", "calgp", "serve", "--demo", "--device", "cpu", "--port", str(port), *options]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | {"COLUMNS": "200"}
        )
        running.append(process)
        address = f"http://127.0.0.1:{port}"
        for _ in range(1200):
            try:
                if httpx.get(f"{address}/readyz").status_code == 200:
                    return process, address
            except httpx.TransportError:
                assert process.poll() is None, process.communicate()[0]
                time.sleep(0.05)
        raise AssertionError("the server is not ready after a minute")

    yield run
    for process in running:
        if process.poll() is None:
            process.kill()
        process.communicate()


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


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "Name one run to serve"),
        (["shipped", "--demo"], "Name one run to serve"),
        (["--demo", "--limit", "samples=0"], "at least 1"),
        (["--demo", "--token-file", "nowhere"], "cannot be read"),
        (["nowhere"], "no run folder"),
    ],
)
def test_mistakes_get_one_sentence(arguments, told):
    error = CliRunner().invoke(cli.app, ["serve", *arguments]).exception
    assert isinstance(error, CalgpError) and told in str(error)


def test_what_is_missing_is_named(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("calgp.serve")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fastapi", None)  # as if it were not installed
    error = CliRunner().invoke(cli.app, ["serve", "--demo"]).exception
    assert isinstance(error, CalgpError) and "calgp[serve]" in str(error) and "fastapi" in str(error)
