"""The queue of a tuned scale, on digits with tiny networks: the same code that runs for days."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from calgp.paper import queue, scales
from calgp.paper.experiments import LEARNED
from calgp.paper.queue import Tuning, make_plan, run_queue, stale, tuned
from calgp.paper.reproduce import rows_of
from calgp.paper.scales import (
    CAL,
    CIFAR10,
    GPDNN,
    MCD,
    MNIST,
    MNIST_DEEP,
    RF,
    RF_INTEGRATED,
    SCALES,
    SORF,
    SORF_INTEGRATED,
    SVDKL,
)
from calgp.runs import RunFolder
from calgp.search.halving import Budget
from calgp.search.jobs import Paths
from calgp.search.tune import read_log
from forked import Started

SMOKE = SCALES["smoke"]
BUDGET = Budget(pilots=2, steps=6, samples=2, images=(50, 100))


def tiny(**changes) -> scales.Scale:
    """Figure 4 with two methods on one panel, and one on another: two tunings and three runs."""
    steps, seeds = {100: 5}, {100: (0,)}
    shallow = replace(
        SMOKE.settings[MNIST], steps=steps, seeds=seeds, only={100: (SORF, CAL)}, method_seeds={CAL: (0, 1)}
    )
    deep = replace(SMOKE.settings[MNIST_DEEP], steps=steps, seeds=seeds, only={100: (MCD,)})
    settings = {**SMOKE.settings, MNIST: shallow, MNIST_DEEP: deep}
    order = {MNIST_DEEP: settings.pop(MNIST_DEEP), MNIST: settings.pop(MNIST)}
    return replace(
        SMOKE, name="tiny", settings=order | settings, tuning={MNIST: BUDGET, MNIST_DEEP: BUDGET}, **changes
    )  # fmt: skip


@pytest.fixture
def scale(monkeypatch):
    monkeypatch.setitem(SCALES, "tiny", tiny())
    return SCALES["tiny"]


def places(folder: Path) -> Paths:
    return Paths(folder / "runs", (folder / "results",), folder / "results")


def names_of(tasks) -> list[str]:
    return [task.name.split(" digits")[0] if isinstance(task, Tuning) else f"{task.run.label}/{task.run.seed}"
            for task in tasks]  # fmt: skip


def test_tunings_come_first_and_panels_in_their_order_of_value(scale, tmp_path):
    plan = make_plan(["fig4"], scale, ())
    assert [task.name for task in plan.tasks(places(tmp_path))] == [
        f"tuning {MCD} on {MNIST_DEEP}", f"tuning {SORF} on {MNIST}", f"tuning {CAL} on {MNIST}",
    ]  # fmt: skip
    tunings, runs, seconds = plan.cost(places(tmp_path))
    assert (tunings, runs) == (3, 4) and seconds > 0


def test_variants_of_a_method_come_after_the_other_methods_of_their_panel():
    """θ learned (table 2) is worth less than the next method of figure 2; second seeds come last."""
    plan = make_plan(["fig2", "tab2"], SCALES["desk"], ())
    everything = replace(plan, untuned={})
    ranks = everything.ranks(everything.cells())
    runs = {queue.key(run): (run, cell) for cell in everything.cells() for run in cell.runs}
    ordered = [runs[name] for name in sorted(ranks, key=lambda name: ranks[name])]
    first = [(cell.panel, cell.method, run.seed) for run, cell in ordered][:11]
    methods = (SORF_INTEGRATED, SORF, MCD, CAL, RF, GPDNN, SVDKL, RF_INTEGRATED)
    assert first == [
        *((MNIST, method, 0) for method in methods), (MNIST, LEARNED, 0),
        (CIFAR10, SORF_INTEGRATED, 0), (CIFAR10, SORF, 0),
    ]  # fmt: skip
    seeds = [run.seed for run, _ in ordered]
    assert seeds == sorted(seeds)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """All of it, by one worker."""
    folder = tmp_path_factory.mktemp("queue")
    before = SCALES.get("tiny")
    SCALES["tiny"] = tiny()
    seen = []
    failures = run_queue(["fig4"], "tiny", places(folder), watch=seen.append)
    yield folder, failures, seen
    del SCALES["tiny"]
    assert before is None


@pytest.mark.slow
def test_everything_is_tuned_run_and_kept(finished):
    folder, failures, seen = finished
    assert failures == {}
    where = places(folder)
    plan = make_plan(["fig4"], tiny(), where.small)
    assert plan.untuned == {} and plan.tasks(where) == [] and plan.cost(where) == (0, 0, 0)
    rows = [row for row in rows_of(plan.cells(), where) if row.planned]
    assert [(row.method, row.panel, len(row.details)) for row in rows] == [
        (SORF, MNIST, 1), (CAL, MNIST, 2), (MCD, MNIST_DEEP, 1),
    ]  # fmt: skip
    assert all(row.values["auroc"] for row in rows)
    assert (seen[-1].done, seen[-1].jobs) == (7, 7) and seen[-1].work == pytest.approx(seen[-1].whole)


@pytest.mark.slow
def test_runs_have_the_options_that_their_tuning_found(finished):
    folder, _, _ = finished
    logs = sorted((folder / "results" / "tuning" / "tiny").rglob("*.json"))
    assert [str(log.relative_to(folder / "results" / "tuning" / "tiny")) for log in logs] == [
        "mnist-lenet/cnn-cal.json", "mnist-lenet/cnn-gp-sorf.json", "mnist-resnet/cnn-mcd.json",
    ]  # fmt: skip
    found, missing = tuned(tiny(), [folder / "results"])
    assert missing == {}
    for path, method, panel in zip(logs, (CAL, SORF, MCD), (MNIST, MNIST, MNIST_DEEP), strict=True):
        log, run = read_log(path), found.run(method, panel, 100, 0)
        assert run.learning_rate == log.winner.options["learning_rate"]
        assert run.method == log.run.method and run.steps == 5
        kept = [RunFolder(file.parent).card().run for file in (folder / "results" / "tiny").glob("*/run.json")]
        assert run in kept
    pilots = [RunFolder(file.parent).card() for file in (folder / "runs" / "pilots").rglob("run.json")]
    assert sorted({(card.run.steps, card.run.train_size) for card in pilots}) == [(2, 50), (6, 100)]  # rungs grow
    budgets = {(log.budget, len(log.pilots), log.steps) for log in map(read_log, logs)}
    assert len(budgets) == 1  # every method had the same


@pytest.mark.slow
def test_nothing_that_is_kept_names_a_place_of_this_machine(finished):
    folder, _, _ = finished
    for file in (folder / "results").rglob("*.json*"):
        assert str(folder) not in file.read_text()


@pytest.mark.slow
def test_a_second_call_does_nothing(finished):
    folder, _, _ = finished
    before = {file: file.stat().st_mtime_ns for file in folder.rglob("*") if file.is_file()}
    assert run_queue(["fig4"], "tiny", places(folder)) == {}
    assert {file: file.stat().st_mtime_ns for file in folder.rglob("*") if file.is_file()} == before


@pytest.mark.slow
def test_results_that_were_not_kept_are_kept_and_not_trained_again(finished, tmp_path):
    folder, _, _ = finished
    where = replace(places(folder), results=(tmp_path,), keep=tmp_path)
    models = {file: file.stat().st_mtime_ns for file in (folder / "runs").rglob("model.safetensors")}
    assert run_queue(["fig4"], "tiny", where) == {}
    assert len(list((tmp_path / "tiny").glob("*/run.json"))) == 4
    assert {file: file.stat().st_mtime_ns for file in (folder / "runs").rglob("model.safetensors")} == models


@pytest.mark.slow
def test_runs_whose_options_have_changed_are_stale_and_stay(finished):
    folder, _, _ = finished
    plan = make_plan(["fig4"], tiny(), [folder / "results"])
    assert stale(plan, folder / "results") == []
    longer = {panel: replace(setting, steps={100: 7}) for panel, setting in tiny().settings.items() if panel == MNIST}
    changed = replace(tiny(), settings={**tiny().settings, **longer})
    plan = make_plan(["fig4"], changed, [folder / "results"])
    assert len(stale(plan, folder / "results")) == 3  # of MNIST; the other panel's is still wanted
    assert {panel for panel, _ in plan.untuned} == {MNIST}  # and their tunings, whose base has changed


HOLD = """
import sys, time
from pathlib import Path
from calgp.runs.writing import owned

