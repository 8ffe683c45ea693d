"""One run by 1, 2 and 3 processes on this machine (gloo); tests/ranks.py says what they do."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from lightning_fabric import Fabric
from safetensors.torch import load_file

from calgp.errors import CalgpError
from calgp.methods import METHODS
from calgp.runs import RunFolder, open_device
from calgp.runs.ranks import gathered, on_first, share, together
from calgp.training import train_run
from forked import python
from small_run import small

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked")
SCRIPT = Path(__file__).parents[1] / "ranks.py"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("ranks")
    done = python(SCRIPT, "check", place)
    assert done.returncode == 0, done.stderr[-3000:]
    return place


@pytest.fixture(scope="module")
def found(place):
    """What each rank found, by (ranks, rank)."""
    return {(n, rank): torch.load(place / f"{n}-{rank}.pt") for n in (1, 2, 3) for rank in range(n)}


@pytest.fixture(scope="module")
def differences(tmp_path_factory):
    place = tmp_path_factory.mktemp("differ")
    done = python(SCRIPT, "differ", place)
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(place / f"differ-{rank}.pt") for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["learning_rate", "method.n_rf", "accumulate", "source", "versions"])
def test_ranks_that_were_started_otherwise_are_refused_with_the_difference(differences, name):
    what = {"versions": "torch"}.get(name, name)
    for found in differences:
        assert found[name].startswith(f"Rank 1 differs from rank 0 in {what}: "), found[name]


@pytest.mark.slow
def test_a_rank_that_cannot_load_its_data_is_named_by_all(differences):
    for found in differences:
        assert found["data"].startswith("Rank 1: ") and "pictures" in found["data"]


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_while_it_hangs(differences):
    assert differences[0]["hangs"].startswith("Rank 0 has waited for rank 1 for up to 3 seconds: it has ended or hangs")


def agree(one, other):
    """Two trainings in double precision: the curves, which Fabric hands out in single precision, and the weights.

    Weights: the share of a rank is a float32, so that gradients differ by up to 6e-8 of themselves, and Adam's steps of
    1e-3 by as much of themselves; eight steps, each from where the one before has come.
    """
    for name in ("nll", "kl"):
        first, second = (torch.tensor(each[name], dtype=torch.float64) for each in (one, other))
        torch.testing.assert_close(second, first, rtol=3e-7, atol=0, equal_nan=True)
    assert one["state"].keys() == other["state"].keys()
    for name, value in one["state"].items():
        torch.testing.assert_close(other["state"][name], value, rtol=0, atol=WEIGHTS, msg=name)


WEIGHTS = 1e-8
RANKS = [(2, 0), (2, 1), (3, 0), (3, 1), (3, 2)]


@pytest.mark.slow
@pytest.mark.parametrize("rank", RANKS, ids=str)
@pytest.mark.parametrize("name", ["everything", "indivisible", "accumulated", "failing"])
def test_any_number_of_ranks_trains_as_one_process(found, name, rank):
    """Masks, augmentation, class weights and clipping on; batches of 32, 32 and 26, or of 13 and of 1."""
    agree(found[1, 0][name], found[rank][name])


@pytest.mark.slow
@pytest.mark.parametrize("rank", [(2, 1), (3, 1), (3, 2)], ids=str)
def test_all_ranks_have_the_same_bits(found, rank):
    for name in ("everything", "indivisible", "accumulated", "failing"):
        first, other = found[rank[0], 0][name], found[rank][name]
        assert all(value.equal(other["state"][key]) for key, value in first["state"].items())
        assert first["nll"] == other["nll"] or name == "failing"  # nan is not nan


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lenet", "resnet", *(f"method {name}" for name in METHODS)])
def test_two_ranks_train_every_method_as_one_process(found, name):
    """The ResNet, with the moments of batch norm left alone: those of a batch are each rank's own."""
    agree(found[1, 0][name], found[2, 1][name])


@pytest.mark.slow
def test_parameters_sharded_by_fsdp_have_the_gradients_of_whole_ones(found):
    """Likelihood term and KL: the mean over two ranks is that of one process. In double precision."""
    pairs = found[2, 0]["sharded"]
    assert len(pairs) == 5 and all(one.abs().max() > 0 for one, _ in pairs)
    for one, other in pairs:
        torch.testing.assert_close(other, one, rtol=0, atol=1e-15)


@pytest.mark.slow
def test_accumulation_changes_nothing(found):
    agree(found[1, 0]["everything"], found[1, 0]["accumulated"])


@pytest.mark.slow
def test_a_step_that_fails_on_one_rank_is_skipped_by_all(found):
    for each in found.values():
        summary = [(step, why) for step, why in enumerate(each["failing"]["skipped"], start=1) if why]
        assert [step for step, _ in summary] == [3, 5]
        assert summary[0][1] == "the covariance is not positive definite"
        assert summary[1][1].startswith("the bound is no finite number: negative log-likelihood term nan")


@pytest.mark.slow
def test_there_is_one_log_whatever_the_ranks(place):
    logs = [RunFolder(place / str(n) / "everything").log() for n in (1, 2, 3)]
    assert [record.kind for record in logs[0]] == [record.kind for record in logs[1]]
    for one, *others in zip(*logs, strict=True):
        for other in others:
            for key, value in asdict(one).items():
                near = pytest.approx(value, rel=1e-6) if isinstance(value, float) else value  # means of float32
                assert key == "seconds" or getattr(other, key) == near
    cards = [RunFolder(place / str(n) / "accumulated").card().environment for n in (1, 2)]
    assert [(card.ranks, card.accumulate) for card in cards] == [(None, 3), (2, 3)]


