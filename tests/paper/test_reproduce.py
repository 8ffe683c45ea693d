"""Running what is missing: never twice, after any kill, from kept results too; and the files that come of it."""

import csv
import dataclasses
import json
import shlex
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from typer.testing import CliRunner

from calgp import cli
from calgp.errors import CalgpError
from calgp.methods import METHODS
from calgp.nets import LeNet
from calgp.paper import EXPERIMENTS, SCALES, Cell, jobs_of, rows_of, run_missing
from calgp.paper.page import table_of, write_experiment
from calgp.paper.scales import MNIST
from calgp.run import train_command
from calgp.runs import Classifier, Run, RunFolder
from calgp.search import jobs
from calgp.search.engines import Processes
from calgp.search.jobs import Paths, Shift
from calgp.training import resumable
from calgp.training import run_training as training

# nothing is left to the images, as in the paper's experiments: kept results are found by the run that was asked for
FIXED = Run(METHODS["cnn-gp-sorf"], LeNet(), holdout=0.0, augment=(), crop=4, calibration=False, train_size=100)
RUN = dataclasses.replace(FIXED, backbone=LeNet(channels=(2, 4), hidden=(8,)), steps=4, batch_size=20)
CELL = Cell("SORF", MNIST, None, (RUN, dataclasses.replace(RUN, seed=1)), samples=2, outside="letters")


