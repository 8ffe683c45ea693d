"""Download published image sets: checked before anything is put in place, and nothing is written outside the target.

`pooch` was tried: it sets no limit to the length of an answer or of what an archive unpacks to, so either may fill the
disk before a checksum is compared.
"""

import gzip
import hashlib
import http.client
import shutil
import tarfile
import tempfile
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from calgp.errors import CalgpError

from .source import data_directory
from .sources import open_source

Progress = Callable[[int, int], None]
_CHUNK = 2**16
_MAX_ARCHIVE = 2**28  # bytes, unpacked: CIFAR-10 and CIFAR-100 have 1.9 · 10⁸
_MAX_MEMBERS = 1000
_TIMEOUT = 60  # seconds without a byte


@dataclass(frozen=True)
class RemoteFile:
    """A published file: its name, exact size in bytes and MD5 (the sum that the publishers give)."""

    name: str
    size: int
    md5: str


@dataclass(frozen=True)
class Published:
    """The files of a set, where they are published, and the folder where they go.

    With `members`, each file is a tar archive, and only these members are taken out of it.
    """

    base_url: str
    files: tuple[RemoteFile, ...]
    folder: str
    members: tuple[str, ...] = ()


PUBLISHED: dict[str, Published] = {
    "mnist": Published(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        (
            RemoteFile("train-images-idx3-ubyte.gz", 9912422, "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
            RemoteFile("train-labels-idx1-ubyte.gz", 28881, "d53e105ee54ea40749a09fcbcd1e9432"),
            RemoteFile("t10k-images-idx3-ubyte.gz", 1648877, "9fb629c4189551a2d022fa330f9573f3"),
            RemoteFile("t10k-labels-idx1-ubyte.gz", 4542, "ec29112dd5afa0611ce80d1b7f02629c"),
        ),
        "MNIST/raw",
    ),
    "cifar10": Published(
        "https://www.cs.toronto.edu/~kriz/",
        (RemoteFile("cifar-10-python.tar.gz", 170498071, "c58f30108f718f92721af3b95e74349a"),),
        "cifar-10-batches-py",
        ("batches.meta", *(f"data_batch_{part}" for part in range(1, 6)), "test_batch"),
    ),
    "cifar100": Published(
        "https://www.cs.toronto.edu/~kriz/",
        (RemoteFile("cifar-100-python.tar.gz", 169001437, "eb9058c3a382ffc7106e4002c42a8d85"),),
        "cifar-100-python",
        ("meta", "train", "test"),
    ),
}


def download(
    name: str,
    directory: Path | None = None,
    *,
    base_url: str | None = None,
    progress: Progress = lambda done, total: None,
) -> Path:
    """Download the set `name` into `directory` (as for `data_directory`), and return the folder that holds it.

    Args:
        base_url: another host of the same files, a URL that ends with a slash.
        progress: called with (bytes so far, bytes in all) during the download.
    """
    published = _published(name)
    target = data_directory(directory) / published.folder
    try:
        target.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target, prefix=".download-") as aside:
            done, total = 0, sum(file.size for file in published.files)
            for file in published.files:
                url = (base_url or published.base_url) + file.name
                _download(file, url, Path(aside, file.name), lambda here, before=done: progress(before + here, total))
                done += file.size
            for path in unpack(published, Path(aside)):
                path.replace(target / path.name)
    except OSError as error:
        raise CalgpError(f"{target} cannot be written ({error}); name another folder with CALGP_DATA.") from error
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


def _download(file: RemoteFile, url: str, path: Path, progress: Callable[[int], None]) -> None:
    """One file to `path`; stops as soon as it is longer than published."""
    if urlsplit(url).scheme not in ("http", "https"):
        raise CalgpError(f"Invalid address {url}: must start with http:// or https://.")
    digest, done = hashlib.md5(usedforsecurity=False), 0
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT) as answer, path.open("wb") as out:  # noqa: S310 (checked above)
            while done <= file.size and (part := answer.read(_CHUNK)):
                out.write(part)
                digest.update(part)
                done += len(part)
                progress(min(done, file.size))
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise CalgpError(
            f"{url} could not be downloaded ({error}). Without a network, put the set's files into the data folder "
            f"by hand: loading the set says which."
        ) from error
    if (done, digest.hexdigest()) != (file.size, file.md5):
        raise CalgpError(
            f"{url} is not the published file (MD5 {digest.hexdigest()} of {done} bytes, expected {file.md5} of "
            f"{file.size}); nothing was kept. Try again later, or from another host."
        )


def unpack(published: Published, aside: Path) -> list[Path]:
    """The files to put in place: the downloaded ones, or the expected members of those."""
    if not published.members:
        return [aside / file.name for file in published.files]
    for file in published.files:
        try:
            with gzip.open(aside / file.name) as packed:
                _take_members(_Bounded(packed, _MAX_ARCHIVE), published, aside)
        except CalgpError as error:
            raise CalgpError(f"{file.name} {error}; nothing was kept.") from error
        except Exception as error:  # tarfile's readers of extended headers raise nearly everything on damaged archives
            raise CalgpError(f"{file.name} is no readable tar archive ({error}); nothing was kept.") from error
    paths = [aside / member for member in published.members]
    if absent := [path.name for path in paths if not path.exists()]:
        raise CalgpError(f"{published.files[0].name} does not hold {', '.join(absent)}; nothing was kept.")
    return paths


class _Bounded:
    """A stream that ends in an error after `limit` bytes, whatever the headers in it ask for."""

    def __init__(self, stream: gzip.GzipFile, limit: int) -> None:
        self.stream, self.left = stream, limit

    def read(self, size: int) -> bytes:
        part = self.stream.read(min(size, self.left + 1))
        self.left -= len(part)
        if self.left < 0:
            raise CalgpError(f"unpacks to more than {_MAX_ARCHIVE} bytes")
        return part


def _take_members(stream: _Bounded, published: Published, aside: Path) -> None:
    """Copy the expected regular files under names of our own, and nothing else.

    The archive is read as a stream, once from its beginning to its end: no header can lead back. Sparse files are left
    out: they have more bytes than the archive.
    """
    expected = {f"{published.folder}/{member}": aside / member for member in published.members}
    with tarfile.open(fileobj=stream, mode="r|") as archive:  # type: ignore[arg-type]
        for count, member in enumerate(archive):
            if count == _MAX_MEMBERS:
                raise CalgpError(f"has more than {_MAX_MEMBERS} members")
            archive.members = []  # tarfile keeps them all
            path = expected.get(member.name)
            regular = member.isreg() and not member.issparse()
            content = archive.extractfile(member) if path is not None and regular else None
            if path is not None and content is not None:
                with content, path.open("wb") as out:
                    shutil.copyfileobj(content, out)
