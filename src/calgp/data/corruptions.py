"""Test images made worse, to see whether a classifier knows that it sees less."""

import io
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from PIL import Image, ImageFilter

from calgp.errors import CalgpError

from .images import Images

GREY = 128
SEVERITIES = (1, 2, 3, 4, 5)

# Chosen by eye on 28×28 digits and 32×32 photographs (tools/corruptions_picture.py draws them): the damage grows with
# each step, the first is slight; at the fifth a person reads the digits, and photographs are at the limit of what can
# be named. Lengths are shares of the shorter side, so that larger images suffer alike.
STRENGTHS: dict[str, tuple[float, ...]] = {
    "noise": (0.04, 0.08, 0.13, 0.19, 0.26),  # standard deviation, of white
    "blur": (0.015, 0.022, 0.030, 0.039, 0.050),  # standard deviation of the Gaussian
    "contrast": (0.75, 0.50, 0.35, 0.23, 0.15),  # what is left of the distance to the mean
    "rotation": (10, 20, 30, 40, 50),  # degrees, to the left or to the right
    "occlusion": (0.15, 0.24, 0.33, 0.42, 0.50),  # side of the grey square
    "jpeg": (30, 18, 11, 7, 5),  # Pillow's quality
}
CORRUPTIONS: tuple[str, ...] = tuple(STRENGTHS)


@dataclass(frozen=True)
class Corruption:
    """Which corruption, how strong (1 … 5), and the seed of what is random in it.

    >>> Corruption("noise", 3).label
    'noise-3'
    """

    kind: str
    severity: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in CORRUPTIONS:
            raise CalgpError(f"Invalid corruption {self.kind!r}: must be one of {', '.join(CORRUPTIONS)}.")
        if self.severity not in SEVERITIES:
            raise CalgpError(f"Invalid severity={self.severity}: must be from 1 (slight) to 5 (hard).")
        if self.seed < 0:
            raise CalgpError(f"Invalid seed={self.seed}: must be a whole number from 0.")

    @property
    def label(self) -> str:
        return f"{self.kind}-{self.severity}"

    @classmethod
    def parse(cls, text: str, *, seed: int = 0) -> "list[Corruption]":
        """What `KIND:SEVERITY` names; `KIND` alone is all of its severities.

        >>> [corruption.label for corruption in Corruption.parse("blur:2")]
        ['blur-2']
        >>> len(Corruption.parse("blur"))
        5
        """
        kind, colon, severity = text.partition(":")
        if not colon:
            return [cls(kind, each, seed) for each in SEVERITIES]
        if not severity.isdecimal():
            raise CalgpError(f"Invalid corruption {text!r}: must be KIND:SEVERITY, such as noise:3, or KIND alone.")
        return [cls(kind, int(severity), seed)]


def corrupted(images: Images, kind: str, severity: int, *, seed: int) -> Images:
    """The same images, each made worse; what is random is drawn from (seed, kind, row) of the image.

    So an image is corrupted in the same way in whatever order, subset or batch it comes; and its severities share their
    draws: the same noise, only stronger, the same sense of rotation, a larger square around the smaller one. The
    result is in memory, even where the images are in their files.

    >>> from calgp.data import load
    >>> images = load("digits", "test").take(torch.arange(3))
    >>> (corrupted(images, "noise", 1, seed=0).x != images.x).any().item()
    True
    """
    Corruption(kind, severity, seed)
    number, strength = CORRUPTIONS.index(kind), STRENGTHS[kind][severity - 1]
    before = (image for _, x in images.read(images.parts(100)) for image in x.numpy())
    after = np.empty(images.x.shape, np.uint8)
    for place, row in enumerate(images.rows.tolist()):  # one at a time: no more memory than for the result
        after[place] = _MAKE[kind](next(before), strength, np.random.default_rng([seed, number, row]))
    return replace(images, x=torch.from_numpy(after))


def _noise(x: np.ndarray, deviation: float, rng: np.random.Generator) -> np.ndarray:
    return _bytes(x + 255 * deviation * rng.standard_normal(x.shape, np.float32))


def _blur(x: np.ndarray, deviation: float, rng: np.random.Generator) -> np.ndarray:
    gaussian = ImageFilter.GaussianBlur(deviation * min(x.shape[1:]))
    return np.stack([np.asarray(Image.fromarray(channel).filter(gaussian)) for channel in x])


def _contrast(x: np.ndarray, left: float, rng: np.random.Generator) -> np.ndarray:
    mean = x.mean((1, 2), keepdims=True)
    return _bytes(mean + left * (x - mean))


def _rotation(x: np.ndarray, degrees: float, rng: np.random.Generator) -> np.ndarray:
    """About the centre; what comes in from outside has the median colour of the border."""
    angle = degrees * rng.choice((-1, 1))
    border = np.concatenate([x[:, 0], x[:, -1], x[:, :, 0], x[:, :, -1]], 1)
    colours = np.median(border, 1).astype(int).tolist()
    turned = [
        Image.fromarray(channel).rotate(angle, Image.Resampling.BILINEAR, fillcolor=colour)
        for channel, colour in zip(x, colours, strict=True)
    ]
    return np.stack([np.asarray(channel) for channel in turned])


def _occlusion(x: np.ndarray, share: float, rng: np.random.Generator) -> np.ndarray:
    """A grey square, anywhere within the image."""
    sizes = np.array(x.shape[1:])
    side = max(round(share * min(x.shape[1:])), 1)
    top, left = (rng.random(2) * (sizes - side + 1)).astype(int)
    covered = x.copy()
    covered[:, top : top + side, left : left + side] = GREY
    return covered


def _jpeg(x: np.ndarray, quality: float, rng: np.random.Generator) -> np.ndarray:
    """To JPEG and back: RGB as such, any other number of channels one by one as grey."""
    if len(x) == 3:
        return _through_jpeg(np.ascontiguousarray(x.transpose(1, 2, 0)), int(quality)).transpose(2, 0, 1)
    return np.stack([_through_jpeg(channel, int(quality)) for channel in x])


def _through_jpeg(pixels: np.ndarray, quality: int) -> np.ndarray:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=quality)
    with Image.open(file, formats=("JPEG",)) as image:
        return np.asarray(image)


def _bytes(x: np.ndarray) -> np.ndarray:
    return x.round().clip(0, 255).astype(np.uint8)


_MAKE: dict[str, Callable[[np.ndarray, float, np.random.Generator], np.ndarray]] = {
    "noise": _noise, "blur": _blur, "contrast": _contrast,
    "rotation": _rotation, "occlusion": _occlusion, "jpeg": _jpeg,
}  # fmt: skip
