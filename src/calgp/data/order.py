"""The order in which an epoch visits a set of images."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor


class Order(ABC):
    """How the images of an epoch are shuffled."""

    @abstractmethod
    def shuffle(self, n: int, generator: torch.Generator) -> Tensor:
        """The indices 0 … n - 1, shuffled."""

    @abstractmethod
    def subset(self, rows: Tensor) -> "Order":
        """The order for a part of the images: those with these rows."""


@dataclass(frozen=True)
class UniformOrder(Order):
    """Every permutation is equally likely: for images that are all equally fast to reach.

    >>> UniformOrder().shuffle(4, torch.Generator().manual_seed(0)).tolist()
    [0, 1, 3, 2]
    """

    def shuffle(self, n: int, generator: torch.Generator) -> Tensor:
        return torch.randperm(n, generator=generator)

    def subset(self, rows: Tensor) -> "UniformOrder":
        return self


UNIFORM = UniformOrder()


@dataclass(frozen=True)
class ShardOrder(Order):
    """Shards in random order, each from its beginning to its end, shuffled in windows: storage is read forwards."""

    starts: tuple[int, ...]  # the first row of each shard
    counts: tuple[int, ...]  # the images of this set in each shard
    window: int

    def shuffle(self, n: int, generator: torch.Generator) -> Tensor:
        shards = torch.randperm(len(self.counts), generator=generator).tolist()
        indices = torch.arange(n).split(list(self.counts))
        windows = torch.cat([indices[shard] for shard in shards]).split(self.window)
        return torch.cat([window[torch.randperm(len(window), generator=generator)] for window in windows])

    def subset(self, rows: Tensor) -> "ShardOrder":
        shard = torch.bucketize(rows, torch.tensor(self.starts), right=True) - 1
        counts = torch.bincount(shard, minlength=len(self.starts))
        return ShardOrder(self.starts, tuple(counts.tolist()), self.window)
