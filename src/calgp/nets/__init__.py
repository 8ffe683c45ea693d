"""Convolutional networks c(x | Ψ) with masked filters: table 1 of the paper, and one for other images."""

from calgp.nets.auto import Auto
from calgp.nets.base import Backbone, Features, FeaturesModel, FeaturesWithHead, Task
from calgp.nets.compact import Compact
from calgp.nets.lenet import LeNet
from calgp.nets.pretrained_backbone import Pretrained, program_features
from calgp.nets.resnet import ResNet
from calgp.nets.standardised import Standardised, standardisers
from calgp.nets.wrap import NETWORKS, Wrapped, WrappedFeatures

BACKBONES: dict[str, Backbone] = {
    "auto": Auto(),
    "compact": Compact(),
    "lenet": LeNet(),
    "lenet-cifar": LeNet(channels=(64, 64), pool=3, normalise=True, hidden=(384, 192)),
    "lenet-3": LeNet(channels=(64, 64, 64), pool=3, normalise=True, hidden=(384, 192)),
    "resnet": ResNet(),
}

__all__ = [
    "BACKBONES", "NETWORKS", "Auto", "Backbone", "Compact", "Features", "FeaturesModel", "FeaturesWithHead", "LeNet",
    "Pretrained", "ResNet", "Standardised", "Task", "Wrapped", "WrappedFeatures", "program_features", "standardisers",
]  # fmt: skip
