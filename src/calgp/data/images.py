"""Labelled pictures, and the parts of them that training and evaluation use."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from calgp.errors import CalgpError

from .reading import ANYWHERE, IN_MEMORY, Index, Order, Reading

Colour = Literal["grey", "rgb"]
_COLOURS = get_args(Colour)
LARGEST = 4096  # pixels a side, for what is resized


@dataclass(frozen=True, eq=False)
class Images:
    """Pictures `x` (uint8 [N, C, H, W]) with labels `y` (int64 [N]) that count into `classes`.

    `rows` is each picture's index in the data set that it came from. It keys the random masks, so it stays with the
    picture through subsets, splits and shuffles. `names` are file names, where there were files.

    `x` is a tensor, or stands for one while its pictures stay in their files (`Streamed`): `read` comes by them in
    either case, and `order` is the order in which they are trained on.
    """

    x: Tensor
    y: Tensor
    classes: tuple[str, ...]
    rows: Tensor
    names: Sequence[str] | None = None
    order: Order = ANYWHERE
    reading: Reading = IN_MEMORY

    def __post_init__(self) -> None:
        _check_tensors(self)
        _check_labels(self)

    @classmethod
    def of(cls, x: Tensor, y: Tensor, classes: tuple[str, ...], *, names: tuple[str, ...] | None = None) -> Images:
        """A whole data set: its rows are 0 … N - 1."""
        return cls(x, y, classes, torch.arange(len(x)), names)

    def __len__(self) -> int:
        return len(self.x)

    def pixels(self, index: slice | Tensor = slice(None)) -> Tensor:
        """Pictures as float32 [n, C, H, W] in [0, 1]: x / 255 and no other normalisation, as the paper's authors."""
        return unit(self.x[index])

    def read(self, indices: Iterable[Index]) -> Iterator[tuple[Index, Tensor]]:
        """Each index with its pictures (uint8), in turn; those in files are read ahead of their turn."""
        return self.reading.ahead(self.x, indices)

    def parts(self, size: int) -> Iterator[slice]:
        """Indices of all pictures in their order, `size` at a time."""
        return (slice(first, first + size) for first in range(0, len(self), size))

    def take(self, index: Tensor) -> Images:
        """The pictures at `index` (int64 or bool), in that order, with their rows and names."""
        if index.dtype == torch.bool:
            index = index.nonzero().squeeze(1)
        names, rows = None if self.names is None else self.reading.chosen(self.names, index), self.rows[index]
        x = self.x.index_select(0, index)
        return Images(x, self.y[index], self.classes, rows, names, self.order.kept(rows), self.reading)

    def balanced(self, n: int, seed: int) -> Images:
        """`n` pictures, n / Q of each class chosen by `seed`; all of them (in their own balance) for n = N.

        For one seed, a smaller subset is contained in every larger one: a learning curve adds pictures, never swaps.
        """
        if n == len(self):
            return self
        counts = torch.bincount(self.y, minlength=len(self.classes))
        _check_balance(n, counts, self.classes)
        generator = torch.Generator().manual_seed(seed)
        chosen = [_shuffled(self.y, q, generator)[: n // len(counts)] for q in range(len(counts))]
        return self.take(torch.cat(chosen).sort().values)

    def split(self, held_out: float, seed: int) -> tuple[Images, Images]:
        """(rest, held out): a fraction in (0, 1) or a count (int), the same share of each class, chosen by `seed`.

        Every class that has two pictures is in both parts where the count allows it; a lone picture stays in the rest.
        """
        held = stratified(self.y, len(self.classes), held_out, seed)
        return self.take(~held), self.take(held)

    def resized(self, size: int) -> Images:
        """Stretched to `size` × `size`, bilinear with antialiasing."""
        check_form(size, None)
        if self.x.shape[2:] == (size, size):
            return self
        parts = [
            F.interpolate(part.to(torch.float32), (size, size), mode="bilinear", antialias=True)
            .round_().clamp_(0, 255).to(torch.uint8)
            for part in self.x.split(1024)  # floats are four times as large: a part at a time
        ]  # fmt: skip
        return replace(self, x=torch.cat(parts))

    def coloured(self, colour: Colour) -> Images:
        """Grey (ITU-R 601 luma, to the bit as Pillow's "L") or RGB (a grey channel repeated)."""
        check_form(None, colour)
        channels = self.x.shape[1]
        if channels not in (1, 3):
            raise CalgpError(
                f"Pictures with {channels} channels cannot become {colour}; only 1 (grey) and 3 (rgb) can."
            )
        if channels == (1 if colour == "grey" else 3):
            return self
        return replace(self, x=self.x.repeat(1, 3, 1, 1) if colour == "rgb" else _luma(self.x))

    def checksum(self) -> str:
        """SHA-256 of shape, pictures and labels: equal exactly where the data are.

        Of pictures that stay in their files, their names and lengths stand for them.
        """
        digest = hashlib.sha256(repr(tuple(self.x.shape)).encode())
        digest.update(self.reading.content(self.x).data)
        digest.update(self.y.contiguous().numpy().data)
        return digest.hexdigest()


def unit(x: Tensor) -> Tensor:
    """Bytes as float32 in [0, 1]."""
    return x.to(torch.float32).div_(255)


def check_form(size: int | None, colour: str | None) -> None:
    """Refuse a size or a colour that no picture can have."""
    if size is not None and not 1 <= size <= LARGEST:
        raise CalgpError(f"size={size} is no picture size; it is the side in pixels, 1 to {LARGEST}, such as 32.")
    if colour is not None and colour not in _COLOURS:
        raise CalgpError(f"colour={colour!r} is not known; it is 'grey' or 'rgb'.")


def stratified(y: Tensor, classes: int, held_out: float, seed: int) -> Tensor:
    """Which labels to hold out (bool [N]): the same share of each class, as near as whole numbers allow."""
    count = _held_out_count(held_out, len(y))
    sizes = torch.bincount(y, minlength=classes).tolist()
    generator = torch.Generator().manual_seed(seed)
    held = torch.zeros(len(y), dtype=torch.bool)
    for q, quota in enumerate(_quotas(sizes, count)):
        held[_shuffled(y, q, generator)[:quota]] = True
    return held


def _held_out_count(held_out: float, n: int) -> int:
    """The number of pictures that a fraction or a count stands for, at least one on either side."""
    if n < 2:
        raise CalgpError("One picture cannot be split in two parts; give at least two.")
    if isinstance(held_out, int):
        if not 0 < held_out < n:
            raise CalgpError(f"{held_out} of {n} pictures cannot be held out; give a count from 1 to {n - 1}.")
        return held_out
    if not 0 < held_out < 1:
        raise CalgpError(f"The fraction {held_out} cannot be held out; give one between 0 and 1, such as 0.1.")
    return min(max(round(held_out * n), 1), n - 1)


def _quotas(sizes: list[int], count: int) -> list[int]:
    """How many to hold out of each class: `count` in all, nearest to proportional, each class kept on both sides."""
    low = [int(size > 1) for size in sizes]
    high = [max(size - 1, 0) for size in sizes]
    if sum(low) > count:
        low = [0] * len(sizes)
    if sum(high) < count:
        high = sizes
    share = [size * count / sum(sizes) for size in sizes]
    quota = [min(max(int(s), lo), hi) for s, lo, hi in zip(share, low, high, strict=True)]
    while (missing := count - sum(quota)) != 0:
        step = 1 if missing > 0 else -1
        free = [q for q in range(len(sizes)) if low[q] <= quota[q] + step <= high[q]]
        quota[max(free, key=lambda q: step * (share[q] - quota[q]))] += step
    return quota


def _shuffled(y: Tensor, label: int, generator: torch.Generator) -> Tensor:
    """Where `label` stands in `y`, in random order."""
    places = (y == label).nonzero().squeeze(1)
    return places[torch.randperm(len(places), generator=generator)]


def _luma(x: Tensor) -> Tensor:
    """RGB to grey with Pillow's integers: L = (19595 R + 38470 G + 7471 B + 2¹⁵) / 2¹⁶."""
    weights = torch.tensor([19595, 38470, 7471], dtype=torch.int32)
    parts = [
        ((part.to(torch.int32) * weights.view(1, 3, 1, 1)).sum(1, keepdim=True, dtype=torch.int32) + 0x8000) >> 16
        for part in x.split(1024)
    ]
    return torch.cat([part.to(torch.uint8) for part in parts])


def _check_tensors(images: Images) -> None:
    x, y, rows = images.x, images.y, images.rows
    if x.dtype != torch.uint8 or x.ndim != 4 or x.numel() == 0:
        raise CalgpError(f"Pictures are uint8 [N, C, H, W] and at least one; got {x.dtype} {list(x.shape)}.")
    for name, tensor in (("Labels", y), ("Rows", rows)):
        if tensor.dtype != torch.int64 or tensor.shape != x.shape[:1]:
            raise CalgpError(f"{name} are int64 [{len(x)}], one a picture; got {tensor.dtype} {list(tensor.shape)}.")
    if images.names is not None and len(images.names) != len(x):
        raise CalgpError(f"There are {len(x)} pictures but {len(images.names)} file names; give one name a picture.")


def _check_labels(images: Images) -> None:
    low, high = images.y.aminmax()
    if low < 0 or high >= len(images.classes):
        raise CalgpError(
            f"Labels run from {int(low)} to {int(high)}, but {len(images.classes)} classes were given; "
            f"labels count from 0 to {len(images.classes) - 1}."
        )


def _check_balance(n: int, counts: Tensor, classes: tuple[str, ...]) -> None:
    total, q = int(counts.sum()), len(classes)
    if not 0 < n < total:
        raise CalgpError(f"{n} pictures were asked for; there are {total}: give a number from {q} to {total}.")
    if n % q:
        nearest = max(round(n / q), 1) * q
        raise CalgpError(
            f"{n} pictures cannot be spread evenly over {q} classes; "
            f"balanced subsets need a multiple of {q}, such as {nearest}."
        )
    few = int(counts.argmin())
    if counts[few] < n // q:
        raise CalgpError(
            f"{n} balanced pictures need {n // q} of each class, but class {classes[few]!r} has {int(counts[few])}; "
            f"ask for at most {int(counts[few]) * q}, or for all {total}."
        )
