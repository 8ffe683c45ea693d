"""The features of somebody's network, with masks in front of its layers: found, tried, refused where masks would lie.

A network stays as it is, down to the names of its parameters: masks are hooks in front of its layers, drawn from the
same keyed noise as all others. What cannot be masked truly is refused: the claim is that every layer that should be
random was.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from calgp.errors import CalgpError
from calgp.gp import UNMASKED, Batch, Mask, Masking, Noise, evaluating, name_sites
from calgp.gp.masks import half_norm
from calgp.nets.base import Features, Task
from calgp.nets.tracing import Call, Trace, first_tensor, main_output, tracing

if TYPE_CHECKING:
    from calgp.nets.wrapping import Wrapped

CHECKED = 3  # images that a network is tried with


class WrappedFeatures(Features):
    """The features of somebody's network with masks in front of its layers.

    `sites` has the masked layers by their names in the network, and how often a pass calls each. Linear layers on
    tokens, and on images with the channels last, are convolutions of 1 × 1: tokens are pixels to a mask. A layer that
    is called several times in a pass is one W: with masks by channel, or shared, all its calls have the same z, with
    masks by element (which are no W in a convolution either) each call its own; its KL counts once, and so does that of
    weights that several layers share.
    """

    def __init__(self, network: nn.Module, spec: "Wrapped", task: Task, masking: Masking) -> None:
        super().__init__()
        self.network, self.spec, self.masking = network, spec, masking
        self.register_buffer("mean", torch.tensor(spec.mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(spec.std).view(-1, 1, 1), persistent=False)
        self.mean: Tensor
        self.std: Tensor
        self.image = (task.channels, task.height, task.width)
        self.sites: dict[str, int] = {}
        self.stem_module: str | None = None
        # what is random by itself in training draws from torch's own generator, and masks are in its place
        self.quiet: list[str] = [n for n, m in network.named_modules() if isinstance(m, nn.modules.dropout._DropoutNd)]
        if spec.freeze:
            network.requires_grad_(False)
        with evaluating(network), torch.no_grad(), torch.random.fork_rng(devices=[]):
            x = self._trial_images()
            self._find_features(x)
            trace, c = self._traced(x, escapes=True)
            self.out_features = c.shape[1]
            self.reached = tuple(trace.layers())
            self._freeze_what_is_not_used(trace.used)
            if masking.active and spec.mask != "none":
                calls = self._chosen(trace)
                self._check_rows(x, trace, c, calls)
                self._put_masks(calls)
            name_sites(self)
            self._find_stem(x)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            self._check_training(x)
        self.train(self.training)

    def train(self, mode: bool = True) -> "WrappedFeatures":
        super().train(mode)
        if self.spec.freeze:
            self.network.eval()
        for name in self.quiet:
            self.network.get_submodule(name).training = False
        return self

    def stem(self, x: Float[Tensor, "N C H W"]) -> Tensor:
        """Up to a module in front of the first mask, where nothing goes around it; else the image, or all, if nothing
        is masked. While batch norm learns its statistics, the image too: each pass must show it each image once."""
        return self._stem(self._normalised(x))

    def forward(self, h: Tensor, noise: Noise | None = None) -> Float[Tensor, "SN d"]:
        if not self.sites:
            return h
        h = h.repeat(1 if noise is None else len(noise.samples), *(1,) * (h.dim() - 1))
        current = _Pass(noise, h.shape[0], None if self._whole else h)
        c = self._pass(current, h if self._whole else h.new_zeros(1, *self.image))
        if current.fired != self.sites:
            raise _called_otherwise(name for name, calls in self.sites.items() if current.fired[name] != calls)
        return c

    def kl(self) -> Float[Tensor, ""]:
        """Of the weights and biases of layers, Eq. (8); what is frozen costs a constant, which is left out.

        Other parameters (of norms, embeddings, scales) are points without a prior.
        """
        costs: dict[int, Tensor] = {}
        for name in sorted(self.reached, key=lambda name: name not in self.sites):  # masked, where also not masked
            layer = self.network.get_submodule(name)
            masking = self.masking if name in self.sites else UNMASKED
            for parameter, cost in zip(_parameters(layer), (masking.kl, half_norm), strict=True):
                if parameter is not None and parameter.requires_grad:
                    costs.setdefault(id(parameter), cost(parameter))
        return torch.stack(list(costs.values())).sum() if costs else next(self.parameters()).new_zeros(())

    @torch.no_grad()
    def estimate_statistics(self, batches: Iterable[Batch], *, seed: int) -> None:
        """The statistics of batch norm are from now on the average over these batches, with the masks on.

        Statistics from a training without masks are not those of activations behind masks. Nothing changes in a network
        that has no masks or no batch norm.
        """
        norms = [module for module in self.network.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
        norms = [norm for norm in norms if norm.track_running_stats]
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
            norm.momentum = momentum

    @property
    def _whole(self) -> bool:
        """Whether passes go through all of the network: batch norm that learns must see each image, and no blanks."""
        norms = (module for module in self.network.modules() if isinstance(module, nn.modules.batchnorm._NormBase))
        return self.stem_module is None or any(norm.training for norm in norms)

    def _normalised(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.std if self.mean.numel() else x

    def _stem(self, x: Tensor) -> Tensor:
        if self.sites and self._whole:
            return x
        return self._pass(_Pass(None, x.shape[0], stopping=bool(self.sites)), x.clone())

    def _pass(self, current: "_Pass", x: Tensor) -> Tensor:
        """What the network gives for x: its features, or, where it should stop there, its stem."""
        token = _PASS.set(current)
        try:
            output = self.network(x)
        except _Reached:
            output = None
        finally:
            _PASS.reset(token)
        return _vectors(output) if current.found is None else current.found

    def _trial_images(self) -> Tensor:
        parameter = next(self.network.parameters(), None)
        if parameter is None or not parameter.is_floating_point():
            raise CalgpError("The network has no parameters of a floating type: there is nothing to make random.")
        x = torch.rand(CHECKED + 1, *self.image, generator=torch.Generator().manual_seed(0)).to(parameter)
        if self.mean.numel() not in (0, self.image[0]):
            raise CalgpError(f"mean and std are for {self.mean.numel()} channels, the images have {self.image[0]}.")
        return self._normalised(x)

    def _find_features(self, x: Tensor) -> None:
        """Puts a hook where the features are; a classifier behind them goes."""
        name = self.spec.features
        if name is None:
            name = self._found_features(x)
        modules = dict(self.network.named_modules())
        if name not in modules:
            raise CalgpError(f"The network has no module {name!r} that could give the features; {_some(modules)}.")
        if name:
            modules[name].register_forward_hook(_at_features)

    def _found_features(self, x: Tensor) -> str:
        x = x[:CHECKED].clone()
        with self._taking_images(), tracing(self.network) as trace:
            output = self.network(x)
        c = main_output(output)
        layers = trace.layers()
        if not layers:
            raise CalgpError("The network calls no convolution and no linear layer: there is nothing to make random.")
        last = [call for call in trace.calls if call.layer][-1]
        linear = isinstance(self.network.get_submodule(last.name), nn.Linear) and len(layers[last.name]) == 1
        if c is not None and linear and last.name and last.output.shape == c.shape and last.output.dim() == 2:
            parent, _, child = last.name.rpartition(".")
            setattr(self.network.get_submodule(parent), child, nn.Identity())
            return last.name
        if c is None or c.dim() not in (2, 4):
            what = type(output).__name__ if c is None else f"a tensor of {' × '.join(map(str, c.shape))}"
            raise CalgpError(
                f"The features of the network were not found: it gives {what}, and does not end with a linear layer on "
                "vectors. Name the module that gives them, as vectors or images, with features='…'."
            )
        return ""

    @contextmanager
    def _taking_images(self) -> Iterator[None]:
        try:
            yield
        except CalgpError:
            raise
        except Exception as error:
            shape, reason = " × ".join(map(str, self.image)), (str(error) or repr(error)).splitlines()[0]
            raise CalgpError(
                f"The network cannot take images of {shape}: {reason.rstrip('.')}. Give it images of its own size and "
                "channels (Run's size=… and colour=…)."
            ) from error

    def _traced(self, x: Tensor, *, escapes: bool = False) -> tuple[Trace, Tensor]:
        x = x[:CHECKED].clone()
        with self._taking_images(), tracing(self.network, x if escapes else None) as trace:
            c = self._pass(_Pass(None, CHECKED), x)
        if len(c) != CHECKED or not c.is_floating_point():
            raise CalgpError(f"The network's features for {CHECKED} images are {tuple(c.shape)}; one row each was due.")
        return trace, c

    def _freeze_what_is_not_used(self, used: set[str]) -> None:
        """What lies behind the features, or has no part in them, learns nothing."""
        for name, parameter in self.network.named_parameters():
            if name not in used:
                parameter.requires_grad_(False)

    def _chosen(self, trace: Trace) -> dict[str, list[Call]]:
        """The layers to mask, with their calls; refuses what would be random only in name."""
        layers, mask = trace.layers(), self.spec.mask
        if isinstance(mask, tuple):
            chosen = {name for name in layers if any(name == each or name.startswith(f"{each}.") for each in mask)}
            for each in mask:
                if not any(name == each or name.startswith(f"{each}.") for name in (*layers, *self._classifier())):
                    raise CalgpError(
                        f"mask has {each!r}, but no layer of that name is called on the way to the features: its "
                        "weights are used by a function, which a mask cannot stand in front of, or not at all; "
                        f"{_some(layers)}."
                    )
            masked = {id(p) for name in chosen for p in self.network.get_submodule(name).parameters()}
            names = {name for name, parameter in self.network.named_parameters() if id(parameter) in masked}
            escapes = [escape for escape in trace.escapes if escape.weight in names]
        else:
            linear = {name for name in layers if isinstance(self.network.get_submodule(name), nn.Linear)}
            kinds = {"all": set(layers), "linear": linear, "convolutions": set(layers) - linear}
            chosen = kinds[mask] - (set() if self.spec.mask_first else set(list(layers)[:1]))
            escapes = [e for e in trace.escapes if mask == "all" or e.convolution == (mask == "convolutions")]
        if escapes:
            raise CalgpError(
                "Weights of the network meet the images outside of layers, where no mask can stand in front of them: "
                f"{', '.join(dict.fromkeys(map(str, escapes)))}. Use separate nn.Linear or nn.Conv2d layers there "
                "(attention: with its own projections), or leave them out: mask='convolutions', or the names of layers."
            )
        if not chosen:
            raise CalgpError(
                f"mask={mask!r} chooses no layer of the network: nothing in it would be random. Choose others, or say "
                "mask='none' (and let the method's head be what is random)."
            )
        return {name: calls for name, calls in layers.items() if name in chosen}

    def _classifier(self) -> list[str]:
        """The place where the features are, if it is one from which a classifier was taken."""
        return [name for name, module in self.network.named_modules() if _at_features in module._forward_hooks.values()]

    def _check_rows(self, x: Tensor, trace: Trace, c: Tensor, calls: dict[str, list[Call]]) -> None:
        """A mask belongs to an image: the first axis of what enters a layer must be images, then whatever else."""
        other, d = self._traced(torch.cat([x[CHECKED:], x[1:CHECKED]]))  # another first image
        if not _close(c[1:], d[1:]):
            if not _close(c, self._traced(x)[1]):
                raise _unkeyed("")
            raise CalgpError(
                "What the network gives for an image depends on the images beside it, in evaluation mode too; a "
                "prediction must not (batch norm: track_running_stats=True)."
            )
        for name, before in calls.items():
            after = other.layers().get(name, [])
            if len(after) != len(before):
                raise _called_otherwise([name])
            for one, two in zip(before, after, strict=True):
                _check_rows_of(name, cast(Tensor, one.input), cast(Tensor, two.input))

    def _put_masks(self, calls: dict[str, list[Call]]) -> None:
        for name, found in calls.items():
            layer = self.network.get_submodule(name)
            count = len(found) if self.masking.granularity == "element" else 1
            masks = InputMasks(name, self.masking, count, axis=-1 if isinstance(layer, nn.Linear) else 1)
            layer.add_module("calgp_masks", masks)
            layer.register_forward_pre_hook(masks.before, with_kwargs=True)
            self.sites[name] = len(found)

    def _find_stem(self, x: Tensor) -> None:
        """The last module that ends before the first mask, if the features need nothing else of the image."""
        if not self.sites:
            return
        noise = Noise(0, torch.arange(2, device=x.device), torch.arange(CHECKED, device=x.device))
        x = x[:CHECKED]
        with tracing(self.network) as trace:
            expected = self(x, noise)
        masks = {name for name, module in self.network.named_modules() if isinstance(module, Mask)}
        first = next(i for i, call in enumerate(trace.calls) if call.name in masks)
        rows, counts = len(noise.samples) * CHECKED, trace.counts()
        for call in reversed(trace.calls[:first]):
            output = call.output
            if counts[call.name] > 1 or not isinstance(output, Tensor) or output.dim() < 2 or len(output) != rows:
                continue
            handle = self.network.get_submodule(call.name).register_forward_hook(_at_stem)
            self.stem_module = call.name
            with suppress(Exception):  # a shape that does not fit: the image is needed elsewhere
                current = _Pass(noise, rows, self._stem(x).repeat(2, *(1,) * (output.dim() - 1)))
                found = self._pass(current, x.new_full((1, *self.image), float("nan")))
                if _close(found, expected) and current.fired == self.sites:
                    return
            handle.remove()
            self.stem_module = None

    def _check_training(self, x: Tensor) -> None:
        """In training, too, all masked layers fire, and nothing but the masks is random: what is, becomes quiet."""
        modes = {module: module.training for module in self.modules()}
        while (name := self._random_by_itself(x[:CHECKED])) is not None:
            if name in self.quiet:
                raise _unkeyed(name)
            kind = type(self.network.get_submodule(name))
            self.quiet += [key for key, module in self.network.named_modules() if type(module) is kind]
        for module, mode in modes.items():
            module.training = mode

    def _random_by_itself(self, x: Tensor) -> str | None:
        """The first module that, in training, gives two things for the same input and masks."""
        buffers = {name: buffer.clone() for name, buffer in self.named_buffers()}
        noise = Noise(0, torch.arange(1, device=x.device), torch.arange(CHECKED, device=x.device))
        self.train()
        traces = []
        for _ in range(2):
            with self._taking_images(), tracing(self.network) as trace:
                self(self._stem(x), noise)
            traces.append(trace.calls)
        for name, buffer in self.named_buffers():
            buffer.copy_(buffers[name])
        for one, two in zip(*traces, strict=False):
            if not _same(one.input, two.input):
                return one.name.rpartition(".")[0]  # what came before it was no module: the one that holds it
            if not _same(first_tensor(one.output), first_tensor(two.output)):
                return one.name
        return None


class InputMasks(nn.ModuleList):
    """The masks in front of a layer: one, or one for each of its calls in a pass."""

    def __init__(self, layer: str, masking: Masking, calls: int, *, axis: int) -> None:
        super().__init__([Mask(masking, image=True) for _ in range(calls)])
        self.layer, self.axis = layer, axis

    def before(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """The layer's arguments, the first masked."""
        current = _PASS.get()
        if current is None:
            raise CalgpError(
                f"{self.layer} was called outside of a pass of the wrapped network (gradient checkpointing, or its "
                "module by itself), where it has no masks: call the features, without checkpointing."
            )
        if current.stopping:
            return args, kwargs
        call = current.fired[self.layer]
        current.fired[self.layer] += 1
        mask = self[min(call, len(self) - 1)]
        h = cast(Tensor, first_tensor((args, kwargs)))
        masked = self._masked(h, mask, current)
        if args:
            return (masked, *args[1:]), kwargs
        return args, {key: masked if value is h else value for key, value in kwargs.items()}

    def _masked(self, h: Tensor, mask: nn.Module, current: "_Pass") -> Tensor:
        # [rows · folds, …] to [rows, channels, folds, …]: windows of an image are as its pixels
        parts = h.unflatten(0, (current.rows, -1))
        axis = self.axis if self.axis < 0 else self.axis + 1
        return mask(parts.movedim(axis, 1), current.noise).movedim(1, axis).flatten(0, 1)


