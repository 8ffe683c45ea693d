import math
import os
import re
import signal
import time

import pytest
import torch
from lightning_fabric import Fabric

from calgp.data import Images, load
from calgp.errors import CalgpError
from calgp.gp import Bound, NumericalError
from calgp.nets import Task
from calgp.runs import Interrupted, RunFolder, TrainingData, cautions, from_json
from calgp.runs.build import build
from calgp.training import fit, train_run
from calgp.training.loop import make_optimiser, order
from folders import metadata, tensors
from forked import Started
from small_run import small


def test_an_epoch_sees_every_image_once_and_each_epoch_another_order():
    first = torch.cat([order(250, 100, step, seed=1) for step in range(3)])
    second = torch.cat([order(250, 100, step, seed=1) for step in range(3, 6)])
    assert first.sort().values.equal(torch.arange(250))
    assert second.sort().values.equal(torch.arange(250))
    assert not first.equal(second)
    assert not first.equal(torch.cat([order(250, 100, step, seed=2) for step in range(3)]))


def test_training_lowers_the_bound(trained):
    log = [record for record in trained.log() if record.kind == "train"]
    assert log[-1].step == 30
    assert log[-1].nll < log[0].nll
    assert all(record.kl > 0 for record in log)


def test_the_same_seed_gives_the_same_weights_and_another_seed_others(tmp_path, fabric):
    states = [
        train_run(small(steps=5, seed=seed), RunFolder(tmp_path / name), fabric).model.state_dict()
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    ]
    assert all(states[0][key].equal(states[1][key]) for key in states[0])
    assert any(not states[0][key].equal(states[2][key]) for key in states[0])


def test_an_interrupted_run_resumes_to_the_same_bits(tmp_path, fabric):
    run = small(steps=12)
    whole = train_run(run, RunFolder(tmp_path / "whole"), fabric).model
    folder = RunFolder(tmp_path / "parts")

    def interrupt(step):
        if step.step == 5:
            os.kill(os.getpid(), signal.SIGINT)  # Ctrl-C

    with pytest.raises(Interrupted, match="step 5 of 12"):
        train_run(run, folder, fabric, watch=interrupt)
    assert folder.interrupted and not folder.finished
    resumed = train_run(run, folder, fabric, resume=True).model
    assert folder.finished and not folder.interrupted
    for key, value in whole.state_dict().items():
        assert value.equal(resumed.state_dict()[key]), key
    assert [record.step for record in folder.log()] == [12]


class Failing:
    """Stands for a method's model: in the chosen calls, `spoil` is what the bound gives."""

    def __init__(self, monkeypatch, calls, spoil):
        self.calls = 0
        forward = Bound.forward

        def failing(bound, *args):
            self.calls += 1
            return spoil(bound, *args) if self.calls in calls else forward(bound, *args)

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


every_failure = pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (not_finite, "the bound is no finite number: negative log-likelihood term nan"),
        (not_positive_definite, "not positive definite"),
        (infinite_gradient, r"the gradient of \S+ is not finite"),
    ],
)


def interrupting(at):
    def interrupt(step):
        if step.step == at:
            os.kill(os.getpid(), signal.SIGINT)  # Ctrl-C

    return interrupt


def same(one, other):
    return one.keys() == other.keys() and all(one[key].equal(other[key]) for key in one)


@every_failure
def test_a_step_that_fails_is_skipped_and_noted_and_changes_nothing(tmp_path, fabric, monkeypatch, spoil, message):
    """State by state the run is the one whose optimiser never saw that step; the batch norm, too, is as it was."""
    run = small(steps=6, backbone={"name": "resnet", "n": 1, "widths": [2, 2, 2]}, size=12)
    folder, states = RunFolder(tmp_path / "run"), []
    fabric_model = {}
    setup = fabric.setup

    def remember(bound, optimiser):
        fabric_model["model"] = bound.model
        return setup(bound, optimiser)

    monkeypatch.setattr(fabric, "setup", remember)
    Failing(monkeypatch, {4}, spoil_after_forward(spoil))

    def watch(step):
        states.append({key: value.clone() for key, value in fabric_model["model"].state_dict().items()})

    train_run(run, folder, fabric, watch=watch)
    assert same(states[2], states[3])
    assert not same(states[3], states[4])
    assert any(key.endswith("running_mean") for key in states[0])
    (skipped,) = [record for record in folder.log() if record.kind == "skipped"]
    assert skipped.step == 4 and re.search(message, skipped.why)
    assert math.isfinite(folder.log()[-1].nll)
    assert folder.finished


