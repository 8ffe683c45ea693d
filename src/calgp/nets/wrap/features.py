"""The features of somebody's network, with masks in front of its layers; every pass checks that each was masked."""

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from calgp.errors import CalgpError
from calgp.gp import UNMASKED, Batch, Masking, Noise, evaluating, name_sites
from calgp.gp.masks import half_norm
from calgp.nets.base import Features, Task
from calgp.nets.wrap.sites import LAYERS, PASS, InputMasks, Pass, Reached, Trial, choose_sites, images_first

if TYPE_CHECKING:
    from calgp.nets.wrap.backbone import Wrapped

MOST_STEMS = 12  # modules in front of the first mask that are tried as the stem


class WrappedFeatures(Features):
    """The features of somebody's network, which stays as it is but for hooks in front of its layers.

    `sites` has the masked layers by their names in the network, and how often a pass calls each. Linear layers on
    tokens, and on images with the channels last, are convolutions of 1 × 1: tokens are pixels to a mask. A layer that
    is called several times in a pass is one W: with masks by channel, or shared, all its calls have the same z, with
    masks by element (which are no W in a convolution either) each call its own; its KL counts once, and so does that of
    weights that several layers share.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, spec: "Wrapped", task: Task, masking: Masking) -> None:
        super().__init__()
        self.network, self.spec, self.masking = network, spec, masking
        self.register_buffer("mean", torch.tensor(spec.mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(spec.std).view(-1, 1, 1), persistent=False)
        self.image = (task.channels, task.height, task.width)
        self.sites: dict[str, int] = {}
        self.stem_module: str | None = None
        with evaluating(network), torch.no_grad(), torch.random.fork_rng(devices=[]):
            trial, x = self._find_features()
            for name, parameter in network.named_parameters():
                if spec.freeze or name not in trial.used:  # it lies behind the features, or has no part in them
                    parameter.requires_grad_(False)
            self.layers = tuple(trial.layers)
            if masking.active:
                self.sites = choose_sites(trial, spec.mask, spec.unmasked, mask_first=spec.mask_first)
            self._put_masks()
            self._find_stem(trial, x)
        self.train()

    def train(self, mode: bool = True) -> "WrappedFeatures":
        """Concerns batch norm, and modules that have a `train` of their own; masks replace dropout and its kin."""
        super().train(mode)
        for module in self.network.modules():
            follows = isinstance(module, _NormBase) or type(module).train is not nn.Module.train  # caches of timm
            module.training = module.training and follows and not self.spec.freeze
        return self

    def stem(self, x: Float[Tensor, "N C H W"]) -> Tensor:
        """Up to a module in front of the first mask, where nothing goes around it; else the image, or all, if nothing
        is masked. While batch norm learns its statistics, the image too: each pass must show it each image once."""
        return self._stem(self._normalised(x))

    def forward(self, h: Tensor, noise: Noise | None = None) -> Float[Tensor, "SN d"]:
        if not self.sites:
            return h
        h = h.repeat(1 if noise is None else len(noise.samples), *(1,) * (h.dim() - 1))
        current = Pass(noise, h.shape[0], None if self._whole else h)
        c = self._run(current, h if self._whole else h.new_zeros(1, *self.image))
        if current.fired != self.sites:
            names = ", ".join(name for name, calls in self.sites.items() if current.fired[name] != calls)
            raise CalgpError(
                f"These masked layers were not called as often as when the network was wrapped: {names}. What it calls "
                "must not depend on the images or on the mode; leave them without masks: unmasked=[…]."
            )
        return c

    def kl(self) -> Float[Tensor, ""]:
        """Of the weights and biases of layers that are not frozen, Eq. (8); other parameters are points, no prior."""
        costs: dict[int, Tensor] = {}
        for name in sorted(self.layers, key=lambda name: name not in self.sites):  # masked, where also not masked
            layer = cast(nn.Linear, self.network.get_submodule(name))
            masking = self.masking if name in self.sites else UNMASKED
            for parameter, cost in ((layer.weight, masking.kl), (layer.bias, half_norm)):
                if parameter is not None and parameter.requires_grad:
                    costs.setdefault(id(parameter), cost(parameter))
        return torch.stack(list(costs.values())).sum() if costs else next(self.parameters()).new_zeros(())

    @torch.no_grad()
    def estimate_statistics(self, batches: Iterable[Batch], *, seed: int) -> None:
        """Batch norm's statistics become the average over these batches, behind the masks; without masks they stay."""
        norms = [m for m in self.network.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
        if not self.sites or not norms:
            return
        momenta = [norm.momentum for norm in norms]
        with evaluating(self):
            for norm in norms:
                norm.reset_running_stats()
                norm.momentum = None  # the plain average
                norm.train()
            for x, rows in batches:
                self(self.stem(x), Noise(seed, torch.zeros_like(rows[:1]), rows))
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.eval().momentum = momentum

    @property
    def _whole(self) -> bool:
        """Whether passes go through all of the network: batch norm that learns must see each image, and no blanks."""
        norms = (module for module in self.network.modules() if isinstance(module, _NormBase))
        return self.stem_module is None or any(norm.training for norm in norms)

    def _normalised(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.std if self.mean.numel() else x

    def _stem(self, x: Tensor) -> Tensor:
        if self.sites and self._whole:
            return x
        return self._run(Pass(None, x.shape[0], stopping=bool(self.sites)), x.clone())

    def _run(self, current: Pass, x: Tensor) -> Tensor:
        """What the network gives for x: its features, or, where it should stop there, its stem."""
        token = PASS.set(current)
        try:
            output = self.network(x)
        except Reached:
            output = None
        finally:
            PASS.reset(token)
        return _vectors(output) if current.found is None else current.found

    def _find_features(self) -> tuple[Trial, Tensor]:
        """Runs the network once, on an image and one of NaN, and puts a hook where the features are."""
        name, modules = self.spec.features, dict(self.network.named_modules())
        if name is None and getattr(self.network, "num_classes", None) == 0:  # timm: there is no classifier
            name = ""
        if name and name in modules:
            modules[name].register_forward_hook(_at_features)
        trial, generator = Trial(self.network), torch.get_rng_state()
        try:
            x = torch.rand(2, *self.image, generator=torch.Generator().manual_seed(0))
            x = self._normalised(x.to(next(self.network.parameters(), x)))
            x[1] = torch.nan
            with trial, register_module_forward_pre_hook(trial.begin), register_module_forward_hook(trial.end):
                c = self._run(Pass(None, 2), x.clone())
        except CalgpError:
            raise
        except Exception as error:
            shape, reason = " × ".join(map(str, self.image)), (str(error) or repr(error)).splitlines()[0]
            raise CalgpError(
                f"The network cannot take images of {shape}: {reason}. Give it images of its own size and channels "
                "(Run's size=… and colour=…), and mean and std for these."
            ) from error
        if name and name not in (called := dict(trial.ended)):
            raise CalgpError(
                f"Invalid features={name!r}: must name a module called, such as {', '.join([*called][:8])}."
            )
        c = self._take_classifier(trial, c) if name is None else c
        if not images_first(c) or not generator.equal(torch.get_rng_state()):
            raise CalgpError(
                f"Invalid features {tuple(c.shape)} of two images: must be a row for each that depends on this image "
                "alone; in evaluation mode a network must not be random or mix images (batch norm without statistics)."
            )
        self.out_features = c.shape[1]
        return trial, x

    def _take_classifier(self, trial: Trial, output: Tensor) -> Tensor:
        """What enters the last layer, if that is linear and gives what the network gives; it becomes an Identity."""
        name, c = trial.last
        if c is None:
            raise CalgpError("The network calls no convolution and no linear layer: there is nothing to make random.")
        shapes = [shape for end, shape in trial.ended if isinstance(trial.modules[end], LAYERS)]
        vectors = c.dim() in (2, 4) and c[0].numel() == c.shape[1]  # or images of one pixel
        alone = name and trial.layers[name] == 1 and shapes[-1] not in shapes[-2:-1]
        if not vectors or not alone or output.shape != shapes[-1][:2]:
            ended = trial.ended[: trial.began[name]]
            entering = [end for end, shape in ended if shape == c.shape and c.dim() in (2, 4)]
            raise CalgpError(
                f"The features were not found: the network gives {tuple(output.shape)}, and its last layers, "
                f"{' and '.join([*trial.layers][-2:])}, do not end with one linear classifier on vectors. Build it "
                "without a classifier (timm: num_classes=0) and say features='', or name the module that gives vectors "
                f"or images, such as features={(entering or ['…'])[-1]!r}."
            )
        parent, _, child = name.rpartition(".")
        setattr(self.network.get_submodule(parent), child, identity := nn.Identity())
        identity.register_forward_hook(_at_features)
        del trial.layers[name]
        return c.flatten(1)

    def _put_masks(self) -> None:
        for name, calls in self.sites.items():
            layer = self.network.get_submodule(name)
            count = calls if self.masking.granularity == "element" else 1
            masks = InputMasks(name, self.masking, count, axis=-1 if isinstance(layer, nn.Linear) else 1)
            layer.add_module("calgp_masks", masks)
            layer.register_forward_pre_hook(masks.before)
        name_sites(self)

    def _find_stem(self, trial: Trial, x: Tensor) -> None:
        """The last module that ends before the first mask, if the features need nothing else of the image.

        That is tried: with NaN for the image, and its true output put in, the features must be as finite as they were.
        """
        ended = trial.ended[: min((trial.began[name] for name in self.sites), default=0)]
        calls = Counter(name for name, _ in trial.ended)
        names = [name for name, shape in ended if calls[name] == 1 and len(shape) > 1 and shape[0] == 2]
        noise = Noise(0, torch.arange(1, device=x.device), torch.arange(2, device=x.device))
        for self.stem_module in names[: -MOST_STEMS - 1 : -1]:
            hook = self.network.get_submodule(self.stem_module).register_forward_hook(_at_stem)
            with suppress(Exception):  # a shape that does not fit: the image is needed elsewhere
                current = Pass(noise, 2, self._stem(x))
                if images_first(self._run(current, x[1:].clone())) and current.fired == self.sites:
                    return
            hook.remove()
        self.stem_module = None


def _at_features(module: nn.Module, args: Any, output: Any) -> None:
    current = PASS.get()
    if current is not None and not current.stopping:
        current.reached(_vectors(output))


def _at_stem(module: nn.Module, args: Any, output: Any) -> Tensor | None:
    current = PASS.get()
    if current is not None and current.stopping:
        current.reached(output)
    return None if current is None else current.entering


def _vectors(output: Any) -> Float[Tensor, "N d"]:
    """What a network, or the module named, gives: a tensor, alone in a tuple, or by a name that is usual."""
    if isinstance(output, Mapping):
        known = (output.get(key) for key in ("logits", "pooler_output", "last_hidden_state"))
        output = next((value for value in known if value is not None), None)
    c = output[0] if isinstance(output, tuple | list) and len(output) == 1 else output
    if not isinstance(c, Tensor) or c.dim() not in (2, 4):
        what = tuple(c.shape) if isinstance(c, Tensor) else type(c).__name__
        raise CalgpError(
            f"Invalid features, {what}: must be vectors [N, d] or images [N, d, H, W]. Name the module that gives such "
            "with features='…'."
        )
    return c.mean((2, 3)) if c.dim() == 4 else c
