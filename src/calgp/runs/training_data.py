"""What a run trains on and what it keeps aside: cut from its source by its seed, and found again later."""

from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from calgp.data import Images, load, open_source
from calgp.errors import CalgpError
from calgp.run import Run
from calgp.runs.card import Card

FEW_OF_A_CLASS = 20  # training images, below which a user is warned
UNEQUAL = 20  # times as many images of a class as of another: a user is warned
FEWEST = 500  # training images of which a tenth is held out unless the run says otherwise


@dataclass(frozen=True)
class TrainingData:
    """What a run trains on, what it keeps aside, and what tells it when to stop, if it may stop early (`patience`).

    >>> from calgp.runs import from_json
    >>> data = TrainingData.of(from_json({"source": "digits", "train_size": 1000, "holdout": 0.1}), None)
    >>> len(data.train), len(data.held_out)
    (900, 100)
    """

    train: Images
    held_out: Images | None
    stopping: Images | None = None

    @property
    def watched(self) -> Images | None:
        """What is scored after each epoch."""
        return self.held_out if self.stopping is None else self.stopping

    @staticmethod
    def of(run: Run, directory: Path | None, *, workers: int | None = None) -> "TrainingData":
        """The training images of the run's source, cut; `workers` processes read those that are streamed."""
        form = {"size": run.size, "colour": run.colour, "workers": workers, "skip_unreadable": run.skip_unreadable}
        images = load(run.source, "train", directory=directory, **form)
        source = open_source(run.source, **form)
        return TrainingData.cut(images, run, None if run.holdout == 0 else source.validation())

    @staticmethod
    def cut(images: Images, run: Run, validation: Images | None = None) -> "TrainingData":
        """Balanced part, stratified hold-out, and half of it to stop by, if the run may: all by the run's seed.

        `validation` images, if a source sets some apart itself, are the hold-out.
        """
        if len(images.y.unique()) < 2:
            raise CalgpError(f"{run.source} has images of one class only; a classifier needs at least two.")
        seed = run.seed if run.split_seed is None else run.split_seed
        if run.train_size is not None:
            images = images.balanced(run.train_size, seed)
        share = default_holdout(len(images)) if run.holdout is None else run.holdout
        if validation is None and not share:
            return TrainingData(images, None)
        train, held_out = images.split(share, seed) if validation is None else (images, validation)
        if run.patience is None:
            return TrainingData(train, held_out)
        if len(held_out) < 2:
            raise CalgpError(f"The hold-out has {len(held_out)} image; patience needs two, as half are to stop by.")
        return TrainingData(train, *held_out.split(0.5, seed))


def default_holdout(images: int) -> float:
    """The share that is held out where the run names none: with few images, each is worth more to learn from.

    >>> default_holdout(499), default_holdout(500)
    (0.0, 0.1)
    """
    return 0.1 if images >= FEWEST else 0.0


def class_weights(run: Run, train: Images) -> Float[Tensor, "Q"] | None:
    """w_q of the likelihood term: as given, or n / (Q n_q) for the Q classes that have images; None means 1."""
    if run.class_weights is None:
        return None
    counts = torch.bincount(train.y, minlength=len(train.classes))
    if run.class_weights == "balanced":
        balanced = len(train) / ((counts > 0).sum() * counts.clamp_min(1))
        return torch.where(counts > 0, balanced, 0)
    if len(run.class_weights) != len(train.classes):
        raise CalgpError(
            f"{len(run.class_weights)} class weights were given for {len(train.classes)} classes "
            f"({', '.join(train.classes[:3])}, …); give one a class, in this order, or balanced."
        )
    return torch.tensor(run.class_weights)


def cautions(train: Images, run: Run) -> list[str]:
    """What these images cannot support, and what to do about it: a sentence each.

    >>> x, y = torch.zeros(33, 1, 8, 8, dtype=torch.uint8), torch.tensor([0] * 30 + [1] * 3)
    >>> images = Images.of(x, y, ("cat", "zebra"))
    >>> from calgp.runs.description import from_json
    >>> cautions(images, from_json({}))
    ['1 class has fewer than 20 training images (zebra: 3): do not rely on its probabilities; add images of it.']
    """
    counts = torch.bincount(train.y, minlength=len(train.classes))
    few = ((counts > 0) & (counts < FEW_OF_A_CLASS)).nonzero().squeeze(1).tolist()
    found = []
    if few:
        least = min(few, key=lambda q: int(counts[q]))
        classes, its, it = ("1 class has", "its", "it")
        if len(few) > 1:
            classes, its, it = f"{len(few):,} classes have", "their", "them"
        found.append(
            f"{classes} fewer than {FEW_OF_A_CLASS} training images ({train.classes[least]}: {counts[least]:,}): do "
            f"not rely on {its} probabilities; add images of {it}."
        )
    present = counts[counts > 0]
    if run.class_weights is None and present.max() >= UNEQUAL * present.min():
        most, least = int(counts.argmax()), int(counts.where(counts > 0, counts.max() + 1).argmin())
        found.append(
            f"Classes are unequal: {counts[most]:,} images of {train.classes[most]}, {counts[least]:,} of "
            f"{train.classes[least]}. Probabilities are right where new images come in the same shares; if all classes "
            "matter the same, train with --class-weights balanced."
        )
    return found


def held_out_images(path: Path, card: Card, directory: Path | None = None) -> Images:
    """The images that the finished run in `path` was not trained on, cut once more from its source and checked."""
    if not card.holdout_rows:
        raise CalgpError(f"{path} {_WITHOUT[bool(card.members)]}")
    data = TrainingData.of(card.run, directory)
    rows = torch.tensor(card.holdout_rows)
    held_out = data.held_out
    if held_out is None or not torch.isin(rows, held_out.rows).all() or data.train.checksum() != card.checksum:
        raise CalgpError(
            f"The images of {card.run.source} are not those that {path} was trained on: its hold-out cannot be "
            "cut again. Give the data that it was trained on with --data."
        )
    return held_out.take(torch.isin(held_out.rows, rows))


_WITHOUT = {  # ensemble or not
    False: "has no held-out images to fit on; train with --holdout 0.1 to keep a tenth of the training images.",
    True: "has no image that all its members hold out; train them with --holdout 0.1 --split-seed 0, so that they "
    "hold out the same.",
}
