import multiprocessing
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from calgp.data import Folder, load
from calgp.data.files import FileNames
from calgp.data.prefetch import prefetch, worker_count
from calgp.errors import CalgpError


def write_digits(root: Path, count: int) -> Path:
    """The first embedded digits as a folder of classes."""
    images = load("digits", "train")
    for i in range(count):
        file = root / f"digit {int(images.y[i])}" / ("more" if i % 7 == 0 else ".") / f"{i}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(images.x[i, 0].numpy()).save(file)
    return root


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> Path:
    return write_digits(tmp_path_factory.mktemp("digits"), 300)


@pytest.mark.parametrize("workers", [0, 2])
def test_streamed_images_are_those_in_memory(digits, workers):
    kept, read = Folder(digits).load("train"), Folder(digits, workers=workers).load("train")
    assert read.x.shape == kept.x.shape and read.classes == kept.classes
    assert read.y.equal(kept.y) and read.rows.equal(kept.rows) and [*read.names] == [*kept.names]
    indices = [torch.randperm(len(kept), generator=torch.Generator().manual_seed(i))[: 7 + i] for i in range(12)]
    for (index, x), wanted in zip(read.read(iter(indices)), indices, strict=True):
        assert index is wanted and x.equal(kept.x[wanted])
    for (part, x), (_, wanted) in zip(read.read(read.parts(64)), kept.read(kept.parts(64)), strict=True):
        assert x.equal(wanted) and part.stop - part.start == 64
    assert read.pixels(slice(3, 9)).equal(kept.pixels(slice(3, 9))) and read.x[-1].equal(kept.x[-1])


def test_parts_of_streamed_images_are_those_in_memory(digits):
    kept, read = (
        images.balanced(100, 3).split(0.3, 4)[1].take(torch.tensor([5, 2, 2]))
        for images in (Folder(digits).load("train"), Folder(digits, workers=0).load("train"))
    )
    assert read.x[:].equal(kept.x) and read.y.equal(kept.y) and read.rows.equal(kept.rows)
    assert [*read.names] == [*kept.names]


def test_the_checksum_covers_names_labels_and_lengths(tmp_path):
    write_digits(tmp_path, 40)
    first = Folder(tmp_path, workers=0, test_share=1).load("test")
    assert first.checksum() == Folder(tmp_path, workers=2, test_share=1).load("test").checksum()
    assert first.take(torch.arange(5)).checksum() != first.take(torch.arange(6)).checksum()
    file = next(tmp_path.rglob("*.png"))
    file.rename(file.with_name("other.png"))
    renamed = Folder(tmp_path, workers=0, test_share=1).load("test").checksum()
    with file.with_name("other.png").open("ab") as longer:
        longer.write(b"\0")
    assert len({first.checksum(), renamed, Folder(tmp_path, workers=0, test_share=1).load("test").checksum()}) == 3


@pytest.mark.parametrize("workers", [0, 2])
def test_a_damaged_image_is_named_in_its_turn(tmp_path, workers):
    write_digits(tmp_path, 60)
    damaged = sorted(tmp_path.rglob("*.png"))[30]
    damaged.write_bytes(damaged.read_bytes()[:60])  # its header is whole
    images = Folder(tmp_path, workers=workers, size=28, colour="grey", test_share=1).load("test")  # no header is read
    name = damaged.relative_to(tmp_path).as_posix()
    read = images.read(images.parts(20))
    next(read)
    with pytest.raises(CalgpError, match=rf"1 of the images in .* cannot be read: {re.escape(name)} is not a"):
        next(read)
    with pytest.raises(CalgpError) as in_memory:
        Folder(tmp_path, test_share=1).load("test")
    assert f"{name} is not a readable image" in str(in_memory.value)


