"""What `calgp.upgrade` does to plain PyTorch networks of many builds, against what it promises (CALGP_DATA).

python tools/check_upgrade.py [--posterior gp] [--kept FOLDER] [NAME …]

Each network is trained here for a minute of a core at most, and upgraded as docs/guides/trained-model.md says. On test
images: are the labels unchanged, are MNLL and ECE no worse than with a temperature alone (fitted on the same half of
the hold-out, and on all of it), and is the AUROC of the outlier score above that of the maximum probability? `--kept`
keeps trained weights there, so that a second look costs no training. A line with `!` breaks a promise beyond chance.
`unseen` is the MNLL of the half of the hold-out that chose nothing: by it posteriors are compared.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

import calgp
from calgp import metrics
from calgp.data import load
from calgp.data.images import to_unit_interval
from calgp.posthoc.calibration import Temperature
from calgp.upgraded import UpgradedClassifier

Pair = tuple[Tensor, Tensor]
GREY, COLOUR = "mnist", "cifar10"


class Functional(nn.Module):
    """Activations and pooling by functions, as many write it; batch norm, and dropout in front of the last layer."""

    def __init__(self, classes: int, drop: float = 0.0, bias: bool = True) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 16, 5), nn.BatchNorm2d(16)
        self.second, self.hidden = nn.Conv2d(16, 32, 5), nn.Linear(512, 64)
        self.drop, self.head = nn.Dropout(drop), nn.Linear(64, classes, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.first(x))), 2)
        x = F.max_pool2d(F.relu(self.second(x)), 2)
        return self.head(self.drop(F.relu(self.hidden(x.flatten(1)))))


class Residual(nn.Module):
    """Convolutions with a shortcut, batch norm, global average pooling: no hidden linear layer."""

    def __init__(self, classes: int, channels: int, width: int = 32) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(channels, width, 3, stride=2, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        self.block = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width),
        )  # fmt: skip
        self.wide = nn.Sequential(nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.BatchNorm2d(2 * width))
        self.fc = nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = F.relu(self.wide(F.relu(x + self.block(x))))
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Attention(nn.Module):
    """Patches, one layer of a transformer, layer norm, a mean over patches; logits under their name."""

    def __init__(self, classes: int, width: int = 48) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 7, stride=7)
        self.layer = nn.TransformerEncoderLayer(width, 4, 96, dropout=0.1, batch_first=True, norm_first=True)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)
        self.place = nn.Parameter(0.1 * torch.randn(16, width))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        tokens = self.layer(self.patches(x).flatten(2).mT + self.place)
        return {"logits": self.head(self.norm(tokens).mean(1))}


class Sharp(nn.Module):
    """A network whose logits are many times as large as they should be."""

    def __init__(self, network: nn.Module, factor: float) -> None:
        super().__init__()
        self.network, self.factor = network, factor

    def sharpen(self) -> None:
        head = [each for each in self.network.modules() if isinstance(each, nn.Linear)][-1]
        with torch.no_grad():
            for each in head.parameters():
                each *= self.factor

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)


def mlp(*more: nn.Module, classes: int = 10, activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    layers = [nn.Flatten(), nn.Linear(784, 200), activation(), nn.Linear(200, 100), activation()]
    return nn.Sequential(*layers, nn.Linear(100, classes), *more)


def plain_cnn(classes: int, channels: int = 3) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 48, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.3), nn.LazyLinear(128), nn.ReLU(), nn.Linear(128, classes),
    )  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A network, what it is trained on, and how it is handed to `upgrade`."""

    build: Callable[[], nn.Module]
    source: str = GREY
    classes: tuple[int, ...] = ()  # none: all
    train: int = 4000
    held_out: int = 1000
    epochs: int = 8
    rate: float = 1e-3
    noise: float = 0.0  # share of training labels that are drawn anew
    given: bool = True  # whether `upgrade` sees the training images
    finish: Callable[[nn.Module], nn.Module] = lambda network: network


def _sharpened(network: nn.Module) -> nn.Module:
    assert isinstance(network, Sharp)  # noqa: S101
    network.sharpen()
    return network


