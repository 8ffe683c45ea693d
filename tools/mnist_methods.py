"""All methods on MNIST with LeNet: run what is missing, two at a time, and make the table of results/notes/results.md.

    python tools/mnist_methods.py choose WORK    the learning rates, on a hold-out of the training images
    python tools/mnist_methods.py run WORK       train and evaluate; what has been done is not done again
    python tools/mnist_methods.py costs          what a step and a prediction cost, all methods in turn, on one thread
    python tools/mnist_methods.py table          the table, from results/mnist-methods

Weights stay in WORK; run.json, scores, logs and times go to results/mnist-methods, so that the table can grow over days
and machines. CALGP_DATA names the folder with MNIST's files.
"""

import json
import re
import resource
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

RESULTS, PAGE = Path("results/mnist-methods"), Path("results/notes/results.md")
STEPS = {1000: 1000, 10_000: 2000, 60_000: 5000}  # one budget a size, for all methods
SEEDS = {1000: (0, 1), 10_000: (0, 1), 60_000: (0,)}
RATES = ("1e-3", "3e-3"), ("3e-3", "6e-3")  # tried: for points, and for methods whose masks want larger ones

# name → method, options, learning rate (chosen by `choose`, whose numbers are in results/mnist-methods/rates.json)
METHODS: dict[str, tuple[str, dict[str, Any], str]] = {
    "CNN": ("cnn", {}, "3e-3"),
    "CNN+CAL": ("cnn-cal", {}, "3e-3"),
    "CNN+MCD": ("cnn-mcd", {}, "6e-3"),
    "CNN+GP(RF)": ("cnn-gp-rf-paper", {"n_rf": 1024, "keep_omega": 0.9}, "6e-3"),
    "CNN+GP(SORF)": ("cnn-gp-sorf-paper", {}, "6e-3"),
    "GPDNN": ("gpdnn", {}, "3e-3"),
    "GPDNN+MCD": ("gpdnn-mcd", {}, "6e-3"),
    "SVDKL": ("svdkl", {}, "3e-3"),
    "CNN+Laplace": ("cnn-laplace", {"lengthscale": 1.0, "covariance": "gaussian"}, "3e-3"),
    "CNN+GP mean-field": ("cnn-gp-mf", {"lengthscale": 1.0, "deviation": 0.03}, "6e-3"),
    "CGP": ("cgp", {}, "1e-2"),
}
SMALL = {"CGP"}  # not on all 60,000 images: a step takes three times as long as the others'


def arguments(name: str, size: int, seed: int, rate: str, steps: int) -> list[str]:
    method, options, _ = METHODS[name]
    given = ["--source", "mnist", "--method", method, "--backbone", "lenet", "--steps", str(steps), "--seed", str(seed)]
    given += ["--lr", rate, "--schedule", "one-cycle", "--threads", "1"]
    given += [] if size == 60_000 else ["--train-size", str(size)]
    return given + [part for key, value in options.items() for part in ("--set", f"method.{key}={value}")]


def calgp(*parts: str) -> float:
    """Run a command of calgp; processor seconds are measured by the wall, on a thread of its own."""
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "calgp", *parts], capture_output=True, text=True)  # noqa: S603
    if done.returncode:
        raise RuntimeError(f"calgp {' '.join(parts)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return time.perf_counter() - start


def choose(work: Path) -> None:
    """Hold-out MNLL of two learning rates each: 300 steps on 4,500 images, 500 held out."""
    record = RESULTS / "rates.json"
    found: dict[str, dict[str, float]] = json.loads(record.read_text()) if record.is_file() else {}

    def one(name: str, rate: str) -> None:
        if rate in found.get(name, {}):
            return
        folder = work / "rates" / f"{slug(name)}-{rate}"
        shutil.rmtree(folder, ignore_errors=True)
        try:
            calgp("train", *arguments(name, 5000, 123, rate, 300), "--holdout", "0.1", "--out", str(folder))
        except RuntimeError as error:
            print(f"{name} at {rate} failed: {error}", flush=True)
            return
        found.setdefault(name, {})[rate] = [line for line in lines(folder) if line["kind"] == "holdout"][-1]["mnll"]
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text(json.dumps(found, indent=1) + "\n")
        print(name, rate, found[name][rate], flush=True)

    known = ("CNN+CAL", "CNN+GP(RF)", "CNN+GP(SORF)", "CGP")  # as the CNN's; chosen before; on the embedded digits
    names = [name for name in METHODS if name not in known]
    jobs = [(name, rate) for name in names for rate in RATES["MCD" in name or "mean-field" in name]]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda job: one(*job), jobs))


