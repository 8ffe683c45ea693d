"""What a run trains on and what it keeps aside: cut from its source by its seed, and found again later."""

from dataclasses import dataclass
from pathlib import Path

import torch

from calgp.data import Images, load
from calgp.errors import CalgpError
from calgp.runs.folder import RunFolder
from calgp.runs.run import Run


@dataclass(frozen=True)
class TrainingData:
    """What a run trains on, and what it keeps aside."""

    train: Images
    held_out: Images | None

    @staticmethod
    def of(run: Run, directory: Path | None) -> "TrainingData":
        """Source, balanced part, stratified hold-out: all by the run's seed."""
        images = load(run.source, "train", directory=directory, size=run.size, colour=run.colour)
        if len(images.y.unique()) < 2:
            raise CalgpError(f"{run.source} has images of one class only; a classifier needs at least two.")
        seed = run.seed if run.split_seed is None else run.split_seed
        if run.train_size is not None:
            images = images.balanced(run.train_size, seed)
        return TrainingData(*images.split(run.holdout, seed)) if run.holdout else TrainingData(images, None)


def held_out_images(folder: RunFolder, directory: Path | None = None) -> Images:
    """The images that a finished run has not been trained on, cut once more from its source and checked."""
    card = folder.card()
    if not card.holdout_rows:
        raise CalgpError(f"{folder.path} {_WITHOUT[bool(card.members)]}")
    data = TrainingData.of(card.run, directory)
    rows = torch.tensor(card.holdout_rows)
    held_out = data.held_out
    if held_out is None or not torch.isin(rows, held_out.rows).all() or data.train.checksum() != card.checksum:
        raise CalgpError(
            f"The images of {card.run.source} are not those that {folder.path} was trained on: its hold-out cannot be "
            "cut again. Give the data that it was trained on with --data."
        )
    return held_out.take(torch.isin(held_out.rows, rows))


_WITHOUT = {  # ensemble or not
    False: "has no held-out images to fit on; train with --holdout 0.1 to keep a tenth of the training images.",
    True: "has no image that all its members hold out; train them with --holdout 0.1 --set split_seed=0, so that they "
    "hold out the same.",
}