CASES = {
    "mlp": Case(mlp),
    "mlp, hold-out alone": Case(mlp, given=False),
    "mlp, 200 held out": Case(mlp, held_out=200),
    "mlp, 60 held out": Case(mlp, held_out=60),
    "mlp, tanh": Case(lambda: mlp(activation=nn.Tanh)),
    "mlp, gelu, 500 images": Case(lambda: mlp(activation=nn.GELU), train=500, epochs=40),
    "log-softmax": Case(lambda: mlp(nn.LogSoftmax(1))),
    "softmax": Case(lambda: mlp(nn.Softmax(1))),
    "cnn, batch norm, functional": Case(lambda: Functional(10), epochs=5),
    "cnn, dropout": Case(lambda: Functional(10, drop=0.5), epochs=6),
    "cnn, no bias": Case(lambda: Functional(10, bias=False), epochs=5),
    "cnn, DataParallel": Case(lambda: nn.DataParallel(Functional(10, drop=0.2)), epochs=5),
    "cnn, half-trained": Case(lambda: Functional(10), epochs=1, train=1000),
    "cnn, over-trained": Case(lambda: Functional(10), epochs=40, train=1000),
    "cnn, label noise": Case(lambda: Functional(10), epochs=15, train=3000, noise=0.3),
    "cnn, two classes": Case(lambda: Functional(2), classes=(3, 8), train=1500, held_out=600),
    "cnn, digits 0-6": Case(lambda: Functional(7), classes=tuple(range(7)), epochs=6),
    "cnn, sharp logits": Case(lambda: Sharp(Functional(10), 20.0), epochs=4, finish=_sharpened),
    "residual, global pooling": Case(lambda: Residual(10, 1), epochs=6),
    "attention, a table": Case(lambda: Attention(10), epochs=12),
    "double precision": Case(lambda: mlp().double(), train=2000),
    "training mode": Case(lambda: Functional(10, drop=0.5), epochs=6, finish=lambda network: network.train()),
    "cifar, residual": Case(lambda: Residual(10, 3), source=COLOUR, train=6000, epochs=8),
    "cifar, cnn": Case(lambda: plain_cnn(10), source=COLOUR, train=5000, epochs=8),
    "cifar, over-trained": Case(lambda: plain_cnn(10), source=COLOUR, train=2000, epochs=30),
    "cifar, two classes": Case(lambda: plain_cnn(2), source=COLOUR, classes=(3, 5), train=3000, epochs=10),
    "cifar100": Case(lambda: plain_cnn(100), source="cifar100", train=8000, held_out=2000, epochs=8),
}


@cache
def images(source: str, split: str) -> Pair:
    found = load(source, split)
    return found.x, found.y


def chosen(pair: Pair, classes: tuple[int, ...], seed: int = 0) -> Pair:
    """Only those classes, numbered anew, in a random order."""
    x, y = pair
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    if classes:
        order = order[torch.isin(y[order], torch.tensor(classes))]
        y = torch.searchsorted(torch.tensor(classes), y.clamp(min(classes), max(classes)))
    return x[order], y[order]


