"""How an image becomes the input of a pretrained network: resized, cut to a square, normalised."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from calgp.data.images import luma
from calgp.errors import CalgpError, short_repr

Interpolation = Literal["bilinear", "bicubic", "nearest"]
LONGEST = 4  # times the shorter side: what lies further out is cut off first, so that thin images take no memory
LARGEST = 4096  # pixels a side


@dataclass(frozen=True)
class Preprocessing:
    """Resize the shorter side to `resize`, cut out the middle `size` × `size`, and take (x / 255 − mean) / std.

    The defaults are those of most ImageNet networks. `resize=None` is `size`; `fit="stretch"` resizes both sides to
    `resize` instead of the shorter one.

    >>> Preprocessing(size=32).resized(torch.zeros(1, 40, 80, dtype=torch.uint8)).shape
    torch.Size([3, 32, 32])
    """

    size: int = 224
    resize: int | None = None
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    interpolation: Interpolation = "bilinear"
    fit: Literal["crop", "stretch"] = "crop"

    def __post_init__(self) -> None:
        for name in ("mean", "std"):
            object.__setattr__(self, name, tuple(float(each) for each in getattr(self, name)))
        sides = (self.size, self.size if self.resize is None else self.resize)
        if not all(isinstance(each, int) for each in sides) or not 1 <= sides[0] <= sides[1] <= LARGEST:
            raise CalgpError(
                f"Invalid size={self.size}, resize={self.resize}: must be pixels, size at most resize, both at most "
                f"{LARGEST}, such as size=224, resize=256."
            )
        if len(self.mean) != len(self.std) or len(self.mean) not in (1, 3) or not all(each > 0 for each in self.std):
            raise CalgpError(
                f"Invalid mean={self.mean}, std={self.std}: must be a number each for 1 (grey) or 3 (rgb) channels, "
                "std above 0."
            )
        if self.interpolation not in get_args(Interpolation) or self.fit not in ("crop", "stretch"):
            raise CalgpError(
                f"Invalid interpolation={self.interpolation!r}, fit={self.fit!r}: must be bilinear, bicubic, nearest; "
                "crop, stretch."
            )

    @property
    def channels(self) -> int:
        return len(self.mean)

    @property
    def colour(self) -> Literal["grey", "rgb"]:
        return "grey" if self.channels == 1 else "rgb"

    def resized(self, image: Tensor) -> Tensor:
        """An image uint8 [C, H, W] of any size as uint8 [channels, size, size]."""
        image = _as_channels(image, self.channels)
        side = self.size if self.resize is None else self.resize
        height, width = image.shape[1:]
        short = min(height, width)
        if self.fit == "crop":
            image = _middle(image, min(height, LONGEST * short), min(width, LONGEST * short))
            height, width = image.shape[1:]
        target = (side, side) if self.fit == "stretch" else (side * height // short, side * width // short)
        if target != (height, width):
            smooth = self.interpolation != "nearest"
            how: Any = {"mode": self.interpolation, "antialias": smooth, "align_corners": False if smooth else None}
            image = F.interpolate(image[None].float(), target, **how)[0].round_().clamp_(0, 255).to(torch.uint8)
        return _middle(image, self.size, self.size)

    def normalised(self, images: Tensor) -> Tensor:
        """Resized images uint8 [N, C, size, size] as the network's input, float32."""
        mean, std = (torch.tensor(each, device=images.device).view(-1, 1, 1) for each in (self.mean, self.std))
        return (images.float().div_(255) - mean).div_(std)

    @staticmethod
    def of(value: object, default: "Preprocessing") -> "Preprocessing":
        """A network's attribute `preprocessing`: one of these, a mapping with some of its fields, or None."""
        if value is None or isinstance(value, Preprocessing):
            return value or default
        known = {each.name for each in fields(Preprocessing)}
        if not isinstance(value, Mapping) or not set(value) <= known:
            raise CalgpError(
                f"Invalid preprocessing of the network, {short_repr(value)}: must be a table with some of "
                f"{', '.join(sorted(known))}, such as {{'size': 128}}."
            )
        try:
            return replace(default, **{str(name): each for name, each in value.items()})
        except (TypeError, ValueError) as error:
            raise CalgpError(f"Invalid preprocessing of the network, {short_repr(value)}: {error}.") from None


def _as_channels(image: Tensor, channels: int) -> Tensor:
    if image.shape[0] == channels:
        return image
    if image.shape[0] == 1:
        return image.expand(channels, -1, -1)
    if image.shape[0] == 3 and channels == 1:
        return luma(image[None])[0]
    raise CalgpError(f"Invalid image with {image.shape[0]} channels: the network takes images with {channels}.")


def _middle(image: Tensor, height: int, width: int) -> Tensor:
    top, left = (round((there - kept) / 2) for there, kept in zip(image.shape[1:], (height, width), strict=True))
    return image[:, top : top + height, left : left + width]