@dataclass
class _Pass:
    """A pass of a wrapped network: what its hooks must know."""

    noise: Noise | None
    rows: int  # S · N
    entering: Tensor | None = None  # what the stem has given
    stopping: bool = False  # at the stem
    found: Tensor | None = None  # what the pass is for
    fired: Counter[str] = field(default_factory=Counter)

    def reached(self, value: Tensor) -> None:
        """Keeps what the pass is for, and leaves it: what lies behind is not computed.

        Compilers follow no exception through modules; they drop what is not used.
        """
        self.found = value
        if not torch.compiler.is_compiling():
            raise _Reached


_PASS: ContextVar[_Pass | None] = ContextVar("pass", default=None)  # and no attribute: threads may share a network


class _Reached(Exception):
    """The features, or the stem, are there."""


def _at_features(module: nn.Module, args: Any, output: Any) -> None:
    current = _PASS.get()
    if current is not None and not current.stopping:
        current.reached(_vectors(output))


def _at_stem(module: nn.Module, args: Any, output: Any) -> Tensor | None:
    current = _PASS.get()
    if current is not None and current.stopping:
        current.reached(output)
    return None if current is None else current.entering


def _parameters(layer: nn.Module) -> tuple[Tensor, Tensor | None]:
    layer = cast(nn.Linear, layer)
    return layer.weight, layer.bias


