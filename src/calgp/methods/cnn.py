"""The plain convolutional network: the paper's architectures with their fully connected layers."""

import itertools
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from calgp.gp import UNMASKED, Latent, MaskedLinear, Model, Noise, Softmax
from calgp.methods.base import Method
from calgp.nets import Backbone, Features, Task


@dataclass(frozen=True)
class Cnn(Method):
    """CNN: a point estimate, trained by cross-entropy."""

    summary: ClassVar[str] = "plain CNN with fully connected layers, a point estimate"

    def build(self, task: Task, backbone: Backbone, *, generator: torch.Generator | None = None) -> "CnnModel":
        features = backbone.build(task, UNMASKED, generator=generator)
        widths = (features.out_features, *backbone.hidden, task.classes)
        layers = [
            MaskedLinear(before, after, masking=UNMASKED, bias=True, std=before**-0.5, generator=generator)
            for before, after in itertools.pairwise(widths)
        ]
        return CnnModel(features, layers)


class CnnModel(Model):
    """One point and no prior: the bound is the cross-entropy."""

    def __init__(self, features: Features, layers: list[MaskedLinear]) -> None:
        super().__init__()
        self.features, self.layers, self.likelihood = features, nn.ModuleList(layers), Softmax()

    def stem(self, x: Tensor) -> Tensor:
        return self.features.stem(x)

    def sample(self, h: Tensor, noise: Noise | None) -> Latent:
        h = self.features(h, noise)
        *hidden, last = self.layers
        for layer in hidden:
            h = layer(h, noise).relu()
        return Latent(last(h, noise).unsqueeze(0))

    def kl(self) -> Float[Tensor, ""]:
        return next(self.parameters()).new_zeros(())
