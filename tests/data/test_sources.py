import gzip
import hashlib
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import calgp.data
from calgp.data import SOURCES, data_directory, load, open_source
from calgp.data.downloads import PUBLISHED
from calgp.data.sources import share_files
from calgp.errors import CalgpError

EMBEDDED = Path(calgp.data.__file__).parent / "embedded"


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes()


def mnist(folder: Path, pack=bytes, suffix="") -> np.ndarray:
    """Six images and labels in `folder` as MNIST's test part."""
    x = np.random.default_rng(0).integers(0, 256, (6, 28, 28), dtype=np.uint8)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"t10k-images-idx3-ubyte{suffix}").write_bytes(pack(idx(x)))
    (folder / f"t10k-labels-idx1-ubyte{suffix}").write_bytes(pack(idx(np.arange(6, dtype=np.uint8))))
    return x


def test_the_shelf_is_exact():
    assert sorted(calgp.data.__all__) == sorted(
        [
            *("CORRUPTIONS", "SEVERITIES", "SOURCES", "Corruption", "Folder", "Images", "Shards", "corrupted"),
            *("data_directory", "download", "from_dataset", "load", "open_source", "write_shards"),
        ]
    )
    assert list(SOURCES) == ["digits", "digits-large", "letters", "mnist", "notmnist", "cifar10", "cifar100"]
    assert all(source.name == name and source.description for name, source in SOURCES.items())
    assert [name for name, source in SOURCES.items() if source.downloadable] == list(PUBLISHED)


@pytest.mark.parametrize(
    ("name", "split", "each"),
    [("digits", "train", 500), ("digits", "test", 100), ("digits-large", "train", 500), ("digits-large", "test", 800)],
)
def test_embedded_digits_are_balanced(name, split, each):
    images = load(name, split)
    assert images.x.shape == (10 * each, 1, 28, 28)
    assert images.y.bincount().tolist() == [each] * 10
    assert images.rows.unique().numel() == 10 * each
    assert images.classes == tuple("0123456789")


def test_the_large_set_begins_with_the_small_one():
    for split, n in (("train", 5000), ("test", 1000)):
        small, large = load("digits", split), load("digits-large", split)
        assert torch.equal(large.x[:n], small.x) and torch.equal(large.y[:n], small.y)
        assert torch.equal(large.rows[:n], small.rows)


def test_embedded_letters_are_balanced_and_white_on_black():
    images = load("letters", "test")
    assert images.x.shape[1:] == (1, 28, 28) and images.classes == tuple("ABCDEFGHIJ")
    assert min(images.y.bincount(minlength=10)) >= 100
    assert images.x[:, :, 0].float().mean() < 5 and images.x.flatten(1).amax(1).min() > 150
    assert images.x.flatten(1).unique(dim=0).shape[0] == len(images)


def test_embedded_files_are_small():
    digits = sum(path.stat().st_size for path in EMBEDDED.glob("digits-*.xz"))
    letters = sum(path.stat().st_size for path in EMBEDDED.glob("letters-*.xz"))
    assert digits <= 1.85e6 and letters <= 0.3e6


def test_embedded_pictures_are_these():
    parts = (("digits", "train"), ("digits", "test"), ("digits-large", "test"), ("letters", "test"))
    sums = [load(*part).checksum()[:16] for part in parts]
    assert sums == ["0e24cbdce385008b", "5b7b5c9b951b3c89", "2de3162cb6245692", "de5913d3adee5e75"]


def test_there_is_nothing_to_train_on_in_letters():
    for name in ("letters", "notmnist"):
        with pytest.raises(CalgpError, match="no 'train' part, it must be 'test'"):
            load(name, "train")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("mnsit", "'mnist'"),
        ("MNIST", "'mnist'"),
        ("cifar-10", "'cifar10'"),
        ("?", "digits, digits-large, letters"),
        ("folder:", "folder:PATH"),
    ],
)
def test_an_unknown_name_lists_the_known(name, hint):
    with pytest.raises(CalgpError, match=hint):
        open_source(name)


