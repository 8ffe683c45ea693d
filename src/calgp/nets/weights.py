"""Weights of somebody's network: read from a file that is never executed, checked, and known by their SHA-256."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from calgp.errors import CalgpError, one_line, path_error

NESTED = ("state_dict", "model", "model_state_dict")  # names by which checkpoints hold the weights among other things
OPTIONAL = "num_batches_tracked"  # a count that evaluation does not use; old files lack it


def read_weights(path: Path) -> dict[str, Tensor]:
    """Tensors by name from a .safetensors file, or from a PyTorch file of tensors (weights_only)."""
    if not path.is_file():
        raise path_error("file of weights", path)
    try:
        found = load_file(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
    except Exception as error:  # of several libraries, on damaged files
        raise CalgpError(
            f"{path} cannot be read as weights ({one_line(error)}); it must be a .safetensors file, or a state_dict "
            "that torch.save has written."
        ) from None
    for name in NESTED:
        found = found[name] if isinstance(found, Mapping) and isinstance(found.get(name), Mapping) else found
    if not isinstance(found, Mapping) or not all(isinstance(each, Tensor) for each in found.values()) or not found:
        raise CalgpError(f"{path} holds no table of tensors; save the network's weights with network.state_dict().")
    prefix = "module." if all(name.startswith("module.") for name in found) else ""  # of DataParallel
    return {str(name).removeprefix(prefix): each for name, each in found.items()}


def put_weights(network: nn.Module, weights: Mapping[str, Tensor], path: Path) -> None:
    """Every tensor of the network from a file; what the file has beyond that, such as a classifier, is left out."""
    own = network.state_dict()
    missing = [name for name in own if name not in weights and not name.endswith(OPTIONAL)]
    if missing:
        raise CalgpError(
            f"{path} has no weights for {len(missing)} of the {len(own)} tensors of this network, such as "
            f"{missing[0]!r}; it must hold the weights of the same network."
        )
    for name, each in own.items():
        if name in weights and weights[name].shape != each.shape:
            raise CalgpError(
                f"{path} has {name!r} of shape {list(weights[name].shape)}, the network {list(each.shape)}; it must "
                "hold the weights of the same network."
            )
    network.load_state_dict({name: weights.get(name, each) for name, each in own.items()})


def weights_digest(network: nn.Module) -> str:
    """SHA-256 of all tensors of a network with their names, types and shapes."""
    digest = hashlib.sha256()
    for name, each in sorted(network.state_dict().items()):
        digest.update(f"{name} {each.dtype} {list(each.shape)}\n".encode())
        digest.update(each.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
