"""Checkpoints: all that a resumed training needs, in one file that is whole or not there.

Order, masks and augmentation are functions of (seed, step), so the model, the optimiser and the step are enough.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from calgp.gp import Model
from calgp.run import Run
from calgp.runs.build import load_state
from calgp.runs.card import Card
from calgp.runs.folder import CHECKPOINT, RunFolder
from calgp.runs.record import to_json
from calgp.runs.results import Checkpoint
from calgp.training.stopping import EarlyStopping


@dataclass(frozen=True)
class Progress:
    """How far a training is: steps, how many of the last failed in a row, sums since the last line of the log."""

    step: int = 0
    failed: int = 0
    totals: tuple[float, float, float] = (0.0, 0.0, 0.0)


@dataclass
class LastGoodState:
    """How far a training was when its numbers were last good, and its best state, if it may stop early."""

    progress: Progress
    stopping: EarlyStopping | None


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint in memory."""

    tensors: dict[str, Tensor]
    state: Checkpoint

    @staticmethod
    def of(folder: RunFolder, card: Card) -> "LoadedCheckpoint":
        return LoadedCheckpoint(*folder.checkpoint(card))

    @property
    def progress(self) -> Progress:
        return Progress(self.state.step, self.state.failed, self.state.totals)

    def _part(self, prefix: str) -> dict[str, Tensor]:
        return {key.removeprefix(prefix): value for key, value in self.tensors.items() if key.startswith(prefix)}

    def restore_model(self, model: Model, path: Path) -> None:
        load_state(model, self._part("model."), path)

    def restore_optimiser(self, optimiser: torch.optim.Optimizer) -> None:
        parameters = [each for group in optimiser.param_groups for each in group["params"]]
        state: dict[int, dict[str, Tensor]] = {}
        for key, value in self._part("optimiser.").items():
            index, name = key.split(".", 1)
            parameter = parameters[int(index)]
            # laid out in memory as the parameter is (channels last): the fused step goes through both in that order
            restored = torch.empty_like(parameter).copy_(value) if value.shape == parameter.shape else value
            state.setdefault(int(index), {})[name] = restored
        optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})

    def stopping(self, run: Run) -> EarlyStopping | None:
        """How far early stopping is, if the run may stop early."""
        if run.patience is None or (found := self.state.stopping) is None:
            return None
        return EarlyStopping(run.patience, found.mnll, found.step, found.epochs, state=self._part("best."))


def save_checkpoint(
    folder: RunFolder,
    model: Model,
    optimiser: torch.optim.Optimizer,
    progress: Progress,
    stopping: EarlyStopping | None,
) -> None:
    """Write model, optimiser, how far it is and, for early stopping, the best state so far."""
    tensors = {f"model.{key}": value for key, value in model.state_dict().items()}
    for index, state in optimiser.state_dict()["state"].items():
        tensors |= {f"optimiser.{index}.{name}": torch.as_tensor(value) for name, value in state.items()}
    state = Checkpoint(progress.step, progress.failed, progress.totals)
    if stopping is not None:
        tensors |= {f"best.{key}": value for key, value in stopping.state.items()}
        state = replace(state, stopping=stopping.summary)
    folder.flush_log()
    folder.write_tensors(CHECKPOINT, tensors, to_json(state))
