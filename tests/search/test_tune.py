"""Equal tuning: the plan of a search on objectives in closed form, and real searches on small images."""

import csv
import json
import math
import random
import shlex
import time
from dataclasses import asdict, fields, replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from calgp import cli, metrics
from calgp.data import sources
from calgp.errors import CalgpError
from calgp.methods import METHODS
from calgp.methods.space import Axis
from calgp.nets import LeNet
from calgp.posthoc import calibration
from calgp.runs import Run, RunFolder, TrainingData, from_json
from calgp.search.engines import Processes
from calgp.search.halving import Budget, Edge, Pilot, Search, best_of, draw, edges_of, successive_halving
from calgp.search.jobs import Paths
from calgp.search.tune import (
    TuningLog,
    cross_fitted,
    options_of,
    pilot_run,
    read_log,
    search,
    tune,
    with_options,
    write_log,
)
from calgp.search.tune_methods import TuningTask, pilots_within, share_done, tasks_of, tune_methods
from calgp.training.defaults import resolved
from forked import Started, python

every_method = pytest.mark.parametrize("name", METHODS)
RATE = {"learning_rate": Axis((1e-3, 2e-3, 4e-3), ratio=2.0)}


# spaces ---------------------------------------------------------------------------------------------------------------


@every_method
def test_every_value_of_a_space_makes_a_run_and_so_do_those_beyond_its_edges(name):
    base = Run(METHODS[name], LeNet())
    for option, axis in base.method.space().items():
        beyond = [axis.beyond(side) for side in ("low", "high")]
        for value in (*axis.values, *axis.refined().values, *(value for value in beyond if value is not None)):
            assert options_of(with_options(base, {option: value}), [option]) == {option: value}


@every_method
def test_every_method_searches_the_same_learning_rates_and_masked_ones_the_same_keep_probabilities(name):
    method = METHODS[name]
    space = method.space()
    assert next(iter(space)) == "learning_rate"
    assert space["learning_rate"] == METHODS["cnn"].space()["learning_rate"]
    masked = {each.name for each in fields(method) if each.name in ("keep", "keep_filters")}  # type: ignore[arg-type]
    for option in masked if getattr(method, "keep_filters", 1.0) < 1 else ():
        assert space[f"method.{option}"] == METHODS["cnn-mcd"].space()["method.keep"]


def test_a_resnet_with_mcd_may_keep_as_many_features_as_the_gaussian_process():
    assert {0.8, 0.9} <= set(METHODS["cnn-mcd"].space()["method.keep"].values)
    assert METHODS["cnn-mcd"].space()["method.keep"] == METHODS["cnn-gp-rf"].space()["method.keep"]


def test_an_axis_is_widened_by_its_ratio_or_up_to_its_limits():
    rates, keep = Axis((1e-3, 4e-3), ratio=4.0), Axis((0.5, 0.9), more=(0.25, 0.95))
    assert (rates.beyond("low"), rates.beyond("high")) == (2.5e-4, 1.6e-2)
    assert keep.next_to(0.9, "high") == 0.95 and keep.next_to(0.9, "low") == 0.5
    assert keep.including(0.95).beyond("high") is None and keep.including(0.95).beyond("low") == 0.25
    assert rates.refined().values == (1e-3, 2e-3, 4e-3)
    choice = Axis(("rbf", "arc-cosine-1"))
    assert choice.next_to("rbf", "high") is None and not choice.is_edge("rbf", "low") and choice.refined() == choice


# the plan -------------------------------------------------------------------------------------------------------------


def planned(base: Run, budget: Budget, mnll=lambda options: 1.0) -> Search:
    """The search of a run whose scores are a function of its options, so that nothing is trained."""
    return search(base, budget, lambda options, rung, steps: Pilot(options, rung, steps, mnll=mnll(options)))


