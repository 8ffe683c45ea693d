"""The network that fits the images, for runs that name none."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from calgp.gp import Posterior
from calgp.nets.base import Backbone, Features, Task
from calgp.nets.compact import Compact
from calgp.nets.lenet import LeNet

LARGEST_LENET = 32  # pixels a side, of grey images


@dataclass(frozen=True)
class Auto(Backbone):
    """LeNet for grey images of at most 32 × 32 pixels, such as digits; the compact network for all others.

    Where training flips the images, the compact network predicts by an image and its mirror image.
    A run names the network that was chosen, in run.json, before its first step.

    >>> [type(Auto().choose(Task(channels, side, side, 10))).__name__ for channels, side in ((1, 28), (3, 28), (1, 64))]
    ['LeNet', 'Compact', 'Compact']
    """

    summary: ClassVar[str] = "lenet for grey images of at most 32 × 32, else compact"
    optimiser: ClassVar[str | None] = None
    hidden: ClassVar[tuple[int, ...]] = ()  # pyright: ignore[reportIncompatibleVariableOverride]

    def choose(self, task: Task, *, mirror: bool = False) -> Backbone:
        small = max(task.height, task.width) <= LARGEST_LENET
        return LeNet() if small and task.channels == 1 else Compact(mirror=mirror)

    def build(self, task: Task, posterior: Posterior, *, generator: torch.Generator | None = None) -> Features:
        return self.choose(task).build(task, posterior, generator=generator)
