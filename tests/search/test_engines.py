"""Many tasks, in processes and on Ray: each done once, also where processes die."""

import pytest

from calgp.errors import CalgpError
from calgp.search import engines
from calgp.search.engines import Processes, Ray, SerialEngine, find_engine
from search.engine_work import Errand, work


def done_by(engine, tasks):
    """What the engine said of each task, by name."""
    said: dict[str, str | None] = {}

    def ended(task, failure):
        assert task.name not in said, "reported twice"
        said[task.name] = failure

    engine.run(work, tasks, ended=ended, watch=lambda under: None)
    return said


def test_one_after_the_other_here(tmp_path):
    tasks = [Errand(tmp_path, name) for name in ("a", "bad", "c")]
    seen = []
    SerialEngine().run(
        work, tasks, ended=lambda task, failure: seen.append((task.name, failure)), watch=lambda under: None
    )
    assert seen == [("a", None), ("bad", "it cannot be"), ("c", None)]


@pytest.mark.slow
def test_processes_that_die_are_replaced_and_only_their_task_is_done_again(tmp_path, monkeypatch):
    """One dies once, one always; a task that fails by itself is not tried again."""
    monkeypatch.setattr(engines, "RETRIES", 1)
    tasks = [Errand(tmp_path, "once", kills=1), Errand(tmp_path, "always", kills=99), Errand(tmp_path, "bad")]
    tasks += [Errand(tmp_path, f"good-{index}") for index in range(4)]
    said = done_by(Processes(2), tasks)
    assert said.pop("bad") == "it cannot be"
    assert "died 2 times" in (said.pop("always") or "")
    assert set(said.values()) == {None} and len(said) == 5
    assert [task.count("done") for task in tasks] == [1, 0, 0, 1, 1, 1, 1]
    assert [task.count("begun") for task in tasks] == [2, 2, 1, 1, 1, 1, 1]


def test_engines_by_name():
    assert find_engine() == find_engine("local", jobs=1) == SerialEngine()
    assert find_engine(jobs=3) == Processes(3)
    pytest.importorskip("ray", reason="Ray is an extra: pip install calgp[ray]")
    assert find_engine("ray", jobs=3, address="auto", gpus=0.5) == Ray(3, "auto", 0.5)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"name": "spark"}, "no engine 'spark'; known: local, ray"),
        ({"jobs": 0}, "jobs=0"),
        ({"name": "local", "address": "auto"}, "for --engine ray"),
        ({"name": "local", "gpus": 1.0}, "for --engine ray"),
        ({"name": "ray", "gpus": -1.0}, "gpus=-1"),
    ],
)
def test_mistakes_are_reported(options, says):
    with pytest.raises(CalgpError, match=says):
        find_engine(**options)
