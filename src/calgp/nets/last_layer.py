"""The last linear layer of somebody's classifier: where it is, what enters it, and the logits that leave it."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from calgp.errors import CalgpError, name_error
from calgp.gp import evaluating

NOT_FINITE = "The network gives logits that are no finite numbers; look at what enters it."


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
        network: gives logits, log-probabilities or probabilities [N, Q] (alone, in a tuple, or as `logits`).
        name: of the layer.
    """

    def __init__(self, network: nn.Module, name: str) -> None:
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
        seen, output = _watched(network, x[:4], _linear_layers(network))
        given = _logits(output)
        if not given.isfinite().all():
            raise CalgpError(_why_not_finite(network))
        found = [each for each, calls in seen.items() if len(calls) == 1 and _gives(calls[0].logits, given)]
        if not found or name not in (None, *found):
            called = ", ".join([*seen][-3:]) or "none"
            raise CalgpError(
                "The network does not end with a linear layer on vectors whose output is its logits or their softmax: "
                f"it gives {tuple(given.shape)}, and the last linear layers that it calls are {called}. Put a module "
                "around it that returns the logits of such a layer."
            )
        return LastLayer(network, found[-1] if name is None else name)

    @property
    def weight(self) -> Float[Tensor, "Q d"]:
        return self.layer.weight.detach()

    @property
    def bias(self) -> Float[Tensor, "Q"] | None:
        return None if self.layer.bias is None else self.layer.bias.detach()

    def __call__(self, x: Tensor) -> Pass:
        """Features and logits in evaluation mode, without gradients; in single precision at least."""
        seen, _ = _watched(self.network, x, {self.name: self.layer})
        if len(seen.get(self.name, ())) != 1:
            raise CalgpError(f"The last layer {self.name!r} must be called once in a pass, on vectors; it was not.")
        found = seen[self.name][0]
        if not found.logits.isfinite().all():
            raise CalgpError(NOT_FINITE)
        return found


def _linear_layers(network: nn.Module) -> dict[str, nn.Linear]:
    return {name: module for name, module in network.named_modules() if isinstance(module, nn.Linear)}


def _watched(network: nn.Module, x: Tensor, layers: Mapping[str, nn.Linear]) -> tuple[dict[str, list[Pass]], Any]:
    """What entered and left linear layers on vectors in a pass, call by call, and what the network gave."""
    seen: dict[str, list[Pass]] = {}

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            if args and args[0].dim() == 2:
                parts = (each.detach().to(torch.promote_types(each.dtype, torch.float32)) for each in (args[0], output))
                seen.setdefault(name, []).append(Pass(*parts))

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
            "channels, type, normalisation."
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


def _logits(output: Any) -> Tensor:
    if isinstance(output, Mapping):
        output = output.get("logits")
    output = output[0] if isinstance(output, tuple | list) and output else output
    if not isinstance(output, Tensor) or output.dim() != 2 or output.shape[1] < 2:
        what = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise CalgpError(
            f"The network must give a row of at least two logits for each input [N, Q]; it gives {what}. If it has one "
            "logit for two classes, put nn.Linear(d, 2) in the place of its last layer: zeros, and the layer's weights."
        )
    return output.to(torch.promote_types(output.dtype, torch.float32))


def _gives(logits: Tensor, output: Tensor) -> bool:
    """Whether a network's output is that of a layer, or its softmax."""
    if logits.shape != output.shape or not logits.isfinite().all():
        return False
    same = (logits, logits.log_softmax(1), logits.softmax(1))
    return any(torch.allclose(each, output, rtol=1e-3, atol=1e-4) for each in same)
