"""Load on loopback: what micro-batching brings, how long answers take, what happens beyond capacity.

`python -m bench.serve`, about five minutes; the numbers go to results/bench/serve.json. The clients are threads of this
process, the server is `calgp serve tests/golden/sampled` (a run that samples) with one thread for the model. Rates are
compared side by side, in turns.
"""

import argparse
import asyncio
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bench.measure import Machine, describe
from calgp.data import load
from calgp.report.gallery import png

CLIENTS = 32
RUN = Path(__file__).parents[1] / "tests" / "golden" / "sampled"
HEALTH = [b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"]  # needs no model: its tail is that of the machine


@dataclass
class Tally:
    """What clients saw."""

    statuses: Counter = field(default_factory=Counter)
    seconds: dict[int, list[float]] = field(default_factory=dict)  # by status
    wall: float = 0.0

    def add(self, status: int, seconds: float) -> None:
        self.statuses[status] += 1
        self.seconds.setdefault(status, []).append(seconds)

    @property
    def rate(self) -> float:
        return self.statuses[200] / self.wall

    def quantile(self, q: float, status: int = 200) -> float:
        found = sorted(self.seconds.get(status, [0.0]))
        return found[min(int(q * len(found)), len(found) - 1)]


class Connection:
    """One client: HTTP/1.1 with as little work as can be, since clients and server share the processors."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.reader: asyncio.StreamReader | None = None
        self.writer: asyncio.StreamWriter | None = None

    async def ask(self, request: bytes) -> int:
        """The status of the answer; 0 where the connection failed."""
        try:
            if self.writer is None:
                self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
            self.writer.write(request)
            head = await self.reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            await self.reader.readexactly(length)
            if b"connection: close" in head.lower():
                self.close()
            return int(head.split(b" ", 2)[1])
        except (OSError, asyncio.IncompleteReadError, IndexError):
            self.close()
            return 0

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
        self.reader = self.writer = None


def requests(samples: int, count: int = 200) -> list[bytes]:
    """Test digits as PNG bodies of requests."""
    bodies = [png(x) for x in load("digits", "test").x[:count]]
    head = f"POST /v1/predict?samples={samples} HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\n"
    return [f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body for body in bodies]


async def closed(port: int, bodies: list[bytes], *, clients: int, seconds: float = 1e9, most: int = 10**9) -> Tally:
    """Clients that each wait for an answer before they ask again."""
    tally, left = Tally(), iter(range(most))
    start = time.perf_counter()

    async def client() -> None:
        connection = Connection(port)
        for number in left:
            clock = time.perf_counter()
            if clock - start > seconds:
                break
            status = await connection.ask(bodies[number % len(bodies)])
            tally.add(status, time.perf_counter() - clock)
        connection.close()

    await asyncio.gather(*(client() for _ in range(clients)))
    tally.wall = time.perf_counter() - start
    return tally


async def arriving(port: int, bodies: list[bytes], *, rate: float, seconds: float) -> Tally:
    """Requests that arrive at random, whether or not earlier ones have been answered (a Poisson process)."""
    tally, idle, generator = Tally(), [], random.Random(0)  # noqa: S311

    async def one(number: int, due: float) -> None:
        connection = idle.pop() if idle else Connection(port)
        status = await connection.ask(bodies[number % len(bodies)])
        tally.add(status, time.perf_counter() - due)
        idle.append(connection)

    start = due = time.perf_counter()
    tasks = []
    while due < start + seconds:
        due += generator.expovariate(rate)
        await asyncio.sleep(max(due - time.perf_counter(), 0))
        tasks.append(asyncio.create_task(one(len(tasks), due)))
    await asyncio.gather(*tasks)
    tally.wall = time.perf_counter() - start
    for connection in idle:
        connection.close()
    return tally


@contextmanager
def server(*options: str) -> Iterator[tuple[int, int]]:
    """(port, process id) of a server that is ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "calgp", "serve", str(RUN), "--device", "cpu", "--threads", "1"]
    command += ["--port", str(port), *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # noqa: S603
    try:
        ready = HEALTH[0].replace(b"healthz", b"readyz")
        while asyncio.run(Connection(port).ask(ready)) != 200:
            if process.poll() is not None:
                raise SystemExit("The server did not start; try `calgp serve tests/golden/sampled`.")
            time.sleep(0.1)
        yield port, process.pid
    finally:
        process.terminate()
        process.wait()


def megabytes(pid: int) -> float:
    """What the process holds in memory."""
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def batching(samples: int, rounds: int, seconds: float) -> dict:
    """Answers a second: one client, 32 clients, and 32 clients of a server that takes one image at a time."""
    bodies = requests(samples)
    with server() as (batched, _), server("--limit", "batch=1") as (single, _):
        contenders = {"one client": (batched, 1), "batched": (batched, CLIENTS), "batch=1": (single, CLIENTS)}
        rates: dict[str, list[float]] = {name: [] for name in contenders}
        for port, clients in contenders.values():
            asyncio.run(closed(port, bodies, clients=clients, seconds=1.0))
        for turn in range(rounds):
            names = list(contenders)
            for name in names[turn % 3 :] + names[: turn % 3]:
                port, clients = contenders[name]
                rates[name].append(asyncio.run(closed(port, bodies, clients=clients, seconds=seconds)).rate)
    found: dict = {"samples": samples} | {name: statistics.median(values) for name, values in rates.items()}
    for name in ("one client", "batch=1"):
        ratios = [ours / other for ours, other in zip(rates["batched"], rates[name], strict=True)]
        found[f"over {name}"] = statistics.median(ratios)
    return found


def endurance(samples: int, most: int, seconds: float) -> dict:
    """Ten thousand requests, half load, five times capacity, and after it; memory all along."""
    bodies = requests(samples)
    with server() as (port, pid):
        asyncio.run(closed(port, bodies, clients=CLIENTS, most=most // 10))
        memory = [megabytes(pid)]
        many = asyncio.run(closed(port, bodies, clients=CLIENTS, most=most))
        memory.append(megabytes(pid))
        halves = [
            [asyncio.run(arriving(port, part, rate=many.rate / 2, seconds=seconds / 3)) for part in (bodies, HEALTH)]
            for _ in range(6)
        ]
        over = asyncio.run(arriving(port, bodies, rate=5 * many.rate, seconds=seconds / 2))
        memory.append(megabytes(pid))
        after = asyncio.run(closed(port, bodies, clients=CLIENTS, seconds=seconds / 2))
        memory.append(megabytes(pid))
    milliseconds = {
        "overload, accepted, median": over.quantile(0.5), "overload, refused, median": over.quantile(0.5, 503),
        "overload, refused, p99": over.quantile(0.99, 503),
    }  # fmt: skip
    return {
        "samples": samples,
        "capacity": many.rate,
        "statuses": {name: dict(tally.statuses) for name, tally in
                     (("many", many), ("overload", over), ("after", after))},
        "half load": [
            {name: [round(1000 * tally.quantile(q), 1) for q in (0.5, 0.99)] for name, tally in
             zip(("predict, median and p99", "healthz, median and p99"), window, strict=True)}
            for window in halves
        ],
        "overload, served a second": over.rate,
        "after overload, served a second": after.rate,
        "milliseconds": {name: round(1000 * value, 1) for name, value in milliseconds.items()},
        "megabytes": [round(value) for value in memory],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.serve", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds, to see that it works")
    parser.add_argument("--out", type=Path, default=Path("results/bench"), help="where serve.json goes")
    options = parser.parse_args()
    before = Machine.now()
    rounds, seconds = (1, 1.0) if options.quick else (4, 2.5)
    found = {
        "batching": [batching(samples, rounds, seconds) for samples in ((1,) if options.quick else (1, 4, 50))],
        "endurance": endurance(10, 300 if options.quick else 10_000, 2.0 if options.quick else 15.0),
        "machine": describe() | {"others": round(before.others(Machine.now()), 2)},
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "serve.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
