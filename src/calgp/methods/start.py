"""What the training images decide before the first step: the features at the start, and where a sparse GP begins."""

import copy
from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from calgp.data import Images
from calgp.gp import Noise, SparseGP
from calgp.nets import FeaturesModel

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
    model: FeaturesModel, train: Images, generator: torch.Generator | None
) -> tuple[Float[Tensor, "N d"], Noise]:
    """c of some training images before the first step, and the noise (its mean) that they were computed with.

    Batch norm has the moments of these images, as it will in the first steps; only in a copy, which is forgotten.
    """
    parameter, features = next(model.parameters()), copy.deepcopy(model.features)
    for module in features.modules():
        module.training = module.training and isinstance(module, _BatchNorm)
    chosen = torch.randperm(len(train), generator=generator)[:START_IMAGES].sort().values
    noise = Noise(0, torch.zeros(1, dtype=torch.long), torch.arange(len(chosen)), mean=True)
    found = [
        features(features.stem(train.pixels(part).to(parameter)), noise._replace(rows=part))
        for part in chosen.split(BATCH)
    ]
    return torch.cat(found), noise


@torch.no_grad()
def first_features(
    model: FeaturesModel, train: Images, index: Int[Tensor, "N"], *, size: int, noise: Noise | None = None
) -> Float[Tensor, "N d"]:
    """c of images as the first steps see them: masked, and by the moments of batches; in a copy of the network."""
    features, like = copy.deepcopy(model.features).train(), next(model.parameters())
    return torch.cat([
        features(
            features.stem(train.pixels(part).to(like)), noise and noise._replace(rows=train.rows[part].to(like.device))
        )
        for part in index.split(size)
    ])  # fmt: skip
