import io
import json
import os
import tarfile
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from calgp.data import Folder, load, shard_index
from calgp.data.files import UNLABELLED
from calgp.data.order import ShardOrder
from calgp.data.shard_index import ShardIndex, index_shard, load_index
from calgp.data.shards import Shards, shard_paths, write_shards
from calgp.errors import CalgpError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "calgp" / "shards"


def png(value: int, shape=(4, 4)) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.full(shape, value, np.uint8)).save(file, "PNG")
    return file.getvalue()


def write_tar(path: Path, members, **options) -> Path:
    """An archive of (name or TarInfo, content) pairs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", **options) as archive:
        for name, content in members:
            member = name if isinstance(name, tarfile.TarInfo) else tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def samples(count: int, first: int = 0):
    for i in range(first, first + count):
        yield f"{i:04}.png", png(i)
        yield f"{i:04}.cls", str(i % 2).encode()


@pytest.fixture
def animals(tmp_path) -> Path:
    for i in range(30):
        file = tmp_path / "animals" / ("cat" if i % 3 else "dog") / f"{i}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(png(i))
    return tmp_path / "animals"


def test_a_folder_goes_into_shards_and_comes_back(animals, tmp_path):
    out = tmp_path / "shards"
    assert write_shards(animals, out, images_per_shard=7) == {"train": 24, "test": 6}
    assert sorted(file.name for file in out.iterdir()) == [
        "classes.txt", "test-000000.tar", *(f"train-{i:06}.tar" for i in range(4))
    ]  # fmt: skip
    for split in ("train", "test"):
        before, after = Folder(animals).load(split), load(f"shards:{out}", split)
        assert after.classes == before.classes == ("cat", "dog")
        pairs = [
            sorted(zip(images.x[:].flatten(1).tolist(), images.y.tolist(), strict=True)) for images in (before, after)
        ]
        assert pairs[0] == pairs[1] and after.rows.equal(torch.arange(len(before)))
    assert after.names is not None and after.names[0].startswith("test-000000.tar/000000000.png")
    again = tmp_path / "again"
    write_shards(animals, again, images_per_shard=7)
    assert all(file.read_bytes() == (again / file.name).read_bytes() for file in out.iterdir())
    with pytest.raises(CalgpError, match="is not empty"):
        write_shards(animals, out, images_per_shard=7)
    with pytest.raises(CalgpError, match="images_per_shard=0"):
        write_shards(animals, tmp_path / "none", images_per_shard=0)


def test_shards_without_parts_are_split_as_a_folder_is(tmp_path):
    for i in range(3):
        write_tar(tmp_path / f"part-{i:02}.tar", samples(20, 20 * i))
    source = f"shards:{tmp_path}/part-{{00..02}}.tar"
    train, test = (load(source, split) for split in ("train", "test"))
    assert train.classes == ("0", "1") and test.y.bincount().tolist() == [6, 6]
    assert sorted(train.rows.tolist() + test.rows.tolist()) == list(range(60))
    for images in (train, test):
        assert images.x[:].amax((1, 2, 3)).tolist() == images.rows.tolist()
    assert train.checksum() == load(f"shards:{tmp_path}/part-*.tar", "train").checksum() != test.checksum()


def test_labels_are_also_read_from_json_and_names_from_classes(tmp_path):
    members = [
        ("a/x.y/1.json", json.dumps({"label": 2, "more": [1]}).encode()), ("a/x.y/1.JPG", png(7)),
        ("a/2.png", png(8)), ("a/2.seg.png", png(99)), ("a/2.json", b'{"cls": "0"}'), ("a/2.txt", b"words"),
        ("readme.md", b"words"), ("3.cls", b"1\n"), ("3.bmp", png(9)),
    ]  # fmt: skip
    write_tar(tmp_path / "train-0.tar", members)
    (tmp_path / "classes.txt").write_text("ant\nbee\ncow\n")
    images = load(f"shards:{tmp_path}", "train")
    assert images.classes == ("ant", "bee", "cow") and images.y.tolist() == [2, 0, 1]
    assert images.x[:,].amax((1, 2, 3)).tolist() == [7, 8, 9]
    assert [*images.names] == ["train-0.tar/a/x.y/1.jpg", "train-0.tar/a/2.png", "train-0.tar/3.bmp"]
    with pytest.raises(CalgpError, match=r"has no test images, only train"):
        load(f"shards:{tmp_path}", "test")
    (tmp_path / "classes.txt").write_text("ant\nbee\n")
    with pytest.raises(CalgpError, match="names 2 classes, but there are labels up to 2"):
        load(f"shards:{tmp_path}", "train")


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_are_read(tmp_path, form):
    name = "very/" * 40 + "long"
    path = write_tar(tmp_path / "train-0.tar", [(f"{name}.png", png(1)), (f"{name}.cls", b"1")], format=form)
    assert index_shard(path).joined.tobytes().decode() == f"train-0.tar/{name}.png"


def test_an_epoch_sees_each_image_once_shard_by_shard_in_windows():
    starts, window = (0, 40, 50, 150), 30
    rows = torch.arange(200)[torch.arange(200) % 5 > 0]  # what a hold-out leaves
    order = ShardOrder(starts, (), window).subset(rows)
    assert order.counts == (32, 8, 80, 40)
    epochs = [order.shuffle(160, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert epochs[0].equal(epochs[1]) and not epochs[0].equal(epochs[2])
    for epoch in epochs:
        assert epoch.sort().values.equal(torch.arange(160))
        shard = torch.bucketize(rows[epoch], torch.tensor(starts), right=True) - 1
        for number, count in enumerate(order.counts):
            at = (shard == number).nonzero().squeeze(1)
            assert at.max() // window - at.min() // window <= -(-count // window)  # it is visited once
            parts = [part.sort().values for part in epoch[at].split(torch.bincount(at // window).tolist())]
            forwards = torch.cat(parts)
            assert forwards.equal(epoch[at].sort().values) and not epoch[at].equal(forwards)


def test_the_index_is_kept_and_made_again_when_the_shard_changes(tmp_path, cache, monkeypatch):
    path = write_tar(tmp_path / "train-0.tar", samples(4))
    first = load_index(path)
    assert len(list(cache.iterdir())) == 1
    with monkeypatch.context() as patched:
        patched.setattr(shard_index, "index_shard", lambda path: pytest.fail("the index was there"))
        again = load_index(path)
    for field in fields(ShardIndex):
        assert np.array_equal(getattr(first, field.name), getattr(again, field.name))
    write_tar(path, samples(6))
    assert len(load_index(path).offsets) == 6
    next(cache.iterdir()).write_bytes(b"damaged")
    assert len(load_index(path).offsets) == 6
    os.utime(path, ns=(1, 1))
    assert len(load_index(path).offsets) == 6


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path, monkeypatch):
    path = write_tar(tmp_path / "train-0.tar", samples(4))
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert len(load_index(path).offsets) == 4


def link(kind: bytes, name: str, target: str) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


def test_links_and_devices_are_left_out_and_nothing_is_unpacked(tmp_path):
    members = [
        *samples(2),
        (link(tarfile.SYMTYPE, "8.png", "/etc/passwd"), b""), ("8.cls", b"0"),
        (link(tarfile.LNKTYPE, "9.png", "0001.png"), b""), ("9.cls", b"0"),
        (link(tarfile.FIFOTYPE, "10.png", ""), b""), ("10.cls", b"0"),
        ("../../out.png", png(5)), ("../../out.cls", b"1"),
    ]  # fmt: skip
    write_tar(tmp_path / "in" / "train-0.tar", members)
    before = sorted(tmp_path.rglob("*"))
    images = load(f"shards:{tmp_path / 'in'}", "train", workers=0)
    assert [*images.names] == [f"train-0.tar/{name}.png" for name in ("0000", "0001", "../../out")]
    assert images.x[2].max() == 5
    assert [file for file in sorted(tmp_path.rglob("*")) if "cache" not in str(file)] == before


def bad_archives():
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as archive:
        for name, content in samples(3):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    raw = whole.getvalue()
    long_header = tarfile.TarInfo("x")
    long_header.type, long_header.size = tarfile.GNUTYPE_LONGNAME, 2**32
    yield "text", b"no archive" * 200, "must be a tar file"
    yield "empty", b"", "must be a tar file|holds no images"
    yield "cut", raw[:1200], "must be a tar file"
    yield "endless", raw[: raw.rindex(b"ustar") - 257 + 1024], "it has no end"
    yield "header", raw[:2048] + b"?" * 512 + raw[2560:], "it has no end"
    yield "gzip", __import__("gzip").compress(raw), "must be a tar file that is not compressed"
    yield "long", long_header.tobuf() + b"\0" * 2048, "header or label of 4294967296 bytes"


@pytest.mark.parametrize(("name", "content", "message"), list(bad_archives()), ids=lambda value: str(value)[:8])
def test_archives_that_cannot_be_used_are_refused(tmp_path, name, content, message):
    (tmp_path / "train-0.tar").write_bytes(content)
    with pytest.raises(CalgpError, match=message):
        load(f"shards:{tmp_path}", "train")


@pytest.mark.parametrize("label", [b"cat", b"-1", b"", b"9" * 30, b"1.5"])
def test_labels_that_are_no_numbers_are_refused(tmp_path, label):
    path = write_tar(tmp_path / "train-0.tar", [("1.png", png(1)), ("1.cls", label)])
    with pytest.raises(CalgpError, match=r"Invalid label .* of train-0.tar/1.png: must be a whole number"):
        index_shard(path)
    for json_label in (b"[" * 100_000, b'{"label": 1e999}', b'{"label": 1.0}', b'{"label": null}'):
        path = write_tar(tmp_path / "train-0.tar", [("1.png", png(1)), ("1.json", json_label)])
        with pytest.raises(CalgpError, match="must be a whole number"):
            index_shard(path)


def test_an_image_without_a_label_is_named(tmp_path):
    """Where labels are needed; images alone can be predicted."""
    path = write_tar(tmp_path / "train-0.tar", [*samples(2), ("7.png", png(1)), ("8.cls", b"1")])
    with pytest.raises(CalgpError, match=r"train-0.tar/7.png in .* has no label; put 7.cls or 7.json"):
        load(f"shards:{tmp_path}", "train")
    assert index_shard(path).labels[-1] == UNLABELLED


def test_a_shard_that_is_cut_off_later_and_a_damaged_image_are_named(tmp_path):
    damaged = [("7.png", png(1)[:50]), ("7.cls", b"1")]
    path = write_tar(tmp_path / "train-0.tar", [*samples(6), *damaged, *samples(6, 8)])
    images = load(f"shards:{tmp_path}", "train", workers=2, size=4, colour="grey")  # no header is read
    with pytest.raises(CalgpError, match=r"1 of the images in .* cannot be read: train-0.tar/7.png is not a"):
        list(images.read(images.parts(5)))
    os.truncate(path, 9000)
    with pytest.raises(CalgpError, match=r"train-0.tar/0013.png is cut off: .* has changed since it was indexed"):
        images.x[-1]


def test_unreadable_images_of_shards_can_be_left_out(tmp_path):
    damaged = [("7.png", png(1)[:50]), ("7.cls", b"1"), ("8.png", b"no image"), ("8.cls", b"0")]
    write_tar(tmp_path / "train-0.tar", [*samples(6), *damaged, *samples(6, 9)])
    with pytest.raises(CalgpError, match=r"2 of the images in .*/7.png .*/8.png .*--skip-unreadable"):
        load(f"shards:{tmp_path}", "train")
    images = load(f"shards:{tmp_path}", "train", skip_unreadable=True)
    assert images.rows.tolist() == [*range(6), *range(8, 14)]
    assert sum(images.order.counts) == len(images) == 12  # type: ignore[attr-defined]
    assert images.split_note.endswith("2 unreadable images are left out.")


def test_validation_shards_are_the_hold_out_or_the_test_part(tmp_path):
    for i, part in enumerate(("train", "val", "test")):
        write_tar(tmp_path / f"{part}-000.tar", samples(4, 4 * i))
    held_out = Shards(tmp_path).validation()
    assert held_out is not None and held_out.rows.tolist() == [4, 5, 6, 7]
    assert held_out.take(torch.tensor([2, 0])).x[:].amax((1, 2, 3)).tolist() == [6, 4]
    (tmp_path / "test-000.tar").unlink()
    assert Shards(tmp_path).validation() is None
    assert load(f"shards:{tmp_path}", "test").x[:].amax((1, 2, 3)).tolist() == [4, 5, 6, 7]


def test_patterns_name_files(tmp_path):
    for i in (8, 9, 10):
        (tmp_path / f"a-{i:03}.tar").touch()
    assert [path.name for path in shard_paths(tmp_path / "a-{008..010}.tar")] == [f"a-{i:03}.tar" for i in (8, 9, 10)]
    assert len(shard_paths(tmp_path / "a-*.tar")) == 3 and shard_paths(tmp_path / "b-{0..3}.tar") == []
    with pytest.raises(CalgpError, match=r"a-011.tar is missing; 3 of 4 are there"):
        shard_paths(tmp_path / "a-{008..011}.tar")
    for pattern in ("a-{5..1}.tar", "a-{0..999999999999}.tar", "{0..9999}{0..9999}"):
        with pytest.raises(CalgpError, match="must name 1 to 100000 shards"):
            shard_paths(tmp_path / pattern)
    with pytest.raises(CalgpError, match="There are no shards"):
        load(f"shards:{tmp_path}/none-*.tar", "train")
    assert not Shards(tmp_path / "none.tar").is_available() and Shards(tmp_path).is_available()
