"""Sweeps: what they are made of, and that every run is made once, whoever is killed or interrupted on the way."""

import contextlib
import csv
import json
import os
import shlex
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from calgp import cli
from calgp.errors import CalgpError
from calgp.runs import RunFolder
from calgp.search.engines import Processes, Ray
from calgp.search.jobs import Paths
from calgp.search.sweep import (
    Part,
    Sweep,
    axis_of,
    described,
    found_by,
    missing_jobs,
    parse_axis,
    run_sweep,
    worded,
    write_sweep,
)
from forked import Started, python
from search.engine_work import Marking

TINY = {
    "backbone": {"name": "lenet", "channels": [2, 4], "hidden": [8]},
    "train_size": 100,
    "steps": 4,
    "batch_size": 20,
    "size": 14,
}
AXES = {"method": ("cnn-gp-sorf", "cnn-mcd"), "learning_rate": (1e-3, 1e-2, 3e-2)}
SWEEP = Sweep(TINY, AXES, seeds=(0, 1), samples=2)


# what a sweep is made of ----------------------------------------------------------------------------------------------


def test_a_grid_is_every_combination_with_every_seed():
    assert [worded(setting) for setting in SWEEP.settings()] == [
        f"method={method} learning_rate={rate}" for method in AXES["method"] for rate in AXES["learning_rate"]
    ]
    runs = [job.run for job in SWEEP.jobs()]
    assert len({job.key for job in SWEEP.jobs()}) == len(runs) == 12
    assert {(run.label, run.learning_rate, run.seed, run.holdout) for run in runs} == {
        (method, rate, seed, 0.1) for method in AXES["method"] for rate in AXES["learning_rate"] for seed in (0, 1)
    }


def test_options_of_a_method_are_set_whatever_the_order_of_the_axes():
    sweep = Sweep(TINY, dict([parse_axis("method.keep=0.5,0.9"), parse_axis("method=cnn-mcd,cnn-gp-sorf")]))
    methods = [job.run.method for _, jobs in sweep.jobs_by_setting() for job in jobs]
    assert [(type(method).__name__, method.keep) for method in methods] == [  # type: ignore[attr-defined]
        (kind, keep) for keep in (0.5, 0.9) for kind in ("CnnMcd", "CnnGp")
    ]


def test_draws_depend_on_their_seed_alone_and_more_begin_with_fewer():
    axes = dict(map(parse_axis, ["lr=loguniform:1e-4:1e-2", "method.keep=0.5,0.9", "batch-size=integer:10:90"]))
    drawn = Sweep(TINY, axes, random=200)
    assert drawn.settings() == drawn.settings()
    assert drawn.settings()[:5] == replace(drawn, random=5).settings()
    assert drawn.settings() != replace(drawn, draw_seed=1).settings()
    rates = [setting["learning_rate"] for setting in drawn.settings()]
    assert all(1e-4 <= rate <= 1e-2 for rate in rates)
    # half of them below 1e-3, the middle of the logarithms: 100 ± 4 standard deviations of √50
    assert 72 < sum(rate < 1e-3 for rate in rates) < 128
    assert {type(setting["batch_size"]) for setting in drawn.settings()} == {int}


def test_more_draws_than_there_are_settings_are_the_grid():
    assert replace(SWEEP, random=6).settings() == SWEEP.settings()
    assert len(replace(SWEEP, random=5).settings()) == 5


@pytest.mark.parametrize("count", [1, 3, 5, 20])
def test_parts_are_disjoint_and_complete(count):
    parts = [[job.key for job in Part(index, count).of(SWEEP.jobs())] for index in range(1, count + 1)]
    everything = [key for part in parts for key in part]
    assert sorted(everything) == sorted(job.key for job in SWEEP.jobs())
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_file_says_the_same_as_flags():
    file = {**TINY, "grid": {"lr": [1e-3, 1e-2], "method.keep": 0.5}, "sweep": {"seeds": [1, 2], "random": 1}}
    flags = described(TINY, ["lr=1e-3,1e-2", "method.keep=0.5"], seeds=[1, 2], random=1)
    assert described(file, []) == flags
    over = described(file, ["lr=5e-3"], seeds=[7])
    assert (over.axes["learning_rate"], over.seeds) == ((5e-3,), (7,))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: parse_axis("lr"), "Invalid --grid lr: must be NAME=VALUE"),
        (lambda: parse_axis("lr=1,1"), "values that differ"),
        (lambda: parse_axis("lr=uniform:1"), "is no range"),
        (lambda: parse_axis("lr=loguniform:0:1"), "above 0"),
        (lambda: axis_of("lr", []), "values that differ"),
        (lambda: Sweep(TINY, {"seed": (0, 1)}), "--seeds 0,1,2"),
        (lambda: Sweep(TINY, AXES, seeds=(1, 1)), "each once"),
        (lambda: Sweep(TINY, dict([parse_axis("lr=uniform:0:1")])), "--random 20"),
        (lambda: Sweep(TINY, {f"o{i}": tuple(range(10)) for i in range(9)}), "more than 100,000 runs"),
        (lambda: Sweep(TINY | {"holdout": 0}, AXES).jobs(), "--holdout 0.1"),
        (lambda: Sweep(TINY, {"method.keeps": (1, 2)}).jobs(), "method.keeps=1: method has no option 'keeps'"),
        (lambda: described({"sweep": {"sedes": [1]}}, []), "no option 'sedes'"),
        (
            lambda: described({"sweep": {"random": "x"}}, []),
            "Invalid sweep.random='x': must be none or a whole number from 1",
        ),
        (lambda: Part.parse("0/3"), "INDEX/COUNT"),
        (lambda: Part.parse("3"), "INDEX/COUNT"),
    ],
)
def test_mistakes_are_reported(make, says):
    with pytest.raises(CalgpError, match=says):
        make()


