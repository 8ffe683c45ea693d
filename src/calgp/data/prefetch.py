"""Processes that decode the next batches while the current one is in use.

`torch.utils.data.DataLoader` was tried: when a worker is killed it raises at any line of the program, or a bare
ConnectionResetError, and leaves the other workers running; and its batches need room in /dev/shm.
"""

import atexit
import os
import signal
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from itertools import cycle, islice
from multiprocessing import get_all_start_methods, get_context
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from calgp.errors import CalgpError

Index = TypeVar("Index", slice, Tensor)
WORKERS = 2  # processes, by default
_MAX_WORKERS = 256
_BATCHES_AHEAD = 2  # a process


def worker_count(option: int | None = None) -> int:
    """How many processes decode images: `option`, else $CALGP_WORKERS, else 2. With 0 the calling process does."""
    text = str(option) if option is not None else os.environ.get("CALGP_WORKERS", str(WORKERS))
    if not text.isdecimal() or int(text) > _MAX_WORKERS:
        raise CalgpError(f"Invalid workers={text}: must be a number of processes from 0 to {_MAX_WORKERS}, such as 2.")
    return int(text)


def prefetch(read: Callable[[Index], Tensor], indices: Iterable[Index], workers: int) -> Iterator[tuple[Index, Tensor]]:
    """Each index with `read(index)`, in order; `workers` processes compute them up to two batches a process ahead.

    >>> for index, batch in prefetch(torch.arange(6).__getitem__, [slice(0, 2), slice(2, 6)], workers=0):
    ...     print(batch.tolist())
    [0, 1]
    [2, 3, 4, 5]
    """
    if not workers:
        yield from ((index, read(index)) for index in indices)
        return
    indices = iter(indices)
    pending: deque[tuple[Index, Connection]] = deque()
    with ExitStack() as stack:
        pipes = cycle([stack.enter_context(_worker(read)) for _ in range(workers)])
        while True:
            for index in islice(indices, workers * _BATCHES_AHEAD - len(pending)):
                pending.append((index, next(pipes)))
                with _report_death():
                    pending[-1][1].send(index if isinstance(index, slice) else index.numpy())
            if not pending:
                return
            index, pipe = pending.popleft()
            with _report_death():
                answer = pipe.recv()
            if isinstance(answer, Exception):
                raise answer
            yield index, torch.from_numpy(answer)


@contextmanager
def _worker(read: Callable[[Any], Tensor]) -> Iterator[Connection]:
    """A pipe to a new process that answers indices with `read(index)`.

    No other process shares the pipe: if either end is killed at any moment, even in the middle of a message, the other
    end sees the pipe close. A worker changes nothing, so it may be killed wherever it stands.
    """
    # forked processes start at once and share the list of files with this one
    context = get_context("fork" if "fork" in get_all_start_methods() else None)
    pipe, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(read, theirs, pipe), daemon=True)  # type: ignore[attr-defined]
    with warnings.catch_warnings():  # Python 3.12 warns of forks beside threads; workers touch no lock of theirs
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    theirs.close()
    atexit.register(process.kill)  # Python would send SIGTERM, which workers ignore
    try:
        yield pipe
    finally:
        atexit.unregister(process.kill)
        process.kill()
        process.join()
        pipe.close()


@contextmanager
def _report_death() -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError) as error:
        raise CalgpError(
            "A worker process that reads images was killed, or ran out of memory. Continue the training from its last "
            "checkpoint with --resume; fewer --workers need less memory."
        ) from error


# in the worker process -----------------------------------------------------------------------------------------------


def _serve(read: Callable[[Any], Tensor], pipe: Connection, other_end: Connection) -> None:
    """Ctrl-C and SIGTERM are for the process that trains: a worker ends when that one closes the pipe or dies."""
    other_end.close()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)  # a forked process has no others, and would wait for them
    with ThreadPoolExecutor(1) as sender, suppress(EOFError, OSError):
        while True:
            index = pipe.recv()
            sender.submit(pipe.send, _answer(read, index))  # the next images are read while these are sent


def _answer(read: Callable[[Any], Tensor], index: slice | np.ndarray) -> np.ndarray | Exception:
    """The images, or why there are none; an unforeseen error comes with its traceback."""
    try:
        return read(index if isinstance(index, slice) else torch.from_numpy(index)).numpy()
    except (CalgpError, OSError, MemoryError) as error:
        return error
    except Exception:
        return RuntimeError(f"A worker process that reads images failed.\n{traceback.format_exc()}")
