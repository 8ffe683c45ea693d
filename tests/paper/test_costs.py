"""What a prediction costs: measured together or not at all, once, and taken from what is kept."""

import dataclasses
import json
import math

import pytest

from calgp.methods import METHODS
from calgp.nets import LeNet, Task
from calgp.paper import Cell, known_costs, measured_costs, priced, rows_of, run_missing
from calgp.paper.costs import Prediction, side_by_side
from calgp.paper.scales import CIFAR10, CIFAR10_DEEP, SCALES
from calgp.runs import Run
from calgp.search.jobs import Paths

TASK = Task(1, 28, 28, 10)
RUN = Run(
    METHODS["cnn-gp-sorf"], LeNet(channels=(2, 4), hidden=(8,)), train_size=100, steps=2, batch_size=20, holdout=0.0,
    augment=(), crop=4, calibration=False,
)  # fmt: skip
OTHER = dataclasses.replace(RUN, method=METHODS["cnn-mcd"])


@pytest.fixture(scope="module")
def where(tmp_path_factory):
    made = tmp_path_factory.mktemp("made")
    return Paths(made / "runs", keep=made / "kept")


@pytest.fixture(scope="module")
def rows(where):
    cells = [Cell(run.label, "p", None, (run,), samples=2) for run in (RUN, OTHER)]
    assert run_missing(cells, where) == {}
    return rows_of([*cells, Cell("not run", "p", None)], where)


def test_a_cost_is_of_the_model_and_the_samples_not_of_seed_or_data():
    same = dataclasses.replace(RUN, seed=5, train_size=200, steps=9, learning_rate=0.1)
    assert Prediction(RUN, TASK, 20).key == Prediction(same, TASK, 20).key
    others = [Prediction(RUN, TASK, 50), Prediction(RUN, Task(1, 28, 28, 100), 20), Prediction(OTHER, TASK, 20)]
    assert len({each.key for each in (Prediction(RUN, TASK, 20), *others)}) == 4


@pytest.mark.parametrize("panel", [CIFAR10, CIFAR10_DEEP])
@pytest.mark.parametrize("method", SCALES["smoke"].methods)
def test_every_method_predicts_without_training(method, panel):
    """So that no weights need be kept for it; and nothing that cannot be trusted to be a time."""
    found = side_by_side([each := Prediction(SCALES["smoke"].run(method, panel, 100, 0), Task(3, 32, 32, 10), 2)])
    assert math.isfinite(found[each.key]) and found[each.key] > 0


def test_costs_are_measured_once_and_kept(rows, where, tmp_path):
    mine = dataclasses.replace(where, keep=tmp_path / "kept")
    assert known_costs(rows, mine) is None
    counted: list[int] = []
    found = measured_costs(rows, mine, lambda more, total: counted.append(total))
    assert (len(found), counted) == (2, [6] * 6)  # two methods, three turns
    assert known_costs(rows, mine) == found
    elsewhere = Paths(tmp_path / "none", results=(tmp_path / "kept",))
    assert known_costs(rows, elsewhere) == found
    assert known_costs(rows[:1], elsewhere) == found  # a race of more than these
    (file,) = (tmp_path / "kept").glob("costs-*.json")
    assert "command" not in json.loads(file.read_text())["environment"]


def test_where_nothing_was_run_there_is_nothing_to_measure(rows, tmp_path):
    assert known_costs(rows[2:], Paths(tmp_path)) == {}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"milliseconds": [1]}', '{"milliseconds": {"a": "fast"}}'])
def test_damaged_costs_are_not_known(rows, where, tmp_path, text):
    (tmp_path / "costs-1234.json").write_text(text)
    assert known_costs(rows, dataclasses.replace(where, keep=tmp_path)) is None


def test_methods_of_different_races_are_not_mixed(rows, where, tmp_path):
    mine = dataclasses.replace(where, keep=tmp_path)
    measured_costs(rows[:1], mine)
    measured_costs(rows[1:2], mine)
    assert known_costs(rows, mine) is None


def test_rows_that_were_run_get_their_price(rows, where, tmp_path):
    costs = measured_costs(rows, dataclasses.replace(where, keep=tmp_path))
    first, second, nothing = priced(rows, costs)
    assert {first.mean("prediction_ms"), second.mean("prediction_ms")} == set(costs.values())
    assert nothing.values == {}
    assert priced(rows, {}) == rows
