"""The file formats of published image sets: idx (MNIST) and CIFAR's two versions.

A file is data, never a command: nothing in it is executed, and no header decides how much memory is taken.
"""

import gzip
import io
import math
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import numpy as np

from calgp.errors import CalgpError

from .pickles import Held, read_pickle

MAX_IDX_BYTES = 2**30  # bytes of an idx file's content: EMNIST's largest has 0.55 · 10⁹
MAX_IMAGES = 2**24  # images: each has two numbers of eight bytes besides its pixels
MAX_CIFAR_BYTES = 2**28  # bytes of a file of CIFAR: CIFAR-100's train file has 1.6 · 10⁸
MAX_NAMES_BYTES = 2**20  # bytes of a file of class names
_STEP = 2**20
_CIFAR = 3 * 32 * 32


def read_idx(source: Path | bytes) -> np.ndarray:
    """The uint8 array in an idx file, gzipped or not: its first bytes decide, not its name.

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
        raise CalgpError(f"{name} cannot be read ({error}); download or copy it again.") from error


def _idx_array(stream: IO[bytes] | gzip.GzipFile, name: str) -> np.ndarray:
    magic = _read(stream, 4)
    if len(magic) < 4 or magic[:3] != b"\x00\x00\x08" or not 1 <= magic[3] <= 4:
        raise CalgpError(
            f"Invalid idx file {name}: must start with 0000080N (uint8), but starts with {magic.hex()}; replace it."
        )
    header = _read(stream, 4 * magic[3])
    if len(header) < 4 * magic[3]:
        raise CalgpError(f"{name} ends inside its header; download or copy it again.")
    shape = struct.unpack(f">{magic[3]}I", header)
    size = math.prod(shape)
    if not 0 < size <= MAX_IDX_BYTES or shape[0] > MAX_IMAGES:
        raise CalgpError(
            f"Invalid shape {list(shape)} of {name}: must have 1 to {MAX_IDX_BYTES} bytes, at most {MAX_IMAGES} images."
        )
    content = _read(stream, size + 1)
    if len(content) != size:
        came = f"only {len(content)}" if len(content) < size else "more"
        raise CalgpError(f"{name} declares {size} bytes of content but holds {came}; download or copy it again.")
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
        raise CalgpError(f"{path} cannot be read ({error.strerror}); download or copy it again.") from error
    if len(content) > most:
        raise CalgpError(f"{path} is larger than {most} bytes, which no such published file is; replace it.")
    return content


def read_cifar_pickle(path: Path, labels: str) -> tuple[np.ndarray, np.ndarray]:
    """Images [N, 3, 32, 32] and the labels under the key `labels` of one batch of the Python version."""
    content = _cifar_dict(path)
    x, y = content.get("data"), content.get(labels)
    if not isinstance(x, np.ndarray) or x.ndim != 2 or x.shape[1] != _CIFAR:
        raise CalgpError(f"{path} has no 'data' of shape [N, {_CIFAR}], as CIFAR has; download or copy it again.")
    if not isinstance(y, list) or len(y) != len(x) or not all(type(q) is int and 0 <= q < 256 for q in y):
        raise CalgpError(f"{path} holds no {len(x)} labels under {labels!r}; download or copy it again.")
    return x.reshape(-1, 3, 32, 32).copy(), np.array(y, np.uint8)


def read_cifar_names(path: Path, key: str) -> tuple[str, ...]:
    """The class names under `key` of a `meta` file of the Python version."""
    names = _cifar_dict(path).get(key)
    texts = [name for name in names if isinstance(name, str | bytes)] if isinstance(names, list) else []
    if not texts or texts != names:
        raise CalgpError(f"{path} holds no class names under {key!r}; download or copy it again.")
    return tuple(name.decode("latin1") if isinstance(name, bytes) else name for name in texts)


def _cifar_dict(path: Path) -> dict[str, Held]:
    try:
        return read_pickle(bytes(read_file(path, MAX_CIFAR_BYTES)))
    except CalgpError as error:
        if str(path) in str(error):
            raise
        raise CalgpError(f"{path} is no CIFAR file: {error}; download or copy it again.") from error


def read_cifar_binary(path: Path, labels: int) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels of one binary batch; a record has `labels` label bytes, of which the last is the class."""
    content = read_file(path, MAX_CIFAR_BYTES)
    record = labels + _CIFAR
    if not (size := len(content)) or size % record:
        raise CalgpError(f"{path} has {size} bytes, no multiple of {record}, CIFAR's record; download it again.")
    records = np.frombuffer(content, np.uint8).reshape(-1, record)
    return records[:, labels:].reshape(-1, 3, 32, 32), records[:, labels - 1].copy()


def read_lines(path: Path) -> tuple[str, ...]:
    """The lines of a text file of class names, empty ones left out."""
    try:
        lines = read_file(path, MAX_NAMES_BYTES).decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise CalgpError(f"{path} is no text of class names ({error.reason}); download or copy it again.") from error
    return tuple(line.strip() for line in lines if line.strip())


def joined(parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Several batches as one."""
    images, labels = zip(*parts, strict=True)
    return np.concatenate(images), np.concatenate(labels)
