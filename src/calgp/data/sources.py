"""The table of image sets, and the way from a name to images."""

import functools
import lzma
import os
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
import torch

from calgp.errors import CalgpError, name_error, short_repr

from .folder import Folder
from .formats import joined, read_cifar_binary, read_cifar_names, read_cifar_pickle, read_idx, read_lines
from .images import Colour, Images
from .path_source import TEST_SHARE
from .prefetch import worker_count
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
    skip_unreadable: bool = False,
    test_share: float = TEST_SHARE,
) -> Images:
    """The images of a named set or of `folder:PATH`, resized to `size` × `size` and brought to `colour` if given.

    The images of `stream:PATH`, the same folder, and of `shards:PATH`, tar files, stay on the disk; `workers` processes
    read them ahead of their use (`worker_count`). `skip_unreadable` and `test_share` are those of `PathSource`.

    >>> len(load("digits", "test"))
    1000
    """
    options = open_source(
        source, size=size, colour=colour, workers=workers, skip_unreadable=skip_unreadable, test_share=test_share
    )
    images = options.load(split, directory)
    images = images if size is None else images.resized(size)
    return images if colour is None else images.coloured(colour)


def open_source(
    text: str,
    *,
    size: int | None = None,
    colour: Colour | None = None,
    workers: int | None = None,
    skip_unreadable: bool = False,
    test_share: float = TEST_SHARE,
) -> Source:
    """The source that `text` names: one of `SOURCES`, or KIND:PATH, with the options of a `PathSource`.

    >>> open_source("digits").name
    'digits'
    """
    if path := _path(text):
        kind, streamed = PATH_SOURCES[text.partition(":")[0]]
        return kind(
            path, size=size, colour=colour, workers=worker_count(workers) if streamed else None,
            skip_unreadable=skip_unreadable, test_share=test_share,
        )  # fmt: skip
    if text in SOURCES:
        return SOURCES[text]
    if os.path.isdir(text):  # which is False, not an error, for text that no path can be
        raise CalgpError(f"There is no image set {short_repr(text)}; for the folder of this name give folder:{text}.")
    raise name_error("There is no image set", text, SOURCES, more=_PATH_HELP)


def share_files(one: str, other: str) -> bool:
    """Whether two sources are the same, or one is at a path in the other: their images may be the same.

    >>> share_files("folder:photos", "stream:photos/"), share_files("folder:photos", "folder:strangers")
    (True, False)
    """
    paths = _path(one), _path(other)
    if paths[0] is None or paths[1] is None:
        return one == other
    first, second = (path.absolute().resolve() for path in paths if path)
    return first == second or first in second.parents or second in first.parents


def _path(text: str) -> Path | None:
    """The path of a source of the form KIND:PATH."""
    kind, _, place = text.partition(":")
    if kind not in PATH_SOURCES or not place:
        return None
    try:
        place.encode("utf-8")
        return Path(place).expanduser()
    except UnicodeEncodeError:
        raise CalgpError(f"Invalid source {short_repr(text)}: must be UTF-8 text; rename the folder.") from None
    except RuntimeError as error:
        raise CalgpError(f"Invalid source {short_repr(text)} ({error}): must be a path; give it in full.") from None


@dataclass(frozen=True, kw_only=True)
class BundledSource(Source):
    """A small set that comes with calgp: xz files for each part, each of three NumPy arrays (images, labels, rows)."""

    class_names: tuple[str, ...]
    files: dict[Split, tuple[str, ...]]

    def load(self, split: Split, directory: Path | None = None) -> Images:
        self.check_split(split)
        x, y, rows = (
            torch.from_numpy(np.concatenate(arrays))
            for arrays in zip(*map(_read_bundled, self.files[split]), strict=True)
        )
        return Images(x[:, None], y.long(), self.class_names, rows.long())

    def is_available(self, directory: Path | None = None) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class IdxSource(Source):
    """A set in idx files, a file of images and one of labels for each part, gzipped or not."""

    class_names: tuple[str, ...]
    folders: tuple[str, ...]
    files: dict[Split, tuple[str, str]]
    folder_of_images: str | None = None  # image files that are the same set

    def load(self, split: Split, directory: Path | None = None) -> Images:
        self.check_split(split)
        root = data_directory(directory)
        if found := self._find(root, split):
            x, y = (read_idx(path) for path in found)
            return _images(x, y, self.class_names, found)
        if self.folder_of_images and (root / self.folder_of_images).is_dir():
            folder = root / self.folder_of_images
            return Folder(folder, size=self.size, colour="grey", skip_unreadable=True, test_share=1).load("test")
        raise _missing(self, root, [f"{self.folders[0]}/{file}.gz" for file in self.files[split]])

    def is_available(self, directory: Path | None = None) -> bool:
        root = data_directory(directory)
        return all(self._find(root, split) for split in self.splits) or bool(
            self.folder_of_images and (root / self.folder_of_images).is_dir()
        )

    def _find(self, root: Path, split: Split) -> list[Path]:
        """The two files, both from one folder; unpacked ones first, being faster to read."""
        for folder in self.folders:
            places = [[root / folder / file, root / folder / f"{file}.gz"] for file in self.files[split]]
            found = [next(filter(Path.is_file, each), None) for each in places]
            if all(found):
                return [path for path in found if path]
        return []


