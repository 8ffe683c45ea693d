"""A network as a program that is data: torch's operations by name, their arguments, and tensors. No code, no pickle.

torch.export follows a network; its graph is written as JSON, in which an operation is one of the core ATen operators
or an arithmetic of sizes, and nothing else. (torch.export's own files are read with pickle, and their expressions are
evaluated: a folder from a stranger must do neither.)
"""

import math
import operator
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from calgp.errors import CalgpError, one_line
from calgp.json_values import Json
from calgp.nets.fusion import NORMED, Step, fused, normed_convolution
from calgp.nets.last_layer import NOT_FINITE, LastLayer, Pass, averaged

ARITHMETIC: dict[str, Callable[..., Any]] = {
    each.__name__: each for each in (
        operator.getitem, operator.add, operator.sub, operator.mul, operator.floordiv, operator.truediv, operator.mod,
        operator.neg, operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge,
    )
}  # fmt: skip
# of the core set but for a missing tag, or kept whole by torch.export
ALSO = frozenset({
    "aten._unsafe_view.default", "aten.linalg_vector_norm.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default", "aten.detach.default", "aten.lift_fresh_copy.default",
    "aten.scaled_dot_product_attention.default", "aten.sym_constrain_range_for_size.default",
    "aten.sym_size.int", "aten.upsample_bicubic2d.vec", "aten.linear.default", "aten.baddbmm.default",
})  # fmt: skip
CONSTANTS: dict[str, tuple[type, Any]] = {
    "dtype": (torch.dtype, torch), "memory_format": (torch.memory_format, torch), "layout": (torch.layout, torch),
}  # fmt: skip
MOST_STEPS = 100_000
ASSERTION = "assert"
VIEW = "aten.view.default"  # of channels-last images it may need a copy, which reshape makes
TOLERANCE = 1e-4  # relative to the largest logit, between the network and its program


class Program(nn.Module):
    """Runs the steps of a program, one after the other. Its input is `x`; it gives the values named by `outputs`.

    Args:
        described: what `describe` gave; a program of a stranger is checked before anything runs.
        tensors: by the names that steps have for them.
        outputs: how many it must give.
        trained: names of tensors that are parameters with gradients.
    """

    def __init__(
        self, described: Mapping[str, Any], tensors: Mapping[str, Tensor], *, outputs: int = 2,
        trained: Collection[str] = (),
    ) -> None:  # fmt: skip
        super().__init__()
        steps, given = described["steps"], described["outputs"]
        if not isinstance(steps, list) or not 0 < len(steps) <= MOST_STEPS or len(given) != outputs:
            raise ValueError(f"it is no list of steps with {outputs} outputs")
        self.steps = [Step(*step) for step in steps]
        operations = {step.operation: _operation(step.operation) for step in self.steps}
        self.outputs, self.names = [*given], {name: f"tensor{place}" for place, name in enumerate(tensors)}
        for name, value in tensors.items():
            if value.is_floating_point():
                self.register_parameter(self.names[name], nn.Parameter(value.clone(), name in trained))
            else:
                self.register_buffer(self.names[name], value.clone())
        known = {"x", *tensors}
        for step in self.steps:
            if strange := (_names(step.args) | _names(step.kwargs)) - known:
                raise ValueError(f"step {step.name!r} needs {min(strange)!r}, which is not there")
            known.add(step.name)
        if not set(given) <= known:
            raise ValueError("its outputs are no results of its steps")
        run = fused(self.steps, given, _names)
        self._run = [(step, (operations | {NORMED: normed_convolution})[step.operation]) for step in run]
        self._last_use = _last_uses(run, {*given})

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        values: dict[str, Tensor] = {name: getattr(self, own) for name, own in self.names.items()} | {"x": x}
        for place, (step, operation) in enumerate(self._run):
            args = [_value(each, values, x) for each in step.args]
            kwargs = {name: _value(each, values, x) for name, each in step.kwargs.items()}
            values[step.name] = operation(*args, **kwargs)
            for name in self._last_use.get(place, ()):  # as a network frees what it needs no more
                del values[name]
        return tuple(values[name] for name in self.outputs)


