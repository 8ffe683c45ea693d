"""SIGKILL at random moments, really; tests/kills.py says how. `make kill` is the longer version."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from calgp.runs import RunFolder, shipped_run
from folders import tensors
from forked import python

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it forks, and counts threads in /proc")


@pytest.mark.slow
def test_twenty_kills_lose_nothing():
    """Every work killed and resumed ends in the files that it ends in when it is left in peace: weights to the bit."""
    script = Path(__file__).parent / "kills.py"
    done = python(script, "--kills", "20")
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads(done.stdout)
    kinds = ("training", "evaluation", "reproduction")
    kills = {kind: sum(n for name, n in summary["kills"].items() if name.startswith(kind)) for kind in kinds}
    assert summary["all kills"] >= 20
    assert min(kills.values()) >= 2
    assert sum(n for name, n in summary["left behind"].items() if "checkpoint" in name) > 0


def test_the_comparison_sees_a_single_bit(tmp_path):
    """What the kill test compares is more than that files are there."""
    from kills import content

    shutil.copytree(shipped_run().path, tmp_path / "copy")
    reference, folder = content(shipped_run().path), RunFolder(tmp_path / "copy")
    assert content(folder.path) == reference
    changed = tensors(folder, "model.safetensors")
    name = next(name for name, value in changed.items() if value.is_floating_point())
    first = changed[name].view(-1)
    first[0] = first[0].nextafter(first[0] + 1)
    folder.write_tensors("model.safetensors", changed)
    assert [name for name, value in content(folder.path).items() if value != reference[name]] == ["model.safetensors"]