def outside(case: Case) -> dict[str, Tensor]:
    """Far: letters, noise. Near: classes that were left out, or of the other CIFAR set; the same images, damaged."""
    like = images(case.source, "test")[0]
    noise = torch.randint(256, (1000, *like.shape[1:]), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    found = {"noise": noise}
    letters = images("notmnist", "test")[0][:2000]
    if case.source != GREY:
        letters = load("notmnist", "test", size=32, colour="rgb").x[:2000]
    found["letters"] = letters
    if case.classes and case.source == GREY:
        x, y = images(GREY, "test")
        found["near: other digits"] = x[~torch.isin(y, torch.tensor(case.classes))][:2000]
    if case.source != GREY:
        found["near: other CIFAR"] = images({COLOUR: "cifar100", "cifar100": COLOUR}[case.source], "test")[0][:2000]
    if case.source == GREY and not case.classes:
        found["near: upside down"] = like[torch.isin(images(GREY, "test")[1], torch.tensor([2, 3, 4, 5, 7]))].flip(2)
    return {name: to_unit_interval(x) for name, x in found.items()}


def trained(name: str, case: Case, data: Pair, kept: Path | None) -> nn.Module:
    torch.manual_seed(0)
    network = case.build()
    dtype = next(network.parameters()).dtype
    with torch.no_grad():
        network(to_unit_interval(data[0][:2]).to(dtype))
    path = None if kept is None else kept / f"{name.replace(' ', '-').replace(',', '')}.safetensors"
    if path is not None and path.is_file():
        network.load_state_dict(load_file(path))
        return case.finish(network.eval())
    x, y = to_unit_interval(data[0]).to(dtype), data[1]
    anew = torch.rand(len(y)) < case.noise
    y = torch.where(anew, torch.randint(int(y.max()) + 1, y.shape), y)
    optimiser = torch.optim.Adam(network.parameters(), lr=case.rate)
    network.train()
    for _ in range(case.epochs):
        for rows in torch.randperm(len(y)).split(64):
            output = network(x[rows])
            output = output["logits"] if isinstance(output, dict) else output
            output = output.log() if name == "softmax" else output
            optimiser.zero_grad()
            F.cross_entropy(output, y[rows]).backward()  # of log-probabilities it is the same
            optimiser.step()
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({key: value.contiguous() for key, value in network.state_dict().items()}, path)
    return case.finish(network.eval())


def check(name: str, case: Case, kept: Path | None, posterior: str) -> list[str]:
    """Prints what was found; the promises that are broken beyond chance."""
    x, y = chosen(images(case.source, "train"), case.classes)
    train = x[: case.train], y[: case.train]
    held = to_unit_interval(x[case.train : case.train + case.held_out]), y[case.train : case.train + case.held_out]
    test_x, test_y = chosen(images(case.source, "test"), case.classes)
    test = to_unit_interval(test_x[:5000]), test_y[:5000]
    clock = time.perf_counter()
    network = trained(name, case, train, kept)
    middle = time.perf_counter()
    given = (to_unit_interval(train[0]), train[1]) if case.given else None
    upgraded = calgp.upgrade(network, held, train=given, posterior=posterior)
    seconds = middle - clock, time.perf_counter() - middle
    print(f"{name}: trained {seconds[0]:.0f} s, upgraded {seconds[1]:.1f} s, {upgraded.fitted.scaling}")
    print(f"   {upgraded.fitted.structure} {upgraded.fitted.numbers}, unseen {unseen(upgraded, held):.4f}")
    broken = []
    if not same_labels(network, upgraded, test[0]):
        broken.append("labels changed")
    broken += probabilities(upgraded, held, test)
    found = {label: upgraded.evaluate(test, outside=other).ood for label, other in outside(case).items()}
    for label, scores in found.items():
        plain, mine = scores["network-confidence"].auroc, scores[upgraded.fitted.outlier].auroc
        mark = " " if mine > plain else "!"
        print(f" {mark} {label:20} " + ", ".join(f"{score} {each.auroc:.4f}" for score, each in scores.items()))
        if mine <= plain:
            broken.append(f"AUROC {label} {mine:.4f} against {plain:.4f}")
    return [f"{name}: {each}" for each in broken]


def unseen(upgraded: UpgradedClassifier, held: Pair) -> float:
    """MNLL of the second half of the hold-out, with the temperature of the first."""
    order = torch.randperm(len(held[1]), generator=torch.Generator().manual_seed(0))
    rows = order[max(1, round(0.5 * len(order))) :]
    log_p = upgraded.as_decided(upgraded.predict(held[0][rows]).predictive).log_probs
    return -log_p.gather(1, held[1][rows, None]).mean().item()


def probabilities(upgraded: UpgradedClassifier, held: Pair, test: Pair) -> list[str]:
    """MNLL and ECE beside those of a temperature: of the same half of the hold-out, and of all of it."""
    network = upgraded.network
    (_, f), (_, g) = network(test[0]), network(held[0])
    f, g = f.double(), g.double()
    whole = Temperature.fit(g.log_softmax(1), held[1])
    rows = {
        "before": f.log_softmax(1),
        "temperature, half": (f / upgraded.fitted.temperature).log_softmax(1),
        "temperature, all": whole.apply(f.log_softmax(1)),
        "upgraded": upgraded.predict(test[0]).predictive.log_probs,
    }
    outcomes = {label: metrics.outcomes(each.float(), test[1]) for label, each in rows.items()}
    broken = []
    for label, each in outcomes.items():
        scores = metrics.scores(each)
        against = metrics.paired_scores(outcomes["upgraded"], each, seed=0)
        told = ", ".join(
            f"{key} {against[key].value:+.4f} ± {against[key].half:.4f}" for key in ("mnll", "ece") if key in against
        )
        print(f"   {label:20} ERR {scores.err:.4f} MNLL {scores.mnll:.4f} ECE {scores.ece:.4f}; upgraded less: {told}")
        if label.startswith("temperature"):
            worse = [key for key in ("mnll", "ece") if against[key].value > 0 and against[key].is_clear]
            broken += [f"{key} clearly worse than {label}: {against[key].value:+.4f}" for key in worse]
    return broken


def same_labels(network: nn.Module, upgraded: UpgradedClassifier, x: Tensor) -> bool:
    dtype, network = next(network.parameters()).dtype, network.eval()
    with torch.no_grad():
        given = [network(part.to(dtype)) for part in x.split(500)]
    before = torch.cat([each["logits"] if isinstance(each, dict) else each for each in given]).argmax(1)
    return bool((upgraded.predict(x).predictive.labels == before).all())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--kept", type=Path)
    parser.add_argument("--posterior", choices=("laplace", "gp"), default="laplace")
    given = parser.parse_args()
    broken = []
    for name in given.names or CASES:
        broken += check(name, CASES[name], given.kept, given.posterior)
    print("\n".join(["", f"{len(broken)} promises broken:", *broken] if broken else ["", "All promises hold."]))


if __name__ == "__main__":
    main()