def test_sources_that_share_files_are_known(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "photos")
    for other in ("stream:photos/", f"folder:{tmp_path}/photos", "folder:photos/train", "shards:.", "folder:link"):
        assert share_files("folder:photos", other) and share_files(other, "folder:photos")
    for other in ("folder:photos2", "folder:strangers", "digits"):
        assert not share_files("folder:photos", other) and not share_files(other, "folder:photos")
    assert share_files("digits", "digits") and not share_files("digits", "mnist")


def test_size_and_colour_are_brought_about():
    assert load("digits", "test", size=32, colour="rgb").x.shape == (1000, 3, 32, 32)


def test_the_data_directory_is_named_in_three_ways(monkeypatch, tmp_path):
    monkeypatch.setenv("CALGP_DATA", str(tmp_path / "a"))
    assert data_directory(tmp_path / "b") == tmp_path / "b"
    assert data_directory() == tmp_path / "a"
    monkeypatch.setenv("CALGP_DATA", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "c"))
    assert data_directory() == tmp_path / "c" / "calgp"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data_directory() == tmp_path / ".cache" / "calgp"


@pytest.mark.parametrize("folder", ["MNIST/raw", "mnist", "."])
@pytest.mark.parametrize(("pack", "suffix"), [(bytes, ""), (gzip.compress, ".gz")])
def test_mnist_is_found_in_its_usual_places(folder, pack, suffix, tmp_path):
    x = mnist(tmp_path / folder, pack, suffix)
    images = load("mnist", "test", directory=tmp_path)
    assert np.array_equal(images.x[:, 0].numpy(), x) and images.y.tolist() == list(range(6))
    assert not SOURCES["mnist"].is_available(tmp_path)  # its train part is not


@pytest.mark.parametrize("name", ["mnist", "notmnist", "cifar10", "cifar100"])
def test_a_missing_set_says_which_files_go_where(name, tmp_path):
    with pytest.raises(CalgpError, match=r"is not in .*Put .*/.* there") as caught:
        load(name, "test", directory=tmp_path)
    assert (f"calgp sources --download {name}" in str(caught.value)) == (name != "notmnist")
    assert not SOURCES[name].is_available(tmp_path)


