"""What is done of an experiment, by its small results alone."""

import shutil
from pathlib import Path

from typer.testing import CliRunner

from calgp import cli
from calgp.paper import EXPERIMENTS, SCALES, coverage, jobs_of
from calgp.runs import RunFolder
from calgp.search.jobs import Paths

FIGURE = EXPERIMENTS["fig3"]


def test_what_was_run_is_done_and_what_was_removed_is_missing(figure3: Path, tmp_path: Path):
    shutil.copytree(figure3 / "results", tmp_path / "results")
    where = Paths(tmp_path, (tmp_path / "results",))
    whole = coverage([FIGURE], SCALES["smoke"], where)["fig3"]
    jobs = jobs_of(FIGURE.planned(SCALES["smoke"]))
    assert (whole.done, whole.missing, whole.tunings_missing, whole.seconds_missing) == (len(jobs), 0, 0, 0.0)
    removed = RunFolder(tmp_path / "results" / jobs[0].key)
    took = removed.train_seconds()
    shutil.rmtree(removed.path)
    part = coverage([FIGURE], SCALES["smoke"], where)["fig3"]
    assert (part.done, part.missing, part.seconds_missing) == (len(jobs) - 1, 1, jobs[0].seconds)
    assert abs(whole.seconds_done - part.seconds_done - took) < 1e-9


def test_a_tuned_scale_lacks_its_tunings_too(tmp_path: Path):
    found = coverage([FIGURE], SCALES["desk"], Paths(tmp_path))["fig3"]
    assert (found.done, found.missing, found.tunings_missing) == (0, 3, 1)
    assert found.seconds_missing > sum(job.seconds for job in jobs_of(FIGURE.planned(SCALES["desk"])))


def test_the_list_says_what_is_missing(tmp_path: Path):
    result = CliRunner().invoke(
        cli.app, ["reproduce", "fig3", "--list", "--scale", "desk", "--results", str(tmp_path), "--out", str(tmp_path)]
    )
    assert result.exit_code == 0
    assert "Scale desk" in result.stdout and "tunings" in result.stdout
