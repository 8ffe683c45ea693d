"""A process that serves: the socket, the log, the signals."""

import gc
import ipaddress
import logging
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import uvicorn

from calgp.errors import CalgpError
from calgp.runs import Classifier
from calgp.serve.app import create_app
from calgp.serve.limits import Limits
from calgp.serve.middleware import LOOPBACK
from calgp.serve.protocol import BoundedProtocol

LOG = logging.getLogger("calgp.serve")
VARIABLE = "CALGP_TOKEN"
SHORTEST = 16  # characters of a token
SWITCH = 5e-4  # seconds; with Python's 5e-3 the model's thread waits for the event loop's after every small operation
SHUTDOWN = 5  # seconds beyond `limits.seconds` in which a server ends after SIGTERM


def serve(
    classifier: Classifier,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    limits: Limits = Limits(),
    token: str | None = None,
    hosts: Sequence[str] = (),
    threads: int | None = None,
) -> None:
    """Serve a run until SIGTERM or SIGINT; what was accepted is finished first.

    On a loopback address only `localhost`, the address itself and `hosts` are accepted as Host; on another address all
    names, or if `hosts` are given only these.

    Raises:
        CalgpError: the address is taken, or the model's thread has died.
    """
    local = _is_loopback(host)
    names = {*LOOPBACK, host, *hosts} if local else set(hosts) or None
    failed: list[bool] = []

    def end() -> None:
        failed.append(True)
        server.should_exit = True

    with _bind(host, port) as listener:
        app = create_app(classifier, limits=limits, token=token, hosts=names, threads=threads, on_death=end)
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        if not local and token is None:
            LOG.warning("Anyone who reaches %s can use this server: it has no token.", host)
        sys.setswitchinterval(SWITCH)
        gc.collect()
        gc.freeze()  # half a million objects live as long as the process: looking through them stops it for 0.4 seconds
        server = uvicorn.Server(uvicorn_config(app, limits))
        server.run(sockets=[listener])
    if failed:
        raise CalgpError("The model's thread died: the log says why. Start the server again.")


def uvicorn_config(app: object, limits: Limits) -> uvicorn.Config:
    """uvicorn with our protocol, and without what is not needed."""
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        http=partial(BoundedProtocol, limits=limits),  # type: ignore[arg-type]
        ws="none",
        access_log=False,  # the middleware has its own, without what clients invent
        log_config=None,
        server_header=False,
        timeout_keep_alive=max(int(limits.client), 1),
        timeout_graceful_shutdown=int(limits.seconds) + SHUTDOWN,
        proxy_headers=False,
    )


def read_token(file: Path | None) -> str | None:
    """The token: from a file, or from the environment's CALGP_TOKEN; None if there is neither."""
    try:
        token = os.environ.get(VARIABLE) if file is None else file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CalgpError(f"The token file {file} cannot be read ({error}).") from None
    if token is None:
        return None
    token = token.strip()
    if len(token) < SHORTEST or not token.isascii() or not token.isprintable() or " " in token:
        raise CalgpError(
            f"Invalid token: must have at least {SHORTEST} characters, ASCII without spaces, such as "
            "`openssl rand -hex 32` gives."
        )
    return token


def _bind(host: str, port: int) -> socket.socket:
    """A socket that has the address, and does not listen yet: a port that is taken is found before the model loads."""
    with ExitStack() as opened:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            listener = opened.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError as error:
            why = error.strerror or error
            raise CalgpError(f"Cannot serve on {host}:{port}: {why}. Choose another --port.") from None
        opened.pop_all()
    return listener


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
