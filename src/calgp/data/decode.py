"""Image files as arrays: the one place where Pillow opens what a user hands in."""

import math
import os
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import IO, Literal, get_args

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from calgp.errors import CalgpError

from .bombs import MAX_FILE_BYTES, check_container, check_image

Colour = Literal["grey", "rgb"]
LARGEST = 4096  # pixels a side, of images that are resized
SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff"})
STRIP = 256  # lines put on white at a time
_GREY = {"1", "L", "LA", "La"}
_ROTATED = {5, 6, 7, 8}  # EXIF orientations that exchange width and height
_ORIENTATION = 0x0112


Size = int | tuple[int, int]  # the side of a square, or (height, width)


def read_image(file: Path | IO[bytes], *, name: str, size: Size | None, colour: Colour | None) -> np.ndarray:
    """An image file as uint8 [C, H, W]: upright (EXIF), on white where transparent, stretched to `size`.

    Raises:
        CalgpError: `name` is no image that can be decoded, or is so large that it may be an attack.
    """
    for side in size if isinstance(size, tuple) else (size,):
        check_format(side, colour)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # odd metadata
        try:
            with open_image(file) as image:
                ImageOps.exif_transpose(image, in_place=True)
                return image_array(image, size=size, colour=colour)
        except Exception as error:  # Pillow's decoders raise nearly everything on damaged files
            why = "its format is not known" if isinstance(error, UnidentifiedImageError) else str(error)[:300]
            raise CalgpError(f"{name} is not a readable image ({why or type(error).__name__})") from error


def read_header(file: Path | IO[bytes]) -> tuple[bool, tuple[int, int]] | None:
    """(is grey, (width, height)) from the header alone; None where it cannot be read, which decoding will report."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with open_image(file) as image:
                width, height = image.size
                rotated = image.getexif().get(_ORIENTATION) in _ROTATED
                return is_grey(image), (height, width) if rotated else (width, height)
        except Exception:
            return None


def check_format(size: int | None, colour: str | None) -> None:
    """Refuse a size or a colour that no image can have."""
    if size is not None and not 1 <= size <= LARGEST:
        raise CalgpError(f"Invalid size={size}: must be the side in pixels from 1 to {LARGEST}, such as 32.")
    if colour is not None and colour not in get_args(Colour):
        raise CalgpError(f"Invalid colour={colour!r}: must be 'grey' or 'rgb'.")


def check_memory(count: int, *shape: int) -> None:
    """Refuse so many images of this shape where they do not fit into the memory of the machine."""
    needed = count * math.prod(shape)
    if needed > (there := memory()):
        raise CalgpError(
            f"{count:,} images of {' × '.join(map(str, shape))} take {needed / 1e9:,.1f} GB, and this machine has "
            f"{there / 1e9:,.1f} GB of memory; choose a smaller size, fewer images, or stream:PATH, which leaves "
            "images in their files."
        )


def memory() -> int:
    """Bytes of this machine's memory; where the system does not tell, as many as there could be."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 2**63


@contextmanager
def open_image(
    file: Path | IO[bytes], formats: Collection[str] = (), pixels: int | None = None
) -> Iterator[Image.Image]:
    """An image file, opened and found to be no bomb, but not decoded; only the decoders of `formats` see it."""
    with _opened(file) as content:
        check_container(content)
        with Image.open(content, formats=tuple(formats) or _formats()) as image:
            check_image(image, pixels)
            yield image


@contextmanager
def _opened(file: Path | IO[bytes]) -> Iterator[IO[bytes]]:
    """Opens a regular file of bounded size: some decoders read it whole, and reading a pipe could hang."""
    if not isinstance(file, Path):
        yield file
        return
    if not file.is_file():
        raise CalgpError("it is no regular file")
    if (size := file.stat().st_size) > MAX_FILE_BYTES:
        raise CalgpError(f"it has {size} bytes; at most {MAX_FILE_BYTES} are read")
    with file.open("rb") as content:
        yield content


@cache
def _formats() -> tuple[str, ...]:
    """The decoders that may see a file, whatever its name; a Pillow built without one of them lacks it."""
    Image.init()
    return tuple(name for name in ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF") if name in Image.OPEN)


def is_grey(image: Image.Image) -> bool:
    return image.mode in _GREY or image.mode.startswith("I")


def image_array(image: Image.Image, *, size: Size | None = None, colour: Colour | None = None) -> np.ndarray:
    """A Pillow image as uint8 [C, H, W]; its own colour (one channel where grey) unless one is given."""
    target = {"grey": "L", "rgb": "RGB"}[colour or ("grey" if is_grey(image) else "rgb")]
    flat = _flat(image)
    flat = flat if flat.mode == target else flat.convert(target)
    if size is not None:
        height, width = (size, size) if isinstance(size, int) else size
        flat = flat if flat.size == (width, height) else flat.resize((width, height), Image.Resampling.BILINEAR)
    array = np.array(flat, np.uint8)
    return array[None] if array.ndim == 2 else np.ascontiguousarray(array.transpose(2, 0, 1))


def _flat(image: Image.Image) -> Image.Image:
    """Eight bits a channel and nothing transparent."""
    if image.mode.startswith("I"):  # 16-bit grey: 0 … 65535 to 0 … 255
        wide = np.array(image, np.int32)
        np.clip(wide, 0, 65535, out=wide)
        wide *= 255
        wide += 32767
        wide //= 65535
        return Image.fromarray(wide.astype(np.uint8))
    if image.mode == "F":
        raise CalgpError("its pixels are floats, whose range is not known")
    if not image.has_transparency_data:
        return image
    flat, (width, height) = Image.new("RGB", image.size), image.size
    for top in range(0, height, STRIP):  # whole, it would take five images of four bytes a pixel
        strip = image.crop((0, top, width, min(top + STRIP, height))).convert("RGBA")
        white = Image.new("RGBA", strip.size, "white")
        flat.paste(Image.alpha_composite(white, strip).convert("RGB"), (0, top))
    return flat
