"""The masked layers of somebody's network: a trial pass finds them, hooks mask what enters them."""

import re
from collections import Counter
from collections.abc import Collection
from contextvars import ContextVar
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from calgp.errors import CalgpError
from calgp.gp import Mask, Masking, Noise

LAYERS = (nn.Linear, nn.modules.conv._ConvNd)  # what can have a mask in front of it
KINDS = {"all": LAYERS, "convolutions": LAYERS[1], "linear": LAYERS[0], "none": ()}
MARK = "_calgp_weight"  # of what is computed from weights alone
Choice = Literal["all", "convolutions", "linear", "none"] | tuple[str, ...]
PRODUCTS = {f"conv{kind}{axes}d" for kind in ("", "_transpose") for axes in (1, 2, 3)} | {
    "linear", "bilinear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "dot", "inner", "addmm", "addmv",
    "addbmm", "einsum", "tensordot", "multi_dot", "lstm", "gru", "rnn_tanh", "rnn_relu", "multi_head_attention_forward",
}  # fmt: skip


class Trial(TorchFunctionMode):
    """Watches a pass of a network on two images, of which the second is NaN.

    What depends on the second image is NaN, so an input has the images along its first axis if its first half is finite
    and its second half is not. A weight that meets NaN in a product while no layer runs escapes its mask; what is
    computed from weights alone is a weight, too.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.modules = dict(network.named_modules())
        self.names = {module: name for name, module in self.modules.items()}
        self.parameters = {id(p): name for name, p in network.named_parameters()}
        self.layers: Counter[str] = Counter()  # their calls, in the order of the first ones
        self.last: tuple[str, Any] = ("", None)  # the layer that was called last, and its input
        self.began: dict[str, int] = {}  # how many modules had ended when a layer was first called
        self.ended: list[tuple[str, tuple[int, ...]]] = []  # modules, with the shape of what they gave
        self.unmaskable: dict[str, str] = {}  # layers whose input has not the images along its first axis
        self.escapes: dict[str, str] = {}  # the function that uses a weight outside of layers
        self.used: set[str] = set()  # parameters
        self.running = [""]

    def begin(self, module: nn.Module, args: Any) -> None:
        """Before every module, also those of another thread."""
        if (name := self.names.get(module)) is None:
            return
        self.running.append(name)
        if isinstance(module, LAYERS):
            self.layers[name] += 1
            self.last = name, next(iter(args), None)
            self.began.setdefault(name, len(self.ended))
            if not args or not images_first(args[0]):
                what = tuple(args[0].shape) if args else "a keyword argument"
                self.unmaskable[name] = f"its input, {what} for two images, does not hold one image after the other"

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        """Behind every module."""
        if (name := self.names.get(module)) is not None:
            self.running.pop()
            self.ended.append((name, tuple(getattr(output, "shape", ()))))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        names = [self.parameters.get(id(tensor), getattr(tensor, MARK, None)) for tensor in given]
        self.used.update(name for name in names if name)
        function = getattr(func, "__name__", "")
        if function not in PRODUCTS:
            mark = names[0] if names and all(names) else None
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor) and mark != getattr(leaf, MARK, None) and id(leaf) not in self.parameters:
                    setattr(leaf, MARK, mark)
        elif not isinstance(self.modules[self.running[-1]], LAYERS):
            factors = [name for name, tensor in zip(names, given, strict=True) if name and tensor.dim() > 1]
            if factors and not all(tensor.isfinite().all() for tensor in given):
                self.escapes |= dict.fromkeys(factors, function)
        return result


def choose_sites(trial: Trial, mask: Choice, unmasked: tuple[str, ...], *, mask_first: bool) -> dict[str, int]:
    """The layers to mask, with the number of their calls; refuses what would be random only in name."""
    if isinstance(mask, tuple):
        _check_names("mask", mask, {**trial.layers, trial.last[0]: 1})  # a classifier may be among them
        chosen = [name for name in trial.layers if matches(name, mask)]
        weights = {trial.parameters.get(id(p)) for name in chosen for p in trial.modules[name].parameters()}
        escapes = [weight for weight in trial.escapes if weight in weights]
    else:
        chosen = [n for n in list(trial.layers)[not mask_first :] if isinstance(trial.modules[n], KINDS[mask])]
        kinds = {weight: LAYERS[function.startswith("conv")] for weight, function in trial.escapes.items()}
        escapes = [weight for weight, kind in kinds.items() if issubclass(kind, KINDS[mask])]
    _check_names("unmasked", unmasked, [*trial.modules, *trial.parameters.values()])
    problems = {name: trial.unmaskable[name] for name in chosen if name in trial.unmaskable}
    for weight in escapes:
        owner = weight.rpartition(".")[0]
        place = owner if isinstance(trial.modules.get(owner), LAYERS) else weight
        problems[place] = f"torch's {trial.escapes[weight]} uses its weight outside of a layer's own call"
    if problems := {place: why for place, why in problems.items() if not matches(place, unmasked)}:
        raise _refusal(problems)
    sites = {name: trial.layers[name] for name in chosen if not matches(name, unmasked)}
    if mask != "none" and not sites:
        raise CalgpError(
            f"Invalid mask={mask!r}: must choose a layer, or nothing in the network would be random. Choose others, or "
            "say mask='none' and let the method's head be what is random."
        )
    return sites


def _check_names(option: str, patterns: tuple[str, ...], names: Collection[str]) -> None:
    for pattern in patterns:
        if not any(matches(name, [pattern]) for name in names):
            some = ", ".join([name for name in names if name][:8])
            raise CalgpError(f"Invalid {option}={pattern!r}: must name layers called for the features, such as {some}.")


def _refusal(problems: dict[str, str]) -> CalgpError:
    """One error for all places; those that differ in numbers alone share a pattern."""
    groups: dict[str, list[str]] = {}
    for place in problems:
        groups.setdefault(re.sub(r"\d+", "*", place), []).append(place)
    names = {pattern if len(places) > 1 else places[0]: problems[places[0]] for pattern, places in groups.items()}
    listed = "; ".join(f"{name} ({why})" for name, why in names.items())
    return CalgpError(
        f"These parts of the network cannot be masked: {listed}. Leave them without masks, unmasked={list(names)}, or "
        "build the network with layers that are called by themselves, on inputs with the images first."
    )


class InputMasks(nn.ModuleList):
    """The masks in front of a layer: one, or one for each of its calls in a pass."""

    def __init__(self, layer: str, masking: Masking, calls: int, *, axis: int) -> None:
        super().__init__([Mask(masking, image=True) for _ in range(calls)])
        self.layer, self.axis = layer, axis

    def before(self, layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The layer's arguments, the first masked."""
        current = PASS.get()
        if current is None:
            raise CalgpError(
                f"{self.layer} was called outside of a pass of the wrapped network (gradient checkpointing, or its "
                "module by itself), where it has no masks: call the features, without checkpointing."
            )
        if current.stopping:
            return args
        mask = self[min(current.fired[self.layer], len(self) - 1)]
        current.fired[self.layer] += 1
        # [rows · folds, …] to [rows, channels, folds, …]: windows of an image are as its pixels
        parts = args[0].unflatten(0, (current.rows, -1))
        axis = self.axis if self.axis < 0 else self.axis + 1
        return mask(parts.movedim(axis, 1), current.noise).movedim(1, axis).flatten(0, 1), *args[1:]


