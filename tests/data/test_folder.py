import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from calgp.data import Folder, load
from calgp.errors import CalgpError


def write(path: Path, value=0, shape=(4, 4)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full(shape, value, np.uint8)).save(path)


@pytest.fixture
def animals(tmp_path: Path) -> Path:
    """Ten cats and twenty dogs, grey, each of its own shade."""
    for i in range(10):
        write(tmp_path / "cat" / f"{i}.png", i)
    for i in range(20):
        write(tmp_path / "dog" / "more" / f"{i}.BMP" if i % 2 else tmp_path / "dog" / f"{i}.png", 100 + i)
    (tmp_path / "cat" / "notes.txt").write_text("no image")
    (tmp_path / "cat" / ".hidden.png").write_text("no image")
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
                write(tmp_path / part / name / f"{i}.png")
    assert len(Folder(tmp_path).load("train")) == 6 and len(Folder(tmp_path).load("test")) == 4
    write(tmp_path / "test" / "c" / "0.png")
    with pytest.raises(CalgpError, match="the class 'c', which the training images do not have"):
        Folder(tmp_path).load("test")


def test_a_part_that_is_not_there_is_named(tmp_path):
    for name in ("a", "b"):
        write(tmp_path / "test" / name / "0.png")
    assert len(Folder(tmp_path).load("test")) == 2
    with pytest.raises(CalgpError, match="has no train images, only test; add a train part"):
        Folder(tmp_path).load("train")


def write_parts(root: Path, **counts: int) -> Path:
    """Two classes, `count` images of each, in each part."""
    for part, count in counts.items():
        for name in ("a", "b"):
            for i in range(count):
                write(root / part / name / f"{i}.png", 10 * count + i)
    return root


@pytest.mark.parametrize(
    ("train", "test"), [("train", "val"), ("training", "validation"), ("Train", "valid"), ("train", "testing")]
)
def test_a_validation_folder_is_the_test_part_if_there_is_no_other(tmp_path, train, test):
    folder = Folder(write_parts(tmp_path, **{train: 3, test: 2}))
    images = folder.load("train")
    assert images.classes == ("a", "b") and len(images) == 6 and len(folder.load("test")) == 4
    assert images.split_note == f"{tmp_path}: 6 images to train on ({train}); 4 images to test on ({test})."
    assert folder.validation() is None
    assert images.take(torch.tensor([1])).split_note == images.split_note


def test_a_validation_folder_beside_a_test_folder_is_the_hold_out(tmp_path):
    folder = Folder(write_parts(tmp_path, train=3, val=2, test=1))
    write(tmp_path / "notes" / "page.png")
    held_out = folder.validation()
    assert held_out is not None and [len(folder.load(split)) for split in ("train", "val", "test")] == [6, 4, 2]
    assert held_out.rows.tolist() == [6, 7, 8, 9]  # none is the row of a training image
    assert [*held_out.names] == ["a/0.png", "a/1.png", "b/0.png", "b/1.png"] and held_out.x[:, 0, 0, 0].min() == 20
    assert folder.load("train").split_note == (
        f"{tmp_path}: 6 images to train on (train); 4 images held out (val); 2 images to test on (test). "
        "Not used: notes."
    )


def test_a_train_folder_alone_splits_itself(tmp_path):
    folder = Folder(write_parts(tmp_path, train=10))
    train, test = folder.load("train"), folder.load("test")
    assert train.y.bincount().tolist() == [8, 8] and test.y.bincount().tolist() == [2, 2]
    assert test.rows.equal(Folder(tmp_path / "train").load("test").rows)
    assert train.split_note == (
        f"{tmp_path} has no test part, so 20% of each class are test images: 16 images to train on, 4 to test on."
    )


def test_two_folders_for_one_part_are_refused(tmp_path):
    with pytest.raises(CalgpError, match=r"Both .*/train and .*/training could be the train images"):
        Folder(write_parts(tmp_path, train=2, training=2)).load("train")


def test_parts_without_class_folders_are_no_classes(tmp_path):
    for part in ("train", "val"):
        write(tmp_path / part / "0.png")
    with pytest.raises(CalgpError, match=r"train must have a folder for each of at least two classes; it has none"):
        Folder(tmp_path).load("train")


def test_a_folder_that_was_not_trained_on_is_used_whole(animals):
    whole = load(f"folder:{animals}", "test", test_share=1)
    assert whole.rows.tolist() == list(range(30)) and whole.split_note == f"{animals}: all 30 images are used."
    with pytest.raises(CalgpError, match="has no train images, only test"):
        load(f"folder:{animals}", "train", test_share=1)
    assert len(load(f"folder:{animals}", "test", test_share=0.5)) == 15
    for share in (0, 1.1, float("nan")):
        with pytest.raises(CalgpError, match="Invalid test_share"):
            Folder(animals, test_share=share)


