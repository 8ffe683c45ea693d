"""Every command as a user types it, in a process of its own where that matters; every mistake gets one sentence."""

import csv
import io
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from calgp import cli
from calgp.cli.train import _as_good_as
from calgp.data import Images, load
from calgp.errors import CalgpError
from calgp.methods import METHODS
from calgp.nets import BACKBONES
from calgp.report.run_section import facts
from calgp.runs import RunFolder
from folders import tensors
from forked import python

SMALL = [
    "--train-size", "200", "--steps", "10", "--backbone", "lenet", "--set", "backbone.channels=[4,8]",
    "--set", "backbone.hidden=[16]",
]  # fmt: skip

WITHOUT_HOLDOUT = Path(__file__).parent / "golden" / "sampled"  # a run of an earlier version


@pytest.fixture
def run_cli(tmp_path, monkeypatch):
    """Runs a command in an empty directory: (status, output). A CalgpError is status 1 with its sentence."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("CALGP_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def run(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(cli.app, [str(a) for a in arguments])
        if isinstance(result.exception, CalgpError):
            return 1, str(result.exception)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.output if result.exit_code else result.stdout

    return run


@pytest.fixture(scope="session")
def cli_run(tmp_path_factory) -> Path:
    """A small run, trained and evaluated by the command line. Read only."""
    path = tmp_path_factory.mktemp("cli") / "run"
    for arguments in (
        ["train", "--out", str(path), *SMALL, "--holdout", "0.1", "--augment", "none"],
        ["evaluate", str(path), "-S", "4"],
        ["evaluate", str(path), "-S", "4", "--source", "letters"],
    ):
        result = CliRunner().invoke(cli.app, arguments)
        assert result.exit_code == 0, result.output
    return path


def first_row(path: str) -> dict[str, str]:
    return next(csv.DictReader(Path(path).read_text().splitlines()))


def test_every_command_has_help_with_an_example(run_cli):
    commands = [command.name or command.callback.__name__ for command in cli.app.registered_commands]
    assert {
        "train",
        "evaluate",
        "predict",
        "calibrate",
        "decide",
        "ensemble",
        "compare",
        "report",
        "verify",
        "methods",
        "sources",
        "shard",
        "embed",
        "fit",
        "classify",
        "pack",
        "unpack",
        "push",
        "pull",
        "demo",
    } <= set(commands)
    for command in commands:
        status, output = run_cli(command, "--help")
        assert status == 0
        assert f"Example: calgp {command}" in " ".join(output.split()), command


def test_help_says_every_default():
    group = typer.main.get_command(cli.app)
    for name, command in group.commands.items():
        for each in command.params:
            said = isinstance(each.show_default, str) or "[default: " in (each.help or "")
            is_switch = getattr(each, "is_flag", False)
            assert said or is_switch or each.required or each.default is not None, (name, each.name)


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["train", "--lr", "0"], ["train", "--lrr", "1"],
                                       ["train", "--source", "folder:nowhere"], ["train", "--source", "fodler:x"],
                                       ["evaluate", "nowhere"], ["evaluate", "shipped", "--source", "folder:nowhere"],
                                       ["predict", "nowhere", "x.png"], ["predict", "shipped", "x.png"]])  # fmt: skip
def test_help_and_mistakes_need_no_torch(arguments, tmp_path):
    """So that they are there at once: torch takes a second or more to import."""
    script = (
        "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules)); "
        f"sys.argv = ['calgp', *{arguments}]; from calgp.cli import main; main()"
    )
    found = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert found.stdout.splitlines()[-1] == "False", found.stderr


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("train --sch", "--schedule"),
        ("train --schedule o", "one-cycle"),
        ("sweep --method cnn-m", "cnn-mcd"),
        ("tune digits --backbone r", "resnet"),
        ("train --source not", "notmnist"),
    ],
)
def test_the_shell_is_offered_flags_words_and_names(words, offered):
    environment = {"_CALGP_COMPLETE": "complete_bash", "COMP_WORDS": f"calgp {words}",
                   "COMP_CWORD": str(len(words.split()))}  # fmt: skip
    assert CliRunner().invoke(cli.app, [], prog_name="calgp", env=environment).output.split() == [offered]


def test_a_path_that_is_not_there_is_answered_by_the_nearest_one(run_cli, cli_run, tmp_path):
    shutil.copytree(cli_run, tmp_path / "mnist")
    Path("digit.png").write_bytes(b"")
    Path("run.toml").write_text("")
    for arguments, near in (
        (["evaluate", "mnst"], "mnist"), (["train", "--resume", "mnits"], "mnist"), (["compare", "minst"], "mnist"),
        (["predict", "shipped", "digits.png"], "digit.png"), (["train", "--config", "runs.toml"], "run.toml"),
        (["train", "--source", "folder:mnits"], "mnist"),
    ):  # fmt: skip
        status, output = run_cli(*arguments)
        assert status == 1 and output.endswith(f"did you mean {near}?"), output


def test_a_folder_is_written_to_shards_and_trained_on(run_cli):
    images = load("digits", "train")
    for i in range(120):
        file = Path(f"digits/{int(images.y[i])}/{i}.png")
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(images.x[i, 0].numpy()).save(file)
    status, output = run_cli("shard", "digits", "--out", "shards", "--images-per-shard", "50")
    assert status == 0 and "Wrote 96 train images and 24 test images." in output
    small = ["--steps", "3", *SMALL[4:]]
    status, output = run_cli("train", "--source", "shards:shards", *small, "--workers", "1", "--out", "run")
    assert status == 0 and run_cli("evaluate", "run", "-S", "2")[0] == 0
    status, output = run_cli("train", "--source", "stream:digits", *small, "--workers", "-1")
    assert status == 1 and "Invalid workers=-1: must be a number of processes" in output
    assert run_cli("shard", "digits", "--out", "shards")[1].endswith("is not empty; write shards into a new folder.")
    assert run_cli("shard", "digit", "--out", "other")[1] == "There is no image folder digit; did you mean digits?"
    assert not Path("other").exists()


def test_train_evaluate_compare_report_predict(run_cli, cli_run, tmp_path):
    assert sorted(path.name for path in cli_run.iterdir()) == [
        ".lock", "log.jsonl", "model.safetensors", "predictions-digits.safetensors",
        "predictions-letters.safetensors", "run.json", "scores-digits.json", "scores-letters.json",
    ]  # fmt: skip
    status, output = run_cli("compare", cli_run, "--json")
    (row,) = json.loads(output)
    assert status == 0 and row["train_images"] == 180 and set(row["metrics"]) == {"err", "mnll", "ece", "brier"}
    status, output = run_cli("compare", cli_run, "--csv", "table.csv")
    assert status == 0 and first_row("table.csv")["method"] == "cnn-gp-sorf"
    status, output = run_cli("report", cli_run, "--out", "report.html")
    assert status == 0 and "<html" in Path("report.html").read_text()
    Image.fromarray(load("digits", "test").x[0, 0].numpy()).save("digit.png")
    status, output = run_cli("predict", cli_run, "digit.png", "--json", "--csv", "out.csv", "-S", "4")
    (prediction,) = json.loads(output)
    assert sum(prediction["probabilities"].values()) == pytest.approx(1, abs=1e-5)
    assert first_row("out.csv")["label"] == prediction["label"]
    status, output = run_cli("predict", cli_run, "digit.png", "-S", "4")
    assert status == 0 and "digit.png" in output


def test_evaluate_prints_json_for_programs(run_cli, cli_run, tmp_path):
    shutil.copytree(cli_run, tmp_path / "copy")
    status, output = run_cli("evaluate", "copy", "--json", "-S", "2")
    assert status == 0 and 0 <= json.loads(output)["scores"]["err"] <= 1


@pytest.mark.slow
def test_verify_agrees_or_exits_with_one(run_cli, cli_run, tmp_path):
    shutil.copytree(cli_run, tmp_path / "copy")
    status, output = run_cli("verify", "copy", "--json")
    assert status == 0
    assert {check["what"]: check["state"] for check in json.loads(output)} == {
        "training images": "same bits", "digits": "same bits", "letters": "same bits",
    }  # fmt: skip
    scores = json.loads((tmp_path / "copy" / "scores-digits.json").read_text())
    scores["scores"]["err"] += 0.5
    (tmp_path / "copy" / "scores-digits.json").write_text(json.dumps(scores))
    status, output = run_cli("verify", "copy")
    assert status == 1 and "copy does not agree" in output


def test_resume_begins_again_where_there_is_no_checkpoint_yet(run_cli, cli_run, tmp_path):
    """And with the precision that the run was begun with, whatever the command says nothing about."""
    shutil.copytree(cli_run, tmp_path / "copy")
    folder = RunFolder(tmp_path / "copy")
    whole = tensors(folder, "model.safetensors")  # the header has its two entries in any order
    folder.remove("model.safetensors")
    status, output = run_cli("train", "--resume", "copy", "--checkpoint-seconds", "0.5")
    assert status == 0, output
    again = tensors(folder, "model.safetensors")
    assert again.keys() == whole.keys() and all(value.equal(again[name]) for name, value in whole.items())


def test_continue_begins_goes_on_and_leaves_what_is_finished(run_cli, cli_run, tmp_path):
    options = ["--source", "digits", "--train-size", "60", "--size", "14", "--steps", "2", "--out", "run"]
    for printed in ("Trained cnn-gp-sorf", "run is finished."):
        status, output = run_cli("train", "--continue", *options)
        assert status == 0 and printed in output, output
    status, output = run_cli("train", "--continue", *options, "--seed", "1")
    assert status == 1 and "holds another run than this one" in output
    status, output = run_cli("train", "--continue", "--source", "digits")
    assert status == 1 and "give --out" in output


@pytest.mark.slow
def test_evaluate_on_corrupted_images_leaves_the_other_scores_alone(run_cli, cli_run, tmp_path):
    copy = shutil.copytree(cli_run, tmp_path / "copy")
    before = {path.name: path.read_bytes() for path in copy.iterdir()}
    compared = run_cli("compare", "copy", "--json")
    status, output = run_cli("evaluate", "copy", "--corrupt", "noise:3", "--json", "-S", "2")
    summary = json.loads(output)
    assert status == 0 and summary["source"] == "digits~noise-3" and not summary["outside"]
    assert summary["corruption"] == {"of": "digits", "kind": "noise", "severity": 3, "seed": 0}
    assert json.loads((copy / "scores-digits~noise-3.json").read_text()) == summary
    new = {path.name for path in copy.iterdir()} - set(before)
    assert new == {"scores-digits~noise-3.json", "predictions-digits~noise-3.safetensors"}
    assert {name: (copy / name).read_bytes() for name in before} == before
    assert run_cli("compare", "copy", "--json") == compared
    assert run_cli("report", "copy", "--out", "report.html")[0] == 0
    assert "noise" not in re.sub(r"<svg.*?</svg>", "", Path("report.html").read_text(), flags=re.DOTALL)


@pytest.mark.slow
def test_evaluate_takes_all_severities_in_turn(run_cli, cli_run, tmp_path):
    shutil.copytree(cli_run, tmp_path / "copy")
    status, output = run_cli("evaluate", "copy", "--corrupt", "contrast", "--json", "-S", "2")
    found = json.loads(output)
    assert status == 0 and [summary["corruption"]["severity"] for summary in found] == [1, 2, 3, 4, 5]
    assert len({summary["checksum"] for summary in found}) == 5
    status, output = run_cli("evaluate", "copy", "--corrupt", "contrast", "-S", "2")
    assert status == 0 and "digits under contrast: 1,000 test images" in output
    assert [f"{summary['scores']['mnll']:.4f}" in output for summary in found] == [True] * 5
    status, output = run_cli("evaluate", "copy", "--corrupt", "jpeg", "--source", "letters", "-S", "2")
    assert status == 0 and "letters under jpeg" in output and "MNLL" not in output  # outside: uncertainty alone


@pytest.mark.slow
def test_corrupted_images_depend_on_their_own_seed_alone(run_cli, cli_run, tmp_path):
    shutil.copytree(cli_run, tmp_path / "copy")
    sums = [
        json.loads(run_cli("evaluate", "copy", "--corrupt", "occlusion:2", "--json", "-S", "1", *seeds)[1])["checksum"]
        for seeds in (["--seed", "0"], ["--seed", "1"], ["--corrupt-seed", "1"])
    ]
    assert sums[0] == sums[1] != sums[2]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--corrupt", "fog:1"], "Invalid corruption 'fog'"),
        (["--corrupt", "noise:0"], "severity=0"),
        (["--corrupt", "noise:much"], "KIND:SEVERITY"),
        (["--corrupt", "noise:1", "--corrupt-seed", "-1"], "seed=-1"),
    ],
)
def test_corruptions_that_cannot_be_are_refused(run_cli, cli_run, options, says):
    status, output = run_cli("evaluate", cli_run, *options)
    assert status == 1 and says in output


def test_methods_and_sources_are_listed(run_cli):
    status, output = run_cli("methods", "--json")
    assert status == 0 and "cnn-gp-rf" in json.loads(output)
    listed = run_cli("methods")[1].splitlines()
    assert [line.split()[0] for line in listed[: len(METHODS)]] == list(METHODS)  # one line each
    assert listed[list(METHODS).index("cnn-gp-sorf")].rstrip().endswith("(default)")
    assert "The default is cnn-gp-sorf: calibrated probabilities in one pass" in " ".join(listed)
    one = run_cli("methods", "gpdnn")[1]
    assert re.search(r"method.inducing +200 +M, how many inducing points\.", one) and "k-means" in one
    assert re.search(r"method.kernel +rbf ", one) and "[rbf|arc-cosine-1]" in one
    assert re.search(r"backbone.widths +16,32,64 +Channels of the stages\.", run_cli("backbones", "resnet")[1])
    listed = [line for line in run_cli("backbones")[1].splitlines() if not line.startswith(" ")]
    assert [line.split()[0] for line in listed[: len(BACKBONES)]] == list(BACKBONES)
    status, output = run_cli("methods", "svm")
    assert status == 1 and "no method 'svm'" in output and "gpdnn-mcd" in output
    status, output = run_cli("sources", "--json")
    here = {row["name"]: row["here"] for row in json.loads(output)}
    assert here["digits"] and here["letters"] and not here["mnist"]
    assert "digits" in run_cli("sources")[1]


def test_the_shipped_run_predicts_at_once(run_cli):
    Image.fromarray(load("digits", "test").x[0, 0].numpy()).save("digit.png")
    status, output = run_cli("predict", "shipped", "digit.png", "--json")
    assert status == 0
    assert json.loads(output)[0]["label"] == load("digits", "test").classes[load("digits", "test").y[0]]


def test_options_come_from_the_file_then_the_flags_then_set(run_cli):
    Path("run.toml").write_text(
        'source = "digits"\nsteps = 3\nseed = 5\n[method]\nname = "cnn-gp-sorf"\ndepth = 2\nwidth = 8\n'
    )
    status, output = run_cli("train", "--config", "run.toml", *SMALL, "--out", "run", "--set", "method.keep=0.75")
    assert status == 0, output
    run = json.loads(Path("run/run.json").read_text())["run"]
    assert (run["steps"], run["seed"]) == (10, 5)
    assert (run["method"]["depth"], run["method"]["width"], run["method"]["keep"]) == (2, 8, 0.75)


def test_train_has_flags_for_images_of_ones_own(run_cli):
    options = ["--class-weights", "1,2,1,1,1,1,1,1,1,0.5", "--augment", "flip,crop", "--crop", "2", "--normalise",
               "standard", "--patience", "3", "--holdout", "0.2"]  # fmt: skip
    status, output = run_cli("train", "--out", "run", *SMALL, *options)
    assert status == 0, output
    run = RunFolder("run").card().run
    assert run.class_weights == (1, 2, 1, 1, 1, 1, 1, 1, 1, 0.5) and run.augment == ("crop", "flip") and run.crop == 2
    assert run.normalise == "standard" and run.patience == 3
    assert run_cli("train", "--class-weights", "even")[0] == 1
    assert (
        "augment='rotate': must be auto, none, flip, crop, cutout, mixup or augmix"
        in run_cli("train", "--augment", "rotate")[1]
    )


def test_a_training_ends_with_what_was_done_how_good_it_is_and_what_is_next(run_cli):
    size = ["--train-size", "600", *SMALL[2:]]
    status, output = run_cli("train", *size, "--out", "run")
    assert status == 0, output
    done, good, after = output.splitlines()[-3:]
    assert done.startswith(
        "Trained cnn-gp-sorf (lenet channels=(4, 8) hidden=(16,)) on 540 images of digits in 10 steps "
        "(1.67 epochs), "  # of 6 steps each, the last of 40 images
    )
    assert done.endswith("into run.") and after == "Next: calgp evaluate run"
    run, records = RunFolder("run").card().run, RunFolder("run").log()
    assert (run.holdout, run.augment, run.calibration) == (0.1, ("crop",), True)
    wrong = round(60 * next(each for each in records[::-1] if each.kind == "holdout").err)
    assert good.startswith(f"On 60 held-out images {wrong} are wrong ({wrong / 60:.1%}), MNLL ")
    assert ("with a temperature of" in good) == (RunFolder("run").calibration() is not None)
    status, output = run_cli("train", *SMALL, "--out", "few", "--no-calibration", "--augment", "none")
    assert "No images were held out, so no temperature was fitted" in output and "--holdout 0.1" in output
    assert RunFolder("few").card().run.calibration is False


def test_a_training_that_stopped_early_says_so_and_tells_the_scores_of_the_state_it_kept(run_cli):
    more = ["--holdout", "0.4", "--patience", "1", "--lr", "0.3", "--steps", "400"]  # too large a rate
    status, output = run_cli("train", *SMALL, *more, "--out", "run")
    assert status == 0, output
    log = RunFolder("run").log()
    (kept,) = [each for each in log if each.kind == "kept"]
    scores = {each.step: each.mnll for each in log if each.kind == "holdout"}
    made = max(scores)
    done, good, _ = output.splitlines()[-3:]
    assert kept.step < made < 400
    said = f" in {made} steps ({made // 2} epochs), stopped early of 400, of which the state after step {kept.step} was"
    assert said in done and f"MNLL {scores[kept.step]:.4f}" in good
    assert dict(facts(RunFolder("run"), RunFolder("run").card()))["steps"] == str(made)
    run_cli("evaluate", "run")
    status, output = run_cli("compare", "run")
    assert status == 0 and f"{made} steps" in " ".join(output.split())


@pytest.mark.parametrize(("wrong", "says"), [(0, False), (9, False), (10, True), (30, True)])
def test_a_training_that_is_no_better_than_the_most_frequent_class_says_so(wrong, says):
    held_out = Images.of(torch.zeros(40, 1, 8, 8, dtype=torch.uint8), torch.tensor([0] * 30 + [1] * 10), ("cat", "dog"))
    assert ("Always answering cat would be as good" in _as_good_as(wrong, held_out)) == says


def test_auto_has_no_options_of_a_network(run_cli):
    status, output = run_cli("train", "--set", "backbone.channels=4,8")
    assert status == 1 and "auto chooses a network by the images" in output and "--backbone lenet" in output


def test_a_default_run_folder_never_overwrites(run_cli):
    for _ in range(2):
        assert run_cli("train", *SMALL, "--method", "cnn")[0] == 0
    assert sorted(path.name for path in Path("runs").iterdir()) == ["cnn-digits-seed0", "cnn-digits-seed0-2"]


def folder_of(path: Path, classes: dict[str, int], size: int = 16) -> str:
    for name, count in classes.items():
        (path / name).mkdir(parents=True)
        for number in range(count):
            pixels = np.random.default_rng(number).integers(0, 255, (size, size, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(path / name / f"{number}.png")
    return f"folder:{path}"


def test_a_folder_of_ones_own_images_trains(run_cli, tmp_path):
    source = folder_of(tmp_path / "mine", {"cat": 10, "dog": 10})
    status, output = run_cli("train", "--source", source, "--out", "run", "--steps", "3", *SMALL[4:])
    assert status == 0, output
    assert run_cli("evaluate", "run", "-S", "2")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["train", "--source", "mnst"], "did you mean 'mnist'"),
        (["train", "--source", "mnist"], "train-images-idx3-ubyte"),
        (["train", "--source", "notmnist"], "no 'train' part"),
        (["train", "--source", "folder:nowhere"], "nowhere"),
        (["train", "--method", "gp"], "There is no method 'gp'"),
        (["train", "--backbone", "vgg"], "There is no backbone"),
        (["train", "--steps", "0"], "steps=0"),
        (["train", "--epochs", "-2"], "epochs=-2"),
        (["train", "--minutes", "1", "--epochs", "3"], "--minutes with --epochs.*give one"),
        (["train", "--batch-size", "-1"], "batch_size=-1"),
        (["train", "--lr", "0"], "learning_rate=0"),
        (["train", "--train-size", "15"], "multiple"),
        (["train", "--train-size", "100000"], "5,?000"),
        (["train", "--holdout", "2"], "holdout=2"),
        (["train", "--colour", "blue"], "colour='blue'"),
        (["train", "--size", "0"], "size=0"),
        (["train", "--set", "depth"], "NAME=VALUE"),
        (["train", "--set", "method.dept=2"], "no option 'dept'"),
        (["train", "--config", "missing.toml"], "missing.toml"),
        (["train", "--device", "quantum", "--steps", "1"], "Invalid --device quantum"),
        (["train", "--precision", "7", "--steps", "1"], "Invalid --precision 7: must be 32-true"),
        (["train", "--threads", "0", "--steps", "1"], "threads=0"),
        (["train", "--resume", "nowhere"], "no run folder"),
        (["train", "--checkpoint-seconds", "-1"], "checkpoint_seconds=-1"),
        (["verify", "nowhere"], "no run folder"),
        (["evaluate", "nowhere"], "no run folder"),
        (["evaluate", "shipped", "-S", "0"], "passes=0"),
        (["evaluate", "shipped", "--source", "folder:nowhere"], "nowhere"),
        (["predict", "shipped", "nothing.png"], "There is no image nothing.png"),
        (["calibrate", "nowhere"], "no run folder"),
        (["calibrate", str(WITHOUT_HOLDOUT)], r"no held-out images.*--holdout 0\.1"),
        (["calibrate", "shipped", "--calibrator", "magic"], "temperature, vector, platt, isotonic"),
        (["calibrate", "shipped", "-S", "0"], "passes=0"),
        (["calibrate", "shipped", "--share", "2"], "share=2"),
        (["decide", "nowhere", "--error", "0.1"], "no run folder"),
        (["decide", "shipped"], "Nothing was asked for"),
        (["decide", str(WITHOUT_HOLDOUT), "--error", "0.1"], r"no held-out images.*--holdout 0\.1"),
        (["decide", "shipped", "--error", "nan"], "error=nan"),
        (["decide", "shipped", "--error", "0.1", "--confidence", "1"], "confidence=1"),
        (["decide", "shipped", "--error", "0.1", "--score", "luck"], "confidence, entropy, mutual-information"),
        (["decide", "shipped", "--coverage", "90"], "coverage=90"),
        (["decide", "shipped", "--coverage", "0.9", "--sets", "raps"], "lac, aps, aps-plain"),
        (["decide", "shipped", "--coverage", "0.9", "-S", "0"], "passes=0"),
        (["train", "--method", "cnn-cal", "--holdout", "0"], r"--holdout 0\.1"),
        (["train", "--set", "split_seed=-1"], "split_seed=-1"),
        (["ensemble", "nowhere", "shipped", "--out", "both"], "no run folder"),
        (["ensemble", "shipped", "--out", "both"], "at least two"),
        (["ensemble", "shipped", "shipped", "--out", "both"], "each of them once"),
        (["compare", "nowhere"], "no run folder"),
        (["report", "nowhere"], "no run folder"),
        (["sources", "--download", "imagenet"], "imagenet"),
        (["sources", "--download", "digits"], "no download"),
    ],
)  # fmt: skip
def test_a_mistake_gets_one_clear_sentence(run_cli, arguments, says):
    status, output = run_cli(*arguments)
    assert status == 1
    assert re.search(says, output), output
    assert "\n" not in output.strip() and "Traceback" not in output


def test_bad_folders_get_one_clear_sentence(run_cli, tmp_path):
    (tmp_path / "empty").mkdir()
    one = folder_of(tmp_path / "one", {"cat": 4})
    broken = folder_of(tmp_path / "broken", {"cat": 4, "dog": 4})
    for number in range(10):  # some of them in the training part
        (tmp_path / "broken" / "cat" / f"bad{number}.png").write_bytes(b"\x89PNG no")
    for source, says in (
        (f"folder:{tmp_path / 'empty'}", "empty"),
        (one, "one class|two"),
        (broken, r"bad\d.png"),
    ):
        status, output = run_cli("train", "--source", source, "--steps", "1", "--out", "run")
        assert status == 1 and re.search(says, output), output


def test_a_source_with_other_channels_is_refused_by_a_run(run_cli, cli_run, tmp_path):
    source = folder_of(tmp_path / "mine", {"cat": 10, "dog": 10}, size=28)
    shutil.copytree(cli_run, tmp_path / "copy")
    status, output = run_cli("evaluate", "copy", "--source", source)
    assert status == 1 and "3 × 28 × 28" in output and "--convert" in output
    assert run_cli("evaluate", "copy", "--source", source, "--convert", "-S", "2")[0] == 0


def test_a_run_folder_of_another_version_is_refused(run_cli, cli_run, tmp_path):
    shutil.copytree(cli_run, tmp_path / "copy")
    path = tmp_path / "copy" / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 7}))
    status, output = run_cli("evaluate", "copy")
    assert status == 1 and "format 7" in output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["train", "--source", "mnst"], "There is no image set 'mnst'"),
        (["predict", "shipped", "x" * 5000], "xxx' cannot be used (File name too long)"),
        (["judge", "x" * 5000], "xxx' cannot be used (File name too long)"),
    ],
)
def test_the_process_exits_with_one_line_and_no_traceback(tmp_path, arguments, says):
    """The whole program, as the shell starts it."""
    result = python("-m", "calgp", *arguments, cwd=tmp_path)
    assert result.returncode == 1
    assert result.stderr.startswith("Error: ") and says in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a directory where not even root may write")
def test_an_unwritable_directory_is_named(run_cli):
    status, output = run_cli("train", *SMALL, "--out", "/proc/calgp/run")
    assert status == 1 and "Cannot write in /proc/calgp/run" in output


def test_a_file_in_the_way_of_a_folder_is_named(run_cli, tmp_path):
    (tmp_path / "file").write_text("in the way")
    status, output = run_cli("train", *SMALL, "--out", tmp_path / "file" / "run")
    assert status == 1 and "Cannot write in" in output


@pytest.fixture
def copied(cli_run, tmp_path) -> Path:
    return shutil.copytree(cli_run, tmp_path / "copy")


@pytest.mark.slow
def test_calibrate_and_evaluate_both_ways_side_by_side(run_cli, copied):
    status, output = run_cli("calibrate", "copy", "-S", "4")
    assert status == 0 and "temperature, fitted on 20 held-out images" in " ".join(output.split())
    status, output = run_cli("evaluate", "copy", "-S", "4", "--json")
    calibrated = json.loads(output)
    assert status == 0 and calibrated["calibrator"] == "temperature"
    status, output = run_cli("evaluate", "copy", "-S", "4", "--json", "--uncalibrated")
    plain = json.loads(output)
    assert status == 0 and plain["calibrator"] is None
    assert plain["scores"]["err"] == calibrated["scores"]["err"]
    assert plain["scores"]["mnll"] != calibrated["scores"]["mnll"]
    assert {"scores-digits.json", "scores-digits.temperature.json"} <= {path.name for path in copied.iterdir()}
    status, output = run_cli("compare", "copy", "--csv", "table.csv")
    rows = list(csv.DictReader(Path("table.csv").read_text().splitlines()))
    assert status == 0 and {row["method"] for row in rows} == {"cnn-gp-sorf", "cnn-gp-sorf + temperature"}
    assert "calibrated (temperature)" in run_cli("evaluate", "copy", "-S", "2")[1]
    status, _ = run_cli("report", "copy", "--out", "report.html")
    page = Path("report.html").read_text()
    assert status == 0 and "cnn-gp-sorf + temperature" in page and "calgp evaluate copy --passes" in page
    assert "--uncalibrated" in page and "calgp calibrate copy --calibrator temperature" in page


def test_predict_is_calibrated_unless_asked_otherwise(run_cli, copied):
    assert run_cli("calibrate", "copy", "--calibrator", "vector", "-S", "4", "--json")[0] == 0
    Image.fromarray(load("digits", "test").x[0, 0].numpy()).save("digit.png")
    calibrated, plain = (
        json.loads(run_cli("predict", "copy", "digit.png", "--json", "-S", "4", *flag)[1])[0]
        for flag in ([], ["--uncalibrated"])
    )
    assert calibrated["probabilities"] != plain["probabilities"]
    assert calibrated["mutual_information"] == plain["mutual_information"]
    assert sum(calibrated["probabilities"].values()) == pytest.approx(1, abs=1e-5)


@pytest.mark.slow
def test_decide_evaluate_predict_report(run_cli, copied):
    status, output = run_cli("decide", "copy", "-S", "4", "--error", "0.01", "--coverage", "0.8")
    printed = " ".join(output.split())
    assert status == 0 and "fitted on 20 held-out images with 4 passes" in printed
    assert "never" in printed and "needs at least 299 held-out images" in printed and "aps threshold" in printed
    status, output = run_cli(
        "decide", "copy", "-S", "4", "--error", "0.9", "--empirical", "--coverage", "0.8", "--json"
    )
    made = json.loads(output)
    assert status == 0 and made == json.loads((copied / "decisions.json").read_text())
    assert made["selection"]["confidence"] is None and made["sets"]["kind"] == "aps" and not made["sets"]["empty"]
    summary = json.loads(run_cli("evaluate", "copy", "-S", "4", "--json")[1])
    output = run_cli("evaluate", "copy", "-S", "4")[1]
    for number in (summary["decisions"]["sets"]["covered"], summary["decisions"]["selection"]["share"]):
        assert f"{number:.4f}" in output
    assert "AURC by confidence" in output and "target 0.8" in output and "target 0.9" in output
    assert "mean size of the sets" in run_cli("evaluate", "copy", "-S", "4", "--source", "letters")[1]
    Image.fromarray(load("digits", "test").x[0, 0].numpy()).save("digit.png")
    (row,) = json.loads(run_cli("predict", "copy", "digit.png", "-S", "4", "--json", "--csv", "out.csv")[1])
    assert row["abstains"] in (True, False) and set(row["set"]) <= set(row["probabilities"]) and row["set"]
    assert first_row("out.csv")["set"] == "; ".join(row["set"])
    output = run_cli("predict", "copy", "digit.png", "-S", "4")[1]
    assert "abstains" in output and all(each in output for each in row["set"])  # folded into a narrow column
    assert run_cli("report", "copy", "--out", "report.html")[0] == 0
    assert "calgp decide copy --error 0.9 --empirical" in Path("report.html").read_text()


@pytest.mark.slow
def test_decisions_of_other_probabilities_or_samples_are_pointed_out(run_cli, copied):
    assert run_cli("decide", "copy", "-S", "4", "--coverage", "0.8")[0] == 0

    def printed(*arguments: str) -> str:
        result = CliRunner().invoke(cli.app, ["evaluate", "copy", *arguments, "--json"])
        return " ".join(result.stderr.split())

    assert "Note" not in printed("-S", "4")
    assert "is for 4 passes; with 2 passes its promises need not hold" in printed("-S", "2")
    assert run_cli("calibrate", "copy", "-S", "4", "--share", "0.5")[0] == 0
    assert "is for other probabilities than these and was not used" in printed("-S", "4")
    assert "Note" not in printed("-S", "4", "--uncalibrated")
    status, output = run_cli("decide", "copy", "-S", "4", "--coverage", "0.8")
    assert status == 0 and "calibrated (temperature)" in output and "fitted on 10 held-out" in " ".join(output.split())
    assert "Note" not in printed("-S", "4")


def test_cnn_cal_is_calibrated_by_its_training(run_cli):
    assert run_cli("train", *SMALL, "--method", "cnn-cal", "--out", "run")[0] == 0
    run = json.loads(Path("run/run.json").read_text())
    assert run["run"]["holdout"] == 0.1 and len(run["holdout_rows"]) == 20
    assert json.loads(Path("run/calibration.json").read_text())["calibrator"] == "temperature"
    assert json.loads(run_cli("evaluate", "run", "--json")[1])["calibrator"] == "temperature"


@pytest.mark.slow
def test_an_ensemble_is_evaluated_calibrated_and_compared(run_cli):
    for seed in ("0", "1"):
        options = ["--method", "cnn-mcd", "--seed", seed, "--holdout", "0.1", "--set", "split_seed=0"]
        assert run_cli("train", *SMALL, *options, "--out", f"runs/{seed}")[0] == 0
        assert run_cli("evaluate", f"runs/{seed}", "-S", "3")[0] == 0
    status, output = run_cli("ensemble", "runs/0", "runs/1", "--out", "runs/both")
    assert status == 0 and "ensemble of 2 cnn-mcd" in output
    assert run_cli("evaluate", "runs/both", "-S", "3")[0] == 0
    assert run_cli("calibrate", "runs/both", "-S", "3")[0] == 0
    assert run_cli("evaluate", "runs/both", "-S", "3")[0] == 0
    methods = {row["method"]: len(row["seeds"]) for row in json.loads(run_cli("compare", "runs", "--json")[1])}
    assert methods == {"cnn-mcd": 2, "ensemble of 2 cnn-mcd": 1, "ensemble of 2 cnn-mcd + temperature": 1}
    assert run_cli("report", "runs/both", "runs/0", "--out", "report.html")[0] == 0
    assert "../0, ../1" in Path("report.html").read_text()
    status, output = run_cli("train", *SMALL, "--out", "runs/both")
    assert status == 1 and "already holds a run" in output


def test_a_network_of_ones_own_is_trained_and_found_again(run_cli, tmp_path, monkeypatch):
    from calgp.nets import BACKBONES, NETWORKS

    for table in (BACKBONES, NETWORKS):
        for name in ("mine", "a", "b"):
            monkeypatch.delitem(table, name, raising=False)
    (tmp_path / "nets.py").write_text(
        "from torch import nn\n"
        "def make():\n"
        "    layers = nn.Conv2d(1, 4, 5, 4), nn.ReLU(), nn.Conv2d(4, 8, 3), nn.Flatten(), nn.Linear(128, 10)\n"
        "    return nn.Sequential(*layers)\n"
    )
    own = ["--network", "mine=nets.py:make"]
    sizes = ["--train-size", "100", "--steps", "3", "--set", "backbone.keep=0.8"]
    status, _ = run_cli(*own, "train", "--backbone", "mine", "--out", "run", *sizes)
    assert status == 0
    assert json.loads(Path("run/run.json").read_text())["run"]["backbone"]["keep"] == 0.8
    status, output = run_cli(*own, "evaluate", "run", "-S", "2", "--json")
    assert status == 0
    assert "err" in json.loads(output)["scores"]
    NETWORKS.pop("mine")
    BACKBONES.pop("mine")
    status, message = run_cli("evaluate", "run", "-S", "2")
    assert status == 1
    assert "calgp --network mine=file.py:function" in message
    for wrong in ("mine", "mine=nets.py", "a=none.py:make", "b=nets.py:none", "a=no.such:thing", "a=json:none"):
        status, message = run_cli("--network", wrong, "methods")
        assert status == 1
        assert "--network" in message


@pytest.mark.parametrize(
    "text",
    [
        "x = " + "[" * 100_000, "method = []", "[method]\nname = []", "[method]\nkind = {}", "seed = 2026-11-16",
        "[method]\nkind = 'CnnGp'\ndepth = 10000000", "steps = 1e300", "a = " + "1" * 5000, "\ufffd", "source = 3",
    ],
)  # fmt: skip
def test_a_hostile_config_is_refused_in_one_sentence(text, tmp_path):
    from calgp.cli.flags import run_options
    from calgp.runs import from_json

    (tmp_path / "run.toml").write_text(text, encoding="utf-8")
    with pytest.raises(CalgpError) as caught:
        from_json(run_options(tmp_path / "run.toml", {}, ["method.keep=0.5"]))
    assert len(str(caught.value)) < 600


def test_evaluate_says_how_each_class_fares_and_what_to_do(run_cli, cli_run, tmp_path, monkeypatch):
    shutil.copytree(cli_run, tmp_path / "copy")
    monkeypatch.setenv("COLUMNS", "80")
    status, output = run_cli("evaluate", "copy", "-S", "4")
    assert status == 0 and max(map(len, output.splitlines())) <= 80
    found = json.loads(run_cli("evaluate", "copy", "-S", "4", "--json")[1])
    right = sum(n for y, label, n in found["confusion"]["entries"] if y == label)
    assert found["confusion"]["classes"] == 10 and sum(entry[2] for entry in found["confusion"]["entries"]) == 1000
    assert right == round(1000 * (1 - found["scores"]["err"]))
    rows = output[output.index("By class") : output.index("True class")].splitlines()[4:14]
    shares = [float(row.split("│")[3].removesuffix(" % ")) for row in rows]
    assert shares == sorted(shares) and sum(shares) == pytest.approx(100 * right / 100)  # 100 images a class
    matrix = [line.split()[1:] for line in output[output.index("True class") :].splitlines()[2:12]]
    assert sum(int(cell) for line in matrix for cell in line if cell != "·") == 1000
    gap = found["scores"]["confidence"] - (1 - found["scores"]["err"])
    sentence = f"{'Over' if gap > 0 else 'Under'}-confident by {abs(100 * gap):.1f} points on average."
    assert sentence in output and "calgp calibrate copy" in " ".join(output.split())
    status, output = run_cli("evaluate", "copy", "-S", "4", "--source", "letters")
    assert status == 0 and "By class" not in output  # no labels of its own


@pytest.mark.parametrize("shown", [{"abstains": False, "set": ["x", "y"]}, {"outlier_score": 3.9, "outlier": True}, {}])
@pytest.mark.parametrize(("random", "sampled"), [(True, True), (True, False), (False, True)])
def test_predictions_are_readable_at_80_columns(random, sampled, shown):
    from calgp.cli.tables import PredictionRow, prediction_table

    row = PredictionRow(
        label="a rather long class name",
        probability=0.9812,
        entropy=0.1234,
        file="folder/" * 20 + "a.png",
        mutual_information=0.0123 * random,
        monte_carlo_error=0.0045 * random,
        probabilities={"a rather long class name": 0.9812, "another long class name": 0.0188},
        **shown,
    )
    console = Console(width=80, file=io.StringIO())
    console.print(prediction_table([row], sampled=sampled))
    text = console.file.getvalue()
    table = [line for line in text.splitlines() if line[0] in "┏┃┡│└"]
    assert max(map(len, table)) <= 80 and all(line[-1] in "┓┃┩│┘" for line in table)  # rich cuts what is wider
    assert (
        max(map(len, re.findall(r"(?m)^│ (\S+)", text))) >= 9
    )  # of a file name, on a line: half of the room in the widest table
    assert ("information" in text) == ("0.012" in text) == (random and "outlier_score" not in shown)
    assert ("0.981 ± 0.004" in text) == ("± standard error" in text) == (random and sampled)
    assert "0.981" in text and "0.123" in text


@pytest.mark.parametrize(("width", "heads"), [(80, ["car", "landscape"]), (24, ["car", "landsc"]), (23, None)])
def test_a_confusion_matrix_shows_class_names_as_long_as_they_fit(run_cli, copied, width, heads):
    from calgp.cli.tables import confusion_table
    from calgp.metrics import confusion
    from calgp.runs import RunFolder

    found = RunFolder(Path("copy")).evaluations()[0]
    found = replace(found, confusion=confusion(torch.tensor([0, 1]), torch.tensor([0, 1]), classes=2))
    table = confusion_table(found, ("car", "landscape"), width)
    assert (table and [column.header for column in table.columns][1:]) == heads
    if table is not None:
        console = Console(width=width, file=io.StringIO())
        console.print(table)
        assert "…" not in console.file.getvalue()


@pytest.mark.parametrize(
    ("files", "title", "shown"),
    [
        (["/far/away/a/1.png", "/far/away/b/2.png"], "Files in /far/away", ["a/1.png", "b/2.png"]),
        (["/far/away/a/1.png"], None, ["/far/away/a/1.png"]),
        (["/far/1.png", "near/2.png"], None, ["/far/1.png", "near/2.png"]),
        (["image 0", "image 1"], None, ["image 0", "image 1"]),
    ],
)
def test_a_folder_that_all_files_are_in_is_shown_once(files, title, shown):
    from calgp.cli.tables import PredictionRow, prediction_table

    rows = [PredictionRow(file, "cat", 0.9, 0.1, 0.0, 0.0, {"cat": 0.9, "dog": 0.1}) for file in files]
    table = prediction_table(rows, sampled=False)
    assert table.title == title and list(table.columns[0].cells) == shown


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["evaluate", "shipped", "--device", "cuda"],
            "Invalid --device cuda: this machine has no cuda that torch can use",
        ),
        (
            ["evaluate", "shipped", "--device", "abacus"],
            "Invalid --device abacus: must be auto, cpu, cuda, cuda:1 or mps",
        ),
        (["evaluate", "shipped", "--device", "gpu"], "No supported gpu backend found."),
        (["train", "--source", "fodler:x"], "There is no kind of source 'fodler'; did you mean 'folder'?"),
        (
            ["train", "--source", "folder:."],
            ". must have a folder for each of at least two classes; it has only 'cache'.",
        ),
        (["train", "--source", "cache"], "for the folder of this name give folder:cache."),
        (["--network", "mine=nothing.py:make", "methods"], "nothing.py cannot be imported (FileNotFoundError"),
        (["--network", "mine=json:nothing", "methods"], "json cannot be imported (AttributeError"),
        (["--network", "mine=json:__name__", "methods"], "__name__ must be a function that makes a network"),
    ],
)
def test_what_is_not_there_is_one_line_of_our_own(run_cli, arguments, says):
    if {"cuda", "gpu"} & {*arguments} and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    Path("cache").mkdir()
    status, message = run_cli(*arguments)
    assert status == 1 and says in message and "\n" not in message and "!." not in message
