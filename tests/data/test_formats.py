import contextlib
import gzip
import os
import pickle
import random
import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calgp.data.formats import read_cifar_binary, read_cifar_names, read_cifar_pickle, read_idx, read_lines
from calgp.errors import CalgpError

X = np.random.default_rng(0).integers(0, 256, (5, 3, 32, 32), dtype=np.uint8)
Y = np.array([0, 9, 3, 1, 2], np.uint8)


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


@pytest.mark.parametrize("array", [Y, X[:, 0], X])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_idx_is_read_packed_or_not_whatever_its_name(array, pack, tmp_path):
    path = tmp_path / "file.gz"
    path.write_bytes(pack(idx(array)))
    assert np.array_equal(read_idx(path), array)
    assert np.array_equal(read_idx(path.read_bytes()), array)
    assert read_idx(path).flags.writeable


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "starts with"),
        (b"\x00\x00", "starts with"),
        (b"<html>not found</html>", "starts with 3c68746d"),
        (b"\x00\x00\x0d\x01\x00\x00\x00\x01abcd", "Invalid idx file"),
        (b"\x00\x00\x08\x00", "Invalid idx file"),
        (b"\x00\x00\x08\x09", "Invalid idx file"),
        (b"\x00\x00\x08\x02\x00\x00", "ends inside its header"),
        (idx(Y)[:-1], "only 4"),
        (idx(Y) + b"a", "holds more"),
        (b"\x00\x00\x08\x01\x00\x00\x00\x00", "Invalid shape"),
        (b"\x00\x00\x08\x03" + b"\xff" * 12, "Invalid shape"),
    ],
)
def test_wrong_idx_files_are_refused_by_name(content, message, pack, tmp_path):
    path = tmp_path / "labels"
    path.write_bytes(pack(content))
    with pytest.raises(CalgpError, match=message) as caught:
        read_idx(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(CalgpError, match="cannot be read"):
            read_idx(path)
        with pytest.raises(CalgpError, match="cannot be read"):
            read_cifar_binary(path, 1)


def test_a_header_takes_no_memory():
    claim = b"\x00\x00\x08\x01" + struct.pack(">I", 2**30)  # one GiB, and then nothing
    bomb = gzip.compress(idx(Y) + bytes(2**26))  # five labels, and then 64 MiB of zeros
    tracemalloc.start()
    for content in (claim, gzip.compress(claim), bomb):
        with pytest.raises(CalgpError):
            read_idx(content)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**23


def test_damaged_idx_raises_only_our_error():
    chance = random.Random(1)  # noqa: S311
    refused = 0
    for pack in (bytes, gzip.compress):
        right = pack(idx(X[:2, 0]))
        for _ in range(500):
            broken = bytearray(right[: chance.randrange(len(right) + 1)] if chance.random() < 0.5 else right)
            if broken:
                broken[chance.randrange(min(len(broken), 40))] ^= 1 << chance.randrange(8)
            try:  # any other error fails the test; a flipped pixel is still a picture
                assert read_idx(bytes(broken)).dtype == np.uint8
            except CalgpError:
                refused += 1
    assert refused > 500


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_cifars_two_versions_hold_the_same(protocol, tmp_path):
    python, binary = tmp_path / "test_batch", tmp_path / "test_batch.bin"
    content = {"data": X.reshape(5, -1), "labels": Y.tolist(), "coarse_labels": [7] * 5}
    python.write_bytes(pickle.dumps(content, protocol))
    for labels in (1, 2):
        coarse = np.full((5, labels - 1), 7, np.uint8)
        binary.write_bytes(np.hstack([coarse, Y[:, None], X.reshape(5, -1)]).tobytes())
        for x, y in (read_cifar_pickle(python, "labels"), read_cifar_binary(binary, labels)):
            assert np.array_equal(x, X) and np.array_equal(y, Y)
            assert x.flags.writeable


@pytest.mark.parametrize(
    "content",
    [
        {},
        [1],
        {"labels": [1]},
        {"data": X.reshape(5, -1)},
        {"data": X.reshape(5, -1), "labels": [1]},
        {"data": X.reshape(5, -1), "labels": ["a"] * 5},
        {"data": X.reshape(5, -1), "labels": [-1] * 5},
        {"data": X.reshape(5, -1), "labels": [2**70] * 5},
        {"data": X.reshape(-1), "labels": [1] * 5},
        {"data": X[:, 0].reshape(5, -1), "labels": [1] * 5},
        {"data": "abc", "labels": [1] * 3},
    ],
)
def test_wrong_cifar_batches_are_refused_by_name(content, tmp_path):
    path = tmp_path / "data_batch_1"
    path.write_bytes(pickle.dumps(content, 2))
    with pytest.raises(CalgpError, match=r"data_batch_1.*download or copy it again"):
        read_cifar_pickle(path, "labels")
    with pytest.raises(CalgpError, match="data_batch_1"):
        read_cifar_names(path, "label_names")


def test_wrong_binary_batches_are_refused(tmp_path):
    path = tmp_path / "train.bin"
    for content in (b"", b"a" * 3072, b"a" * 3074):
        path.write_bytes(content)
        with pytest.raises(CalgpError, match="no multiple of 3073"):
            read_cifar_binary(path, 1)


def test_class_names(tmp_path):
    path = tmp_path / "names"
    path.write_bytes(pickle.dumps({"label_names": ["cat", b"dog"]}, 3))
    assert read_cifar_names(path, "label_names") == ("cat", "dog")
    path.write_bytes(b"cat\r\ndog\n\n")
    assert read_lines(path) == ("cat", "dog")
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(CalgpError, match="no text"):
        read_lines(path)


def test_a_gzip_bomb_takes_no_more_than_it_declares():
    bomb = gzip.compress(idx(Y) + bytes(50_000_000), 1)
    tracemalloc.start()
    with pytest.raises(CalgpError, match="declares 5 bytes of content but holds more"):
        read_idx(bomb)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000  # a bomb of 50 MB


def test_more_images_than_any_set_has_are_refused_by_the_header():
    with pytest.raises(CalgpError, match="16777216 images"):
        read_idx(bytes([0, 0, 8, 1]) + struct.pack(">I", 2**24 + 1))


@pytest.mark.parametrize(
    "read", [lambda path: read_cifar_pickle(path, "labels"), lambda path: read_cifar_binary(path, 1)]
)
def test_a_cifar_file_of_any_size_is_refused_in_little_memory(tmp_path, monkeypatch, read):
    monkeypatch.setattr("calgp.data.formats.MAX_CIFAR_BYTES", 2**20)
    (tmp_path / "file").touch()
    os.truncate(tmp_path / "file", 2**40)  # a sparse file: it takes no room
    tracemalloc.start()
    with pytest.raises(CalgpError, match="larger than 1048576 bytes"):
        read(tmp_path / "file")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5 * 2**20


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=64), st.booleans())
def test_any_bytes_are_an_array_or_refused(data, packed):
    for content in (data, b"\x00\x00\x08" + data):
        with contextlib.suppress(CalgpError):
            assert read_idx(gzip.compress(content) if packed else content).dtype == np.uint8
