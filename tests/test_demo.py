"""The demo: equal options for both methods, and a table that says no more than its intervals allow."""

import io
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch.nn.functional import one_hot
from typer.testing import CliRunner

from calgp import cli, metrics
from calgp.cli.demo import (
    DEMO,
    NAMES,
    SCORES,
    STEPS,
    Result,
    conclusion,
    demo_run,
    demo_table,
    paired,
    shown,
    verdict,
)  # fmt: skip
from calgp.runs import RunFolder
from calgp.search.tune import read_log

LOGS = Path(__file__).parents[1] / "results" / "tuning" / "demo"  # in a checkout only


@pytest.fixture(scope="module")
def logs():
    if not LOGS.is_dir():
        pytest.skip("results/ is only in a checkout")
    return {path.stem: read_log(path) for path in LOGS.glob("*.json")}


def test_both_methods_have_the_options_that_tuning_found(logs):
    assert set(logs) == set(DEMO) == set(NAMES)
    for method, log in logs.items():
        tuned = replace(log.run, source="digits-large", holdout=0.0)
        assert demo_run(method) == tuned, method


def test_both_methods_were_tuned_with_the_same_budget_and_hold_out(logs):
    first, second = logs.values()
    assert first.budget == second.budget
    assert first.budget.rungs == ((12, STEPS),)  # all twelve at the full length of the demo
    assert len(first.pilots) == len(second.pilots) == 12
    shared = ("source", "holdout", "split_seed", "seed", "schedule", "batch_size", "backbone", "augment")
    assert [getattr(first.base, name) for name in shared] == [getattr(second.base, name) for name in shared]


def test_the_gaussian_process_is_integrated_and_predicts_in_one_pass():
    assert demo_run("cnn-gp-sorf").method.integrate


def result(name: str, *, scale: float, letters: float, n: int = 800) -> Result:
    """A method whose logits are those of an exact one, 3 f, times `scale`; letters have an entropy about `letters`."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(n) % 4
    f = torch.randn(n, 4, generator=generator) + 3 * one_hot(y, 4)
    outcomes = metrics.outcomes((3 * scale * f).log_softmax(1), y)
    entropy = outcomes.entropy, letters * torch.rand(100, generator=generator)
    values = metrics.scores(outcomes).to_dict() | {"auroc": metrics.ood(*entropy).auroc}
    scores = {score: (values[score], values[score] / 2, values[score] * 2) for score in SCORES}
    return Result(name, 1, outcomes, entropy, scores)


def printed(first: Result, second: Result, width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO())
    console.print(demo_table(first, second, paired(first, second)))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_has_every_number_at_usual_widths(width):
    first, second = result("CNN+GP(SORF)", scale=1, letters=1.0), result("CNN", scale=3, letters=0.1)
    lines = printed(first, second, width)
    text = "\n".join(lines)
    assert max(map(len, lines)) <= width and "…" not in text
    for score in SCORES:
        line = next(line for line in lines if line.split()[:1] == [score.upper()])
        value = paired(first, second)[score].value
        assert shown(score, first.scores[score][0]) in line and shown(score, second.scores[score][0]) in line
        assert f"{'−' if value < 0 else '+'}{shown(score, abs(value))}" in line
    assert "800 digits" in text and "100 letters" in text and "1 pass" in text


def test_what_is_said_follows_from_the_intervals():
    exact, certain = result("A", scale=1, letters=1.0), result("B", scale=3, letters=1.0)
    found = paired(exact, certain)
    assert found["err"] == metrics.Difference(0.0, 0.0)  # the same labels
    assert found["mnll"].is_clear and found["mnll"].value < 0 and found["ece"].is_clear and found["ece"].value < 0
    said = conclusion("A", "B", found)
    assert "better in MNLL and ECE" in said and "not clearly better or worse in ERR" in said
    turned = conclusion("B", "A", paired(certain, exact))
    assert "worse in MNLL and ECE" in turned  # nothing is hidden where the first one loses


def test_higher_is_better_for_auroc_alone():
    up, down = metrics.Difference(0.2, 0.1), metrics.Difference(-0.2, 0.1)
    assert {score: verdict(score, up) for score in SCORES} == {
        "err": "worse", "mnll": "worse", "ece": "worse", "auroc": "better"
    }  # fmt: skip
    assert verdict("mnll", down) == "better" and verdict("auroc", down) == "worse"
    assert verdict("mnll", metrics.Difference(-0.2, 0.2)) == "not clear"


@pytest.mark.slow
def test_the_demo_trains_predicts_in_one_pass_and_writes_a_report(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["calgp.cli.demo"], "STEPS", 2)  # all of it but the length
    ran = CliRunner().invoke(cli.app, ["demo", "--out", str(tmp_path), "--threads", "1"], catch_exceptions=False)
    assert ran.exit_code == 0 and "Against CNN, CNN+GP(SORF) is" in ran.output
    assert (tmp_path / "report.html").stat().st_size > 10_000
    for method in NAMES:
        folder = RunFolder(tmp_path / method)
        digits, letters = folder.evaluation("digits-large"), folder.evaluation("letters")
        assert digits is not None and letters is not None
        assert (digits.n, letters.n, digits.samples) == (8000, 1000, 1)
