"""Inputs with labels, in whatever form somebody's own network has them: pairs, loaders, data sets, images."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from calgp.data import Images
from calgp.data.images import to_unit_interval
from calgp.errors import CalgpError, one_line
from calgp.nets.last_layer import LastLayer
from calgp.posthoc.decisions import keyed_uniform

Data: TypeAlias = tuple[Tensor, Tensor] | Iterable[Any] | Images  # (x, y), a loader or data set of such, or images
BATCH = 256
ARRAYS = (Tensor, np.ndarray)
INPUTS = ("pixel_values", "image", "images", "img", "x", "input", "inputs")  # in batches that are dictionaries
LABELS = ("label", "labels", "y", "target", "targets", "fine_label")


class Collected(NamedTuple):
    """What a network gives for all data, on the CPU."""

    c: Tensor  # features, [N, d]
    f: Tensor  # logits, [N, Q]
    y: Tensor  # labels, [N]
    uniform: Tensor  # numbers for randomised sets, [N]
    shape: tuple[int, ...]  # of an input

    def take(self, rows: Tensor) -> "Collected":
        return Collected(self.c[rows], self.f[rows], self.y[rows], self.uniform[rows], self.shape)


def collected(network: nn.Module, data: Data, layer: str | None, *, keyed: bool = True) -> tuple[LastLayer, Collected]:
    """The network's last layer, and what enters and leaves it; uniform numbers are 0 if not `keyed`."""
    last, shape, parts = None, (), []
    for x, y in batches_of(data):
        if not len(x):
            continue
        if last is None:
            last, shape = LastLayer.find(network, x, layer), tuple(x.shape[1:])
        if not isinstance(y, Tensor) or y.shape != x.shape[:1] or y.is_floating_point():
            raise CalgpError(
                f"Data must have a whole number as the label of each input, [N]; there are {_described(y)}. Take "
                "y.argmax(1) of one-hot labels, y.squeeze(1) of a column, y.long() of floating numbers."
            )
        c, f = last(x)
        low, high = (int(end) for end in y.aminmax())
        if low < 0 or high >= f.shape[1]:
            raise CalgpError(f"Labels must lie in 0 … {f.shape[1] - 1}; these run from {low} to {high}.")
        parts.append((c.cpu(), f.cpu(), y.cpu().long(), keyed_uniform(x) if keyed else torch.zeros(len(y))))
    if last is None:
        raise CalgpError(
            "There are no data to fit or measure on. A generator can be read once: give a list or a data loader."
        )
    c, f, y, uniform = (torch.cat(column) for column in zip(*parts, strict=True))
    return last, Collected(c, f, y, uniform, shape)


def batches_of(data: Data) -> Iterator[tuple[Tensor, Any]]:
    """Inputs and labels, batch by batch, of whatever was given; no labels are None."""
    if isinstance(data, Images):
        for part, pixels in data.read(data.parts(BATCH)):
            yield to_unit_interval(pixels), data.y[part]
        return
    if isinstance(data, Tensor):
        yield from ((x, None) for x in data.split(BATCH))
        return
    data = _pair(data) if isinstance(data, Mapping) else data
    if isinstance(data, tuple | list) and len(data) == 2 and _is_pair(data):
        x, y = torch.as_tensor(data[0]), _labels(data[1])
        if len(x) != len(y):
            raise CalgpError(f"There are {len(x)} inputs and {len(y)} labels.")
        size = BATCH if isinstance(y, Tensor) else len(x)  # labels that are none are refused as a whole
        yield from ((x[at : at + size], y[at : at + size]) for at in range(0, len(x), size))
        return
    if not isinstance(data, Dataset | Iterable):
        raise CalgpError(f"Data must be (x, y), a loader or data set of such, or images; there is {_described(data)}.")
    for batch in _collated(data) if isinstance(data, Dataset) else data:
        if isinstance(batch, Tensor):
            yield batch, None
        else:
            x, y = _pair(batch)
            yield torch.as_tensor(x), _labels(y)


def _collated(data: Dataset[Any]) -> Iterator[Any]:
    try:
        yield from DataLoader(data, BATCH)
    except (TypeError, RuntimeError) as error:  # of torch, about samples of somebody's data set
        raise CalgpError(
            f"Samples of the data set do not make a batch ({one_line(error)}). They must be tensors of one size: give "
            "it a transform, such as torchvision.transforms.ToTensor()."
        ) from None


def _is_pair(data: Sequence[Any]) -> bool:
    """Whether it is inputs and their labels, not two batches."""
    return isinstance(data[0], ARRAYS) and isinstance(data[1], (*ARRAYS, list))


def _pair(batch: Any) -> tuple[Any, Any]:
    """Inputs and labels of a batch: its first two parts, or the entries of a dictionary with the names of such."""
    if isinstance(batch, Mapping):
        x, y = (next((batch[name] for name in names if name in batch), None) for names in (INPUTS, LABELS))
        batch = batch if x is None or y is None else (x, y)
    if not isinstance(batch, tuple | list) or len(batch) < 2 or not isinstance(batch[0], ARRAYS):
        raise CalgpError(
            f"A batch must be (inputs, labels), both tensors; there is {_described(batch)}. Make pairs, such as "
            "[(batch['image'], batch['label']) for batch in loader]."
        )
    if isinstance(batch[1], int):
        raise CalgpError("The data are single images, not batches: give a loader, such as DataLoader(data, 256).")
    return batch[0], batch[1]


def _labels(y: Any) -> Any:
    """Labels as a tensor, if they can be one; `collected` refuses others."""
    if isinstance(y, list) and all(isinstance(each, int) for each in y):
        return torch.tensor(y, dtype=torch.long)
    if isinstance(y, np.ndarray) and y.dtype.kind in "biuf":
        return torch.as_tensor(y if y.dtype.kind == "f" else y.astype(np.int64))
    return y


def _described(value: object) -> str:
    if isinstance(value, Mapping):
        return f"a dictionary of {', '.join(map(str, value)) or 'nothing'}"
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, ARRAYS) else type(value).__name__
