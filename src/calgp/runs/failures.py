"""What may go wrong in a training: steps whose numbers fail, and interrupts."""

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor

from calgp.errors import CalgpError
from calgp.gp import Model, NumericalError
from calgp.runs.ranks import summed

PATIENCE = 10  # steps in a row that may fail; of a training of fewer than 20 steps, half of them


class Interrupted(CalgpError):
    """Ctrl-C: the run stopped after a whole step, was saved, and can be resumed."""


def non_finite(model: Model, parameters: Sequence[Tensor], nll: Tensor, kl: Tensor, loss: Tensor) -> str | None:
    """Which number of a step is not finite; None if all are. Gradients are looked at one by one only if norms fail."""
    norms = torch._foreach_norm([p.grad for p in parameters if p.grad is not None])
    if (loss + torch.stack(norms).sum()).isfinite():
        return None
    if not loss.isfinite():
        return f"the bound is no finite number: negative log-likelihood term {nll:g}, KL term {kl:g}"
    spoiled = [name for name, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
    if not spoiled:  # the gradients are finite, their squares are not
        return None
    others = f" and of {len(spoiled) - 1} other parameters" if len(spoiled) > 1 else ""
    return f"the gradient of {spoiled[0]}{others} is not finite"


def require_finite(model: Model) -> None:
    for name, value in model.named_parameters():
        if not value.isfinite().all():
            raise NumericalError(f"{name} is no longer finite")


class BufferSnapshot:
    """What a forward pass changes besides parameters (batch norm's running statistics): restored after a failed step,
    averaged over ranks after a good one.
    """

    def __init__(self, module: torch.nn.Module, fabric: Fabric) -> None:
        self.fabric = fabric
        self.saved: list[tuple[Tensor, Tensor]] = []
        self.moving = list(module.buffers())  # until a first good step has shown which of them move
        self.known = False

    def save(self) -> None:
        self.saved = [(buffer, buffer.clone()) for buffer in self.moving]

    def restore(self) -> None:
        for buffer, value in self.saved:
            buffer.copy_(value)

    def accept(self, weight: float) -> None:
        """Let the changes stand; of several ranks, the mean of theirs, each with its `weight`."""
        if not self.known:  # by their values: batch norm does not count its changes as torch's versions do
            moved = torch.tensor([float(not buffer.equal(value)) for buffer, value in self.saved])
            moved = summed(self.fabric, moved)
            self.moving = [buffer for (buffer, _), any_ in zip(self.saved, moved, strict=True) if any_]
            self.known = True
        means = [buffer for buffer in self.moving if buffer.is_floating_point()]
        if self.fabric.world_size > 1 and means:
            mean = summed(self.fabric, torch.cat([buffer.flatten().double() for buffer in means]) * weight)
            for buffer, value in zip(means, mean.split([buffer.numel() for buffer in means]), strict=True):
                buffer.copy_(value.view_as(buffer))


@contextmanager
def interruptible(ranks: int = 1) -> Iterator[threading.Event]:
    """Ctrl-C or SIGTERM sets the event, so that the loop stops between steps; a second one stops at once.

    Of several ranks it does not: torchrun passes on a Ctrl-C that all have had from the terminal, and ends by itself
    what does not stop.
    """
    event = threading.Event()

    def handle(number: int, frame: object) -> None:
        if event.is_set() and ranks == 1:
            raise KeyboardInterrupt
        event.set()

    with signals_handled(handle, signal.SIGINT, signal.SIGTERM):
        yield event


@contextmanager
def signals_handled(handler: Any, *numbers: int) -> Iterator[None]:
    """Signals go to another handler meanwhile; outside the main thread, which alone has handlers, nothing changes."""
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number in numbers} if main else {}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)
