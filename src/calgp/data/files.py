"""Image files that can be opened by their number, in memory that does not grow with their content."""

import hashlib
import os
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, overload

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class FileNames(Sequence[str]):
    """File names in one piece of memory: their bytes, and eight more for the end of each.

    >>> FileNames.of(["cat/1.png", "dog/2.png"])[1]
    'dog/2.png'
    """

    joined: bytes
    ends: np.ndarray  # int64
    chosen: np.ndarray | None = None  # the numbers of the names that are meant; None means all

    @staticmethod
    def of(names: Iterable[str]) -> "FileNames":
        joined, ends = bytearray(), array("q")
        for name in names:
            joined += os.fsencode(name)
            ends.append(len(joined))
        return FileNames(bytes(joined), np.array(ends))

    def __len__(self) -> int:
        return len(self.ends if self.chosen is None else self.chosen)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        number = range(len(self))[index] if self.chosen is None else self.chosen[index]
        return os.fsdecode(self.joined[self.ends[number - 1] if number else 0 : self.ends[number]])

    def take(self, index: Tensor) -> "FileNames":
        return replace(self, chosen=index.numpy() if self.chosen is None else self.chosen[index.numpy()])


@dataclass(frozen=True, eq=False)
class ImageFiles(ABC):
    """Image files with their labels; a file is known by its number in this list, and none has been decoded."""

    names: FileNames
    lengths: np.ndarray  # int64, bytes a file
    labels: Tensor  # int64

    @property
    @abstractmethod
    def place(self) -> str:
        """The folder that holds the files, for messages."""

    @abstractmethod
    def open(self, number: int) -> Path | IO[bytes]:
        """What a decoder can read."""

    @abstractmethod
    def only(self, numbers: Tensor) -> "ImageFiles":
        """These files and no others, in this order, by absolute paths: small, for another process."""

    def columns(self, numbers: Tensor) -> dict[str, Any]:
        """The fields that all kinds of files have, of some files."""
        names = FileNames.of(self.names[number] for number in numbers.tolist())
        return {"names": names, "lengths": self.lengths[numbers.numpy()], "labels": self.labels[numbers]}

    def read_ahead(self, numbers: Tensor) -> None:  # noqa: B027
        """Hint that these files are next; most kinds of files have no use for it."""

    def digests(self, numbers: Tensor) -> np.ndarray:
        """Eight bytes a file (uint64): a hash of its name and length."""
        found = np.empty(len(numbers), np.uint64)
        for i, number in enumerate(numbers.tolist()):
            content = os.fsencode(self.names[number]) + b"\0%d" % self.lengths[number]
            found[i] = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
        return found


UNLABELLED = -1


@dataclass(frozen=True, eq=False)
class LooseFiles(ImageFiles):
    """Files of their own, by their paths."""

    root: Path  # of paths that are relative

    @staticmethod
    def of(paths: Sequence[Path]) -> "LooseFiles":
        """Any files: nobody says what they show."""
        lengths = np.array([path.stat().st_size for path in paths], np.int64)
        labels = torch.full((len(paths),), UNLABELLED)
        return LooseFiles(FileNames.of(map(str, paths)), lengths, labels, Path.cwd())

    @property
    def place(self) -> str:
        return str(self.root)

    def open(self, number: int) -> Path:
        return self.root / self.names[number]

    def only(self, numbers: Tensor) -> "LooseFiles":
        return replace(self, **self.columns(numbers), root=self.root.absolute())
