"""Training images, changed in each step: what a flip or a small move should not matter to."""

from collections.abc import Collection

import torch
from jaxtyping import Int, Shaped
from torch import Tensor
from torch.nn import functional as F

from calgp.gp import Noise
from calgp.gp.noise import site_key

_SITE = site_key("augmentation")


def augmented(
    x: Shaped[Tensor, "N C H W"], kinds: Collection[str], *, crop: int, seed: int, step: int, rows: Int[Tensor, "N"]
) -> Shaped[Tensor, "N C H W"]:
    """Images of a training step, changed by `kinds`: flip, with probability ½, and crop, by up to `crop` pixels.

    What is drawn is keyed by (seed, step, row), as the masks are: it depends neither on the batch nor on what was drawn
    before, so that a resumed training sees the same images.
    """
    if not kinds:
        return x
    # the seeds of training are the negative ones; three words an image: side, down, right
    words = Noise(-1 - seed, torch.tensor([step]), rows.to(x.device)).words(_SITE, 3, shared=False)[0]
    if "crop" in kinds:
        x = _moved(x, crop, words[:, 1:] % (2 * crop + 1))
    if "flip" in kinds:
        x = torch.where((words[:, 0] & 1).bool()[:, None, None, None], x.flip(-1), x)
    return x


def _moved(x: Tensor, pad: int, offsets: Int[Tensor, "N 2"]) -> Tensor:
    """`pad` black pixels on all sides, then a window of the first size at each image's own offsets (down, right)."""
    n, channels, height, width = x.shape
    padded = F.pad(x, (pad, pad, pad, pad))
    down = offsets[:, :1] + torch.arange(height, device=x.device)  # [N, H]
    right = offsets[:, 1:] + torch.arange(width, device=x.device)  # [N, W]
    image = torch.arange(n, device=x.device)[:, None, None, None]
    channel = torch.arange(channels, device=x.device)[None, :, None, None]
    return padded[image, channel, down[:, None, :, None], right[:, None, None, :]]
