"""Images of a source in their own sizes, for networks that resize them in their own way."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from calgp.errors import CalgpError

from .decode import Colour
from .images import Images
from .path_source import TEST_SHARE, PathSource
from .source import Split
from .sources import open_source

AnySplit = Literal["train", "val", "test", "all"]


@dataclass(frozen=True, eq=False)
class OriginalImages:
    """One or more parts of a source, one after the other; files are opened when their images are read."""

    parts: tuple[Images, ...]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    @property
    def classes(self) -> tuple[str, ...]:
        return self.parts[0].classes

    @property
    def y(self) -> Tensor:
        return torch.cat([part.y for part in self.parts])

    def read(self, rows: slice) -> Iterator[Tensor]:
        """Images uint8 [C, H, W], each in its own size."""
        wanted, first = range(*rows.indices(len(self))), 0
        for part in self.parts:
            x: Any = part.x
            image = x.original if part.is_streamed else x.__getitem__
            yield from (image(row - first) for row in wanted if first <= row < first + len(part))
            first += len(part)

    def only(self, rows: slice) -> "OriginalImages":
        """Some of them, and nothing of the others: small, for another process."""
        wanted, first, parts = torch.arange(*rows.indices(len(self))), 0, list[Images]()
        for part in self.parts:
            mine = wanted[(first <= wanted) & (wanted < first + len(part))] - first
            first += len(part)
            if len(mine):
                x: Any = part.x.index_select(0, mine)
                if part.is_streamed:
                    x = replace(x, files=x.files.only(x.numbers), numbers=torch.arange(len(mine)))
                parts.append(Images(x, part.y[mine], part.classes, part.rows[mine]))
        return OriginalImages(tuple(parts))

    def checksum(self) -> str:
        """SHA-256 of images and labels; for files, their names and lengths stand for the pixels."""
        return hashlib.sha256("".join(part.checksum() for part in self.parts).encode()).hexdigest()


def open_original(
    source: str, split: AnySplit = "all", *, colour: Colour = "rgb", directory: Path | None = None,
    skip_unreadable: bool = False,
) -> OriginalImages:  # fmt: skip
    """The images of a named set, `folder:PATH`, `stream:PATH` or `shards:PATH`; those at a path stay in their files.

    >>> images = open_original("digits", "test")
    >>> len(images), next(images.read(slice(0, 1))).shape
    (1000, torch.Size([1, 28, 28]))
    """
    if split not in (known := get_args(AnySplit)):
        raise CalgpError(f"Invalid split={split!r}: must be one of {', '.join(known)}.")
    found = open_source(
        f"stream:{source.removeprefix('folder:')}" if source.startswith("folder:") else source,
        size=1, colour=colour, workers=0, skip_unreadable=skip_unreadable,
        test_share=1 if split == "all" else TEST_SHARE,
    )  # fmt: skip
    splits: tuple[Split, ...] = found.splits if split == "all" else (split,)
    if split == "all" and isinstance(found, PathSource):
        splits = tuple(found.layout().parts)
    return OriginalImages(tuple(found.load(each, directory) for each in splits))
