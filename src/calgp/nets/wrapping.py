"""Anybody's network as a backbone: masks in front of the layers that it has, its features found, its weights kept."""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from calgp.data import Images
from calgp.errors import CalgpError
from calgp.gp import UNMASKED, Masking, Posterior
from calgp.gp.masks import Granularity
from calgp.nets.base import Backbone, Task
from calgp.nets.standardised import standardisers
from calgp.nets.tracing import LAYERS
from calgp.nets.wrapped import InputMasks, WrappedFeatures

Network = nn.Module | Callable[[], nn.Module]
NETWORKS: dict[str, Network] = {}  # what `wrap` was given, by name: a run folder has the name alone
KINDS = ("all", "convolutions", "linear", "none")


def wrap(
    network: Network,
    *,
    name: str | None = None,
    features: str | None = None,
    mask: str | Iterable[str] | Callable[[str], bool] = "all",
    mask_first: bool = False,
    keep: float | None = 0.9,
    granularity: Granularity = "element",
    inverted: bool = True,
    freeze: bool = False,
    mean: Iterable[float] = (),
    std: Iterable[float] = (),
    statistics: int = 2000,
    hidden: Iterable[int] = (),
) -> "Wrapped":
    """Anybody's network as a backbone for every method. The network itself is not changed: each model has a copy.

    Args:
        network: a module from images to features or to logits, with the weights to start from; or a function that
            makes one, for a fresh one each time.
        name: what run folders call it; the same name must be given to the same kind of network before they are loaded.
            None means the name of its class.
        mask: which layers get a mask: all, convolutions, linear, none; names of layers or of modules that hold them;
            or a function that chooses by name.
        features, mask_first, keep, granularity, inverted, freeze, mean, std, statistics, hidden: see `Wrapped`.
    """
    if not callable(network):
        raise CalgpError(f"wrap takes a module, or a function that makes one, not {network!r}.")
    _check_kind(network)
    if callable(mask):
        chosen = [key for key, module in _made(network, None).named_modules() if isinstance(module, LAYERS)]
        mask = [key for key in chosen if mask(key)]
        if not mask:
            raise CalgpError("mask chose no layer: nothing of the network would be random; mask='none' says so.")
    spec = Wrapped(
        network=_register(network, name),
        features=features,
        mask=mask if isinstance(mask, str) else tuple(mask),  # pyright: ignore[reportArgumentType]
        mask_first=mask_first,
        keep=keep,
        granularity=granularity,
        inverted=inverted,
        freeze=freeze,
        mean=tuple(mean),
        std=tuple(std),
        statistics=statistics,
        hidden=tuple(hidden),
    )
    return spec


