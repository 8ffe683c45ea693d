"""A folder of one's own images: a sub-folder for each class."""

import os
import stat
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from calgp.errors import CalgpError, path_error

from .decode import SUFFIXES
from .files import FileNames, LooseFiles
from .images import check_class_names
from .path_source import Layout, Part, PathSource, find_parts
from .source import Split


@dataclass(frozen=True)
class Folder(PathSource):
    """`path/class/**/*.png` (jpg, bmp, gif, webp, tif), or the same below `path/train` and `path/test`.

    `training`, `val`, `valid`, `validation` and `testing` are known as well. A folder `val` is the hold-out beside
    `train` and `test`, and the test part if there is no `test`. Images that are not divided are split (`test_share`).
    `size` stretches every image to a square; without it they are stretched if they differ in size or are large.
    `colour` is grey if every image is, unless given. Hidden files are left out.
    """

    name: str = field(init=False, default="folder")
    description: str = field(init=False, default="your own images: PATH/class/*.png, or PATH/train/… and PATH/test/…")

    def own_parts(self) -> dict[Split, Path]:
        """`train` is a part beside another part, or if nothing but parts is there: else it may be a class of trains."""
        folders = subfolders(self.path)
        parts = find_parts(folders, (folder.name for folder in folders))
        return parts if len(parts) == len(folders) or ("train" in parts and len(parts) > 1) else {}

    def layout(self) -> Layout:
        own = self.own_parts()
        if not own or list(own) == ["train"]:
            files, classes = class_files(own.get("train", self.path))
            return self._split_layout(classes, Part.whole(files))
        classes, parts = None, dict[Split, Part]()
        for split, path in own.items():
            files, classes = class_files(path, classes)
            parts[split] = Part.whole(files)
        unused = [folder.name for folder in subfolders(self.path) if folder not in own.values()]
        return self._own_layout(classes or (), parts, unused)

    def is_available(self, directory: Path | None = None) -> bool:
        return self.path.is_dir()


def class_files(root: Path, classes: tuple[str, ...] | None = None) -> tuple[LooseFiles, tuple[str, ...]]:
    """The image files in `root/class/**` in the order of their names, and the classes, which are the sub-folders.

    `classes` are those of the part that was listed before, if there is one.
    """
    found = tuple(folder.name for folder in subfolders(root))
    check_class_names(found, str(root))
    expected = found if classes is None else classes
    if strange := sorted(set(found) - set(expected)):
        raise CalgpError(f"{root} has the class {strange[0]!r}, which the training images do not have; add it there.")
    if len(expected) < 2:
        what = f"only {expected[0]!r}" if expected else "none"
        raise CalgpError(
            f"{root} must have a folder for each of at least two classes; it has {what}. Put images into folders such "
            f"as {root / 'cat'} and {root / 'dog'}."
        )
    labels, lengths = array("q"), array("q")

    def names() -> Iterator[str]:
        for label, name in enumerate(expected):
            for file, length in _image_files(root, name) if name in found else ():
                labels.append(label)
                lengths.append(length)
                yield file

    if not (joined := FileNames.of(names())):
        raise CalgpError(f"The class folders in {root} have no images ({' '.join(sorted(SUFFIXES))}); add some.")
    return LooseFiles(joined, np.array(lengths), torch.from_numpy(np.array(labels)), root), expected


def subfolders(path: Path) -> list[Path]:
    """The visible folders in `path`, by name."""
    try:
        if not path.exists():
            raise path_error("image folder", path)
        if not path.is_dir():
            raise CalgpError(f"The image folder {path} is a file; give a folder that holds a folder for each class.")
        return sorted(entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    except OSError as error:
        raise CalgpError(f"The image folder {path} cannot be read ({error.strerror}); change its rights.") from error


def _image_files(root: Path, folder: str) -> Iterator[tuple[str, int]]:
    """The visible image files in `root/folder` and below: by name, relative to `root`, and their lengths.

    Links to folders are not followed, pipes not opened. The names of one folder at a time are in memory.
    """
    pending = [f"{folder}/"]
    while pending:
        name = pending.pop()
        if name.endswith("/"):
            pending += sorted(_entries(root, name), key=lambda entry: entry.rstrip("/"), reverse=True)
            continue
        try:
            found = os.stat(root / name)
        except OSError:
            continue
        if stat.S_ISREG(found.st_mode):
            yield name, found.st_size


def _entries(root: Path, folder: str) -> Iterator[str]:
    """Visible folders, whose names end with a slash, and files named as images."""
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
