"""Inputs with labels, in whatever form somebody's own network has them: pairs, loaders, data sets, images."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from calgp.data import Images
from calgp.data.images import to_unit_interval
from calgp.errors import CalgpError
from calgp.nets.last_layer import LastLayer
from calgp.posthoc.decisions import keyed_uniform

Data: TypeAlias = tuple[Tensor, Tensor] | Iterable[Any] | Images  # (x, y), a loader or data set of such, or images
BATCH = 256
ARRAYS = (Tensor, np.ndarray)


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
            raise CalgpError(
                f"Labels must lie in 0 … {f.shape[1] - 1}; these run from {low} to {high}. Number them from 0."
            )
        parts.append((c.cpu(), f.cpu(), y.cpu().long(), keyed_uniform(x) if keyed else torch.zeros(len(y))))
    if last is None:
        raise CalgpError("There are no data to fit or measure on.")
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
    if isinstance(data, tuple | list) and len(data) == 2 and all(isinstance(part, ARRAYS) for part in data):
        x, y = (torch.as_tensor(part) for part in data)
        if len(x) != len(y):
            raise CalgpError(f"There are {len(x)} inputs and {len(y)} labels.")
        yield from zip(x.split(BATCH), y.split(BATCH), strict=True)
        return
    if not isinstance(data, Dataset | Iterable):
        raise CalgpError(
            f"Data must be (x, y), a loader or data set of such pairs, or images; there is {_described(data)}."
        )
    for batch in DataLoader(data, BATCH) if isinstance(data, Dataset) else data:
        if isinstance(batch, Tensor):
            yield batch, None
        elif isinstance(batch, tuple | list) and len(batch) >= 2 and isinstance(batch[0], ARRAYS):
            yield torch.as_tensor(batch[0]), torch.as_tensor(batch[1]) if isinstance(batch[1], ARRAYS) else batch[1]
        else:
            raise CalgpError(
                f"A batch must be (inputs, labels), both tensors; there is {_described(batch)}. Make pairs, such as "
                "[(batch['image'], batch['label']) for batch in loader]."
            )


def _described(value: object) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
