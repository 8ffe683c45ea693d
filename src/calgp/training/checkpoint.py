"""Checkpoints: all that a resumed training needs, in one file that is whole or not there.

Order, masks and augmentation are functions of (seed, step), so the model, the optimiser and the step are enough.
"""

import math
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from calgp.gp import Model
from calgp.run import Run
from calgp.runs.build import load_state
from calgp.runs.folder import CHECKPOINT, RunFolder
from calgp.runs.record import to_json
from calgp.runs.results import Checkpoint, StoppingState


@dataclass
class EarlyStopping:
    """The best state so far by the MNLL of held-out images, and whether `patience` epochs have passed since."""

    patience: int
    best: StoppingState = field(default_factory=lambda: StoppingState(math.inf, 0, 0))
    state: dict[str, Tensor] = field(default_factory=dict)

    def see(self, step: int, mnll: float, model: nn.Module) -> None:
        """The end of an epoch."""
        if mnll < self.best.mnll:  # never so for nan
            self.best = StoppingState(mnll, step, 0)
            self.state = {key: value.detach().clone() for key, value in model.state_dict().items()}
        else:
            self.best = replace(self.best, epochs=self.best.epochs + 1)

    @property
    def over(self) -> bool:
        return self.best.epochs >= self.patience

    def restore(self, model: nn.Module) -> None:
        """Bring the model back to the best state."""
        if self.state:
            model.load_state_dict(self.state)


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint in memory."""

    tensors: dict[str, Tensor]
    state: Checkpoint

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
        return EarlyStopping(run.patience, found, self._part("best."))


def save_checkpoint(
    folder: RunFolder,
    model: Model,
    optimiser: torch.optim.Optimizer,
    progress: Checkpoint,
    stopping: EarlyStopping | None,
) -> None:
    """Write model, optimiser, how far it is and, for early stopping, the best state so far."""
    tensors = {f"model.{key}": value for key, value in model.state_dict().items()}
    for index, state in optimiser.state_dict()["state"].items():
        tensors |= {f"optimiser.{index}.{name}": torch.as_tensor(value) for name, value in state.items()}
    if stopping is not None:
        tensors |= {f"best.{key}": value for key, value in stopping.state.items()}
        progress = replace(progress, stopping=stopping.best)
    folder.flush_log()
    folder.write_tensors(CHECKPOINT, tensors, to_json(progress))
