"""A few seconds of tests/attacks.py; `make attack` is the longer version."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it reads memory from /proc")


@pytest.mark.slow
def test_the_server_survives_its_clients():
    """Memory within 1.5 × of its start, every answer right or a 503, no traceback, an end in time."""
    script = Path(__file__).parent / "attacks.py"
    path = os.pathsep.join([str(script.parents[1]), str(script.parent), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, str(script), "--seconds", "8"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["attacks"] > 20 and found["honest"]["200"] > 0
