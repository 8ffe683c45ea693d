"""One run by several processes: what tests/runs/test_ranks.py looks at, and `make kill-ranks`.

    python tests/ranks.py check PLACE               # the same work by 1, 2 and 3 ranks; what each found goes to PLACE
    python tests/ranks.py differ PLACE              # two ranks that were started otherwise; what each is told
    python tests/ranks.py kill --kills 20           # kill one of two ranks at random moments; make kill-ranks

Ranks are started by torch's elastic agent, as torchrun starts them, but as forks of a process that has imported torch,
so that a start takes no seconds.
"""

import argparse
import fcntl
import functools
import json
import logging
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from calgp.errors import CalgpError
from calgp.gp import Bound, Noise, NumericalError
from calgp.methods import METHODS
from calgp.nets import Task
from calgp.runs import Interrupted, Run, RunFolder, TrainingData, from_json, open_device
from calgp.runs.build import build
from calgp.runs.folder import CHECKPOINT
from calgp.runs.ranks import share
from calgp.training import fit, train_run
from calgp.training.loop import make_optimiser
from folders import evaluate, metadata, tensors

LENET = {"name": "lenet", "channels": [2, 4], "hidden": [8]}
RESNET = {"name": "resnet", "n": 1, "widths": [2, 2, 4], "pad_to": 16}


def small(**options: Any) -> Run:
    given = {"backbone": LENET, "train_size": 100, "steps": 8, "batch_size": 30, "size": 14, "method": "cnn-gp-sorf"}
    return from_json(given | options)


# 90 images (10 of 100 are held out) in batches of 32: 32, 32, 26; 40 in batches of 13: 13, 13, 13, 1, so that of two
# ranks one has nothing in each fourth step
EVERYTHING = small(
    holdout=0.1, batch_size=32, augment=["flip", "crop"], crop=2, class_weights="balanced", clip=0.5, patience=9
)
INDIVISIBLE = small(train_size=40, batch_size=13)
METHOD = {
    "steps": 2,
    "train_size": 40,
    "holdout": 0.25,
    "optimiser": "sgd",
}  # linear in the gradient: rounding stays small

ENGINES: dict[str, dict[str, Any]] = {
    "one pass": {"passes": 1},
    "passes": {"passes": 4, "engine": "moments"},
    "samples": {"passes": 4, "engine": "samples"},
}


def launch(ranks: int, restarts: int, do: Any, *arguments: Any) -> None:
    """Run `do` in so many processes, started again up to `restarts` times when one of them dies."""
    multiprocessing.set_forkserver_preload(["ranks"])
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=ranks, run_id=str(random.random()),  # noqa: S311
        rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:0", max_restarts=restarts, monitor_interval=0.1,
        start_method="forkserver", local_addr="127.0.0.1",
    )  # fmt: skip
    elastic_launch(config, do)(*arguments)


def quiet() -> None:
    logging.getLogger("lightning_fabric").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning_fabric")
    torch.set_num_threads(1)


# the same work by any number of ranks ---------------------------------------------------------------------------------


def check(place: Path) -> None:
    """What a rank finds, kept as PLACE/ranks-rank.pt; the folders of the runs are PLACE/ranks/*."""
    quiet()
    double, single = open_device("cpu", "64-true"), None
    ranks, rank = double.world_size, double.global_rank
    folders = place / str(ranks)
    found: dict[str, Any] = {
        "everything": trained(EVERYTHING, folders / "everything", double),
        "indivisible": trained(INDIVISIBLE, folders / "indivisible", double),
        "accumulated": trained(EVERYTHING, folders / "accumulated", double, accumulate=3),
    }
    with failing(rank == ranks - 1):
        found["failing"] = trained(small(), folders / "failing", double)
    if ranks < 3:
        for name in ("lenet", "resnet"):
            run = small(backbone={"lenet": LENET, "resnet": RESNET}[name], batch_size=16)
            found[name] = fitted(run, double)
        for name in METHODS:
            found[f"method {name}"] = fitted(replace(small(**METHOD), method=METHODS[name]), double)
    if ranks == 2:
        found["sharded"] = sharded_gradients(double)
    stopped = RunFolder(folders / "stopped")
    try:
        train_run(EVERYTHING, stopped, double, watch=lambda step: terminated(step.step == 4 and rank == ranks - 1))
    except Interrupted as error:
        found["stopped"] = str(error)
    # evaluation in single precision: its bits are compared
    single = double if ranks > 1 else open_device("cpu")
    folder = RunFolder(place / "trained")
    if ranks == 1:
        train_run(small(steps=20), folder, single)
    for name, how in ENGINES.items():
        evaluated = folders / f"evaluated by {name}"
        shutil.copytree(folder.path, evaluated, dirs_exist_ok=True) if rank == 0 else None
        single.barrier()
        found[f"scores by {name}"] = asdict(evaluate(RunFolder(evaluated), single, **how).own.scores)
    torch.save(found, place / f"{ranks}-{rank}.pt")