def test_labels_that_do_not_fit_their_pictures_are_refused(tmp_path):
    mnist(tmp_path)
    for y in (np.arange(5), np.full(6, 10), np.zeros((6, 2))):
        (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(idx(y.astype(np.uint8)))
        with pytest.raises(CalgpError, match=r"t10k-images.*do not fit together"):
            load("mnist", "test", directory=tmp_path)


def test_notmnist_is_read_from_its_folders_too(tmp_path):
    for q, letter in enumerate("ABCDEFGHIJ"):
        (tmp_path / "notMNIST_small" / letter).mkdir(parents=True)
        Image.new("L", (28, 28), q).save(tmp_path / "notMNIST_small" / letter / "x.png")
    (tmp_path / "notMNIST_small" / "A" / "empty.png").touch()  # as in the published archive
    images = load("notmnist", "test", directory=tmp_path)
    assert images.x.shape == (10, 1, 28, 28) and torch.equal(images.x[:, 0, 0, 0].long(), images.y)


@pytest.mark.parametrize(
    ("name", "python", "binary", "labels"),
    [
        ("cifar10", "cifar-10-batches-py", "cifar-10-batches-bin", 1),
        ("cifar100", "cifar-100-python", "cifar-100-binary", 2),
    ],
)
@pytest.mark.parametrize("split", ["train", "test"])
def test_cifars_two_versions_load_alike(name, python, binary, labels, split, tmp_path):
    source = SOURCES[name]
    batches = source.batches[split]  # type: ignore[attr-defined]
    names = [f"class {q}" for q in range(source.classes or 0)]
    x = np.random.default_rng(1).integers(0, 256, (len(batches), 4, 3072), dtype=np.uint8)
    y = np.random.default_rng(2).integers(0, len(names), (len(batches), 4), dtype=np.uint8)
    for folder in ("p/" + python, "b/" + binary):
        (tmp_path / folder).mkdir(parents=True)
    for part, batch in enumerate(batches):
        content = {"data": x[part], "labels": y[part].tolist(), "fine_labels": y[part].tolist()}
        (tmp_path / "p" / python / batch).write_bytes(pickle.dumps(content, 2))
        records = np.hstack([np.zeros((4, labels - 1), np.uint8), y[part][:, None], x[part]])
        (tmp_path / "b" / binary / f"{batch}.bin").write_bytes(records.tobytes())
    for file in ("batches.meta", "meta"):
        meta = pickle.dumps({"label_names": names, "fine_label_names": names}, 2)
        (tmp_path / "p" / python / file).write_bytes(meta)
    for file in ("batches.meta.txt", "fine_label_names.txt"):
        (tmp_path / "b" / binary / file).write_text("\n".join(names) + "\n\n")
    loaded = [load(name, split, directory=tmp_path / version) for version in "pb"]  # type: ignore[arg-type]
    assert loaded[0].checksum() == loaded[1].checksum() and loaded[0].classes == loaded[1].classes == tuple(names)
    assert np.array_equal(loaded[0].x.flatten(1).numpy(), x.reshape(-1, 3072))


@pytest.mark.data
def test_mnists_files_have_the_published_sums(data_dir):
    for file in PUBLISHED["mnist"].files:
        content = (data_dir / "MNIST" / "raw" / file.name).read_bytes()
        assert (len(content), hashlib.md5(content, usedforsecurity=False).hexdigest()) == (file.size, file.md5)


@pytest.mark.data
def test_mnist_is_the_published_one(data_dir):
    train, test = load("mnist", "train", directory=data_dir), load("mnist", "test", directory=data_dir)
    assert len(train) == 60000 and len(test) == 10000
    assert train.y[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert test.y[:10].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]
    assert train.y.bincount().tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert train.pixels().mean().item() == pytest.approx(0.1307, abs=5e-5)  # the mean that everybody normalises by
    assert SOURCES["mnist"].is_available(data_dir)


@pytest.mark.data
@pytest.mark.parametrize("split", ["train", "test"])
def test_embedded_digits_are_mnists_at_their_rows(data_dir, split):
    digits, whole = load("digits-large", split), load("mnist", split, directory=data_dir)
    assert torch.equal(digits.x, whole.x[digits.rows]) and torch.equal(digits.y, whole.y[digits.rows])


@pytest.mark.data
def test_notmnist_has_its_18724_letters(data_dir):
    images = load("notmnist", "test", directory=data_dir)
    assert len(images) == 18724 and set(images.y.bincount().tolist()) == {1872, 1873}


@pytest.mark.data
@pytest.mark.parametrize(("name", "classes"), [("cifar10", 10), ("cifar100", 100)])
def test_cifar_is_the_published_one(data_dir, name, classes):
    test = load(name, "test", directory=data_dir)
    assert test.x.shape == (10000, 3, 32, 32) and test.y.bincount().tolist() == [10000 // classes] * classes
    first = {"cifar10": ["cat", "ship", "ship", "airplane"], "cifar100": ["mountain", "forest", "seal", "mushroom"]}
    assert [test.classes[q] for q in test.y[:4]] == first[name]
    assert SOURCES[name].is_available(data_dir)


@pytest.mark.data
def test_cifar10_trains_on_50000(data_dir):
    train = load("cifar10", "train", directory=data_dir)
    assert train.y.bincount().tolist() == [5000] * 10
    mean = train.pixels(slice(0, 10000)).mean((0, 2, 3))
    assert torch.allclose(mean, torch.tensor([0.4914, 0.4822, 0.4465]), atol=5e-3)  # the known mean, over a fifth


@pytest.mark.data
def test_a_part_of_cifar100_is_accepted(data_dir):
    train = load("cifar100", "train", directory=data_dir)
    assert len(train) in (30000, 50000) and train.y.unique().numel() == 100
