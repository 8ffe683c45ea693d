import math
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from lightning_fabric import Fabric

from calgp.data import load
from calgp.errors import CalgpError
from calgp.gp import Bound, NumericalError
from calgp.runs import Interrupted, RunFolder, fit, train
from calgp.runs import training as training_module
from calgp.runs.folder import build
from calgp.runs.training import TrainingData, make_optimiser, order

from .conftest import small


def test_an_epoch_sees_every_image_once_and_each_epoch_another_order():
    first = torch.cat([order(250, 100, step, seed=1) for step in range(3)])
    second = torch.cat([order(250, 100, step, seed=1) for step in range(3, 6)])
    assert first.sort().values.equal(torch.arange(250))
    assert second.sort().values.equal(torch.arange(250))
    assert not first.equal(second)
    assert not first.equal(torch.cat([order(250, 100, step, seed=2) for step in range(3)]))


def test_training_lowers_the_bound(trained):
    log = [record for record in trained.log() if record["kind"] == "train"]
    assert log[-1]["step"] == 30
    assert log[-1]["nll"] < log[0]["nll"]
    assert all(record["kl"] > 0 for record in log)


def test_the_same_seed_gives_the_same_weights_and_another_seed_others(tmp_path, fabric):
    states = [
        train(small(steps=5, seed=seed), RunFolder(tmp_path / name), fabric).state_dict()
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    ]
    assert all(states[0][key].equal(states[1][key]) for key in states[0])
    assert any(not states[0][key].equal(states[2][key]) for key in states[0])


def test_an_interrupted_run_resumes_to_the_same_bits(tmp_path, fabric):
    run = small(steps=12)
    whole = train(run, RunFolder(tmp_path / "whole"), fabric)
    folder = RunFolder(tmp_path / "parts")

    def interrupt(step):
        if step.step == 5:
            os.kill(os.getpid(), signal.SIGINT)  # Ctrl-C

    with pytest.raises(Interrupted, match="step 5 of 12"):
        train(run, folder, fabric, watch=interrupt)
    assert folder.interrupted and not folder.finished
    resumed = train(run, folder, fabric, resume=True)
    assert folder.finished and not folder.interrupted
    for key, value in whole.state_dict().items():
        assert value.equal(resumed.state_dict()[key]), key
    assert [record["step"] for record in folder.log()] == [12]


class Failing:
    """Stands for a method's model from some step on: `spoil(model)` is called before it."""

    def __init__(self, monkeypatch, step, spoil):
        self.calls = 0
        forward = Bound.forward

        def failing(bound, *args):
            self.calls += 1
            if self.calls == step:
                return spoil(bound, *args)
            return forward(bound, *args)

        monkeypatch.setattr(Bound, "forward", failing)


def not_finite(bound, *args):
    parameter = next(bound.model.parameters())
    return parameter.sum() * math.nan, bound.model.kl()


def not_positive_definite(bound, *args):
    raise NumericalError("the covariance of the inducing variables is not positive definite")


def infinite_gradient(bound, *args):
    """The loss is 0, and finite; its gradient is 0 · ∞."""
    parameter = next(bound.model.parameters())
    return (parameter * 0).sqrt().sum() + bound.model.kl() * 0, bound.model.kl()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [(not_finite, "no finite number: likelihood term nan"), (not_positive_definite, "not positive")],
)
def test_a_step_that_fails_keeps_the_state_before_it(tmp_path, fabric, monkeypatch, spoil, message):
    """It is the checkpoint that a Ctrl-C after that step would have left, to the bit."""
    run, failed, stopped = small(steps=12), RunFolder(tmp_path / "failed"), RunFolder(tmp_path / "stopped")

    def interrupt(step):
        if step.step == 5:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted):
        train(run, stopped, fabric, watch=interrupt)
    whole = train(run, RunFolder(tmp_path / "whole"), fabric)
    with (
        monkeypatch.context() as patch,
        pytest.raises(CalgpError, match=f"after step 5: .*{message}.*step 5") as caught,
    ):
        Failing(patch, 6, spoil)
        train(run, failed, fabric)
    assert isinstance(caught.value.__cause__, NumericalError)
    assert failed.interrupted and not failed.finished
    one, other = (folder.tensors("checkpoint.safetensors") for folder in (failed, stopped))
    assert one.keys() == other.keys() and all(one[key].equal(other[key]) for key in one)
    resumed = train(run, failed, fabric, resume=True)  # the failure was the test's, so it does not come again
    assert all(value.equal(resumed.state_dict()[key]) for key, value in whole.state_dict().items())


def test_a_state_that_is_itself_spoiled_is_not_kept(tmp_path, fabric, monkeypatch):
    """A gradient that is not finite spoils the parameters in the step before the loss tells."""
    folder = RunFolder(tmp_path / "run")
    Failing(monkeypatch, 3, infinite_gradient)
    with pytest.raises(CalgpError, match=r"after step 3: the bound is no finite number.*No good state"):
        train(small(steps=12), folder, fabric)
    assert not folder.interrupted and not folder.finished


