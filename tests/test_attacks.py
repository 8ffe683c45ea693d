"""A few seconds of tests/attacks.py; `make attack` is the longer version."""

import json
import sys
from pathlib import Path

import pytest

from forked import python

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it reads memory from /proc")

HERE = Path(__file__).parent
PROGRAM = f"import sys; sys.path[:0] = {[str(HERE), str(HERE.parent)]}; import attacks; attacks.main()"


@pytest.mark.slow
def test_the_server_survives_its_clients():
    """Memory within 1.5 × of its start, every answer right or a 503, no traceback, an end in time."""
    limits = "--limit", "seconds=10", "--limit", "client=3"  # with the defaults it ends later, and no otherwise
    done = python("-c", PROGRAM, "--seconds", "6", *limits)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["attacks"] > 20 and found["honest"]["200"] > 0
