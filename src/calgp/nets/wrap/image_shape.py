"""Which images a network takes, where nobody says so."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from calgp.errors import CalgpError
from calgp.gp import evaluating

SIDES = (28, 32, 48, 64, 96, 112, 128, 160, 192, 224, 240, 256, 288, 299, 320, 336, 384, 448, 512)


def find_image_shape(network: nn.Module) -> tuple[int, int, int]:
    """Channels, height and width of images that a network takes: as its configuration says, or the smallest that work.

    Where several sizes work, it takes any: features are then averages over pixels, whose width is the same for all.

    >>> find_image_shape(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 30 * 30, 10)))
    (3, 32, 32)
    """
    like = next(network.parameters(), torch.empty(0))
    with evaluating(network), torch.no_grad(), torch.random.fork_rng(devices=[]):
        for shape in _candidates(network):
            try:
                network(torch.zeros(1, *shape, dtype=like.dtype, device=like.device))
            except Exception:  # noqa: S112 (whatever it is: not this size)
                continue
            return shape
    raise CalgpError(
        "No size of square images from 28 to 512 pixels goes through the network; say which images it takes, such as "
        "image_shape=(3, 224, 224)."
    )


def _candidates(network: nn.Module) -> Iterator[tuple[int, int, int]]:
    for known in (getattr(network, name, None) for name in ("pretrained_cfg", "default_cfg")):  # timm
        if isinstance(known, dict) and known.get("input_size"):
            yield tuple(known["input_size"])
    config: Any = getattr(network, "config", None)  # transformers
    size = getattr(config, "image_size", None)
    if isinstance(size, int):
        yield getattr(config, "num_channels", 3), size, size
    first = next((each for each in network.modules() if isinstance(each, nn.Conv2d)), None)
    for channels in (1, 3) if first is None else (first.in_channels,):
        yield from ((channels, side, side) for side in SIDES)
