"""Is `calgp.upgrade` worth it for networks as strangers write and train them?

python tools/upgrade_strangers.py [NAME …] [--seed N] [--kept FOLDER] [--save FOLDER]

Each network is trained with plain PyTorch for a minute or two, in a style of its own: layers, loss, optimiser,
normalisation and form of the data. On fresh test images: are labels unchanged, and are MNLL and ECE no worse than with
a temperature, of the same hold-out by this project and by SciPy's search? AUROC of maximum probability, and of every
score, on one near and two far sets. A line with `!` breaks a promise; `!!` beyond chance. `--kept` keeps trained
weights there, `--save` run folders. CALGP_DATA names a folder with MNIST, notMNIST and CIFAR.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from scipy.optimize import minimize_scalar
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import calgp
from calgp import metrics
from calgp.data import load
from calgp.data.images import to_unit_interval
from calgp.upgraded import UpgradedClassifier

Pair = tuple[Tensor, Tensor]
Form = Callable[[Tensor, Tensor], Any]
TESTED, OUTSIDE = 3000, 1000
TEST_ONLY, REST = "notmnist", 8000  # a source without training images: those in front of REST are for training


class PyTorchExample(nn.Module):
    """The network of PyTorch's own MNIST example: functions, two kinds of dropout, log-softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3, 1), nn.Conv2d(32, 64, 3, 1)
        self.dropout1, self.dropout2 = nn.Dropout2d(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(9216, 128), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        x = self.dropout1(x).flatten(1)
        return F.log_softmax(self.fc2(self.dropout2(F.relu(self.fc1(x)))), dim=1)


class BasicBlock(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(outer), nn.BatchNorm2d(outer)
        self.shortcut = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + self.shortcut(x))


def resnet(classes: int, channels: int = 3, *, bias: bool = True) -> nn.Sequential:
    stem = nn.Sequential(nn.Conv2d(channels, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
    blocks = BasicBlock(16, 32, 1), BasicBlock(32, 64, 2), BasicBlock(64, 96, 2)
    return nn.Sequential(stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, classes, bias=bias))


class VisionTransformer(nn.Module):
    """A class token, learned places, LayerNorm in front."""

    def __init__(self, classes: int, channels: int, side: int, patch: int, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Conv2d(channels, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.place = nn.Parameter(0.02 * torch.randn(1, (side // patch) ** 2 + 1, width))
        layer = nn.TransformerEncoderLayer(width, 4, 128, 0.1, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        x = self.encoder(torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.place)
        return self.head(self.norm(x[:, 0]))


class TwoHeads(nn.Module):
    """Gives (logits, auxiliary logits), both of linear layers: of which the first are meant."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.SELU(), nn.Linear(256, 128), nn.SELU())
        self.auxiliary, self.head = nn.Linear(128, 10), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x)
        return self.head(h), self.auxiliary(h)


class Wrapper(nn.Module):
    """A module around a module around a network, as trainers make them; other linear layers are never called."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.model, self.teacher = nn.DataParallel(network), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


def lenet(*more: nn.Module, out: int = 10) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(6, 16, 5), nn.Tanh(), nn.AvgPool2d(2),
        nn.Flatten(), nn.LazyLinear(120), nn.Tanh(), nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, out), *more,
    )  # fmt: skip


def vgg(classes: int) -> nn.Sequential:
    def stage(inner: int, outer: int) -> list[nn.Module]:
        return [nn.Conv2d(inner, outer, 3, padding=1), nn.BatchNorm2d(outer), nn.ReLU(True), nn.MaxPool2d(2)]

    return nn.Sequential(
        *stage(3, 24), *stage(24, 48), *stage(48, 96), nn.Flatten(), nn.Linear(96 * 16, 256), nn.ReLU(True),
        nn.Dropout(0.5), nn.Linear(256, classes),
    )  # fmt: skip


def mobile(classes: int) -> nn.Sequential:
    """Depthwise convolutions and hard swish."""

    def stage(inner: int, outer: int) -> list[nn.Module]:
        depthwise = nn.Conv2d(inner, inner, 3, 2, 1, groups=inner, bias=False), nn.BatchNorm2d(inner)
        return [*depthwise, nn.Hardswish(), nn.Conv2d(inner, outer, 1, bias=False), nn.BatchNorm2d(outer)]

    stages = *stage(16, 32), nn.Hardswish(), *stage(32, 96), nn.Hardswish()
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, 1, 1), *stages, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(384, classes)
    )


def mlp(classes: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 300), nn.LeakyReLU(), nn.Linear(300, 100), nn.LeakyReLU(), nn.Linear(100, classes)
    )


def pairs(x: Tensor, y: Tensor) -> Pair:
    return x, y


def arrays(x: Tensor, y: Tensor) -> tuple[np.ndarray, np.ndarray]:
    return x.numpy(), y.numpy()


def shuffled(x: Tensor, y: Tensor) -> DataLoader[Any]:
    return DataLoader(TensorDataset(x, y), 100, shuffle=True)


def listed(x: Tensor, y: Tensor) -> list[Pair]:
    return list(zip(x.split(77), y.split(77), strict=True))


ADAM = partial(torch.optim.Adam, lr=1e-3)


@dataclass(frozen=True)
class Stranger:
    """How somebody trained a network, and in what form they have their data."""

    build: Callable[[], nn.Module]
    source: str
    train: int
    epochs: int
    classes: tuple[int, ...] = ()  # none: all
    held_out: int = 1000
    optimiser: Callable[..., torch.optim.Optimizer] = ADAM
    smoothing: float = 0.0
    mean: float = 0.0
    std: float = 1.0
    size: int | None = None
    flips: bool = False
    dtype: torch.dtype = torch.float32
    form: Form = TensorDataset
    given: bool = True  # whether `upgrade` sees the training images
    last: bool = False  # channels-last


SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=5e-4)
ADAMW = partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.05)
NORMAL = {"mean": 0.1307, "std": 0.3081}
STRANGERS = {
    "LeNet, tanh, over-trained": Stranger(lenet, "mnist", 2000, 30, form=shuffled, **NORMAL),
    "PyTorch's example": Stranger(PyTorchExample, "mnist", 4000, 3, form=shuffled, **NORMAL),
    "LeNet, softmax, 20 pixels": Stranger(lambda: lenet(nn.Softmax(1)), "mnist", 4000, 10, size=20, form=arrays),
    "MLP, double": Stranger(lambda: mlp(10).double(), "mnist", 3000, 15, dtype=torch.float64, form=pairs),
    "two heads, SELU": Stranger(TwoHeads, "notmnist", 4000, 8, form=listed),
    "mobile, notMNIST": Stranger(lambda: mobile(10), "notmnist", 6000, 5, optimiser=ADAMW, mean=0.5, std=0.5),
    "wrapped, DataParallel": Stranger(lambda: Wrapper(lenet()), "notmnist", 5000, 8, form=shuffled),
    "mobile, 3 digits": Stranger(lambda: mobile(3), "mnist", 1500, 6, classes=(4, 7, 9), held_out=500),
    "ViT, MNIST": Stranger(lambda: VisionTransformer(10, 1, 28, 7), "mnist", 5000, 6, optimiser=ADAMW, **NORMAL),
    "VGG, batch norm": Stranger(lambda: vgg(10), "cifar10", 5000, 6, mean=0.47, std=0.25, form=shuffled),
    "VGG, over-trained": Stranger(lambda: vgg(10), "cifar10", 1500, 40, mean=0.47, std=0.25, given=False),
    "ResNet, no bias": Stranger(
        lambda: resnet(10, bias=False), "cifar10", 6000, 5, optimiser=SGD, flips=True, mean=0.47, std=0.25, last=True
    ),
    "ResNet, label smoothing": Stranger(
        lambda: resnet(10), "cifar10", 6000, 5, optimiser=ADAMW, smoothing=0.1, mean=0.47, std=0.25, form=pairs
    ),
    "ResNet, cats and dogs": Stranger(
        lambda: resnet(2), "cifar10", 4000, 6, classes=(3, 5), optimiser=SGD, flips=True, mean=0.47, std=0.25
    ),
    "ViT, CIFAR-10": Stranger(
        lambda: VisionTransformer(10, 3, 32, 8), "cifar10", 6000, 6, optimiser=ADAMW, mean=0.47, std=0.25
    ),
    "ResNet, 100 classes": Stranger(
        lambda: resnet(100), "cifar100", 8000, 6, held_out=2000, mean=0.47, std=0.25, form=arrays
    ),
    "VGG, 100 classes, 2 epochs": Stranger(
        lambda: vgg(100), "cifar100", 5000, 2, held_out=1000, mean=0.47, std=0.25
    ),
}  # fmt: skip


class Images:
    """Images of one stranger, as their network takes them."""

    def __init__(self, stranger: Stranger, seed: int) -> None:
        self.stranger, self.seed = stranger, seed

    def ready(self, x: Tensor) -> Tensor:
        x = (to_unit_interval(x).to(self.stranger.dtype) - self.stranger.mean) / self.stranger.std
        return x.to(memory_format=torch.channels_last) if self.stranger.last else x

    def read(self, source: str, split: str, most: int | None = None, *, near: bool = False) -> Pair:
        """In a random order; the classes of the stranger, numbered anew, or with `near` all others."""
        colour = "rgb" if self.stranger.source.startswith("cifar") else None
        size = self.stranger.size or (32 if colour and not source.startswith("cifar") else None)
        if size is None:
            found = load(source, "test" if source == TEST_ONLY else split)
        else:
            found = load(source, split, size=size, colour=colour)
        x, y = found.x, found.y
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(self.seed))
        if self.stranger.classes and source == self.stranger.source:
            kept = torch.tensor(self.stranger.classes)
            order = order[torch.isin(y[order], kept) != near]
            y = torch.searchsorted(kept, y.clamp(int(kept.min()), int(kept.max())))
        order = order[REST:] if source == TEST_ONLY and split == "test" else order
        return self.ready(x[order[:most]]), y[order[:most]]

    def outside(self) -> dict[str, Tensor]:
        """One near set and two far ones: other classes or turned images; another data set, and noise."""
        own = self.stranger.source
        like = self.read(own, "test", OUTSIDE)[0]
        if self.stranger.classes:
            near = {"near: left-out classes": self.read(own, "test", OUTSIDE, near=True)[0]}
        elif own.startswith("cifar"):
            other = "cifar100" if own == "cifar10" else "cifar10"
            near = {"near: other CIFAR": self.read(other, "test", OUTSIDE)[0]}
        else:
            near = {"near: turned by 90°": like.rot90(1, (2, 3)).contiguous()}
        far = "notmnist" if own != "notmnist" else "mnist"
        generator = torch.Generator().manual_seed(self.seed)
        noise = torch.randint(256, like.shape, generator=generator, dtype=torch.uint8)
        return near | {f"far: {far}": self.read(far, "test", OUTSIDE)[0], "far: noise": self.ready(noise)}


