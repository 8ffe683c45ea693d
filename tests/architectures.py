"""Real architectures of other libraries, with random weights.

`ARCHITECTURES` are small ones of transformers for images of 1 × 28 × 28: by name, a function that makes the network,
and how many of its layers are masked when all but the first are. `ZOO` are those of timm and torchvision.
"""

import ast
import importlib
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

from calgp.errors import CalgpError
from calgp.gp import Masking
from calgp.nets import Task, WrappedFeatures
from calgp.nets.wrap import wrap


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


def _mobilenetv2() -> nn.Module:
    """Of its sixteen inverted residuals, those that narrow or widen, and the first of those that are added."""
    options = {"depth_multiplier": 0.25, "min_depth": 4, "depth_divisible_by": 4, "finegrained_output": False}
    network = _transformers("MobileNetV2", **options)()
    _, *repeated = (block for block in network.mobilenet_v2.layer if block.use_residual)
    network.mobilenet_v2.layer = nn.ModuleList(b for b in network.mobilenet_v2.layer if b not in repeated)
    return network


ARCHITECTURES = {
    # two basic blocks a stage but the first, each of two convolutions, and one in the shortcut that widens
    "resnet": Architecture(
        _transformers("ResNet", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], layer_type="basic"), 7, 16
    ),
    # three blocks of a depthwise convolution and two linear layers on channels-last images, and one downsampling
    "convnextv2": Architecture(
        _transformers("ConvNextV2", hidden_sizes=[16, 32], depths=[1, 2], num_stages=2, patch_size=2), 10, 32
    ),
    # the stem has two more; seven inverted residuals of three, and a last convolution
    "mobilenetv2": Architecture(_mobilenetv2, 24, 320),
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


class Entry(NamedTuple):
    """A network of timm or torchvision, with random weights, for square images of three channels."""

    library: str
    name: str
    size: int  # of the images
    width: int  # of the features
    remedies: tuple[str, ...] = ()  # how it is refused, in order: for each the option that the refusal names
    options: Mapping[str, Any] = MappingProxyType({})  # of its function

    def make(self, **options: Any) -> nn.Module:
        torch.manual_seed(0)
        options = {"num_classes": 7, **self.options, **options}
        if self.library == "timm":
            return library("timm").create_model(self.name, **options).eval()
        return getattr(library("torchvision").models, self.name)(**options).eval()


