"""How pictures are come by: from memory, or read by other processes ahead of their use; and in which order."""

from __future__ import annotations

import atexit
import os
import signal
import threading
import traceback
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import cycle, islice
from multiprocessing import get_all_start_methods, get_context
from multiprocessing.connection import Connection
from queue import SimpleQueue
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
        under_way: deque[tuple[Index, _Reader]] = deque()
        with ExitStack() as stack:
            turns = cycle([stack.enter_context(_Reader(x)) for _ in range(self.workers)])
            while True:
                for index in islice(indices, self.workers * _AHEAD - len(under_way)):
                    reader = next(turns)
                    reader.ask(index)
                    under_way.append((index, reader))
                if not under_way:
                    return
                index, reader = under_way.popleft()
                yield index, torch.from_numpy(reader.answer())

    def content(self, x: Any) -> np.ndarray:
        return x.digests

    def chosen(self, names: Any, index: Tensor) -> Sequence[str]:
        return names.take(index)


class _Reader:
    """A process that reads pictures for this one. It shares a pipe with it and nothing with other readers: any of them
    may be killed at any moment, and what it was about to hand over then ends early instead of being waited for."""

    def __init__(self, x: Any) -> None:
        context = get_context(_start_method())
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(  # type: ignore[attr-defined]
            target=_read_ahead, args=(x, theirs, self._pipe), daemon=True
        )
        with warnings.catch_warnings():  # Python 3.12 warns of forks beside threads; readers touch no lock of theirs
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        theirs.close()
        atexit.register(self._process.kill)  # Python would end the readers of an open reading by SIGTERM, in vain

    def ask(self, index: slice | Tensor) -> None:
        with _told_if_ended():
            self._pipe.send(index if isinstance(index, slice) else index.numpy())

    def answer(self) -> np.ndarray:
        """The pictures of the first index asked for that was not answered."""
        with _told_if_ended():
            answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *_: object) -> None:
        """A reader changes nothing: it may be stopped wherever it stands."""
        atexit.unregister(self._process.kill)
        self._process.kill()
        self._process.join()
        self._pipe.close()


@contextmanager
def _told_if_ended() -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError) as error:
        raise CalgpError(
            "A process that reads pictures ahead was ended from outside, or had no memory left. A training goes on "
            "from its last checkpoint with --resume; fewer --workers need less memory."
        ) from error


def _start_method() -> str | None:
    """Forked processes begin at once and share the list of files with this one; elsewhere, what the system has."""
    return "fork" if "fork" in get_all_start_methods() else None


# in the process that reads -------------------------------------------------------------------------------------------


def _read_ahead(x: Any, pipe: Connection, other_end: Connection) -> None:
    """Ctrl-C and SIGTERM are for the process that trains, whose end also ends those that read for it."""
    other_end.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_num_threads(1)  # a forked process has no others, and would wait for them
    indices: SimpleQueue[slice | np.ndarray] = SimpleQueue()
    threading.Thread(target=_receive, args=(pipe, indices), daemon=True).start()
    with ThreadPoolExecutor(1) as hand:  # the next pictures are read while these are handed over
        while True:
            hand.submit(pipe.send, _read(x, indices.get()))


def _receive(pipe: Connection, indices: SimpleQueue[slice | np.ndarray]) -> None:
    with suppress(EOFError, OSError):
        while True:
            indices.put(pipe.recv())
    os._exit(1)


def _read(x: Any, index: slice | np.ndarray) -> np.ndarray | Exception:
    """The pictures, or why there are none; what nobody foresaw comes with the place where it happened."""
    try:
        return x[index if isinstance(index, slice) else torch.from_numpy(index)].numpy()
    except (CalgpError, OSError, MemoryError) as error:
        return error
    except Exception:
        return RuntimeError(f"A process that reads pictures ahead has failed.\n{traceback.format_exc()}")