@pytest.mark.parametrize(
    "budget",
    [Budget(), Budget(pilots=20, steps=300), Budget(pilots=4, steps=90), Budget(1, 7), Budget(6, 9, finalists=6)],
)
def test_every_method_makes_the_same_pilots_and_steps(budget):
    for name, method in METHODS.items():
        base = Run(method, LeNet())
        for mnll in (
            lambda options: -options["learning_rate"],
            lambda options: abs(math.log(options["learning_rate"])),
        ):
            found = planned(base, budget, mnll).pilots
            assert len(found) == budget.total_pilots, name
            assert sum(pilot.steps for pilot in found) == budget.total_steps, name
            assert [(pilot.rung, pilot.steps) for pilot in found] == [
                (rung, steps) for rung, (count, steps) in enumerate(budget.rungs) for _ in range(count)
            ]
            first = [json.dumps(pilot.options) for pilot in found if pilot.rung == 0]
            assert len(set(first)) == len(first) == budget.pilots  # nothing is tried twice
            assert found[0].options == options_of(base, method.space())  # the default is tried


def test_the_budget_is_what_the_guide_says():
    assert Budget().rungs == ((8, 222), (3, 667), (1, 2000))
    assert (Budget().total_pilots, Budget().total_steps) == (12, 8 * 222 + 3 * 667 + 2000)
    assert Budget(9, 900, finalists=3).rungs == ((9, 300), (3, 900))
    assert Budget(9, 900, finalists=2).rungs == ((9, 100), (3, 300), (2, 900))
    assert Budget(12, 600, finalists=12).rungs == ((12, 600),)
    assert [pilots_within(Budget(), steps) for steps in (0, 222, 443, 5777)] == [0, 1, 1, 12]


def test_the_best_third_goes_on_and_the_winner_is_the_best_of_the_last_rung():
    pilots = planned(Run(METHODS["cnn-gp-rf"], LeNet()), Budget(9, 900), lambda options: options["method.sigma"]).pilots
    rungs = [[pilot for pilot in pilots if pilot.rung == rung] for rung in range(3)]
    for shorter, longer in pairwise(rungs):
        ranked = sorted(shorter, key=lambda pilot: pilot.mnll)
        assert [pilot.options for pilot in longer] == [pilot.options for pilot in ranked[: len(longer)]]
    assert rungs[2][0].mnll == min(pilot.mnll for pilot in pilots)


def test_draws_spread_over_the_learning_rates():
    found = Search((), METHODS["cnn-gp-rf"].space())
    for _ in range(20):
        options, space = draw(found, random.Random(len(found.pilots)))  # noqa: S311
        found = Search((*found.pilots, Pilot(options, 0, 1)), space)
    rates = [pilot.options["learning_rate"] for pilot in found.pilots]
    assert {rates.count(rate) for rate in found.space["learning_rate"].values} == {4}


def test_an_edge_is_widened_and_reported_while_the_best_stands_there():
    def attempt(options, rung, steps):
        return Pilot(options, rung, steps, mnll=-options["learning_rate"])  # more is always better

    found = successive_halving(RATE, {"learning_rate": 1e-3}, Budget(8, 90), attempt, seed="0")
    assert max(found.space["learning_rate"].values) == 1.6e-2  # two local pilots, two steps beyond 4e-3
    assert edges_of(found.space, found.pilots[-1].options) == (Edge("learning_rate", 1.6e-2, "high", False),)


def test_an_optimum_inside_is_no_edge_and_neighbours_come_closer_to_it():
    def attempt(options, rung, steps):
        return Pilot(options, rung, steps, mnll=abs(math.log(options["learning_rate"] / 2.2e-3)))

    found = successive_halving(RATE, {"learning_rate": 1e-3}, Budget(8, 90), attempt, seed="0")
    assert edges_of(found.space, found.pilots[-1].options) == ()
    assert found.pilots[-1].mnll < abs(math.log(2e-3 / 2.2e-3)) + 1e-12


