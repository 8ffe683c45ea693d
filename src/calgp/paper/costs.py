"""What a prediction costs: methods of an experiment are timed in turns, since times of other days do not compare."""

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property

import torch

from calgp.errors import CalgpError
from calgp.gp import predict
from calgp.nets import Task
from calgp.runs import Run, identity
from calgp.runs.build import build
from calgp.runs.environment import environment
from calgp.runs.reading import read_json
from calgp.runs.writing import write_files
from calgp.search.jobs import Paths

from .rows import Row

IMAGES, TURNS = 100, 3


@dataclass(frozen=True)
class Prediction:
    """All that decides what a prediction costs; weights and pixels do not."""

    run: Run
    task: Task
    samples: int

    @cached_property
    def key(self) -> str:
        described = identity(self.run)
        case = {"task": asdict(self.task), "samples": self.samples}
        text = json.dumps(case | {name: described[name] for name in ("method", "backbone")}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def milliseconds(self) -> float:
        """Of one core, for one image: processor time, which other work on the machine does not lengthen by waiting."""
        model = build(self.run, self.task)
        generator = torch.Generator().manual_seed(0)
        x = torch.rand(IMAGES, self.task.channels, self.task.height, self.task.width, generator=generator)
        start = time.process_time()
        predict(model, x, passes=self.samples, seed=0)
        return 1000 * (time.process_time() - start) / IMAGES


def side_by_side(
    predictions: Iterable[Prediction], watch: Callable[[int, int], None] = lambda more, total: None
) -> dict[str, float]:
    """Milliseconds of one core by key: all take turns, and the least of each one's times counts."""
    contenders, threads = list(predictions), torch.get_num_threads()
    least: dict[str, float] = {}
    torch.set_num_threads(1)
    try:
        for each in TURNS * contenders:
            least[each.key] = min(least.get(each.key, math.inf), each.milliseconds())
            watch(1, TURNS * len(contenders))
    finally:
        torch.set_num_threads(threads)
    return least


def known_costs(rows: Iterable[Row], where: Paths) -> dict[str, float] | None:
    """What predictions of these rows cost, by key, from one race that had them all; None if there was none."""
    wanted = _wanted(rows).keys()
    return next((race for race in _races(where) if wanted <= race.keys()), None if wanted else {})


def measured_costs(
    rows: Iterable[Row], where: Paths, watch: Callable[[int, int], None] = lambda more, total: None
) -> dict[str, float]:
    """The same from a new race, which is kept."""
    found = side_by_side(_wanted(rows).values(), watch)
    _keep(found, where)
    return found


def priced(rows: Sequence[Row], costs: Mapping[str, float]) -> list[Row]:
    """The rows with what a prediction costs, where that is known."""
    found = [costs.get(_prediction(row).key) if row.details else None for row in rows]
    return [
        row if cost is None else replace(row, values={**row.values, "prediction_ms": (cost,)})
        for row, cost in zip(rows, found, strict=True)
    ]


def _races(where: Paths) -> Iterator[dict[str, float]]:
    """What races found that can be read; others are run again."""
    for place in where.small:
        for file in sorted(place.rglob("costs-*.json")) if place.is_dir() else []:
            with suppress(CalgpError, AttributeError, KeyError, TypeError, ValueError):
                yield {key: float(value) for key, value in read_json(file)["milliseconds"].items()}


def _keep(race: Mapping[str, float], where: Paths) -> None:
    """Write what a race found, named by who took part, with the machine that it was run on."""
    name = f"costs-{hashlib.sha256(''.join(sorted(race)).encode()).hexdigest()[:8]}.json"
    made_by = {key: value for key, value in environment().items() if key != "command"}  # which names places
    record = {"milliseconds": dict(race), "images": IMAGES, "turns": TURNS, "environment": made_by}
    if where.keep is not None:
        write_files(where.keep, {name: json.dumps(record, indent=1) + "\n"})


def _wanted(rows: Iterable[Row]) -> dict[str, Prediction]:
    return {each.key: each for each in (_prediction(row) for row in rows if row.details)}


def _prediction(row: Row) -> Prediction:
    detail = row.details[0]
    return Prediction(detail.card.run, detail.card.task, detail.own.samples)
