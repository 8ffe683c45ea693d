"""A folder of one's own pictures: a sub-folder a class."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from calgp.errors import CalgpError

from .decode import SUFFIXES, read_picture, survey
from .images import Colour, Images, check_form, stratified
from .source import Source, Split

TEST_SHARE = 0.2
_SPLIT_SEED = 0
_SHOWN = 10


class _File(NamedTuple):
    path: Path
    label: int


@dataclass(frozen=True)
class Folder(Source):
    """`path/class/**/*.png` (jpg, bmp, gif, webp, tif), or the same below `path/train` and `path/test`.

    Without `train` and `test`, a fixed random choice of 20 % of each class is the test part. `size` stretches every
    picture to a square; without it all must have one size. `colour` is grey where every picture is, unless given.
    Hidden files are left out; files that cannot be read are an error that names them, unless they may be skipped.
    """

    path: Path
    colour: Colour | None = None
    skip_unreadable: bool = False
    name: str = field(init=False, default="folder")
    description: str = field(init=False, default="your own pictures: PATH/class/*.png, or PATH/train/… and PATH/test/…")
    classes: int | None = field(init=False, default=None)
    channels: int | None = field(init=False, default=None)
    splits: tuple[Split, ...] = field(init=False, default=("train", "test"))
    fetchable: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        check_form(self.size, self.colour)

    def load(self, split: Split, directory: Path | None = None) -> Images:
        """The pictures of "train" or "test"; `rows` count the files of the listing that they were found in."""
        self.check_split(split)
        if not self._has_parts():
            listing = Listing.of(self.path)
            return self._read(listing, listing.part(split), [listing])
        listings = self._part_listings()
        if split not in listings:
            raise CalgpError(
                f"{self.path} has no folder {split!r}, only {next(iter(listings))!r}; add {split}/class/…."
            )
        return self._read(listings[split], range(len(listings[split].files)), list(listings.values()))

    def whole(self) -> Images:
        """Every picture of a folder of classes, not split."""
        listing = Listing.of(self.path)
        return self._read(listing, range(len(listing.files)), [listing])

    def is_here(self, directory: Path | None = None) -> bool:
        return self.path.is_dir()

    def _has_parts(self) -> bool:
        """`train` and `test` are parts if both are there or nothing else is: one alone may be a class of trains."""
        names = {folder.name for folder in subfolders(self.path)}
        return bool(names) and (names >= {"train", "test"} or names <= {"train", "test"})

    def _part_listings(self) -> dict[str, Listing]:
        parts = [part for part in ("train", "test") if (self.path / part).is_dir()]
        first = Listing.of(self.path / parts[0])
        return {part: Listing.of(self.path / part, first.classes) for part in parts}

    def _read(self, listing: Listing, rows: Sequence[int], everything: list[Listing]) -> Images:
        """Size and colour are settled over the whole folder, so that its parts fit together."""
        size, colour = self.size, self.colour
        if size is None or colour is None:
            headers = [(file, header) for part in everything for file in part.files if (header := survey(file.path))]
            if size is None:
                _check_one_size([(file.path, shape) for file, (_, shape) in headers])
            if colour is None:
                colour = "grey" if all(grey for _, (grey, _) in headers) else "rgb"
        return listing.read(rows, size=size, colour=colour, skip_unreadable=self.skip_unreadable)


@dataclass(frozen=True)
class Listing:
    """The picture files of a folder with their labels, in the order of their names, found but not yet opened."""

    root: Path
    classes: tuple[str, ...]
    files: tuple[_File, ...]

    @classmethod
    def of(cls, root: Path, classes: tuple[str, ...] | None = None) -> Listing:
        """What stands in `root/class/**`; `classes` fixes the labels where another part has given them."""
        found = tuple(folder.name for folder in subfolders(root))
        names = found if classes is None else classes
        if strange := sorted(set(found) - set(names)):
            raise CalgpError(f"{root} has the class {strange[0]!r}, which the train folder has not; add it there.")
        files = [_File(path, q) for q, name in enumerate(names) if name in found for path in _pictures(root / name)]
        _check_listing(root, names, files)
        return cls(root, names, tuple(files))

    def part(self, split: Split) -> list[int]:
        """The rows of a folder without parts that belong to `split`."""
        y = torch.tensor([file.label for file in self.files])
        counts = torch.bincount(y, minlength=len(self.classes))
        if counts.min() < 2:
            few = int(counts.argmin())
            raise CalgpError(
                f"{self.root / self.classes[few]} has {int(counts[few])} pictures, too few for two parts; "
                f"add some, or make {self.root}/train and {self.root}/test yourself."
            )
        held = stratified(y, len(self.classes), TEST_SHARE, _SPLIT_SEED)
        return (held if split == "test" else ~held).nonzero().squeeze(1).tolist()

    def read(self, rows: Sequence[int], *, size: int | None, colour: Colour, skip_unreadable: bool) -> Images:
        """Decode the files at `rows`. What cannot be read is skipped, or named in one error after all were tried."""
        arrays: dict[int, np.ndarray] = {}
        bad: list[str] = []
        for row in rows:
            path = self.files[row].path
            try:
                name = path.relative_to(self.root).as_posix()
                arrays[row] = read_picture(path, name=name, size=size, colour=colour)
            except CalgpError as error:
                bad.append(str(error))
        if bad and (not skip_unreadable or not arrays):
            raise CalgpError(_unreadable(self.root, bad))
        names = tuple(self.files[row].path.relative_to(self.root).as_posix() for row in arrays)
        y = torch.tensor([self.files[row].label for row in arrays])
        return Images(
            torch.from_numpy(np.stack(list(arrays.values()))), y, self.classes, torch.tensor([*arrays]), names
        )


def subfolders(path: Path) -> list[Path]:
    """The visible folders in `path`, by name."""
    try:
        if not path.is_dir():
            what = "is a file" if path.exists() else "does not exist"
            raise CalgpError(f"The picture folder {path} {what}; give a folder that holds a folder for each class.")
        return sorted(entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    except OSError as error:
        raise CalgpError(f"The picture folder {path} cannot be read ({error.strerror}); change its rights.") from error


def _pictures(folder: Path) -> list[Path]:
    """The visible picture files in `folder` and below, by name; links to folders are not followed, pipes not opened."""
    found = []
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(place, name) for name in files if not name.startswith(".")]
    return sorted(path for path in found if path.suffix.lower() in SUFFIXES and path.is_file())


def _check_listing(root: Path, classes: tuple[str, ...], files: list[_File]) -> None:
    if len(classes) < 2:
        what = f"only {classes[0]!r}" if classes else "none"
        raise CalgpError(f"{root} needs a folder for each of at least two classes; it has {what}.")
    if not files:
        raise CalgpError(f"The class folders in {root} hold no pictures ({' '.join(sorted(SUFFIXES))}); add some.")


def _check_one_size(shapes: list[tuple[Path, tuple[int, int]]]) -> None:
    for path, shape in shapes:
        first, expected = shapes[0]
        if shape != expected:
            raise CalgpError(
                f"Pictures differ in size: {first} is {expected[0]}×{expected[1]}, {path} is {shape[0]}×{shape[1]}; "
                f"pass --size (size=…) to bring all to one."
            )


def _unreadable(root: Path, bad: list[str]) -> str:
    more = f", and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
    return (
        f"{len(bad)} of the pictures in {root} cannot be read: {'; '.join(bad[:_SHOWN])}{more}. "
        f"Repair or remove them, or skip them (skip_unreadable=True)."
    )
