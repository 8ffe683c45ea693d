"""The default against its competitors on many image sets, each method without a single option.

    python tools/default_table.py run WORK [--sets NAME,…] [--methods NAME,…] [--seeds 0,1,2]
    python tools/default_table.py table

`run` trains what is missing, one after the other, and evaluates it on the whole test set; probabilities stay in WORK,
scores go to results/defaults. `table` writes the table into results/notes/defaults.md. CALGP_DATA names the folder with
MNIST, notMNIST, CIFAR-10 and CIFAR-100. `cnn` is `cnn-cal` without its temperature: one training. `--methods ensemble`
is the mean of three plain networks of the same images.
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import calgp
from calgp import metrics
from calgp.data import Images, load
from calgp.methods import METHODS
from calgp.nets import BACKBONES
from calgp.run import Run
from calgp.runs import Classifier, RunFolder, TrainingData
from calgp.training import train_run

RESULTS, PAGE = Path("results/defaults"), Path("results/notes/defaults.md")
DEFAULT = "cnn-gp-sorf"
TRAINED = (DEFAULT, "cnn-cal", "cnn-mcd")
ENSEMBLE = "ensemble"
COMPARED = (DEFAULT, "cnn", "cnn-cal", "cnn-mcd", ENSEMBLE)
Parts = tuple[Images, Images]


def named(source: str, test: str | None = None) -> Callable[[int], Parts]:
    return lambda seed: (load(source, "train"), load(test or source, "test"))


def some(source: str, n: int) -> Callable[[int], Parts]:
    return lambda seed: (load(source, "train").balanced(n, seed), load(source, "test"))


def letters(seed: int) -> Parts:
    rest, train = load("notmnist", "test").split(5000, seed)
    return train, rest


def imbalanced(seed: int) -> Parts:
    """Digits, 1,000 images of the first class down to 10 of the last, in equal ratios."""
    train = load("mnist", "train").balanced(10_000, seed)
    kept = [(train.y == q).nonzero().squeeze(1)[: round(1000 * 100 ** (-q / 9))] for q in range(10)]
    return train.take(torch.cat(kept).sort().values), load("mnist", "test")


def cats_and_dogs(seed: int) -> Parts:
    def two(images: Images) -> Images:
        found = images.take((images.y == 3) | (images.y == 5))
        return replace(found, y=(found.y == 5).long(), classes=("cat", "dog"))

    return two(load("cifar10", "train")).balanced(1000, seed), two(load("cifar10", "test"))


SETS: dict[str, tuple[str, Callable[[int], Parts]]] = {
    "digits": ("digits, 5,000", named("digits", "digits-large")),
    "mnist-1000": ("MNIST, 1,000", some("mnist", 1000)),
    "mnist-200": ("MNIST, 20 a class", some("mnist", 200)),
    "mnist-imbalanced": ("MNIST, 1,000 to 10 a class", imbalanced),
    "notmnist-5000": ("notMNIST, 5,000", letters),
    "cats-dogs-1000": ("CIFAR-10's cats and dogs, 1,000", cats_and_dogs),
    "cifar10-5000": ("CIFAR-10, 5,000", some("cifar10", 5000)),
    "cifar100-5000": ("CIFAR-100, 5,000", some("cifar100", 5000)),
    "mnist": ("MNIST, 60,000", named("mnist")),
    "cifar10": ("CIFAR-10, 50,000", named("cifar10")),
}


def scored(log_probs: torch.Tensor, y: torch.Tensor) -> dict[str, float]:
    return metrics.scores(metrics.outcomes(log_probs.double(), y)).to_dict()


def run_one(name: str, method: str, seed: int, work: Path) -> None:
    result = RESULTS / f"{name}.{method}.{seed}.json"
    if result.exists():
        return
    RESULTS.mkdir(parents=True, exist_ok=True)
    train, test = SETS[name][1](seed)
    start = time.perf_counter()
    trained = train_one(train, name, method, seed, work / f"{name}.{method}.{seed}")
    seconds = time.perf_counter() - start
    models = {method: trained}
    if method == "cnn-cal":
        models["cnn"] = Classifier.load(trained.folder, calibrated=False)
    for called, model in models.items():
        log_probs = predicted(model, test)
        torch.save(log_probs.float(), work / f"{name}.{called}.{seed}.pt")
        found = {
            "set": name, "method": called, "seed": seed, "scores": scored(log_probs, test.y),
            "steps": model.card.run.steps, "backbone": model.card.run.backbone_label, "training_images": len(train),
            "test_images": len(test), "passes": str(model.passes()), "seconds": round(seconds),
            "calgp": calgp.__version__, "threads": torch.get_num_threads(), "date": time.strftime("%Y-%m-%d"),
        }  # fmt: skip
        result.with_name(f"{name}.{called}.{seed}.json").write_text(json.dumps(found, indent=1) + "\n")
        said = {key: round(value, 4) for key, value in found["scores"].items()}
        print(name, called, seed, said, f"{seconds:.0f} s", flush=True)


def train_one(train: Images, name: str, method: str, seed: int, path: Path) -> Classifier:
    run = Run(METHODS[method], BACKBONES["auto"], source=name.partition("-")[0], seed=seed)
    folder = RunFolder(path)
    return train_run(run, folder, data=TrainingData.cut(train, run), resume=folder.path.exists())


def predicted(model: Classifier, test: Images) -> torch.Tensor:
    parts = [(test.pixels(part), test.rows[part]) for part in test.parts(500)]
    return torch.cat([part.log_probs for part in model.predict_batches(parts, model.passes(), seed=0)])


def ensemble(name: str, work: Path) -> None:
    """Three plain networks of the same images, those of seed 0: the first is the table's, two are trained here."""
    result = RESULTS / f"{name}.{ENSEMBLE}.0.json"
    if result.exists():
        return
    run_one(name, "cnn-cal", 0, work)
    train, test = SETS[name][1](0)
    members = [torch.load(work / f"{name}.cnn.0.pt", weights_only=True)]
    for seed in (1, 2):
        path = work / f"{name}.member.{seed}"
        train_one(train, name, "cnn-cal", seed, path)
        members.append(predicted(Classifier.load(RunFolder(path), calibrated=False), test))
    mean = torch.stack(members).double().logsumexp(0) - math.log(len(members))
    found = {"set": name, "method": ENSEMBLE, "seed": 0, "scores": scored(mean, test.y), "test_images": len(test)}
    result.write_text(json.dumps(found, indent=1) + "\n")
    print(name, ENSEMBLE, found["scores"], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "table"])
    parser.add_argument("work", type=Path, nargs="?")
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--methods", default=",".join(TRAINED))
    parser.add_argument("--seeds", default="0,1,2")
    asked = parser.parse_args()
    if asked.what == "table":
        return write_table()
    asked.work.mkdir(parents=True, exist_ok=True)
    for seed in map(int, asked.seeds.split(",")):
        for name in asked.sets.split(","):
            for method in asked.methods.split(","):
                if method == ENSEMBLE:
                    ensemble(name, asked.work)
                else:
                    run_one(name, method, seed, asked.work)


