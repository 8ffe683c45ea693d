"""What several methods share: seeds, the features at the start, and how a sparse GP starts."""

from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from calgp.data import Images
from calgp.gp import Model, Noise, SparseGP
from calgp.nets import Features

START_IMAGES = 1000  # how many training images decide the scale of the prior
BATCH = 250


def draw_seed(generator: torch.Generator | None) -> int:
    """A seed for what has its own generator."""
    return int(torch.randint(2**32, (), generator=generator))


def start_at_labels(gp: SparseGP[Any], batches: Iterable[tuple[Tensor, Tensor]], classes: int) -> None:
    """q(v) by least-squares classification of some inputs: targets 3 for the label, 0 for others, less their mean.

    From q(v) = p(v) the first thing to be learned would be less noise, and a network learns it by making all features
    the same; some never tell them apart again. Functions that know labels give it something better to do.
    """
    targets = ((x, 3 * (F.one_hot(y, classes) - 1 / classes).to(x)) for x, y in batches)
    gp.regress(targets, noise=1.0)


@torch.no_grad()
def start_features(
    model: Model, features: Features, train: Images, generator: torch.Generator | None
) -> tuple[Float[Tensor, "N d"], Noise]:
    """c of some training images before the first step, and the noise (its mean) that they were computed with.

    Batch norm has the moments of these images, as it will in the first steps, and keeps no memory of them.
    """
    parameter = next(model.parameters())
    chosen = torch.randperm(len(train), generator=generator)[:START_IMAGES].sort().values
    noise = Noise(0, torch.zeros(1, dtype=torch.long), torch.arange(len(chosen)), mean=True)
    before = {name: value.clone() for name, value in model.named_buffers()}
    modes = {module: module.training for module in model.modules()}
    model.eval()
    for module, training in modes.items():
        module.training = training and isinstance(module, _BatchNorm)
    found = [
        features(model.stem(train.pixels(part).to(parameter)), noise._replace(rows=part))
        for part in chosen.split(BATCH)
    ]
    for module, training in modes.items():
        module.training = training
    for name, value in model.named_buffers():
        value.copy_(before[name])
    return torch.cat(found), noise
