"""Images that stay in their files until they are read."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from calgp.errors import CalgpError

from .decode import Colour, check_memory, read_header, read_image
from .files import ImageFiles
from .prefetch import Index, prefetch

Shape = tuple[int, int, int]  # channels, height, width
SIDE = 64  # pixels, of images that are stretched although no size was given
LARGEST_KEPT = 256  # pixels a side: larger images are stretched
_NAMED = 10  # unreadable files in a message


@dataclass(frozen=True, eq=False)
class StreamedPixels:
    """Stands for a uint8 tensor [N, C, H, W] in `Images`, and takes no memory: `x[index]` decodes files to a tensor."""

    files: ImageFiles
    numbers: Tensor  # of the files that are meant
    image_shape: Shape
    size: int | None
    colour: Colour
    workers: int

    dtype = torch.uint8
    ndim = 4

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.numbers), *self.image_shape))

    def numel(self) -> int:
        return self.shape.numel()

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int | slice | Tensor) -> Tensor:
        if isinstance(index, int):
            return self[torch.tensor([range(len(self))[index]])][0]
        pixels, unreadable = self.decode(self.numbers[index])
        if unreadable:
            raise unreadable_error(self.files.place, list(unreadable.values()))
        return pixels

    def index_select(self, dim: int, index: Tensor) -> "StreamedPixels":
        return replace(self, numbers=self.numbers[index])

    def read(self, indices: Iterable[Index]) -> Iterator[tuple[Index, Tensor]]:
        return prefetch(self.__getitem__, indices, self.workers)

    def original(self, index: int) -> Tensor:
        """One image uint8 [C, H, W] in the size that its file has, whatever `size` is."""
        number = int(self.numbers[index])
        try:
            name = self.files.names[number]
            return torch.from_numpy(read_image(self.files.open(number), name=name, size=None, colour=self.colour))
        except CalgpError as error:
            raise unreadable_error(self.files.place, [str(error)]) from None

    def digests(self) -> np.ndarray:
        return self.files.digests(self.numbers)

    def decode(self, numbers: Tensor) -> tuple[Tensor, dict[int, str]]:
        """These files as images, and why some cannot be read, by their index; all are tried."""
        check_memory(len(numbers), *self.image_shape)
        self.files.read_ahead(numbers)
        pixels, unreadable = np.empty((len(numbers), *self.image_shape), np.uint8), dict[int, str]()
        for i, number in enumerate(numbers.tolist()):
            name = self.files.names[number]
            try:
                array = read_image(self.files.open(number), name=name, size=self.size, colour=self.colour)
            except CalgpError as error:
                unreadable[i] = str(error)
                continue
            if array.shape == self.image_shape:
                pixels[i] = array
            else:
                found, expected = (f"{shape[2]}×{shape[1]}" for shape in (array.shape, self.image_shape))
                unreadable[i] = f"{name} is {found}, the others are {expected}; --size brings all to one"
        return torch.from_numpy(pixels), unreadable

    def unreadable(self, batch: int = 100) -> dict[int, str]:
        """Why some images cannot be read, by their index: decodes all of them, and keeps none."""
        batches = torch.arange(len(self)).split(batch)
        bad = torch.cat([index[~readable] for index, readable in prefetch(self._readable, batches, self.workers)])
        reasons = self.decode(self.numbers[bad])[1]  # of a few, once more
        return {int(index): reasons[i] for i, index in enumerate(bad.tolist()) if i in reasons}

    def _readable(self, index: Tensor) -> Tensor:
        readable = torch.ones(len(index), dtype=torch.bool)
        readable[list(self.decode(self.numbers[index])[1])] = False
        return readable


@dataclass(frozen=True)
class Format:
    """What all images of some sets are decoded to.

    size: the side of the square that they are stretched to; None: they have one size already. unreadable: names of
    files whose header cannot be read.
    """

    shape: Shape
    size: int | None
    colour: Colour
    unreadable: list[str]


def common_format(sets: Sequence[ImageFiles], size: int | None, colour: Colour | None) -> Format:
    """The format that all images can have.

    Headers are read only if `size` or `colour` is None. Without a size, images that differ in size, or are large, are
    stretched to a small square; without a colour they are grey if every one is.
    """
    if size is not None and colour is not None:
        return Format((1 if colour == "grey" else 3, size, size), size, colour, [])
    sizes, colours, unreadable = set[tuple[int, int]](), set[Colour](), list[str]()
    for files, number in ((each, number) for each in sets for number in range(len(each.names))):
        if (header := _header(files, number)) is None:
            unreadable.append(f"{files.names[number]} is not a readable image")
        else:
            colours.add("grey" if header[0] else "rgb")
            sizes.add(header[1])
    if not sizes:
        raise unreadable_error(sets[0].place, unreadable)
    colour, longest = colour or ("rgb" if "rgb" in colours else "grey"), max(map(max, sizes))
    if size is None and (len(sizes) > 1 or longest > LARGEST_KEPT):
        size = min(longest, SIDE)
    width, height = (size, size) if size else sizes.pop()
    return Format((1 if colour == "grey" else 3, height, width), size, colour, unreadable)


def _header(files: ImageFiles, number: int) -> tuple[bool, tuple[int, int]] | None:
    try:
        return read_header(files.open(number))
    except CalgpError:
        return None


def unreadable_error(place: str, reasons: Sequence[str]) -> CalgpError:
    """Of images in a place, if it has a name, for these reasons."""
    more = f", and {len(reasons) - _NAMED} more" if len(reasons) > _NAMED else ""
    return CalgpError(
        f"{len(reasons)} of the images{place and f' in {place}'} cannot be read: {'; '.join(reasons[:_NAMED])}{more}. "
        "Repair or remove them, or leave them out with --skip-unreadable (skip_unreadable=True)."
    )