@pytest.mark.parametrize("workers", [0, 2])
def test_unreadable_images_are_found_at_the_start_or_left_out(tmp_path, workers):
    write_digits(tmp_path, 60)
    files = sorted(tmp_path.rglob("*.png"))
    files[10].write_bytes(b"no image")
    files[30].write_bytes(files[30].read_bytes()[:60])
    with pytest.raises(CalgpError, match=r"2 of the images in .* or leave them out with --skip-unreadable"):
        Folder(tmp_path, workers=workers).load("train")
    options = {"size": 28, "colour": "grey", "skip_unreadable": True, "test_share": 1}
    read, kept = (Folder(tmp_path, workers=each, **options).load("test") for each in (workers, None))
    assert read.is_streamed and not kept.is_streamed and len(read) == 58
    assert read.x[:].equal(kept.x) and read.rows.equal(kept.rows) and [*read.names] == [*kept.names]
    assert read.split_note.endswith("2 unreadable images are left out.")


def test_an_image_that_has_changed_its_size_is_named(tmp_path):
    write_digits(tmp_path, 30)
    images = Folder(tmp_path, workers=0, test_share=1).load("test")
    Image.fromarray(np.zeros((5, 9), np.uint8)).save(tmp_path / images.names[4])
    with pytest.raises(CalgpError, match=rf"{images.names[4]} is 9×5, the others are 28×28; --size"):
        images.pixels()


@pytest.mark.parametrize("workers", [0, None])
@pytest.mark.parametrize(
    ("width", "height", "side"),
    [(9, 5, 28), (90, 5, 64), (28, 28, None)],  # never enlarged beyond the largest; never large
)
def test_images_that_differ_in_size_are_stretched(tmp_path, workers, width, height, side):
    write_digits(tmp_path, 30)
    Image.fromarray(np.zeros((height, width), np.uint8)).save(tmp_path / "digit 1" / "other.png")
    for part in ("train", "test"):
        images = Folder(tmp_path, workers=workers).load(part)
        assert images.side == side and images.x.shape[2:] == (side or 28, side or 28)
        assert ("--size" in images.split_note) == (side is not None)
    named = Folder(tmp_path, workers=workers, size=8).load("train")
    assert named.side is None and named.x[:3].shape == (3, 1, 8, 8)


def test_large_images_are_stretched_even_if_they_have_one_size(tmp_path):
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for number in range(2):
            Image.fromarray(np.zeros((200, 300), np.uint8)).save(tmp_path / name / f"{number}.png")
    assert Folder(tmp_path, test_share=1).load("test").x.shape == (4, 1, 64, 64)
    for file in tmp_path.rglob("*.png"):
        Image.fromarray(np.zeros((200, 256), np.uint8)).save(file)
    assert Folder(tmp_path, test_share=1).load("test").x.shape == (4, 1, 200, 256)


def slow(index):
    """A batch that says which process read it."""
    time.sleep(0.01)
    return torch.tensor([os.getpid(), index.start])


def test_processes_read_ahead_and_end_with_the_reader():
    asked = []

    def indices():
        for start in range(20):
            asked.append(start)
            yield slice(start, start + 1)

    reading = prefetch(slow, indices(), workers=2)
    first = next(reading)[1].tolist()
    assert first[0] != os.getpid() and asked == [0, 1, 2, 3]  # two batches a process
    found = [first, *(x.tolist() for _, x in reading)]
    assert [start for _, start in found] == list(range(20))
    left = prefetch(slow, indices(), workers=2)
    others = {next(left)[1].tolist()[0] for _ in range(8)}
    left.close()
    for pid in others | {pid for pid, _ in found}:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("goes_on", [True, False])
def test_a_worker_that_is_killed_is_reported(which, goes_on):
    """Also if the reader stops before it has noticed: the other workers end all the same."""
    reading = prefetch(slow, (slice(i, i + 1) for i in range(50)), workers=2)
    next(reading)
    time.sleep(0.3)  # the three batches on their way are read
    readers = sorted(child.pid for child in multiprocessing.active_children() if child.pid)
    os.kill(readers[which], signal.SIGKILL)
    if goes_on:
        with pytest.raises(CalgpError, match="was killed, or ran out of memory"):
            for _ in reading:
                pass
    else:
        reading.close()
    assert not any(_runs(pid) for pid in readers)