def test_a_limit_is_reported_as_one_and_not_passed():
    space = {"method.keep": Axis((0.5, 0.9), more=(0.95,))}

    def attempt(options, rung, steps):
        return Pilot(options, rung, steps, mnll=-options["method.keep"])

    found = successive_halving(space, {"method.keep": 0.5}, Budget(8, 90), attempt, seed="0")
    assert max(found.space["method.keep"].values) == 0.95
    assert edges_of(found.space, found.pilots[-1].options) == (Edge("method.keep", 0.95, "high", True),)


def test_a_failed_pilot_does_not_go_on():
    def attempt(options, rung, steps):
        failed = options["learning_rate"] > 2e-3
        return Pilot(options, rung, steps, mnll=math.inf if failed else 1.0, failure="no" if failed else None)

    found = successive_halving(RATE, {"learning_rate": 4e-3}, Budget(4, 90), attempt, seed="0")
    assert found.pilots[0].failure == "no" and not any(pilot.failure for pilot in found.pilots if pilot.rung)


def test_a_default_outside_its_space_joins_it():
    base = replace(Run(METHODS["cnn"], LeNet()), learning_rate=3e-2)
    found = planned(base, Budget(3, 90))  # too few for a local pilot, which would widen it
    assert found.pilots[0].options == {"learning_rate": 3e-2}
    assert found.space["learning_rate"].values == (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 3e-2)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Budget(pilots=0), "pilots=0: must be at least 1"),
        (lambda: Budget(factor=1), "factor=1: must be at least 2"),
        (lambda: Budget(finalists=0), "finalists=0: must be at least 1"),
        (lambda: Budget(pilots=27, steps=26), "at least 27, or fewer pilots"),
        (lambda: planned_choices(), "fewer settings than pilots"),
    ],
)
def test_mistakes_are_reported(make, says):
    with pytest.raises(CalgpError, match=says):
        make()


def planned_choices():
    space = {"method.kernel": Axis(("rbf", "arc-cosine-1"))}
    successive_halving(space, {"method.kernel": "rbf"}, Budget(4, 90), lambda *a: Pilot(*a), seed="0")


# runs of pilots -------------------------------------------------------------------------------------------------------


def test_pilots_of_all_methods_share_their_hold_out_and_their_length():
    base = from_json({"method": "cnn-cal", "seed": 3, "patience": 2, "epochs": 4})
    run = pilot_run(base, {"learning_rate": 0.5}, 17)
    assert (run.steps, run.holdout, run.split_seed, run.seed, run.patience) == (17, 0.1, 0, 3, None)
    assert run.method == METHODS["cnn"]  # its temperature is fitted when it is judged
    other = pilot_run(from_json({"method": "cnn-gp-rf", "seed": 4}), {}, 17)
    assert (other.holdout, other.split_seed) == (run.holdout, run.split_seed)


def test_a_calibrator_is_judged_on_images_that_it_was_not_fitted_on():
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(3, (40,), generator=generator)
    logits = torch.randn(40, 3, generator=generator) + torch.nn.functional.one_hot(y, 3)
    log_probs = (3 * logits).log_softmax(1)  # over-confident, and right more often than not
    fitted = cross_fitted(log_probs, y, "temperature")
    order = y.argsort(stable=True)
    for judged, fitting in ((order[::2], order[1::2]), (order[1::2], order[::2])):
        temperature = calibration.Temperature.fit(log_probs[fitting], y[fitting])
        torch.testing.assert_close(fitted[judged], temperature.apply(log_probs[judged]), rtol=0, atol=0)
    own = calibration.Temperature.fit(log_probs, y).apply(log_probs)
    mnll = [metrics.mnll(metrics.outcomes(each, y)).item() for each in (own, fitted)]
    assert mnll[0] < mnll[1]  # fitted on what it is judged by, it looks better than it is


# real searches --------------------------------------------------------------------------------------------------------

