"""Shards of embeddings and of predictions: the same bytes here, in processes and on Ray, also where a worker dies."""

import json
import os
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import calgp
from calgp import cli
from calgp.data import load, write_shards
from calgp.data.original import open_original
from calgp.embeddings.cache import read_manifest
from calgp.embeddings.embed import EmbedOptions, embed
from calgp.errors import CalgpError
from calgp.nets.pretrained import find_network
from calgp.runs.failures import Interrupted
from calgp.runs.folder import shipped_run
from calgp.search.engines import Processes, Ray, SerialEngine
from calgp.search.predict_shards import OpenRun, find_files, predict_shards
from search.engine_work import Killing, Marking

NETWORK = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 16, 5, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(144, 4))
    network.preprocessing = {"size": 20}
    return network
"""
SMALL = EmbedOptions(batch_size=8, rows_per_shard=10, workers=0, device="cpu")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """60 digits of three classes in files and in tar shards, a network, and what one process makes of them."""
    place, threads = tmp_path_factory.mktemp("shards"), torch.get_num_threads()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # both as every worker has it
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setenv("XDG_CACHE_HOME", str(place / "cache"))
        Path("network.py").write_text(NETWORK)
        digits = load("digits", "train")
        for label in (0, 1, 7):
            Path(f"photos/{label}").mkdir(parents=True)
            for k, row in enumerate((digits.y == label).nonzero()[:20, 0].tolist()):
                Image.fromarray(digits.x[row, 0].numpy()).save(f"photos/{label}/{k:02d}.png")
        write_shards(Path("photos"), Path("tars"), images_per_shard=25)
        embedded(Path("alone"), SerialEngine())
        predicted(Path("predicted"), SerialEngine())
        yield place
    torch.set_num_threads(threads)


@pytest.fixture
def here(place, monkeypatch):
    monkeypatch.chdir(place)
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))
    return place


@pytest.fixture(scope="module")
def ray(place):
    """One cluster of two processes for all tests."""
    ray = pytest.importorskip("ray", reason="Ray is an extra: pip install calgp[ray]")
    with pytest.MonkeyPatch.context() as patch:
        places = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]  # where its workers find `Killing`
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, places)))
        patch.setenv("RAY_worker_niceness", "0")
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield Ray(2)
    ray.shutdown()


def embedded(folder, engine, source="folder:photos", **more):
    images, extractor = open_original(source), find_network("network.py:make")
    return embed(extractor, images, folder, source=source, split="all", options=SMALL, engine=engine, **more)


def predicted(folder, engine, images=("photos",), **more):
    run = OpenRun.of(shipped_run(), device="cpu")
    files = find_files([Path(each) for each in images])
    return predict_shards(run, files, folder, name="shipped", rows_per_shard=25, engine=engine, **more)


def content(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.name != ".lock"}


# one process ---------------------------------------------------------------------------------------------------------


def test_predictions_are_those_of_the_classifier(here):
    manifest = json.loads(Path("predicted/manifest.json").read_text())
    assert [each["rows"] for each in manifest["shards"]] == [25, 25, 10] and manifest["classes"][7] == "7"
    shards = [np.load(f"predicted/predictions-{number:06d}.npz") for number in range(3)]
    names = np.concatenate([each["names"] for each in shards])
    assert names.tolist() == sorted(str(file) for file in Path("photos").rglob("*.png"))
    found = calgp.load("shipped").predict([Path(name) for name in names])
    # other batches: sums of float32 in another order
    np.testing.assert_allclose(
        np.concatenate([each["log_probs"] for each in shards]), found.predictive.log_probs, atol=1e-4
    )
    np.testing.assert_allclose(np.concatenate([each["entropy"] for each in shards]), found.entropy, atol=1e-4)


def test_tar_shards_give_the_predictions_of_their_files(here, tmp_path):
    """Labels are not needed: the archive has been written again without them."""
    with tarfile.open("tars/train-000000.tar") as archive:
        archive.extractall(tmp_path / "files", filter="data")
    files = sorted((tmp_path / "files").glob("*.png"))
    with tarfile.open(tmp_path / "bare.tar", "w") as archive:
        for file in files:
            archive.add(file, file.name)
    with pytest.raises(CalgpError, match=r"in .* has no label; put 0+\.cls or 0+\.json beside it"):
        open_original(f"shards:{tmp_path}/bare.tar")
    found = calgp.load("shipped").predict([*files])
    for number, tar in enumerate(("tars/train-000000.tar", tmp_path / "bare.tar")):
        predicted(tmp_path / f"p{number}", SerialEngine(), images=[tar])
        rows = _rows(tmp_path / f"p{number}/predictions-000000.npz")
        assert list(rows) == [f"{Path(tar).name}/{file.name}" for file in files] and len(rows) == 25
        np.testing.assert_array_equal(list(rows.values()), found.predictive.log_probs)  # the same batch
    with pytest.raises(CalgpError, match="go without others"):
        find_files([Path("tars/train-000000.tar"), Path("photos")])
    with pytest.raises(CalgpError, match="There are no shards"):
        find_files([Path("nothing-*.tar")])


def _rows(path):
    with np.load(path) as found:
        return dict(zip(found["names"].tolist(), found["log_probs"], strict=True))


def test_a_second_call_makes_only_what_is_missing(here, tmp_path):
    for made, make, name in (
        ("alone", embedded, "embeddings-000001.safetensors"),
        ("predicted", predicted, "predictions-000001.npz"),
    ):
        (tmp_path / made).mkdir()
        shutil.copytree(made, tmp_path / made / "copy", ignore=shutil.ignore_patterns(".lock"))
        folder = tmp_path / made / "copy"
        (folder / name).unlink()
        engine = Marking(SerialEngine(), tmp_path / made)
        make(folder, engine)
        assert [path.name.split(".")[0] for path in (tmp_path / made).glob("*.done.*")] == ["1"]
        assert content(folder) == content(made)


def test_damaged_images_stop_or_are_left_out(here, tmp_path):
    (tmp_path / "some").mkdir()
    shutil.copy("photos/0/00.png", tmp_path / "some/good.png")
    (tmp_path / "some/bad.png").write_bytes(b"no image")
    with pytest.raises(CalgpError, match=r"bad\.png is not a readable image.*; leave such images out with"):
        predicted(tmp_path / "p", SerialEngine(), images=[tmp_path / "some"])
    predicted(tmp_path / "q", SerialEngine(), images=[tmp_path / "some"], skip_unreadable=True)
    assert list(_rows(tmp_path / "q/predictions-000000.npz")) == [str(tmp_path / "some/good.png")]
    with pytest.raises(CalgpError, match="it holds predictions with other data"):
        predicted(tmp_path / "q", SerialEngine(), images=["photos"], skip_unreadable=True)


def test_on_the_command_line(here, tmp_path):
    words = ["predict", "shipped", "photos", "--out", str(tmp_path / "p"), "--rows-per-shard", "25", "--threads", "1"]
    result = CliRunner().invoke(cli.app, words)
    assert "predictions of 60 images in 3 files." in result.output, result.exception
    shards = content(tmp_path / "p")
    assert shards == content("predicted") | {"manifest.json": shards["manifest.json"]}
    for flags, says in ((["--jobs", "2"], "name a folder"), (["--out", "x", "--json"], "do not go with --out"),
                        (["--on", "spark", "--out", "x"], "no engine 'spark'"),
                        (["--gpus", "1"], "are for --on ray")):  # fmt: skip
        result = CliRunner().invoke(cli.app, ["predict", "shipped", "photos", *flags])
        assert isinstance(result.exception, CalgpError) and says in str(result.exception)


# several processes ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("source", ["folder:photos", "shards:tars"])
def test_processes_make_the_same_bytes(here, tmp_path, source):
    embedded(tmp_path / "alone", SerialEngine(), source)
    embedded(tmp_path / "pool", Killing(Processes(2), tmp_path, 4), source)
    assert content(tmp_path / "pool") == content(tmp_path / "alone")
    assert len(list(tmp_path.glob("4.begun.*"))) == 2


@pytest.mark.slow
def test_ray_makes_the_same_bytes_though_a_worker_is_killed(here, tmp_path, ray):
    manifest = embedded(tmp_path / "ray", Killing(ray, tmp_path, 4))
    assert manifest.finished and content(tmp_path / "ray") == content("alone")
    assert {number: len(list(tmp_path.glob(f"{number}.begun.*"))) for number in range(6)} == {
        0: 1, 1: 1, 2: 1, 3: 1, 4: 2, 5: 1,
    }  # fmt: skip


@pytest.mark.slow
def test_ray_makes_the_same_predictions_though_a_worker_is_killed(here, tmp_path, ray):
    predicted(tmp_path / "p", Killing(ray, tmp_path, 1))
    assert content(tmp_path / "p") == content("predicted")
    assert len(list(tmp_path.glob("1.begun.*"))) == 2


@pytest.mark.slow
def test_what_ray_has_made_before_ctrl_c_stays(here, tmp_path, ray):
    def stop(more, total):
        if more:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted, match="nothing is lost"):
        embedded(tmp_path / "stopped", ray, watch=stop)
    before = read_manifest(tmp_path / "stopped").made
    assert 1 <= before < 6
    (tmp_path / "marks").mkdir()
    embedded(tmp_path / "stopped", Marking(ray, tmp_path / "marks"))
    assert len(list((tmp_path / "marks").glob("*.done.*"))) == 6 - before
    assert content(tmp_path / "stopped") == content("alone")


@pytest.mark.slow
def test_a_network_that_is_another_elsewhere_is_refused(here, tmp_path, ray):
    """The file changes after it was opened here: workers read the new one."""
    file = tmp_path / "other.py"
    file.write_text(NETWORK)
    images, extractor = open_original("folder:photos"), find_network(f"{file}:make")
    file.write_text(NETWORK.replace("manual_seed(0)", "manual_seed(1)"))
    with pytest.raises(CalgpError, match=r"other\.py:make has other weights in another process"):
        embed(extractor, images, tmp_path / "e", source="folder:photos", split="all", options=SMALL, engine=ray)
