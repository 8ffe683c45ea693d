"""The tools that check and sum up verdicts, on results that are really made."""

import itertools
import json
import shutil
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from calgp import cli
from calgp.paper import EXPERIMENTS, page, rows_of
from calgp.paper.scales import MNIST, RF, SCALES
from calgp.report.panels import Drawn
from calgp.search.jobs import Paths
from forked import python

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.skipif(not (ROOT / "tools").is_dir(), reason="tools/ is only in a checkout")


def checked(folder: Path) -> tuple[int, str]:
    """By another process, which must not import calgp."""
    script = f"""
import runpy, sys
sys.modules["calgp"] = None
sys.argv = ["check_verdicts", {str(folder)!r}]
runpy.run_path({str(ROOT / "tools/check_verdicts.py")!r}, run_name="__main__")
"""
    done = python("-c", script)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def smoke(reproduced, tmp_path_factory) -> Path:
    """Figures 3 and 4 at smoke scale: bounds, trends, pairs, two metrics of a row, panels, detection."""
    folder, where = tmp_path_factory.mktemp("smoke"), Paths(reproduced / "runs", keep=reproduced / "results")
    for name in ("fig3", "fig4"):
        rows = rows_of(EXPERIMENTS[name].planned(SCALES["smoke"]), where)
        assert all(row.resampled is not None for row in rows)  # so that intervals are paired
        shutil.copytree(reproduced / "smoke" / name, folder / name)
    return folder


@pytest.mark.slow
def test_verdicts_recomputed_by_other_code_agree(smoke):
    status, output = checked(smoke)
    assert status == 0, output
    assert "fig3: 5 comparisons checked" in output and "fig4: 13 comparisons checked" in output


def _flipped(table):
    part = table["verdicts"][-1]["comparisons"][0]
    part["state"] = "held" if part["state"] != "held" else "not held"


def _moved(table):
    table["verdicts"][0]["comparisons"][0]["difference"] += 0.01


def _claimed(table):
    table["verdicts"][0]["state"] = "held"


@pytest.mark.slow
@pytest.mark.parametrize("change", [_flipped, _moved, _claimed])
def test_verdicts_that_the_results_do_not_support_are_found(smoke, tmp_path, change):
    table = json.loads((smoke / "fig3" / "table.json").read_text())
    change(table)
    (tmp_path / "fig3").mkdir()
    (tmp_path / "fig3" / "table.json").write_text(json.dumps(table))
    status, output = checked(tmp_path)
    assert status == 1 and "recomputed" in output


@pytest.fixture(scope="module")
def claims():
    sys.path.insert(0, str(ROOT / "tools"))
    import claims  # pyright: ignore[reportMissingImports]

    sys.path.pop(0)
    return claims


def part(state: str, panel: str = MNIST, leaning: str = "for", at_paper_scale: bool = True, places=(0, 1)):
    return {
        "state": state, "panel": panel, "leaning": leaning, "at_paper_scale": at_paper_scale, "rows": list(places),
        "metrics": ["ece"], "metric": "ece", "difference": -0.1, "interval": [-0.2, -0.05], "offset": 0.0,
    }  # fmt: skip


ROWS = [{"network": "lenet", "training images": "60,000", "seeds": [0, 1, 2]}] * 2


def found(claims, *verdicts):
    """A claim as scales found it: (scale, state at the paper's scale, comparisons)."""
    return claims.Claim("fig2", "a < b", tuple(
        (scale, ROWS, {"claim": "a < b", "comparisons": parts, "at_paper_scale": {"state": state}})
        for scale, state, parts in verdicts
    ))  # fmt: skip


@pytest.mark.parametrize(
    ("state", "word"),
    [("held", "supported"), ("not held", "contradicted"), ("mixed", "mixed"), ("undecided", "undecided")],
)
def test_a_claim_that_was_tested_at_the_papers_scale_has_a_word(claims, state, word):
    shown, evidence = claims.at_paper_scale(found(claims, ("desk", state, [part("held")])))
    assert shown == word
    assert evidence == "for: difference −0.100 (−0.200 … −0.050); lenet, 60,000 images, 3 seeds"


def test_one_seed_at_the_papers_scale_is_no_test_of_it(claims):
    shown, evidence = claims.at_paper_scale(found(claims, ("laptop", "one seed", [part("one seed")])))
    assert shown == "not tested" and evidence.startswith("one seed, for")


def test_a_claim_tested_on_some_panels_says_on_how_many(claims):
    parts = [part("held"), part("held", "CIFAR", at_paper_scale=False)]
    assert claims.at_paper_scale(found(claims, ("laptop", "held", parts)))[0] == "supported, 1 of 2 panels"


def test_the_largest_scale_that_tests_a_claim_counts(claims):
    small, large = ("laptop", "held", [part("held")]), ("desk", "not held", [part("not held")])
    assert claims.at_paper_scale(found(claims, small, large))[0] == "contradicted"
    assert claims.at_paper_scale(found(claims, small, ("desk", "one seed", [part("one seed")])))[0] == "supported"
    assert claims.at_paper_scale(found(claims, ("desk", "not run", [])))[0] == "not tested"


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / "results/reproduce").is_dir(), reason="results/ is only in a checkout")
def test_the_page_of_claims_is_what_the_results_say(claims, tmp_path, monkeypatch):
    """docs/claims.md is written from results/ and says nothing else; the verdicts in it agree with other code."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(page, "draw", lambda *_: Drawn("<svg/>", b"", "not drawn: its tables are what counts here"))
    monkeypatch.setattr(page, "draw_frontier", lambda *_: None)
    folders = [tmp_path / scale for scale in ("laptop", "desk")]
    for folder, name in itertools.product(folders, claims.NAMES):
        options = ["--scale", folder.name, "--pages", "--results", "results", "--out", str(tmp_path)]
        assert CliRunner().invoke(cli.app, ["reproduce", name, *options]).exit_code == 0
    for folder in folders:
        status, output = checked(folder)
        assert status == 0, output
    (tmp_path / "docs").mkdir()
    monkeypatch.setattr(claims, "DOCS", tmp_path / "docs")
    claims.main(*map(str, folders))
    assert (tmp_path / "docs/claims.md").read_text() == (ROOT / "docs/claims.md").read_text()
    assert RF in (tmp_path / "docs/claims.md").read_text()
