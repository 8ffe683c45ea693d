"""HTTP/1.1 with an end to everything: the bytes of a head, the seconds without a request, the connections."""

import asyncio
import re
import sys
from contextlib import suppress
from typing import Any

import h11
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from calgp.serve.limits import Limits
from calgp.serve.middleware import HEADERS, problem_response

HEAD_LINES = 100  # headers of a request
PIECES = 1000  # of a chunked body: each costs the event loop up to 40 microseconds
HEAD_END = re.compile(rb"\n\r?\n")


class BoundedConnection(h11.Connection):
    """h11's state machine, with bounds where h11 has none: heads that arrive at once, headers, pieces of a body."""

    def __init__(self, head: int) -> None:
        super().__init__(h11.SERVER, head)
        self._head, self._pieces = head, 0

    def next_event(self) -> Any:
        if self.their_state is h11.IDLE:
            self._check_head(self.trailing_data[0][: self._head + 1])
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._pieces = 0
        elif isinstance(event, h11.Data) and event.chunk_start:
            self._pieces += 1
            if self._pieces > PIECES:
                raise h11.RemoteProtocolError("too many pieces")
        return event

    def _check_head(self, start: bytes) -> None:
        end = HEAD_END.search(start)
        lines = start.count(b"\n", 0, len(start) if end is None else end.start())
        if (end is None and len(start) > self._head) or lines > HEAD_LINES:
            raise h11.RemoteProtocolError("the head is too large", error_status_hint=431)


class BoundedProtocol(H11Protocol):
    """uvicorn's protocol, for clients that send too much, too slowly or nothing, and for clients that never read.

    It is h11, since uvicorn's httptools reads all pipelined requests ahead, however many there are.

    Args:
        limits: `head`, `connections` and `client` are used here.
        options: uvicorn's.
    """

    def __init__(self, *, limits: Limits, **options: Any) -> None:
        super().__init__(**options)
        self.conn = BoundedConnection(limits.head)
        self._limits = limits
        self._application, self.app = self.app, self._run  # type: ignore[assignment]
        self._idle_since: float | None = None  # None while a request is answered
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_request()
        if len(self.connections) > self._limits.connections:  # the one that has been idle for longest makes room
            idle = [each for each in self.connections if isinstance(each, BoundedProtocol) and each._idle_since]
            min(idle, key=lambda each: each._idle_since or 0).transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self._await_request()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn where h11 refuses what came; in the middle of a request there is nothing to answer."""
        if self.cycle is not None and not self.cycle.response_complete:
            return self.transport.abort()
        status = getattr(sys.exc_info()[1], "error_status_hint", 400)
        detail = f"A head may have {self._limits.head:,} bytes and {HEAD_LINES} headers." if status == 431 else msg
        response = problem_response(status, detail, HEADERS | {"Cache-Control": "no-store", "Connection": "close"})
        head = b"".join(name + b": " + value + b"\r\n" for name, value in response.raw_headers)
        self.transport.write(b"HTTP/1.1 %d %s\r\n%s\r\n%s" % (status, STATUS_PHRASES[status], head, response.body))
        self.transport.close()

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application; if it gives a response up, the connection is cut with all that waits to be sent."""
        self._stop_timer()
        self._idle_since, cycle = None, self.cycle
        with suppress(asyncio.CancelledError):  # the server ends
            await self._application(scope, receive, send)  # type: ignore[arg-type]
        if not cycle.response_complete:
            cycle.disconnected = True
            self.transport.abort()

    def _await_request(self) -> None:
        """A client has so long to take the rest of its answer and to send the next head."""
        self._stop_timer()
        self._idle_since = self.loop.time()
        self._timer = self.loop.call_later(self._limits.client, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _unsupported_upgrade_warning(self) -> None:
        """Nothing: a client could fill the log with it."""
