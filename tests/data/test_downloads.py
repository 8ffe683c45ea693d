import gzip
import hashlib
import io
import sys
import tarfile
import threading
import tracemalloc
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from calgp.data import download
from calgp.data.downloads import PUBLISHED, Published, RemoteFile
from calgp.errors import CalgpError


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


class Host(ThreadingHTTPServer):
    def handle_error(self, request, client_address):
        """A client that has seen enough may hang up; anything else is an error."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder and the address that serves it."""
    folder = tmp_path / "host"
    folder.mkdir()
    server = Host(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


def remote(path: Path) -> RemoteFile:
    content = path.read_bytes()
    return RemoteFile(path.name, len(content), hashlib.md5(content, usedforsecurity=False).hexdigest())


def archive(path: Path, members: dict[str, bytes | tarfile.TarInfo]) -> Published:
    """A tar archive of `members` at `path`, published as CIFAR-100."""
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members.items():
            info = content if isinstance(content, tarfile.TarInfo) else tarfile.TarInfo(name)
            data = b"" if isinstance(content, tarfile.TarInfo) else content
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return Published("", (remote(path),), "cifar-100-python", ("meta", "train", "test"))


def link(name: str, target: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = tarfile.SYMTYPE, target
    return info


RIGHT = {f"cifar-100-python/{name}": name.encode() for name in ("meta", "train", "test")}


def everything(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())


def test_single_files_are_put_where_mnist_is_looked_for(host, monkeypatch, tmp_path):
    folder, url = host
    files = [folder / file.name for file in PUBLISHED["mnist"].files]
    for path in files:
        path.write_bytes(gzip.compress(path.name.encode()))
    monkeypatch.setitem(PUBLISHED, "mnist", Published("", tuple(map(remote, files)), "MNIST/raw"))
    seen = []
    target = download("mnist", tmp_path / "data", base_url=url, progress=lambda *step: seen.append(step))
    assert target == tmp_path / "data" / "MNIST" / "raw"
    assert {path.name: path.read_bytes() for path in target.iterdir()} == {
        path.name: path.read_bytes() for path in files
    }
    total = sum(path.stat().st_size for path in files)
    assert seen[-1] == (total, total) and seen == sorted(seen)


def test_only_expected_members_leave_an_archive(host, monkeypatch, tmp_path):
    folder, url = host
    strange = {
        "../escaped": b"x",
        str(tmp_path / "absolute"): b"x",
        "cifar-100-python/../../climbed": b"x",
        "cifar-100-python/readme": b"x",
        "link": link("cifar-100-python/more", "/etc/passwd"),
    }
    published = archive(folder / "a.tar.gz", strange | RIGHT)
    monkeypatch.setitem(PUBLISHED, "cifar100", published)
    before = everything(tmp_path)
    target = download("cifar100", tmp_path / "data", base_url=url)
    assert everything(target) == ["meta", "test", "train"] and (target / "train").read_bytes() == b"train"
    assert set(everything(tmp_path)) - set(before) == {
        f"data/cifar-100-python/{name}" for name in ("meta", "test", "train")
    }


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"cifar-100-python/meta": b"meta"}, "does not hold train, test"),
        (RIGHT | {"cifar-100-python/train": link("cifar-100-python/train", "/etc/passwd")}, "does not hold train"),
    ],
)
def test_an_archive_without_its_files_leaves_nothing(host, monkeypatch, tmp_path, members, message):
    folder, url = host
    monkeypatch.setitem(PUBLISHED, "cifar100", archive(folder / "a.tar.gz", members))
    with pytest.raises(CalgpError, match=message):
        download("cifar100", tmp_path / "data", base_url=url)
    assert everything(tmp_path / "data") == []


def test_members_that_are_too_large_are_refused(host, monkeypatch, tmp_path):
    folder, url = host
    monkeypatch.setitem(PUBLISHED, "cifar100", archive(folder / "a.tar.gz", RIGHT))
    monkeypatch.setattr("calgp.data.downloads._MAX_ARCHIVE", 4)
    with pytest.raises(CalgpError, match="more than 4 bytes"):
        download("cifar100", tmp_path / "data", base_url=url)
    assert everything(tmp_path / "data") == []