def trained(stranger: Stranger, x: Tensor, y: Tensor, seed: int, kept: Path | None) -> nn.Module:
    torch.manual_seed(seed)
    network = stranger.build()
    network(x[:2])  # lazy layers
    if kept is not None and kept.is_file():
        network.load_state_dict(load_file(kept))
        return network
    network = network.to(memory_format=torch.channels_last) if stranger.last else network  # pyright: ignore
    optimiser = stranger.optimiser(network.parameters())
    probabilities = any(isinstance(each, nn.Softmax) for each in network.modules())
    for _ in range(stranger.epochs):
        network.train()
        for rows in torch.randperm(len(y)).split(64):
            part = x[rows].flip(3) if stranger.flips and torch.rand(()) < 0.5 else x[rows]
            output = network(part)
            output = output[0] if isinstance(output, tuple) else output
            output = output.log() if probabilities else output
            optimiser.zero_grad()
            F.cross_entropy(output, y[rows], label_smoothing=stranger.smoothing).backward()
            optimiser.step()
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        save_file({key: value.contiguous() for key, value in network.state_dict().items()}, kept)
    return network  # left in training mode, as strangers do


def searched_temperature(f: Tensor, y: Tensor) -> float:
    """By SciPy, on log T: independent of this project's code."""

    def loss(log_t: float) -> float:
        return F.cross_entropy(f / float(np.exp(log_t)), y).item()

    return float(np.exp(minimize_scalar(loss, bounds=(-3, 3), method="bounded").x))