def kept_in(folder: Path) -> Paths:
    """Runs and their small results in a folder."""
    return Paths(folder / "runs", keep=folder / "kept")


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A folder in which CELL is done and kept; tests that change it take a copy."""
    folder = tmp_path_factory.mktemp("finished")
    assert run_missing([CELL], kept_in(folder)) == {}
    return folder


@pytest.fixture
def done(finished, tmp_path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(finished, tmp_path / "done"))


@pytest.fixture
def counted(monkeypatch):
    """Counts the optimiser steps, trainings and evaluations that are really made."""
    made = {"steps": 0, "train": 0, "evaluate": 0}
    fit, train, evaluate = resumable.fit, jobs.train_run, Classifier.evaluate

    def counting_fit(*arguments, **options):
        for step in fit(*arguments, **options):
            made["steps"] += 1
            yield step

    def counting(name, function):
        def call(*arguments, **options):
            made[name] += 1
            return function(*arguments, **options)

        return call

    monkeypatch.setattr(resumable, "fit", counting_fit)
    monkeypatch.setattr(jobs, "train_run", counting("train", train))
    monkeypatch.setattr(Classifier, "evaluate", counting("evaluate", evaluate))
    return made


def test_what_is_done_is_not_done_again(tmp_path, counted):
    where = kept_in(tmp_path)
    assert run_missing([CELL], where) == {}
    assert counted == {"steps": 8, "train": 2, "evaluate": 4}
    seen = []
    assert run_missing([CELL, CELL], where, watch=seen.append) == {}
    assert counted == {"steps": 8, "train": 2, "evaluate": 4}
    assert seen[-1].jobs == 0
    (row,) = rows_of([CELL], where)
    assert len(row.values["err"]) == len(row.values["auroc"]) == 2
    assert row.planned == 2


def test_probabilities_with_a_temperature_from_the_hold_out_are_a_row_of_their_own(tmp_path, counted):
    """One training, scored as it is and with p ∝ p̄^(1/T); neither is made twice."""
    run, where = dataclasses.replace(RUN, holdout=0.2), kept_in(tmp_path)
    plain = Cell("SORF", MNIST, None, (run,), samples=2)
    cells = [plain, dataclasses.replace(plain, method="SORF+T", temperature=True)]
    for _ in range(2):
        assert run_missing(cells, where) == {}
        assert counted == {"steps": 4, "train": 1, "evaluate": 2}
    as_trained, calibrated = rows_of(cells, where)
    folder = RunFolder(where.runs / jobs.key(run))
    predicted, found = folder.predictions("digits", None, 10), folder.calibration()
    assert predicted is not None and found is not None and found.calibrator == "temperature"
    log_probs = (predicted["log_probs"].double() / found.parameters["temperature"]).log_softmax(1)
    expected = -log_probs.gather(1, predicted["y"][:, None]).mean().item()
    assert calibrated.values["mnll"] == pytest.approx((expected,), rel=1e-5)  # columns are kept in single precision
    assert (
        calibrated.values["err"] == as_trained.values["err"] and calibrated.values["mnll"] != as_trained.values["mnll"]
    )


def test_a_kill_in_training_loses_no_checkpointed_step(tmp_path, counted, monkeypatch):
    """Killed between two steps (nothing is saved in dying), after a checkpoint at step 2."""
    where, cell = kept_in(tmp_path), dataclasses.replace(CELL, runs=(RUN,), outside=None)
    monkeypatch.setattr(training, "CHECKPOINT_SECONDS", -1.0)
    monkeypatch.setattr(resumable, "save_checkpoint", _until(2, resumable.save_checkpoint))
    with pytest.raises(SystemExit):
        run_missing([cell], where)
    monkeypatch.undo()
    folder = RunFolder(where.runs / jobs.key(RUN))
    assert folder.interrupted and not folder.finished
    assert rows_of([cell], where)[0].values == {}  # what is half done is no result
    steps = []
    jobs_of([cell])[0].perform(where, steps.append)
    assert steps == [0.8 * 3 / 4, 0.8]  # steps 3 and 4 alone
    assert len(rows_of([cell], where)[0].values["err"]) == 1
    straight = kept_in(tmp_path / "straight")
    run_missing([cell], straight)
    assert rows_of([cell], where)[0].values["mnll"] == pytest.approx(rows_of([cell], straight)[0].values["mnll"])


def _until(steps, save):
    def saving(folder, model, optimiser, done, stopping):
        save(folder, model, optimiser, done, stopping)
        if done.step == steps:
            raise SystemExit

    return saving


@pytest.mark.slow
def test_a_kill_between_evaluations_repeats_none(tmp_path, counted, monkeypatch):
    where, cell = kept_in(tmp_path), dataclasses.replace(CELL, runs=(RUN,))
    counting = Classifier.evaluate

    def killed_at_letters(classifier, source, **options):
        if source == "letters":
            raise SystemExit
        return counting(classifier, source, **options)

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(Classifier, "evaluate", killed_at_letters)
        run_missing([cell], where)
    assert counted == {"steps": 4, "train": 1, "evaluate": 1}
    run_missing([cell], where)
    assert counted == {"steps": 4, "train": 1, "evaluate": 2}


@pytest.mark.slow
def test_a_run_killed_before_its_first_checkpoint_starts_again(tmp_path):
    where, cell = kept_in(tmp_path), dataclasses.replace(CELL, runs=(RUN,), outside=None)
    run_missing([cell], where)
    folder = RunFolder(where.runs / jobs.key(RUN))
    for file in folder.path.iterdir():
        if file.name not in ("run.json", "log.jsonl"):
            file.unlink()
    assert run_missing([cell], where) == {}
    assert rows_of([cell], where)[0].values


def test_kept_results_are_taken_by_content_whatever_their_folder_is_called(done, counted):
    where = kept_in(done)
    names = {file.name for file in (done / "kept" / jobs.key(RUN)).iterdir()}
    assert names == {
        "run.json", "log.jsonl", "scores-digits.json", "scores-letters.json", "images-digits.safetensors.gz",
        "images-letters.safetensors.gz",
    }  # fmt: skip
    assert "command" not in json.loads((done / "kept" / jobs.key(RUN) / "run.json").read_text())["environment"]
    (done / "kept" / jobs.key(RUN)).rename(done / "kept" / "somebody's name")
    elsewhere = Paths(done / "none", results=(done / "kept",))
    assert run_missing([CELL], elsewhere) == {}
    assert set(counted.values()) == {0}
    assert rows_of([CELL], elsewhere)[0].values == rows_of([CELL], where)[0].values


def test_a_finished_run_that_was_not_kept_changes_no_row(done):
    """Rows are a function of small results alone: what only lies in the folder of runs does not count."""
    shutil.rmtree(done / "kept")
    assert rows_of([CELL], Paths(done / "runs", results=(done / "kept",)))[0].values == {}
    assert run_missing([CELL], kept_in(done)) == {}  # keeps what is finished
    assert len(rows_of([CELL], kept_in(done))[0].values["err"]) == 2


def test_results_that_were_given_go_before_those_that_are_kept(finished, done):
    """The four cells: the same run, made again on another machine, replaced the repository's numbers on a page."""
    scores = done / "kept" / jobs.key(RUN) / "scores-digits.json"
    data = json.loads(scores.read_text())
    data["scores"]["mnll"] = 9.0
    scores.write_text(json.dumps(data))
    where = dataclasses.replace(kept_in(finished), results=(done / "kept",))
    assert rows_of([CELL], where)[0].values["mnll"][0] == 9.0


