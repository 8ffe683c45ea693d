"""Files of earlier versions, read as today's.

Until 2026-11-17 a variational Ω was stored as Ω = Λ^-½ ε; it is stored as ε since (`calgp.gp.Variational`). The signs
of SORF were padded to a power of two; they keep that size where they were (`calgp.gp.Sorf`).
"""

from torch import Tensor, nn

from calgp.errors import CalgpError
from calgp.gp import Sorf

OLD, NEW = "frequencies.weight", "frequencies.epsilon"


def current_name(name: str) -> str:
    """What a tensor of a model is called today.

    >>> current_name("gp.layers.0.frequencies.weight")
    'gp.layers.0.frequencies.epsilon'
    """
    return name.removesuffix(OLD) + NEW if name.endswith(OLD) else name


def former_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes that tensors of this model may have in files of earlier versions."""
    sorfs = ((name, module) for name, module in model.named_modules() if isinstance(module, Sorf))
    return {f"{name}.signs": module.former_shape for name, module in sorfs}


def whiten(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a model whose frequencies may be an earlier version's: ε = Λ^½ Ω, and the deviations of q(ε)."""
    found = {current_name(name): value for name, value in tensors.items()}
    for layer in _unwhitened(tensors):
        log_lengthscale = tensors[f"{layer}kernel.log_lengthscale"].unsqueeze(-1)
        found[f"{layer}{NEW}"] = log_lengthscale.exp() * tensors[f"{layer}{OLD}"]
        deviation = f"{layer}frequencies.log_deviation"
        if deviation in tensors:
            found[deviation] = tensors[deviation] + log_lengthscale
    return found


def check_resumable(tensors: dict[str, Tensor]) -> None:
    """Refuse a checkpoint whose optimiser stepped in Ω: its moments are those of another parameter, but for ℓ = 1."""
    if any((tensors[f"{layer}kernel.log_lengthscale"] != 0).any() for layer in _unwhitened(tensors)):
        raise CalgpError(
            "The checkpoint is of an earlier version, which stored the frequencies Ω as ε/ℓ and lost them in a few "
            "steps where ℓ is not 1; train again."
        )


def _unwhitened(tensors: dict[str, Tensor]) -> list[str]:
    """The GP layers whose frequencies are stored as Ω."""
    return [name.removesuffix(OLD) for name in tensors if name.endswith(OLD)]
