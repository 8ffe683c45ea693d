"""Pretrained networks by name, as frozen feature extractors with their own preprocessing.

`timm:NAME`, `torchvision:NAME`, `transformers:FOLDER`, or `file.py:function` for a network of one's own. The core needs
none of these libraries: each is imported when a name asks for it.
"""

import importlib
import json
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from calgp.errors import CalgpError, name_error, one_line
from calgp.gp import UNMASKED
from calgp.nets.base import Task
from calgp.nets.preprocessing import Preprocessing
from calgp.nets.user_code import import_function
from calgp.nets.weights import put_weights, read_weights, weights_digest
from calgp.nets.wrap import Wrapped, WrappedFeatures

RANDOM = "random"
RESAMPLE = {0: "nearest", 2: "bilinear", 3: "bicubic"}  # Pillow's numbers, in the files of transformers


@dataclass(frozen=True)
class NetworkRequest:
    """The arguments of `find_network`, so that another process can make the same call."""

    name: str
    weights: str | None = None
    features: str | None = None
    size: int | None = None

    def open(self) -> "FeatureExtractor":
        return find_network(self.name, self.weights, features=self.features, size=self.size)

    def absolute(self) -> "NetworkRequest":
        """The same from any working directory."""
        kind, _, rest = self.name.partition(":")
        path, _, function = self.name.rpartition(":")
        name = f"{kind}:{Path(rest).absolute()}" if kind == "transformers" else self.name
        name = f"{Path(path).absolute()}:{function}" if path.endswith(".py") else name
        file = None if self.weights in (None, RANDOM) else str(Path(self.weights).absolute())
        return replace(self, name=name, weights=file or self.weights)


@dataclass(frozen=True, eq=False)
class FeatureExtractor:
    """A frozen network that gives one vector an image, with the preprocessing that it was trained with.

    `weights` is the SHA-256 of its tensors: two extractors with equal `name`, `weights` and `preprocessing` give equal
    features.
    """

    name: str
    network: WrappedFeatures
    preprocessing: Preprocessing
    weights: str
    asked: NetworkRequest

    @property
    def width(self) -> int:
        """How many numbers the features of an image have."""
        return self.network.out_features

    def to(self, device: torch.device | str) -> "FeatureExtractor":
        """Move the network; the extractor itself is returned."""
        self.network.to(device)
        return self

    def resized(self, images: Sequence[Tensor]) -> Tensor:
        """Images uint8 [C, H, W], each of its own size, as one batch uint8 [N, C, size, size]."""
        return torch.stack([self.preprocessing.resized(each) for each in images])

    @torch.inference_mode()
    def features(self, batch: Tensor) -> Tensor:
        """Pooled features float32 [N, d], on the CPU, of a batch that `resized` has made."""
        device = next(self.network.parameters()).device
        x = self.preprocessing.normalised(batch.to(device)).to(memory_format=torch.channels_last)
        return self.network.stem(x).float().cpu()

    def __call__(self, images: Sequence[Tensor]) -> Tensor:
        """Pooled features float32 [N, d] of images uint8 [C, H, W]."""
        return self.features(self.resized(images))


Made = tuple[nn.Module, Preprocessing]  # a network as its library makes it, and how it wants its images


def find_network(
    name: str, weights: Path | str | None = None, *, features: str | None = None, size: int | None = None
) -> FeatureExtractor:
    """A pretrained network by name, as a frozen feature extractor.

    Args:
        name: `timm:NAME`, `torchvision:NAME`, `transformers:FOLDER` or `file.py:function`. The function takes no
            arguments and returns a module with its weights; its attribute `preprocessing` (a table with some fields of
            `Preprocessing`) says how it wants its images, ImageNet's way if it has none.
        weights: a .safetensors file or a PyTorch state dict; None takes those of the library, which it downloads, or
            those that the function or the folder gives; "random" takes none, for tests.
        features: the module whose output are the features, where they cannot be found.
        size: the side of its images in pixels, instead of its own.
    """
    kind, colon, rest = name.partition(":")
    make = KINDS.get(kind)
    if make is None and colon and kind.endswith(".py"):
        make, rest = _from_file, name
    if make is None or not rest:
        known = ("timm:resnet18", "torchvision:resnet18", "transformers:FOLDER", "file.py:function")
        raise name_error("Invalid network: there is none called", name, known)
    file = None if weights is None or weights == RANDOM else Path(weights)
    tensors = None if file is None else read_weights(file)
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")  # of libraries, about arguments that nobody has given
        torch.manual_seed(0)  # "random" weights are always the same
        made, preprocessing = make(rest, own_weights=weights is None)
    network = made.float().eval()
    preprocessing = preprocessing if size is None else replace(preprocessing, size=size, resize=size)
    task = Task(preprocessing.channels, preprocessing.size, preprocessing.size, classes=2)
    found = Wrapped(name, features=features, freeze=True).features_of(lambda: network, task, UNMASKED).eval()
    if file is not None and tensors is not None:
        put_weights(found.network, tensors, file)
    found = found.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  (twice as fast on a CPU)
    asked = NetworkRequest(name, None if weights is None else str(weights), features, size)
    return FeatureExtractor(name, found, preprocessing, weights_digest(found.network), asked)


