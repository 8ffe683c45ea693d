"""Pictures in tar archives, as WebDataset has them: NAME.jpg beside NAME.cls or NAME.json, many to a shard."""

from __future__ import annotations

import functools
import glob
import hashlib
import io
import json
import os
import re
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from calgp.errors import CalgpError, brief

from .decode import LARGEST_FILE, SUFFIXES
from .folder import Folder, divided
from .formats import read_lines
from .images import Images
from .reading import Order
from .source import Placed, Split, cache_directory
from .streaming import Files, Growing, Names, settled, streamed

WINDOW = 4096  # pictures that are shuffled together
CLASSES_FILE = "classes.txt"
_LARGEST_TOLD = 2**20  # bytes of a header or of a JSON file
_MOST_CLASSES = 100_000
_MOST_SHARDS = 100_000
_BLOCK = 2**24  # bytes that the system is told of at a time, and once
_SPREAD = 256  # of a run of bytes, the most that is read ahead for one that is asked for: a window, for a batch of 16


@dataclass(frozen=True)
class Shards(Placed):
    """The pictures of tar files, which stay there: `path` is a pattern, or a folder of train-*.tar and test-*.tar.

    A pattern may hold * and ?, and numbers {0000..0099}; a fixed random choice of 20 % of each class of what it names
    is the test part. Labels are numbers: the text of NAME.cls, or "label" or "cls" in NAME.json. Lines of a file
    classes.txt beside the shards name them. Other members, links among them, are left out; nothing is unpacked.

    An epoch goes through the shards in an order of its own, each from its beginning to its end, and shuffles windows of
    4,096 pictures: storage is read forwards. Pictures should not lie in the order of their classes.
    """

    workers: int = 2
    name: str = field(init=False, default="shards")
    description: str = field(init=False, default="tar files of NAME.jpg with NAME.cls: DIR, or train-{0000..0099}.tar")

    def load(self, split: Split, directory: Path | None = None) -> Images:
        """The pictures of "train" or "test", `rows` counting those of the shards; the shards are indexed once."""
        self.check_split(split)
        parts: dict[str, Members] = {}
        if self.path.is_dir():
            patterns = {part: self.path / f"{part}-*.tar" for part in self.splits}
            parts = {part: Members.of(paths) for part, pattern in patterns.items() if (paths := shard_paths(pattern))}
        if parts and split not in parts:
            raise CalgpError(f"{self.path} has no {split}-*.tar, only {next(iter(parts))}-*.tar; add it.")
        members = parts[split] if parts else Members.of(self._named())
        everything = list(parts.values()) or [members]
        classes = _classes(everything)
        form, colour = settled(everything, self.size, self.colour)
        if form is None:
            raise CalgpError(f"{members.where} holds no picture that can be read; write the shards again.")
        whole = torch.arange(len(members.names))
        rows = whole if parts else divided(members.labels, classes, split, f"{self.path}, class ")
        order = ShardByShard(tuple(members.starts.tolist()), (), WINDOW)
        return streamed(
            members, members.labels, rows, classes, form=form, size=self.size, colour=colour, workers=self.workers,
            order=order,
        )  # fmt: skip

    def is_here(self, directory: Path | None = None) -> bool:
        return self.path.is_dir() or bool(shard_paths(self.path))

    def _named(self) -> list[Path]:
        paths = shard_paths(self.path)
        if not paths:
            raise CalgpError(
                f"There are no shards {self.path}; give a folder of train-*.tar and test-*.tar, or a pattern such as "
                "shards/train-{0000..0099}.tar."
            )
        return paths


@dataclass(frozen=True)
class ShardByShard(Order):
    """Shards in random order, each from its beginning, and what so comes together shuffled in windows."""

    starts: tuple[int, ...]  # the row that each shard begins with
    counts: tuple[int, ...]  # the pictures of this set in each shard
    window: int

    def shuffled(self, n: int, generator: torch.Generator) -> Tensor:
        shards = torch.randperm(len(self.counts), generator=generator).tolist()
        places = torch.arange(n).split(list(self.counts))
        forwards = torch.cat([places[shard] for shard in shards])
        windows = forwards.split(self.window)
        return torch.cat([part[torch.randperm(len(part), generator=generator)] for part in windows])

    def kept(self, rows: Tensor) -> ShardByShard:
        shard = torch.bucketize(rows, torch.tensor(self.starts), right=True) - 1
        counts = torch.bincount(shard, minlength=len(self.starts))
        return ShardByShard(self.starts, tuple(counts.tolist()), self.window)