TINY = {
    "backbone": {"name": "lenet", "channels": [2, 4], "hidden": [8]},
    "train_size": 100,
    "batch_size": 20,
    "size": 14,
}
BUDGET = Budget(pilots=4, steps=9, samples=2)


def tiny(method: str) -> Run:
    return from_json(TINY | {"method": method})


@pytest.fixture(scope="module")
def tuned(tmp_path_factory) -> tuple[TuningLog, Paths]:
    where = Paths(tmp_path_factory.mktemp("tuned") / "runs")
    return tune(tiny("cnn-cal"), BUDGET, where), where


def test_a_search_is_equal_in_budget_and_its_winner_has_the_lowest_mnll_of_the_last_rung(tuned):
    log, where = tuned
    assert (len(log.pilots), log.steps) == (BUDGET.total_pilots, BUDGET.total_steps)
    last = [pilot for pilot in log.pilots if pilot.rung == 2]
    assert log.winner == min(last, key=lambda pilot: pilot.mnll)
    assert log.run == with_options(log.base, log.winner.options)
    assert log.run.steps is None and log.run.method.calibrator == "temperature"
    for pilot in log.pilots:
        card = RunFolder(where.runs / pilot.key).card()
        assert (card.run.steps, card.run.learning_rate) == (pilot.steps, pilot.options["learning_rate"])
    default, same = log.against_default
    assert default.options == {"learning_rate": log.base.learning_rate}
    assert (same.steps, same.options) == (default.steps, log.winner.options)


def test_first_pilots_that_learned_nothing_are_reported(tuned):
    log, _ = tuned
    assert log.classes == 10
    for mnll, too_short in ((math.log(10), True), (0.91 * math.log(10), True), (0.89 * math.log(10), False)):
        first = tuple(replace(pilot, mnll=mnll if pilot.rung == 0 else 0.1) for pilot in log.pilots)
        assert replace(log, pilots=first).too_short is too_short


def test_a_second_search_trains_nothing_and_finds_the_same(tuned):
    log, where = tuned
    before = {path: path.stat().st_mtime_ns for path in where.runs.rglob("*") if path.is_file()}
    assert tune(log.base, log.budget, where) == log
    assert before == {path: path.stat().st_mtime_ns for path in where.runs.rglob("*") if path.is_file()}
    assert share_done(TuningTask("cnn-cal", log.base, BUDGET, where, Path("x.json")), BUDGET) == 1


def test_a_log_is_read_as_it_was_written_and_names_no_place(tuned, tmp_path):
    log, where = tuned
    failed = replace(log, pilots=(replace(log.pilots[0], mnll=math.inf, failure="it failed"), *log.pilots[1:]))
    for each in (log, failed):
        write_log(each, tmp_path / "a" / "log.json")
        assert read_log(tmp_path / "a" / "log.json") == each
    text = (tmp_path / "a" / "log.json").read_text()
    assert str(where.runs) not in text and len(text) < 20_000
    assert json.loads(text, parse_constant=lambda name: pytest.fail(name))["found"]["total_steps"] == log.steps


def test_a_log_that_did_not_spend_its_budget_is_refused(tuned, tmp_path):
    log, _ = tuned
    write_log(log, tmp_path / "log.json")
    data = json.loads((tmp_path / "log.json").read_text())
    (tmp_path / "short.json").write_text(json.dumps(data | {"pilots": data["pilots"][1:]}))
    with pytest.raises(CalgpError, match=r"has 3 pilots of .* its budget is 4 pilots of 1 steps"):
        read_log(tmp_path / "short.json")
    (tmp_path / "wrong.json").write_text(json.dumps(data | {"pilots": [{"rung": "x"}]}))
    with pytest.raises(CalgpError, match="is no tuning log: pilots"):
        read_log(tmp_path / "wrong.json")


