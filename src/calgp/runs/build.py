"""The model of a run: built as the run describes it, filled with tensors of a file."""

from pathlib import Path

import torch
from torch import Tensor

from calgp.errors import CalgpError
from calgp.gp import Model
from calgp.nets import Backbone, Standardised, Task
from calgp.run import Run


def network(run: Run, task: Task) -> Backbone:
    """The network as the run's method gets it: behind a normalisation, where the run asks for one."""
    chosen = run.backbone.choose(task)
    return Standardised(chosen) if run.normalise == "standard" else chosen


def build(run: Run, task: Task) -> Model:
    """The model of a run, everything that is drawn once drawn from its seed."""
    generator = torch.Generator().manual_seed(run.seed)
    model = run.method.build(task, network(run, task), generator=generator)
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def load_state(module: torch.nn.Module, state: dict[str, Tensor], path: Path) -> None:
    """Put tensors from a file into a module; those of another model are refused."""
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        first = str(error).splitlines()[1].strip() if "\n" in str(error) else str(error)
        raise CalgpError(f"{path} does not fit the model that run.json describes: {first}") from None
