"""How things are timed here: contenders take turns in one process, and only ratios of their times mean anything."""

import os
import resource
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

Contender = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """One line of the table: how many times as fast as the other ours is."""

    question: str
    what: str
    ours: str
    other: str
    ratio: float  # the other's time over ours: the median over rounds
    low: float  # quartiles of the same
    high: float
    milliseconds: float  # ours, for orientation: it means nothing on another day
    reach: float | None = None  # the ratio that was aimed at
    note: str = ""

    @property
    def reached(self) -> bool | None:
        return None if self.reach is None else self.ratio >= self.reach


@dataclass(frozen=True)
class Curve:
    """How a cost grows: points, and the exponent of a power law fitted to the larger half of them."""

    question: str
    what: str
    name: str
    x: list[float]
    y: list[float]
    unit: str
    exponent: float = field(default=0.0)


def race(contenders: dict[str, Contender], *, rounds: int = 7, least: float = 0.01) -> dict[str, list[float]]:
    """Seconds of each contender in each round; they take turns, another one first each time.

    A contender faster than `least` seconds is repeated until it takes as long, and the time divided.
    """
    repeats = {}
    for name, run in contenders.items():
        run()
        start = time.perf_counter()
        run()
        repeats[name] = max(1, round(least / max(time.perf_counter() - start, 1e-6)))
    names = list(contenders)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            run, count = contenders[name], repeats[name]
            start = time.perf_counter()
            for _ in range(count):
                run()
            times[name].append((time.perf_counter() - start) / count)
    return times


def compare(
    question: str,
    what: str,
    ours: tuple[str, Contender],
    others: dict[str, Contender],
    *,
    reach: dict[str, float] | None = None,
    rounds: int = 7,
    note: str = "",
) -> list[Row]:
    """Race ours against the others: one row each."""
    name, run = ours
    times = race({name: run} | others, rounds=rounds)
    rows = []
    for other in others:
        ratios = [b / a for a, b in zip(times[name], times[other], strict=True)]
        low, ratio, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        milliseconds = 1e3 * statistics.median(times[name])
        rows.append(Row(question, what, name, other, ratio, low, high, milliseconds, (reach or {}).get(other), note))
    return rows


def exponent(x: Iterable[float], y: Iterable[float]) -> float:
    """The power p of y ≈ c xᵖ, by least squares of logarithms over the larger half of the points."""
    import numpy as np

    x, y = np.log(list(x)), np.log(list(y))
    half = len(x) // 2
    return float(np.polyfit(x[half:], y[half:], 1)[0])


def median_seconds(run: Contender, rounds: int = 5) -> float:
    return statistics.median(race({"it": run}, rounds=rounds)["it"])


@dataclass
class Machine:
    """Who else used the processors meanwhile: with much load beside it a benchmark measures the load."""

    start: float = 0.0
    busy: float = 0.0
    own: float = 0.0
    load: float = 0.0

    @staticmethod
    def now() -> "Machine":
        usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        own = sum(u.ru_utime + u.ru_stime for u in usage)
        return Machine(time.perf_counter(), _busy_seconds(), own, os.getloadavg()[0])

    def others(self, now: "Machine") -> float:
        """The share of all processors that other processes took since this moment."""
        wall = (now.start - self.start) * (os.cpu_count() or 1)
        return max(0.0, (now.busy - self.busy) - (now.own - self.own)) / max(wall, 1e-9)


def _busy_seconds() -> float:
    """Processor time of everything on this machine; 0 where the system does not tell."""
    try:
        with open("/proc/stat") as file:
            user, nice, system, _idle, _wait, irq, softirq, *_ = map(int, file.readline().split()[1:])
    except (OSError, ValueError):
        return 0.0
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def describe() -> dict[str, Any]:
    """What the numbers were measured on."""
    import platform

    import torch

    model = "unknown"
    try:
        with open("/proc/cpuinfo") as file:
            model = next((line.split(":")[1].strip() for line in file if line.startswith("model name")), model)
    except OSError:
        pass
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "torch": torch.__version__.split("+")[0],
    }
