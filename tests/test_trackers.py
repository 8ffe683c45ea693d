"""A run in TensorBoard and in MLflow, read back by their own readers."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from calgp import cli, trackers
from calgp.errors import CalgpError
from calgp.runs import RunFolder, from_json, shipped_run
from calgp.training import train_run

TINY = {
    "method": {"name": "cnn"}, "backbone": {"name": "lenet", "channels": [2, 2], "hidden": [4]},
    "train_size": 100, "holdout": 0.2, "steps": 43, "batch_size": 20,
}  # fmt: skip


def events(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard itself reads from event files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(directory)).Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of tensorboard's own imports
def test_tensorboard_reads_the_log_and_the_scores(tmp_path):
    folder = shipped_run()
    said = trackers.track(folder, "tensorboard", str(tmp_path))
    assert str(tmp_path) in said
    found, log = events(tmp_path / folder.name), folder.log()
    losses = [(record.step, pytest.approx(record.nll, rel=1e-6)) for record in log if record.kind == "train"]
    assert found["train/nll"] == losses
    assert found["digits/err"] == [(log[-1].step, pytest.approx(folder.evaluation("digits").scores.err))]
    assert "letters/mean_entropy" in found


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_training_is_watched_as_it_goes(tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "EVERY", 20)
    run, folder = from_json(TINY), RunFolder(tmp_path / "run")
    sizes = []
    with trackers.tensorboard_watch(folder, tmp_path / "events") as watch:

        def both(step):
            watch(step)
            sizes.append(sum(file.stat().st_size for file in (tmp_path / "events").rglob("events*")))

        train_run(run, folder, watch=both)
    assert sizes[0] < sizes[25] < sizes[-1]  # it was written while the run was trained
    found, log = events(tmp_path / "events" / "run"), folder.log()
    for kind, name in (("train", "nll"), ("train", "kl"), ("holdout", "err"), ("holdout", "mnll")):
        expected = [(r.step, pytest.approx(getattr(r, name), rel=1e-6)) for r in log if r.kind == kind]
        assert found[f"{kind}/{name}"] == expected
    assert [step for step, _ in found["train/nll"]] == [20, 40, 43]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # MLflow's imports, and its store of files, warn
def test_mlflow_reads_parameters_metrics_and_files(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path / "run")
    shutil.copytree(shipped_run().path, folder.path)
    before = dict(os.environ)
    trackers.track(folder, "mlflow", str(tmp_path / "store"))
    assert dict(os.environ) == before
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=(tmp_path / "store").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("calgp").experiment_id])
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert run.data.params["method.frequencies"] == "sorf"
    assert run.data.params["backbone.channels"] == "(32, 64)"
    assert run.data.params["seed"] == "0"
    history = client.get_metric_history(run.info.run_id, "train/nll")
    losses = [(record.step, record.nll) for record in folder.log() if record.kind == "train"]
    assert sorted((point.step, point.value) for point in history) == losses
    assert run.data.metrics["digits/ece"] == folder.evaluation("digits").scores.ece
    names = {artifact.path for artifact in client.list_artifacts(run.info.run_id)}
    assert {"run.json", "log.jsonl", "scores-digits.json"} <= names
    assert "model.safetensors" not in names


def test_refusals_are_sentences(tmp_path, monkeypatch):
    with pytest.raises(CalgpError, match="tensorboard, mlflow"):
        trackers.track(shipped_run(), "wandb", str(tmp_path))
    for package, extra in (("torch.utils.tensorboard", "tensorboard"), ("mlflow", "mlflow")):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(CalgpError, match=rf"calgp\[{extra}\]"):
            trackers.track(shipped_run(), extra, str(tmp_path))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_commands_write_event_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = [f"--set=backbone.{name}" for name in ("channels=[2,2]", "hidden=[4]")]
    size = ["--train-size", "100", "--steps", "3", "--out", "run", "--method", "cnn", "--backbone", "lenet", *options]
    for arguments in (["train", *size, "--tensorboard", "live"], ["track", "run", "--to", "tensorboard"]):
        done = CliRunner().invoke(cli.app, arguments)
        assert done.exit_code == 0, done.output
    for directory in ("live", "events"):
        assert [step for step, _ in events(tmp_path / directory / "run")["train/nll"]] == [3]


def test_parameters_are_flat_and_plain():
    flat = trackers.parameters(shipped_run())
    assert flat["method.kind"] == "CnnGp"
    assert flat["task.classes"] == 10
    json.dumps(flat)