def _vectors(output: Any) -> Float[Tensor, "N d"]:
    c = main_output(output)
    if c is None or c.dim() not in (2, 4):
        what = type(output).__name__ if c is None else f"a tensor of {' × '.join(map(str, c.shape))}"
        raise CalgpError(f"The features must be vectors [N, d] or images [N, d, H, W]; the module named gives {what}.")
    return c.mean((2, 3)) if c.dim() == 4 else c


def _called_otherwise(names: Iterable[str]) -> CalgpError:
    return CalgpError(
        f"These masked layers of the network were not called as in its first pass: {', '.join(names)}. What it calls "
        "must not depend on the images or on the mode; leave them out with mask=…"
    )


def _unkeyed(name: str) -> CalgpError:
    return CalgpError(
        f"{name or 'The network'} is random by itself, and what it draws has no key; switch that off: masks are random "
        "in its place."
    )


def _check_rows_of(name: str, one: Tensor, two: Tensor) -> None:
    """What enters a layer, before and after the first image was changed."""
    if one.equal(two):
        raise CalgpError(
            f"What enters {name} does not depend on the images, so it has no image whose mask it could have; leave it "
            "out: mask=lambda name: …"
        )
    folds = len(one) // CHECKED
    if len(one) % CHECKED or not _close(one[folds:], two[folds:]):
        raise CalgpError(
            f"What enters {name} ({' × '.join(map(str, one.shape))}) does not have the images along its first axis, "
            "where masks are drawn (batch_first=False?); leave it out: mask=lambda name: …"
        )


def _close(one: Tensor, two: Tensor) -> bool:
    """Equal to rounding, of activations whose sums may be taken in another order."""
    scale = one.abs().max() if one.numel() else 0.0
    return one.shape == two.shape and torch.allclose(one, two, rtol=1e-3, atol=1e-4 * float(scale))


def _same(one: Tensor | None, two: Tensor | None) -> bool:
    return one is two is None or (one is not None and two is not None and _close(one, two))


def _some(names: Iterable[str]) -> str:
    listed = [name for name in names if name]
    return f"there are {', '.join(listed[:8])}{', …' if len(listed) > 8 else ''}"
