"""How fast is prediction, in one pass and with 50 samples, and what memory does it take?"""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import torch

from bench import straightforward
from bench.measure import Row, compare
from bench.step import CIFAR, MNIST, examples
from calgp.gp import Model, predict
from calgp.gp.laplace import shared
from calgp.methods import METHODS
from calgp.nets import BACKBONES, Task

QUESTION = "Prediction with 50 samples"
INTEGRATED = "Prediction in one pass, masks of W integrated"
MEMORY = "Peak memory of prediction"
BUDGET = 512  # MB
SAMPLES = 50


def masked_model(granularity: str, method: str = "cnn-gp-sorf-paper", backbone: str = "lenet", task=MNIST) -> Model:
    torch.manual_seed(0)
    return dataclasses.replace(METHODS[method], granularity=granularity).build(task, BACKBONES[backbone])


def run(quick: bool) -> list[Row]:
    x, _ = examples(MNIST, 100)
    rows = []
    for granularity, reach in (("element", 3.0), ("channel", 8.0)):
        torch.manual_seed(0)
        network = straightforward.LeNet(channel=granularity == "channel")
        plain = straightforward.Model(network, straightforward.GP(4096, 4096, 10, sorf=True)).eval()
        model = masked_model(granularity)
        rows += compare(
            QUESTION,
            f"LeNet, SORF, {granularity} masks, 100 images",
            ("calgp.predict", lambda model=model: predict(model, x, passes=SAMPLES)),
            {"a loop of 50 passes, plain PyTorch": lambda plain=plain: plain.predict(x, SAMPLES)},
            reach={"a loop of 50 passes, plain PyTorch": reach},
            rounds=5,
        )
    rows += single_pass(x)
    x, _ = examples(CIFAR, 50)
    torch.manual_seed(0)
    plain = straightforward.Model(straightforward.ResNet(), straightforward.GP(64, 64, 10, sorf=True)).eval()
    model = masked_model("element", backbone="resnet", task=CIFAR)
    rows += compare(
        QUESTION,
        "ResNet(5), SORF, element masks, 50 images",
        ("calgp.predict", lambda: predict(model, x, passes=SAMPLES)),
        {"a loop of 50 passes, plain PyTorch": lambda: plain.predict(x, SAMPLES)},
        rounds=3,
    )
    return rows + one_pass() + memory(quick)


def one_pass() -> list[Row]:
    """Against the plain CNN's only pass, and against 50 samples of the same model."""
    cnn, samples = "plain CNN, its one pass", "50 samples of the same model"
    rows = []
    for network, name, (channels, side) in (("lenet", "LeNet", (1, 28)), ("resnet", "ResNet(5)", (3, 32))):
        for classes in (10, 100):
            task = Task(channels, side, side, classes)
            torch.manual_seed(0)
            model, plain = (METHODS[method].build(task, BACKBONES[network]) for method in ("cnn-gp-sorf", "cnn"))
            x, _ = examples(task, 100)
            rows += compare(
                INTEGRATED,
                f"{name}, 100 images, {classes} classes",
                ("CNN+GP(SORF), one pass", lambda model=model, x=x: predict(model, x, passes=1)),
                {
                    cnn: lambda plain=plain, x=x: predict(plain, x, passes=1),
                    samples: lambda model=model, x=x: predict(model, x, passes=SAMPLES, engine="samples"),
                },
                reach={cnn: 1 / 1.3, samples: 30.0},
                rounds=5,
            )
    return rows


def single_pass(x: torch.Tensor) -> list[Row]:
    """The same random features with a closed-form Gaussian over W: mean and variance in one pass of the network."""
    torch.manual_seed(0)
    model = METHODS["cnn-laplace"].build(MNIST, BACKBONES["lenet"])
    with torch.no_grad():
        model.gp.fit([model.features(model.stem(x))], shared)
    masked = masked_model("element")
    return compare(
        QUESTION,
        "LeNet, SORF, 100 images, 1,024 frequencies",
        ("last-layer Laplace, one pass", lambda: predict(model, x, passes=SAMPLES)),
        {"calgp.predict, element masks": lambda: predict(masked, x, passes=SAMPLES)},
        rounds=5,
    )


def memory(quick: bool) -> list[Row]:
    """What prediction adds to the memory of the process, each time in a process of its own."""
    rows: list[Row] = []
    if not Path("/proc/self/clear_refs").exists():
        return rows  # only Linux tells
    for granularity in ("element", "channel"):
        one = peak(1, 100, granularity)
        for samples, batch in ((50, 100), (500, 100), (50, 1000)):
            found = peak(samples, batch, granularity)
            alone = one if batch == 100 else peak(1, batch, granularity)
            allowed = max(1.5 * alone, BUDGET)
            rows.append(
                Row(
                    MEMORY,
                    f"LeNet, {granularity} masks, {samples} samples, batch {batch:,}",
                    "calgp.predict",
                    f"max(1.5 × one sample, {BUDGET} MB)",
                    allowed / found,
                    allowed / found,
                    allowed / found,
                    0.0,
                    1.0,
                    f"{found:.0f} MB; one sample takes {alone:.0f} MB",
                )
            )
    return rows


def peak(samples: int, batch: int, granularity: str) -> float:
    """MB that `predict` adds to the peak of a fresh process."""
    command = [sys.executable, "-m", "bench.prediction", str(samples), str(batch), granularity]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)  # noqa: S603


def _peak_here(samples: int, batch: int, granularity: str) -> float:
    model, (x, _) = masked_model(granularity), examples(MNIST, batch)
    predict(model, x[:1], passes=1)  # what the first call of anything allocates
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _status("VmRSS")
    predict(model, [(x, torch.arange(batch))], passes=samples)
    return max(_status("VmHWM") - before, 1.0)


def _status(name: str) -> float:
    """A line of /proc/self/status, in MB (Linux)."""
    text = Path("/proc/self/status").read_text()
    return int(next(line for line in text.splitlines() if line.startswith(name)).split()[1]) / 1024


if __name__ == "__main__":
    print(json.dumps(_peak_here(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])))
