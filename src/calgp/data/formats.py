"""The file formats of published image sets: idx (MNIST) and CIFAR's two versions.

A file is data, never a command: nothing in it is executed, and no header decides how much memory is taken.
"""

from __future__ import annotations

import gzip
import io
import math
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from calgp.errors import CalgpError

from .pickles import read_pickle

MAXIMUM = 2**30  # bytes of an idx file's content: EMNIST's largest has 0.55 · 10⁹
MOST = 2**24  # pictures: each has two numbers of eight bytes besides its pixels
LARGEST_CIFAR = 2**28  # bytes of a file of CIFAR: CIFAR-100's train file has 1.6 · 10⁸
LARGEST_NAMES = 2**20  # bytes of a file of class names
_STEP = 2**20
_CIFAR = 3 * 32 * 32


def read_idx(source: Path | bytes) -> np.ndarray:
    """The uint8 array in an idx file, gzipped or not (told by its first bytes, not its name).

    >>> read_idx(bytes([0, 0, 8, 1, 0, 0, 0, 3]) + b"abc")
    array([97, 98, 99], dtype=uint8)
    """
    name = "the idx data" if isinstance(source, bytes) else str(source)
    try:
        with io.BytesIO(source) if isinstance(source, bytes) else source.open("rb") as file:
            zipped = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            return _idx_array(gzip.GzipFile(fileobj=file) if zipped else file, name)
    except (OSError, EOFError, zlib.error) as error:
        raise CalgpError(f"{name} cannot be read ({error}); fetch or copy it anew.") from error


def _idx_array(stream: IO[bytes] | gzip.GzipFile, name: str) -> np.ndarray:
    magic = _read(stream, 4)
    if len(magic) < 4 or magic[:3] != b"\x00\x00\x08" or not 1 <= magic[3] <= 4:
        raise CalgpError(
            f"{name} is no idx file of uint8: it starts with {magic.hex()}, expected 0000080N; replace it."
        )
    header = _read(stream, 4 * magic[3])
    if len(header) < 4 * magic[3]:
        raise CalgpError(f"{name} ends inside its header; fetch or copy it anew.")
    shape = struct.unpack(f">{magic[3]}I", header)
    size = math.prod(shape)
    if not 0 < size <= MAXIMUM or shape[0] > MOST:
        raise CalgpError(
            f"{name} declares the shape {list(shape)}; calgp reads 1 to {MAXIMUM} bytes of content, {MOST} pictures."
        )
    content = _read(stream, size + 1)
    if len(content) != size:
        came = f"only {len(content)}" if len(content) < size else "more"
        raise CalgpError(f"{name} declares {size} bytes of content but holds {came}; fetch or copy it anew.")
    return np.frombuffer(content, np.uint8).reshape(shape)


def _read(stream: IO[bytes] | gzip.GzipFile, size: int) -> bytearray:
    """Up to `size` bytes, taking memory only as they come: `size` is the file's claim."""
    content = bytearray()
    while len(content) < size and (part := stream.read(min(_STEP, size - len(content)))):
        content += part
    return content


def read_file(path: Path, most: int) -> bytearray:
    """A whole file of at most `most` bytes."""
    try:
        with path.open("rb") as file:
            content = _read(file, most + 1)
    except OSError as error:
        raise CalgpError(f"{path} cannot be read ({error.strerror}); fetch or copy it anew.") from error
    if len(content) > most:
        raise CalgpError(f"{path} is larger than {most} bytes, which no such published file is; replace it.")
    return content


def read_cifar_pickle(path: Path, labels: str) -> tuple[np.ndarray, np.ndarray]:
    """Pictures [N, 3, 32, 32] and the labels under the key `labels` of one batch of the Python version."""
    content = _cifar_dict(path)
    x, y = content.get("data"), content.get(labels)
    if not isinstance(x, np.ndarray) or x.ndim != 2 or x.shape[1] != _CIFAR:
        raise CalgpError(f"{path} holds no 'data' of shape [N, {_CIFAR}], as CIFAR batches do; fetch or copy it anew.")
    if not isinstance(y, list) or len(y) != len(x) or not all(type(q) is int and 0 <= q < 256 for q in y):
        raise CalgpError(f"{path} holds no {len(x)} labels under {labels!r}; fetch or copy it anew.")
    return x.reshape(-1, 3, 32, 32).copy(), np.array(y, np.uint8)


def read_cifar_names(path: Path, key: str) -> tuple[str, ...]:
    """The class names under `key` of a `meta` file of the Python version."""
    names = _cifar_dict(path).get(key)
    if not isinstance(names, list) or not names or not all(isinstance(name, str | bytes) for name in names):
        raise CalgpError(f"{path} holds no class names under {key!r}; fetch or copy it anew.")
    return tuple(name.decode("latin1") if isinstance(name, bytes) else name for name in names)


def _cifar_dict(path: Path) -> dict[str, Any]:
    try:
        return read_pickle(bytes(read_file(path, LARGEST_CIFAR)))
    except CalgpError as error:
        if str(path) in str(error):
            raise
        raise CalgpError(f"{path} is no CIFAR file: {error}; fetch or copy it anew.") from error


def read_cifar_binary(path: Path, labels: int) -> tuple[np.ndarray, np.ndarray]:
    """Pictures and labels of one binary batch; a record has `labels` label bytes, of which the last is the class."""
    content = read_file(path, LARGEST_CIFAR)
    record = labels + _CIFAR
    if not content or len(content) % record:
        raise CalgpError(f"{path} has {len(content)} bytes, no multiple of {record}, CIFAR's record; fetch it anew.")
    records = np.frombuffer(content, np.uint8).reshape(-1, record)
    return records[:, labels:].reshape(-1, 3, 32, 32), records[:, labels - 1].copy()


def read_lines(path: Path) -> tuple[str, ...]:
    """The lines of a text file of class names, empty ones left out."""
    try:
        lines = read_file(path, LARGEST_NAMES).decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise CalgpError(f"{path} is no text of class names ({error.reason}); fetch or copy it anew.") from error
    return tuple(line.strip() for line in lines if line.strip())


def joined(parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Several batches as one."""
    pictures, labels = zip(*parts, strict=True)
    return np.concatenate(pictures), np.concatenate(labels)