@dataclass(frozen=True, kw_only=True)
class CifarSource(Source):
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

    def is_available(self, directory: Path | None = None) -> bool:
        root = data_directory(directory)
        files = [file for split in self.splits for file in self.batches[split]]
        return any(
            all((folder / f"{file}{suffix}").is_file() for file in files)
            for name, suffix in ((self.python, ""), (self.binary, ".bin"))
            for folder in (root / name, root)
        )


@functools.cache
def _read_bundled(name: str) -> list[np.ndarray]:
    """The arrays of a file that comes with calgp; unpacking takes longer than a short training, so it is done once."""
    file = resources.files("calgp.data") / "embedded" / f"{name}.xz"
    with file.open("rb") as packed, lzma.open(packed) as stream:
        return [np.lib.format.read_array(stream, allow_pickle=False) for _ in range(3)]


def _images(x: np.ndarray, y: np.ndarray, classes: tuple[str, ...], paths: list[Path]) -> Images:
    """Arrays out of files; the files' name goes with any complaint."""
    try:
        if y.shape != x.shape[:1]:  # before labels become eight times as large
            raise CalgpError(f"there are images {list(x.shape)} and labels {list(y.shape)}; give one label an image.")
        pixels = torch.from_numpy(x)
        return Images.of(pixels[:, None] if x.ndim == 3 else pixels, torch.from_numpy(y).long(), classes)
    except CalgpError as error:
        raise CalgpError(f"{paths[0]} and its labels do not fit together: {error}") from error


def _missing(source: Source, root: Path, files: list[str]) -> CalgpError:
    command = f", or let `calgp sources --download {source.name}` download them"
    return CalgpError(
        f"{source.name} is not in {root}. Put {', '.join(files)} there{command if source.downloadable else ''}. "
        f"Another folder is named by --data or the variable CALGP_DATA."
    )


_DIGITS = tuple("0123456789")
_LETTERS = tuple("ABCDEFGHIJ")
_TABLE: tuple[Source, ...] = (
    BundledSource(
        name="digits",
        description="5,000 + 1,000 of MNIST's handwritten digits, 28×28 grey; comes with calgp",
        classes=10, channels=1, size=28, class_names=_DIGITS,
        files={"train": ("digits-train",), "test": ("digits-test",)},
    ),
    BundledSource(
        name="digits-large",
        description="digits with 7,000 more test images (8,000 in all), to tell close methods apart; comes with calgp",
        classes=10, channels=1, size=28, class_names=_DIGITS,
        files={"train": ("digits-train",), "test": ("digits-test", "digits-test-2")},
    ),
    BundledSource(
        name="letters",
        description="1,000 letters A–J in many typefaces, 28×28 grey, to test what is not a digit; comes with calgp",
        classes=10, channels=1, size=28, splits=("test",), class_names=_LETTERS, files={"test": ("letters-test",)},
    ),
    IdxSource(
        name="mnist",
        description="MNIST: 60,000 + 10,000 handwritten digits, 28×28 grey",
        downloadable=True, classes=10, channels=1, size=28, class_names=_DIGITS, folders=("MNIST/raw", "mnist", "."),
        files={
            "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
            "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
        },
    ),
    IdxSource(
        name="notmnist",
        description="notMNIST (small): 18,724 letters A–J in many typefaces, 28×28 grey",
        classes=10, channels=1, size=28, splits=("test",), class_names=_LETTERS,
        folders=("notMNIST/raw", "notmnist", "."), files={"test": ("images-idx3-ubyte", "labels-idx1-ubyte")},
        folder_of_images="notMNIST_small",
    ),
    CifarSource(
        name="cifar10",
        description="CIFAR-10: 50,000 + 10,000 photographs of 10 classes, 32×32 RGB",
        downloadable=True, classes=10, channels=3, size=32, python="cifar-10-batches-py", binary="cifar-10-batches-bin",
        batches={"train": tuple(f"data_batch_{part}" for part in range(1, 6)), "test": ("test_batch",)},
        label_key="labels", names_key="label_names", names_file="batches.meta", names_text="batches.meta.txt",
        label_bytes=1,
    ),
    CifarSource(
        name="cifar100",
        description="CIFAR-100: 50,000 + 10,000 photographs of 100 classes, 32×32 RGB",
        downloadable=True, classes=100, channels=3, size=32, python="cifar-100-python", binary="cifar-100-binary",
        batches={"train": ("train",), "test": ("test",)},
        label_key="fine_labels", names_key="fine_label_names", names_file="meta", names_text="fine_label_names.txt",
        label_bytes=2,
    ),
)  # fmt: skip
SOURCES: dict[str, Source] = {source.name: source for source in _TABLE}

PATH_SOURCES: dict[str, tuple[type[Folder] | type[Shards], bool]] = {  # and whether its images stay in their files
    "folder": (Folder, False),
    "stream": (Folder, True),
    "shards": (Shards, True),
}
_PATH_HELP = "folder:PATH, stream:PATH (a folder that stays on the disk) and shards:PATH (tar files)"
