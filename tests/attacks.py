"""A server among slow, silent, huge, lying and vanishing clients: is it alive, small, and right all the time?

`python tests/attacks.py --seconds 60` starts `calgp serve` of a run that samples. It attacks the server with all kinds
of clients at once, while honest clients compare every answer with one from before. It asks /healthz twenty times a
second, watches the memory, and ends the server by SIGTERM in the middle. It prints what it found as JSON; the exit
status is 1 if a promise is broken.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from bench.measure import Machine, describe
from PIL import Image

from calgp.data import load
from calgp.report.gallery import png
from calgp.serve import Limits
from calgp.serve.server import SHUTDOWN
from golden import sampled_run
from hostile_images import jpeg
from hostile_images import png as png_of_chunks

ATTACKERS, HONEST = 48, 4
MEMORY = 1.5  # times that at the start
HEALTHY = 0.1  # seconds that /healthz may take, at the 99th percentile
SLOWER = 40  # or so many times what it takes while nobody attacks, on a slower machine
QUIET = 0.2  # share of the processors that others may take, for HEALTHY to be demanded
ROUNDING = 1e-5  # float32 sums in another order
BUSY = 3  # seconds that a busy machine may add to the server's own, to end
LOST = (OSError, asyncio.IncompleteReadError, asyncio.TimeoutError)


class Client:
    """One connection, that sends what it likes."""

    def __init__(self, port: int) -> None:
        self.port = port

    async def __aenter__(self) -> Client:
        self.reader, self.writer = await asyncio.wait_for(
            asyncio.open_connection("127.0.0.1", self.port, limit=2**24), 20
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.transport.abort()

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await asyncio.wait_for(self.writer.drain(), 60)

    async def post(
        self, path: str, body: bytes, *, length: int | None = None, kind: str = "image/png", more: str = ""
    ) -> None:
        size = len(body) if length is None else length
        head = (
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nContent-Length: {size}\r\n{more}\r\n"
        )
        await self.send(head.encode() + body)

    async def answer(self, seconds: float = 60) -> tuple[int, bytes]:
        """Status and body of a response that tells its length."""
        head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), seconds)
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        return int(head.split(b" ", 2)[1]), await asyncio.wait_for(self.reader.readexactly(length), seconds)


@dataclass
class Found:
    """What clients saw."""

    statuses: dict[str, Counter] = field(default_factory=dict)
    idle: float = 0.0  # seconds that /healthz takes, before any attack
    health: list[float] = field(default_factory=list)
    unhealthy: int = 0
    wrong: int = 0
    lost: int = 0
    megabytes: list[float] = field(default_factory=list)
    tree: list[float] = field(default_factory=list)
    asking: bool = True  # honest clients ask until SIGTERM
    over: bool = False  # a task may miss its cancellation (wait_for of Python 3.11), so this ends it, too

    def count(self, name: str, status: object) -> None:
        self.statuses.setdefault(name, Counter())[str(status)] += 1


def photograph(kind: str, side: int = 3900) -> bytes:
    """As many pixels as a request may have."""
    file = io.BytesIO()
    Image.new("RGBA" if kind != "JPEG" else "RGB", (side, side), "teal").save(file, kind)
    return file.getvalue()


LISTS = b'{"images":[{"grey":[' + b",".join([b"[0]"] * 262_000) + b"]}]}"
DIGITS = [png(x) for x in load("digits", "test").x[:24]]
FORM = b"".join(
    b'--x\r\nContent-Disposition: form-data; name="images"; filename="a"\r\n\r\n%s\r\n' % DIGITS[row % 24]
    for row in range(32)
) + b"--x--\r\n"  # fmt: skip
CHUNKED = b"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
COSTLY = {
    "20,000 scans": (jpeg(20_000), "image/jpeg"),
    "60,000 chunks": (png_of_chunks(60_000), "image/png"),
    "15 megapixels, PNG": (photograph("PNG"), "image/png"),
    "15 megapixels, WebP": (photograph("WEBP"), "image/webp"),
    "15 megapixels, JPEG": (photograph("JPEG"), "image/jpeg"),
    "lists of JSON": (LISTS, "application/json"),
    "JSON too large": (LISTS * 4, "application/json"),
    "too large": (bytes(5 * 2**20), "image/png"),
    "noise": (random.Random(0).randbytes(2**20), "image/png"),  # noqa: S311
}


async def silent(client: Client, chance: random.Random) -> str:
    await asyncio.wait_for(client.reader.read(), 40)
    return "cut"


async def slow_head(client: Client, chance: random.Random) -> str:
    for letter in b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-Slow: " + b"a" * 100:
        await client.send(bytes([letter]))
        await asyncio.sleep(0.3)
    return "let in"


async def endless_head(client: Client, chance: random.Random) -> str:
    await client.send(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n")
    for _ in range(10_000):
        await client.send(b"X-Header: " + b"a" * 1000 + b"\r\n")
    return "let in"


async def many_headers(client: Client, chance: random.Random) -> int:
    await client.send(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n" + b"a: b\r\n" * 2000 + b"\r\n")
    return (await client.answer())[0]


async def slow_body(client: Client, chance: random.Random) -> int:
    await client.post("/v1/predict", b"\x89PNG", length=100_000)
    for _ in range(30):
        await client.send(b"a")
        await asyncio.sleep(0.5)
    return (await client.answer())[0]


async def silent_body(client: Client, chance: random.Random) -> int:
    await client.post("/v1/predict", bytes(chance.randrange(2**20)), length=2**22)
    return (await client.answer())[0]


async def dropped_body(client: Client, chance: random.Random) -> str:
    await client.post("/v1/predict", bytes(chance.randrange(2**16)), length=2**20)
    await asyncio.sleep(chance.random())
    return "left"


async def dropped_answer(client: Client, chance: random.Random) -> str:
    await client.post(f"/v1/predict{chance.choice(['', '/stream'])}?samples=1000", DIGITS[0])
    await asyncio.sleep(chance.random())
    return "left"


async def unread_stream(client: Client, chance: random.Random) -> str:
    client.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.reader._transport.pause_reading()  # type: ignore[attr-defined]
    await client.post("/v1/predict/stream?samples=300&every=1", FORM, kind="multipart/form-data; boundary=x")
    await asyncio.sleep(chance.uniform(5, 40))
    return "left"


async def unread_pages(client: Client, chance: random.Random) -> str:
    client.reader._transport.pause_reading()  # type: ignore[attr-defined]
    await client.send(b"GET /v1/gallery HTTP/1.1\r\nHost: localhost\r\n\r\n" * 200)
    await asyncio.sleep(chance.uniform(5, 20))
    return "left"


async def tiny_chunks(client: Client, chance: random.Random) -> str:
    await client.send(CHUNKED)
    for _ in range(100):
        await client.send(b"1\r\nx\r\n" * 5000)
    return f"got {len(await asyncio.wait_for(client.reader.read(), 40))} bytes"


async def broken_chunks(client: Client, chance: random.Random) -> str:
    await client.send(CHUNKED + b"nonsense\r\n\r\n")
    await asyncio.wait_for(client.reader.read(), 40)
    return "cut"


async def no_http(client: Client, chance: random.Random) -> str:
    await client.send(chance.randbytes(chance.randrange(1, 5000)) + b"\r\n\r\n")
    return (await asyncio.wait_for(client.reader.read(), 40)).split(b" ")[1].decode() or "cut"


async def odd_origin(client: Client, chance: random.Random) -> int:
    await client.post("/v1/predict", DIGITS[0], more="Origin: http://[\r\n")
    return (await client.answer())[0]


async def costly(client: Client, chance: random.Random) -> str:
    name, (body, kind) = chance.choice(list(COSTLY.items()))
    await client.post("/v1/predict?samples=1", body, kind=kind)
    return f"{name}: {(await client.answer())[0]}"


async def adaptive(client: Client, chance: random.Random) -> int:
    await client.post("/v1/predict?samples=1000&error=0.000001", DIGITS[chance.randrange(24)])
    return (await client.answer())[0]


ATTACKS = (
    silent, slow_head, endless_head, many_headers, slow_body, silent_body, dropped_body, dropped_answer, unread_stream,
    unread_pages, tiny_chunks, broken_chunks, no_http, odd_origin, costly, adaptive,
)  # fmt: skip


async def attack(port: int, found: Found, number: int) -> None:
    """One attack after another, of all kinds."""
    chance = random.Random(number)  # noqa: S311
    while not found.over:
        kind = ATTACKS[(number + chance.randrange(len(ATTACKS))) % len(ATTACKS)]
        try:
            async with Client(port) as client:
                found.count(kind.__name__, await kind(client, chance))
        except (*LOST, IndexError) as error:
            found.count(kind.__name__, type(error).__name__)
        await asyncio.sleep(chance.uniform(0.05, 0.5))


async def ask(client: Client, number: int) -> tuple[int, bytes]:
    await client.post(f"/v1/predict?samples=10&seed={number % 3}", DIGITS[number % 24])
    return await client.answer()


async def honest(port: int, found: Found, expected: list[list[float]], number: int) -> None:
    """Ask for what is known, and compare; a refusal must be a 503, and a connection is never lost."""
    while found.asking:
        try:
            async with Client(port) as client:
                status, body = await ask(client, number)
        except LOST:
            found.lost += 1
        else:
            found.count("honest", status)
            if status == 200:
                given = json.loads(body)["predictions"][0]["probabilities"]
                found.wrong += not np.allclose(given, expected[number % 72], rtol=0, atol=ROUNDING)
            elif status != 503:
                found.wrong += 1
        number += HONEST
        await asyncio.sleep(0.05)


async def probe(port: int, seconds: float) -> list[float]:
    """Seconds that /healthz took; -1 where it failed."""
    words = [sys.executable, str(Path(__file__).with_name("prober.py")), str(port), str(seconds)]
    prober = await asyncio.create_subprocess_exec(*words, stdout=subprocess.PIPE)
    return [float(each) for each in (await prober.communicate())[0].split()]


async def watch(pid: int, found: Found) -> None:
    while not found.over:
        found.megabytes.append(megabytes(pid))
        found.tree.append(found.megabytes[-1] + sum(map(megabytes, children(pid))))
        await asyncio.sleep(0.25)


def megabytes(pid: int) -> float:
    """Resident memory of a process; 0 if it is gone."""
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    return 0.0


def children(pid: int) -> list[int]:
    with suppress(OSError):
        return [
            int(each)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for each in (task / "children").read_text().split()
        ]
    return []


async def run(port: int, process: subprocess.Popen, seconds: float, grace: float) -> tuple[Found, float]:
    """What clients saw in so many seconds, and the seconds until the server had ended after SIGTERM."""
    found, expected = Found(), []
    for number in range(72):
        async with Client(port) as client:
            status, body = await ask(client, number)
            assert status == 200, body
            expected.append(json.loads(body)["predictions"][0]["probabilities"])
    watching = asyncio.create_task(watch(process.pid, found))
    found.idle = statistics.median(await probe(port, 1))
    asking = [asyncio.create_task(honest(port, found, expected, number)) for number in range(HONEST)]
    attackers = [asyncio.create_task(attack(port, found, number)) for number in range(ATTACKERS)]
    health = await probe(port, seconds)
    found.health, found.unhealthy = [each for each in health if each >= 0], health.count(-1)
    found.asking = False
    await asyncio.wait(asking)
    watching.cancel()
    start = time.perf_counter()
    process.send_signal(signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        await asyncio.to_thread(process.wait, grace)
    ended, found.over = time.perf_counter() - start, True
    left = {watching, *attackers}
    while left:
        for task in left:
            task.cancel()
        left = (await asyncio.wait(left, timeout=1))[1]
    return found, ended


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--limit", action="append", default=[], metavar="NAME=NUMBER", help="of the server")
    parser.add_argument("--out", type=Path, help="a file for the JSON, too")
    options = parser.parse_args()
    grace = Limits.parse(options.limit).seconds + SHUTDOWN + BUSY
    with socket.socket() as probe_socket:
        probe_socket.bind(("127.0.0.1", 0))
        port = probe_socket.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "calgp",
        "serve",
        str(sampled_run().path),
        "--device",
        "cpu",
        "--threads",
        "1",
        "--port",
        str(port),
        *(word for limit in options.limit for word in ("--limit", limit)),
    ]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            asyncio.run(until_ready(port, process))
            before = Machine.now()
            found, ended = asyncio.run(run(port, process, options.seconds, grace))
            others = before.others(Machine.now())
        finally:
            process.kill()
            process.wait()
        log.seek(0)
        text = log.read()
    report = summary(found, ended <= grace, text, others)
    report |= {"seconds": options.seconds, "SIGTERM, seconds": round(ended, 1)}
    print(json.dumps(report, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    sys.exit(bool(report["broken promises"]))


async def until_ready(port: int, process: subprocess.Popen) -> None:
    for _ in range(1200):
        with suppress(*LOST):
            async with Client(port) as client:
                await client.send(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\n\r\n")
                if (await client.answer())[0] == 200:
                    return
        assert process.poll() is None, "the server did not start"
        await asyncio.sleep(0.1)
    raise AssertionError("the server is not ready after two minutes")


def summary(found: Found, ended: bool, log: str, others: float) -> dict:
    health = sorted(found.health)
    quantiles = {
        f"p{q:g}": round(1000 * health[min(int(q / 100 * len(health)), len(health) - 1)], 1) for q in (50, 99, 100)
    }
    memory = {
        name: {"start": round(each[0]), "most": round(max(each)), "end": round(each[-1]), "growth": max(each) / each[0]}
        for name, each in (("server", found.megabytes), ("with decoders", found.tree))
    }
    quiet = others < QUIET
    promises = {
        "memory": memory["server"]["growth"] <= MEMORY,
        "health": found.unhealthy == 0 and (not quiet or quantiles["p99"] <= 1000 * max(HEALTHY, SLOWER * found.idle)),
        "log": "Traceback" not in log,
        "answers": found.wrong == found.lost == 0 and found.statuses["honest"]["200"] > 0,
        "SIGTERM": ended,
    }
    return {
        "broken promises": [name for name, kept in promises.items() if not kept],
        "healthz, ms": quantiles
        | {"asked": len(health), "failed": found.unhealthy, "idle": round(1000 * found.idle, 1)},
        "memory, MB": memory,
        "honest": dict(found.statuses["honest"]) | {"wrong": found.wrong, "lost": found.lost},
        "tracebacks": log.count("Traceback"),
        "attacks": sum(
            each.total() - each["ConnectionRefusedError"] for name, each in found.statuses.items() if name != "honest"
        ),
        "outcomes": {name: dict(each) for name, each in sorted(found.statuses.items()) if name != "honest"},
        "machine": describe() | {"others": round(others, 2), "quiet": quiet},
    }  # fmt: skip


if __name__ == "__main__":
    main()