def differ(place: Path) -> None:
    """What each rank is told where the second was started otherwise, or is not there."""
    from calgp.runs import ranks
    from calgp.runs.ranks import check_same

    fabric, rank = open_device("cpu", processes=1), int(os.environ["RANK"])
    cases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "learning_rate": ({"learning_rate": 0.1 if rank else 0.2}, {}),
        "method.n_rf": ({"method": {"name": "cnn-gp-sorf", "n_rf": 16 << rank}}, {}),
        "accumulate": ({}, {"accumulate": 1 + rank}),
        "source": ({"source": "digits" if rank else "letters"}, {}),
    }
    found = {}
    for name, (options, more) in cases.items():
        begin = functools.partial(train_run, small(**options), RunFolder(place / name), fabric, **more)
        found[name] = refusal(begin)
    found["versions"] = refusal(lambda: check_same(fabric, {"torch": f"2.{rank}"}))
    pictures = place / "pictures"
    if rank == 0:
        for label in "ab":
            (pictures / label).mkdir(parents=True)
            for number in range(4):
                Image.new("L", (14, 14), 40 * number).save(pictures / label / f"{number}.png")
    fabric.barrier()
    os.chdir(place if rank == 0 else "/")  # there the second finds nothing
    run = small(source="folder:pictures", train_size=None, batch_size=4)
    found["data"] = refusal(lambda: train_run(run, RunFolder(place / "data"), fabric))
    os.chdir(place)
    ranks.MEETING = timedelta(seconds=3)
    if rank:  # it hangs until the other has given it up
        while not (place / "given up").exists():
            time.sleep(0.05)
    else:
        found["hangs"] = refusal(lambda: check_same(fabric, {}))
        (place / "given up").touch()
    torch.save(found, place / f"differ-{rank}.pt")


def refusal(do: Any) -> str:
    try:
        do()
    except CalgpError as error:
        return str(error)
    return "not refused"


def trained(run: Run, path: Path, fabric: Any, **options: Any) -> dict[str, Any]:
    """Curves of a training, and the weights of this rank in the precision that it trained in."""
    steps: list[Any] = []
    models: list[Any] = []
    setup = fabric.setup

    def remember(bound: Bound, optimiser: Any) -> Any:
        models.append(bound.model)
        return setup(bound, optimiser)

    fabric.setup = remember
    try:
        train_run(run, RunFolder(path), fabric, watch=steps.append, **options)
    finally:
        fabric.setup = setup
    return {
        "nll": [step.nll.item() for step in steps],
        "kl": [step.kl.item() for step in steps],
        "skipped": [step.skipped for step in steps],
        "state": models[0].state_dict(),
    }


def fitted(run: Run, fabric: Any) -> dict[str, Any]:
    """`fit` alone, with batch norm by its running statistics: the moments of a batch are those of a rank's own part."""
    data = TrainingData.of(run, None).train
    model = build(run, Task(1, 14, 14, 10))
    run.method.start(model, data, generator=torch.Generator().manual_seed(0))
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.eval()
    bound, optimiser = fabric.setup(Bound(model, len(data)), make_optimiser(run, model))
    steps = list(fit(bound, optimiser, data, run, fabric=fabric))
    return {"nll": [step.nll.item() for step in steps], "kl": [step.kl.item() for step in steps], "skipped": [],
            "state": model.state_dict()}  # fmt: skip


def sharded_gradients(fabric: Any) -> list[tuple[Tensor, Tensor]]:
    """(one process's gradient, that of the bound with its parameters sharded over the ranks) for each parameter."""
    run = small()
    data, task = TrainingData.of(run, None).train, Task(1, 14, 14, 10)
    index = torch.arange(24)
    whole, parts = (
        # FSDP takes no parameters that lie channels last
        Bound(build(run, task).double().to(memory_format=torch.contiguous_format), len(data))  # type: ignore[call-overload]
        for _ in range(2)
    )
    fully_shard(parts, mesh=init_device_mesh("cpu", (2,)))
    for bound, mine in ((whole, index), (parts, share(fabric, index))):
        noise = Noise(-1, torch.arange(1), data.rows[mine])
        torch.stack(bound(data.pixels(mine).double(), data.y[mine], noise)).sum().backward()
    pairs = zip(whole.parameters(), parts.parameters(), strict=True)
    return [(one.grad, other.grad.full_tensor()) for one, other in pairs if one.grad is not None]  # type: ignore


class failing:
    """The forward pass of the third and the fifth step fails, on one rank."""

    def __init__(self, here: bool) -> None:
        self.here, self.calls, self.forward = here, 0, Bound.forward

    def __enter__(self) -> None:
        def forward(bound: Bound, *arguments: Any) -> Any:
            self.calls += 1
            if self.here and self.calls == 3:
                raise NumericalError("the covariance is not positive definite")
            nll, kl = self.forward(bound, *arguments)
            return (nll * float("nan"), kl) if self.here and self.calls == 5 else (nll, kl)

        Bound.forward = forward  # type: ignore[method-assign]

    def __exit__(self, *error: Any) -> None:
        Bound.forward = self.forward  # type: ignore[method-assign]