def spoil_after_forward(spoil):
    """So that batch norm has seen the images before the numbers fail."""

    def spoiled(bound, x, y, noise, mixed):
        bound.model(x * math.inf, noise)
        return spoil(bound, x, y, noise)

    return spoiled


@every_failure
def test_too_many_failures_in_a_row_stop_with_a_diagnosis_and_the_state_before(
    tmp_path, fabric, monkeypatch, spoil, message
):
    """It is the checkpoint that a Ctrl-C after the last good step would have left, to the bit."""
    run, failed, stopped = small(steps=24), RunFolder(tmp_path / "failed"), RunFolder(tmp_path / "stopped")
    with pytest.raises(Interrupted):
        train_run(run, stopped, fabric, watch=interrupting(5))
    whole = train_run(run, RunFolder(tmp_path / "whole"), fabric).model
    with monkeypatch.context() as patch, pytest.raises(CalgpError) as caught:
        Failing(patch, range(6, 100), spoil)
        train_run(run, failed, fabric)
    rows = load("digits", "train").balanced(200, 0).rows[order(200, 32, 14, 0)][:8].tolist()
    assert re.search(
        rf"after step 5: step 15 failed, as did the 9 before it: .*{message}.*rows {', '.join(map(str, rows))}, … of "
        r"digits\. .* keeps the state after step 5",
        str(caught.value),
    )
    assert isinstance(caught.value.__cause__, NumericalError)
    assert failed.interrupted and not failed.finished
    assert same(*(tensors(folder, "checkpoint.safetensors") for folder in (failed, stopped)))
    assert metadata(failed, "checkpoint.safetensors") == metadata(stopped, "checkpoint.safetensors")
    resumed = train_run(run, failed, fabric, resume=True).model  # the failure was the test's, so it does not come again
    assert same(whole.state_dict(), resumed.state_dict())


def test_failures_with_a_good_step_between_do_not_stop_a_run(tmp_path, fabric, monkeypatch):
    folder = RunFolder(tmp_path / "run")
    Failing(monkeypatch, {*range(2, 11), *range(12, 21)}, not_finite)  # 9, a good one, 9
    train_run(small(steps=24), folder, fabric)
    assert len([record for record in folder.log() if record.kind == "skipped"]) == 18


def test_failures_in_a_row_are_counted_over_a_resumption(tmp_path, fabric, monkeypatch):
    """Stopped after three of them; seven more are enough. Its last good state is that checkpoint."""
    folder, run = RunFolder(tmp_path / "run"), small(steps=24)
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        Failing(patch, range(3, 100), not_finite)
        train_run(run, folder, fabric, watch=interrupting(5))
    Failing(monkeypatch, range(100), not_finite)
    with pytest.raises(CalgpError, match=r"step 12 failed, as did the 9 before it.*keeps the state after step 5"):
        train_run(run, folder, fabric, resume=True)


def test_a_short_run_has_half_its_steps_as_patience(tmp_path, fabric, monkeypatch):
    Failing(monkeypatch, range(3, 100), not_finite)
    with pytest.raises(CalgpError, match="step 5 failed, as did the 2 before it"):
        train_run(small(steps=5), RunFolder(tmp_path / "run"), fabric)


