"""The fuzzer of `make fuzz`, with fewer files."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

from calgp.errors import CalgpError
from fuzz import MEMORY, Reader, dump, fuzz, mutate_bytes, mutate_value

HERE = Path(__file__).parent


@pytest.mark.slow
def test_a_thousand_mutated_files_give_clear_errors_or_values(tmp_path):
    command = [sys.executable, "-m", "fuzz", "--files", "1000", "--seed", "1", "--keep", str(tmp_path / "kept")]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    total = next(line for line in done.stdout.splitlines() if line.startswith("| all |"))
    files, _, _, _, _, peak = (cell.strip() for cell in total.strip("|").split("|")[1:])
    assert int(files.replace(",", "")) >= 990 and float(peak) * 2**20 < MEMORY


@pytest.mark.parametrize(
    "error", [KeyError("x"), RecursionError(), MemoryError(), CalgpError("x" * 5000), CalgpError("")]
)
def test_the_fuzzer_sees_what_must_not_come(error, tmp_path):
    def read(data: bytes) -> None:
        if data != b"good":
            raise error

    tally = fuzz(Reader("it", (b"good",), read, lambda data, chance: b"bad"), 3, 0, tmp_path / "kept")
    assert len(tally.failures) == 3 and (tmp_path / "kept" / "it-0").read_bytes() == b"bad"


def test_mutations_are_decided_by_the_seed_and_change_things():
    data, value = bytes(range(200)), {"a": [1, 2, {"b": None}], "c": "text", "d": 0.5}
    files = [mutate_bytes(data, random.Random(seed)) for seed in range(200)]  # noqa: S311
    assert files == [mutate_bytes(data, random.Random(seed)) for seed in range(200)]  # noqa: S311
    assert len(set(files)) > 150 and files.count(data) < 20
    values = {dump(mutate_value(value, random.Random(seed))) for seed in range(200)}  # noqa: S311
    assert len(values) > 80 and value == {"a": [1, 2, {"b": None}], "c": "text", "d": 0.5}
