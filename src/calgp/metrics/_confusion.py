"""Which classes are taken for which."""

from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor

from calgp.errors import CalgpError


@dataclass(frozen=True)
class ClassScores:
    """How one class fares: its images, those among them labelled right, and all images that got its label.

    mistaken_for: the wrong label that its images get most often, and how often; None where all are right.
    """

    n: int
    right: int
    labelled: int
    mistaken_for: tuple[int, int] | None

    @property
    def recall(self) -> float | None:
        """The share of its images that are labelled right; None without images."""
        return self.right / self.n if self.n else None

    @property
    def precision(self) -> float | None:
        """The share of its labels that are right; None where it was never given."""
        return self.right / self.labelled if self.labelled else None


@dataclass(frozen=True)
class Confusion:
    """A confusion matrix by its entries (true class, label, images) above zero, so that many classes stay small.

    >>> import torch
    >>> found = confusion(torch.tensor([0, 1, 1, 1]), torch.tensor([0, 0, 1, 1]), classes=2)
    >>> found.matrix()
    [[1, 1], [0, 2]]
    >>> found.by_class()[0]
    ClassScores(n=2, right=1, labelled=1, mistaken_for=(1, 1))
    """

    classes: int
    entries: tuple[tuple[int, int, int], ...]

    def __post_init__(self) -> None:
        if any(not (0 <= y < self.classes and 0 <= label < self.classes and n > 0) for y, label, n in self.entries):
            raise ValueError("an entry is outside the classes, or counts nothing")
        if len({entry[:2] for entry in self.entries}) < len(self.entries):
            raise ValueError("an entry is there twice")

    def matrix(self) -> list[list[int]]:
        """Images by true class (rows) and label (columns)."""
        found = [[0] * self.classes for _ in range(self.classes)]
        for y, label, n in self.entries:
            found[y][label] = n
        return found

    def by_class(self) -> list[ClassScores]:
        """How each class fares."""
        n, right, labelled = ([0] * self.classes for _ in range(3))
        worst: list[tuple[int, int] | None] = [None] * self.classes
        for y, label, count in self.entries:
            n[y] += count
            labelled[label] += count
            if y == label:
                right[y] = count
            elif (before := worst[y]) is None or count > before[1]:
                worst[y] = label, count
        return [ClassScores(*each) for each in zip(n, right, labelled, worst, strict=True)]

    def mistakes(self) -> list[tuple[int, int, int]]:
        """(true class, label, images) of all that is labelled wrong, the most frequent first."""
        return sorted((each for each in self.entries if each[0] != each[1]), key=lambda each: -each[2])


def confusion(labels: Int[Tensor, "N"], y: Int[Tensor, "N"], *, classes: int) -> Confusion:
    """How often images of each class `y` got each of the `labels`."""
    if labels.shape != y.shape or y.ndim != 1:
        raise CalgpError(f"Invalid labels of {list(labels.shape)}: must be as many labels as images, {list(y.shape)}.")
    pairs, counts = (y.long() * classes + labels.long()).unique(return_counts=True)
    found = zip((pairs // classes).tolist(), (pairs % classes).tolist(), counts.tolist(), strict=True)
    return Confusion(classes, tuple(found))