def test_a_gradient_whose_square_overflows_is_no_failure(tmp_path, fabric, monkeypatch):
    """1e30² is beyond float32, 1e30 is not."""

    def large(bound, *args):
        parameter = next(bound.model.parameters())
        return (parameter * 1e30).sum() * 1e-30 * 1e30, bound.model.kl()

    folder = RunFolder(tmp_path / "run")
    Failing(monkeypatch, {2}, large)
    train_run(small(steps=4), folder, fabric)
    assert [record.kind for record in folder.log()] == ["train"]


@pytest.mark.parametrize(("every", "kept"), [(0.0, "keeps the state after step 2"), (60.0, "No good state")])
def test_parameters_that_overflowed_are_never_saved(tmp_path, fabric, monkeypatch, every, kept):
    """A step whose gradients were finite and whose result is not: an older checkpoint, if there is one, stays."""
    folder, run = RunFolder(tmp_path / "run"), small(steps=12)
    step = torch.optim.Adam.step
    calls = []

    def spoiling(optimiser, *args, **options):
        step(optimiser, *args, **options)
        calls.append(1)
        if len(calls) == 3:
            with torch.no_grad():
                optimiser.param_groups[0]["params"][0].fill_(math.inf)

    monkeypatch.setattr(torch.optim.Adam, "step", spoiling)
    with pytest.raises(CalgpError, match=kept):
        train_run(run, folder, fabric, checkpoint_seconds=every)
    assert not folder.finished
    if folder.interrupted:
        assert all(value.isfinite().all() for value in tensors(folder, "checkpoint.safetensors").values())


def test_ctrl_c_is_restored_after_training(tmp_path, fabric):
    before = signal.getsignal(signal.SIGINT)
    train_run(small(steps=1), RunFolder(tmp_path / "run"), fabric)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_folder_that_holds_a_run_is_not_overwritten(trained, fabric):
    with pytest.raises(CalgpError, match="already holds a run"):
        train_run(small(), trained, fabric)


def test_what_cannot_be_resumed_says_why(trained, tmp_path, fabric):
    with pytest.raises(CalgpError, match="finished"):
        train_run(trained.card().run, trained, fabric, resume=True)
    with pytest.raises(CalgpError, match="no run to resume"):
        train_run(small(), RunFolder(tmp_path / "none"), fabric, resume=True)


def test_resuming_on_other_images_is_refused(tmp_path, fabric):
    folder = RunFolder(tmp_path / "run")

    def interrupt(step):
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted):
        train_run(small(), folder, fabric, watch=interrupt)
    others = TrainingData(load("digits", "train").balanced(200, seed=99), None)
    with pytest.raises(CalgpError, match="not those"):
        train_run(small(), folder, fabric, data=others, resume=True)


def test_the_holdout_is_scored_disjoint_and_written_down(trained):
    card = trained.card()
    images = load("digits", "train").balanced(200, card.run.seed)
    assert len(card.holdout_rows) == 40 and card.train_images == 160
    assert set(card.holdout_rows) < set(images.rows.tolist())
    assert [record for record in trained.log() if record.kind == "holdout"][-1].n == 40


def test_fit_works_without_a_folder(fabric):
    run = small(steps=3)
    images = load("digits", "train").balanced(200, 0)
    model = build(run, Task(1, 28, 28, 10))
    bound, optimiser = fabric.setup(Bound(model, len(images)), make_optimiser(run, model))
    assert [step.step for step in fit(bound, optimiser, images, run, fabric=fabric)] == [1, 2, 3]


