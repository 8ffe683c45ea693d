"""Before anything else sees a request: who may ask, from where, how many at a time. And headers on all answers."""

import hmac
import logging
import time
from collections.abc import Callable, Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from calgp.serve.limits import Limits
from calgp.serve.meters import Meters
from calgp.serve.problems import Trouble, problem

LOG = logging.getLogger("calgp.serve")
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
OPEN = frozenset({"/", "/healthz", "/readyz", "/openapi.json"})  # need no token: they tell nothing about the model
PATHS = frozenset({*OPEN, "/metrics", "/v1/model", "/v1/gallery", "/v1/predict", "/v1/predict/stream"})
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
    "trusted-types 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
}


class Guard:
    """Wraps the whole application.

    Args:
        app: what answers.
        hosts: names that a request's Host header may have, without port; None takes any. It keeps other sites from
            reaching a server on localhost through a name of theirs (DNS rebinding).
        token: what `Authorization: Bearer …` must say; None asks for nothing.
        limits: `requests` and `body` are used here.
        meters: hear of every request.
        admit: raises Trouble if there is no room for another picture.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        hosts: Iterable[str] | None,
        token: str | None,
        limits: Limits,
        meters: Meters,
        admit: Callable[[], None],
    ) -> None:
        self.admit = admit
        self.app, self.limits, self.meters = app, limits, meters
        self.hosts = None if hosts is None else frozenset(host.lower().strip("[]") for host in hosts)
        self.token = None if token is None else token.encode()
        self.open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        start, status = time.perf_counter(), 500

        async def send_guarded(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        counts = scope["method"] == "POST"
        self.open += counts
        self.meters.open.set(self.open)
        try:
            self._check(scope)
            await self.app(scope, receive, send_guarded)
        except Trouble as trouble:
            await problem(trouble.status, trouble.detail, trouble.headers)(scope, receive, send_guarded)
        finally:
            self.open -= counts
            self.meters.open.set(self.open)
            self._record(scope, status, time.perf_counter() - start)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        self._check_origin(headers)
        path = scope["path"]
        if self.token is not None and path not in OPEN and not path.startswith("/static/"):
            self._check_token(headers)
        if scope["method"] == "POST":
            if self.open > self.limits.requests:
                raise Trouble.busy(f"{self.limits.requests} requests are open already.", 1)
            self.admit()
        length = headers.get("content-length", "0")
        if not length.isascii() or not length.isdigit() or int(length[:20]) > self.limits.body:
            close = {"Connection": "close"}  # what is still to come is not read
            raise Trouble(413, f"A request may have {self.limits.body:,} bytes.", close)

    def _check_origin(self, headers: Headers) -> None:
        """The name by which the server was called, and the page that did, if a page did."""
        host = headers.get("host", "")
        if self.hosts is not None and _name(host) not in self.hosts:
            raise Trouble(421, "This server does not answer to that Host; --allow-host adds a name.")
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
            raise Trouble(403, "Pages of other origins may not use this server.")

    def _check_token(self, headers: Headers) -> None:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self.token or b""):
            wanted = {"WWW-Authenticate": "Bearer"}
            raise Trouble(401, "A token is needed: send it as Authorization: Bearer TOKEN.", wanted)

    def _record(self, scope: Scope, status: int, seconds: float) -> None:
        path = scope["path"] if scope["path"] in PATHS else "other"  # what others invent is not kept
        self.meters.requests.labels(path, status).inc()
        self.meters.seconds.labels(path).observe(seconds)
        LOG.info("%s %s %s %.1f ms", scope["method"] if path != "other" else "-", path, status, 1000 * seconds)


def _name(host: str) -> str:
    """A Host header without its port."""
    return host.lower().partition("]")[0].lstrip("[") if host.startswith("[") else host.lower().partition(":")[0]
