"""Kill calgp with SIGKILL at many moments, go on each time, and compare the end with that of a process left in peace.

    python tests/kills.py --kills 20                                        # as in CI
    python tests/kills.py --kills 200 --operations 12 --command-lines 4     # make kill

This process imports torch and computes nothing; each attempt is a fork of it, so that it starts at once. Moments are
drawn from --seed: a time (uniform over the time that the whole takes), or a file operation in the folder
(sys.addaudithook), before which the process kills itself.
"""

import os

if __name__ == "__main__":  # before torch: a process with threads should not be forked
    os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import json
import logging
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from safetensors.torch import load_file

from calgp.data import load
from calgp.paper import Cell, run_missing
from calgp.paper.scales import MNIST
from calgp.runs import Run, RunFolder, from_json
from calgp.runs.writing import LOCK, PART
from calgp.search.jobs import Paths
from calgp.training import run_training as training
from calgp.training import train_run
from folders import evaluate

OPERATIONS = {"open", "os.rename", "os.remove", "os.mkdir", "tempfile.mkstemp"}
PATIENCE = 300.0  # seconds that an attempt may take on a busy machine
MOST = 8  # kills of one work before it is left to end


def small(**options: Any) -> Run:
    backbone = {"name": "lenet", "channels": [2, 4], "hidden": [8]}
    return from_json({"backbone": backbone, "train_size": 100, "steps": 6, "batch_size": 25, "size": 14} | options)


RESNET = {"name": "resnet", "n": 1, "widths": [2, 2, 4], "pad_to": 16}
TRAININGS = {  # what each has that others have not
    "SORF, hold-out": small(method="cnn-gp-sorf", holdout=0.2, steps=21),
    "GPDNN: begins with k-means": small(method={"name": "gpdnn", "inducing": 10}, optimiser="sgd", learning_rate=1e-4),
    "Laplace: ends with a precision": small(method="cnn-laplace"),
    "CNN+CAL: ends with a temperature": small(method="cnn-cal"),
    "ResNet: batch norm": small(method="cnn-mcd", backbone=RESNET),
}
REPRODUCED = small(method="cnn-gp-sorf", size=None, steps=4)
CELL = Cell("SORF", MNIST, None, (REPRODUCED, replace(REPRODUCED, seed=1)), samples=2)


def fabric() -> Fabric:
    return Fabric(accelerator="cpu", devices=1)


def training_of(run: Run) -> Callable[[Path], None]:
    def work(path: Path) -> None:
        folder = RunFolder(path / "run")
        begun = (folder.path / "run.json").is_file()
        if not folder.finished or folder.interrupted:
            train_run(run, folder, fabric(), resume=begun, checkpoint_seconds=0.0)

    return work


def evaluation(path: Path) -> None:
    """Of a run that the reference has trained: inside and outside images."""
    folder = RunFolder(path / "run")
    for source in ("digits", "letters"):
        name = folder.path / f"scores-{source}.json"
        if not name.is_file():
            images = load(source, "test", size=14).take(torch.arange(100))
            evaluate(folder, fabric(), source=source, images=images, passes=20)


def reproduction(path: Path) -> None:
    training.CHECKPOINT_SECONDS = 0.0
    failures = run_missing([CELL], Paths(path / "runs", keep=path / "kept"))
    if failures:
        raise RuntimeError(str(failures))


@dataclass(frozen=True)
class Work:
    """Something that may be killed and done again until it is done, in a folder that begins as `begin` makes it."""

    kind: str
    name: str
    do: Callable[[Path], None]
    begin: Callable[[Path], object] = Path.mkdir


def works(trained: Path) -> list[Work]:
    return [
        *(Work("training", name, training_of(run)) for name, run in TRAININGS.items()),
        Work("evaluation", "inside and outside", evaluation, lambda path: shutil.copytree(trained, path)),
        Work("reproduction", "two runs, kept", reproduction),
    ]


# doing it, with and without kills ------------------------------------------------------------------------------------


def fork(work: Work, path: Path, operation: int | None = None) -> int:
    """A process that does the work; it kills itself before the given file operation in the folder, if there is one."""
    assert len(os.listdir("/proc/self/task")) == 1, "this process has threads and cannot be forked safely"
    pid = os.fork()
    if pid:
        return pid
    try:
        count_operations(path, operation)
        work.do(path)
        (path.parent / f"{path.name}.operations").write_text(str(counted))
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


