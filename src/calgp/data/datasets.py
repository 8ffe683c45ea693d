"""Anybody's PyTorch data set as `Images`."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from calgp.errors import CalgpError

from .decode import image_array
from .images import Images

_CHANNELS = (1, 3, 4)
_ROUNDING = 1e-5  # how far interpolation may step over [0, 1]


def from_dataset(dataset: Dataset[Any] | DataLoader[Any], classes: Sequence[str] | None = None) -> Images:
    """Every (image, label) of a Dataset or DataLoader, read once, in the order in which it gives them.

    Images are tensors [C, H, W] or [H, W], NumPy arrays with channels first or last, or Pillow images: uint8, or
    floats in [0, 1], which are rounded to uint8. Without `classes`, the data set's own `classes` are taken, or numbers.

    >>> import torch
    >>> pairs = torch.utils.data.TensorDataset(torch.zeros(4, 1, 28, 28), torch.tensor([0, 1, 1, 0]))
    >>> images = from_dataset(pairs, classes=["cat", "dog"])
    >>> images.x.shape, images.x.dtype, images.classes
    (torch.Size([4, 1, 28, 28]), torch.uint8, ('cat', 'dog'))
    """
    images, labels = [], []
    for place, (image, label) in enumerate(_items(dataset)):
        images.append(_pixels(image, place))
        labels.append(_label(label, place))
        if images[-1].shape != images[0].shape:
            raise CalgpError(
                f"Invalid image {place} of shape {list(images[-1].shape)}: must have the shape of image 0, "
                f"{list(images[0].shape)}; resize them in the data set's transform."
            )
    if not images:
        raise CalgpError("Invalid data set: must have at least one (image, label), but it is empty.")
    names = tuple(classes) if classes is not None else _class_names(dataset, max(labels) + 1)
    return Images.of(torch.stack(images), torch.tensor(labels), names)


def _items(dataset: Any) -> Iterator[tuple[Any, Any]]:
    """Single (image, label) pairs, out of batches where there are batches."""
    loader = isinstance(dataset, DataLoader)
    if loader or isinstance(dataset, IterableDataset):
        pairs = map(_pair, dataset)
    else:
        try:
            pairs = (_pair(dataset[place]) for place in range(len(dataset)))
        except TypeError as error:
            raise CalgpError(
                f"Invalid data set of type {type(dataset).__name__}: must be a Dataset with a length or a DataLoader."
            ) from error
    batched = loader and (dataset.batch_size is not None or dataset.batch_sampler is not None)
    yield from (each for batch in pairs for each in zip(*batch, strict=True)) if batched else pairs


def _pair(item: Any) -> tuple[Any, Any]:
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise CalgpError(f"Invalid item of type {type(item).__name__}: must be a pair (image, label).")
    return item[0], item[1]


def _pixels(image: Any, place: int) -> Tensor:
    """One image as uint8 [C, H, W]."""
    if isinstance(image, Image.Image):
        return torch.from_numpy(image_array(image))
    if isinstance(image, np.ndarray):
        image = torch.from_numpy(np.array(_channels_first(image, place)))
    if not isinstance(image, Tensor):
        raise CalgpError(
            f"Invalid image {place} of type {type(image).__name__}: must be a tensor, a NumPy array or a Pillow image."
        )
    if image.ndim == 2:
        image = image[None]
    if image.ndim != 3:
        raise CalgpError(f"Invalid image {place} of shape {list(image.shape)}: must be [C, H, W] or [H, W].")
    return _bytes(image.detach().cpu(), place)


def _channels_first(array: np.ndarray, place: int) -> np.ndarray:
    if array.ndim != 3:
        return array
    first, last = array.shape[0] in _CHANNELS, array.shape[2] in _CHANNELS
    if first == last:
        raise CalgpError(
            f"Invalid image {place} of shape {list(array.shape)}: must have 1, 3 or 4 channels either first or last; "
            f"give a tensor, which has them first."
        )
    return array if first else array.transpose(2, 0, 1)


def _bytes(image: Tensor, place: int) -> Tensor:
    if image.dtype == torch.uint8:
        return image
    if not image.is_floating_point():
        raise CalgpError(f"Invalid image {place} of {image.dtype}: must be uint8, or floats in [0, 1].")
    if not bool(((image >= -_ROUNDING) & (image <= 1 + _ROUNDING)).all()):
        raise CalgpError(
            f"Invalid image {place} with floats from {image.min():.3g} to {image.max():.3g}: must be in [0, 1]; leave "
            f"out normalisation by mean and deviation, and divide 0 … 255 by 255."
        )
    return image.to(torch.float64).mul(255).round().clamp(0, 255).to(torch.uint8)


def _label(label: Any, place: int) -> int:
    single = isinstance(label, Tensor | np.ndarray | np.generic) and np.prod(label.shape) == 1
    value = label.item() if single else label
    if isinstance(value, bool) or not isinstance(value, int):
        raise CalgpError(f"Invalid label {str(label)[:60]} of image {place}: must be one integer, counted from 0.")
    return value


def _class_names(dataset: Any, count: int) -> tuple[str, ...]:
    """torchvision's habit, `dataset.classes`, where it fits; else the labels' numbers."""
    own = getattr(getattr(dataset, "dataset", dataset), "classes", None)
    if isinstance(own, list | tuple) and len(own) >= count:
        return tuple(map(str, own))
    return tuple(map(str, range(count)))