class ProgramNetwork:
    """A program that gives features and logits, in the place of a `LastLayer`."""

    def __init__(self, program: Program, name: str, weight: Tensor, bias: Tensor | None) -> None:
        self.network, self.name, self.weight, self.bias = program, name, weight, bias

    def __call__(self, x: Tensor) -> Pass:
        like = next(self.network.parameters())
        try:
            with torch.no_grad():
                found = Pass(*self.network(x.to(like.device, torch.float32)))
        except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise CalgpError(f"The network cannot take inputs of {tuple(x.shape)} ({one_line(error)}).") from None
        if not found.logits.isfinite().all():
            raise CalgpError(NOT_FINITE)
        return found


class FromPixels(nn.Module):
    """Pixels from 0 to 1 ↦ what `give` takes from a network whose inputs have another mean and deviation."""

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        network: nn.Module,
        mean: Sequence[float],
        std: Sequence[float],
        give: Callable[[Tensor], Sequence[Tensor]],
    ) -> None:
        super().__init__()
        self.network, self.give = network, give
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(each.float() for each in self.give((x - self.mean) / self.std))


def describe(
    last: LastLayer, shape: Sequence[int], *, mean: Sequence[float] | None = None, std: Sequence[float] | None = None
) -> tuple[dict[str, Json], dict[str, Tensor]]:
    """A trained network as a program from pixels to features and logits: its steps, and their tensors.

    It is run beside the network before it is given away, and refused if they differ.
    """
    seen, like = list[Tensor](), next(last.network.parameters())
    parallel = isinstance(last.network, nn.DataParallel | nn.parallel.DistributedDataParallel)
    network, device = last.network.get_submodule("module" if parallel else ""), like.device

    def give(x: Tensor) -> list[Tensor]:
        seen.clear()
        network(x.to(like.dtype))
        return seen

    module = FromPixels(network, mean or [0.0] * shape[0], std or [1.0] * shape[0], give).to(like.device)
    x = torch.rand(3, *shape, generator=torch.Generator().manual_seed(0))
    training = {each: each.training for each in last.network.modules()}

    def see(layer: nn.Module, args: Any, output: Any) -> None:
        seen.extend(averaged(layer, each) for each in (args[0], output))

    handle = last.layer.register_forward_hook(see)
    try:
        return describe_module(module, x, 2, "Save a .safetensors file instead, which needs the network again.")
    finally:
        handle.remove()
        last.network.to(device)  # torch has followed it on the CPU
        for each, was in training.items():
            each.training = was


def describe_module(
    module: nn.Module, x: Tensor, outputs: int, instead: str
) -> tuple[dict[str, Json], dict[str, Tensor]]:
    """A module from a batch like `x` to a tuple of tensors, in evaluation mode, as a program; `instead`: a remedy."""
    try:
        module.eval()
        like = next(module.parameters())
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = [each.cpu() for each in module(x.to(like.device))]
            traced = torch.export.export(
                module.cpu(), (x,), dynamic_shapes=({0: torch.export.Dim("N", min=1, max=2**20)},), strict=False
            ).run_decompositions()
    except Exception as error:  # of torch, about anybody's code
        raise CalgpError(
            f"The network cannot be written as a program, since torch cannot follow it ({one_line(error)}). {instead}"
        ) from None
    described, tensors = _described(traced, outputs)
    _compare(Program(described, tensors, outputs=outputs), x, expected, instead)
    return described, tensors


def _compare(program: Program, x: Tensor, expected: Sequence[Tensor], instead: str) -> None:
    with torch.no_grad():
        found = [torch.cat(parts) for parts in zip(program(x[:1]), program(x[1:]), strict=True)]
    for here, there in zip(found, expected, strict=True):
        if here.shape != there.shape or (here - there).abs().max() > TOLERANCE * (1 + there.abs().max()):
            raise CalgpError(
                "The program of the network gives other numbers than the network itself: it depends on the batch, "
                f"draws numbers, or computes in half precision (then give network.float()). {instead}"
            )