def _library(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (ImportError, RuntimeError) as error:
        raise CalgpError(
            f"Networks called {name}:… need the package {name}, which cannot be imported ({one_line(error)}); "
            "install it with `pip install 'calgp[networks]'`."
        ) from None


def _no_weights(name: str, error: Exception) -> CalgpError:
    return CalgpError(
        f"The weights of {name} cannot be downloaded ({one_line(error)}); give a file with --weights (weights=…): "
        ".safetensors, or a PyTorch state dict."
    )


def _timm(name: str, *, own_weights: bool) -> Made:
    timm = _library("timm")
    data = importlib.import_module("timm.data")
    if not timm.is_model(name):
        near = timm.list_models(f"{name[:6]}*") or timm.list_models("resnet*")
        raise name_error("timm has no network", name, near[:5], more="… (timm.list_models() has all)")
    if own_weights and not timm.models.is_model_pretrained(name):
        raise CalgpError(f"timm has no weights for {name}; give a file with --weights (weights=…).")
    try:
        network = timm.create_model(name, pretrained=own_weights, num_classes=0)
    except Exception as error:  # of the network connection, or of the hub
        raise _no_weights(f"timm:{name}", error) from None
    found = data.resolve_model_data_config(network)
    size = int(found["input_size"][-1])
    interpolation = found["interpolation"] if found["interpolation"] in ("bilinear", "nearest") else "bicubic"
    fit = "stretch" if found.get("crop_mode") == "squash" else "crop"
    resize = max(size, math.floor(size / (found.get("crop_pct") or 1)))
    return network, Preprocessing(size, resize, found["mean"], found["std"], interpolation, fit)


def _torchvision(name: str, *, own_weights: bool) -> Made:
    models = importlib.import_module("torchvision.models") if _library("torchvision") else None
    known: list[str] = models.list_models(module=models) if models else []
    if models is None or name not in known:
        raise name_error("torchvision has no classifier", name, known)
    weights = models.get_model_weights(name).DEFAULT
    try:
        network = models.get_model(name, weights=weights if own_weights else None)
    except Exception as error:  # of the network connection
        raise _no_weights(f"torchvision:{name}", error) from None
    found = weights.transforms()
    size, resize = int(found.crop_size[0]), int(found.resize_size[0])
    mean, std, interpolation = tuple(found.mean), tuple(found.std), found.interpolation.value
    return network, Preprocessing(size, max(size, resize), mean, std, interpolation)


def _transformers(folder: str, *, own_weights: bool) -> Made:
    transformers = _library("transformers")
    path = Path(folder)
    if not (path / "config.json").is_file():
        raise CalgpError(f"Invalid network transformers:{folder}: must be a folder with config.json and its weights.")
    try:
        if not own_weights:
            config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
            network, missing = transformers.AutoModelForImageClassification.from_config(config), []
        else:
            network, report = transformers.AutoModelForImageClassification.from_pretrained(
                path, local_files_only=True, output_loading_info=True
            )
            missing = [each for each in report["missing_keys"] if not each.startswith(("classifier", "head"))]
    except Exception as error:  # of the library, on files that are not its own
        raise CalgpError(f"transformers cannot read {folder} ({one_line(error)}).") from None
    if missing:
        raise CalgpError(f"{folder} has no weights for {len(missing)} tensors of its network, such as {missing[0]!r}.")
    return network, _transformers_preprocessing(path)


def _transformers_preprocessing(folder: Path) -> Preprocessing:
    """What preprocessor_config.json says; ImageNet's way where there is none."""
    file = folder / "preprocessor_config.json"
    if not file.is_file():
        return Preprocessing(resize=256)
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        size = found.get("size", 224)
        size = {"shortest_edge": size} if isinstance(size, int) else size
        side = int(size.get("shortest_edge") or size["height"])
        crop = found.get("crop_size", side)
        crop = int(crop if isinstance(crop, int) else crop["height"])
        side = max(side, crop)
        middle = crop if found.get("do_center_crop") else side
        mean, std = found.get("image_mean", (0.5,) * 3), found.get("image_std", (0.5,) * 3)
        interpolation: Any = RESAMPLE.get(found.get("resample", 2), "bicubic")
        return Preprocessing(middle, side, mean, std, interpolation, "stretch" if "height" in size else "crop")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CalgpError(f"{file} cannot be read ({one_line(error)}); copy it again.") from None


def _from_file(place: str, *, own_weights: bool) -> Made:
    try:
        network = import_function(place, f"Invalid network {place}")()
    except CalgpError:
        raise
    except Exception as error:  # the function is the user's: it may raise anything
        raise CalgpError(f"Invalid network {place}: the function has failed ({one_line(error)}).") from None
    if not isinstance(network, nn.Module):
        raise CalgpError(
            f"Invalid network {place}: the function must return an nn.Module, not {type(network).__name__}."
        )
    return network, Preprocessing.of(getattr(network, "preprocessing", None), Preprocessing())


KINDS: dict[str, Callable[..., Made]] = {"timm": _timm, "torchvision": _torchvision, "transformers": _transformers}
