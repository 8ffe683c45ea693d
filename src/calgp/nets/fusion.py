"""Batch norm in evaluation mode, and padding, as parts of the convolutions beside them: fewer steps of a program."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from calgp.json_values import Json

CONVOLUTION = "aten.convolution.default"
BATCH_NORM = "aten._native_batch_norm_legit_no_training.default"
PADDING = "aten.constant_pad_nd.default"
NORMED = "convolution, batch norm"  # what the two are called together; no program on a disk may say so


class Step(NamedTuple):
    """One operation: what its result is called, which it is, and what goes in."""

    name: str
    operation: str
    args: Sequence[Json]
    kwargs: Mapping[str, Json]


def normed_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *convolution: Any,
    norm: tuple[Tensor, Tensor, Tensor, Tensor, float],
) -> Tensor:
    """γ (W x + b − μ) / √(v + ε) + β = (s W) x + s (b − μ) + β with s = γ / √(v + ε), for each channel."""
    gamma, beta, mean, variance, epsilon = norm
    scale = gamma * (variance + epsilon).rsqrt()
    shift = beta - scale * (mean if bias is None else mean - bias)
    scaled, shift = (weight * scale.view(-1, 1, 1, 1)).to(x.dtype), shift.to(x.dtype)  # a norm may be more precise
    return torch.ops.aten.convolution.default(x, scaled, shift, *convolution)


def fused(steps: Sequence[Step], kept: Collection[str], names: Callable[[Json], set[str]]) -> list[Step]:
    """The steps with batch norm and padding as parts of convolutions, where nothing else reads what lies between.

    `kept`: results that the program gives; `names`: of the results in an argument.
    """
    uses = Counter(kept) + Counter(name for step in steps for arg in step.args for name in names(arg))
    made = {step.name: step for step in steps}

    def before(arg: Json, operation: str) -> Step | None:
        """The step that makes an argument, if it is of this kind and nothing else reads it."""
        (name,) = names(arg) or {""}
        step = made.get(name)
        return step if step and step.operation == operation and uses[name] == 1 and not step.kwargs else None

    found: dict[str, Step] = {}
    for step in steps:
        found[step.name] = step
        if step.operation == CONVOLUTION and (pad := before(step.args[0], PADDING)) and _is_even(pad, step):
            left, _, top, _ = pad.args[1]  # type: ignore[misc]
            rows, columns = step.args[4]  # type: ignore[misc]
            args = [pad.args[0], *step.args[1:4], [rows + top, columns + left], *step.args[5:]]  # type: ignore[operator]
            found[step.name] = made[step.name] = step._replace(args=args)
            del found[pad.name]
        elif step.operation == "getitem" and step.args[1] == 0 and (norm := before(step.args[0], BATCH_NORM)):
            convolution, moments = before(norm.args[0], CONVOLUTION), norm.args[1:5]
            if convolution and None not in moments and not convolution.args[6] and len(names(moments)) == 4:
                found[step.name] = Step(step.name, NORMED, convolution.args, {"norm": [*moments, norm.args[6]]})
                del found[norm.name], found[convolution.name]
    return list(found.values())


def _is_even(pad: Step, convolution: Step) -> bool:
    """Whether a padding of zeros is the same on both sides, as a convolution's is."""
    sides, value = pad.args[1], (*pad.args[2:], 0.0)[0]
    return (
        isinstance(sides, list) and len(sides) == 4 and all(isinstance(side, int) and side >= 0 for side in sides)
        and sides[0] == sides[1] and sides[2] == sides[3] and value == 0 and convolution.args[6] is False
        and isinstance(convolution.args[4], list) and all(isinstance(each, int) for each in convolution.args[4])
        and len(convolution.args[4]) == 2
    )  # fmt: skip
