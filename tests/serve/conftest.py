"""The real application on real runs: one that samples, and the one that ships with the package (one pass)."""

from __future__ import annotations

import io
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import httpx2 as httpx
import numpy as np
import pytest
import uvicorn
from lightning_fabric import Fabric
from PIL import Image
from starlette.testclient import TestClient

from calgp.data import load
from calgp.runs import Classifier
from calgp.runs import load as load_run
from calgp.serve import Limits, create_app
from calgp.serve.server import uvicorn_config
from golden import sampled_run

RAW = {"content-type": "image/png"}
T = TypeVar("T")
NEVER = 120.0  # seconds after which what has not happened is taken for what never does, on a slow machine


def png(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(array).save(file, "PNG")
    return file.getvalue()


def metric(address: str, name: str) -> float:
    lines = httpx.get(f"{address}/metrics", timeout=NEVER).text.splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith(f"{name} ")))


def until(condition: Callable[[], T]) -> T:
    """Wait until something is true."""
    deadline = time.monotonic() + NEVER
    while not (found := condition()):
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)
    return found


def sampled() -> Classifier:
    """A run on digits that predicts by samples, on the CPU."""
    return load_run(sampled_run().path, fabric=Fabric(accelerator="cpu", devices=1))


@pytest.fixture(scope="session")
def digits() -> np.ndarray:
    """Test digits as uint8 [N, 28, 28]."""
    return load("digits", "test").x[:24, 0].numpy()


@pytest.fixture(scope="session")
def client():
    """A server of a run that samples, with its defaults, without a socket."""
    with TestClient(create_app(sampled()), base_url="http://localhost") as client:
        yield client


@contextmanager
def serving(classifier: Classifier, limits: Limits = Limits(), **options) -> Iterator[str]:
    """The address of a server with a socket, in a thread of this process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = uvicorn_config(create_app(classifier, limits=limits, threads=1, **options), limits)
    config.port = port
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


class Connection:
    """A client that sends what it likes, byte by byte."""

    def __init__(self, address: str, *, receive_buffer: int | None = None) -> None:
        host, port = address.removeprefix("http://").split(":")
        self.socket = socket.socket()
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(NEVER)
        self.socket.connect((host, int(port)))

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def post(self, path: str, body: bytes, *, length: int | None = None, kind: str = "image/png") -> None:
        """A request; `length` bytes are announced, or those that there are."""
        size = len(body) if length is None else length
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nContent-Length: {size}\r\n\r\n"
        self.send(head.encode() + body)

    def rest(self) -> bytes:
        """All that arrives until the server closes the connection."""
        found = b""
        try:
            while part := self.socket.recv(2**16):
                found += part
        except ConnectionResetError:
            pass
        return found

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