@dataclass
class Pass:
    """A pass of a wrapped network: what its hooks must know."""

    noise: Noise | None
    rows: int  # S · N
    entering: Tensor | None = None  # what the stem has given
    stopping: bool = False  # at the stem
    found: Tensor | None = None  # what the pass is for
    fired: Counter[str] = field(default_factory=Counter)

    def reached(self, value: Tensor) -> None:
        """Keeps what the pass is for, and leaves it. Compilers follow no exception; they drop what is not used."""
        self.found = value
        if not torch.compiler.is_compiling():
            raise Reached


PASS: ContextVar[Pass | None] = ContextVar("pass", default=None)  # and no attribute: threads may share a network


class Reached(Exception):
    """The features, or the stem, are there."""


def matches(name: str, patterns: Collection[str]) -> bool:
    """Whether a name, or that of a module that holds it, is among the patterns.

    >>> matches("blocks.3.attn.qkv", ["blocks.*.attn"]), matches("blocks.30", ["blocks.3"])
    (True, False)
    """
    return any(fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*") for pattern in patterns)


def images_first(h: Tensor) -> bool:
    """Whether the first half of the rows is finite (the image) and the second is not (the image of NaN)."""
    one, other = h[: len(h) // 2], h[len(h) // 2 :]
    return len(one) == len(other) and bool(one.isfinite().all()) and not bool(other.isfinite().all())
