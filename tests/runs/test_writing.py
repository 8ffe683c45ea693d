"""One writer at a time; full and read-only disks. Real processes, real file systems."""

import errno
import json
import os
import resource
import signal
import stat
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import replace

import pytest

from calgp.errors import CalgpError
from calgp.paper import run_missing
from calgp.runs import RunFolder, ensemble, writing
from calgp.runs.results import NoteRecord, TrainRecord
from calgp.runs.writing import PART, owned, remove_leftovers, wrap_os_errors, write_whole
from calgp.search.jobs import Paths
from calgp.training import train_run
from folders import calibrate, evaluate, tensors
from small_run import small

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="flock and mount are POSIX")

LOAD = """
import importlib.util, sys, time
from pathlib import Path
spec = importlib.util.spec_from_file_location("writing", sys.argv[1])  # alone: torch is not needed, and slow to come
writing = importlib.util.module_from_spec(spec)
spec.loader.exec_module(writing)
"""
HOLD = (
    LOAD
    + """
with writing.owned(Path(sys.argv[2])):
    print("held", flush=True)
    time.sleep(3600)
"""
)


@contextmanager
def held_by_another_process(path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(writing.__file__), str(path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_second_process_is_refused_until_the_first_is_killed(trained, fabric, tmp_path, monkeypatch):
    """Training, evaluating, calibrating, making an ensemble, reproducing: all that write."""
    monkeypatch.setattr(writing, "GRACE", 0.0)
    copy = RunFolder(tmp_path / "run")
    copy.create(trained.card())
    copy.write_tensors("model.safetensors", tensors(trained, "model.safetensors"))
    with held_by_another_process(copy.path) as process:
        for write in (
            lambda: train_run(small(), copy, fabric),
            lambda: evaluate(copy, fabric, passes=1),
            lambda: calibrate(copy, fabric),
            lambda: run_missing([], Paths(copy.path)),
            lambda: owned(copy.path).__enter__(),
        ):
            with pytest.raises(CalgpError, match="is being written by another process"):
                write()
        assert copy.card() and copy.model()  # readers are not in the way
        process.send_signal(signal.SIGKILL)
        process.wait()
    monkeypatch.undo()
    evaluate(copy, fabric, passes=1)  # the kernel has taken the lock back


def test_an_ensemble_is_not_made_in_a_folder_that_somebody_writes(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "GRACE", 0.0)
    other = RunFolder(tmp_path / "other")
    other.create(trained.card())
    other.write_tensors("model.safetensors", tensors(trained, "model.safetensors"))
    with _in_a_thread(tmp_path / "ensemble"), pytest.raises(CalgpError, match="another process"):
        ensemble([trained, other], RunFolder(tmp_path / "ensemble"))


@contextmanager
def _in_a_thread(path):
    begun, end = threading.Event(), threading.Event()

    def hold():
        with owned(path):
            begun.set()
            end.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    begun.wait(30)
    try:
        yield
    finally:
        end.set()
        thread.join()


def test_a_second_thread_is_refused_and_the_owner_may_ask_again(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "GRACE", 0.0)
    with _in_a_thread(tmp_path), pytest.raises(CalgpError, match="another process"), owned(tmp_path):
        pass
    with owned(tmp_path), owned(tmp_path):
        pass
    with _in_a_thread(tmp_path):  # free again
        pass


def test_the_next_owner_removes_what_dead_writers_left_and_nothing_else(tmp_path):
    write_whole(tmp_path / "whole", b"data")
    (tmp_path / f".model.safetensors.abcdefgh{PART}").write_bytes(b"half")
    (tmp_path / ".hidden").write_bytes(b"the user's")
    handle, aside = writing._aside(tmp_path / "report.html")  # of a writer that is alive
    with owned(tmp_path):
        assert sorted(os.listdir(tmp_path)) == sorted([".hidden", ".lock", os.path.basename(aside), "whole"])
    os.close(handle)
    remove_leftovers(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".hidden", ".lock", "whole"]


# what is there already -----------------------------------------------------------------------------------------------


def test_a_device_is_written_to_and_not_replaced(tmp_path):
    """A device of our own, as /dev/null is; only root may make one, and only root could replace /dev/null."""
    device = tmp_path / "null"
    try:
        os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        write_whole(device, b"data")
    except PermissionError:
        pytest.skip("devices may not be made, or not be opened, here")
    assert stat.S_ISCHR(device.stat().st_mode) and os.listdir(tmp_path) == ["null"]


def test_a_pipe_gets_the_data(tmp_path):
    pipe, got = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()))
    reader.start()
    write_whole(pipe, b"data")
    reader.join(30)
    assert got == [b"data"] and stat.S_ISFIFO(pipe.stat().st_mode)


def test_standard_output_in_a_file_is_written_to(tmp_path):
    """A file put in its place would leave the shell with one that has no name."""
    code = (
        f"import sys; sys.argv = ['-', {str(writing.__file__)!r}]\n"
        + LOAD
        + "writing.write_whole(Path('/dev/stdout'), b'data')"
    )
    with (tmp_path / "out").open("wb") as file:
        subprocess.run([sys.executable, "-c", code], stdout=file, check=True)
    assert (tmp_path / "out").read_bytes() == b"data" and os.listdir(tmp_path) == ["out"]