def _described(traced: Any, count: int) -> tuple[dict[str, Json], dict[str, Tensor]]:
    tensors, rename, steps = dict[str, Tensor](), dict[str, str](), list[list[Json]]()
    parameters = [each.arg.name for each in traced.graph_signature.input_specs if each.kind.name == "PARAMETER"]
    for spec in traced.graph_signature.input_specs:
        if spec.target is None:
            rename[spec.arg.name] = "x"
        else:
            held = traced.constants if spec.target in traced.constants else traced.state_dict
            tensors[spec.arg.name] = held[spec.target].detach().cpu().contiguous()
    outputs: list[str] = []
    for node in traced.graph.nodes:
        if node.op == "call_function" and not (node.users or ASSERTION not in str(node.target)):
            continue  # it only checks what it was traced with
        if node.op == "call_function":
            args, kwargs = _plain(node.args, rename), _plain(dict(node.kwargs), rename)
            steps.append([node.name, _name(node.target), args, kwargs])
        elif node.op == "output":
            outputs = [str(rename.get(each.name, each.name)) for each in node.args[0]]
    if len(outputs) != count:
        raise CalgpError("The network changes itself when it predicts; it cannot be written as a program.")
    return {"steps": steps, "outputs": outputs, "parameters": parameters}, tensors


def _name(target: Any) -> str:
    """An operation by its name; `_operation` gives it back."""
    name = target.__name__ if getattr(target, "__module__", "") == "_operator" else str(target)
    try:
        _operation(name)
    except ValueError as error:
        raise CalgpError(f"The network cannot be written as a program: {error}.") from None
    return name


def _operation(name: Any) -> Callable[..., Any]:
    """One of torch's core operators, or the arithmetic of sizes. Anything else is refused."""
    if name in ARITHMETIC:
        return ARITHMETIC[name]
    room, _, rest = str(name).partition(".")
    packet, _, overload = rest.partition(".")
    if room == "aten" and packet.isidentifier() and overload.isidentifier():
        found = getattr(getattr(torch.ops.aten, packet, None), overload, None)
        if isinstance(found, torch._ops.OpOverload) and (torch.Tag.core in found.tags or name in ALSO):
            return torch.ops.aten.reshape.default if name == VIEW else found
    raise ValueError(f"{str(name)[:80]!r} is no operation of torch that a program may have")


def _plain(value: Any, rename: Mapping[str, str]) -> Any:
    """An argument as JSON."""
    if isinstance(value, torch.fx.Node):
        return {"node": rename.get(value.name, value.name)}
    if isinstance(value, list | tuple):
        return [_plain(each, rename) for each in value]
    if isinstance(value, dict):
        return {name: _plain(each, rename) for name, each in value.items()}
    if isinstance(value, torch.device):
        return {"device": "of x"}
    for kind, (cls, _) in CONSTANTS.items():
        if isinstance(value, cls):
            return {kind: str(value).removeprefix("torch.")}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CalgpError(f"The network cannot be written as a program: an operation takes a {type(value).__name__}.")


def _value(value: Any, values: Mapping[str, Tensor], x: Tensor) -> Any:
    """An argument from JSON."""
    if isinstance(value, list):
        return [_value(each, values, x) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, name),) = value.items()
    if kind == "node":
        return values[name]
    if kind == "device":
        return x.device
    if kind == "float":
        return float(name)
    cls, room = CONSTANTS[kind]
    found = getattr(room, name)
    if not isinstance(found, cls):
        raise ValueError(f"{name!r} is no {kind}")
    return found


def _names(value: Any) -> set[str]:
    """What an argument needs."""
    if isinstance(value, list | tuple):
        return set().union(*map(_names, value))
    if isinstance(value, Mapping):
        if len(value) == 1 and isinstance(value.get("node"), str):
            return {value["node"]}
        return set().union(*map(_names, value.values()))
    return set()


def _last_uses(steps: Sequence[Step], kept: set[str]) -> dict[int, list[str]]:
    """Results that nothing needs behind a step."""
    last = {step.name: place for place, step in enumerate(steps)}
    for place, step in enumerate(steps):
        last |= {name: place for name in _names(step.args) | _names(step.kwargs) if name in last}
    found: dict[int, list[str]] = {}
    for name, place in last.items():
        if name not in kept:
            found.setdefault(place, []).append(name)
    return found
