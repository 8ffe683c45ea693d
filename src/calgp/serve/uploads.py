"""Bodies of requests: received within limits, then handed to the processes that decode."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import torch
from starlette.requests import Request
from torch import Tensor

from calgp.data.decode import Colour
from calgp.serve.decoders import Decoders
from calgp.serve.limits import Limits
from calgp.serve.problems import HTTPProblem


class Uploads:
    """Turns requests into images of the model's form.

    The limits of a body are ours, not Starlette's `max_body_size`: they depend on its type, and on all other bodies.
    """

    def __init__(self, size: tuple[int, int], colour: Colour, limits: Limits) -> None:
        self._limits = limits
        self._bytes = 0  # of all bodies that are held now
        self.decoders = Decoders(size, colour, limits)

    async def read(self, request: Request) -> Tensor:
        """The images of a request as uint8 [N, C, H, W]."""
        kind = request.headers.get("content-type", "")
        async with self._body(request, kind) as body:
            return torch.from_numpy(await self.decoders.decode(body, kind))

    @asynccontextmanager
    async def _body(self, request: Request, kind: str) -> AsyncIterator[bytearray]:
        """What a request brings; its bytes count towards `limits.bodies` as long as they are held."""
        body = bytearray()
        try:
            with anyio.move_on_after(self._limits.client) as waiting:
                await self._receive(request, kind, body)
            if waiting.cancelled_caught:
                raise HTTPProblem.closing(408, f"The body was not sent within {self._limits.client:g} seconds.")
            yield body
        finally:
            self._bytes -= len(body)

    async def _receive(self, request: Request, kind: str, body: bytearray) -> None:
        """Add to `body` what arrives, within the limits."""
        is_json = kind.split(";")[0].strip().lower() == "application/json"
        most = self._limits.json_body if is_json else self._limits.body
        length = int(request.headers.get("content-length", 0))  # a number: the middleware has checked it
        async for chunk in request.stream():
            length = max(length, len(body) + len(chunk))
            if length > most:
                raise HTTPProblem.closing(413, f"A body of this type may have {most:,} bytes.")
            if self._bytes + len(chunk) > self._limits.bodies:
                raise HTTPProblem.busy("Too many bytes are being received.", 1)
            body += chunk
            self._bytes += len(chunk)
