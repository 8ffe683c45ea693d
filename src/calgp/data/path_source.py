"""Images of one's own, at a path: how they are split, what is decoded when, and what to do about unreadable files."""

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from calgp.errors import CalgpError

from .decode import SUFFIXES, Colour, check_format
from .files import ImageFiles
from .images import Images, stratified
from .order import UNIFORM, Order
from .source import Source, Split
from .streaming import StreamedPixels, common_format, unreadable_error

TEST_SHARE = 0.2
_SPLIT_SEED = 0
PART_NAMES: dict[str, Split] = {
    "train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val",
    "test": "test", "testing": "test",
}  # fmt: skip
_PURPOSE: dict[Split, str] = {"train": "to train on", "val": "held out", "test": "to test on"}


@dataclass(frozen=True, eq=False)
class Part:
    """The files of one part of a set, by their numbers."""

    files: ImageFiles
    numbers: Tensor
    order: Order = UNIFORM

    @staticmethod
    def whole(files: ImageFiles, order: Order = UNIFORM) -> "Part":
        return Part(files, torch.arange(len(files.names)), order)


@dataclass(frozen=True, eq=False)
class Layout:
    """Which files belong to which part, and how that was decided, in a sentence."""

    classes: tuple[str, ...]
    parts: dict[Split, Part]
    sentence: str