def rows_of(network: nn.Module, upgraded: UpgradedClassifier, held: Pair, test: Pair) -> Iterator[str]:
    """Labels, MNLL and ECE beside those of both temperatures."""
    f, g = upgraded.network(test[0]).logits.double(), upgraded.network(held[0]).logits.double()
    with torch.no_grad():
        given = network.eval()(test[0])
    given = given[0] if isinstance(given, tuple) else given
    mine = upgraded.predict(test[0]).predictive
    changed = int((mine.labels != given.argmax(1)).sum())
    yield f" {'!!' if changed else '  '} labels changed {changed} of {len(test[1])}"
    searched = searched_temperature(g, held[1])
    others = {"as it is": 1.0, "temperature": upgraded.fitted.temperature, "SciPy's temperature": searched}
    own = metrics.outcomes(mine.log_probs, test[1])
    scores = metrics.scores(own)
    yield f"    {'upgraded':20} ERR {scores.err:.4f} MNLL {scores.mnll:.4f} ECE {scores.ece:.4f}"
    for name, t in others.items():
        other = metrics.outcomes((f / t).log_softmax(1), test[1])
        scores, paired = metrics.scores(other), metrics.paired_scores(own, other, seed=0)
        found = {key: paired[key] for key in ("mnll", "ece")}
        worse = max((each.value > 0) * (1 + each.is_clear) for each in found.values()) if t != 1 else 0
        told = ", ".join(f"{key} {each.value:+.4f} ± {each.half:.4f}" for key, each in found.items())
        yield f" {'!' * worse:2} {name:20} T {t:.3f} MNLL {scores.mnll:.4f} ECE {scores.ece:.4f}; less: {told}"


