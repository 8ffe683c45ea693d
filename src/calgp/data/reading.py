"""How pictures are come by: from memory, or read by other processes ahead of their use; and in which order."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice
from multiprocessing import connection, get_all_start_methods, get_context, parent_process
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from calgp.errors import CalgpError

Index = TypeVar("Index", slice, Tensor)
WORKERS = 2  # processes that read ahead, unless told
_MOST_WORKERS = 256
_AHEAD = 2  # batches a process that are on their way


def worker_count(option: int | None = None) -> int:
    """How many processes read ahead: `option`, else $CALGP_WORKERS, else two; 0 reads in the process that asks."""
    text = str(option) if option is not None else os.environ.get("CALGP_WORKERS", str(WORKERS))
    if not text.isdecimal() or int(text) > _MOST_WORKERS:
        raise CalgpError(f"workers={text!r} cannot be; it is a number of processes, 0 to {_MOST_WORKERS}, such as 2.")
    return int(text)


class Order(ABC):
    """In which order an epoch goes through a set of pictures."""

    @abstractmethod
    def shuffled(self, n: int, generator: torch.Generator) -> Tensor:
        """The places 0 … n - 1, shuffled."""

    @abstractmethod
    def kept(self, rows: Tensor) -> Order:
        """The order of a part of the pictures: of those with these rows."""


@dataclass(frozen=True)
class Anywhere(Order):
    """All orders are equally likely: each picture can be reached as fast as any other."""

    def shuffled(self, n: int, generator: torch.Generator) -> Tensor:
        return torch.randperm(n, generator=generator)

    def kept(self, rows: Tensor) -> Anywhere:
        return self


ANYWHERE = Anywhere()


class Reading(ABC):
    """What a set of pictures needs to be read, to be compared and to be cut."""

    @abstractmethod
    def ahead(self, x: Any, indices: Iterable[Index]) -> Iterator[tuple[Index, Tensor]]:
        """Each index with its pictures (uint8 [n, C, H, W]), in turn; `indices` may be asked for before their turn."""

    @abstractmethod
    def content(self, x: Any) -> np.ndarray:
        """What a checksum covers of the pictures."""

    @abstractmethod
    def chosen(self, names: Sequence[str], index: Tensor) -> Sequence[str]:
        """The names at these places."""


@dataclass(frozen=True)
class InMemory(Reading):
    """Pictures that are a tensor."""

    def ahead(self, x: Tensor, indices: Iterable[Index]) -> Iterator[tuple[Index, Tensor]]:
        return ((index, x[index]) for index in indices)

    def content(self, x: Tensor) -> np.ndarray:
        return x.contiguous().numpy()

    def chosen(self, names: Sequence[str], index: Tensor) -> Sequence[str]:
        return tuple(names[i] for i in map(int, index.tolist()))


IN_MEMORY = InMemory()


@dataclass(frozen=True)
class Ahead(Reading):
    """Pictures in files, decoded by `workers` processes ahead of their turn; by none, in their turn."""

    workers: int

    def ahead(self, x: Any, indices: Iterable[Index]) -> Iterator[tuple[Index, Tensor]]:
        if not self.workers:
            yield from ((index, x[index]) for index in indices)
            return
        indices = iter(indices)
        under_way: deque[tuple[Index, Future[np.ndarray]]] = deque()
        context = get_context(_start_method())
        last_word, end = context.Pipe(duplex=False)
        pool = ProcessPoolExecutor(self.workers, context, initializer=_begin, initargs=(x, last_word))
        try:
            while True:
                for index in islice(indices, self.workers * _AHEAD - len(under_way)):
                    under_way.append((index, _submitted(pool, index)))
                if not under_way:
                    return
                index, future = under_way.popleft()
                yield index, torch.from_numpy(future.result())
        except BrokenProcessPool as error:
            end.send(None)  # those left may wait for ever for a lock that the dead one held
            raise CalgpError(
                "A process that reads pictures ahead was ended from outside, or had no memory left. A training goes on "
                "from its last checkpoint with --resume; fewer --workers need less memory."
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
            last_word.close()
            end.close()

    def content(self, x: Any) -> np.ndarray:
        return x.digests

    def chosen(self, names: Any, index: Tensor) -> Sequence[str]:
        return names.take(index)


def _start_method() -> str | None:
    """Forked processes begin at once and share the list of files with this one; elsewhere, what the system has."""
    return "fork" if "fork" in get_all_start_methods() else None


def _submitted(pool: ProcessPoolExecutor, index: Index) -> Future[np.ndarray]:
    with (
        warnings.catch_warnings()
    ):  # Python 3.12 warns of forks beside threads; these processes touch no lock of theirs
        warnings.simplefilter("ignore", DeprecationWarning)
        return pool.submit(_read, index if isinstance(index, slice) else index.numpy())


_pictures: Any = None  # of a process that reads ahead


def _begin(x: Any, last_word: connection.Connection) -> None:
    """Ctrl-C and SIGTERM are for the process that trains, whose end or last word also ends those that read for it."""
    global _pictures
    _pictures = x
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, args=(last_word,), daemon=True).start()


def _end_with_parent(last_word: connection.Connection) -> None:
    """Nobody takes the word, so that each reader sees it."""
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel, last_word])
        os._exit(1)


def _read(index: slice | np.ndarray) -> np.ndarray:
    return _pictures[index if isinstance(index, slice) else torch.from_numpy(index)].numpy()