def test_a_link_stays_and_its_target_is_written(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    target, link, dangling = tmp_path / "elsewhere" / "target", tmp_path / "link", tmp_path / "dangling"
    target.write_bytes(b"old")
    link.symlink_to(target)
    dangling.symlink_to(tmp_path / "elsewhere" / "new")
    for name in (link, dangling):
        write_whole(name, b"data")
        assert name.is_symlink() and name.read_bytes() == b"data"
    assert sorted(os.listdir(tmp_path / "elsewhere")) == ["new", "target"]
    round_and_round = tmp_path / "round"
    round_and_round.symlink_to(round_and_round)
    with pytest.raises(CalgpError, match="symbolic links"), wrap_os_errors(tmp_path):
        write_whole(round_and_round, b"data")


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_a_new_file_has_the_permissions_that_the_umask_leaves_and_an_old_one_its_own(tmp_path, umask):
    new, old = tmp_path / "new", tmp_path / "old"
    old.write_bytes(b"")
    old.chmod(0o640)
    before = os.umask(umask)
    try:
        for path in (new, old):
            write_whole(path, b"data")
    finally:
        os.umask(before)
    assert stat.S_IMODE(new.stat().st_mode) == 0o666 & ~umask
    assert stat.S_IMODE(old.stat().st_mode) == 0o640


def test_a_directory_in_the_way_is_refused_in_one_sentence(tmp_path):
    (tmp_path / "taken").mkdir()
    with pytest.raises(CalgpError, match="Is a directory"), wrap_os_errors(tmp_path):
        write_whole(tmp_path / "taken", b"data")
    assert os.listdir(tmp_path) == ["taken"]


def test_writing_again_removes_what_a_dead_writer_of_the_same_file_left(tmp_path):
    """Also outside of run folders, which nobody owns: a table, a report, an exported model."""
    for name in ("table.csv", "other.csv"):
        handle, _ = writing._aside(tmp_path / name)
        os.close(handle)
    write_whole(tmp_path / "table.csv", b"data")
    left = sorted(os.listdir(tmp_path))
    assert len(left) == 2 and left[0].startswith(".other.csv.") and left[1] == "table.csv"


def test_a_name_may_be_as_long_as_the_file_system_lets_it(tmp_path):
    write_whole(tmp_path / ("n" * 255), b"data")
    assert os.listdir(tmp_path) == ["n" * 255]


# a full disk ---------------------------------------------------------------------------------------------------------


@contextmanager
def small_disk(path, size: int, *, options=""):
    """A file system of so many bytes."""
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}{options}", "none", str(path)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"mounting is not allowed here ({mounted.stderr.strip()}): the file-size limit is tested instead")
    try:
        yield
    finally:
        subprocess.run(["umount", str(path)], check=True)


def checkpointed(run, folder, fabric):
    """The checkpoint of a training that was stopped after two steps."""

    def interrupt(step):
        if step.step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(CalgpError, match="Stopped after step 2"):
        train_run(run, folder, fabric, watch=interrupt)
    return (folder.path / "checkpoint.safetensors").read_bytes()


def test_a_full_disk_stops_a_training_and_leaves_its_checkpoint(tmp_path, fabric):
    """A real one: a tmpfs, filled but for a few kilobytes. With room again the training ends as if nothing had been."""
    run = small(steps=6)
    whole = train_run(run, RunFolder(tmp_path / "whole"), fabric).model
    disk, folder = tmp_path / "disk", RunFolder(tmp_path / "disk" / "run")
    with small_disk(disk, 4 * 2**20):
        before = checkpointed(run, folder, fabric)
        filling = disk / "filling"
        with suppress_full(), filling.open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        with pytest.raises(CalgpError, match=r"Cannot write in .*: No space left on device"):
            train_run(run, folder, fabric, resume=True, checkpoint_seconds=0.0)
        assert (folder.path / "checkpoint.safetensors").read_bytes() == before
        assert not list(folder.path.glob(f".*{PART}"))
        filling.unlink()
        resumed = train_run(run, folder, fabric, resume=True).model
    assert all(value.equal(resumed.state_dict()[key]) for key, value in whole.state_dict().items())


@contextmanager
def suppress_full():
    try:
        yield
    except OSError as error:
        assert error.errno == errno.ENOSPC


