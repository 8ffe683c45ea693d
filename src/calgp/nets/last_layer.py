"""The last linear layer of somebody's classifier: where it is, what enters it, and the logits that leave it.

A convolution of 1 × 1 is a linear layer on each pixel. If a network averages its logits over pixels or tokens, they are
those of the average of what enters the layer.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeGuard

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from calgp.errors import CalgpError, name_error
from calgp.gp import evaluating

NOT_FINITE = "The network gives logits that are no finite numbers; look at what enters it."
VARIES = 0.01  # relative to the largest logit: more than bfloat16 rounds


class Pass(NamedTuple):
    """What a network gives for a batch."""

    features: Float[Tensor, "N d"]  # c, which enter the last layer
    logits: Float[Tensor, "N Q"]  # W c + b


class LastLayer:
    """A trained network, seen at its last layer. It is neither copied nor changed: hooks are there during a pass only.

    >>> network = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2), nn.LogSoftmax(1))
    >>> last = LastLayer.find(network, torch.rand(5, 1, 2, 2))
    >>> last.name, last(torch.rand(7, 1, 2, 2)).features.shape
    ('3', torch.Size([7, 3]))

    Args:
        network: gives logits, log-probabilities or probabilities [N, Q] (alone, in a tuple, or as `logits`). Of one
            that torch.compile has made, the module inside is run.
        name: of the layer.
    """

    def __init__(self, network: nn.Module, name: str) -> None:
        network = _not_compiled(network)
        layers = _linear_layers(network)
        if name not in layers:
            raise name_error("The network has no linear layer called", name, layers)
        self.network, self.name, self.layer = network, name, layers[name]

    @staticmethod
    def find(network: nn.Module, x: Tensor, name: str | None = None) -> "LastLayer":
        """The linear layer whose output is what the network gives for some inputs; `name` is checked, if given."""
        if not isinstance(network, nn.Module) or next(network.parameters(), None) is None:
            raise CalgpError(
                f"A trained network must be an nn.Module with parameters, not {type(network).__name__}; put a module "
                "around a function, with the layers that it calls."
            )
        if isinstance(network, torch.jit.ScriptModule) or any(each.is_meta for each in network.parameters()):
            raise CalgpError(
                "The network is scripted or traced, or its weights are on the device 'meta': give the nn.Module "
                "itself, with its weights loaded."
            )
        network = _not_compiled(network)
        seen, output = _watched(network, x[:4], _linear_layers(network))
        given = _logits(output)
        if not given.isfinite().all():
            raise CalgpError(_why_not_finite(network))
        found = [each for each, calls in seen.items() if len(calls) == 1 and _gives(calls[0].logits, given)]
        found = [each for each in found if LastLayer(network, each).maps(seen[each][0])]
        if not found or name not in (None, *found):
            called = ", ".join([*seen][-3:]) or "none"
            raise CalgpError(
                "The network does not end with a linear layer whose output (or its average over pixels or tokens) is "
                f"the network's logits or their softmax: it gives {tuple(given.shape)}, and the last linear layers "
                f"that it calls are {called}. Put a module around it that returns the logits of such a layer, multiply "
                "a fixed factor behind it into its weights, and take a quantised network as it was before."
            )
        last = LastLayer(network, found[-1] if name is None else name)
        alone = last(x[:1].expand_as(x[:4])).logits[0]  # as large a batch, so that it is rounded as before
        if (alone - seen[last.name][0].logits[0]).abs().max() > VARIES * (1 + given.abs().max()):
            raise CalgpError(
                "The network gives other logits for the same input: it draws random numbers in evaluation mode, or "
                "looks at the other inputs of a batch. Use nn.Dropout, or F.dropout(x, training=self.training), and "
                "batch norm with running statistics."
            )
        return last

    @property
    def weight(self) -> Float[Tensor, "Q d"]:
        return self.layer.weight.detach().flatten(1)

    @property
    def bias(self) -> Float[Tensor, "Q"] | None:
        return None if self.layer.bias is None else self.layer.bias.detach()

    def maps(self, seen: Pass) -> bool:
        """Whether logits are W c + b: layers of other classes that inherit from nn.Linear may do what they want."""
        c, f = seen
        bias = None if self.bias is None else self.bias.to(c)
        return bool((F.linear(c, self.weight.to(c), bias) - f).abs().max() <= VARIES * (1 + f.abs().max()))

    def __call__(self, x: Tensor) -> Pass:
        """Features and logits in evaluation mode, without gradients; in single precision at least."""
        seen, _ = _watched(self.network, x, {self.name: self.layer})
        if len(seen.get(self.name, ())) != 1:
            raise CalgpError(f"The last layer {self.name!r} must be called once in a pass; it was not.")
        found = seen[self.name][0]
        if not found.logits.isfinite().all():
            rows = (~found.logits.isfinite().all(1)).nonzero().flatten().tolist()
            raise CalgpError(f"{NOT_FINITE} In this batch it is input {rows[0]}, and {len(rows) - 1} others.")
        return found


def _linear_layers(network: nn.Module) -> dict[str, nn.Linear | nn.Conv2d]:
    return {name: each for name, each in network.named_modules() if isinstance(each, nn.Linear) or _is_pixelwise(each)}


def _is_pixelwise(module: nn.Module) -> TypeGuard[nn.Conv2d]:
    """Whether it is a linear layer on each pixel."""
    if not isinstance(module, nn.Conv2d) or isinstance(module.padding, str):
        return False
    return {*module.kernel_size, *module.stride, module.groups} == {1} and {*module.padding} == {0}


def averaged(layer: nn.Module, values: Tensor) -> Float[Tensor, "N d"]:
    """What entered or left a layer: vectors, or the average over pixels or tokens."""
    if isinstance(layer, nn.Conv2d):
        return values.mean((2, 3))
    return values if values.dim() == 2 else values.flatten(1, -2).mean(1)


def _not_compiled(network: nn.Module) -> nn.Module:
    """The module that torch.compile was given: what it has compiled calls no hooks."""
    if getattr(network, "_compiled_call_impl", None) is not None:
        raise CalgpError(
            "The network is compiled in place, by network.compile(): give one that is not, with the same state_dict."
        )
    plain = getattr(network, "_orig_mod", network)
    return plain if isinstance(plain, nn.Module) else network


def _watched(network: nn.Module, x: Tensor, layers: Mapping[str, nn.Module]) -> tuple[dict[str, list[Pass]], Any]:
    """What entered and left linear layers in a pass, call by call, and what the network gave."""
    seen: dict[str, list[Pass]] = {}

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            if args and args[0].dim() > 1:
                parts = (each.detach().to(torch.promote_types(each.dtype, torch.float32)) for each in (args[0], output))
                seen.setdefault(name, []).append(Pass(*(averaged(module, each) for each in parts)))

        return hook

    handles = [module.register_forward_hook(note(name)) for name, module in layers.items()]
    like = next(network.parameters())
    x = x.to(like) if x.is_floating_point() else x.to(like.device)
    try:
        with evaluating(network), torch.no_grad():
            output = network(x)
    except CalgpError:
        raise
    except Exception as error:
        reason = (str(error) or repr(error)).splitlines()[0]
        raise CalgpError(
            f"The network cannot take inputs of {tuple(x.shape)}: {reason}. Give them as it was trained on them: size, "
            "channels, type, normalisation. One with several inputs needs a module around it that takes one tensor."
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    return seen, output


def _why_not_finite(network: nn.Module) -> str:
    """Whether weights or inputs are to blame."""
    bad = [name for name, each in network.named_parameters() if not each.isfinite().all()]
    if not bad:
        return NOT_FINITE
    return (
        f"The network gives logits that are no finite numbers: its weights {bad[0]!r} are not finite. Its training has "
        "failed; take weights from before."
    )


def _logits(given: Any) -> Tensor:
    named = given.get("logits") if isinstance(given, Mapping) else getattr(given, "logits", None)
    output = given[0] if named is None and isinstance(given, tuple | list) and given else given
    output = output if named is None else named
    if not isinstance(output, Tensor):
        what = f"a dictionary of {', '.join(map(str, given))}" if isinstance(given, Mapping) else type(output).__name__
        raise CalgpError(
            f"The network must give a tensor of logits [N, Q], alone, first in a tuple, or as `logits`; it gives "
            f"{what}. Put a module around it that returns the logits."
        )
    if output.dim() != 2 or output.shape[1] < 2:
        raise CalgpError(
            f"The network must give a row of at least two logits for each input [N, Q]; it gives "
            f"{tuple(output.shape)}. If it has one logit for two classes, put nn.Linear(d, 2) in the place of its last "
            "layer: zeros, and the layer's weights."
        )
    return output.to(torch.promote_types(output.dtype, torch.float32))


def _gives(logits: Tensor, output: Tensor) -> bool:
    """Whether a network's output is that of a layer, or its softmax."""
    if logits.shape != output.shape or not logits.isfinite().all():
        return False
    same = (logits, logits.log_softmax(1), logits.softmax(1))
    return any(torch.allclose(each, output, rtol=1e-3, atol=1e-4) for each in same)