@dataclass(frozen=True)
class PathSource(Source):
    """Images at a path, decoded to `size` and `colour`; everything else is found out from the files.

    With `workers=None` all images are decoded into memory. Otherwise they stay in their files, and `workers` processes
    decode them ahead of their use: the same images in the same order, in memory that does not grow with them.

    Files that cannot be read are an error that names them, or are left out with `skip_unreadable`. In memory, loading
    the training images also checks the other parts. Streams check the headers that they read anyway; a damaged image
    behind a good header is found when its turn comes, or at the start with `skip_unreadable`, which decodes all once.

    `test_share` of each class, a fixed random choice, is the test part of a set that has none of its own.
    """

    path: Path
    colour: Colour | None = None
    workers: int | None = None
    skip_unreadable: bool = False
    test_share: float = TEST_SHARE
    classes: int | None = field(init=False, default=None)
    channels: int | None = field(init=False, default=None)
    splits: tuple[Split, ...] = field(init=False, default=("train", "val", "test"))
    downloadable: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        check_format(self.size, self.colour)
        if not 0 < self.test_share <= 1:
            raise CalgpError(f"Invalid test_share={self.test_share}: must be above 0 and at most 1, such as 0.2.")

    @abstractmethod
    def own_parts(self) -> dict[Split, Path]:
        """The parts that the files themselves are divided into; empty if they are not. It opens no file."""

    @abstractmethod
    def layout(self) -> Layout:
        """All files, divided into parts."""

    def validation(self) -> Images | None:
        return self.load("val") if "val" in self.own_parts() else None

    def load(self, split: Split, directory: Path | None = None) -> Images:
        """The images of one part; `rows` count the files of the folder that they were found in."""
        self.check_split(split)
        layout = self.layout()
        if split not in layout.parts:
            there = ", ".join(layout.parts)
            raise CalgpError(f"{self.path} has no {split} images, only {there}; add a {split} part.")
        part, before, order = layout.parts[split], 0, layout.parts[split].order
        if split == "val" and "train" in layout.parts:  # no row is that of a training image, and none is trained on
            before, order = len(layout.parts["train"].files.names), UNIFORM
        x, unreadable, side = self._read(split, layout)
        note = layout.sentence
        if side:
            note += f" Images differ in size or are large: all are stretched to {side} × {side} (--size)."
        numbers = part.numbers
        if unreadable:
            index = torch.tensor([i for i in range(len(numbers)) if i not in unreadable])
            x, numbers = x.index_select(0, index), numbers[index]
            note += f" {len(unreadable):,} unreadable image{'s are' if len(unreadable) > 1 else ' is'} left out."
        names, labels = part.files.names.take(numbers), part.files.labels[numbers]
        return Images(x, labels, layout.classes, numbers + before, names, order.subset(numbers), note, side)  # type: ignore[arg-type]

    def _read(self, split: Split, layout: Layout) -> tuple[Tensor | StreamedPixels, dict[int, str], int | None]:
        """The images of a part, or what stands for them; those that are to be left out; the side that was chosen."""
        sets = list(dict.fromkeys(part.files for part in layout.parts.values()))
        form = common_format(sets, self.size, self.colour)
        streams = {
            name: StreamedPixels(part.files, part.numbers, form.shape, form.size, form.colour, self.workers or 0)
            for name, part in layout.parts.items()
        }
        x, unreadable, elsewhere = streams[split], dict[int, str](), list[str]()
        if self.workers is None:
            x, unreadable = x.decode(x.numbers)
            if split == "train" and not self.skip_unreadable:
                elsewhere = [why for other in streams if other != split for why in streams[other].unreadable().values()]
        elif self.skip_unreadable:
            unreadable = x.unreadable()
        elif split == "train":
            elsewhere = form.unreadable
        if len(unreadable) == len(x) or (not self.skip_unreadable and (unreadable or elsewhere)):
            raise unreadable_error(str(self.path), [*unreadable.values(), *elsewhere])
        return x, unreadable, form.size if self.size is None else None

    def _own_layout(self, classes: tuple[str, ...], parts: dict[Split, Part], unused: Iterable[str] = ()) -> Layout:
        """The layout of files that are divided already."""
        counts = "; ".join(
            f"{len(parts[split].numbers):,} images {_PURPOSE[split]} ({path.name})"
            for split, path in self.own_parts().items()
        )
        left_out = f" Not used: {', '.join(unused)}." if unused else ""
        return Layout(classes, parts, f"{self.path}: {counts}.{left_out}")

    def _split_layout(self, classes: tuple[str, ...], whole: Part) -> Layout:
        """The layout of files that are not divided yet: a fixed random share of each class is the test part."""
        if self.test_share == 1:
            return Layout(classes, {"test": whole}, f"{self.path}: all {len(whole.numbers):,} images are used.")
        counts = torch.bincount(whole.files.labels, minlength=len(classes))
        if counts.min() < 2:
            few = int(counts.argmin())
            if not counts[few]:
                raise CalgpError(
                    f"Class {classes[few]!r} of {self.path} has no images ({' '.join(sorted(SUFFIXES))}); add some, or "
                    "remove it."
                )
            raise CalgpError(
                f"Class {classes[few]!r} of {self.path} has 1 image, too few to split into training and test images; "
                "add some, or put training and test images into folders train and test."
            )
        test = stratified(whole.files.labels, len(classes), self.test_share, _SPLIT_SEED)
        parts: dict[Split, Part] = {
            "train": Part(whole.files, (~test).nonzero().squeeze(1), whole.order),
            "test": Part(whole.files, test.nonzero().squeeze(1), whole.order),
        }
        sentence = (
            f"{self.path} has no test part, so {self.test_share:.0%} of each class are test images: "
            f"{int((~test).sum()):,} images to train on, {int(test.sum()):,} to test on."
        )
        return Layout(classes, parts, sentence)


def find_parts(folders: Iterable[Path], names: Iterable[str]) -> dict[Split, Path]:
    """Which of the folders (or file patterns), by their names, are the train, val and test parts.

    A validation part is the test part if there is no other.
    """
    parts: dict[Split, Path] = {}
    for folder, name in zip(folders, names, strict=True):
        split = PART_NAMES.get(name.lower())
        if split in parts:
            raise CalgpError(f"Both {parts[split]} and {folder} could be the {split} images; rename one of them.")
        if split is not None:
            parts[split] = folder
    if "val" in parts and "test" not in parts:
        parts["test"] = parts.pop("val")
    return {split: parts[split] for split in _PURPOSE if split in parts}