def test_what_is_no_archive_is_refused(host, monkeypatch, tmp_path):
    folder, url = host
    for content in (b"<html>", gzip.compress(b"x" * 2000), gzip.compress(b"x" * 2000)[:-9]):
        (folder / "a.tar.gz").write_bytes(content)
        published = Published("", (remote(folder / "a.tar.gz"),), "cifar-100-python", ("meta",))
        monkeypatch.setitem(PUBLISHED, "cifar100", published)
        with pytest.raises(CalgpError):
            download("cifar100", tmp_path / "data", base_url=url)
    assert everything(tmp_path / "data") == []


@pytest.mark.parametrize(
    "change", [lambda b: b[:-1], lambda b: b + b"x" * 10**6, lambda b: b[:-1] + bytes([b[-1] ^ 1])]
)
def test_another_file_than_the_published_one_replaces_nothing(host, monkeypatch, tmp_path, change):
    folder, url = host
    monkeypatch.setitem(PUBLISHED, "cifar100", archive(folder / "a.tar.gz", RIGHT))
    download("cifar100", tmp_path / "data", base_url=url)
    (folder / "a.tar.gz").write_bytes(change((folder / "a.tar.gz").read_bytes()))
    with pytest.raises(CalgpError, match="is not the published file"):
        download("cifar100", tmp_path / "data", base_url=url)
    assert len(everything(tmp_path / "data")) == 3


def test_no_answer_says_what_to_do(host, tmp_path):
    _, url = host
    with pytest.raises(CalgpError, match=r"could not be downloaded .*404.*by hand"):
        download("mnist", tmp_path, base_url=url)
    with pytest.raises(CalgpError, match="could not be downloaded"):
        download("mnist", tmp_path, base_url="http://127.0.0.1:1/")
    with pytest.raises(CalgpError, match="must start with http"):
        download("mnist", tmp_path, base_url="file:///etc/")


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CalgpError, match="cannot be written"):
        download("mnist", tmp_path / "file")


@pytest.mark.parametrize(
    ("name", "message"),
    [("notmnist", "images-idx3-ubyte.gz"), ("digits", "needs no download"), ("minst", "did you mean 'mnist'")],
)
def test_what_cannot_be_fetched_is_explained(name, message):
    with pytest.raises(CalgpError, match=message):
        download(name)


def special(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE])
def test_a_member_that_is_no_regular_file_is_not_taken(host, monkeypatch, tmp_path, kind):
    folder, url = host
    strange = RIGHT | {"cifar-100-python/train": special("cifar-100-python/train", kind, "/etc/passwd")}
    monkeypatch.setitem(PUBLISHED, "cifar100", archive(folder / "a.tar.gz", strange))
    with pytest.raises(CalgpError, match="does not hold train"):
        download("cifar100", tmp_path / "data", base_url=url)
    assert everything(tmp_path / "data") == []


def test_countless_members_are_refused(host, monkeypatch, tmp_path):
    folder, url = host
    many = {f"cifar-100-python/{number}": b"" for number in range(1001)}
    monkeypatch.setitem(PUBLISHED, "cifar100", archive(folder / "a.tar.gz", many | RIGHT))
    with pytest.raises(CalgpError, match="more than 1000 members"):
        download("cifar100", tmp_path / "data", base_url=url)
    assert everything(tmp_path / "data") == []


def test_a_bomb_in_an_extended_header_takes_no_more_than_the_archive_may(host, monkeypatch, tmp_path):
    """tarfile reads the text of such a header whole, however much it claims."""
    folder, url = host
    header = special("cifar-100-python/train", tarfile.XHDTYPE)
    header.size = 2**33
    path = folder / "a.tar.gz"
    path.write_bytes(gzip.compress(header.tobuf(tarfile.GNU_FORMAT) + bytes(40_000_000), 1))
    monkeypatch.setattr("calgp.data.downloads._MAX_ARCHIVE", 2**20)
    monkeypatch.setitem(PUBLISHED, "cifar100", Published("", (remote(path),), "cifar-100-python", ("meta",)))
    tracemalloc.start()
    with pytest.raises(CalgpError, match="unpacks to more than 1048576 bytes"):
        download("cifar100", tmp_path / "data", base_url=url)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 * 2**20
    assert everything(tmp_path / "data") == []
