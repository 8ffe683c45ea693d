"""What users hand in to be predicted: files, folders, Pillow images, arrays, tensors."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image, ImageOps
from torch import Tensor

from calgp.data.decode import SUFFIXES, Colour, image_array, read_image
from calgp.errors import CalgpError, short_repr
from calgp.nets import Task
from calgp.runs.evaluation import colour_of

ImageLike: TypeAlias = str | os.PathLike[str] | Image.Image | np.ndarray | Tensor


def to_pixels(
    images: ImageLike | Sequence[ImageLike], task: Task
) -> tuple[tuple[str, ...] | None, Float[Tensor, "N C H W"]]:
    """File names, if all came from files, and the images as float32 in [0, 1] in the form that the run takes.

    Files and Pillow images are brought into that form; arrays and tensors must have it.
    """
    given: Sequence[ImageLike] = images if isinstance(images, list | tuple) else [images]  # pyright: ignore[reportAssignmentType]
    parts = [_pixels(each, task) for each in given]
    if not sum(len(x) for _, x in parts):
        raise CalgpError("Invalid images: must be at least one, such as a file, a folder, a Pillow image or an array.")
    names = [name for found, _ in parts for name in found or ()]
    return tuple(names) if all(found is not None for found, _ in parts) else None, torch.cat([x for _, x in parts])


def _pixels(image: ImageLike, task: Task) -> tuple[list[str] | None, Tensor]:
    size = (task.height, task.width)
    if isinstance(image, str | os.PathLike):
        files, colour = image_files(Path(image)), colour_of(task)
        arrays = [read_image(file, name=str(file), size=size, colour=colour) for file in files]
        return [str(file) for file in files], torch.from_numpy(np.stack(arrays)).float() / 255
    if isinstance(image, Image.Image):
        return None, torch.from_numpy(_from_pillow(image, size=size, colour=colour_of(task)))[None].float() / 255
    if isinstance(image, np.ndarray | Tensor):
        return None, _from_array(image, task)
    raise CalgpError(
        f"Invalid image {short_repr(image)}: must be a file, a folder, a Pillow image, an array or a tensor."
    )


def _from_pillow(image: Image.Image, *, size: tuple[int, int], colour: Colour) -> np.ndarray:
    try:
        return image_array(ImageOps.exif_transpose(image), size=size, colour=colour)
    except Exception as error:  # an image that is not decoded yet, of a damaged file
        raise CalgpError(f"Invalid image {short_repr(image)}: it is not readable ({str(error)[:300]}).") from error


def _invalid_pixels(dtype: object) -> CalgpError:
    return CalgpError(f"Invalid pixels of {dtype}: must be uint8 from 0 to 255, or floats from 0 to 1.")


def _from_array(image: np.ndarray | Tensor, task: Task) -> Tensor:
    """One image or several, channels first or last, as [N, C, H, W] in [0, 1]."""
    try:  # NumPy's copied: torch takes no negative strides
        x = image.detach().cpu() if isinstance(image, Tensor) else torch.from_numpy(np.array(image, order="C"))
    except (TypeError, ValueError):
        raise _invalid_pixels(image.dtype) from None
    shape = (task.channels, task.height, task.width)
    last = (task.height, task.width, task.channels)
    x = x[None] if x.ndim == 3 and tuple(x.shape) in (shape, last) else x
    if task.channels == 1 and tuple(x.shape[-2:]) == shape[1:] and x.ndim in (2, 3):  # grey, without a channel axis
        x = x.reshape(-1, *shape)
    if x.ndim == 4 and tuple(x.shape[1:]) == last != shape:
        x = x.movedim(-1, 1)
    if x.ndim != 4 or tuple(x.shape[1:]) != shape:
        wanted = " × ".join(map(str, shape))
        raise CalgpError(
            f"Invalid images of shape {list(x.shape)}: must be [N, {', '.join(map(str, shape))}], since the run was "
            f"trained on {wanted}. Files and Pillow images of any size are resized."
        )
    if x.dtype == torch.uint8:
        return x.float() / 255
    if not x.is_floating_point():
        raise _invalid_pixels(x.dtype)
    if x.numel() and not (x.amin() >= 0 and x.amax() <= 1):  # also where some are NaN
        ends = f"{x.amin():g} to {x.amax():g}"
        raise CalgpError(f"Invalid pixels from {ends}: floats must lie in [0, 1]; give 0 to 255 as uint8.")
    return x.float()


def image_files(path: Path) -> list[Path]:
    """An image file, or all images below a folder in the order of their names."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise CalgpError(f"{path} does not exist; give image files, or folders of them.")
    images = (file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
    found = sorted(file for file in images if not file.name.startswith("."))
    if not found:
        raise CalgpError(f"{path} has no images ({', '.join(sorted(SUFFIXES))}).")
    return found
