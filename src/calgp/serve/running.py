"""A process that serves: the socket, the log, the signals."""

import ipaddress
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import uvicorn
from lightning_fabric import Fabric

from calgp.errors import CalgpError
from calgp.runs import RunFolder
from calgp.serve.app import create_app
from calgp.serve.guard import LOOPBACK
from calgp.serve.limits import Limits

VARIABLE = "CALGP_TOKEN"
SHORTEST = 16
SWITCH = 5e-4  # seconds; with Python's 5e-3 the model's thread waits for the event loop's after every small operation


def serve(
    folder: RunFolder,
    fabric: Fabric | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    limits: Limits = Limits(),
    token: str | None = None,
    hosts: Sequence[str] = (),
    threads: int | None = None,
) -> None:
    """Serve a run until SIGTERM or SIGINT; what was accepted is finished first.

    On a loopback address only `localhost` and the address itself are taken as Host, and `hosts`; on another address all
    names, or if `hosts` are given only these.
    """
    local = _is_loopback(host)
    names = {*LOOPBACK, host, *hosts} if local else set(hosts) or None
    app = create_app(folder, fabric, limits=limits, token=token, hosts=names, threads=threads)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("python_multipart").setLevel(logging.ERROR)  # it would tell of every broken form
    if not local and token is None:
        logging.getLogger("calgp.serve").warning("Anyone who reaches %s can use this server: it has no token.", host)
    sys.setswitchinterval(SWITCH)
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        access_log=False,  # the guard has its own, without what others invent
        log_config=None,
        server_header=False,
        limit_concurrency=limits.connections,
        timeout_keep_alive=10,
        timeout_graceful_shutdown=int(limits.seconds) + 5,
        proxy_headers=False,
    )
    try:
        uvicorn.Server(config).run()
    except OSError as error:
        raise CalgpError(f"Cannot serve on {host}:{port}: {error.strerror or error}. Choose another --port.") from None


def read_token(file: Path | None) -> str | None:
    """The token: of a file, or of the environment's CALGP_TOKEN; None if there is neither."""
    try:
        token = os.environ.get(VARIABLE) if file is None else file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CalgpError(f"The token file {file} cannot be read ({error}).") from None
    if token is None:
        return None
    token = token.strip()
    if len(token) < SHORTEST or not token.isascii() or not token.isprintable() or " " in token:
        raise CalgpError(
            f"The token must have at least {SHORTEST} characters, ASCII without spaces, such as `openssl rand -hex 32` "
            "gives."
        )
    return token


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