def large(index):
    """Images that no pipe holds: their worker waits in the middle of sending them."""
    return torch.full((8_000_000,), index.start % 256, dtype=torch.uint8)  # by several threads, if there are


def test_a_worker_that_is_killed_while_it_sends_images_is_reported():
    reading = prefetch(large, (slice(i, i + 1) for i in range(50)), workers=1)
    assert next(reading)[1].eq(0).all()
    time.sleep(0.3)  # the second batch is in the pipe with its first part
    (reader,) = multiprocessing.active_children()
    os.kill(reader.pid, signal.SIGKILL)
    with pytest.raises(CalgpError, match="was killed, or ran out of memory"):
        next(reading)


def faulty(index):
    raise ZeroDivisionError(index)


def test_an_unforeseen_error_in_a_worker_comes_with_its_traceback():
    with pytest.raises(RuntimeError, match=r"(?s)in faulty.*ZeroDivisionError: slice\(3, 4, None\)"):
        next(prefetch(faulty, [slice(3, 4)], workers=2))


OPEN = """
import sys
from pathlib import Path
from calgp.data import Folder
images = Folder(Path(sys.argv[1]), workers=2, size=28, colour="grey").load("train")
reading = images.read(images.parts(10))
next(reading)
"""


@pytest.mark.slow
def test_a_program_ends_in_the_midst_of_a_reading(digits):
    ended = subprocess.run([sys.executable, "-c", OPEN, str(digits)], capture_output=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, b"")


ORPHANS = """
import sys, time, torch
from pathlib import Path
from calgp.data import Folder
images = Folder(Path(sys.argv[1]), workers=2, size=28, colour="grey").load("train")
reading = images.read(images.parts(10))
next(reading)
import multiprocessing
print(*(child.pid for child in multiprocessing.active_children()), flush=True)
time.sleep(3600)
"""


@pytest.mark.slow
def test_readers_end_with_a_killed_process_and_ignore_ctrl_c(digits):
    with subprocess.Popen([sys.executable, "-c", ORPHANS, str(digits)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        children = [int(pid) for pid in process.stdout.readline().split()]
        for pid in children:
            os.kill(pid, signal.SIGINT)
        time.sleep(0.2)
        assert len(children) == 2 and all(_runs(pid) for pid in children)
        process.kill()
    end = time.monotonic() + 20  # a busy machine
    while any(_runs(pid) for pid in children):
        assert time.monotonic() < end
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_names_are_kept_compactly():
    names = ["a/1.png", "", "ü/\udcff.png"]
    packed = FileNames.of(names)
    assert [*packed] == names and packed[-1] == names[-1] and packed[:2] == names[:2]
    assert [*packed.take(torch.tensor([2, 0])).take(torch.tensor([1]))] == ["a/1.png"]
    with pytest.raises(IndexError):
        packed[3]


def test_a_streamed_image_takes_56_bytes_and_its_name(tmp_path):
    sizes = []
    for n in (100, 400):
        root = write_digits(tmp_path / str(n), n)
        images = Folder(root, workers=2, test_share=1).load("test")
        sizes.append(len(pickle.dumps(images)) - sum(map(len, images.names)))
    # eight bytes each: end of the name, length and label in the listing; label, row and the numbers of image and name
    # in the set. One more for what pickle adds to longer numbers.
    assert (sizes[1] - sizes[0]) / 300 <= 56 + 1


def test_the_number_of_workers_is_checked(monkeypatch):
    assert worker_count(3) == 3
    monkeypatch.setenv("CALGP_WORKERS", "5")
    assert worker_count() == 5 and worker_count(0) == 0
    monkeypatch.setenv("CALGP_WORKERS", "many")
    for given in (None, -1, 10_000):
        with pytest.raises(CalgpError, match="must be a number of processes from 0 to 256"):
            worker_count(given)
