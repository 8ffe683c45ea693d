"""The server's side of the processes that decode images; what they run is `image_worker`."""

import json
import logging
import os
import subprocess
import sys
from dataclasses import asdict

import anyio
import numpy as np
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from calgp.data.decode import Colour
from calgp.serve.image_worker import ANSWER, REQUEST
from calgp.serve.limits import Limits
from calgp.serve.problems import HTTPProblem

LOG = logging.getLogger("calgp.serve")
START_SECONDS = 60.0  # that a process has to start, and to import what it needs


class Decoders:
    """Worker processes, each with one request at a time.

    One that takes longer than `limits.decode` is killed; its start does not count, up to START_SECONDS. Its end
    costs the request that it worked for; the next gets a new one. By hand, since a pool of `concurrent.futures`
    breaks as a whole when one process dies, and `anyio.to_process` runs the caller's main module in each worker and
    unpickles what a worker sends.

    Args:
        size: (height, width) of the images that the model takes.
        colour: their colour.
        limits: `decoders` and `decode` are used here, the others in the processes.
    """

    def __init__(self, size: tuple[int, int], colour: Colour, limits: Limits) -> None:
        self._shape = (1 if colour == "grey" else 3, *size)
        self._options = json.dumps({"size": size, "colour": colour, "limits": asdict(limits)})
        self._limits = limits
        self._free = anyio.CapacityLimiter(limits.decoders)
        self._idle: list[Process] = []
        self._starting: set[int] = set()  # process ids: they have not said yet that they are ready

    async def start(self) -> None:
        """Start all of them, without waiting until they are ready."""
        self._idle = [await self._open() for _ in range(self._limits.decoders)]

    async def stop(self) -> None:
        while self._idle:
            await _end(self._idle.pop())

    async def decode(self, body: bytearray, content_type: str) -> np.ndarray:
        """The images of a request as uint8 [N, C, H, W].

        Raises:
            HTTPProblem: what is wrong with them.
        """
        async with self._free:
            process = await self._take()
            try:
                with anyio.fail_after(START_SECONDS) as limit:
                    if process.pid in self._starting:
                        await _answer(process)
                        self._starting.remove(process.pid)
                    limit.deadline = anyio.current_time() + self._limits.decode
                    status, content = await _ask(process, body, content_type.encode("latin-1"))
            except BaseException as error:
                await _end(process)
                self._starting.discard(process.pid)
                if isinstance(error, TimeoutError):
                    LOG.warning("Ended a decoder: the images of a request took %g seconds", self._limits.decode)
                    late = f"The images could not be decoded within {self._limits.decode:g} seconds."
                    raise HTTPProblem(413, late) from None
                if isinstance(error, anyio.EndOfStream | anyio.IncompleteRead | anyio.BrokenResourceError):
                    LOG.warning("A decoder died of the images of a request")
                    raise HTTPProblem(422, "The images could not be decoded.") from None
                raise
            self._idle.append(process)
        if status != 200:
            raise HTTPProblem(status, content.decode())
        return np.frombuffer(bytearray(content), np.uint8).reshape(-1, *self._shape)

    async def _take(self) -> Process:
        while self._idle:
            if (process := self._idle.pop()).returncode is None:
                return process
        return await self._open()

    async def _open(self) -> Process:
        """A new one; glibc gives the memory of large images back to the system at once."""
        path = os.pathsep.join(filter(None, sys.path))
        process = await anyio.open_process(
            [sys.executable, "-m", "calgp.serve.image_worker", self._options],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1", "MALLOC_MMAP_THRESHOLD_": str(2**20)},
        )  # fmt: skip
        self._starting.add(process.pid)
        return process


async def _ask(process: Process, body: bytearray, kind: bytes) -> tuple[int, bytes]:
    """A request to a worker and its answer."""
    assert process.stdin is not None  # noqa: S101 (for the type checker)
    await process.stdin.send(REQUEST.pack(len(kind), len(body)) + kind)
    await process.stdin.send(body)  # type: ignore[arg-type] (a copy would double it)
    return await _answer(process)


async def _answer(process: Process) -> tuple[int, bytes]:
    """A status, and pixels or a sentence."""
    assert process.stdout is not None  # noqa: S101 (for the type checker)
    stream = BufferedByteReceiveStream(process.stdout)
    status, length = ANSWER.unpack(await stream.receive_exactly(ANSWER.size))
    return status, await stream.receive_exactly(length)


async def _end(process: Process) -> None:
    with anyio.CancelScope(shield=True):
        if process.returncode is None:
            process.kill()
        await process.aclose()
