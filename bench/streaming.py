"""Does memory stay flat, and training as fast, when images stay in their files? `python -m bench.streaming`.

Makes a folder and shards of 28×28 grey PNG files out of the embedded digits (200,000 of them: about 1.5 GB of disk,
removed at the end), trains on them in memory, streamed and from shards, and compares. Some minutes on two quiet cores.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from PIL import Image

from bench.measure import Machine, describe
from calgp.data import load
from calgp.data.shards import write_shards
from calgp.gp import Bound
from calgp.nets import Task
from calgp.runs import Run, TrainingData, from_json
from calgp.runs.build import build
from calgp.training import fit
from calgp.training.loop import make_optimiser

WARM, TIMED = 5, 15  # steps of a turn: the first use up what was read ahead while others had theirs
KINDS = ("folder", "stream", "shards")
TINY = {"name": "lenet", "channels": [4, 8], "hidden": [16]}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.streaming", description=__doc__)
    parser.add_argument("--images", type=int, default=200_000, help="of the large set; the small one has a tenth")
    parser.add_argument("--rounds", type=int, default=6, help="turns that each way of reading has")
    parser.add_argument("--workers", type=int, default=2, help="processes that read ahead")
    parser.add_argument("--work", type=Path, help="where images are made, and kept; else a folder that is removed")
    parser.add_argument("--out", type=Path, default=Path("results/bench/streaming.json"))
    parser.add_argument("--no-peaks", action="store_true", help="measure speed alone")
    parser.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)  # one measurement, in a process of its own
    options = parser.parse_args()
    if options.peak:
        print(json.dumps(peak(*options.peak, options.workers)))
        return 0
    work = options.work or Path(tempfile.mkdtemp(prefix="calgp-streaming-"))
    os.environ["XDG_CACHE_HOME"] = str(work / "cache")
    try:
        record = measured(work, options)
    finally:
        if options.work is None:
            shutil.rmtree(work)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))
    return 0


def measured(work: Path, options: argparse.Namespace) -> dict[str, Any]:
    before, small, large = Machine.now(), options.images // 10, options.images
    make(work, small, large)
    command = [sys.executable, "-m", "bench.streaming", "--workers", str(options.workers), "--peak"]
    peaks = []
    for kind in () if options.no_peaks else KINDS:
        for size, n in (("small", small), ("large", large)):
            told = subprocess.run([*command, kind, place(work, kind, size)], check=True, capture_output=True, text=True)  # noqa: S603
            peaks.append({"kind": kind, "images": n} | json.loads(told.stdout.splitlines()[-1]))
            print(peaks[-1], file=sys.stderr, flush=True)
    speeds = turns({kind: place(work, kind, "small") for kind in KINDS}, options.rounds, options.workers)
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "command": f"python -m bench.streaming --images {options.images} --rounds {options.rounds}",
        "machine": describe(),
        "others": round(before.others(Machine.now()), 3),
        "load": round(os.getloadavg()[0], 1),
        "peaks": peaks,
        "steps": speeds,
    }


def make(work: Path, small: int, large: int) -> None:
    """`large` noisy digits as files, a tenth of them also in a folder of their own, and all of them in shards."""
    if (work / "done").exists():
        return
    clock, digits, generator = time.perf_counter(), load("digits", "train"), torch.Generator().manual_seed(0)
    for root in (work / "large", work / "small"):
        for name in digits.classes:
            (root / "train" / name).mkdir(parents=True, exist_ok=True)
    for first in range(0, large, 1000):
        index = torch.randint(len(digits), (1000,), generator=generator)
        noise = torch.randint(-20, 21, (1000, 28, 28), generator=generator)
        pictures = (digits.x[index, 0] + noise).clamp(0, 255).byte().numpy()
        for i, (picture, label) in enumerate(zip(pictures, digits.y[index].tolist(), strict=True), first):
            file = f"train/{digits.classes[label]}/{i:07}.png"
            Image.fromarray(picture).save(work / "large" / file, compress_level=1)
            if i < small:
                os.link(work / "large" / file, work / "small" / file)
    write_shards(work / "large", work / "large-shards", images_per_shard=small // 2)
    (work / "small-shards").mkdir()
    for name in ("classes.txt", "train-000000.tar", "train-000001.tar"):
        os.link(work / "large-shards" / name, work / "small-shards" / name)
    (work / "done").touch()
    print(f"made in {time.perf_counter() - clock:.0f} s", file=sys.stderr, flush=True)


def place(work: Path, kind: str, size: str) -> str:
    """A source of the small or the large set."""
    return f"{kind}:{work}/{size}-shards" if kind == "shards" else f"{kind}:{work}/{size}"


def described(source: str, backbone: Any) -> Run:
    options = {"source": source, "method": "cnn-gp-sorf", "backbone": backbone, "size": 28, "colour": "grey"}
    return from_json(options | {"steps": 10**6, "batch_size": 100})


def peak(kind: str, source: str, workers: int) -> dict[str, float]:
    """Megabytes at the most, of a training of 30 steps by a small network, and of the largest process that reads."""
    clock = time.perf_counter()
    steps = training(described(source, TINY), workers)
    next(steps)
    begun = time.perf_counter() - clock
    for _ in range(30):
        next(steps)
    steps.close()
    own, readers = (
        resource.getrusage(who).ru_maxrss / 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return {"megabytes": round(own, 1), "reader_megabytes": round(readers, 1), "seconds_to_begin": round(begun, 1)}


def training(run: Run, workers: int) -> Iterator[Any]:
    data = TrainingData.of(run, None, workers=workers).train
    model = build(run, Task(*data.x.shape[1:], classes=len(data.classes)))
    fabric = Fabric(accelerator="cpu", devices=1)
    bound, optimiser = fabric.setup(Bound(model, len(data)), make_optimiser(run, model))
    return fit(bound, optimiser, data, run, fabric=fabric)


def turns(sources: dict[str, str], rounds: int, workers: int) -> dict[str, Any]:
    """Seconds of a LeNet step, each way of reading in its turn; ratios to those in memory, round by round."""
    trainings = {kind: training(described(source, "lenet"), workers) for kind, source in sources.items()}
    seconds: dict[str, list[float]] = {kind: [] for kind in sources}
    own: dict[str, list[float]] = {kind: [] for kind in sources}  # of the processor, without those that read
    for _ in range(rounds):
        for kind, steps in trainings.items():
            for _ in range(WARM):
                next(steps)
            clock, processor = time.perf_counter(), time.process_time()
            for _ in range(TIMED):
                next(steps)
            seconds[kind].append((time.perf_counter() - clock) / TIMED)
            own[kind].append((time.process_time() - processor) / TIMED)
            print(
                kind, f"{seconds[kind][-1]:.3f} s, {own[kind][-1]:.3f} s of the processor", file=sys.stderr, flush=True
            )
    found: dict[str, Any] = {}
    for kind in sources:
        for what, times in (("wall", seconds), ("processor", own)):
            ratios = [a / b for a, b in zip(times[kind], times["folder"], strict=True)]
            found[f"{kind}, {what}"] = {
                "milliseconds": round(1000 * statistics.median(times[kind]), 1),
                "ratio": round(statistics.median(ratios), 3),
                "ratios": [round(ratio, 3) for ratio in ratios],
            }
    return found


if __name__ == "__main__":
    sys.exit(main())
