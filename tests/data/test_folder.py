import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from calgp.data import Folder, load
from calgp.errors import CalgpError


def picture(path: Path, value=0, shape=(4, 4)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full(shape, value, np.uint8)).save(path)


@pytest.fixture
def animals(tmp_path: Path) -> Path:
    """Ten cats and twenty dogs, grey, each of its own shade."""
    for i in range(10):
        picture(tmp_path / "cat" / f"{i}.png", i)
    for i in range(20):
        picture(tmp_path / "dog" / "more" / f"{i}.BMP" if i % 2 else tmp_path / "dog" / f"{i}.png", 100 + i)
    (tmp_path / "cat" / "notes.txt").write_text("no picture")
    (tmp_path / "cat" / ".hidden.png").write_text("no picture")
    (tmp_path / ".git" / "x").mkdir(parents=True)
    return tmp_path


def test_a_folder_is_split_once_and_for_all(animals):
    train, test = (Folder(animals).load(split) for split in ("train", "test"))
    assert train.classes == ("cat", "dog")
    assert train.y.bincount().tolist() == [8, 16] and test.y.bincount().tolist() == [2, 4]
    assert sorted(train.rows.tolist() + test.rows.tolist()) == list(range(30))
    assert torch.equal(test.x, Folder(animals).load("test").x)
    assert train.x.shape[1:] == (1, 4, 4)
    for images in (train, test):
        for x, y, name in zip(images.x, images.y, images.names or (), strict=True):
            assert x.max() == int(Path(name).stem) + 100 * y and name.split("/")[0] == images.classes[y]


def test_parts_of_ones_own_are_kept(tmp_path):
    for part, count in (("train", 3), ("test", 2)):
        for name in ("a", "b"):
            for i in range(count):
                picture(tmp_path / part / name / f"{i}.png")
    assert len(Folder(tmp_path).load("train")) == 6 and len(Folder(tmp_path).load("test")) == 4
    picture(tmp_path / "test" / "c" / "0.png")
    with pytest.raises(CalgpError, match="the class 'c', which the train folder has not"):
        Folder(tmp_path).load("test")


def test_a_part_that_is_not_there_is_named(tmp_path):
    for name in ("a", "b"):
        picture(tmp_path / "train" / name / "0.png")
    assert len(Folder(tmp_path).load("train")) == 2
    with pytest.raises(CalgpError, match="no folder 'test', only 'train'"):
        Folder(tmp_path).load("test")


def test_train_may_be_a_class(tmp_path):
    for name in ("train", "plane"):
        for i in range(5):
            picture(tmp_path / name / f"{i}.png")
    assert Folder(tmp_path).load("train").classes == ("plane", "train")


def test_one_picture_in_colour_makes_all_rgb(animals):
    Image.new("RGB", (4, 4), "red").save(animals / "cat" / "red.png")
    assert {Folder(animals).load(split).x.shape[1] for split in ("train", "test")} == {3}
    assert Folder(animals, colour="grey").load("train").x.shape[1] == 1


def test_different_sizes_need_a_size(animals):
    picture(animals / "dog" / "wide.png", shape=(3, 5))
    for split in ("train", "test"):
        with pytest.raises(CalgpError, match=r"is 4×4, .*wide.png is 5×3; pass --size"):
            Folder(animals).load(split)
    images = load(f"folder:{animals}", "train", size=6, colour="rgb")
    assert images.x.shape[1:] == (3, 6, 6)


def test_unreadable_pictures_are_named_or_skipped(animals):
    for i in range(12):
        (animals / "cat" / f"bad{i:02}.png").write_bytes(b"no picture")
        picture(animals / "cat" / f"good{i:02}.png")
    with pytest.raises(CalgpError, match=r"cat/bad\d\d.png is not a readable picture.*skip_unreadable"):
        Folder(animals).load("train")
    with pytest.raises(CalgpError, match=r"12 of the pictures in .*, and 2 more\."):
        Folder(animals).whole()
    assert len(Folder(animals, skip_unreadable=True).whole()) == 42


def test_a_folder_with_nothing_readable_is_refused_even_when_skipping(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for i in range(5):
            (tmp_path / name / f"{i}.png").touch()
    with pytest.raises(CalgpError, match="cannot be read"):
        Folder(tmp_path, skip_unreadable=True).load("train")


def test_folders_that_cannot_be_used_are_refused(tmp_path):
    cases = {
        "absent": "does not exist",
        "file": "is a file",
        "empty": "it has none",
        "one": "only 'a'",
        "bare": "no pictures",
    }
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    picture(tmp_path / "one" / "a" / "0.png")
    for name in ("a", "b"):
        (tmp_path / "bare" / name).mkdir(parents=True)
    picture(tmp_path / "few" / "a" / "0.png")
    picture(tmp_path / "few" / "b" / "0.png")
    for name, message in (cases | {"few": "too few for two parts"}).items():
        with pytest.raises(CalgpError, match=message):
            Folder(tmp_path / name).load("train")


def test_impossible_options_are_refused(animals):
    with pytest.raises(CalgpError, match="no picture size"):
        Folder(animals, size=0)
    with pytest.raises(CalgpError, match="'grey' or 'rgb'"):
        load(f"folder:{animals}", "train", colour="pink")  # type: ignore[arg-type]
    with pytest.raises(CalgpError, match="no 'valid' part"):
        Folder(animals).load("valid")  # type: ignore[arg-type]


def test_a_pipe_among_the_pictures_is_left_out(animals):
    before = len(Folder(animals).whole())
    os.mkfifo(animals / "cat" / "pipe.png")
    assert len(Folder(animals).whole()) == before


@pytest.mark.parametrize("source", ["folder:~nobody-here/x", "folder:" + "x" * 300, "folder:a\x00b", "x" * 10**6])
def test_a_source_that_cannot_be_is_refused_in_one_sentence(source):
    with pytest.raises(CalgpError) as caught:
        load(source, "train")
    assert len(str(caught.value)) < 600