@pytest.mark.parametrize("source", ["folder", "stream"])
def test_a_class_that_is_not_utf8_is_refused_before_anything_is_read(tmp_path, source):
    """Such a name could be trained with, but no file of the run could be read again."""
    for name in (b"L\xf6we", b"Katze"):
        (tmp_path / os.fsdecode(name)).mkdir()
        (tmp_path / os.fsdecode(name) / "0.png").touch()
    with pytest.raises(CalgpError, match=r"Invalid class name 'L\\udcf6we' in .*: must be UTF-8 text, such as 'Löwe'"):
        load(f"{source}:{tmp_path}", "train")


def test_a_path_that_is_not_utf8_is_refused(tmp_path):
    with pytest.raises(CalgpError, match=r"Invalid source 'folder:L\\udcf6we': must be UTF-8 text"):
        load("folder:" + os.fsdecode(b"L\xf6we"), "train")


def test_train_may_be_a_class(tmp_path):
    for name in ("train", "plane"):
        for i in range(5):
            write(tmp_path / name / f"{i}.png")
    assert Folder(tmp_path).load("train").classes == ("plane", "train")


def test_one_image_in_colour_makes_all_rgb(animals):
    Image.new("RGB", (4, 4), "red").save(animals / "cat" / "red.png")
    assert {Folder(animals).load(split).x.shape[1] for split in ("train", "test")} == {3}
    assert Folder(animals, colour="grey").load("train").x.shape[1] == 1


def test_different_sizes_are_stretched_to_one(animals):
    write(animals / "dog" / "wide.png", shape=(3, 5))
    for split in ("train", "test"):
        assert Folder(animals).load(split).x.shape[1:] == (1, 5, 5)
    images = load(f"folder:{animals}", "train", size=6, colour="rgb")
    assert images.x.shape[1:] == (3, 6, 6)


def test_unreadable_images_are_named_or_skipped(animals):
    for i in range(12):
        (animals / "cat" / f"bad{i:02}.png").write_bytes(b"no image")
        write(animals / "cat" / f"good{i:02}.png")
    with pytest.raises(CalgpError, match=r"cat/bad\d\d.png is not a readable image.*skip_unreadable"):
        Folder(animals).load("train")
    with pytest.raises(CalgpError, match=r"12 of the images in .*, and 2 more\."):
        Folder(animals, test_share=1).load("test")
    images = Folder(animals, skip_unreadable=True, test_share=1).load("test")
    assert len(images) == 42 and images.split_note.endswith("54 images are used. 12 unreadable images are left out.")


def test_an_unreadable_test_image_is_found_before_training(animals):
    name = next(iter(Folder(animals).load("test").names or ()))
    (animals / name).write_bytes((animals / name).read_bytes()[:50])
    with pytest.raises(CalgpError, match=f"1 of the images in .* cannot be read: {name} is not a readable image"):
        Folder(animals).load("train")
    assert len(Folder(animals, skip_unreadable=True).load("train")) == 24
    assert len(Folder(animals, skip_unreadable=True).load("test")) == 5


def test_a_folder_with_nothing_readable_is_refused_even_when_skipping(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for i in range(5):
            (tmp_path / name / f"{i}.png").touch()
    with pytest.raises(CalgpError, match="cannot be read"):
        Folder(tmp_path, skip_unreadable=True).load("train")


def test_folders_that_cannot_be_used_are_refused(tmp_path):
    cases = {
        "absent": "There is no image folder",
        "file": "is a file",
        "empty": "it has none",
        "one": "only 'a'",
        "bare": "no images",
    }
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    write(tmp_path / "one" / "a" / "0.png")
    for name in ("a", "b"):
        (tmp_path / "bare" / name).mkdir(parents=True)
    write(tmp_path / "few" / "a" / "0.png")
    write(tmp_path / "few" / "b" / "0.png")
    write(tmp_path / "hollow" / "a" / "0.png")
    (tmp_path / "hollow" / "b").mkdir()
    later = {"few": "Class 'a' .* has 1 image, too few to split", "hollow": "Class 'b' .* has no images .*remove it"}
    for name, message in (cases | later).items():
        with pytest.raises(CalgpError, match=message):
            Folder(tmp_path / name).load("train")


def test_impossible_options_are_refused(animals):
    with pytest.raises(CalgpError, match="Invalid size=0: must be the side in pixels"):
        Folder(animals, size=0)
    with pytest.raises(CalgpError, match="'grey' or 'rgb'"):
        load(f"folder:{animals}", "train", colour="pink")  # type: ignore[arg-type]
    with pytest.raises(CalgpError, match="no 'valid' part"):
        Folder(animals).load("valid")  # type: ignore[arg-type]


def test_a_pipe_among_the_images_is_left_out(animals):
    before = len(Folder(animals, test_share=1).load("test"))
    os.mkfifo(animals / "cat" / "pipe.png")
    assert len(Folder(animals, test_share=1).load("test")) == before


@pytest.mark.parametrize("source", ["folder:~nobody-here/x", "folder:" + "x" * 300, "folder:a\x00b", "x" * 10**6])
def test_a_source_that_cannot_be_is_refused_in_one_sentence(source):
    with pytest.raises(CalgpError) as caught:
        load(source, "train")
    assert len(str(caught.value)) < 600