def run(work: Path) -> None:
    jobs = [(name, 10_000, 0) for name in METHODS] + [("CNN+MCD", 60_000, 0), ("GPDNN+MCD", 60_000, 0)]
    jobs += [(name, size, 0) for size in (1000, 60_000) for name in METHODS]
    jobs += [(name, size, seed) for size in (1000, 10_000) for seed in SEEDS[size][1:] for name in METHODS]
    jobs = [(name, size, seed) for name, size, seed in dict.fromkeys(jobs) if size < 60_000 or name not in SMALL]

    def one(job: tuple[str, int, int]) -> None:
        name, size, seed = job
        key = f"{slug(name)}-{size}-seed{seed}"
        kept = RESULTS / key
        if (kept / "times.json").is_file():
            return
        folder = work / key
        given = arguments(name, size, seed, METHODS[name][2], STEPS[size])
        begun = (folder / "run.json").is_file() and not (folder / "model.safetensors").is_file()
        try:
            if begun:
                calgp("train", "--resume", str(folder), "--threads", "1")
            elif not (folder / "model.safetensors").is_file():
                calgp("train", *given, "--out", str(folder))
            trained = sum(each["seconds"] for each in lines(folder) if each["kind"] == "train")
            predicted = calgp("evaluate", str(folder), "--threads", "1")
        except RuntimeError as error:
            print(f"{key} failed: {error}", flush=True)
            return
        kept.mkdir(parents=True, exist_ok=True)
        for file in [*folder.glob("*.json"), folder / "log.jsonl"]:
            (kept / file.name).write_text(file.read_text().replace(str(folder), folder.name))  # no paths of a machine
        times = {"name": name, "train_seconds": round(trained), "predict_seconds": round(predicted)}
        (kept / "times.json").write_text(json.dumps(times | {"parameters": parameters(folder)}) + "\n")
        print(key, times, flush=True)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(one, jobs))
    print(f"{resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime:.0f} s of processor time")


def costs() -> None:
    """Processor seconds of one thread: of a step (20 after 5) and of 500 predictions, S = 50; the least of three turns.

    Runs beside each other spoil times by the wall, so that the table has these, times the steps and the images.
    """
    import torch

    from calgp.data import load
    from calgp.gp import Bound
    from calgp.nets import Task
    from calgp.runs import Run, RunFolder, TrainingData, open_device, score
    from calgp.runs.build import build
    from calgp.training import fit
    from calgp.training.loop import make_optimiser

    torch.set_num_threads(1)
    fabric, test = open_device("cpu"), load("mnist", "test").balanced(500, seed=0)

    def measured(run: Run) -> dict[str, float]:
        train, task = TrainingData.of(run, None).train, Task(1, 28, 28, classes=10)
        model, generator = build(run, task), torch.Generator().manual_seed(0)
        run.method.start(model, train, generator=generator)
        bound, optimiser = fabric.setup(Bound(model, len(train)), make_optimiser(run, model))
        clock = [time.process_time() for _ in fit(bound, optimiser, train, run, fabric=fabric)]
        start = time.process_time()
        score(model, test, passes=50, seed=0)
        predicted = (time.process_time() - start) / len(test)
        return {"step": (clock[-1] - clock[4]) / (len(clock) - 5), "image": predicted}

    found: dict[str, list[dict[str, float]]] = {name: [] for name in METHODS}
    for _ in range(3):
        for name, turns in found.items():
            run = RunFolder(RESULTS / f"{slug(name)}-10000-seed0").card().run
            turns.append(measured(replace(run, steps=25)))
            print(name, turns[-1], flush=True)
    least = {name: {key: min(turn[key] for turn in turns) for key in turns[0]} for name, turns in found.items()}
    (RESULTS / "costs.json").write_text(json.dumps(least, indent=1) + "\n")


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def parameters(folder: Path) -> int:
    from calgp.runs import RunFolder

    return sum(p.numel() for p in RunFolder(folder).model().parameters() if p.requires_grad)


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def table() -> None:
    """One row a method and size, means over seeds; written between the markers of results/notes/results.md."""
    rows: dict[tuple[int, str], list[dict[str, float]]] = {}
    cost = json.loads((RESULTS / "costs.json").read_text())
    for file in sorted(RESULTS.glob("*/times.json")):
        folder, times = file.parent, json.loads(file.read_text())
        card = json.loads((folder / "run.json").read_text())
        size = card["run"].get("train_size") or 60_000
        calibrated = sorted(folder.glob("scores-mnist.*.json"))
        scores = json.loads((calibrated[0] if calibrated else folder / "scores-mnist.json").read_text())["scores"]
        name = times["name"]
        spent = {"train": STEPS[size] * cost[name]["step"], "predict": 10_000 * cost[name]["image"]}
        rows.setdefault((size, name), []).append(scores | spent | {"parameters": times["parameters"]})
    lines = [
        "| training images | method | seeds | ERR | MNLL | ECE | BRIER | training, s | prediction, s | parameters |",
        "| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    order = list(METHODS)
    for size, name in sorted(rows, key=lambda key: (key[0], order.index(key[1]) if key[1] in order else 99, key[1])):
        runs = rows[size, name]
        mean = {key: sum(run[key] for run in runs) / len(runs) for key in runs[0]}
        scores = " | ".join(f"{mean[key]:.4f}".lstrip("0") for key in ("err", "mnll", "ece", "brier"))
        costs = f"{mean['train']:.0f} | {mean['predict']:.0f} | {mean['parameters']:,.0f}"
        lines.append(f"| {size:,} | {name} | {len(runs)} | {scores} | {costs} |")
    text = PAGE.read_text()
    block = re.compile(r"(<!-- mnist-methods -->\n).*?(<!-- /mnist-methods -->)", re.S)
    PAGE.write_text(block.sub(lambda match: match[1] + "\n".join(lines) + "\n" + match[2], text))
    print("\n".join(lines))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["choose", work]:
            choose(Path(work))
        case ["run", work]:
            run(Path(work))
        case ["costs"]:
            costs()
        case ["table"]:
            table()
        case _:
            sys.exit(__doc__)