def terminated(now: bool) -> None:
    if now:
        os.kill(os.getpid(), signal.SIGTERM)


# kills ----------------------------------------------------------------------------------------------------------------

KILLED = """--source digits --train-size 100 --size 14 --holdout 0.2 --steps 40 --batch-size 25 --threads 1
    --backbone lenet --set backbone.channels=[2,4] --set backbone.hidden=[8] --checkpoint-seconds 0"""


def command(arguments: list[str], pids: str) -> None:
    """`calgp ARGUMENTS` as torchrun runs it; its process is noted in the folder `pids` for as long as it may be killed.

    Not after its end: a rank whose function has returned waits for an event of the agent's. One that is killed there,
    between two looks of the agent, leaves the agent waiting for ever (multiprocessing's Event.set counts it among those
    that will wake up; torch 2.13, MultiprocessContext._poll). torchrun of a command line has no such event.
    """
    from calgp import cli

    attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
    alive = Path(pids, f"{attempt}-{rank}")
    alive.write_text(str(os.getpid()))
    sys.argv = ["calgp", *arguments]
    sys.stdout = sys.stderr = open(Path(pids, f"{attempt}-{rank}.log"), "w")  # noqa: SIM115
    cli.out.file = cli.err.file = sys.stdout
    try:
        cli.main()
    finally:
        with locked(alive):
            alive.with_suffix(".ended").touch()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def kill(place: Path, kills: int, seed: int) -> dict[str, Any]:
    """Train by two ranks, of which one is killed at a random moment of each start, until there were so many kills."""
    draw = random.Random(seed)  # noqa: S311
    (place / "pids").mkdir(parents=True)
    launch(2, 0, command, ["train", "--out", str(place / "whole"), *KILLED.split()], str(place / "pids"))
    seconds = time.time() - (place / "pids" / "0-0").stat().st_mtime
    whole = tensors(RunFolder(place / "whole"), "model.safetensors")
    summary: dict[str, Any] = {"kills": 0, "trainings": 0, "killed ranks": [0, 0], "steps at hand": []}
    while summary["kills"] < kills:
        path, pids = place / f"killed{summary['trainings']}", place / f"pids{summary['trainings']}"
        pids.mkdir()
        before, most = summary["kills"], min(kills - summary["kills"], 5)
        killer = threading.Thread(target=murder, args=(path, pids, draw, seconds, most, summary), daemon=True)
        killer.start()
        launch(2, most, command, ["train", "--out", str(path), *KILLED.split()], str(pids))
        (pids / "over").touch()
        killer.join()
        seconds = seconds if summary["kills"] > before else seconds / 2  # the machine is faster now
        folder = RunFolder(path)
        assert folder.finished and not folder.interrupted
        found = tensors(folder, "model.safetensors")
        different = [name for name in whole if not found[name].equal(whole[name])]
        assert not different, f"after kills {different} are not what they are without"
        assert [r.step for r in folder.log()] == [r.step for r in RunFolder(place / "whole").log()]
        summary["trainings"] += 1
        shutil.rmtree(path)
    return summary


def murder(path: Path, pids: Path, draw: random.Random, seconds: float, most: int, summary: dict[str, Any]) -> None:
    for attempt in range(most):
        rank = summary["kills"] % 2
        victim = pids / f"{attempt}-{rank}"
        while not (victim.is_file() and victim.read_text()):
            if (pids / "over").is_file():
                return
            time.sleep(0.01)
        time.sleep(draw.uniform(0, seconds))
        with locked(victim):
            if victim.with_suffix(".ended").is_file():
                continue  # the next start has another rank for it, if there is one
            os.kill(int(victim.read_text()), signal.SIGKILL)
        summary["kills"] += 1
        summary["killed ranks"][rank] += 1
        folder = RunFolder(path)
        summary["steps at hand"].append(metadata(folder, CHECKPOINT)["step"] if folder.interrupted else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    checking = kinds.add_parser("check")
    checking.add_argument("place", type=Path)
    kinds.add_parser("differ").add_argument("place", type=Path)
    killing = kinds.add_parser("kill")
    killing.add_argument("--kills", type=int, default=3)
    killing.add_argument("--seed", type=int, default=0)
    killing.add_argument("--place", type=Path, help="where trainings are made; a temporary folder unless given")
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    import ranks as module  # by name, not as __main__: the forks must find it

    if options.kind == "differ":
        return module.launch(2, 0, module.differ, options.place)
    if options.kind == "check":
        for count in (1, 2, 3):
            module.launch(count, 0, module.check, options.place)
        return
    clock = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        summary = module.kill(options.place or Path(place), options.kills, options.seed)
    when = {"command": ["python", "tests/ranks.py", *sys.argv[1:]], "date": date.today().isoformat()}
    print(json.dumps(when | {"seconds": round(time.monotonic() - clock)} | summary, indent=1))


if __name__ == "__main__":
    main()
