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
from calgp.data.streaming import unreadable_error
from calgp.errors import CalgpError, short_repr
from calgp.nets import Task
from calgp.runs.evaluation import colour_of

ImageLike: TypeAlias = str | os.PathLike[str] | Image.Image | np.ndarray | Tensor


def to_pixels(
    images: ImageLike | Sequence[ImageLike], task: Task, *, skip_unreadable: bool = False
) -> tuple[tuple[str, ...] | None, Float[Tensor, "N C H W"], tuple[str, ...]]:
    """(file names, if all came from files; the images; why files were left out).

    Images are float32 in [0, 1] in the form that the run takes. Files and Pillow images are brought into that form;
    arrays and tensors must have it. Files that cannot be read are an error, or left out with `skip_unreadable`.
    """
    given: Sequence[ImageLike] = images if isinstance(images, list | tuple) else [images]  # pyright: ignore[reportAssignmentType]
    names: list[str] | None = []
    parts, unreadable = list[Tensor](), list[str]()
    for image in given:
        if not isinstance(image, str | os.PathLike):
            names = None
            parts.append(_pixels(image, task))
            continue
        for file in image_files(Path(image)):
            try:
                array = read_image(file, name=str(file), size=(task.height, task.width), colour=colour_of(task))
            except CalgpError as error:
                unreadable.append(str(error))
                continue
            parts.append(torch.from_numpy(array)[None].float() / 255)
            if names is not None:
                names.append(str(file))
    if unreadable and not parts:
        raise CalgpError("; ".join(unreadable[:3]) + ("." if len(unreadable) <= 3 else "; none can be read."))
    if unreadable and not skip_unreadable:
        raise unreadable_error("", unreadable)
    if not sum(map(len, parts)):
        raise CalgpError("Invalid images: must be at least one, such as a file, a folder, a Pillow image or an array.")
    return None if names is None else tuple(names), torch.cat(parts), tuple(unreadable)


def _pixels(image: Image.Image | np.ndarray | Tensor, task: Task) -> Tensor:
    if isinstance(image, Image.Image):
        array = _from_pillow(image, size=(task.height, task.width), colour=colour_of(task))
        return torch.from_numpy(array)[None].float() / 255
    if isinstance(image, np.ndarray | Tensor):
        return _from_array(image, task)
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
