"""A small network, and what most tests of wrapped networks do with it."""

import ast
import re

import torch
from torch import nn

from calgp.gp import Masking, Noise
from calgp.nets import Task
from calgp.nets.wrap import wrap

TASK = Task(3, 8, 8, 4)
DIGITS = Task(1, 28, 28, 10)
HALF = Masking()


class Residual(nn.Module):
    """A stem, two residual blocks with batch norm, pooling, a classifier."""

    def __init__(self, width=6, classes=5):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True))
            for _ in range(2)
        )
        self.classifier = nn.Linear(width, classes)

    def forward(self, x):
        h = self.norm(self.first(x)).relu_()
        for block in self.blocks:
            h = h + block(h)
        return self.classifier(h.mean((2, 3)))


def images(n=5, task=TASK, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(n, task.channels, task.height, task.width, generator=generator)


def noise(samples=2, rows=5, seed=0):
    return Noise(seed, torch.arange(samples), torch.arange(rows))


def features(network, *, task=TASK, masking=HALF, **options):
    return wrap(network, **options).build(task, masking)


def entering(network, name, x):
    """What enters a module of a network, as it was before it was wrapped."""
    found = []
    handle = network.get_submodule(name).register_forward_pre_hook(lambda module, args: found.append(args[0]))
    with torch.no_grad():
        network(x)
    handle.remove()
    return found[0]


def remedy(refusal):
    """What a refusal says is to be left unmasked."""
    return ast.literal_eval(re.search(r"unmasked=(\[.*?\])", str(refusal.value))[1])
