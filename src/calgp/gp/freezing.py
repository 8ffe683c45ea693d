"""Models that are trained no more: what no image changes is computed once, and what is left can be traced."""

import copy
from abc import ABC, abstractmethod

from torch import nn
from torch.nn.utils import parametrize


class Freezable(nn.Module, ABC):
    """A module whose forward pass has a simpler form once its parameters stay as they are."""

    @abstractmethod
    def frozen(self) -> nn.Module:
        """That form: no factorisation, no decision that depends on numbers, no loop that depends on their count."""


def freeze(module: nn.Module) -> nn.Module:
    """A copy that gives the same, to rounding, and cannot be trained, with everything in its simplest form."""
    return _frozen(copy.deepcopy(module)).requires_grad_(False)


def _frozen(module: nn.Module) -> nn.Module:
    if isinstance(module, Freezable):
        return module.frozen()
    for name, part in list(module.named_children()):
        setattr(module, name, _frozen(part))
    # not torch's remove_parametrizations, which changes the class, and with it any module that this is a copy of
    if isinstance(module, parametrize.ParametrizationList) and module.is_tensor:
        module.original = nn.Parameter(module().detach())
        for place in range(len(module)):
            module[place] = nn.Identity()
    return module
