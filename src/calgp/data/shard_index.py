"""What tar shards hold: names, labels and the byte ranges of their images, read once and cached.

`wids` (webdataset's index of shards) was tried: it loops for ever on a negative length, accepts an archive that was cut
off, and loses names of more than 100 characters.
"""

import functools
import hashlib
import io
import json
import os
import tarfile
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from calgp.errors import CalgpError, short_repr

from .decode import MAX_FILE_BYTES, SUFFIXES
from .files import UNLABELLED, FileNames, ImageFiles
from .source import cache_directory

MAX_CLASSES = 100_000
_MAX_SMALL = 2**20  # bytes of a header or of a label
_VERSION = 2  # of the cache
_BLOCK = 2**24  # bytes that the kernel is asked to read ahead, once
_SPREAD = 256  # a byte range is read ahead if it is at most so many times as long as the images in it


@dataclass(frozen=True, eq=False)
class ShardIndex:
    """What a shard holds: its names as in `FileNames`, and the first byte, length and label of each image."""

    joined: np.ndarray  # uint8
    ends: np.ndarray  # int64, as the following
    offsets: np.ndarray
    lengths: np.ndarray
    labels: np.ndarray


@dataclass(frozen=True, eq=False)
class ShardFiles(ImageFiles):
    """The images in some shards."""

    paths: tuple[Path, ...]
    starts: np.ndarray  # int64: the number of the first image in each shard
    offsets: np.ndarray  # int64: the first byte of each image in its shard

    @staticmethod
    def of(paths: Sequence[Path]) -> "ShardFiles":
        indices = [load_index(path) for path in paths]
        counts = [len(index.ends) for index in indices]
        names = [field.name for field in fields(ShardIndex)]
        columns = {name: np.concatenate([getattr(index, name) for index in indices]) for name in names}
        before = np.cumsum([0, *(len(index.joined) for index in indices[:-1])])
        files = FileNames(columns["joined"].tobytes(), columns["ends"] + np.repeat(before, counts))
        labels, starts = torch.from_numpy(columns["labels"]), np.cumsum([0, *counts[:-1]])
        return ShardFiles(files, columns["lengths"], labels, tuple(paths), starts, columns["offsets"])

    @property
    def place(self) -> str:
        return str(self.paths[0].parent)

    def open(self, number: int) -> IO[bytes]:
        path, length = self.paths[int(np.searchsorted(self.starts, number, "right")) - 1], int(self.lengths[number])
        if length > MAX_FILE_BYTES:
            raise CalgpError(f"{self.names[number]} has {length} bytes; at most {MAX_FILE_BYTES} are read")
        try:
            with path.open("rb", buffering=0) as file:
                file.seek(int(self.offsets[number]))
                content = file.read(length)
        except OSError as error:
            raise CalgpError(f"{self.names[number]} cannot be read ({error.strerror})") from error
        if len(content) < length:
            raise CalgpError(f"{self.names[number]} is cut off: {path} has changed since it was indexed")
        return io.BytesIO(content)

    def only(self, numbers: Tensor) -> "ShardFiles":
        wanted = numbers.numpy()
        shards = (np.searchsorted(self.starts, wanted, "right") - 1).tolist()
        absolute = {shard: self.paths[shard].absolute() for shard in set(shards)}
        paths, starts = tuple(absolute[shard] for shard in shards), np.arange(len(wanted))  # each image by its path
        return replace(self, **self.columns(numbers), paths=paths, starts=starts, offsets=self.offsets[wanted])

    def read_ahead(self, numbers: Tensor) -> None:
        """Ask the kernel to read ahead: these images lie in one byte range of each shard, unless they are far apart."""
        wanted = numbers.numpy()
        shards = np.searchsorted(self.starts, wanted, "right") - 1
        for shard in np.unique(shards).tolist():
            mine = wanted[shards == shard]
            first, last = int(self.offsets[mine].min()), int((self.offsets[mine] + self.lengths[mine]).max())
            if last - first <= _SPREAD * int(self.lengths[mine].sum()):
                for block in range(first // _BLOCK, last // _BLOCK + 1):
                    _read_block_ahead(self.paths[shard], block)


@functools.lru_cache(maxsize=256)
def _read_block_ahead(path: Path, block: int) -> None:
    """A megabyte at a time: Linux cuts a larger request down to what it would read at once."""
    if hasattr(os, "posix_fadvise"):
        with path.open("rb") as file:
            for first in range(block * _BLOCK, (block + 1) * _BLOCK, 2**20):
                os.posix_fadvise(file.fileno(), first, 2**20, os.POSIX_FADV_WILLNEED)


def load_index(path: Path) -> ShardIndex:
    """What a shard holds, from the user's cache if the file still has the same length and time of change."""
    try:
        now = path.stat()
    except OSError as error:
        raise CalgpError(f"The shard {path} cannot be read ({error.strerror}); check its name and rights.") from error
    state = np.array([now.st_size, now.st_mtime_ns, _VERSION])
    cached = cache_directory() / "shards" / f"{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]}.npz"
    try:
        with np.load(cached, allow_pickle=False) as found:
            if np.array_equal(found["state"], state):
                return ShardIndex(**{field.name: found[field.name] for field in fields(ShardIndex)})
    except Exception:  # noqa: S110  an index that is missing or damaged is made again
        pass
    index = index_shard(path)
    _store(cached, index, state)
    return index


def _store(path: Path, index: ShardIndex, state: np.ndarray) -> None:
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            np.savez(file, state=state, **asdict(index))
        part.replace(path)
    except OSError:
        with suppress(OSError):  # without a cache that can be written, the shard is indexed each time
            part.unlink()


def index_shard(path: Path) -> ShardIndex:
    """Read the headers and labels of a shard, and nothing else, once from its beginning to its end."""
    joined = bytearray()
    ends, offsets, lengths, labels = (array("q") for _ in range(4))
    for key, sample in _samples(path):
        suffix = next((suffix for suffix in sample if suffix in SUFFIXES), None)
        if suffix is None:
            continue
        name = f"{path.name}/{key}{suffix}"
        label = next((_label(sample[kind].content, kind, name) for kind in _LABELS if kind in sample), UNLABELLED)
        joined += os.fsencode(name)
        ends.append(len(joined))
        offsets.append(sample[suffix].offset)
        lengths.append(sample[suffix].length)
        labels.append(label)
    if not ends:
        raise CalgpError(f"The shard {path} holds no images ({' '.join(sorted(SUFFIXES))}); write it again.")
    return ShardIndex(np.frombuffer(joined, np.uint8), *map(np.array, (ends, offsets, lengths, labels)))


@dataclass(frozen=True)
class _Member:
    """A file in an archive; the content is that of a label."""

    offset: int
    length: int
    content: bytes


_LABELS = (".cls", ".json")


def _samples(path: Path) -> Iterator[tuple[str, dict[str, _Member]]]:
    """Consecutive members with the same name up to the first dot, by what follows it."""
    key, sample = "", dict[str, _Member]()
    for name, member in _members(path):
        folder, slash, file = name.rpartition("/")
        stem, dot, suffix = file.partition(".")
        if folder + slash + stem != key:
            yield key, sample
            key, sample = folder + slash + stem, {}
        sample.setdefault(dot + suffix.lower(), member)
    yield key, sample


def _members(path: Path) -> Iterator[tuple[str, _Member]]:
    """The regular files of an uncompressed archive, without hard and symbolic links, devices and sparse files."""
    try:
        with _SmallReads(path) as file, tarfile.open(fileobj=file, mode="r:") as archive:
            end = file.seek(0, io.SEEK_END)
            while (member := archive.next()) is not None:
                forget_members(archive)
                if not member.isreg() or member.issparse():
                    continue
                if member.offset_data + member.size > end:
                    raise tarfile.ReadError("its last member is cut off")
                file.seek(member.offset_data)
                content = file.read(member.size) if member.name.lower().endswith(_LABELS) else b""
                yield member.name, _Member(member.offset_data, member.size, content)
            file.seek(archive.offset)
            if file.read(tarfile.BLOCKSIZE) != tarfile.NUL * tarfile.BLOCKSIZE:  # tarfile stops at a damaged header
                raise tarfile.ReadError("it has no end: it is damaged, or a part of a file")
    except CalgpError:
        raise
    except Exception as error:  # tarfile raises nearly everything on damaged files
        raise CalgpError(
            f"Invalid shard {path} ({str(error)[:300] or type(error).__name__}): must be a tar file that is not "
            "compressed; write it again."
        ) from error


def forget_members(archive: tarfile.TarFile) -> None:
    """Free the members that an archive has seen: it would keep all of them."""
    archive.members = []  # pyright: ignore[reportAttributeAccessIssue]


class _SmallReads(io.FileIO):
    """A file that reads no large piece at once: headers are small, whatever length they claim."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= _MAX_SMALL:
            raise tarfile.ReadError(f"a header or label of {size} bytes")
        return super().read(size) or b""


def _label(content: bytes, kind: str, name: str) -> int:
    value: Any = content
    try:
        if kind == ".json":
            found = json.loads(content)
            value = found.get("label", found.get("cls"))
        label = int(value)
        if 0 <= label < MAX_CLASSES and not isinstance(value, float):
            return label
    except (ValueError, TypeError, AttributeError, RecursionError, OverflowError):
        pass
    raise CalgpError(
        f"Invalid label {short_repr(value)} of {name}: must be a whole number from 0 to {MAX_CLASSES - 1}, as the text "
        'of .cls or as "label" in .json.'
    )