def write_table() -> None:
    """Mean over seeds of each set and method, and the mean rank over the sets that have all methods."""
    found = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    lines = [
        "# The default against its competitors, each without a single option",
        "",
        "`python tools/default_table.py run WORK`, then `table`. Every method has the same network, steps and",
        "augmentation, chosen by the images. Mean over seeds; ± is half of the range over seeds, if there are several.",
        "Scores of the whole test set. The ensemble has three plain networks, trained on the same images (seed 0).",
        "Minutes are by the clock of a machine with other work.",
        "What is not listed was not run.",
        "",
        "| images | method | seeds | ERR | MNLL | ECE | minutes |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    means: dict[str, dict[str, float]] = {}
    for name, (title, _) in SETS.items():
        rows = {m: [each for each in found if (each["set"], each["method"]) == (name, m)] for m in COMPARED}
        means[name] = {m: _mean(rows[m], "mnll") for m in COMPARED if rows[m]}
        for method in means[name]:
            cells = [_cell(rows[method], key) for key in ("err", "mnll", "ece")]
            minutes = sum(each.get("seconds", 0) for each in rows[method]) / len(rows[method]) / 60
            shown = f"{minutes:.1f}" if minutes else ""
            lines.append(f"| {title} | {method} | {len(rows[method])} | {' | '.join(cells)} | {shown} |")
    for count in range(3, len(COMPARED) + 1):
        if said := _ranks(means, COMPARED[:count]):
            lines += ["", said]
    lines.append("")
    PAGE.write_text("\n".join(lines))


def _ranks(means: dict[str, dict[str, float]], methods: tuple[str, ...]) -> str | None:
    """The mean rank in MNLL of these methods, over the sets that have all of them."""
    whole = [sorted(methods, key=found.__getitem__) for found in means.values() if set(methods) <= set(found)]
    if not whole:
        return None
    ranks = (f"{m} {sum(order.index(m) + 1 for order in whole) / len(whole):.2f}" for m in methods)
    return f"Mean rank in MNLL over the {len(whole)} sets that have all of these methods: {', '.join(ranks)}."


def _mean(rows: list[dict[str, Any]], key: str) -> float:
    return sum(row["scores"][key] for row in rows) / len(rows)


def _cell(rows: list[dict[str, Any]], key: str) -> str:
    values = [row["scores"][key] for row in rows]
    half = f" ± {(max(values) - min(values)) / 2:.4f}" if len(values) > 1 else ""
    return f"{_mean(rows, key):.4f}{half}"


if __name__ == "__main__":
    main()
