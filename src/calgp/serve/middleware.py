"""Around every request: who may ask and from where, how many at a time and for how long; headers, log and metrics."""

import logging
import time
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import anyio
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from calgp.serve.limits import Limits
from calgp.serve.metrics import Metrics
from calgp.serve.problems import HTTPProblem
from calgp.serve.schemas import Problem

LOG = logging.getLogger("calgp.serve")
PROBLEM_MEDIA = "application/problem+json"
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
PATHS = frozenset({
    "/", "/healthz", "/readyz", "/openapi.json", "/metrics", "/v1/model", "/v1/gallery", "/v1/predict",
    "/v1/predict/stream",
})  # fmt: skip
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
GRACE = 1.0  # seconds beyond `limits.seconds`, in which the application itself can say that it is too late
GONE = 499  # in log and metrics: the client left before its answer (nginx's number)


def problem_response(status: int, detail: str, headers: Any = None) -> Response:
    """What went wrong, as RFC 9457 has it: JSON, one sentence, no traceback."""
    problem = Problem(title=HTTPStatus(status).phrase, status=status, detail=detail)
    return Response(problem.model_dump_json(), status, headers, PROBLEM_MEDIA)


class RequestMiddleware:
    """Wraps the whole application.

    The check of Host is ours, not Starlette's TrustedHostMiddleware: that one answers 400 in plain text, where RFC 9110
    has 421 for a server that does not answer to a name.

    Args:
        app: what answers.
        hosts: names that a request's Host header may have, without port; None takes any. It keeps other sites from
            reaching a server on localhost by a name of theirs (DNS rebinding).
        limits: `body`, `requests`, `seconds` and `client` are used here.
        metrics: count every request.
    """

    def __init__(self, app: ASGIApp, *, hosts: Iterable[str] | None, limits: Limits, metrics: Metrics) -> None:
        self.app, self.limits, self.metrics = app, limits, metrics
        self.hosts = None if hosts is None else frozenset(host.lower().strip("[]") for host in hosts)
        self.open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        start, response = time.perf_counter(), _Sending(scope, send, self.limits.client)
        counted = scope["method"] == "POST"
        self.open += counted
        self.metrics.open.set(self.open)
        try:
            await self._answer(scope, receive, response)
        except ClientDisconnect:
            pass
        finally:
            self.open -= counted
            self.metrics.open.set(self.open)
            self._record(scope, response.status, time.perf_counter() - start)

    async def _answer(self, scope: Scope, receive: Receive, send: "_Sending") -> None:
        """The application's response, or a problem in its place; nothing if it fails on the way."""
        try:
            self._check(scope)
            with anyio.move_on_after(self.limits.seconds + GRACE) as waiting:
                await self.app(scope, receive, send)
            if waiting.cancelled_caught:
                raise HTTPProblem.busy(f"The answer was not ready within {self.limits.seconds:g} seconds.", 1)
            return
        except HTTPProblem as found:
            problem = found
        except ClientDisconnect:
            raise
        except Exception:
            LOG.exception("A request failed")
            problem = HTTPProblem(500, "The server has failed; its log says more.")
        if send.status == GONE:
            await problem_response(problem.status, problem.detail, problem.headers)(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        self._check_host(headers)
        if scope["method"] == "POST" and self.open > self.limits.requests:
            raise HTTPProblem.busy(f"{self.limits.requests} requests are open already.", 1)
        length = headers.get("content-length", "0")
        if not length.isascii() or not length.isdigit() or int(length[:20]) > self.limits.body:
            raise HTTPProblem.closing(413, f"A body may have {self.limits.body:,} bytes.")

    def _check_host(self, headers: Headers) -> None:
        """The name by which the server was called, and the page that called it, if a page did."""
        host = headers.get("host", "")
        if self.hosts is not None and _name(host) not in self.hosts:
            raise HTTPProblem(421, "This server does not answer to that Host; --allow-host adds a name.")
        origin = headers.get("origin")
        try:
            is_foreign = origin is not None and urlsplit(origin).netloc.lower() != host.lower()
        except ValueError:  # such as http://[
            raise HTTPProblem(400, "The Origin header is not an address.") from None
        if is_foreign:
            raise HTTPProblem(403, "Pages of other origins may not use this server.")

    def _record(self, scope: Scope, status: int, seconds: float) -> None:
        path = scope["path"] if scope["path"] in PATHS else "other"  # what clients invent is not kept
        self.metrics.requests.labels(path, status).inc()
        self.metrics.seconds.labels(path).observe(seconds)
        LOG.info("%s %s %s %.1f ms", scope["method"] if path != "other" else "-", path, status, 1000 * seconds)


class _Sending:
    """`send` with our headers and a deadline: a client that takes nothing of its answer is not waited for."""

    def __init__(self, scope: Scope, send: Send, seconds: float) -> None:
        self._send, self._seconds = send, seconds
        is_page = scope["path"] == "/" or scope["path"].startswith("/static/")
        self._cache = "no-cache" if is_page else "no-store"
        self.status = GONE

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers.update(HEADERS)
            headers.setdefault("Cache-Control", self._cache)
        with anyio.move_on_after(self._seconds) as waiting:
            await self._send(message)
        if waiting.cancelled_caught:
            raise ClientDisconnect


def _name(host: str) -> str:
    """A Host header without its port."""
    return host.lower().partition("]")[0].lstrip("[") if host.startswith("[") else host.lower().partition(":")[0]