def test_no_test_image_is_read(tmp_path, monkeypatch):
    splits = []
    read = sources.BundledSource.load

    def watched(self, split, *rest, **more):
        splits.append(split)
        return read(self, split, *rest, **more)

    monkeypatch.setattr(sources.BundledSource, "load", watched)
    tune(tiny("cnn"), Budget(2, 3, samples=2), Paths(tmp_path))
    assert splits and set(splits) == {"train"}


def test_a_pilot_whose_numbers_fail_is_kept_with_the_reason_and_does_not_win(tmp_path):
    base = replace(
        tiny("cnn"), optimiser="sgd", learning_rate=1e11, schedule="constant"
    )  # the first pilot has the run's own rate
    log = tune(base, Budget(3, 24, samples=2), Paths(tmp_path))
    assert log.pilots[0].mnll == math.inf and "no finite number" in (log.pilots[0].failure or "")
    assert str(tmp_path) not in (log.pilots[0].failure or "")
    assert (len(log.pilots), log.steps) == (log.budget.total_pilots, log.budget.total_steps)
    assert log.winner.failure is None and log.run.learning_rate < 1
    write_log(log, tmp_path / "log.json")
    assert read_log(tmp_path / "log.json") == log


def test_a_method_none_of_whose_pilots_has_a_score_is_an_error(tmp_path):
    base = replace(tiny("cnn-gp-sorf"), optimiser="sgd", kl_weight=9e11, learning_rate=1e-2)
    with pytest.raises(CalgpError, match=r"Every pilot of .* failed; the first: step"):
        tune(base, Budget(2, 24, samples=2), Paths(tmp_path))


def test_what_every_pilot_would_meet_is_reported_at_once(tmp_path):
    with pytest.raises(CalgpError, match="105"):
        tune(replace(tiny("cnn"), train_size=105), BUDGET, Paths(tmp_path))


@pytest.mark.slow
def test_methods_in_processes_find_the_same_as_one_after_the_other(tmp_path):
    bases = {name: tiny(name) for name in ("cnn", "cnn-cal")}  # two methods that share pilots
    shown = []
    tasks = tasks_of(bases, BUDGET, tmp_path / "a", tmp_path / "runs")
    assert tune_methods(tasks, BUDGET, engine=Processes(2), watch=shown.append) == {}
    assert (shown[-1].done, shown[-1].jobs) == (2 * BUDGET.total_pilots, 2 * BUDGET.total_pilots)
    logs = [read_log(task.log) for task in tasks]
    for task, log in zip(tasks, logs, strict=True):
        again = tune(task.base, BUDGET, Paths(tmp_path / "again" / task.name))
        assert [pilot.options for pilot in again.pilots] == [pilot.options for pilot in log.pilots]
    # what is done stays done, even without its runs
    assert tune_methods(tasks_of(bases, BUDGET, tmp_path / "a", tmp_path / "empty"), BUDGET) == {}
    assert not (tmp_path / "empty").exists()
    assert [read_log(task.log) for task in tasks] == logs


def test_too_few_images_to_judge_by_are_refused_before_training(tmp_path):
    tasks = tasks_of({"cnn": replace(tiny("cnn"), holdout=0.05)}, BUDGET, tmp_path, tmp_path / "runs")
    with pytest.raises(CalgpError, match="keeps 5 images of digits to judge by, at least 10"):
        tune_methods(tasks, BUDGET)
    assert not (tmp_path / "runs").exists()


FLAGS = ["digits", "--backbone", "lenet", "--train-size", "100", "--batch-size", "20", "-S", "2", "--set", "size=14",
         "--set", "backbone.channels=[2,4]", "--set", "backbone.hidden=[8]", "--pilots", "4"]  # fmt: skip


