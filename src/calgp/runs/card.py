"""Card: what was trained, on what, by what; run.json."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field, PlainSerializer, PlainValidator

from calgp.data.images import LARGEST
from calgp.nets import Task
from calgp.run import Run
from calgp.runs.description import from_folder, to_json
from calgp.runs.environment import Environment
from calgp.runs.record import Count, Finite, Text, Whole

if TYPE_CHECKING:
    from calgp.runs.results import LogRecord

FORMAT = 1  # of run.json; a run folder of another format is refused by name


@dataclass(frozen=True)
class Member:
    """A run that an ensemble is made of: its path relative to the ensemble's folder, and what it is."""

    path: Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^/\x00][^\x00]*$")]
    label: Text
    network: Text
    seed: Whole


@dataclass(frozen=True)
class Vectors:
    """Embeddings that a run was fitted on: files, `test` those that it is tested on (None: a fifth of `train`)."""

    train: Text
    test: Text | None
    holdout: Annotated[float, Field(ge=0, lt=1)] = 0.0


def _bounded(task: Task) -> Task:
    if not (1 <= min(task.channels, task.height, task.width) <= max(task.channels, task.height, task.width) <= LARGEST):
        raise ValueError(f"an image has 1 to {LARGEST} channels, rows and columns")
    if not 1 <= task.classes <= 10**6:
        raise ValueError("there are 1 to 1,000,000 classes")
    return task


@dataclass(frozen=True)
class Card:
    """run.json: what was trained, on what, by what.

    Of an ensemble: the first member's description, and who the members are.

    checksum: of the training images. holdout_rows: of an ensemble, what all its members hold out.
    class_weights: of the likelihood term, where they are not all 1. upgraded: what somebody's network is called that
    was trained elsewhere and upgraded; vectors: embeddings, in the place of images. Of the run of either, only source
    and seed count.

    >>> import calgp
    >>> card = calgp.load("shipped").card
    >>> card.train_images, card.classes[:3]
    (4500, ('0', '1', '2'))
    """

    run: Annotated[Run, PlainValidator(from_folder), PlainSerializer(to_json)]
    task: Annotated[Task, AfterValidator(_bounded)]
    classes: Annotated[tuple[Text, ...], Field(min_length=1)]
    train_images: Count
    checksum: Text
    holdout_rows: tuple[Whole, ...]
    environment: Environment
    members: Annotated[tuple[Member, ...], Field(max_length=1000)] = ()
    class_weights: tuple[Finite, ...] | None = None
    upgraded: Text | None = None
    vectors: Vectors | None = None
    format: Literal[1] = FORMAT

    def __post_init__(self) -> None:
        if len(self.classes) != self.task.classes:
            raise ValueError(f"{len(self.classes)} classes are named, {self.task.classes} are counted")

    @property
    def label(self) -> str:
        """The method with its options, or what the ensemble is made of."""
        names = [member.label for member in self.members]
        kinds = list(dict.fromkeys(names))
        if self.upgraded is not None:
            return f"{self.upgraded}, upgraded"
        if self.vectors is not None:
            return "GPClassifier"
        if not names:
            return self.run.label
        return f"ensemble of {len(names)} {kinds[0]}" if len(kinds) == 1 else f"ensemble of {', '.join(names)}"

    @property
    def network(self) -> str:
        if self.upgraded is not None:
            return self.upgraded
        if self.vectors is not None:
            return "embeddings"
        return ", ".join(dict.fromkeys(m.network for m in self.members)) if self.members else self.run.backbone_label

    def title(self, calibrator: str | None) -> str:
        """The label of a result: the method, and what its probabilities went through."""
        if calibrator is not None:
            return f"{self.label} + {calibrator}"
        return f"{self.label}, uncalibrated" if self.run.method.calibrator and not self.members else self.label

    def steps_made(self, log: "Iterable[LogRecord]") -> int:
        """The optimiser steps of the finished run: those planned, or fewer if it stopped early."""
        planned, records = self.run.total_steps(self.train_images), list(log)
        scored = [each.step for each in records if each.kind in ("holdout", "unscored")]
        return max(scored, default=planned) if any(each.kind == "kept" for each in records) else planned

    def task_summary(self) -> str:
        """Classes and image size in a few words."""
        task, named = self.task, ", ".join(self.classes[:3])
        return f"{task.classes} classes ({named}, …) in {task.channels} × {task.height} × {task.width}"
