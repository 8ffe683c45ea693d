"""What a forward pass of somebody's network does: which modules it calls, and where its weights meet the images."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

LAYERS = (nn.Linear, nn.modules.conv._ConvNd)  # what can have a mask in front of it
CONVOLUTIONS = {f"conv{kind}{axes}d" for kind in ("", "_transpose") for axes in (1, 2, 3)} | {"_convolution"}
PRODUCTS = CONVOLUTIONS | {
    "linear", "bilinear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "dot", "inner", "addmm", "addmv",
    "addbmm", "baddbmm", "einsum", "tensordot", "multi_dot", "scaled_dot_product_attention", "lstm", "gru", "rnn_tanh",
    "rnn_relu", "multi_head_attention_forward", "_native_multi_head_attention", "_transformer_encoder_layer_fwd",
}  # fmt: skip


@dataclass(frozen=True)
class Call:
    """A module, called and come to its end."""

    name: str
    begun: int  # how many calls had begun before
    layer: bool  # whether a mask can stand in front of it
    input: Tensor | None  # its first argument
    output: Any


@dataclass(frozen=True)
class Escape:
    """A weight of two axes or more that meets the images outside a layer."""

    weight: str
    function: str
    module: str

    @property
    def convolution(self) -> bool:
        return self.function in CONVOLUTIONS

    def __str__(self) -> str:
        return f"{self.weight} (torch's {self.function} in {self.module or 'the network'})"


@dataclass
class Trace:
    """The calls of a pass in the order of their ends; names are those of `named_modules`."""

    calls: list[Call] = field(default_factory=list)
    escapes: list[Escape] = field(default_factory=list)
    used: set[str] = field(default_factory=set)  # parameters that a function of torch was given

    def layers(self) -> dict[str, list[Call]]:
        """The layers that were called, in the order of their first calls."""
        found: dict[str, list[Call]] = {}
        for call in self.calls:
            if call.layer:
                found.setdefault(call.name, []).append(call)
        return found

    def counts(self) -> Counter[str]:
        return Counter(call.name for call in self.calls)


@contextmanager
def tracing(network: nn.Module, images: Tensor | None = None) -> Iterator[Trace]:
    """Records the calls inside, and, of the images that the network is given, where they meet weights.

    A call that is left by an exception has no end, and is not recorded.
    """
    trace, stack, handles = Trace(), [], []
    numbers = itertools.count()
    layers = {name for name, module in network.named_modules() if isinstance(module, LAYERS)}

    def begin(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            stack.append((name, next(numbers), _copied(first_tensor((args, kwargs)))))

        return hook

    def end(module: nn.Module, args: Any, output: Any) -> None:
        name, number, h = stack.pop()
        trace.calls.append(Call(name, number, name in layers, h, _copied(output)))

    for name, module in network.named_modules():
        handles.append(module.register_forward_pre_hook(begin(name), with_kwargs=True))
        handles.append(module.register_forward_hook(end, prepend=True))  # before one that leaves by an exception
    following = nullcontext() if images is None else _Products(network, images, layers, stack, trace)
    try:
        with following:
            yield trace
    finally:
        for handle in handles:
            handle.remove()


def _copied(value: Any) -> Any:
    """A tensor as it is now: what follows may change it in place."""
    return value.detach().clone() if isinstance(value, Tensor) else value


class _Products(TorchFunctionMode):
    """Sees every function of torch that is called, and follows what comes from the images and what from weights alone.

    Only products and convolutions are told of: what is added or multiplied element by element (position embeddings,
    scales of layers) has nothing that a mask could switch off.
    """

    def __init__(
        self, network: nn.Module, x: Tensor, layers: set[str], stack: list[tuple[str, int, Any]], trace: Trace
    ) -> None:
        super().__init__()
        self.parameters = {_memory(p): name for name, p in network.named_parameters() if p.numel()}
        self.layers, self.stack, self.trace = layers, stack, trace
        self.images: dict[int, Tensor] = {id(x): x}  # by identity; held, so that none is used again
        self.weights: dict[int, tuple[Tensor, str]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        weights = [(tensor, name) for tensor in given if (name := self._weight(tensor)) is not None]
        images = any(id(tensor) in self.images for tensor in given)
        self.trace.used.update(name for _, name in weights)
        name = getattr(func, "__name__", "")
        if images and name in PRODUCTS:
            factors = {id(leaf) for leaf in tree_leaves(_factors(name, args, kwargs or {}))}
            self._product(name, [weight for tensor, weight in weights if tensor.dim() > 1 and id(tensor) in factors])
        changed = given[:1] if name == "__setitem__" else [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        for tensor in changed:
            if images:
                self.images[id(tensor)] = tensor
            elif weights:
                self.weights[id(tensor)] = tensor, weights[0][1]
        return result

    def _product(self, function: str, weights: list[str]) -> None:
        module = self.stack[-1][0] if self.stack else ""
        if module not in self.layers:
            self.trace.escapes += [Escape(weight, function, module) for weight in weights]

    def _weight(self, tensor: Tensor) -> str | None:
        if id(tensor) in self.images:
            return None
        _, name = self.weights.get(id(tensor), (None, None))
        return self.parameters.get(_memory(tensor)) if name is None else name


def _factors(function: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What is multiplied, and not what is added to the product (a bias, the scores of an attention)."""
    added = {"bias", "attn_mask"} | ({"input"} if function.startswith(("add", "badd")) else set())
    first = 1 if function.startswith(("add", "badd")) else 0
    last = 3 if function == "scaled_dot_product_attention" else None
    return args[first:last], {key: value for key, value in kwargs.items() if key not in added}


def _memory(tensor: Tensor) -> int | None:
    """Which memory a tensor is a view of."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided and tensor.numel() else None


def first_tensor(values: Any) -> Tensor | None:
    """The first tensor among arguments."""
    return next((leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)), None)


def main_output(output: Any) -> Tensor | None:
    """The tensor that a network gives: alone, by a name that is usual, or alone in a tuple."""
    if isinstance(output, Mapping):
        known = (output.get(key) for key in ("logits", "pooler_output", "last_hidden_state"))
        output = next((value for value in known if value is not None), None)
    if isinstance(output, tuple | list) and len(output) == 1:
        output = output[0]
    return output if isinstance(output, Tensor) else None
