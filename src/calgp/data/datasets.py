"""Anybody's PyTorch data set as `Images`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from calgp.errors import CalgpError

from .decode import picture_array
from .images import Images

_CHANNELS = (1, 3, 4)
_ROUNDING = 1e-5  # how far interpolation may step over [0, 1]


def from_dataset(dataset: Dataset[Any] | DataLoader[Any], classes: Sequence[str] | None = None) -> Images:
    """Every (image, label) of a Dataset or DataLoader, read once, in the order in which it gives them.

    Images are tensors [C, H, W] or [H, W], NumPy arrays with channels first or last, or Pillow pictures: uint8, or
    floats in [0, 1], which are rounded to uint8. Without `classes`, the data set's own `classes` are taken, or numbers.
    """
    pictures, labels = [], []
    for place, (image, label) in enumerate(_items(dataset)):
        pictures.append(_picture(image, place))
        labels.append(_label(label, place))
        if pictures[-1].shape != pictures[0].shape:
            raise CalgpError(
                f"Image {place} has the shape {list(pictures[-1].shape)}, image 0 {list(pictures[0].shape)}; "
                f"all must share one: resize them in the data set's transform."
            )
    if not pictures:
        raise CalgpError("The data set is empty; give at least one (image, label).")
    names = tuple(classes) if classes is not None else _class_names(dataset, max(labels) + 1)
    return Images.of(torch.stack(pictures), torch.tensor(labels), names)


def _items(dataset: Dataset[Any] | DataLoader[Any]) -> Iterator[tuple[Any, Any]]:
    """Single (image, label) pairs, out of batches where there are batches."""
    if isinstance(dataset, DataLoader) and dataset.batch_size is None and dataset.batch_sampler is None:
        yield from map(_pair, dataset)
    elif isinstance(dataset, DataLoader):
        for images, labels in map(_pair, dataset):
            yield from zip(images, labels, strict=True)
    else:
        yield from map(_pair, _each(dataset))


def _each(dataset: Any) -> Iterable[Any]:
    if isinstance(dataset, IterableDataset):
        return dataset
    try:
        return (dataset[place] for place in range(len(dataset)))
    except TypeError as error:
        raise CalgpError(
            f"from_dataset takes a PyTorch Dataset with a length or a DataLoader; got a {type(dataset).__name__}."
        ) from error


def _pair(item: Any) -> tuple[Any, Any]:
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise CalgpError(f"The data set must give (image, label) pairs; it gave a {type(item).__name__}.")
    return item[0], item[1]


def _picture(image: Any, place: int) -> Tensor:
    """One image as uint8 [C, H, W]."""
    if isinstance(image, Image.Image):
        return torch.from_numpy(picture_array(image))
    if isinstance(image, np.ndarray):
        image = torch.from_numpy(np.array(_channels_first(image, place)))
    if not isinstance(image, Tensor):
        raise CalgpError(
            f"Image {place} is a {type(image).__name__}; give a tensor, a NumPy array or a Pillow picture."
        )
    if image.ndim == 2:
        image = image[None]
    if image.ndim != 3:
        raise CalgpError(f"Image {place} has the shape {list(image.shape)}; expected [C, H, W] or [H, W].")
    return _bytes(image.detach().cpu(), place)


def _channels_first(array: np.ndarray, place: int) -> np.ndarray:
    if array.ndim != 3:
        return array
    first, last = array.shape[0] in _CHANNELS, array.shape[2] in _CHANNELS
    if first == last:
        raise CalgpError(
            f"Image {place} of shape {list(array.shape)} could have its channels first or last; "
            f"give a tensor, which has them first."
        )
    return array if first else array.transpose(2, 0, 1)


def _bytes(image: Tensor, place: int) -> Tensor:
    if image.dtype == torch.uint8:
        return image
    if not image.is_floating_point():
        raise CalgpError(f"Image {place} is of {image.dtype}; expected uint8, or floats in [0, 1].")
    if not bool(((image >= -_ROUNDING) & (image <= 1 + _ROUNDING)).all()):
        raise CalgpError(
            f"Image {place} has floats from {image.min():.3g} to {image.max():.3g}; expected [0, 1]: leave out "
            f"normalisation by mean and deviation, and divide 0 … 255 by 255."
        )
    return image.to(torch.float64).mul(255).round().clamp(0, 255).to(torch.uint8)


def _label(label: Any, place: int) -> int:
    single = isinstance(label, Tensor | np.ndarray | np.generic) and np.prod(label.shape) == 1
    value = label.item() if single else label
    if isinstance(value, bool) or not isinstance(value, int):
        raise CalgpError(f"The label of image {place} is {str(label)[:60]}; expected one integer, counted from 0.")
    return value


def _class_names(dataset: Any, count: int) -> tuple[str, ...]:
    """torchvision's habit, `dataset.classes`, where it fits; else the labels' numbers."""
    own = getattr(getattr(dataset, "dataset", dataset), "classes", None)
    if isinstance(own, list | tuple) and len(own) >= count:
        return tuple(map(str, own))
    return tuple(map(str, range(count)))
