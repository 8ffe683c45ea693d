"""`Pretrained`: a pretrained network by its name, as a backbone to train on; run folders hold it as a program."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from calgp.data import Images
from calgp.errors import CalgpError, one_line
from calgp.gp import Noise, Posterior
from calgp.nets.base import HIDDEN, Backbone, Features, Task
from calgp.nets.compact import Compact
from calgp.nets.pretrained import FeatureExtractor
from calgp.nets.program import FromPixels, Program, describe_module
from calgp.options import COUNT, Interval, about, check_options, like, option, options_of

LEVELS = 8  # groups of layers with a learning rate each
DTYPES = {str(each).removeprefix("torch."): each for each in (torch.float32, torch.int64, torch.int32, torch.bool)}
MOST_TENSORS = 20_000
FOUND = ("network", "weights", "program", "checksum")  # options that are no --set of a command


@dataclass(eq=False)
class StoredProgram:
    """What network.json holds; and the tensors that the network has before the first step, where they are known."""

    text: str
    described: Mapping[str, Any]  # as JSON has it; `ProgramFeatures` checks it
    tensors: Mapping[str, Tensor] | None = None


PROGRAMS: dict[str, StoredProgram] = {}  # by the SHA-256 of their texts


@dataclass(frozen=True)
class Pretrained(Backbone):
    """A pretrained network that is trained on, its batch norm in evaluation mode, without masks of its own.

    The network is followed once by torch.export. What a run folder keeps is that program, so that neither its library
    nor its code is needed to load the run.
    """

    network: str = field(metadata=about("timm:NAME, torchvision:NAME, transformers:FOLDER or file.py:function."))
    weights: str | None = option(
        None, "A .safetensors file or a PyTorch state dict to begin with; `random` for none.",
        default_text="the library's", example="weights.safetensors",
    )  # fmt: skip
    features: str | None = option(
        None, "The module whose output is used as features.", default_text="what enters the last layer"
    )
    rate: float = option(
        0.05, "Learning rate of its last layers, as a share of the run's.", within=Interval(0, 1, open="(")
    )
    first_rate: float = option(
        0.1, "Learning rate of its first layers, as a share of that of its last.", within=Interval(0, 1, open="(")
    )
    head_rate: float = option(
        0.25, "Learning rate of the head while the network is trained, as a share of the run's.",
        within=Interval(0, 1, open="("),
    )  # fmt: skip
    head_epochs: float = option(
        30.0, "Passes over the features of the frozen network that train the head first; 0: none.", within=Interval(0)
    )
    mirror: bool = like(Compact, "mirror")
    hidden: tuple[int, ...] = option((), HIDDEN, within=COUNT, default_text="none", example="384,192")
    program: str = option("", "SHA-256 of network.json; found by itself.", default_text="found by itself")
    checksum: str = option("", "SHA-256 of the weights to begin with; found by itself.", default_text="found by itself")

    def __post_init__(self) -> None:
        object.__setattr__(self, "hidden", tuple(self.hidden))
        check_options(self)

    @property
    def own_label(self) -> str:
        return self.network

    def flags(self) -> list[str]:
        words = ["--network", self.network] + ([] if self.weights is None else ["--weights", self.weights])
        for name, each in options_of(Pretrained).items():
            if name not in FOUND and (value := getattr(self, name)) != each.default:
                words += ["--set", f"backbone.{name}={each.show(value)}"]
        return words

    def choose(self, task: Task, *, mirror: bool = False) -> "Pretrained":
        """Itself, if it has been followed where a user named it: data names no code to run.

        Where training flips the images, it predicts by an image and its mirror image.
        """
        if not self.program:
            raise CalgpError(
                f"{self.network} is only named here: say calgp train --network {self.network}, or calgp.train(…, "
                f"network={self.network!r})."
            )
        return replace(self, mirror=self.mirror or mirror)

    def follow(self, extractor: FeatureExtractor, task: Task) -> "Pretrained":
        """With the program of a network that has been made already."""
        taken = extractor.preprocessing
        if (task.channels, task.height, task.width) != (taken.channels, taken.size, taken.size):
            raise CalgpError(
                f"{self.network} takes images of {taken.channels} × {taken.size} × {taken.size}; these are "
                f"{task.channels} × {task.height} × {task.width}. Leave out --size and --colour, or give its own."
            )
        x = torch.rand(3, task.channels, task.height, task.width, generator=torch.Generator().manual_seed(0))
        module = FromPixels(extractor.network, taken.mean, taken.std, lambda x: [extractor.network.stem(x)])
        instead = f"Use it frozen: calgp fit --network {self.network} --source …"
        described, tensors = describe_module(module, x, 1, instead)
        kinds = {name: [str(each.dtype).removeprefix("torch."), list(each.shape)] for name, each in tensors.items()}
        text = json.dumps(described | {"tensors": kinds, "width": extractor.width})
        key = hashlib.sha256(text.encode()).hexdigest()
        PROGRAMS[key] = StoredProgram(text, json.loads(text), tensors)
        return replace(self, program=key, checksum=extractor.weights)

    def stored_text(self) -> str | None:
        return self._stored().text

    def recall(self, text: str) -> None:
        if hashlib.sha256(text.encode()).hexdigest() != self.program:
            raise ValueError("it is not the network that run.json describes")
        PROGRAMS.setdefault(self.program, StoredProgram(text, json.loads(text)))

    def build(self, task: Task, posterior: Posterior, *, generator: torch.Generator | None = None) -> "ProgramFeatures":
        """The network; where its first weights are not known, since a run folder has others, with zeros."""
        stored = self._stored()
        try:
            return ProgramFeatures(self, stored)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise CalgpError(
                f"The program of {self.network} is damaged ({one_line(error)}); copy its folder again."
            ) from None

    def start(self, model: nn.Module, train: Images, *, generator: torch.Generator | None = None) -> None:
        """Refuses to begin with zeros: `build` has the pretrained weights only where a user named the network."""
        if self._stored().tensors is None:
            raise CalgpError(
                f"This training had not come to its first checkpoint, and needs the weights of {self.network} again: "
                "give the command that began it."
            )

    def _stored(self) -> StoredProgram:
        if self.program not in PROGRAMS:
            raise CalgpError(f"The program of {self.network} is missing: network.json of its run folder holds it.")
        return PROGRAMS[self.program]


class ProgramFeatures(Features):
    """c(x) by a program. There are no masks, so the stem is all of it; vectors are taken for features, as they are."""

    def __init__(self, spec: Pretrained, stored: StoredProgram) -> None:
        super().__init__()
        described, tensors = stored.described, stored.tensors
        kinds = described["tensors"]
        if len(kinds) > MOST_TENSORS:
            raise ValueError(f"it has {len(kinds)} tensors; at most {MOST_TENSORS} are read")
        if tensors is None or torch.empty(()).is_meta:
            tensors = {name: torch.zeros(tuple(shape), dtype=DTYPES[dtype]) for name, (dtype, shape) in kinds.items()}
        self.spec, self.out_features = spec, int(described["width"])
        self.program = Program(described, tensors, outputs=1, trained=frozenset(described["parameters"]))

    def stem(self, x: Tensor) -> Tensor:
        if x.dim() == 2:
            return x
        if self.spec.mirror and not self.training:
            return (self.view(x) + self.view(x.flip(-1))) / 2
        return self.view(x)

    def view(self, x: Float[Tensor, "N C H W"]) -> Float[Tensor, "N d"]:
        """The features of images as they are."""
        return self.program(x.contiguous(memory_format=torch.channels_last))[0]

    def forward(self, h: Tensor, noise: Noise | None = None) -> Float[Tensor, "SN d"]:
        return h.repeat(1 if noise is None else len(noise.samples), 1)

    def kl(self) -> Float[Tensor, ""]:
        """0: its weights are points, and begin where a prior would be centred."""
        return next(self.parameters()).new_zeros(())

    def rates(self) -> dict[nn.Parameter, float]:
        """Learning rates of its parameters as shares of the run's: geometric from the first layers to the last."""
        trained = [each for each in self.program.parameters() if each.requires_grad]
        last = max(len(trained) - 1, 1)
        levels = [round((LEVELS - 1) * place / last) for place in range(len(trained))]
        rate, first = self.spec.rate, self.spec.first_rate
        return {each: rate * first ** (1 - level / (LEVELS - 1)) for each, level in zip(trained, levels, strict=True)}


def program_features(model: nn.Module) -> list[ProgramFeatures]:
    """Where a model has a pretrained network that is trained on; empty for most."""
    return [module for module in model.modules() if isinstance(module, ProgramFeatures)]
