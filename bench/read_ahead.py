"""Does asking the kernel to read ahead make shards faster to read from a cold disk? `python -m bench.read_ahead`.

Reads two shards of random bytes in the order of an epoch, batches of 100, with the hint and without, in turn. The files
are dropped from the page cache before each turn. Linux only; some seconds, and 100 MB of disk.
"""

import argparse
import io
import os
import statistics
import tarfile
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from calgp.data import shard_index
from calgp.data.order import ShardOrder
from calgp.data.shards import WINDOW


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.read_ahead", description=__doc__)
    parser.add_argument("--bytes", type=int, default=40_000, help="of an image")
    parser.add_argument("--images", type=int, default=1_250, help="of a shard")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="calgp-shards-") as work:
        os.environ["XDG_CACHE_HOME"] = work
        paths = [write(Path(work, f"train-{shard}.tar"), options.images, options.bytes) for shard in range(2)]
        os.sync()
        files = shard_index.ShardFiles.of(paths)
        seconds = {False: [], True: []}
        for _ in range(options.rounds):
            for hint, found in seconds.items():
                found.append(epoch(files, paths, hint=hint))
    for hint, found in seconds.items():
        print(f"{'with' if hint else 'without'} the hint: median {statistics.median(found):.2f} s", *np.round(found, 2))


def write(path: Path, images: int, size: int) -> Path:
    content = np.random.default_rng(0)
    with tarfile.open(path, "w") as archive:
        for number in range(images):
            for suffix, data in ((".jpg", content.bytes(size)), (".cls", b"0")):
                member = tarfile.TarInfo(f"{number:06}{suffix}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return path


def epoch(files: shard_index.ShardFiles, paths: list[Path], *, hint: bool) -> float:
    """Seconds to read every image once."""
    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    shard_index._read_block_ahead.cache_clear()
    n = len(files.names)
    order = ShardOrder(tuple(files.starts.tolist()), (), WINDOW).subset(torch.arange(n))
    clock = time.perf_counter()
    for batch in order.shuffle(n, torch.Generator().manual_seed(0)).split(100):
        if hint:
            files.read_ahead(batch)
        for number in batch.tolist():
            files.open(number)
    return time.perf_counter() - clock


if __name__ == "__main__":
    main()
