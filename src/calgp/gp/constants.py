"""Tensors that never change, made once."""

import functools
from collections.abc import Callable
from typing import ParamSpec

import torch
from torch import Tensor
from torch.autograd import forward_ad

P = ParamSpec("P")
MOST = 64  # of each kind: some depend on a seed, which anybody may choose


def is_traced() -> bool:
    """Whether torch.compile, torch.export, torch.func or forward differentiation is at work.

    All of them must see torch's own operations, and the tensors that they see are not to be kept.
    """
    if torch.compiler.is_compiling():
        return True
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def constant(make: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """A cache of what `make` returns, by its arguments.

    A tensor made in inference mode could never be used in training, so `make` runs outside of it. `torch.compile`,
    `torch.export` and `torch.func` bypass the cache: their fake or wrapped tensors must not stay in it.
    """

    @functools.lru_cache(MOST)
    def kept(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        with torch.inference_mode(False):
            return make(*args, **kwargs)

    @functools.wraps(make)
    def given(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        return make(*args, **kwargs) if is_traced() else kept(*args, **kwargs)

    return given