with owned(Path(sys.argv[1])):
    Path(sys.argv[2]).touch()
    time.sleep(3600)
"""


@pytest.mark.slow
def test_a_task_that_another_worker_has_begun_is_left_to_it(scale, tmp_path):
    where = places(tmp_path)
    first = make_plan(["fig4"], scale, ()).tasks(where)[0]
    held = where.runs / "begun" / queue.slug(first.key)
    with Started("-c", HOLD, held, tmp_path / "began") as other:
        while not (tmp_path / "began").exists():
            assert other.poll() is None, other.printed
            time.sleep(0.01)
        failed: dict[str, str] = {}
        tasks = make_plan(["fig4"], scale, ()).tasks(where)
        assert queue._take_one(tasks, where, failed, lambda share: None)
        assert failed == {}
        logs = {file.name for file in (tmp_path / "results" / "tuning").rglob("*.json")}
        assert logs == {"cnn-gp-sorf.json"}  # the second task, not the first


@pytest.mark.slow
def test_a_task_that_fails_is_named_and_the_others_go_on(scale, tmp_path):
    """A folder where a file should be: nothing can be written there."""
    where = places(tmp_path)
    plan = make_plan(["fig4"], scale, ())
    first = plan.tasks(where)[0]
    assert isinstance(first, Tuning)
    (where.keep / first.key).mkdir(parents=True)
    failures = run_queue(["fig4"], "tiny", where)
    assert list(failures) == ["worker 0"] and f"tuning {MCD}" in failures["worker 0"]
    assert len(list((where.keep / "tiny").glob("*/run.json"))) == 3  # what does not need that tuning is done


@pytest.mark.slow
def test_json_of_a_log_is_small(finished):
    folder, _, _ = finished
    log = next((folder / "results" / "tuning").rglob("*.json"))
    assert log.stat().st_size < 20_000 and json.loads(log.read_text())["found"]["total_steps"] == BUDGET.total_steps