def test_kept_runs_without_per_image_scores_get_them_and_count_without_them(done):
    paired = rows_of([CELL], kept_in(done))[0]
    for file in (done / "kept").rglob("images-*"):
        file.unlink()
    (row,) = rows_of([CELL], kept_in(done))
    assert paired.resampled is not None and row.resampled is None
    assert row.values == paired.values
    assert row.half("err") is not None
    run_missing([CELL], kept_in(done))
    assert rows_of([CELL], kept_in(done))[0].resampled is not None


def test_resampled_scores_agree_with_the_stored_bootstrap_intervals(tmp_path):
    """Half precision, other resamples: the standard errors are the same up to the chance of 500 resamples."""
    network = LeNet(channels=(4, 8), hidden=(16,))
    more = {"train_size": 200, "steps": 60, "batch_size": 32, "learning_rate": 1e-2}
    run = dataclasses.replace(FIXED, method=METHODS["cnn"], backbone=network, **more)
    cell = dataclasses.replace(CELL, runs=(run,))
    run_missing([cell], kept_in(tmp_path))
    (row,) = rows_of([cell], kept_in(tmp_path))
    assert row.resampled is not None
    for metric in ("err", "mnll", "brier", "auroc", "fpr95"):
        values = row.resampled.metrics[metric]
        assert float(values.mean()) == pytest.approx(row.mean(metric), abs=0.3 * row.halves[metric]), metric
        assert 1.96 * float(values.std()) == pytest.approx(row.halves[metric], rel=0.2), metric


@pytest.mark.slow
def test_a_metric_that_half_precision_does_not_reproduce_is_not_paired(tmp_path):
    """Functions near 0: all entropies are log 10 up to half precision, so their order is lost, and AUROC with it."""
    small = dataclasses.replace(RUN, method=dataclasses.replace(RUN.method, sigma=1e-3, scale=None))
    cell = dataclasses.replace(CELL, runs=(small, dataclasses.replace(small, seed=1)))
    run_missing([cell], kept_in(tmp_path))
    (row,) = rows_of([cell], kept_in(tmp_path))
    assert row.resampled is not None
    assert "auroc" not in row.resampled.metrics and "auroc" in row.halves
    assert row.half("auroc") is not None


def test_kept_results_with_other_samples_do_not_count(tmp_path):
    sampled = dataclasses.replace(RUN, method=dataclasses.replace(RUN.method, integrate=False))
    cell = dataclasses.replace(CELL, runs=(sampled,), outside=None)
    run_missing([cell], kept_in(tmp_path))
    (row,) = rows_of([dataclasses.replace(cell, samples=3)], Paths(tmp_path / "none", results=(tmp_path / "kept",)))
    assert (row.values, row.planned) == ({}, 1)


def test_a_run_that_fails_is_reported_and_the_others_go_on(tmp_path):
    failing = dataclasses.replace(RUN, learning_rate=9e11, optimiser="sgd", kl_weight=9e11, steps=8)
    cells = [CELL, dataclasses.replace(CELL, method="failing", runs=(failing,))]
    failures = run_missing(cells, kept_in(tmp_path))
    assert list(failures) == [jobs.key(failing)]
    assert "Training failed" in failures[jobs.key(failing)]
    good, bad = rows_of(cells, kept_in(tmp_path))
    assert len(good.values["err"]) == 2
    assert bad.values == {}


def test_absent_images_are_reported_once(tmp_path, monkeypatch):
    cells = [
        dataclasses.replace(CELL, runs=tuple(dataclasses.replace(RUN, source="cifar10", seed=s) for s in range(3)))
    ]
    failures = run_missing(cells, Paths(tmp_path / "runs", data=tmp_path / "nothing"))
    assert list(failures) == ["cifar10"]
    assert "3 runs were not made; --data" in failures["cifar10"]


def test_one_run_of_two_experiments_is_one_job():
    other = dataclasses.replace(CELL, method="other", outside=None)
    jobs = jobs_of([other, CELL, dataclasses.replace(CELL, test=Shift("blur", 2))])
    assert [(job.run.seed, job.outside, job.tests) for job in jobs] == [
        (seed, ("letters",), (None, Shift("blur", 2))) for seed in (0, 1)
    ]


def test_progress_ends_at_the_whole(tmp_path):
    seen = []
    run_missing([CELL], Paths(tmp_path / "runs"), watch=seen.append)
    assert [p.work for p in seen] == sorted(p.work for p in seen)
    assert (seen[-1].work, seen[-1].done) == (pytest.approx(seen[-1].whole), 2)


