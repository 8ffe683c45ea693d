"""Fetch published image sets: checked before anything is put in place, and nothing is written outside the target."""

from __future__ import annotations

import gzip
import hashlib
import http.client
import tarfile
import tempfile
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

from calgp.errors import CalgpError

from .source import data_directory
from .sources import open_source

Progress = Callable[[int, int], None]
_STEP = 2**16
_LARGEST_ARCHIVE = 2**28  # bytes, unpacked: CIFAR-10 and CIFAR-100 have 1.9 · 10⁸
_MOST_MEMBERS = 1000
_PATIENCE = 60  # seconds without a byte


@dataclass(frozen=True)
class Remote:
    """A published file: its name, exact size in bytes and MD5 (the sum that the publishers give)."""

    name: str
    size: int
    md5: str


@dataclass(frozen=True)
class Published:
    """The files of a set, where they are published, and the folder where they go.

    With `members`, each file is a tar archive, and those members are taken out of it: they and no others.
    """

    base_url: str
    files: tuple[Remote, ...]
    folder: str
    members: tuple[str, ...] = ()


PUBLISHED: dict[str, Published] = {
    "mnist": Published(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        (
            Remote("train-images-idx3-ubyte.gz", 9912422, "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
            Remote("train-labels-idx1-ubyte.gz", 28881, "d53e105ee54ea40749a09fcbcd1e9432"),
            Remote("t10k-images-idx3-ubyte.gz", 1648877, "9fb629c4189551a2d022fa330f9573f3"),
            Remote("t10k-labels-idx1-ubyte.gz", 4542, "ec29112dd5afa0611ce80d1b7f02629c"),
        ),
        "MNIST/raw",
    ),
    "cifar10": Published(
        "https://www.cs.toronto.edu/~kriz/",
        (Remote("cifar-10-python.tar.gz", 170498071, "c58f30108f718f92721af3b95e74349a"),),
        "cifar-10-batches-py",
        ("batches.meta", *(f"data_batch_{part}" for part in range(1, 6)), "test_batch"),
    ),
    "cifar100": Published(
        "https://www.cs.toronto.edu/~kriz/",
        (Remote("cifar-100-python.tar.gz", 169001437, "eb9058c3a382ffc7106e4002c42a8d85"),),
        "cifar-100-python",
        ("meta", "train", "test"),
    ),
}


def download(
    name: str,
    directory: Path | None = None,
    *,
    base_url: str | None = None,
    progress: Progress | None = None,
) -> Path:
    """Fetch the set `name` into `directory` (as for `data_directory`); the folder that now holds it.

    Args:
        base_url: another host of the same files, a URL that ends with a slash.
        progress: called with (bytes done, bytes in all) as they come.
    """
    published = _published(name)
    target = data_directory(directory) / published.folder
    try:
        target.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target, prefix=".fetching-") as aside:
            _fetch_all(published, base_url or published.base_url, Path(aside), progress or (lambda done, total: None))
            for path in _unpacked(published, Path(aside)):
                path.replace(target / path.name)
    except OSError as error:
        raise CalgpError(f"{target} cannot be written ({error}); name another folder by CALGP_DATA.") from error
    return target


def _published(name: str) -> Published:
    if name in PUBLISHED:
        return PUBLISHED[name]
    if open_source(name).name == "notmnist":
        raise CalgpError(
            f"notMNIST has no host that can be relied on. Put images-idx3-ubyte.gz and labels-idx1-ubyte.gz into "
            f"{data_directory() / 'notMNIST' / 'raw'}, or notMNIST_small (folders A to J) into {data_directory()}."
        )
    raise CalgpError(f"{name} needs no download: it is on this machine already, or comes with calgp.")


def _fetch_all(published: Published, base_url: str, aside: Path, progress: Progress) -> None:
    total = sum(file.size for file in published.files)
    done = 0
    for file in published.files:
        _fetch(file, base_url, aside / file.name, lambda here, before=done: progress(before + here, total))
        done += file.size


def _fetch(file: Remote, base_url: str, path: Path, progress: Callable[[int], None]) -> None:
    """One file to `path`, refused as soon as it is longer than published, and when its MD5 is another."""
    url = base_url + file.name
    if urlsplit(url).scheme not in ("http", "https"):
        raise CalgpError(f"{url} cannot be fetched; calgp fetches from http and https addresses only.")
    digest, done = hashlib.md5(usedforsecurity=False), 0
    try:
        with urllib.request.urlopen(url, timeout=_PATIENCE) as answer, path.open("wb") as out:  # noqa: S310 (checked above)
            while done <= file.size and (part := answer.read(_STEP)):
                out.write(part)
                digest.update(part)
                done += len(part)
                progress(min(done, file.size))
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise CalgpError(
            f"{url} could not be fetched ({error}). Without a network, put the set's files into the data folder "
            f"by hand: loading the set says which."
        ) from error
    if (done, digest.hexdigest()) != (file.size, file.md5):
        raise CalgpError(
            f"{url} is not the published file (MD5 {digest.hexdigest()} of {done} bytes, expected {file.md5} of "
            f"{file.size}); nothing was kept. Try again later, or from another host."
        )


def _unpacked(published: Published, aside: Path) -> list[Path]:
    """The files to put in place: those fetched, or the expected members of those."""
    if not published.members:
        return [aside / file.name for file in published.files]
    for file in published.files:
        try:
            with gzip.open(aside / file.name) as packed:
                _take_members(_Bounded(packed, _LARGEST_ARCHIVE), published, aside)
        except CalgpError as error:
            raise CalgpError(f"{file.name} {error}; nothing was kept.") from error
        except Exception as error:  # tarfile's readers of extended headers raise nearly everything on damaged archives
            raise CalgpError(f"{file.name} is no readable tar archive ({error}); nothing was kept.") from error
    paths = [aside / member for member in published.members]
    if absent := [path.name for path in paths if not path.exists()]:
        raise CalgpError(f"{published.files[0].name} does not hold {', '.join(absent)}; nothing was kept.")
    return paths


class _Bounded:
    """A stream that ends in an error after `most` bytes, whatever the headers in it ask for."""

    def __init__(self, stream: gzip.GzipFile, most: int) -> None:
        self.stream, self.left = stream, most

    def read(self, size: int) -> bytes:
        part = self.stream.read(min(size, self.left + 1))
        self.left -= len(part)
        if self.left < 0:
            raise CalgpError(f"unpacks to more than {_LARGEST_ARCHIVE} bytes")
        return part


def _take_members(stream: _Bounded, published: Published, aside: Path) -> None:
    """Copy the expected regular files under names of our own; all else in the archive is left alone.

    The archive is read as a stream, once from its beginning to its end: no header can lead back.
    """
    expected = {f"{published.folder}/{member}": aside / member for member in published.members}
    with tarfile.open(fileobj=stream, mode="r|") as archive:  # type: ignore[arg-type]
        for count, member in enumerate(archive):
            if count == _MOST_MEMBERS:
                raise CalgpError(f"has more than {_MOST_MEMBERS} members")
            archive.members = []  # tarfile keeps them all
            path = expected.get(member.name)
            content = archive.extractfile(member) if path is not None and member.isreg() else None
            if path is not None and content is not None:
                with content, path.open("wb") as out:
                    _copy(content, out)


def _copy(content: IO[bytes], out: IO[bytes]) -> None:
    """A sparse member has more bytes than the archive: they count, too."""
    left = _LARGEST_ARCHIVE
    while part := content.read(_STEP):
        left -= len(part)
        if left < 0:
            raise CalgpError(f"unpacks to more than {_LARGEST_ARCHIVE} bytes")
        out.write(part)
