"""Labelled images, and the parts of them that training and evaluation use."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from calgp.errors import CalgpError

from .decode import LARGEST as LARGEST
from .decode import Colour, check_format, check_memory
from .files import FileNames
from .order import UNIFORM, Order
from .prefetch import Index


@dataclass(frozen=True, eq=False)
class Images:
    """Images `x` (uint8 [N, C, H, W]) with labels `y` (int64 [N]) that index `classes`.

    `rows` is each image's index in the data set that it came from. It keys the random masks, so it stays with the
    image through subsets, splits and shuffles. `names` are file names, if there were files.

    `x` is a tensor, or stands for one while the images stay in their files (`StreamedPixels`). `read` works for both;
    `order` is the order in which they are trained on. `split_note` says in a sentence how a folder was split. `side`
    is that of the square that images were stretched to because their files differ in size or are large.

    >>> images = Images.of(torch.zeros(6, 1, 8, 8, dtype=torch.uint8), torch.arange(6) % 2, ("cat", "dog"))
    >>> train, held_out = images.split(2, seed=0)
    >>> len(train), held_out.y.tolist()
    (4, [0, 1])
    """

    x: Tensor
    y: Tensor
    classes: tuple[str, ...]
    rows: Tensor
    names: FileNames | None = None
    order: Order = UNIFORM
    split_note: str = ""
    side: int | None = None

    def __post_init__(self) -> None:
        _check_tensors(self)
        _check_labels(self)

    @classmethod
    def of(cls, x: Tensor, y: Tensor, classes: tuple[str, ...], *, names: Sequence[str] | None = None) -> "Images":
        """A whole data set: its rows are 0 … N - 1."""
        return cls(x, y, classes, torch.arange(len(x)), None if names is None else FileNames.of(names))

    def __len__(self) -> int:
        return len(self.x)

    @property
    def is_streamed(self) -> bool:
        """Whether the images stay in their files until they are read."""
        return not isinstance(self.x, Tensor)

    def pixels(self, index: slice | Tensor = slice(None)) -> Tensor:
        """Images as float32 [n, C, H, W] in [0, 1]: x / 255 and no other normalisation, as the paper's authors."""
        return to_unit_interval(self.x[index])

    def read(self, indices: Iterable[Index]) -> Iterator[tuple[Index, Tensor]]:
        """Each index with its images (uint8), in order; those in files are read ahead."""
        x: Any = self.x
        return x.read(indices) if self.is_streamed else ((index, x[index]) for index in indices)

    def parts(self, size: int) -> Iterator[slice]:
        """Indices of all images in their order, `size` at a time."""
        return (slice(first, first + size) for first in range(0, len(self), size))

    def take(self, index: Tensor) -> "Images":
        """The images at `index` (int64 or bool), in that order, with their rows and names."""
        if index.dtype == torch.bool:
            index = index.nonzero().squeeze(1)
        names, rows = None if self.names is None else self.names.take(index), self.rows[index]
        x, order = self.x.index_select(0, index), self.order.subset(rows)
        return replace(self, x=x, y=self.y[index], rows=rows, names=names, order=order)

    def balanced(self, n: int, seed: int) -> "Images":
        """`n` images, n / Q of each class chosen by `seed`; all of them (in their own balance) for n = N.

        For one seed, a smaller subset is contained in every larger one: a learning curve adds images, never swaps.
        """
        if n == len(self):
            return self
        counts = torch.bincount(self.y, minlength=len(self.classes))
        _check_balance(n, counts, self.classes)
        generator = torch.Generator().manual_seed(seed)
        chosen = [_shuffled(self.y, q, generator)[: n // len(counts)] for q in range(len(counts))]
        return self.take(torch.cat(chosen).sort().values)

    def split(self, held_out: float, seed: int) -> "tuple[Images, Images]":
        """(rest, held out): a fraction in (0, 1) or a count (int), the same share of each class, chosen by `seed`.

        Every class that has two images is in both parts where the count allows it; a lone image stays in the rest.
        """
        held = stratified(self.y, len(self.classes), held_out, seed)
        return self.take(~held), self.take(held)

    def resized(self, size: int) -> "Images":
        """Stretched to `size` × `size`, bilinear with antialiasing."""
        check_format(size, None)
        if self.x.shape[2:] == (size, size):
            return self
        check_memory(len(self), self.x.shape[1], size, size)
        most = max(1, min(1024, 2**26 // (self.x.shape[1] * size * size)))
        parts = [
            F.interpolate(part.to(torch.float32), (size, size), mode="bilinear", antialias=True)
            .round_().clamp_(0, 255).to(torch.uint8)
            for part in self.x.split(most)  # floats are four times as large: a part at a time
        ]  # fmt: skip
        return replace(self, x=torch.cat(parts))

    def coloured(self, colour: Colour) -> "Images":
        """Grey (ITU-R 601 luma, to the bit as Pillow's "L") or RGB (a grey channel repeated)."""
        check_format(None, colour)
        channels = self.x.shape[1]
        if channels not in (1, 3):
            raise CalgpError(
                f"Invalid images with {channels} channels: must have 1 (grey) or 3 (rgb) to become {colour}."
            )
        if channels == (1 if colour == "grey" else 3):
            return self
        return replace(self, x=self.x.repeat(1, 3, 1, 1) if colour == "rgb" else luma(self.x))

    def checksum(self) -> str:
        """SHA-256 of shape, images and labels: equal if and only if the data are.

        For images that stay in their files, names and lengths stand for the pixels.
        """
        digest = hashlib.sha256(repr(tuple(self.x.shape)).encode())
        x: Any = self.x
        digest.update((x.digests() if self.is_streamed else x.contiguous().numpy()).data)
        digest.update(self.y.contiguous().numpy().data)
        return digest.hexdigest()


def to_unit_interval(x: Tensor) -> Tensor:
    """Bytes as float32 in [0, 1]."""
    return x.to(torch.float32).div_(255)


def check_class_names(classes: Sequence[str], where: str) -> None:
    """Refuse names that no file of a run could hold: in a folder, the file system may give any bytes."""
    for name in classes:
        try:
            name.encode("utf-8")
        except UnicodeEncodeError:
            raise CalgpError(
                f"Invalid class name {name!r} in {where}: must be UTF-8 text, such as 'Löwe'; rename it."
            ) from None


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
    """The number of images that a fraction or a count stands for, at least one on either side."""
    if n < 2:
        raise CalgpError(f"Invalid split of {n} image: must have at least two images to hold some out.")
    if isinstance(held_out, int):
        if not 0 < held_out < n:
            raise CalgpError(f"Invalid holdout={held_out}: must be a count from 1 to {n - 1}, as there are {n} images.")
        return held_out
    if not 0 < held_out < 1:
        raise CalgpError(f"Invalid holdout={held_out}: must be a fraction between 0 and 1, such as 0.1.")
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


def luma(x: Tensor) -> Tensor:
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
        raise CalgpError(f"Invalid images of {x.dtype} {list(x.shape)}: must be uint8 [N, C, H, W], at least one.")
    for name, tensor in (("labels", y), ("rows", rows)):
        if tensor.dtype != torch.int64 or tensor.shape != x.shape[:1]:
            raise CalgpError(
                f"Invalid {name} of {tensor.dtype} {list(tensor.shape)}: must be int64 [{len(x)}], one an image."
            )
    if images.names is not None and len(images.names) != len(x):
        raise CalgpError(f"Invalid file names: must be one an image, but {len(images.names)} came for {len(x)} images.")


def _check_labels(images: Images) -> None:
    check_class_names(images.classes, "the classes")
    low, high = images.y.aminmax()
    if low < 0 or high >= len(images.classes):
        raise CalgpError(
            f"Invalid labels from {int(low)} to {int(high)}: must be from 0 to {len(images.classes) - 1}, as there are "
            f"{len(images.classes)} classes."
        )


def _check_balance(n: int, counts: Tensor, classes: tuple[str, ...]) -> None:
    total, q = int(counts.sum()), len(classes)
    if not 0 < n < total:
        raise CalgpError(f"Invalid train_size={n}: must be from {q} to {total}, the number of images.")
    if n % q:
        nearest = max(round(n / q), 1) * q
        raise CalgpError(f"Invalid train_size={n}: must be a multiple of the {q} classes, such as {nearest}.")
    few = int(counts.argmin())
    if counts[few] < n // q:
        raise CalgpError(
            f"Invalid train_size={n}: must be at most {int(counts[few]) * q}, or all {total}, as class "
            f"{classes[few]!r} has {int(counts[few])} images."
        )
