"""Models that are trained no more: what no image changes is computed once, and what is left can be traced."""

from abc import ABC, abstractmethod

from torch import nn
from torch.nn.utils import parametrize


class Freezable(nn.Module, ABC):
    """A module whose forward pass has a simpler form once its parameters stay as they are."""

    @abstractmethod
    def freeze(self) -> None:
        """From now on: no factorisation, no decision that depends on numbers, no loop that depends on their count."""


def freeze(module: nn.Module) -> None:
    """Freezes all that can be frozen. The module gives the same as before, to rounding, and cannot be trained."""
    for part in list(module.modules()):
        if isinstance(part, Freezable):
            part.freeze()
        # not torch's remove_parametrizations, which changes the class, and with it any module that this is a copy of
        if isinstance(part, parametrize.ParametrizationList) and part.is_tensor:
            part.original = nn.Parameter(part().detach())
            for place in range(len(part)):
                part[place] = nn.Identity()
    module.requires_grad_(False)