@pytest.mark.slow
def test_a_killed_search_goes_on_where_it_was(tmp_path):
    words, runs = ["tune", *FLAGS, "--steps", "450", "--methods", "cnn", "--out", str(tmp_path)], tmp_path / "runs/cnn"
    with Started("-m", "calgp", *words) as process:
        while len(list(runs.glob("*/model.safetensors"))) < 2:
            assert process.poll() is None, process.printed
            time.sleep(0.01)
    assert not list(tmp_path.rglob("cnn.json"))
    before = {path: path.stat().st_mtime_ns for path in runs.glob("*/model.safetensors")}
    assert len(before) >= 2
    python("-m", "calgp", *words, check=True)
    log = read_log(next(tmp_path.rglob("cnn.json")))
    assert all(path.stat().st_mtime_ns == changed for path, changed in before.items())
    assert {path.parent.name for path in runs.glob("*/model.safetensors")} == {pilot.key for pilot in log.pilots}


@pytest.mark.slow
def test_command_line_end_to_end(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = [*FLAGS, "--steps", "9", "--methods", "cnn-gp-sorf,cnn-mcd"]
    shown = CliRunner().invoke(cli.app, ["tune", *flags])
    assert shown.exit_code == 0, shown.output
    assert "calgp train --source digits" in shown.stdout and "→" in shown.stdout
    result = CliRunner().invoke(cli.app, ["tune", *flags, "--json"])
    written = json.loads(result.stdout)
    assert {(row["pilots"], row["steps"]) for row in written["rows"]} == {(7, 4 + 2 * 3 + 9)}
    mnll = [row["mnll"] for row in written["rows"]]
    assert mnll == sorted(mnll) and written["budget"] == asdict(Budget(4, 9, samples=2)) | {"images": []}
    logs = {path.stem: read_log(path) for path in Path("tuned").glob("digits-*/*.json")}
    rows = list(csv.DictReader(next(Path("tuned").rglob("table.csv")).read_text().splitlines()))
    assert [row["method"] for row in rows] == [row["method"] for row in written["rows"]]
    best = written["rows"][0]
    trained = CliRunner().invoke(cli.app, [*shlex.split(best["command"])[1:], "--out", "best"])
    assert trained.exit_code == 0, trained.output
    run = logs[best["method"]].run
    assert RunFolder("best").card().run == resolved(run, TrainingData.of(run, None))
    assert not list(Path("tuned").rglob("scores-digits.json"))  # nothing was tested


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["digits", "--methods", "cnn,nothing"], "There is no method 'nothing'"),
        (["digits", "--methods", "cnn,cnn"], "name each method once"),
        (["nowhere"], "There is no image set 'nowhere'"),
        (["digits", "--steps", "1"], "fewer pilots"),
        (["digits", "--methods", "cnn", "--holdout", "0"], "judged by held-out images"),
        (["digits", "--methods", "cnn", "--set", "patience=2"], "patience=2: pilots do not stop early"),
        (["digits", "--set", "method=cnn"], "must be named by --methods"),
    ],
)
def test_bad_input_is_reported(flags, says, tmp_path):
    result = CliRunner().invoke(cli.app, ["tune", *flags, "--out", str(tmp_path / "x")])
    assert isinstance(result.exception, CalgpError) and says in str(result.exception)


def test_where_all_are_finalists_the_best_of_the_only_rung_wins():
    budget = Budget(pilots=8, steps=9, finalists=8)
    found = planned(Run(METHODS["cnn-gp-sorf"], LeNet()), budget, lambda options: options["method.sigma"])
    assert {(pilot.rung, pilot.steps) for pilot in found.pilots} == {(0, 9)}
    assert best_of(found.pilots, 0)[0].mnll == min(pilot.mnll for pilot in found.pilots) < 1.0


def test_rungs_may_have_their_own_number_of_images():
    budget = Budget(pilots=8, steps=1800, images=(3000, 6000, 12_000))
    assert [budget.images_of(steps) for _, steps in budget.rungs] == [3000, 6000, 12_000]
    assert Budget(pilots=8, steps=1800).images_of(600) is None
    with pytest.raises(CalgpError, match="3 rungs"):
        Budget(pilots=8, steps=1800, images=(3000, 6000))
