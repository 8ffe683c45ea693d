"""Several processes that train or predict together (ranks), as one: what they must agree on, and how.

With one process all of this is nothing: no process group, no copies.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from calgp.errors import CalgpError, OneRankError
from calgp.gp import NumericalError
from calgp.runs.folder import RunFolder

T = TypeVar("T")
MEETING = timedelta(minutes=2)  # that ranks which have found each other may be apart when their work begins


def gathered(fabric: Fabric, value: T) -> list[T]:
    """The values of all ranks, in their order, on every rank. They are pickled: few bytes, or seldom."""
    if fabric.world_size == 1:
        return [value]
    found: list[Any] = [None] * fabric.world_size
    torch.distributed.all_gather_object(found, value)
    return found


def together(fabric: Fabric, do: Callable[[], T]) -> T:
    """What this rank finds by `do`. What one rank raises, all raise: none waits for a rank that has given up."""
    if fabric.world_size == 1:
        return do()
    found, error = None, None
    try:
        found = do()
    except (CalgpError, NumericalError) as raised:
        error = raised
    for rank, each in enumerate(gathered(fabric, error)):
        if each is not None:
            raise CalgpError(f"Rank {rank}: {each}") if rank and isinstance(each, CalgpError) else each
    return found  # type: ignore[return-value]


def on_first(fabric: Fabric, do: Callable[[], T]) -> T:
    """What rank 0 finds by `do`, on all ranks; the others do nothing. What it raises, all raise."""
    found = together(fabric, do if fabric.is_global_zero else lambda: None)
    return found if fabric.world_size == 1 else fabric.broadcast(found)  # type: ignore[return-value]


def wrap_rank_errors(fabric: Fabric, items: Iterator[T]) -> Iterator[T]:
    """The items; an error in finding them, such as an image that cannot be read, becomes an error of this rank."""
    try:
        yield from items
    except CalgpError as error:
        if fabric.world_size == 1:
            raise
        raise OneRankError(f"Rank {fabric.global_rank}: {error}") from error


def summed(fabric: Fabric, values: Tensor) -> Tensor:
    """Σ over ranks of a small tensor, which may be written over."""
    if fabric.world_size == 1:
        return values
    return fabric.all_reduce(values.to(fabric.device), reduce_op="sum")  # type: ignore[return-value]


def share(fabric: Fabric, index: Tensor) -> Tensor:
    """This rank's part of a batch that all ranks know: contiguous, sizes that differ by one at most; perhaps empty."""
    return index.tensor_split(fabric.world_size)[fabric.global_rank]


def same_buffers(fabric: Fabric, module: nn.Module) -> None:
    """Give the buffers of rank 0 to all; its parameters are given by DDP itself."""
    if fabric.world_size > 1:
        for buffer in module.buffers():
            buffer.copy_(fabric.broadcast(buffer.detach().cpu()))


def check_same(fabric: Fabric, what: Mapping[str, object]) -> None:
    """Refuse to work with ranks that were started otherwise: they would mix two runs, or wait for each other for ever.

    First all ranks must be there, within MEETING; one that has ended or hangs is named.
    """
    if fabric.world_size == 1:
        return
    if torch.distributed.get_backend() == "gloo":
        try:
            torch.distributed.monitored_barrier(timeout=MEETING, wait_all_ranks=True)
        except RuntimeError as error:
            raise _absent(fabric, str(error)) from error
    first, *others = gathered(fabric, {name: repr(value) for name, value in what.items()})
    for rank, other in enumerate(others, 1):
        for name in sorted({*first, *other}):
            here, there = other.get(name, "nothing")[:80], first.get(name, "nothing")[:80]
            if other.get(name) != first.get(name):
                raise CalgpError(
                    f"Rank {rank} differs from rank 0 in {name}: {here}, and {there} there. Start all processes of a "
                    "run with the same options, versions and data."
                )


def _absent(fabric: Fabric, error: str) -> CalgpError:
    found = re.search(r"[Rr]anks? ([\d, ]+) failed to pass", error)
    missing = f"rank {found[1].strip()}" if found and fabric.is_global_zero else "another rank"
    return OneRankError(
        f"Rank {fabric.global_rank} has waited for {missing} for up to {MEETING.total_seconds():.0f} seconds: it has "
        "ended or hangs. Look at its output, end all processes of the run, and start them again."
    )


@contextmanager
def owned(fabric: Fabric, folder: RunFolder) -> Iterator[None]:
    """Rank 0 owns the folder for all of them."""
    with ExitStack() as stack:
        on_first(fabric, lambda: stack.enter_context(folder.owned()))
        yield


@contextmanager
def wrap_lost_ranks(fabric: Fabric) -> Iterator[None]:
    """A rank that died, as one sentence on the others; what failed on this rank stays what it is."""
    try:
        yield
    except RuntimeError as error:
        if fabric.world_size == 1 or not any(word in str(error).lower() for word in ("gloo", "nccl", "connection")):
            raise
        reason = re.sub(r"^\[[^]]*\] ", "", str(error)).partition(". ")[0][:200]  # without the line of gloo's source
        raise CalgpError(
            f"Rank {fabric.global_rank} has lost the others, one of which has ended ({reason}). The last checkpoint is "
            "whole; the same command with --continue goes on from it."
        ) from error
