"""`wrap`: anybody's network as a backbone, and what of it a run folder keeps."""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from calgp.data import Images
from calgp.errors import CalgpError
from calgp.gp import UNMASKED, Masking, Posterior
from calgp.gp.masks import Granularity
from calgp.nets.base import HIDDEN, KEPT, Backbone, Task
from calgp.nets.standardised import standardisers
from calgp.nets.wrap.features import WrappedFeatures
from calgp.nets.wrap.sites import KINDS, LAYERS, Choice, InputMasks
from calgp.options import COUNT, POSITIVE, Interval, about, check_options, option

Network = nn.Module | Callable[[], nn.Module]
NETWORKS: dict[str, Network] = {}  # what `wrap` was given, by name: a run folder has the name alone


def wrap(
    network: Network,
    *,
    name: str | None = None,
    mask: str | Iterable[str] | Callable[[str], bool] = "all",
    **options: Any,
) -> "Wrapped":
    """Use your own network as the backbone of any method. The network itself is not changed: each model has a copy.

    Args:
        network: a module from images to features or to logits, with the weights to start from; or a function that
            makes one, for a fresh one each time.
        name: what run folders call it; the same name must be given to the same kind of network before they are loaded.
            None means the name of its class.
        mask: as in `Wrapped`, or a function that chooses layers by name.
        options: of `Wrapped`: features, unmasked, mask_first, keep, granularity, inverted, freeze, mean, std, …

    >>> network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(64, 10))
    >>> features = wrap(network).build(Task(3, 8, 8, classes=2), Masking())
    >>> features.sites, features.stem_module, features.out_features
    ({'2': 1}, '1', 64)
    """
    if not callable(network):
        raise CalgpError(f"Invalid network={network!r}: must be a module, or a function that makes one.")
    if callable(mask):
        mask = [key for key, module in _made(network).named_modules() if isinstance(module, LAYERS) and mask(key)]
    kind = getattr(type(network) if isinstance(network, nn.Module) else network, "__name__", "network")
    names = (kind.strip("<>").lower() + f"-{i}" * (i > 1) for i in range(1, len(NETWORKS) + 3))
    chosen = name or next(each for each in names if NETWORKS.get(each, network) is network)
    spec = Wrapped(chosen, mask=mask, **options)  # pyright: ignore[reportArgumentType]
    NETWORKS[chosen] = network
    return spec


