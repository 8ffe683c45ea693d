"""A pretrained network over a source of images, once: its features into a folder of embeddings."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from torch import Tensor

from calgp.data.original import OriginalImages
from calgp.data.prefetch import prefetch, worker_count
from calgp.embeddings.cache import (
    FORMAT,
    MANIFEST,
    MadeBy,
    Manifest,
    intact_shards,
    read_manifest,
    write_manifest,
    write_shard,
)
from calgp.errors import CalgpError
from calgp.nets.preprocessing import Preprocessing
from calgp.nets.pretrained import FeatureExtractor
from calgp.runs.folder import slug
from calgp.runs.reading import is_file
from calgp.runs.writing import LOCK, owned, wrap_os_errors

BATCH, SHARD = 50, 1000


@dataclass(frozen=True)
class EmbedOptions:
    """How the work is cut: the same cut gives the same bits. `workers` decode images ahead; None is the usual two."""

    batch_size: int = BATCH
    rows_per_shard: int = SHARD
    workers: int | None = None

    def __post_init__(self) -> None:
        for name in ("batch_size", "rows_per_shard"):
            if getattr(self, name) < 1:
                raise CalgpError(f"Invalid {name}={getattr(self, name)}: must be at least 1.")
        worker_count(self.workers)


@dataclass(frozen=True, eq=False)
class ResizedRows:
    """Rows of images as a network wants them, uint8: what worker processes read."""

    preprocessing: Preprocessing
    images: OriginalImages

    def __call__(self, rows: slice) -> Tensor:
        return torch.stack([self.preprocessing.resized(image) for image in self.images.read(rows)])


def embed(
    extractor: FeatureExtractor,
    images: OriginalImages,
    folder: Path,
    *,
    source: str,
    split: str,
    options: EmbedOptions = EmbedOptions(),
    watch: Callable[[int, int], None] = lambda more, total: None,
) -> Manifest:
    """Write the features of all images into `folder`, shard by shard; what is there already is kept.

    After an interruption the same call goes on behind the last whole shard, and ends with the same bytes. A folder that
    holds embeddings of anything else is refused. `watch` is told how many more rows are done, and how many there are.
    """
    wanted = Manifest(
        FORMAT, extractor.name, extractor.weights, extractor.preprocessing, source, split, images.checksum(),
        len(images), extractor.width, images.classes, options.rows_per_shard, options.batch_size,
    )  # fmt: skip
    _check_folder(folder)
    with owned(folder):
        manifest = _begin(folder, wanted)
        done, labels = min(len(manifest.shards) * manifest.rows_per_shard, manifest.rows), images.y
        watch(done, manifest.rows)
        for x in _shards(extractor, images, manifest, worker_count(options.workers), watch):
            manifest = write_shard(folder, manifest, x, labels[done : done + len(x)])
            done += len(x)
    return manifest


def cache_name(extractor: FeatureExtractor, images: OriginalImages, source: str) -> str:
    """The name of a folder for these embeddings: the same for the same network, weights, preprocessing and images."""
    made_of = MadeBy(extractor.name, extractor.weights, extractor.preprocessing), source, images.checksum()
    key = hashlib.sha256(repr(made_of).encode()).hexdigest()[:12]
    return f"embeddings-{slug(extractor.name.rpartition(':')[2])}-{key}"


def _shards(
    extractor: FeatureExtractor, images: OriginalImages, manifest: Manifest, workers: int,
    watch: Callable[[int, int], None],
) -> Iterator[Tensor]:  # fmt: skip
    """Features [n, d] of the shards that are not there yet."""
    first = len(manifest.shards) * manifest.rows_per_shard
    read, features = ResizedRows(extractor.preprocessing, images), list[Tensor]()
    for rows, batch in prefetch(read, _batches(first, manifest), workers):
        features.append(extractor.features(batch))
        watch(len(batch), manifest.rows)
        if rows.stop < manifest.rows and rows.stop % manifest.rows_per_shard:
            continue
        x = torch.cat(features)
        features.clear()
        if not x.isfinite().all():
            raise CalgpError(
                f"{extractor.name} gives features that are no finite numbers, for an image among rows "
                f"{rows.stop - len(x)} to {rows.stop - 1}; check its weights and its preprocessing."
            )
        yield x


def _batches(first: int, manifest: Manifest) -> Iterator[slice]:
    """Rows of each batch; none reaches over the end of a shard."""
    while first < manifest.rows:
        shard_end = (first // manifest.rows_per_shard + 1) * manifest.rows_per_shard
        last = min(first + manifest.batch_size, shard_end, manifest.rows)
        yield slice(first, last)
        first = last


def _check_folder(folder: Path) -> None:
    with wrap_os_errors(folder):
        if folder.exists() and not folder.is_dir():
            raise CalgpError(f"Invalid --out {folder}: must be a folder, but it is a file; choose another name.")
        strange = folder.is_dir() and not is_file(folder / MANIFEST) and any(p.name != LOCK for p in folder.iterdir())
        if strange:
            raise CalgpError(f"Invalid --out {folder}: it holds other files than embeddings; choose a new folder.")


def _begin(folder: Path, wanted: Manifest) -> Manifest:
    """The manifest to go on with: a new one, or the one that is there if it is of the same work."""
    if not is_file(folder / MANIFEST):
        write_manifest(folder, wanted)
        return wanted
    there = read_manifest(folder)
    for each in fields(Manifest):
        begun, asked = getattr(there, each.name), getattr(wanted, each.name)
        if each.name != "shards" and begun != asked:
            what = each.name.replace("_", " ")
            raise CalgpError(
                f"Invalid --out {folder}: it holds embeddings with other {what} ({str(begun)[:80]}, now "
                f"{str(asked)[:80]}); choose another folder, or remove this one."
            )
    return replace(there, shards=intact_shards(folder, there))