@dataclass(frozen=True)
class Wrapped(Backbone):
    """A network that `calgp.wrap` was given. As data it is only a name: loading a run imports and executes nothing.

    network: the name that it was given.
    features: the module whose output are the features ("" is the whole network); None means what enters the last linear
        layer, if the network ends with one, else its output. Images of features are averaged over their pixels.
    mask: which layers get a mask: all, convolutions, linear or none; or names of layers and of modules that hold them.
    mask_first: mask the first layer too (those named always are).
    keep, granularity, inverted: the masks (calgp.gp.Masking), wherever the method has masked filters; the defaults are
        for pretrained weights. keep = None leaves all three to the method.
    freeze: its parameters, and the statistics of its batch norm, stay as they are. What is frozen costs a constant,
        which the KL leaves out.
    mean, std: of each channel; images become (x − mean) / std.
    statistics: on how many training images the statistics of batch norm are estimated anew before the first step, with
        the masks on; 0 keeps those that are there.
    """

    network: str
    features: str | None = None
    mask: Literal["all", "convolutions", "linear", "none"] | tuple[str, ...] = "all"
    mask_first: bool = False
    keep: float | None = 0.9
    granularity: Granularity = "element"
    inverted: bool = True
    freeze: bool = False
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    statistics: int = 2000
    hidden: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.mask not in KINDS and (isinstance(self.mask, str) or not self.mask):
            raise CalgpError(f"mask={self.mask!r} is not known; it is one of {', '.join(KINDS)}, or names of layers.")
        if len(self.mean) != len(self.std) or not all(std > 0 for std in self.std):
            raise CalgpError(f"mean={self.mean} and std={self.std} cannot be; both have a number a channel, std > 0.")
        if self.statistics < 0 or min((1, *self.hidden)) < 1:
            raise CalgpError(f"statistics={self.statistics}, hidden={self.hidden} cannot be; they are counts.")
        self._masking(UNMASKED)

    def build(self, task: Task, masking: Posterior, *, generator: torch.Generator | None = None) -> WrappedFeatures:
        try:
            asked = masking.as_masks()
        except ValueError as error:
            raise CalgpError(f"{error}.") from None
        if self.network not in NETWORKS:
            raise CalgpError(
                f"The network {self.network!r} is somebody's own and not known here: give it with "
                f"calgp.wrap(network, name={self.network!r}) before, or with `calgp --network "
                f"{self.network}=file.py:function …`."
            )
        with torch.device("cpu"):  # a trace needs values, so it cannot be without memory; that of the user's own code
            network = _made(NETWORKS[self.network], generator)
            return WrappedFeatures(network, self, task, self._masking(asked) if asked.active else UNMASKED)

    def start(self, model: nn.Module, train: Images, *, generator: torch.Generator | None = None) -> None:
        """Batch norm's statistics anew, with the masks on."""
        if not self.statistics:
            return
        chosen = torch.randperm(len(train), generator=generator)[: self.statistics]
        like = next(model.parameters())
        seen = next((each.normalised for each in standardisers(model)), lambda x: x)  # what enters the network
        for features in (module for module in model.modules() if isinstance(module, WrappedFeatures)):
            parts = ((seen(train.pixels(i).to(like)), train.rows[i].to(like.device)) for i in chosen.split(100))
            features.estimate_statistics(parts, seed=int(torch.randint(2**32, (), generator=generator)))

    def _masking(self, asked: Masking) -> Masking:
        if self.keep is None:
            return asked
        try:
            return Masking(self.keep, self.granularity, self.inverted)
        except ValueError as error:
            raise CalgpError(f"{error}.") from None


def _register(network: Network, name: str | None) -> str:
    made_by = type(network) if isinstance(network, nn.Module) else network
    kind = getattr(made_by, "__name__", "network").strip("<>").lower()
    candidates = [kind, *(f"{kind}-{i}" for i in range(2, len(NETWORKS) + 3))] if name is None else [name]
    free = (each for each in candidates if name or NETWORKS.get(each, network) is network)
    NETWORKS[chosen := next(free)] = network
    return chosen


def _made(network: Network, generator: torch.Generator | None) -> nn.Module:
    """A copy of a network, or a new one; torch's own generator is left as it was."""
    if isinstance(network, nn.Module):
        try:
            return copy.deepcopy(network)
        except Exception as error:
            raise CalgpError(f"The network cannot be copied ({error}); give wrap a function that makes it.") from error
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(torch.randint(2**32, (), generator=generator)))
        made = network()
    if not isinstance(made, nn.Module):
        raise CalgpError(f"The function that should make a network gave {type(made).__name__}, not an nn.Module.")
    _check_kind(made)
    return made


def _check_kind(network: Network) -> None:
    """Refuses networks whose layers Python does not call."""
    for module in network.modules() if isinstance(network, nn.Module) else ():
        if isinstance(module, torch.jit.ScriptModule | torch.jit.ScriptFunction) or hasattr(module, "_orig_mod"):
            raise CalgpError("A scripted or compiled network passes by its masks; give the module that it was made of.")
        if isinstance(module, InputMasks):
            raise CalgpError("The network has masks of a wrapping already; give it as it was, with its new weights.")
