"""How much faster do two ranks train than one? `python -m bench.ranks`, some minutes; both cores should be idle.

The same run by one process and by two, in turns, each of one thread, gloo on loopback; seconds of 20 steps by the logs.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from bench.measure import describe
from calgp.runs import RunFolder

RUN = "--source digits --method cnn-gp-sorf --backbone lenet --steps 80 --threads 1 --device cpu"
BATCHES = (100, 200, 400)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.ranks", description=__doc__)
    parser.add_argument("--rounds", type=int, default=4, help="turns that one and two ranks have")
    parser.add_argument("--out", type=Path, default=Path("results/bench/ranks.json"))
    options = parser.parse_args()
    rows = [measured(batch, options.rounds) for batch in BATCHES]
    record = {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "command": f"python -m bench.ranks --rounds {options.rounds}",
        "run": f"calgp train {RUN} --batch-size B --devices R",
        "machine": describe(),
        "rows": rows,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))


def measured(batch: int, rounds: int) -> dict[str, Any]:
    seconds: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(rounds):
        for ranks, found in seconds.items():
            found.append(seconds_of_20_steps(batch, ranks))
    ratios = [one / two for one, two in zip(seconds[1], seconds[2], strict=True)]
    return {
        "batch": batch,
        "one rank, s": [round(each, 3) for each in seconds[1]],
        "two ranks, s": [round(each, 3) for each in seconds[2]],
        "speed-up": [round(each, 2) for each in (statistics.median(ratios), min(ratios), max(ratios))],
    }


def seconds_of_20_steps(batch: int, ranks: int) -> float:
    """The median of the last three of four."""
    with tempfile.TemporaryDirectory() as place:
        folder = RunFolder(Path(place) / "run")
        given = [*RUN.split(), "--batch-size", str(batch), "--devices", str(ranks), "--out", str(folder.path)]
        subprocess.run([sys.executable, "-m", "calgp", "train", *given], check=True, capture_output=True)  # noqa: S603
        return statistics.median([line["seconds"] for line in folder.log() if line["kind"] == "train"][1:])


if __name__ == "__main__":
    main()