counted = 0


def count_operations(path: Path, last: int | None) -> None:
    inside = str(path)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        global counted
        if event in OPERATIONS and str(arguments[0]).startswith(inside):
            counted += 1
            if counted == last:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def ended(pid: int, seconds: float) -> bool:
    """Whether the process ended by itself within so many seconds; if not, it is killed. A failure is raised."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return well(status)
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    return well(os.waitpid(pid, 0)[1])


def well(status: int) -> bool:
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return False
    if status:
        raise RuntimeError(f"an attempt failed (status {status}); its traceback is above")
    return True


def left(path: Path) -> str:
    """What a killed process has left, in words."""
    names = {file.name for file in path.rglob("*") if file.is_file()}
    part = ", and an unfinished file" if any(name.endswith(PART) for name in names) else ""
    for name, words in (
        ("checkpoint.safetensors", "a model and its checkpoint" if "model.safetensors" in names else "a checkpoint"),
        ("model.safetensors", "a model"),
        ("run.json", "run.json alone"),
    ):
        if name in names:
            return words + part
    return "nothing" + part


def killed_by_time(work: Work, path: Path, times: dict[str, float], draw: random.Random, most: int) -> list[str]:
    """Does the work with kills at random times; what each has left. `times` are how long each work takes at present."""
    found: list[str] = []
    clock = time.monotonic()
    while len(found) < most and not ended(fork(work, path), draw.uniform(0, times[work.name])):
        found.append(left(path))
    if not found:
        times[work.name] = time.monotonic() - clock
    if len(found) == most and not ended(fork(work, path), PATIENCE):
        raise RuntimeError(f"{work} does not come to its end")
    return found


def killed_at_operation(work: Work, path: Path, operation: int) -> list[str]:
    """Does the work, killed once before the given file operation; what that has left."""
    killed = not ended(fork(work, path, operation), PATIENCE)
    found = [left(path)] if killed else []
    if killed and not ended(fork(work, path), PATIENCE):
        raise RuntimeError(f"{work} does not come to its end")
    return found


# what must be the same ---------------------------------------------------------------------------------------------


def content(path: Path) -> dict[str, Any]:
    """All files below a folder, less what a clock says. Tensors as their bytes."""
    found: dict[str, Any] = {}
    for file in sorted(path.rglob("*")):
        name = str(file.relative_to(path))
        if file.is_dir() or file.name == LOCK:
            continue
        if file.suffix == ".safetensors":
            found[name] = {key: value.numpy().tobytes() for key, value in load_file(file).items()}
        elif file.name == "log.jsonl":
            lines = [json.loads(line) for line in file.read_text().splitlines()]
            found[name] = [{key: value for key, value in line.items() if key != "seconds"} for line in lines]
        elif file.suffix == ".json":
            data = json.loads(file.read_text())
            data.pop("prediction_seconds", None)
            data.get("environment", {}).pop("started", None)
            found[name] = data
        else:
            found[name] = file.read_bytes()
    return found


def compare(work: Work, path: Path, reference: dict[str, Any]) -> None:
    there = content(path)
    different = [name for name in sorted({*there, *reference}) if there.get(name) != reference.get(name)]
    if different:
        raise AssertionError(f"{work.kind} ({work.name}): after kills {different} are not what they are without")


# the whole ------------------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What happened."""

    kills: Counter[str]
    left: Counter[str]
    works: int = 0

    def add(self, what: str, found: list[str]) -> None:
        self.kills[what] += len(found)
        self.left.update(found)
        self.works += 1


