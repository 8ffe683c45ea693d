"""A limit on the address space, so that memory ends at some moment of a real command: a sentence, and no torn file.

The limit is set when torch has been imported: without memory for that, libraries end the process in words of their own.
"""

import shutil
import sys

import pytest
from typer.testing import CliRunner

from calgp import cli
from calgp.runs import RunFolder, shipped_run
from calgp.runs.writing import LOCK
from forked import python

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS is Linux's")]
TRAIN = ["train", "--source=digits", "--train-size=600", "--steps=6", "--batch-size=100", "--threads=1"]
EVALUATE = ["--source=letters", "--threads=1"]
PROGRAM = """
import atexit, resource, sys
import calgp.cli, calgp.runs, torch._dynamo

def address_space(name):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(name))

before, more = address_space("VmSize"), int(sys.argv[1])
if more:
    resource.setrlimit(resource.RLIMIT_AS, (before + more,) * 2)
else:
    atexit.register(lambda: print(address_space("VmPeak") - before, file=sys.stderr))
sys.argv[:2] = ["calgp"]
calgp.cli.main()
"""


def call(command, more, cwd):
    """The command with so many bytes more than it has after its imports; 0: as many as it takes, told at the end."""
    return python("-c", PROGRAM, more, *command, cwd=cwd)


def needed(command, cwd):
    done = call(command, 0, cwd)
    assert done.returncode == 0, done.stderr[-2000:]
    return int(done.stderr.split()[-1])


def check_end(done):
    assert "Traceback" not in done.stderr and done.returncode in (0, 1), done.stderr[-2000:]
    assert done.returncode == 0 or "not enough memory" in done.stderr, done.stderr[-2000:]


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != LOCK}


def test_training_without_memory_ends_with_a_sentence_and_can_go_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    most = needed([*TRAIN, "--out=whole"], tmp_path)
    ends = []
    for share in (0.1, 0.4, 0.7, 0.9):
        name = f"run-{share}"
        done = call([*TRAIN, f"--out={name}"], int(share * most), tmp_path)
        check_end(done)
        ends.append(done.returncode)
        begun = (tmp_path / name / "run.json").exists()
        if done.returncode and not RunFolder(tmp_path / name).finished:  # else memory ended behind the last file
            again = ["train", "--resume", name, "--threads=1"] if begun else [*TRAIN, f"--out={name}"]
            gone_on = CliRunner().invoke(cli.app, again)
            assert gone_on.exit_code == 0, gone_on.output
        assert RunFolder(tmp_path / name).finished
        first, second = ((tmp_path / each / "model.safetensors").read_bytes() for each in (name, "whole"))
        assert first == second
    assert ends[0] == 1  # the limit is real


def test_evaluating_without_memory_leaves_the_run_as_it_was(tmp_path):
    most = needed(["evaluate", "shipped", *EVALUATE], tmp_path)
    for name, share in (("little", 0.1), ("more", 0.6)):
        shutil.copytree(shipped_run().path, tmp_path / name)
        before = content(tmp_path / name)
        done = call(["evaluate", name, *EVALUATE], int(share * most), tmp_path)
        check_end(done)
        assert done.returncode == 0 or content(tmp_path / name) == before
