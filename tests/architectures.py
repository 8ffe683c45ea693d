"""Real architectures of other libraries, small and with random weights, for images of 1 × 28 × 28.

`ARCHITECTURES` has, by name, a function that makes the network, and how many of its layers are masked when all but the
first are. transformers is among the test dependencies; torchvision and timm are tried where they import (`OPTIONAL`).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn


class Architecture(NamedTuple):
    make: Callable[[], nn.Module]
    sites: int  # counted by hand: its convolutions and linear layers, less the first and the classifier
    width: int  # of the features


def _transformers(name: str, **config) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        torch.manual_seed(0)
        made = getattr(transformers, f"{name}Config")(num_channels=1, num_labels=7, **config)
        network = getattr(transformers, f"{name}ForImageClassification")(made).eval()
        # deviations of 0.02, as they start with, would leave nothing of so few channels
        for module in network.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight)
            if isinstance(module, nn.BatchNorm2d):
                module.reset_parameters()
        return network

    return make


def _torchvision(name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import torchvision

        torch.manual_seed(0)
        return getattr(torchvision.models, name)(num_classes=7).eval()

    return make


def _timm(name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import timm

        torch.manual_seed(0)
        return timm.create_model(name, num_classes=7).eval()

    return make


ARCHITECTURES = {
    # two basic blocks a stage but the first, each of two convolutions, and one in the shortcut that widens
    "resnet": Architecture(
        _transformers("ResNet", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], layer_type="basic"), 7, 16
    ),
    # three blocks of a depthwise convolution and two linear layers on channels-last images, and one downsampling
    "convnextv2": Architecture(
        _transformers("ConvNextV2", hidden_sizes=[16, 32], depths=[1, 2], num_stages=2, patch_size=2), 10, 32
    ),
    # the stem has two more; sixteen inverted residuals of three, and a last convolution
    "mobilenetv2": Architecture(
        _transformers(
            "MobileNetV2", depth_multiplier=0.25, min_depth=4, depth_divisible_by=4, finegrained_output=False
        ),
        51,
        320,
    ),
    # three blocks of depthwise, two of squeeze-and-excitation, projection; two of them expand; and a last convolution
    "efficientnet": Architecture(
        _transformers(
            "EfficientNet", image_size=28, width_coefficient=0.25, depth_divisor=4, depth_coefficient=1.0,
            kernel_sizes=[3, 5], in_channels=[32, 32], out_channels=[32, 64],
            strides=[1, 2], num_block_repeats=[1, 2], expand_ratios=[1, 4],
            depthwise_padding=[], hidden_dim=320,
        ),
        15,
        320,
    ),
    # two layers of query, key, value, output and two linear layers
    "vit": Architecture(
        _transformers(
            "ViT", hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=28,
            patch_size=7,
        ),
        12,
        16,
    ),
    # the same in windows of an image, and a linear layer that merges patches
    "swin": Architecture(
        _transformers(
            "Swin", image_size=28, patch_size=2, embed_dim=8, depths=[1, 1], num_heads=[1, 2], window_size=7
        ),
        13,
        16,
    ),
}  # fmt: skip

OPTIONAL = {  # for images of 3 × 64 × 64
    f"{library}-{name}": (library, make(name))
    for library, make, names in (
        ("torchvision", _torchvision, ("resnet18", "convnext_tiny", "mobilenet_v2", "efficientnet_b0")),
        ("timm", _timm, ("resnet18", "convnext_atto", "mobilenetv2_050", "efficientnet_b0")),
    )
    for name in names
}
