"""The table of image sets, and the way from a name to pictures."""

from __future__ import annotations

import difflib
import lzma
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
import torch

from calgp.errors import CalgpError, brief

from .folder import Folder
from .formats import joined, read_cifar_binary, read_cifar_names, read_cifar_pickle, read_idx, read_lines
from .images import Colour, Images
from .reading import worker_count
from .shards import Shards
from .source import Source, Split, data_directory


def load(
    source: str,
    split: Split,
    *,
    directory: Path | None = None,
    size: int | None = None,
    colour: Colour | None = None,
    workers: int | None = None,
) -> Images:
    """The pictures of a named set or of `folder:PATH`, brought to `size` × `size` and to `colour` where asked.

    Those of `stream:PATH`, the same folder, and of `shards:PATH`, tar files, stay there, and `workers` processes read
    them ahead of their use (`worker_count`).

    >>> len(load("digits", "test"))
    1000
    """
    images = open_source(source, size=size, colour=colour, workers=workers).load(split, directory)
    images = images if size is None else images.resized(size)
    return images if colour is None else images.coloured(colour)


def open_source(
    text: str, *, size: int | None = None, colour: Colour | None = None, workers: int | None = None
) -> Source:
    """The source that `text` names: one of `SOURCES`, or a PLACE behind its kind, decoded to `size` and `colour`."""
    kind, _, place = text.partition(":")
    if kind in PLACES and place:
        try:
            path = Path(place).expanduser()
        except RuntimeError as error:
            raise CalgpError(
                f"The picture folder {brief(text)} cannot be found ({error}); give its full path."
            ) from None
        return PLACES[kind](path, size, colour, workers)
    if text in SOURCES:
        return SOURCES[text]
    close = difflib.get_close_matches(text[:80].lower(), SOURCES, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise CalgpError(f"There is no image set {brief(text)}; {hint}There are {', '.join(SOURCES)}, {_PLACED}.")


@dataclass(frozen=True, kw_only=True)
class Embedded(Source):
    """A small set that comes with calgp: one xz file a part, of three NumPy arrays (pictures, labels, rows)."""

    class_names: tuple[str, ...]

    def load(self, split: Split, directory: Path | None = None) -> Images:
        self.check_split(split)
        file = resources.files("calgp.data") / "embedded" / f"{self.name}-{split}.xz"
        with file.open("rb") as packed, lzma.open(packed) as stream:
            x, y, rows = (np.lib.format.read_array(stream, allow_pickle=False) for _ in range(3))
        wide = torch.from_numpy(y).long(), torch.from_numpy(rows).long()
        return Images(torch.from_numpy(x)[:, None], wide[0], self.class_names, wide[1])

    def is_here(self, directory: Path | None = None) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class Idx(Source):
    """A set in idx files, a file of pictures and one of labels for each part, gzipped or not."""

    class_names: tuple[str, ...]
    folders: tuple[str, ...]
    files: dict[Split, tuple[str, str]]
    pictures: str | None = None  # a folder of picture files that holds the same set

    def load(self, split: Split, directory: Path | None = None) -> Images:
        self.check_split(split)
        root = data_directory(directory)
        if found := self._find(root, split):
            x, y = (read_idx(path) for path in found)
            return _images(x, y, self.class_names, found)
        if self.pictures and (root / self.pictures).is_dir():
            return Folder(root / self.pictures, size=self.size, colour="grey", skip_unreadable=True).whole()
        raise _missing(self, root, [f"{self.folders[0]}/{file}.gz" for file in self.files[split]])

    def is_here(self, directory: Path | None = None) -> bool:
        root = data_directory(directory)
        return all(self._find(root, split) for split in self.splits) or bool(
            self.pictures and (root / self.pictures).is_dir()
        )

    def _find(self, root: Path, split: Split) -> list[Path]:
        """The two files, both from one folder; unpacked ones first, being faster to read."""
        for folder in self.folders:
            paths = [_first(root / folder / file, root / folder / f"{file}.gz") for file in self.files[split]]
            if all(paths):
                return [path for path in paths if path]
        return []


@dataclass(frozen=True, kw_only=True)
class Cifar(Source):
    """CIFAR in its Python version (pickles, read without running them) or its binary one.

    A part of the set is accepted: what the files hold is what is loaded.
    """

    python: str
    binary: str
    batches: dict[Split, tuple[str, ...]]
    label_key: str
    names_key: str
    names_file: str
    names_text: str
    label_bytes: int

    def load(self, split: Split, directory: Path | None = None) -> Images:
        self.check_split(split)
        root = data_directory(directory)
        for folder in (root / self.python, root):
            paths = [folder / name for name in self.batches[split]]
            if all(path.is_file() for path in [*paths, folder / self.names_file]):
                names = read_cifar_names(folder / self.names_file, self.names_key)
                return _images(*joined([read_cifar_pickle(path, self.label_key) for path in paths]), names, paths)
        for folder in (root / self.binary, root):
            paths = [folder / f"{name}.bin" for name in self.batches[split]]
            if all(path.is_file() for path in [*paths, folder / self.names_text]):
                names = read_lines(folder / self.names_text)
                return _images(*joined([read_cifar_binary(path, self.label_bytes) for path in paths]), names, paths)
        raise _missing(self, root, [f"{self.python}/{file}" for file in (*self.batches[split], self.names_file)])

    def is_here(self, directory: Path | None = None) -> bool:
        root = data_directory(directory)
        files = [file for split in self.splits for file in self.batches[split]]
        return any(
            all((folder / f"{file}{suffix}").is_file() for file in files)
            for name, suffix in ((self.python, ""), (self.binary, ".bin"))
            for folder in (root / name, root)
        )


def _images(x: np.ndarray, y: np.ndarray, classes: tuple[str, ...], paths: list[Path]) -> Images:
    """Arrays out of files; the files' name goes with any complaint."""
    try:
        if y.shape != x.shape[:1]:  # before labels become eight times as large
            raise CalgpError(
                f"there are pictures {list(x.shape)} and labels {list(y.shape)}; give one label a picture."
            )
        pictures = torch.from_numpy(x)
        return Images.of(pictures[:, None] if x.ndim == 3 else pictures, torch.from_numpy(y).long(), classes)
    except CalgpError as error:
        raise CalgpError(f"{paths[0]} and its labels do not fit together: {error}") from error


def _first(*paths: Path) -> Path | None:
    return next((path for path in paths if path.is_file()), None)


def _missing(source: Source, root: Path, files: list[str]) -> CalgpError:
    fetch = f", or let `calgp sources --download {source.name}` fetch them where there is a network"
    return CalgpError(
        f"{source.name} is not in {root}. Put {', '.join(files)} there{fetch if source.fetchable else ''}. "
        f"Another folder is named by --data or the variable CALGP_DATA."
    )


_DIGITS = tuple("0123456789")
_LETTERS = tuple("ABCDEFGHIJ")
_EVERY: tuple[Source, ...] = (
    Embedded(
        name="digits",
        description="5,000 + 1,000 of MNIST's handwritten digits, 28×28 grey; comes with calgp",
        classes=10, channels=1, size=28, class_names=_DIGITS,
    ),
    Embedded(
        name="letters",
        description="1,000 letters A–J in many typefaces, 28×28 grey, to test what is not a digit; comes with calgp",
        classes=10, channels=1, size=28, splits=("test",), class_names=_LETTERS,
    ),
    Idx(
        name="mnist",
        description="MNIST: 60,000 + 10,000 handwritten digits, 28×28 grey",
        fetchable=True, classes=10, channels=1, size=28, class_names=_DIGITS, folders=("MNIST/raw", "mnist", "."),
        files={
            "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
            "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
        },
    ),
    Idx(
        name="notmnist",
        description="notMNIST (small): 18,724 letters A–J in many typefaces, 28×28 grey",
        classes=10, channels=1, size=28, splits=("test",), class_names=_LETTERS,
        folders=("notMNIST/raw", "notmnist", "."), files={"test": ("images-idx3-ubyte", "labels-idx1-ubyte")},
        pictures="notMNIST_small",
    ),
    Cifar(
        name="cifar10",
        description="CIFAR-10: 50,000 + 10,000 photographs of 10 classes, 32×32 RGB",
        fetchable=True, classes=10, channels=3, size=32, python="cifar-10-batches-py", binary="cifar-10-batches-bin",
        batches={"train": tuple(f"data_batch_{part}" for part in range(1, 6)), "test": ("test_batch",)},
        label_key="labels", names_key="label_names", names_file="batches.meta", names_text="batches.meta.txt",
        label_bytes=1,
    ),
    Cifar(
        name="cifar100",
        description="CIFAR-100: 50,000 + 10,000 photographs of 100 classes, 32×32 RGB",
        fetchable=True, classes=100, channels=3, size=32, python="cifar-100-python", binary="cifar-100-binary",
        batches={"train": ("train",), "test": ("test",)},
        label_key="fine_labels", names_key="fine_label_names", names_file="meta", names_text="fine_label_names.txt",
        label_bytes=2,
    ),
)  # fmt: skip
SOURCES: dict[str, Source] = {source.name: source for source in _EVERY}

PLACES: dict[str, Callable[[Path, int | None, Colour | None, int | None], Source]] = {
    "folder": lambda path, size, colour, workers: Folder(path, size=size, colour=colour),
    "stream": lambda path, size, colour, workers: Folder(path, size=size, colour=colour, workers=worker_count(workers)),
    "shards": lambda path, size, colour, workers: Shards(path, size=size, colour=colour, workers=worker_count(workers)),
}
_PLACED = "folder:PATH, stream:PATH (a folder that stays on the disk) and shards:PATH (tar files)"