def run(place: Path, *, kills: int, operations: int, command_lines: int, seed: int) -> Tally:
    draw, tally = random.Random(seed), Tally(Counter(), Counter())  # noqa: S311
    trained = place / "trained"
    first = Work("training", "to be evaluated", training_of(TRAININGS["SORF, hold-out"]))
    trained.mkdir()
    assert ended(fork(first, trained), PATIENCE)
    chosen = works(trained)
    references, seconds, counts = {}, {}, {}
    for number, work in enumerate(chosen):
        path = place / f"reference{number}"
        work.begin(path)
        clock = time.monotonic()
        assert ended(fork(work, path), PATIENCE)
        references[work.name], seconds[work.name] = content(path), time.monotonic() - clock
        counts[work.name] = int((place / f"{path.name}.operations").read_text())
        again = place / f"again{number}"  # the same seed in another process: the same bits
        work.begin(again)
        assert ended(fork(work, again), PATIENCE)
        compare(work, again, references[work.name])

    def attempt(work: Work, kill: Callable[[Path], list[str]], what: str) -> None:
        path = place / "killed"
        shutil.rmtree(path, ignore_errors=True)
        work.begin(path)
        found = kill(path)
        compare(work, path, references[work.name])
        tally.add(f"{work.kind}, {what}", found)
        print(f"{work.kind} ({work.name}), {what}: {len(found)} kills, the same end", file=sys.stderr, flush=True)

    done, most = dict.fromkeys(chosen, 0), min(MOST, max(3, kills // 25))
    while (missing := kills - sum(done.values())) > 0:
        work = min(chosen, key=done.__getitem__)  # the one that was killed least
        before = sum(tally.kills.values())
        attempt(
            work,
            lambda path: killed_by_time(work, path, seconds, draw, min(most, missing)),  # noqa: B023
            "at a random time",
        )
        done[work] += sum(tally.kills.values()) - before
    for work in chosen:
        count = counts[work.name]
        for operation in sorted(draw.sample(range(1, count + 1), min(operations, count))):
            attempt(work, lambda path: killed_at_operation(work, path, operation), "at a file operation")  # noqa: B023
    if command_lines:
        kill_command_lines(place, draw, tally, command_lines)
    return tally


def kill_command_lines(place: Path, draw: random.Random, tally: Tally, most: int) -> None:
    """Whole command lines, whose process is killed; the pool of `reproduce --jobs 2` has to notice."""
    options = (
        "--source digits --train-size 100 --steps 40 --batch-size 25 --holdout 0.2 --checkpoint-seconds 0 --threads 1"
    )
    reproduce = "reproduce fig3 --jobs 2 --results none --out"
    lines = {
        "calgp train": lambda path: (
            ["train", "--resume", f"{path}/run"]
            if (path / "run" / "run.json").is_file()
            else ["train", "--out", f"{path}/run", *options.split()]
        ),
        "calgp reproduce --jobs 2": lambda path: [*reproduce.split(), str(path)],
    }  # fmt: skip
    for name, line in lines.items():
        reference, path = place / f"whole {name}", place / f"killed {name}"
        clock = time.monotonic()
        subprocess.run([sys.executable, "-m", "calgp", *line(reference)], check=True, capture_output=True)
        seconds, found = time.monotonic() - clock, []
        while len(found) < most:
            killed = []
            while len(found) + len(killed) < most and not completed(line(path), draw.uniform(seconds / 4, seconds)):
                killed.append(left(path))
            if not completed(line(path), PATIENCE):
                raise RuntimeError(f"{name} does not come to its end")
            compare_weights(name, content(reference), content(path))
            found += killed
            seconds = seconds if killed else seconds / 2  # the machine is faster now
            shutil.rmtree(path)
        tally.add(f"`{name}`", found)
        print(f"{name}: {len(found)} kills, the same end", file=sys.stderr, flush=True)


def completed(arguments: list[str], seconds: float) -> bool:
    """Whether a command line came to its end within so many seconds; if not, its process is killed."""
    command = [sys.executable, "-m", "calgp", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        _, error = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return False
    if process.returncode and "is finished: there is nothing to resume" not in error:
        raise RuntimeError(error)
    return True


def compare_weights(name: str, whole: dict[str, Any], killed: dict[str, Any]) -> None:
    """Weights, logs and scores of all runs; pages have dates."""
    runs = [
        {key: value for key, value in there.items() if key.endswith(".safetensors") or "log" in key or "scores" in key}
        for there in (whole, killed)
    ]
    assert runs[0] and runs[0] == runs[1], name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30, help="at random times")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--operations", type=int, default=1, help="file operations of each work, before which it is killed"
    )
    parser.add_argument("--command-lines", type=int, default=0, help="kills of `calgp train` and of `calgp reproduce`")
    options = parser.parse_args()
    logging.getLogger("lightning_fabric").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning_fabric")
    clock = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        tally = run(Path(place).resolve(), **vars(options))
    summary = {
        "command": ["python", "tests/kills.py", *sys.argv[1:]],
        "date": date.today().isoformat(),
        "seconds": round(time.monotonic() - clock),
        "kills": dict(sorted(tally.kills.items())),
        "all kills": sum(tally.kills.values()),
        "works": tally.works,
        "left behind": dict(tally.left.most_common()),
    }
    print(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()