@pytest.mark.slow
def test_sigterm_to_one_rank_stops_all_after_the_same_step(found):
    for (n, _), each in found.items():
        assert each["stopped"].startswith("Stopped after step 4 of 8."), n


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 3])
def test_another_number_of_ranks_resumes_the_checkpoint(place, found, n):
    folder = RunFolder(place / str(n) / "stopped")
    assert folder.interrupted and not folder.finished
    run = folder.card().run
    train_run(run, folder, Fabric(accelerator="cpu", devices=1, precision="64-true"), resume=True)
    state = load_file(folder.path / "model.safetensors")
    for name, value in found[1, 0]["everything"]["state"].items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=WEIGHTS)
    assert [there.ranks for there in folder.card().environment.resumed] == [None]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["one pass", "passes", "samples"])
@pytest.mark.parametrize("n", [2, 3])
def test_evaluation_by_ranks_has_the_bits_of_one_process(place, found, n, engine):
    """Ten batches by three ranks: each stays whole, so that every image is computed beside the same others."""
    one, other = (RunFolder(place / str(count) / f"evaluated by {engine}") for count in (1, n))
    name = one.predictions_name("digits")
    first, second = (load_file(folder.path / name) for folder in (one, other))
    assert len(second["rows"]) == 1000
    assert first.keys() == second.keys() and all(value.equal(second[key]) for key, value in first.items())
    evaluations = [folder.evaluation("digits") for folder in (one, other)]
    assert all(evaluations)
    # double precision is Fabric's, prediction has the model's
    first, second = ({**asdict(each), "prediction_seconds": None, "environment": None} for each in evaluations)
    assert first == second
    assert all(found[n, rank][f"scores by {engine}"] == found[1, 0][f"scores by {engine}"] for rank in range(n))


@pytest.mark.slow
def test_three_kills_of_a_rank_lose_nothing():
    """The elastic agent restarts the ranks, they go on from the checkpoint, and end with the same bits and log."""
    done = python(SCRIPT, "kill", "--kills", "3")
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads(done.stdout)
    assert summary["kills"] == 3 and min(summary["killed ranks"]) == 1


@pytest.mark.slow
def test_torchrun_trains_and_evaluates(tmp_path, monkeypatch):
    """The real command lines, of two processes; one table, one bar."""
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "calgp"]
    options = ["--source=digits", "--train-size=60", "--size=14", "--steps=2", "--threads=1", "--device=cpu"]

    def run(*arguments):
        return python(*torchrun, *arguments)

    trained = run("train", "--out", str(tmp_path / "run"), *options)
    assert trained.returncode == 0, trained.stderr[-2000:]
    assert trained.stdout.count("Trained cnn-gp-sorf") == 1
    assert RunFolder(tmp_path / "run").card().environment.ranks == 2
    evaluated = run("evaluate", str(tmp_path / "run"), "-S", "2", "--json", "--device", "cpu")
    assert evaluated.returncode == 0, evaluated.stderr[-2000:]
    assert json.loads(evaluated.stdout)["n"] == 1000
    said = ""
    for rank in "01":  # as torchrun starts them
        for name, value in (("TORCHELASTIC_RUN_ID", "it"), ("WORLD_SIZE", "2"), ("RANK", rank), ("LOCAL_RANK", rank)):
            monkeypatch.setenv(name, value)
        refused = python("-m", "calgp", "verify", tmp_path / "run")
        assert refused.returncode
        said += refused.stderr
    assert said.count("Invalid command under torchrun: must be train, evaluate or predict") == 1


class Ranks:
    """What `share` needs of a Fabric."""

    def __init__(self, world_size, global_rank):
        self.world_size, self.global_rank = world_size, global_rank


@pytest.mark.parametrize("n", [0, 1, 2, 7, 8, 32])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_the_shares_of_the_ranks_are_the_batch(n, ranks):
    parts = [share(Ranks(ranks, rank), torch.arange(n)) for rank in range(ranks)]
    assert torch.cat(parts).equal(torch.arange(n))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_one_process_agrees_with_itself(fabric):
    assert gathered(fabric, 3) == [3]
    assert on_first(fabric, lambda: 4) == together(fabric, lambda: 4) == 4


def test_parts_of_a_batch_are_at_least_one_and_at_most_its_images(tmp_path, fabric):
    for parts in (0, 33):
        with pytest.raises(CalgpError, match=r"Invalid accumulate=.*: must be 1 to 32, the images of a batch"):
            train_run(small(), RunFolder(tmp_path), fabric, accumulate=parts)


def test_a_clipped_step_of_sgd_is_no_longer_than_the_norm_allows(tmp_path, fabric):
    """Without momentum's past, the first step of Nesterov's method is 1.9 learning rates along the gradient."""
    options = {"steps": 1, "optimiser": "sgd", "learning_rate": 1.0}
    begun = train_run(small(steps=1, optimiser="sgd", learning_rate=1e-12), RunFolder(tmp_path / "begun"), fabric).model
    lengths = []
    for name, clip in (("free", None), ("clipped", 1e-3)):
        model = train_run(small(**options, clip=clip), RunFolder(tmp_path / name), fabric).model
        moved = [new - old for new, old in zip(model.parameters(), begun.parameters(), strict=True)]
        lengths.append(torch.cat([each.flatten() for each in moved]).norm().item())
    assert lengths[1] == pytest.approx(1.9e-3, rel=1e-3) and lengths[0] > 2 * lengths[1]


def test_one_device_for_several_processes_is_refused():
    with pytest.raises(CalgpError, match="cuda:1 is one for several processes"):
        open_device("cuda:1", processes=2)