@dataclass(frozen=True)
class Wrapped(Backbone):
    """A network that `calgp.wrap` was given. As data it is only a name: loading a run imports and executes nothing.

    Features that are images are averaged over their pixels. What is frozen costs a constant, which the KL leaves out.

    >>> import calgp
    >>> calgp.wrap(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10)), name="flat").network
    'flat'
    """

    network: str = field(metadata=about("The name that it was given."))
    features: str | None = option(
        None, 'The module whose output are the features; "" is the whole network.',
        default_text="what enters the last linear layer, with which the network must then end",
    )  # fmt: skip
    mask: Choice = option("all", "Layers that get a mask: by kind, or by names of them and of modules that hold them; "
                                 "* is any part of a name.")  # fmt: skip
    unmasked: tuple[str, ...] = option(
        (), "Names, as in `mask`, of what gets none all the same, such as attention that reads its weights itself.",
        default_text="none", since_version="0.1.0",
    )  # fmt: skip
    mask_first: bool = option(False, "Mask the first layer too; those named always are.")
    keep: float | None = option(
        0.9, "π of the masks, where the method masks filters; none leaves all three options of masks to the method.",
        within=KEPT,
    )  # fmt: skip
    granularity: Granularity = option(
        "element", "Whether a mask is drawn for each pixel and channel, for each channel, or once for all images."
    )
    inverted: bool = option(True, "Divide what a mask keeps by π, as pretrained weights need it.")
    freeze: bool = option(False, "Keep its parameters, and the statistics of its batch norm, as they are.")
    mean: tuple[float, ...] = option(
        (), "Of each channel: images become (x − mean) / std.", default_text="0", example="0.485,0.456,0.406"
    )
    std: tuple[float, ...] = option(
        (), "Of each channel, see `mean`.", within=POSITIVE, default_text="1", example="0.229,0.224,0.225"
    )
    statistics: int = option(
        2000, "Training images that estimate the statistics of batch norm again, with the masks on; 0 keeps the old.",
        within=Interval(0, 2**31),
    )  # fmt: skip
    hidden: tuple[int, ...] = option((), HIDDEN, within=COUNT, default_text="none", example="384,192")

    def __post_init__(self) -> None:
        for name in ("unmasked", "mean", "std", "hidden", *(["mask"] if not isinstance(self.mask, str) else [])):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        check_options(self)
        if not self.mask or (isinstance(self.mask, str) and self.mask not in KINDS):
            raise CalgpError(f"Invalid mask={self.mask!r}: must be one of {', '.join(KINDS)}, or names of layers.")
        if len(self.mean) != len(self.std):
            raise CalgpError(f"Invalid mean={self.mean}, std={self.std}: must be a number a channel each.")

    def build(self, task: Task, posterior: Posterior, *, generator: torch.Generator | None = None) -> WrappedFeatures:
        if self.network not in NETWORKS:
            raise CalgpError(
                f"The network {self.network!r} is somebody's own and not known here: give it with "
                f"calgp.wrap(network, name={self.network!r}) before, or with `calgp --network "
                f"{self.network}=file.py:function …`."
            )
        return self.features_of(NETWORKS[self.network], task, posterior, generator=generator)

    def features_of(
        self, network: Network, task: Task, posterior: Posterior, *, generator: torch.Generator | None = None
    ) -> WrappedFeatures:
        """`build` of a network that needs no name."""
        masking = self._masking(posterior)
        with torch.device("cpu"):  # a trial needs values, so it cannot be without memory
            return WrappedFeatures(_made(network, generator), self, task, masking)

    def start(self, model: nn.Module, train: Images, *, generator: torch.Generator | None = None) -> None:
        """Estimates the statistics of batch norm with the masks on."""
        if not self.statistics:
            return
        chosen = torch.randperm(len(train), generator=generator)[: self.statistics]
        like = next(model.parameters())
        seen = next((each.normalised for each in standardisers(model)), lambda x: x)  # what enters the network
        for features in (module for module in model.modules() if isinstance(module, WrappedFeatures)):
            parts = ((seen(train.pixels(i).to(like)), train.rows[i].to(like.device)) for i in chosen.split(100))
            features.estimate_statistics(parts, seed=int(torch.randint(2**32, (), generator=generator)))

    def _masking(self, posterior: Posterior) -> Masking:
        """The masks for pretrained weights, or those of the method; none where it has none."""
        try:
            asked = posterior.as_masks()
            own = asked if self.keep is None else Masking(self.keep, self.granularity, self.inverted)
        except ValueError as error:
            raise CalgpError(f"{error}.") from None
        return own if asked.active else UNMASKED


def check_plain(network: nn.Module) -> None:
    """Refuse what cannot be followed, before it is run."""
    for module in network.modules():
        if isinstance(module, torch.jit.ScriptModule | InputMasks) or hasattr(module, "_orig_mod"):
            raise CalgpError("Invalid network: must be the plain module, not scripted, compiled or wrapped already.")


def _made(network: Network, generator: torch.Generator | None = None) -> nn.Module:
    """A copy of a network, or a new one; torch's own generator is left as it was."""
    made: object = network
    if not isinstance(network, nn.Module):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(torch.randint(2**32, (), generator=generator)))
            made = network()
    if not isinstance(made, nn.Module):
        raise CalgpError(f"Invalid network: the function that makes it must give an nn.Module, not {made!r}.")
    check_plain(made)
    try:
        return copy.deepcopy(made) if made is network else made
    except Exception as error:
        raise CalgpError(f"The network cannot be copied ({error}); give wrap a function that makes it.") from error