def auroc_rows(upgraded: UpgradedClassifier, test: Pair, images: Images) -> Iterator[str]:
    def scores(x: Tensor) -> Tensor:
        found = upgraded.scored(*upgraded.network(x)).outlier_scores
        assert found is not None  # noqa: S101 (for the type checker)
        return found

    inside = scores(test[0])
    for name, x in images.outside().items():
        other = scores(x)
        found = {each: metrics.ood(inside[:, at], other[:, at]).auroc for at, each in enumerate(upgraded.outlier_names)}
        plain, mine = found["network-confidence"], found["combined"]
        rest = ", ".join(f"{score} {auroc:.3f}" for score, auroc in found.items())
        yield f" {'! ' if mine <= plain else '  '} {name:22} {plain:.3f} → {mine:.3f} ({rest})"


def check(name: str, stranger: Stranger, seed: int, kept: Path | None, save: Path | None) -> None:
    file = f"{name.replace(',', '').replace(' ', '-')}-{seed}"
    images = Images(stranger, seed)
    x, y = images.read(stranger.source, "train", stranger.train + stranger.held_out)
    train, held = ((x[part], y[part]) for part in (slice(stranger.train), slice(stranger.train, None)))
    test = images.read(stranger.source, "test", TESTED)
    clock = time.perf_counter()
    network = trained(stranger, *train, seed, kept and kept / f"{file}.safetensors")
    seconds = time.perf_counter() - clock
    given = stranger.form(*train) if stranger.given else None
    upgraded = calgp.upgrade(network, stranger.form(*held), train=given)
    took = time.perf_counter() - clock - seconds
    print(f"{name}, seed {seed}: trained {seconds:.0f} s, upgraded {took:.1f} s, {upgraded.fitted.scaling}")
    print("\n".join([*rows_of(network, upgraded, held, test), *auroc_rows(upgraded, test, images)]), flush=True)
    if save is not None:
        channels = x.shape[1]
        upgraded.save(
            save / file, source=stranger.source,
            mean=[stranger.mean] * channels, std=[stranger.std] * channels,
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kept", type=Path)
    parser.add_argument("--save", type=Path)
    given = parser.parse_args()
    for name in given.names or STRANGERS:
        check(name, STRANGERS[name], given.seed, given.kept, given.save)


if __name__ == "__main__":
    main()