def test_a_file_size_limit_stops_a_training_and_leaves_its_checkpoint(tmp_path, fabric):
    """RLIMIT_FSIZE, where nobody may mount: writing fails half way through the file, as on a full disk."""
    run, folder = small(steps=6), RunFolder(tmp_path / "run")
    before = checkpointed(run, folder, fabric)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # then the write fails, with EFBIG
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limits[1]))
    try:
        with pytest.raises(CalgpError, match=r"Cannot write in .*: File too large"):
            train_run(run, folder, fabric, resume=True, checkpoint_seconds=0.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert (folder.path / "checkpoint.safetensors").read_bytes() == before
    assert not list(folder.path.glob(f".*{PART}"))


def test_a_full_device_is_reported_in_one_sentence(tmp_path):
    with (
        pytest.raises(CalgpError, match=r"No space left on device\. Make room there"),
        wrap_os_errors(tmp_path),
        open("/dev/full", "wb") as file,
    ):
        file.write(bytes(10**6))


def test_a_read_only_file_system_is_refused(trained, tmp_path, fabric):
    """A tmpfs, remounted read-only: root, whom no permission stops, is stopped too."""
    with small_disk(tmp_path / "disk", 4 * 2**20):
        copy = RunFolder(tmp_path / "disk" / "run")
        copy.create(trained.card())
        copy.write_tensors("model.safetensors", tensors(trained, "model.safetensors"))
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path / "disk")], check=True)
        for write in (lambda: evaluate(copy, fabric, passes=1), lambda: train_run(small(), copy, fabric)):
            with pytest.raises(CalgpError, match=r"Cannot write in .*: Read-only file system"):
                write()
        with pytest.raises(CalgpError, match=r"Read-only file system\. Choose another place"):
            train_run(small(), RunFolder(tmp_path / "disk" / "new"), fabric)
    with pytest.raises(CalgpError, match=r"Permission denied\. Allow it there"), wrap_os_errors(tmp_path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        assert sorted(os.listdir(copy.path)) == ["model.safetensors", "run.json"]


def test_a_directory_where_nothing_can_be_made_is_refused(fabric):
    """/proc takes no new files, of anybody."""
    with pytest.raises(CalgpError, match=r"Cannot write in /proc.*\. Choose another place"):
        train_run(small(), RunFolder("/proc/run"), fabric)


# the log -------------------------------------------------------------------------------------------------------------


def test_resuming_cuts_the_log_to_the_checkpoint_and_ends_with_the_same(tmp_path, fabric):
    """Lines after the checkpoint, and one that was cut off by a kill, do not stay; sums between two lines go on."""
    run = small(steps=44, holdout=0.2)
    whole, folder = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "parts")
    train_run(run, whole, fabric)

    def interrupt(step):
        if step.step == 25:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(CalgpError, match="step 25"):
        train_run(run, folder, fabric, watch=interrupt)
    folder.append_log(TrainRecord("train", 40, nll=7.0, kl=0.0, rate=0.1))
    folder.append_log(NoteRecord("skipped", 33, "a step that was then not saved"))
    with (folder.path / "log.jsonl").open("a") as file:
        file.write('{"kind": "tra')
    train_run(run, folder, fabric, resume=True)
    assert [timeless(line) for line in lines(folder)] == [timeless(line) for line in lines(whole)]


def lines(folder):
    return (folder.path / "log.jsonl").read_text().splitlines()


def timeless(line):
    return {key: value for key, value in json.loads(line).items() if key != "seconds"}


# killed before the first checkpoint, and between the model and the end ------------------------------------------------


@pytest.mark.parametrize("resume", [True, False])
def test_a_training_killed_before_its_first_checkpoint_starts_again(tmp_path, fabric, resume):
    run, folder = small(steps=4), RunFolder(tmp_path / "run")
    whole = train_run(run, folder, fabric).model
    folder.remove("model.safetensors")
    again = train_run(run, folder, fabric, resume=resume).model
    assert all(value.equal(again.state_dict()[key]) for key, value in whole.state_dict().items())


def test_a_folder_begun_by_another_run_is_not_taken(tmp_path, fabric):
    folder = RunFolder(tmp_path / "run")
    train_run(small(steps=1), folder, fabric)
    folder.remove("model.safetensors")
    with pytest.raises(CalgpError, match="already holds a run"):
        train_run(small(steps=1, seed=7), folder, fabric)


def test_a_training_killed_between_the_model_and_the_end_is_ended(trained, tmp_path, fabric):
    run, folder = small(steps=4), RunFolder(tmp_path / "run")
    checkpointed(run, folder, fabric)
    checkpoint = (folder.path / "checkpoint.safetensors").read_bytes()
    whole = train_run(run, folder, fabric, resume=True).model
    write_whole(folder.path / "checkpoint.safetensors", checkpoint)
    again = train_run(run, folder, fabric, resume=True).model
    assert all(value.equal(again.state_dict()[key]) for key, value in whole.state_dict().items())
    assert not folder.interrupted


def test_resuming_elsewhere_is_written_down(tmp_path, fabric):
    run, folder = small(steps=4), RunFolder(tmp_path / "run")
    checkpointed(run, folder, fabric)
    assert folder.card().environment.resumed == ()
    card = json.loads((folder.path / "run.json").read_text())
    card["environment"]["threads"] = 64
    write_whole(folder.path / "run.json", json.dumps(card).encode())
    train_run(run, folder, fabric, resume=True)
    environment = folder.card().environment
    assert environment.threads == 64
    (place,) = environment.resumed
    assert place.threads != 64 and place == replace(environment, threads=place.threads).arithmetic()
    assert environment.precision == "32-true" and environment.device == "cpu"
