"""The network that fits the images, for runs that name none."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from calgp.gp import Posterior
from calgp.nets.base import Backbone, Features, Task
from calgp.nets.compact import Compact

SMALL = 32  # pixels a side, at most
NARROW = (32, 64, 128)  # channels for small grey images: a step takes as long as LeNet's


@dataclass(frozen=True)
class Auto(Backbone):
    """The compact network, half as wide for grey images of at most 32 × 32 pixels, such as digits.

    Where training flips the images, it predicts by an image and its mirror image. A run names the network that was
    chosen, in run.json, before its first step.

    >>> [Auto().choose(Task(channels, side, side, 10)).widths for channels, side in ((1, 28), (3, 28), (1, 64))]
    [(32, 64, 128), (64, 128, 256), (64, 128, 256)]
    """

    summary: ClassVar[str] = "compact; half as wide for grey images of at most 32 × 32"
    optimiser: ClassVar[str | None] = None
    hidden: ClassVar[tuple[int, ...]] = ()  # pyright: ignore[reportIncompatibleVariableOverride]

    def choose(self, task: Task, *, mirror: bool = False) -> Compact:
        small = max(task.height, task.width) <= SMALL and task.channels == 1
        return Compact(widths=NARROW, mirror=mirror) if small else Compact(mirror=mirror)

    def build(self, task: Task, posterior: Posterior, *, generator: torch.Generator | None = None) -> Features:
        return self.choose(task).build(task, posterior, generator=generator)