def test_files_of_an_experiment(finished, tmp_path):
    """Published and measured side by side, and what was not run says so, in every file."""
    cells = [CELL, Cell("not made", MNIST, None, (), samples=2)]
    rows = rows_of(cells, kept_in(finished))
    experiment = dataclasses.replace(EXPERIMENTS["tab3"], published=())
    page = write_experiment(experiment, SCALES["smoke"], cells, rows, tmp_path / "out", command=["calgp", "reproduce"])
    assert {file.name for file in page.parent.iterdir()} == {
        "report.html", "tab3.svg", "tab3.png", "table.csv", "table.json",
    }  # fmt: skip
    assert ET.parse(page.parent / "tab3.svg").getroot().tag.endswith("svg")  # noqa: S314 (our own)
    assert (page.parent / "tab3.png").read_bytes().startswith(b"\x89PNG")
    html = page.read_text()
    assert "not run" in html and 'src="http' not in html and "<script" not in html
    made, missing = csv.DictReader((page.parent / "table.csv").read_text().splitlines())
    assert float(made["err"]) == pytest.approx(rows[0].mean("err"))
    assert missing["err"] == "not run"
    written = json.loads((page.parent / "table.json").read_text())
    assert [row["err"] for row in written["rows"]] == [row["err"] for row in table_of(experiment, rows)]
    assert set(written["runs"]) == {jobs.key(run) for run in CELL.runs}


@pytest.mark.slow
def test_processes_give_the_same_numbers(finished, tmp_path):
    assert run_missing([CELL], kept_in(tmp_path), engine=Processes(2)) == {}
    here, there = (rows_of([CELL], kept_in(folder))[0].values for folder in (finished, tmp_path))
    assert here["mnll"] == pytest.approx(there["mnll"], rel=1e-5)


def invoked(*arguments: str):
    result = CliRunner().invoke(cli.app, ["reproduce", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.mark.slow
def test_command_line_end_to_end(figure3, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(figure3, "reproduced")
    page = tmp_path / "reproduced/smoke/fig3/report.html"
    assert "4 of 4" in page.read_text()
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "reproduced/runs").rglob("*.json")}
    again = invoked("fig3", "--scale", "smoke")
    assert again.exit_code == 0, again.output
    assert made == {path: path.stat().st_mtime_ns for path in (tmp_path / "reproduced/runs").rglob("*.json")}


@pytest.mark.slow
def test_pages_are_made_from_results_alone(figure3, tmp_path, monkeypatch):
    """A finished run in OUT/runs that was not kept does not change a page; neither does OUT/results, unless asked."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(figure3, "reproduced")
    options = ("fig3", "--scale", "smoke", "--pages")
    page = tmp_path / "reproduced/smoke/fig3/table.json"

    def seeds() -> int:
        return sum(len(row["seeds"]) for row in json.loads(page.read_text())["rows"])

    invoked(*options, "--results", "elsewhere")
    assert seeds() == 0
    invoked(*options, "--results", "reproduced/results")
    assert seeds() == 4
    invoked(*options)
    assert seeds() == 4


def test_pages_without_runs_say_not_run_and_tell_the_cost(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = invoked("fig1", "--scale", "paper", "--pages")
    assert "9 runs are missing: about" in " ".join(result.output.split())
    assert "ECE, paper</th>" in (tmp_path / "reproduced/paper/fig1/report.html").read_text()
    page = (tmp_path / "reproduced/paper/fig1/report.html").read_text()
    assert "not run" in page and "0.294" in page
    assert not (tmp_path / "reproduced/runs").exists()


def test_the_command_of_a_training_trains_that_very_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = dataclasses.replace(SCALES["smoke"].run("CNN+GP(RF)", MNIST, 100, 1), steps=1, kl_weight=0.5, holdout=0.2)
    result = CliRunner().invoke(cli.app, [*shlex.split(train_command(run))[1:], "--out", "run"])
    assert result.exit_code == 0, result.output
    assert jobs.key(RunFolder("run").card().run) == jobs.key(run)


def test_list_names_every_experiment():
    output = invoked("--list").output
    assert all(name in output for name in EXPERIMENTS)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("fig9",), "no experiment 'fig9'"),
        (("fig1", "--scale", "big"), "no scale 'big'"),
        (("fig1", "--jobs", "0"), "jobs=0"),
    ],
)
def test_mistakes_are_reported(arguments, says):
    with pytest.raises(CalgpError, match=says):
        invoked(*arguments)


@pytest.mark.slow
def test_everything_at_smoke_scale(reproduced):
    for name in EXPERIMENTS:
        written = json.loads((reproduced / "smoke" / name / "table.json").read_text())
        assert all(row["err"] != "not run" for row in written["rows"]), name
