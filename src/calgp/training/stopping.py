"""When to stop before the end: a training that no longer gets better on images that it does not learn from."""

import math
from dataclasses import dataclass, field

from torch import Tensor, nn

from calgp.runs.results import StoppingState


@dataclass
class EarlyStopping:
    """The best state so far by the MNLL of held-out images, and whether `patience` epochs have passed since."""

    patience: int
    mnll: float = math.inf
    step: int = 0
    epochs: int = 0  # since the best
    state: dict[str, Tensor] = field(default_factory=dict)

    def see(self, step: int, mnll: float, model: nn.Module) -> None:
        """The end of an epoch."""
        self.epochs += 1
        if mnll < self.mnll:  # never so for nan
            self.mnll, self.step, self.epochs = mnll, step, 0
            self.state = {key: value.detach().clone() for key, value in model.state_dict().items()}

    @property
    def over(self) -> bool:
        return self.epochs >= self.patience

    def restore(self, model: nn.Module) -> None:
        """Bring the model back to the best state."""
        if self.state:
            model.load_state_dict(self.state)

    @property
    def summary(self) -> StoppingState:
        """All but the state, for a checkpoint."""
        return StoppingState(self.mnll, self.step, self.epochs)
