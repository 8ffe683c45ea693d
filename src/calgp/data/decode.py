"""Picture files as arrays: the one place where Pillow opens what a user hands in."""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path
from typing import IO

import numpy as np
from PIL import Image, ImageOps

from calgp.errors import CalgpError

from .images import Colour, check_form

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff"})
LARGEST_FILE = 2**28  # bytes of a picture file
MOST_PIXELS = 2**26  # of a picture: 67 million; decoded and made RGB it takes some 20 bytes a pixel
_GREY = {"1", "L", "LA", "La"}
_ROTATED = {5, 6, 7, 8}  # EXIF orientations that exchange width and height
_ORIENTATION = 0x0112


Size = int | tuple[int, int]  # the side of a square, or (height, width)


def read_picture(file: Path | IO[bytes], *, name: str, size: Size | None, colour: Colour | None) -> np.ndarray:
    """A picture file as uint8 [C, H, W]: upright (EXIF), on white where transparent, stretched to `size`.

    Raises:
        CalgpError: `name` is no picture that can be decoded, or is so large that it may be an attack.
    """
    for side in size if isinstance(size, tuple) else (size,):
        check_form(side, colour)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # odd metadata
        try:
            _check_file(file)
            with Image.open(file, formats=_formats()) as picture:
                _check_pixels(picture)
                ImageOps.exif_transpose(picture, in_place=True)
                return picture_array(picture, size=size, colour=colour)
        except Exception as error:  # Pillow's decoders raise nearly everything on damaged files
            raise CalgpError(
                f"{name} is not a readable picture ({str(error)[:300] or type(error).__name__})"
            ) from error


def survey(file: Path | IO[bytes]) -> tuple[bool, tuple[int, int]] | None:
    """(is grey, (width, height)) from the header alone; None where it cannot be read, which decoding will report."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            _check_file(file)
            with Image.open(file, formats=_formats()) as picture:
                _check_pixels(picture)
                width, height = picture.size
                rotated = picture.getexif().get(_ORIENTATION) in _ROTATED
                return is_grey(picture), (height, width) if rotated else (width, height)
        except Exception:
            return None


@cache
def _formats() -> tuple[str, ...]:
    """The decoders that may see a file, whatever its name; a Pillow built without one of them lacks it."""
    Image.init()
    return tuple(name for name in ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF") if name in Image.OPEN)


def is_grey(picture: Image.Image) -> bool:
    return picture.mode in _GREY or picture.mode.startswith("I")


def picture_array(picture: Image.Image, *, size: Size | None = None, colour: Colour | None = None) -> np.ndarray:
    """A Pillow picture as uint8 [C, H, W]; its own colour (one channel where grey) unless one is given."""
    target = {"grey": "L", "rgb": "RGB"}[colour or ("grey" if is_grey(picture) else "rgb")]
    flat = _flat(picture)
    flat = flat if flat.mode == target else flat.convert(target)
    if size is not None:
        height, width = (size, size) if isinstance(size, int) else size
        flat = flat if flat.size == (width, height) else flat.resize((width, height), Image.Resampling.BILINEAR)
    array = np.array(flat, np.uint8)
    return array[None] if array.ndim == 2 else np.ascontiguousarray(array.transpose(2, 0, 1))


def _flat(picture: Image.Image) -> Image.Image:
    """Eight bits a channel and nothing transparent."""
    if picture.mode.startswith("I"):  # 16-bit grey: 0 … 65535 to 0 … 255
        wide = np.array(picture, np.int32)
        np.clip(wide, 0, 65535, out=wide)
        wide *= 255
        wide += 32767
        wide //= 65535
        return Image.fromarray(wide.astype(np.uint8))
    if picture.mode == "F":
        raise CalgpError("its pixels are floats, whose range is not known")
    if not picture.has_transparency_data:
        return picture
    opaque = picture.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", opaque.size, "white"), opaque).convert("RGB")


def _check_file(file: Path | IO[bytes]) -> None:
    """Some decoders read a file whole, and a pipe would be waited for."""
    if not isinstance(file, Path):
        return
    if not file.is_file():
        raise CalgpError("it is no regular file")
    if (size := file.stat().st_size) > LARGEST_FILE:
        raise CalgpError(f"it has {size} bytes; at most {LARGEST_FILE} are read")


def _check_pixels(picture: Image.Image) -> None:
    """Refuse a picture that unfolds to gigabytes (a decompression bomb) before a pixel of it is decoded."""
    width, height = picture.size
    if width * height > MOST_PIXELS:
        raise CalgpError(f"a decompression bomb? It has {width} × {height} pixels; at most {MOST_PIXELS} are decoded")
