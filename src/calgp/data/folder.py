"""A folder of one's own pictures: a sub-folder a class."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from calgp.errors import CalgpError

from .decode import SUFFIXES, read_picture
from .images import Colour, Images, stratified
from .source import Placed, Split
from .streaming import Files, Growing, settled, sized, streamed, unreadable

TEST_SHARE = 0.2
_SPLIT_SEED = 0
_REMEDY = "Repair or remove them, or skip them (skip_unreadable=True)."


@dataclass(frozen=True)
class Folder(Placed):
    """`path/class/**/*.png` (jpg, bmp, gif, webp, tif), or the same below `path/train` and `path/test`.

    Without `train` and `test`, a fixed random choice of 20 % of each class is the test part. `size` stretches every
    picture to a square; without it all must have one size. `colour` is grey where every picture is, unless given.
    Hidden files are left out; files that cannot be read are an error that names them, unless they may be skipped.

    With `workers` the pictures stay in their files, and so many processes decode them ahead of their use: the same
    pictures in the same order, in memory that does not grow with them. None can be skipped then.
    """

    skip_unreadable: bool = False
    workers: int | None = None
    name: str = field(init=False, default="folder")
    description: str = field(init=False, default="your own pictures: PATH/class/*.png, or PATH/train/… and PATH/test/…")

    def load(self, split: Split, directory: Path | None = None) -> Images:
        """The pictures of "train" or "test"; `rows` count the files of the listing that they were found in."""
        self.check_split(split)
        parts = self.parts()
        if split not in parts:
            raise CalgpError(f"{self.path} has no folder {split!r}, only {next(iter(parts))!r}; add {split}/class/….")
        return self._read(*parts[split], list(dict.fromkeys(listing for listing, _ in parts.values())))

    def parts(self) -> dict[Split, tuple[Listing, Tensor]]:
        """The files of each part, and their rows."""
        if not self._has_parts():
            listing = Listing.of(self.path)
            return {split: (listing, listing.part(split)) for split in self.splits}
        there: list[Split] = [split for split in self.splits if (self.path / split).is_dir()]
        first = Listing.of(self.path / there[0])
        listings = [Listing.of(self.path / part, first.classes) for part in there]
        return {part: (each, torch.arange(len(each.names))) for part, each in zip(there, listings, strict=True)}

    def whole(self) -> Images:
        """Every picture of a folder of classes, not split."""
        listing = Listing.of(self.path)
        return self._read(listing, torch.arange(len(listing.names)), [listing])

    def is_here(self, directory: Path | None = None) -> bool:
        return self.path.is_dir()

    def _has_parts(self) -> bool:
        """`train` and `test` are parts if both are there or nothing else is: one alone may be a class of trains."""
        names = {folder.name for folder in subfolders(self.path)}
        return bool(names) and (names >= {"train", "test"} or names <= {"train", "test"})

    def _read(self, listing: Listing, rows: Tensor, everything: list[Listing]) -> Images:
        """Size and colour are settled over the whole folder, so that its parts fit together."""
        form, colour = settled(everything, self.size, self.colour)
        if self.workers is None or form is None:
            return listing.read(rows, size=self.size, colour=colour, skip_unreadable=self.skip_unreadable)
        return streamed(
            listing, listing.labels, rows, listing.classes, form=form, size=self.size, colour=colour,
            workers=self.workers,
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Listing(Files):
    """The picture files of a folder with their labels, in the order of their names, found but not yet opened."""

    root: Path
    classes: tuple[str, ...]
    labels: Tensor

    @classmethod
    def of(cls, root: Path, classes: tuple[str, ...] | None = None) -> Listing:
        """What stands in `root/class/**`; `classes` fixes the labels where another part has given them."""
        found = tuple(folder.name for folder in subfolders(root))
        expected = found if classes is None else classes
        if strange := sorted(set(found) - set(expected)):
            raise CalgpError(f"{root} has the class {strange[0]!r}, which the train folder has not; add it there.")
        labels = Growing()

        def files() -> Iterator[tuple[str, int]]:
            for label, name in enumerate(expected):
                for file in _pictures(root, name) if name in found else ():
                    labels.append(label)
                    yield file

        names, lengths = sized(files())
        _check_listing(root, expected, len(names))
        return cls(names, lengths, root, expected, torch.from_numpy(labels.array()))

    @property
    def where(self) -> str:
        return str(self.root)

    def open(self, place: int) -> Path:
        return self.root / self.names[place]

    def part(self, split: Split) -> Tensor:
        """The rows of a folder without parts that belong to `split`."""
        return divided(self.labels, self.classes, split, f"{self.root}/")

    def read(self, rows: Tensor, *, size: int | None, colour: Colour, skip_unreadable: bool) -> Images:
        """Decode the files at `rows`. What cannot be read is skipped, or named in one error after all were tried."""
        arrays: dict[int, np.ndarray] = {}
        bad: list[str] = []
        for row in rows.tolist():
            try:
                arrays[row] = read_picture(self.open(row), name=self.names[row], size=size, colour=colour)
            except CalgpError as error:
                bad.append(str(error))
        if bad and (not skip_unreadable or not arrays):
            raise CalgpError(unreadable(self.where, bad, _REMEDY))
        rows = torch.tensor([*arrays])
        names = tuple(self.names[row] for row in arrays)
        return Images(torch.from_numpy(np.stack(list(arrays.values()))), self.labels[rows], self.classes, rows, names)


def divided(y: Tensor, classes: tuple[str, ...], split: Split, where: str) -> Tensor:
    """The rows of `split` in a set without parts: a fixed random choice of each class is the test part."""
    counts = torch.bincount(y, minlength=len(classes))
    if counts.min() < 2:
        few = int(counts.argmin())
        raise CalgpError(
            f"{where}{classes[few]} has {int(counts[few])} pictures, too few for two parts; "
            f"add some, or make {where}train and {where}test yourself."
        )
    held = stratified(y, len(classes), TEST_SHARE, _SPLIT_SEED)
    return (held if split == "test" else ~held).nonzero().squeeze(1)


def subfolders(path: Path) -> list[Path]:
    """The visible folders in `path`, by name."""
    try:
        if not path.is_dir():
            what = "is a file" if path.exists() else "does not exist"
            raise CalgpError(f"The picture folder {path} {what}; give a folder that holds a folder for each class.")
        return sorted(entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    except OSError as error:
        raise CalgpError(f"The picture folder {path} cannot be read ({error.strerror}); change its rights.") from error


def _pictures(root: Path, folder: str) -> Iterator[tuple[str, int]]:
    """The visible picture files in `root/folder` and below, by name, as seen from `root`, and their lengths.

    Links to folders are not followed, pipes not opened. The names of one folder at a time are in memory.
    """
    left = [f"{folder}/"]
    while left:
        name = left.pop()
        if name.endswith("/"):
            left += sorted(_entries(root, name), key=lambda entry: entry.rstrip("/"), reverse=True)
            continue
        try:
            found = os.stat(root / name)
        except OSError:
            continue
        if stat.S_ISREG(found.st_mode):
            yield name, found.st_size


def _entries(root: Path, folder: str) -> Iterator[str]:
    """Visible folders, with a stroke behind their names, and files named as pictures."""
    try:
        with os.scandir(root / folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    yield f"{folder}{entry.name}/"
                elif os.path.splitext(entry.name)[1].lower() in SUFFIXES:
                    yield folder + entry.name
    except OSError:
        return


def _check_listing(root: Path, classes: tuple[str, ...], files: int) -> None:
    if len(classes) < 2:
        what = f"only {classes[0]!r}" if classes else "none"
        raise CalgpError(f"{root} needs a folder for each of at least two classes; it has {what}.")
    if not files:
        raise CalgpError(f"The class folders in {root} hold no pictures ({' '.join(sorted(SUFFIXES))}); add some.")
