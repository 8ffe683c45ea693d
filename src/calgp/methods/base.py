"""What a method is: a frozen description that can build a model."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch

from calgp.data import Images
from calgp.gp import Model
from calgp.methods.space import RATES, Axis
from calgp.nets import Backbone, Task


class Method(ABC):
    """Options, and how to make a model of them. Subclasses are frozen dataclasses.

    >>> from calgp import METHODS
    >>> METHODS["cnn-gp-sorf"].integrate, METHODS["cnn-mcd"].integrate  # one pass; samples
    (True, False)
    """

    summary: ClassVar[str]
    uses_network: ClassVar[bool] = True  # whether the backbone is part of the model
    default_reason: ClassVar[str] = ""  # why a run that names no method has this one
    calibrator: str | None = None  # a name in calgp.posthoc.calibration: fitted on the hold-out at the end of training
    learning_rate: ClassVar[float] = 3e-3  # of a run that names none; for Adam and one cycle
    is_calibrated: bool = False  # whether runs fit a temperature on their hold-out by default
    integrate: bool = False  # whether the last layer is integrated in closed form, so that one pass predicts

    draws_masks: bool = False  # whether passes of the network differ, by masks of its filters or weights

    def in_one_line(self) -> str:
        """What it is with these options, for lists."""
        return self.summary

    def with_ratio(self, ratio: int) -> "Method":
        """The same with so many random features for each feature of the network; itself where it has none."""
        return self

    def as_authors(self) -> "Method":
        """As the paper's authors' code has it, where that differs from the paper; itself for most."""
        return self

    def relative_cost(self, *, wide: bool) -> float:
        """About what an image takes, by what its convolutions take; `wide`: they give features by the thousand."""
        return 1.2

    def space(self) -> Mapping[str, Axis]:
        """What `calgp tune` searches: options of a run, as `calgp sweep --grid` names them, with their values."""
        return {"learning_rate": RATES}

    @abstractmethod
    def build(self, task: Task, backbone: Backbone, *, generator: torch.Generator | None = None) -> Model:
        """The model, with everything that is drawn once (Ω, signs, first weights) drawn from `generator`."""

    def start(self, model: Model, train: Images, *, generator: torch.Generator | None = None) -> None:  # noqa: B027
        """What the training images decide before the first step (inducing points); nothing for most methods."""

    def finish(self, model: Model, train: Images) -> None:  # noqa: B027
        """What is computed from the training images after the last step (a Laplace precision); nothing for most."""