UNMASKED, FEATURES, HEADLESS = "unmasked", "features", "num_classes=0"
PLAIN = {"init_weights": False}
ZOO = [
    Entry("torchvision", "resnet18", 32, 512),
    Entry("torchvision", "resnext50_32x4d", 32, 2048),
    Entry("torchvision", "densenet121", 32, 1024),
    Entry("torchvision", "vgg11", 32, 4096, options=PLAIN),
    Entry("torchvision", "alexnet", 64, 4096),
    Entry("torchvision", "googlenet", 32, 1024, options=PLAIN),
    Entry("torchvision", "inception_v3", 80, 2048, options=PLAIN),
    Entry("torchvision", "mobilenet_v2", 32, 1280),
    Entry("torchvision", "mobilenet_v3_small", 32, 1024),
    Entry("torchvision", "shufflenet_v2_x0_5", 32, 1024),
    Entry("torchvision", "squeezenet1_1", 64, 512, (FEATURES,)),
    Entry("torchvision", "mnasnet0_5", 32, 1280),
    Entry("torchvision", "efficientnet_b0", 32, 1280),
    Entry("torchvision", "regnet_y_400mf", 32, 440),
    Entry("torchvision", "convnext_tiny", 32, 768),
    Entry("torchvision", "vit_b_16", 32, 768, (UNMASKED,), {"image_size": 32}),
    Entry("torchvision", "swin_t", 64, 768, (UNMASKED,)),
    Entry("torchvision", "swin_v2_t", 64, 768, (UNMASKED,)),
    Entry("timm", "resnet18", 32, 512),
    Entry("timm", "resnetv2_50", 32, 2048),
    Entry("timm", "vit_tiny_patch16_224", 32, 192, options={"img_size": 32}),
    Entry("timm", "vit_small_patch14_dinov2", 28, 384, options={"img_size": 28, "depth": 3}),
    Entry("timm", "vit_base_patch16_siglip_224", 32, 768, (UNMASKED,), {"img_size": 32, "depth": 3}),
    Entry("timm", "deit_tiny_patch16_224", 32, 192, options={"img_size": 32}),
    Entry("timm", "deit_tiny_distilled_patch16_224", 32, 192, (HEADLESS,), {"img_size": 32}),
    Entry("timm", "eva02_tiny_patch14_224", 28, 192, (UNMASKED,), {"img_size": 28}),
    Entry("timm", "beit_base_patch16_224", 32, 768, (UNMASKED,), {"img_size": 32, "depth": 3}),
    Entry("timm", "cait_xxs24_224", 32, 192, (UNMASKED,), {"img_size": 32, "depth": 6}),
    Entry("timm", "xcit_nano_12_p16_224", 32, 128, (UNMASKED,), {"img_size": 32}),
    Entry("timm", "swin_tiny_patch4_window7_224", 56, 768, options={"img_size": 56}),
    Entry("timm", "swinv2_tiny_window8_256", 64, 768, (UNMASKED,), {"img_size": 64}),
    Entry("timm", "maxvit_tiny_tf_224", 64, 512, options={"img_size": 64}),
    Entry("timm", "maxvit_rmlp_pico_rw_256", 64, 256, (UNMASKED,), {"img_size": 64}),
    Entry("timm", "coatnet_0_rw_224", 64, 768, options={"img_size": 64}),
    Entry("timm", "coatnet_rmlp_nano_rw_224", 64, 512, (UNMASKED,), {"img_size": 64}),
    Entry("timm", "mixer_s32_224", 64, 512, options={"img_size": 64}),
    Entry("timm", "levit_128s", 64, 384, (HEADLESS,), {"img_size": 64}),
    Entry("timm", "efficientformer_l1", 224, 448, (HEADLESS,)),
    Entry("timm", "edgenext_xx_small", 64, 168, (UNMASKED,)),
    Entry("timm", "mobilevit_xxs", 64, 320),
    Entry("timm", "mvitv2_tiny", 64, 768, options={"img_size": 64}),
    Entry("timm", "volo_d1_224", 64, 384, (HEADLESS, UNMASKED), {"img_size": 64}),
    Entry("timm", "repvgg_a0", 32, 1280),
    Entry("timm", "hrnet_w18_small", 32, 2048),
    Entry("timm", "nfnet_l0", 32, 2304),
    Entry("timm", "tf_efficientnet_lite0", 32, 1280),
    Entry("timm", "convnextv2_atto", 32, 320),
]


class Followed(NamedTuple):
    """A network that is wrapped with what its refusals say."""

    network: nn.Module
    options: dict[str, Any]  # of `wrap`
    remedies: tuple[str, ...]
    features: WrappedFeatures


def follow_remedies(entry: Entry, task: Task) -> Followed:
    """Wraps a network; where that is refused, does what the refusal says, and tries again."""
    network, options, remedies = entry.make(), {}, []
    while True:
        try:
            features = wrap(network, name=entry.name, **options).build(task, Masking())
            return Followed(network, options, tuple(remedies), features)
        except CalgpError as refusal:
            if unmasked := re.search(r"unmasked=(\[.*?\])", str(refusal)):
                kind, options[UNMASKED] = UNMASKED, ast.literal_eval(unmasked[1])
            elif entry.library == "timm" and "(timm: num_classes=0)" in str(refusal):
                kind, network = HEADLESS, entry.make(num_classes=0)
            elif named := re.search(r"features='([^'…]+)'\.$", str(refusal)):
                kind, options[FEATURES] = FEATURES, named[1]
            else:
                raise
            if kind in remedies:
                raise
            remedies.append(kind)


_OPERATORS: list[torch.library.Library] = []


def library(name: str) -> Any:
    """timm or torchvision: the environment's own, or from its folder `networks`, where the Makefile puts them.

    torchvision's wheel may be made for another build of torch. Then its operators are missing, which no network here
    needs, and whatever looks for torchvision fails with it: so it has a folder of its own.
    """
    place = str(Path(sys.prefix) / "networks")
    if place not in sys.path:
        sys.path.append(place)
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        _OPERATORS.append(torch.library.Library("torchvision", "DEF"))
        for operator in ("nms", "qnms"):
            _OPERATORS[0].define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return importlib.import_module(name)