@pytest.mark.parametrize(("precision", "dtype"), [("64-true", torch.float64), ("bf16-mixed", torch.float32)])
def test_other_precisions_train_and_are_stored_as_they_were(tmp_path, precision, dtype):
    folder = RunFolder(tmp_path / "run")
    train_run(small(steps=3, holdout=0.2), folder, Fabric(accelerator="cpu", devices=1, precision=precision))
    assert tensors(folder, "model.safetensors")["gp.layers.0.weights.weight"].dtype == dtype
    assert all(math.isfinite(record.nll) for record in folder.log() if record.kind == "train")
    assert folder.log()[-1].n == 40  # the hold-out was scored


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-mixed"])
@pytest.mark.parametrize("method", ["gpdnn-mcd", "cgp"])
def test_sparse_processes_train_in_every_precision_and_are_read_back(tmp_path, method, precision):
    folder = RunFolder(tmp_path / "run")
    run = small(method={"name": method, "inducing": 20}, steps=4, size=12, train_size=100, holdout=0.2)
    model = train_run(run, folder, Fabric(accelerator="cpu", devices=1, precision=precision)).model
    assert all(math.isfinite(record.nll) for record in folder.log() if record.kind == "train")
    assert all(value.isfinite().all() for value in model.state_dict().values())
    read = folder.model().state_dict()
    assert read.keys() == model.state_dict().keys()
    assert all(value.float().equal(read[key]) for key, value in tensors(folder, "model.safetensors").items())
    assert same(read, model.state_dict())  # whatever it was trained in, it predicts as it will when it is loaded


def test_an_interrupted_sparse_process_resumes_without_starting_again(tmp_path, fabric):
    run = small(method={"name": "gpdnn", "inducing": 20}, steps=6)
    whole = train_run(run, RunFolder(tmp_path / "whole"), fabric).model
    folder = RunFolder(tmp_path / "parts")

    def interrupt(step):
        if step.step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted):
        train_run(run, folder, fabric, watch=interrupt)
    resumed = train_run(run, folder, fabric, resume=True).model
    assert all(value.equal(resumed.state_dict()[key]) for key, value in whole.state_dict().items())


@pytest.mark.slow
def test_ctrl_c_on_the_command_line_saves_and_says_how_to_resume(tmp_path):
    """A real process, a real SIGINT, at whatever moment it comes."""
    options = "--out run --backbone lenet --train-size 1000 --holdout 0 --epochs 500"
    with Started("-m", "calgp", "train", *options.split(), cwd=tmp_path) as process:
        while not (tmp_path / "run" / "log.jsonl").exists():
            assert process.poll() is None, process.printed
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait() == 1
        assert re.search(r"Stopped after step \d+ of 5000. Go on with: calgp train --resume run", process.printed)
    assert RunFolder(tmp_path / "run").interrupted


EXTREME = [
    {"name": "cgp", "inducing": 20, "lengthscale": 1e-6},
    {"name": "cgp", "inducing": 20, "lengthscale": 1e-38},
    {"name": "gpdnn", "inducing": 20, "lengthscale": 1e-38},
    {"name": "cnn-gp-sorf", "lengthscale": 1e-38},
    {"name": "cnn-laplace", "n_rf": 16, "lengthscale": 1e-38},
]


@pytest.mark.parametrize("method", EXTREME, ids=lambda method: f"{method['name']} {method['lengthscale']:g}")
def test_lengthscales_beyond_floating_point_end_in_one_sentence(tmp_path, fabric, method):
    with pytest.raises(CalgpError, match=r"The training of .* cannot start: |Training failed after step 0: "):
        train_run(from_json({"method": method, "train_size": 50, "steps": 2, "size": 14}), RunFolder(tmp_path), fabric)


def test_what_the_images_cannot_support_is_said_in_words():
    def said(counts, **options):
        y = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
        images = Images.of(torch.zeros(len(y), 1, 8, 8, dtype=torch.uint8), y, tuple("abcd"[: len(counts)]))
        return cautions(images, from_json(options))

    assert said([40, 40]) == []
    assert said([40, 0, 40]) == []  # a class that has none is no class of this training
    (few,) = said([19, 40, 7])
    assert few.startswith("2 classes have fewer than 20 training images (c: 7)")
    (unequal,) = said([20, 400, 30])
    assert unequal.startswith("Classes are unequal: 400 images of b, 20 of a.")
    assert said([20, 400, 30], class_weights="balanced") == []
    assert len(said([10, 400])) == 2
