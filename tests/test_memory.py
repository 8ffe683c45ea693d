"""A limit on the address space, so that memory ends at some moment of a real command: a sentence, and no torn file."""

import resource
import shutil
import subprocess
import sys

import pytest

from calgp.runs import RunFolder, shipped_run
from calgp.runs.writing import LOCK

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS is Linux's")]
TRAIN = ["train", "--source=digits", "--train-size=600", "--steps=6", "--batch-size=100", "--threads=1"]


def limited(command, megabytes, cwd):
    def limit():
        resource.setrlimit(resource.RLIMIT_AS, (megabytes * 2**20,) * 2)

    return subprocess.run(
        [sys.executable, "-m", "calgp", *command],
        cwd=cwd,
        preexec_fn=limit,
        capture_output=True,
        text=True,
        timeout=120,
    )


def needed(command, cwd):
    """The address space that the command takes when nothing limits it, in megabytes."""
    program = (
        "import sys, atexit, calgp.cli\n"
        "peak = lambda: next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmPeak'))\n"
        "atexit.register(lambda: print(peak(), file=sys.stderr))\n"
        f"sys.argv = ['calgp', *{command!r}]\n"
        "calgp.cli.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return int(done.stderr.split()[-1]) // 1024


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != LOCK}


@pytest.mark.parametrize("share", [0.8, 0.9, 0.95])
def test_training_without_memory_ends_with_a_sentence_and_can_go_on(tmp_path, share):
    """With less, libraries end the process while they are imported, before anything of ours could say a word."""
    most = needed([*TRAIN, "--out=whole"], tmp_path)
    done = limited([*TRAIN, "--out=run"], int(share * most), tmp_path)
    assert "Traceback" not in done.stderr, done.stderr[-2000:]
    assert done.returncode in (0, 1), done.stderr[-2000:]
    if done.returncode:
        assert "not enough memory" in done.stderr, done.stderr[-2000:]
    again = (
        ["train", "--resume", "run", "--threads=1"]
        if (tmp_path / "run" / "run.json").exists()
        else [*TRAIN, "--out=run"]
    )
    whole = subprocess.run([sys.executable, "-m", "calgp", *again], cwd=tmp_path, capture_output=True, text=True)
    assert whole.returncode == 0 or RunFolder(tmp_path / "run").finished, whole.stderr[-2000:]
    for name in ("run", "whole"):
        assert RunFolder(tmp_path / name).finished
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("run", "whole"))
    assert first == second


@pytest.mark.parametrize("share", [0.6, 0.9])
def test_evaluating_without_memory_leaves_the_run_as_it_was(tmp_path, share):
    shutil.copytree(shipped_run().path, tmp_path / "run")
    before = content(tmp_path / "run")
    command = ["evaluate", "run", "--source=letters", "--threads=1"]
    most = needed(["evaluate", "shipped", "--source=letters", "--threads=1"], tmp_path)
    done = limited(command, int(share * most), tmp_path)
    assert "Traceback" not in done.stderr, done.stderr[-2000:]
    if done.returncode:
        assert "not enough memory" in done.stderr, done.stderr[-2000:]
        assert content(tmp_path / "run") == before
