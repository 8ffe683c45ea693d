"""Tensors that never change, made once."""

import functools
from collections.abc import Callable
from typing import ParamSpec

import torch
from torch import Tensor

P = ParamSpec("P")


def constant(make: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """Keeps what `make` gives, by its arguments.

    A tensor born in inference mode could never be used in training, so it is left for the making. `torch.compile` and
    `torch.export` trace `make` itself: they warn about caches, and their fake tensors must not stay in one.
    """

    @functools.cache
    def kept(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        with torch.inference_mode(False):
            return make(*args, **kwargs)

    @functools.wraps(make)
    def given(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        return make(*args, **kwargs) if torch.compiler.is_compiling() else kept(*args, **kwargs)

    return given
