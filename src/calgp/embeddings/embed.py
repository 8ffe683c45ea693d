"""A pretrained network over a source of images, once: its features into a folder of embeddings."""

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from calgp.data.original import OriginalImages
from calgp.data.prefetch import prefetch, worker_count
from calgp.embeddings.cache import FORMAT, MadeBy, Manifest, write_shard
from calgp.errors import CalgpError
from calgp.nets.preprocessing import Preprocessing
from calgp.nets.pretrained import FeatureExtractor, NetworkRequest
from calgp.runs.devices import open_device
from calgp.runs.folder import slug
from calgp.search.engines import Engine, SerialEngine
from calgp.search.shards import ShardTask, make_shards

BATCH, SHARD = 50, 1000


@dataclass(frozen=True)
class EmbedOptions:
    """How the work is cut: the same cut gives the same bits. `workers` decode images ahead; None is the usual two.

    device: where processes of an engine compute, as `calgp embed --device`; they decode their images themselves.
    """

    batch_size: int = BATCH
    rows_per_shard: int = SHARD
    workers: int | None = None
    device: str = "auto"

    def __post_init__(self) -> None:
        for name in ("batch_size", "rows_per_shard"):
            if getattr(self, name) < 1:
                raise CalgpError(f"Invalid {name}={getattr(self, name)}: must be at least 1.")
        worker_count(self.workers)


def resized_rows(preprocessing: Preprocessing, images: OriginalImages, rows: slice) -> Tensor:
    """Rows of images as a network wants them, uint8: what worker processes read."""
    return torch.stack([preprocessing.resized(image) for image in images.read(rows)])


@dataclass(frozen=True, eq=False)
class EmbedShard:
    """Writes the features of a shard's images. Another process opens the network by its name, once."""

    asked: NetworkRequest
    manifest: Manifest
    folder: Path
    device: str
    extractor: FeatureExtractor | None = None  # the one that is open in this process
    workers: int = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return EmbedShard, (self.asked.absolute(), self.manifest, self.folder.absolute(), self.device)

    def __call__(self, task: ShardTask[OriginalImages], *, watch: Callable[[float], None]) -> None:
        extractor = self.extractor or _opened(self.asked, self.manifest.made_by, self.device)
        images, features = task.content, list[Tensor]()
        read, size = functools.partial(resized_rows, extractor.preprocessing, images), self.manifest.batch_size
        batches = (slice(first, first + size) for first in range(0, len(images), size))
        for _, batch in prefetch(read, batches, self.workers):
            features.append(extractor.features(batch))
            watch(sum(map(len, features)) / len(images))
        x, first = torch.cat(features), self.manifest.slice_of(task.number).start
        if not x.isfinite().all():
            raise CalgpError(
                f"{self.manifest.network} gives features that are no finite numbers, for an image among rows "
                f"{first} to {first + len(x) - 1}; check its weights and its preprocessing."
            )
        write_shard(self.folder, task.number, x, images.y)


def embed(
    extractor: FeatureExtractor,
    images: OriginalImages,
    folder: Path,
    *,
    source: str,
    split: str,
    options: EmbedOptions = EmbedOptions(),
    engine: Engine = SerialEngine(),
    watch: Callable[[int, int], None] = lambda more, total: None,
) -> Manifest:
    """Write the features of all images into `folder`, shard by shard; what is there already is kept.

    After an interruption the same call makes the shards that are missing, and ends with the same bytes. A folder that
    holds embeddings of anything else is refused. `watch` is told how many more rows are done, and how many there are.
    """
    wanted = Manifest(
        FORMAT, extractor.name, extractor.weights, extractor.preprocessing, source, split, images.checksum(),
        len(images), extractor.width, images.classes, options.rows_per_shard, options.batch_size,
    )  # fmt: skip
    work = EmbedShard(extractor.asked, wanted, folder, options.device, extractor, worker_count(options.workers))
    return make_shards(folder, wanted, work, lambda k: images.only(wanted.slice_of(k)), engine=engine, watch=watch)


def cache_name(extractor: FeatureExtractor, images: OriginalImages, source: str) -> str:
    """The name of a folder for these embeddings: the same for the same network, weights, preprocessing and images."""
    made_of = MadeBy(extractor.name, extractor.weights, extractor.preprocessing), source, images.checksum()
    key = hashlib.sha256(repr(made_of).encode()).hexdigest()[:12]
    return f"embeddings-{slug(extractor.name.rpartition(':')[2])}-{key}"


@functools.lru_cache(maxsize=1)
def _opened(asked: NetworkRequest, made_by: MadeBy, device: str) -> FeatureExtractor:
    """The network in a process of an engine, which must be the one that the manifest describes."""
    found = asked.open()
    for what in ("weights", "preprocessing"):
        if getattr(found, what) != getattr(made_by, what):
            raise CalgpError(
                f"{made_by.network} has other {what} in another process than where `calgp embed` was started; give "
                "all machines the same files and the same versions of the packages."
            )
    return found.to(open_device(device).device)