def test_an_older_checkpoint_outlives_a_spoiled_state(tmp_path, fabric, monkeypatch):
    folder = RunFolder(tmp_path / "run")
    Failing(monkeypatch, 3, infinite_gradient)
    monkeypatch.setattr(training_module, "CHECKPOINT_SECONDS", 0)
    with pytest.raises(CalgpError, match=r"after step 3: .* is no longer finite.*keeps the state after step 2"):
        train(small(steps=12), folder, fabric)
    assert all(value.isfinite().all() for value in folder.tensors("checkpoint.safetensors").values())


def test_a_model_spoiled_by_the_last_step_is_no_finished_run(tmp_path, fabric, monkeypatch):
    folder = RunFolder(tmp_path / "run")
    Failing(monkeypatch, 4, infinite_gradient)
    with pytest.raises(CalgpError, match="no longer finite"):
        train(small(steps=4), folder, fabric)
    assert not folder.finished


def test_ctrl_c_is_restored_after_training(tmp_path, fabric):
    before = signal.getsignal(signal.SIGINT)
    train(small(steps=1), RunFolder(tmp_path / "run"), fabric)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_folder_that_holds_a_run_is_not_overwritten(trained, fabric):
    with pytest.raises(CalgpError, match="already holds a run"):
        train(small(), trained, fabric)


def test_what_cannot_be_resumed_says_why(trained, tmp_path, fabric):
    with pytest.raises(CalgpError, match="finished"):
        train(trained.card().run, trained, fabric, resume=True)
    with pytest.raises(CalgpError, match="no checkpoint"):
        train(small(), RunFolder(tmp_path / "none"), fabric, resume=True)


def test_resuming_on_other_images_is_refused(tmp_path, fabric):
    folder = RunFolder(tmp_path / "run")

    def interrupt(step):
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted):
        train(small(), folder, fabric, watch=interrupt)
    others = TrainingData(load("digits", "train").balanced(200, seed=99), None)
    with pytest.raises(CalgpError, match="not those"):
        train(small(), folder, fabric, data=others, resume=True)


def test_the_holdout_is_scored_disjoint_and_written_down(trained):
    card = trained.card()
    images = load("digits", "train").balanced(200, card.run.seed)
    assert len(card.holdout_rows) == 40 and card.train_images == 160
    assert set(card.holdout_rows) < set(images.rows.tolist())
    assert [record for record in trained.log() if record["kind"] == "holdout"][-1]["n"] == 40


def test_fit_works_without_a_folder(fabric):
    run = small(steps=3)
    images = load("digits", "train").balanced(200, 0)
    model = build(run, training_module.Task(1, 28, 28, 10))
    bound, optimiser = fabric.setup(Bound(model, len(images)), make_optimiser(run, model))
    assert [step.step for step in fit(bound, optimiser, images, run, fabric=fabric)] == [1, 2, 3]


@pytest.mark.parametrize(("precision", "dtype"), [("64-true", torch.float64), ("bf16-mixed", torch.float32)])
def test_other_precisions_train_and_are_stored_as_they_were(tmp_path, precision, dtype):
    folder = RunFolder(tmp_path / "run")
    train(small(steps=3, holdout=0.2), folder, Fabric(accelerator="cpu", devices=1, precision=precision))
    assert folder.tensors("model.safetensors")["gp.layers.0.weights.weight"].dtype == dtype
    assert all(math.isfinite(record.get("nll", 0)) for record in folder.log())
    assert folder.log()[-1]["n"] == 40  # the hold-out was scored


@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-mixed"])
@pytest.mark.parametrize("method", ["gpdnn-mcd", "cgp"])
def test_sparse_processes_train_in_every_precision_and_are_read_back(tmp_path, method, precision):
    folder = RunFolder(tmp_path / "run")
    run = small(method={"name": method, "inducing": 20}, steps=4, size=12, train_size=100, holdout=0.2)
    model = train(run, folder, Fabric(accelerator="cpu", devices=1, precision=precision))
    assert all(math.isfinite(record.get("nll", 0)) for record in folder.log())
    assert all(value.isfinite().all() for value in model.state_dict().values())
    read = folder.model().state_dict()
    assert read.keys() == model.state_dict().keys()
    assert all(value.float().equal(read[key]) for key, value in model.state_dict().items())


def test_an_interrupted_sparse_process_resumes_without_starting_anew(tmp_path, fabric):
    run = small(method={"name": "gpdnn", "inducing": 20}, steps=6)
    whole = train(run, RunFolder(tmp_path / "whole"), fabric)
    folder = RunFolder(tmp_path / "parts")

    def interrupt(step):
        if step.step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted):
        train(run, folder, fabric, watch=interrupt)
    resumed = train(run, folder, fabric, resume=True)
    assert all(value.equal(resumed.state_dict()[key]) for key, value in whole.state_dict().items())


@pytest.mark.slow
def test_ctrl_c_on_the_command_line_saves_and_says_how_to_resume(tmp_path):
    """A real process, a real SIGINT, at whatever moment it comes."""
    command = [sys.executable, "-m", "calgp", "train", "--out", "run", "--train-size", "1000", "--epochs", "500"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "run" / "log.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 1
    assert re.search(r"Stopped after step \d+ of 5000. Go on with: calgp train --resume run", error)
    assert RunFolder(tmp_path / "run").interrupted
