"""Pictures that stay in their files until they are asked for."""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, overload

import numpy as np
import torch
from torch import Tensor

from calgp.errors import CalgpError

from .decode import read_picture, survey
from .images import Colour, Images
from .reading import ANYWHERE, Ahead, Order

SHOWN = 10


@dataclass(frozen=True, eq=False)
class Names(Sequence[str]):
    """File names in one piece of memory: their bytes, and eight for the end of each."""

    joined: bytes
    ends: np.ndarray  # int64
    places: np.ndarray | None = None  # of the names that are meant; None means all

    @staticmethod
    def of(names: Iterable[str]) -> Names:
        joined, ends = bytearray(), Growing()
        for name in names:
            joined += os.fsencode(name)
            ends.append(len(joined))
        return Names(bytes(joined), ends.array())

    def __len__(self) -> int:
        return len(self.ends if self.places is None else self.places)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        place = range(len(self))[index] if self.places is None else self.places[index]
        return os.fsdecode(self.joined[self.ends[place - 1] if place else 0 : self.ends[place]])

    def take(self, index: Tensor) -> Names:
        return replace(self, places=index.numpy() if self.places is None else self.places[index.numpy()])


class Growing:
    """Whole numbers, eight bytes each, added one by one."""

    def __init__(self) -> None:
        self.values, self.count = np.empty(1024, np.int64), 0

    def append(self, value: int) -> None:
        if self.count == len(self.values):
            self.values = np.concatenate([self.values, np.empty_like(self.values)])
        self.values[self.count] = value
        self.count += 1

    def array(self) -> np.ndarray:
        return self.values[: self.count].copy()


@dataclass(frozen=True, eq=False)
class Files(ABC):
    """Picture files that can be opened by their number: names and lengths are known, nothing is decoded."""

    names: Names
    lengths: np.ndarray  # int64, bytes a file

    @property
    @abstractmethod
    def where(self) -> str:
        """What holds the files, for messages."""

    @abstractmethod
    def open(self, place: int) -> Path | IO[bytes]:
        """What a decoder can read."""

    def ready(self, places: Tensor) -> None:  # noqa: B027
        """These files are next; nothing for most."""

    def digests(self) -> np.ndarray:
        """Eight bytes a file (uint64), of its name and its length."""
        found = np.empty(len(self.names), np.uint64)
        for place, length in enumerate(self.lengths.tolist()):
            told = os.fsencode(self.names[place]) + b"\0%d" % length
            found[place] = int.from_bytes(hashlib.blake2b(told, digest_size=8).digest(), "little")
        return found


@dataclass(frozen=True, eq=False)
class Streamed:
    """Pictures that are decoded when they are asked for: to `Images`, a uint8 tensor [N, C, H, W] that takes no memory.

    `x[index]` is a tensor; `index_select` is a part that stays in its files.
    """

    files: Files
    places: Tensor
    digests: np.ndarray
    form: tuple[int, int, int]  # of every picture: channels, height, width
    size: int | None
    colour: Colour

    dtype = torch.uint8
    ndim = 4

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.places), *self.form))

    def numel(self) -> int:
        return self.shape.numel()

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int | slice | Tensor) -> Tensor:
        if isinstance(index, int):
            return self[torch.tensor([range(len(self))[index]])][0]
        return self._decoded(self.places[index])

    def index_select(self, dim: int, index: Tensor) -> Streamed:
        return replace(self, places=self.places[index], digests=self.digests[index.numpy()])

    def _decoded(self, places: Tensor) -> Tensor:
        """What cannot be read is named in one error, after all were tried."""
        self.files.ready(places)
        pictures, bad = np.empty((len(places), *self.form), np.uint8), list[str]()
        for i, place in enumerate(places.tolist()):
            name = self.files.names[place]
            try:
                array = read_picture(self.files.open(place), name=name, size=self.size, colour=self.colour)
            except CalgpError as error:
                bad.append(str(error))
                continue
            if array.shape != self.form:
                found, wanted = (f"{shape[2]}×{shape[1]}" for shape in (array.shape, self.form))
                bad.append(f"{name} is {found}, the others are {wanted}; --size brings all to one")
                continue
            pictures[i] = array
        if bad:
            raise CalgpError(unreadable(self.files.where, bad))
        return torch.from_numpy(pictures)


def streamed(
    files: Files,
    y: Tensor,
    rows: Tensor,
    classes: tuple[str, ...],
    *,
    form: tuple[int, int, int],
    size: int | None,
    colour: Colour,
    workers: int,
    order: Order = ANYWHERE,
) -> Images:
    """The files at `rows` as images that are read by `workers` processes; `y` are the labels of all files."""
    x = Streamed(files, torch.arange(len(files.names)), files.digests(), form, size, colour).index_select(0, rows)
    names = files.names.take(rows)
    return Images(x, y[rows], classes, rows, names, order.kept(rows), Ahead(workers))  # type: ignore[arg-type]


def settled(
    parts: Sequence[Files], size: int | None, colour: Colour | None
) -> tuple[tuple[int, int, int] | None, Colour]:
    """(channels, height, width) and colour that all files can have; headers are read where `size` or `colour` is None.

    All must have one size where none is given; they are grey where every one is. Files without a header that can be
    read count for nothing here: decoding will name them. The form is None where no file has such a header.
    """
    side = None if size is None else (size, size)
    if side is None or colour is None:
        shapes, greys = None, True
        for files, place in ((part, place) for part in parts for place in range(len(part.names))):
            header = survey(files.open(place))
            if header is None:
                continue
            greys = greys and header[0]
            if shapes is None:
                shapes = (header[1], files, place)
            elif size is None and header[1] != shapes[0]:
                raise CalgpError(_different_sizes(_told(*shapes[1:]), shapes[0], _told(files, place), header[1]))
        colour = colour or ("grey" if greys else "rgb")
        if side is None:
            side = None if shapes is None else (shapes[0][1], shapes[0][0])
    return (None if side is None else (1 if colour == "grey" else 3, *side)), colour


def unreadable(where: str, bad: list[str], remedy: str = "Repair or remove them.") -> str:
    more = f", and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
    return f"{len(bad)} of the pictures in {where} cannot be read: {'; '.join(bad[:SHOWN])}{more}. {remedy}"


def _told(files: Files, place: int) -> str:
    return f"{files.where}/{files.names[place]}"


def _different_sizes(first: str, expected: tuple[int, int], other: str, shape: tuple[int, int]) -> str:
    return (
        f"Pictures differ in size: {first} is {expected[0]}×{expected[1]}, {other} is {shape[0]}×{shape[1]}; "
        f"pass --size (size=…) to bring all to one."
    )


def sized(names: Iterator[tuple[str, int]]) -> tuple[Names, np.ndarray]:
    """Names with lengths, compactly."""
    lengths = Growing()

    def each() -> Iterator[str]:
        for name, length in names:
            lengths.append(length)
            yield name

    return Names.of(each()), lengths.array()