# made, in this process ------------------------------------------------------------------------------------------------


def invoked(*arguments: str):
    result = CliRunner().invoke(cli.app, ["sweep", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


FLAGS = ["--train-size", "100", "--steps", "4", "--batch-size", "20", "-S", "2", "--set", "size=14",
         "--backbone", "lenet", "--set", "backbone.channels=[2,4]", "--set", "backbone.hidden=[8]",
         "--grid", "lr=1e-3,1e-2"]  # fmt: skip


@pytest.mark.slow
def test_command_line_end_to_end(tmp_path, monkeypatch):
    """Nothing of the test images unless asked for; nothing trained twice; the best command trains the best run."""
    monkeypatch.chdir(tmp_path)
    dry = invoked(*FLAGS, "--seeds", "0,1", "--out", "x", "--dry").output
    assert "4 runs are missing" in " ".join(dry.split()) and not Path("x").exists()
    written = json.loads(invoked(*FLAGS, "--seeds", "0,1", "--out", "x", "--json").stdout)
    mnll = [row["holdout_mnll"] for row in written["rows"]]
    assert mnll == sorted(mnll) and all(row["holdout_mnll_se"] > 0 for row in written["rows"])
    assert not any(name.startswith("test_") for row in written["rows"] for name in row)
    assert not list(Path("x").rglob("scores-digits.json"))
    models = {path: path.stat().st_mtime_ns for path in Path("x").rglob("model.safetensors")}
    assert len(models) == 4
    evaluated = invoked(*FLAGS, "--seeds", "0,1", "--out", "x", "--evaluate").output
    assert models == {path: path.stat().st_mtime_ns for path in Path("x").rglob("model.safetensors")}
    assert "test" in evaluated and "Best on the hold-out: calgp train" in evaluated
    rows = list(csv.DictReader(Path("x/table.csv").read_text().splitlines()))
    assert [float(row["holdout_mnll"]) for row in rows] == mnll and "test_mnll" in rows[0]
    page = Path("x/report.html").read_text()
    assert "calgp sweep" in page and 'src="http' not in page and "<script" not in page
    result = CliRunner().invoke(cli.app, [*shlex.split(written["best"])[1:], "--out", "best"])
    assert result.exit_code == 0, result.output
    best = Path("x/runs") / written["rows"][0]["runs"][0]
    assert RunFolder("best").card().run == RunFolder(best).card().run


def test_a_run_that_fails_stops_no_other_and_cannot_be_the_best(tmp_path):
    options = TINY | {"steps": 8, "optimiser": "sgd", "learning_rate": 1e-2}
    sweep = Sweep(options, {"kl_weight": (9e11, 1.0)}, samples=2)
    failures = run_sweep(sweep, tmp_path)
    assert list(failures) == [sweep.jobs_by_setting()[0][1][0].key]
    good, bad = found_by(sweep, tmp_path)
    assert (good.setting["kl_weight"], len(good.seeds)) == (1.0, 1)
    assert (bad.seeds, bad.held_out) == ((), {})
    written = write_sweep(sweep, [good, bad], tmp_path, command="calgp sweep", failures=failures)
    assert "kl-weight" not in written["best"] and "Training failed" in (tmp_path / "report.html").read_text()


def test_parts_make_the_whole_and_the_last_writes_the_table(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for part in ("2/2", "1/2"):
        assert not Path("x/table.csv").exists()
        assert invoked(*FLAGS, "--out", "x", "--part", part).exit_code == 0
        assert len(list(Path("x/runs").glob("*/model.safetensors"))) == {"2/2": 1, "1/2": 2}[part]
    assert len(list(csv.DictReader(Path("x/table.csv").read_text().splitlines()))) == 2


# made elsewhere, with deaths ------------------------------------------------------------------------------------------


def holder(lock: Path) -> int | None:
    """The other process that has a file open."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if int(entry.name) != os.getpid() and any(
                os.readlink(link) == str(lock) for link in (entry / "fd").iterdir()
            ):
                return int(entry.name)
    return None


def kill_one(runs: Path, killed: list[int]) -> None:
    """Kill the first process that is found at work on a run, once."""
    deadline = time.monotonic() + 600
    while not killed and time.monotonic() < deadline:
        for lock in runs.glob("*/.lock"):
            if (pid := holder(lock)) is not None:
                os.kill(pid, signal.SIGKILL)
                return killed.append(pid)
        time.sleep(0.005)


needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc to find who works on a run")


SHORT = replace(SWEEP, axes={"method": AXES["method"]})


@needs_proc
@pytest.mark.slow
def test_ray_makes_every_run_once_though_a_worker_is_killed_and_the_pool_finds_the_same(tmp_path, monkeypatch):
    pytest.importorskip("ray", reason="Ray is an extra: pip install calgp[ray]")
    places = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]  # where its workers find `Marking`
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, places)))
    monkeypatch.setenv("RAY_worker_niceness", "0")  # else they give way to all other tests
    (tmp_path / "marks").mkdir()
    engine, killed = Marking(Ray(2), tmp_path / "marks"), []
    killer = threading.Thread(target=kill_one, args=(tmp_path / "ray/runs", killed))
    killer.start()
    assert run_sweep(SHORT, tmp_path / "ray", engine=engine) == {}
    killer.join()
    assert len(killed) == 1
    assert engine.counted("done") == [1] * 4
    assert engine.counted("begun") == [1] * 3 + [2]
    logs = [RunFolder(path).log() for path in (tmp_path / "ray/runs").iterdir() if path.is_dir()]
    assert [[each.step for each in log if each.kind == "train"] for log in logs] == [[4]] * 4
    found = found_by(SHORT, tmp_path / "ray")
    assert [(each.seeds, each.planned) for each in found] == [((0, 1), 2)] * 2
    assert run_sweep(SHORT, tmp_path / "pool", engine=Processes(2)) == {}
    # each run had one thread, here and there: the same bits
    assert [(each.setting, each.held_out) for each in found_by(SHORT, tmp_path / "pool")] == [
        (each.setting, each.held_out) for each in found
    ]


LONG = replace(SWEEP, options=TINY | {"steps": 200}, axes={"learning_rate": (1e-3,)}, seeds=(0, 1, 2))


@needs_proc
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_or_killed_sweep_in_processes_goes_on_where_it_was(tmp_path, number):
    """A real process with two more: Ctrl-C lets those under way save themselves and begins no others."""
    runs = tmp_path / "x/runs"
    flags = [*FLAGS[:2], "--steps", "200", *FLAGS[4:-1], "lr=1e-3", "--seeds", "0,1,2"]
    words = ["-m", "calgp", "sweep", *flags, "--out", tmp_path / "x"]
    with Started(*words, "--jobs", "2") as process:
        while len(list(runs.glob("*/log.jsonl"))) < 2:  # both are under way: the first lines are of step 20
            assert process.poll() is None, process.printed
            time.sleep(0.01)
        process.send_signal(number)
        status, printed = process.wait(), process.printed
    begun = [RunFolder(path) for path in runs.iterdir() if (path / "run.json").is_file()]
    if number == signal.SIGINT:
        assert "Stopped; nothing is lost. The same command goes on where it was." in " ".join(printed.split())
        assert "Traceback" not in printed
        assert status == 1
        assert len(begun) - sum(folder.finished for folder in begun) <= 2
        assert any(folder.interrupted for folder in begun)
        # one that was stopped before its first step has nothing to save, and begins again
        assert all(folder.interrupted or folder.finished or not folder.log() for folder in begun)
    assert len(missing_jobs(LONG, Paths(runs))) >= 1
    python(*words, check=True)
    assert [each.seeds for each in found_by(LONG, tmp_path / "x")] == [(0, 1, 2)]
    for path in runs.glob("*/log.jsonl"):
        steps = [each.step for each in RunFolder(path.parent).log() if each.kind == "train"]
        assert steps == list(range(20, 201, 20))  # none is missing, none is there twice