@dataclass(frozen=True, eq=False)
class Members(Files):
    """The pictures in some shards: where each begins in which file, and its label."""

    paths: tuple[Path, ...]
    starts: np.ndarray  # int64: the number of the first picture in each shard
    offsets: np.ndarray  # int64: the first byte of each picture in its shard
    labels: Tensor

    @staticmethod
    def of(paths: Sequence[Path]) -> Members:
        found = [indexed(path) for path in paths]
        counts = [len(index.offsets) for index in found]
        joined, ends = b"".join(index.joined for index in found), np.concatenate([index.ends for index in found])
        before = np.cumsum([0, *(len(index.joined) for index in found[:-1])])
        names = Names(joined, ends + np.repeat(before, counts))
        lengths, offsets, labels = (
            np.concatenate([getattr(index, column) for index in found]) for column in ("lengths", "offsets", "labels")
        )
        starts = np.cumsum([0, *counts[:-1]])
        return Members(names, lengths, tuple(paths), starts, offsets, torch.from_numpy(labels))

    @property
    def where(self) -> str:
        return str(self.paths[0].parent)

    def open(self, place: int) -> IO[bytes]:
        path, length = self._shard(place), int(self.lengths[place])
        if length > LARGEST_FILE:
            raise CalgpError(f"{self.names[place]} has {length} bytes; at most {LARGEST_FILE} are read")
        try:
            with path.open("rb", buffering=0) as file:
                file.seek(int(self.offsets[place]))
                found = file.read(length)
        except OSError as error:
            raise CalgpError(f"{self.names[place]} cannot be read ({error.strerror})") from error
        if len(found) < length:
            raise CalgpError(f"{self.names[place]} is cut off: {path} has changed since it was indexed")
        return io.BytesIO(found)

    def ready(self, places: Tensor) -> None:
        """Tell the system of the run of bytes in each shard that these pictures lie in, so that it reads it forwards.

        Not of pictures that lie far apart: they are few, of large shards.
        """
        numbers = places.numpy()
        shards = np.searchsorted(self.starts, numbers, "right") - 1
        for shard in np.unique(shards).tolist():
            mine = numbers[shards == shard]
            first, last = int(self.offsets[mine].min()), int((self.offsets[mine] + self.lengths[mine]).max())
            if last - first <= _SPREAD * int(self.lengths[mine].sum()):
                for block in range(first // _BLOCK, last // _BLOCK + 1):
                    _will_need(self.paths[shard], block)

    def _shard(self, place: int) -> Path:
        return self.paths[int(np.searchsorted(self.starts, place, "right")) - 1]


@functools.lru_cache(maxsize=256)
def _will_need(path: Path, block: int) -> None:
    """A megabyte at a time: Linux shortens what it is told of to what it would read at once."""
    if not hasattr(os, "posix_fadvise"):
        return
    with path.open("rb") as file:
        for first in range(block * _BLOCK, (block + 1) * _BLOCK, 2**20):
            os.posix_fadvise(file.fileno(), first, 2**20, os.POSIX_FADV_WILLNEED)


# --- indexing ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ShardIndex:
    """What a shard holds: names (in one piece, and where each ends), first bytes, lengths, labels."""

    joined: bytes
    ends: np.ndarray
    offsets: np.ndarray
    lengths: np.ndarray
    labels: np.ndarray


def indexed(path: Path) -> ShardIndex:
    """What a shard holds, from the user's cache if the file has the length and the time that it had then."""
    try:
        now = path.stat()
    except OSError as error:
        raise CalgpError(f"The shard {path} cannot be read ({error.strerror}); check its name and rights.") from error
    state = np.array([now.st_size, now.st_mtime_ns, _VERSION])
    kept = cache_directory() / "shards" / f"{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]}.npz"
    try:
        with np.load(kept, allow_pickle=False) as found:
            if np.array_equal(found["state"], state):
                columns = {name: found[name] for name in ("ends", "offsets", "lengths", "labels")}
                return ShardIndex(found["joined"].tobytes(), **columns)
    except Exception:  # noqa: S110  an index that is not there or damaged is made again
        pass
    index = scan(path)
    _keep(kept, index, state)
    return index


_VERSION = 1


def _keep(path: Path, index: ShardIndex, state: np.ndarray) -> None:
    part = path.with_suffix(f".{os.getpid()}.part")
    columns: dict[str, Any] = {name: getattr(index, name) for name in ("ends", "offsets", "lengths", "labels")}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            np.savez(file, state=state, joined=np.frombuffer(index.joined, np.uint8), **columns)
        part.replace(path)
    except OSError:
        with suppress(OSError):  # a cache that cannot be written is done without
            part.unlink()


def scan(path: Path) -> ShardIndex:
    """Read the headers and labels of a shard, and nothing else, once from its beginning to its end."""
    names, offsets, lengths, labels = bytearray(), Growing(), Growing(), Growing()
    ends = Growing()
    for key, sample in _samples(path):
        pictures = [(suffix, member) for suffix, member in sample.items() if suffix in SUFFIXES]
        if not pictures:
            continue
        suffix, (offset, length, _) = pictures[0]
        name = f"{path.name}/{key}{suffix}"
        label = next((_label(told, kind, name) for kind in _LABELS if (told := sample.get(kind))), None)
        if label is None:
            raise CalgpError(f"{name} in {path.parent} has no label; put {key}.cls or {key}.json beside it.")
        names += os.fsencode(name)
        for column, value in ((ends, len(names)), (offsets, offset), (lengths, length), (labels, label)):
            column.append(value)
    if not ends.count:
        raise CalgpError(f"The shard {path} holds no pictures ({' '.join(sorted(SUFFIXES))}); write it again.")
    return ShardIndex(bytes(names), ends.array(), offsets.array(), lengths.array(), labels.array())


_Member = tuple[int, int, bytes]  # first byte, length, content of a label
_LABELS = (".cls", ".json")


def _samples(path: Path) -> Iterator[tuple[str, dict[str, _Member]]]:
    """Members that follow each other with the same name up to the first dot, by what stands behind it."""
    key, sample = "", dict[str, _Member]()
    for name, member in _members(path):
        folder, stroke, file = name.rpartition("/")
        stem, dot, suffix = file.partition(".")
        if folder + stroke + stem != key:
            yield key, sample
            key, sample = folder + stroke + stem, {}
        sample.setdefault(dot + suffix.lower(), member)
    yield key, sample


def _members(path: Path) -> Iterator[tuple[str, _Member]]:
    """The regular files of an archive that is not compressed; hard and symbolic links, devices and holes are none."""
    try:
        with _Headers(path) as file, tarfile.open(fileobj=file, mode="r:") as archive:
            end = file.seek(0, io.SEEK_END)
            while (member := archive.next()) is not None:
                _forget(archive)
                if not member.isreg() or member.issparse():
                    continue
                if member.offset_data + member.size > end:
                    raise tarfile.ReadError("its last member is cut off")
                file.seek(member.offset_data)
                told = file.read(member.size) if member.name.lower().endswith(_LABELS) else b""
                yield member.name, (member.offset_data, member.size, told)
            file.seek(archive.offset)
            if file.read(tarfile.BLOCKSIZE) != tarfile.NUL * tarfile.BLOCKSIZE:  # tarfile stops at a damaged header
                raise tarfile.ReadError("it has no end: it is damaged, or a part of a file")
    except CalgpError:
        raise
    except Exception as error:  # tarfile raises nearly everything on damaged files
        raise CalgpError(
            f"The shard {path} is no tar file that can be read ({str(error)[:300] or type(error).__name__}); "
            "shards are not compressed."
        ) from error


def _forget(archive: tarfile.TarFile) -> None:
    """An archive keeps all members that it has seen."""
    archive.members = []  # pyright: ignore[reportAttributeAccessIssue]


class _Headers(io.FileIO):
    """A file of which no large piece is read at once: headers are small, whatever length they tell."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= _LARGEST_TOLD:
            raise tarfile.ReadError(f"a header or label of {size} bytes")
        return super().read(size) or b""


def _label(member: _Member, kind: str, name: str) -> int:
    told: Any = member[2]
    try:
        if kind == ".json":
            found = json.loads(told)
            told = found.get("label", found.get("cls"))
        label = int(told)
        if 0 <= label < _MOST_CLASSES and not isinstance(told, float):
            return label
    except (ValueError, TypeError, AttributeError, RecursionError):
        pass
    raise CalgpError(
        f"The label of {name} is {brief(told)}; expected a whole number from 0 to {_MOST_CLASSES - 1}, as the text of "
        '.cls or as "label" in .json.'
    )


def _classes(parts: Sequence[Members]) -> tuple[str, ...]:
    """The lines of classes.txt, or numbers."""
    file, count = parts[0].paths[0].parent / CLASSES_FILE, 1 + max(int(part.labels.max()) for part in parts)
    if not file.is_file():
        return tuple(map(str, range(max(count, 2))))
    names = read_lines(file)
    if count > len(names):
        raise CalgpError(f"{file} names {len(names)} classes, but there are labels up to {count - 1}; add the others.")
    return names


def shard_paths(pattern: Path) -> list[Path]:
    """The files that a pattern names: numbers {0000..0099}, each of which must be there, then * and ?."""
    texts = [str(pattern)]
    while texts and (found := re.search(r"\{(\d+)\.\.(\d+)\}", texts[0])):
        first, last = found.groups()
        if not 0 <= int(last) - int(first) < _MOST_SHARDS // len(texts):
            raise CalgpError(f"{pattern} names no shards, or more than {_MOST_SHARDS}; give {{0000..0099}}.")
        numbers = [f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1)]
        texts = [text.replace(found[0], number, 1) for text in texts for number in numbers]
    named = [Path(path) for text in texts for path in (sorted(glob.glob(text)) if glob.has_magic(text) else [text])]
    if missing := [path for path in named if not path.is_file()]:
        if len(missing) == len(named):
            return []
        raise CalgpError(f"The shard {missing[0]} is not there; {len(named) - len(missing)} of {len(named)} are.")
    return named


# --- writing -------------------------------------------------------------------------------------------------------


def write_shards(
    folder: Path, out: Path, *, images_per_shard: int, watch: Callable[[int, int], None] = lambda done, total: None
) -> dict[str, int]:
    """Write the pictures of a folder, as they are, into `out/train-000000.tar` … and `out/test-…`; how many of each.

    They are shuffled once, always alike, so the same folder makes the same bytes. `out/classes.txt` names the labels.
    """
    if images_per_shard < 1:
        raise CalgpError(f"images_per_shard={images_per_shard} cannot be; it is a number of images, such as 10000.")
    if out.exists() and any(out.iterdir()):
        raise CalgpError(f"{out} is not empty; write shards into a new folder.")
    parts = Folder(folder).parts()
    classes = next(iter(parts.values()))[0].classes
    if strange := [name for name in classes if not name.isprintable() or name != name.strip()]:
        raise CalgpError(f"The class {strange[0]!r} of {folder} cannot be a line of a text; rename it.")
    out.mkdir(parents=True, exist_ok=True)
    (out / CLASSES_FILE).write_text("".join(f"{name}\n" for name in classes), "utf-8")
    total = sum(len(rows) for _, rows in parts.values())
    for split, (listing, rows) in parts.items():
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
        for shard, part in enumerate(rows[order].split(images_per_shard)):
            pictures = ((listing.open(row), int(listing.labels[row])) for row in part.tolist())
            _write_shard(out / f"{split}-{shard:06}.tar", pictures, first=shard * images_per_shard)
            watch(len(part), total)
    return {split: len(rows) for split, (_, rows) in parts.items()}


def _write_shard(path: Path, pictures: Iterator[tuple[Path, int]], first: int) -> None:
    part = path.with_suffix(".part")
    with tarfile.open(part, "w", format=tarfile.USTAR_FORMAT) as archive:
        for number, (picture, label) in enumerate(pictures, first):
            for suffix, content in ((picture.suffix.lower(), picture.read_bytes()), (".cls", str(label).encode())):
                member = tarfile.TarInfo(f"{number:09}{suffix}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
            _forget(archive)
    part.replace(path)
