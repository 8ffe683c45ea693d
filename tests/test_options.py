"""An option is one field: whoever needs it finds it there, and nothing else has to change."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calgp import options as options_module
from calgp.errors import CalgpError
from calgp.methods import METHODS
from calgp.nets import BACKBONES, Wrapped
from calgp.options import COUNT, POSITIVE, Interval, Option, Text, find_option, options_of, validate
from calgp.run import Run
from calgp.runs import from_json
from calgp.search.jobs import key
from calgp.sklearn import OWN, ConvGPClassifier

SOURCE = Path(options_module.__file__).parent
KINDS = [Run, *dict.fromkeys(map(type, METHODS.values())), *dict.fromkeys(map(type, BACKBONES.values())), Wrapped]
TYPED = [each for kind in KINDS for each in options_of(kind).values() if each.name not in ("method", "backbone")]
LINE = '    warmth: int = option(3, "Of the oven.", within=Interval(1, 9), flags=("--heat",), since_version="9.9")\n\n'

# What a process with the longer Run does, in one go, since torch takes seconds to import.
SCRIPT = """
import json, pathlib, sys
from typer.testing import CliRunner
from calgp import cli

def run(*words):
    result = CliRunner().invoke(cli.app, list(words), env={"COLUMNS": "200"})
    return result.output + str(result.exception or "")

tiny = "--train-size 50 --steps 1 --backbone lenet --set backbone.channels=1,1 --set backbone.hidden=4".split()
found = {command: run(command, "--help") for command in ("train", "sweep", "tune")}
found["refused"] = [run("train", *words) for words in (["--heat", "10"], ["--set", "heat=x"], ["--set", "warmt=1"])]
found["torch"] = "torch" in sys.modules
pathlib.Path("run.toml").write_text("warmth = 6")
for name, words in {"flag": ["--heat", "4"], "set": ["--set", "warmth=5"], "config": ["--config", "run.toml"]}.items():
    run("train", *tiny, *words, "--out", name)
    found[name] = json.loads(pathlib.Path(name, "run.json").read_text())["run"]["warmth"]
found["grid"] = run("sweep", "--dry", "--grid", "heat=7,8", *tiny)
from calgp import ConvGPClassifier
from calgp.data import load
from calgp.search.jobs import key
from calgp.run import train_command
from calgp.runs import from_json
images = load("digits", "test").balanced(20, 0)
small = ConvGPClassifier(backbone="lenet", backbone_options={"channels": (1, 1)}, epochs=1, warmth=2)
found["estimator"] = small.fit(images.x.numpy(), images.y.numpy()).run_.warmth
found["parameters"] = ConvGPClassifier().get_params()["warmth"]
found["command"] = train_command(from_json({"warmth": 2}))
found["keys"] = [key(from_json(options)) for options in ({}, {"warmth": 2})]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def everywhere(tmp_path_factory):
    """What is found of an option that a copy of calgp has more: one line in its run.py."""
    root = tmp_path_factory.mktemp("longer")
    (root / "calgp").mkdir()
    for each in SOURCE.iterdir():
        if each.name not in ("run.py", "__pycache__"):
            (root / "calgp" / each.name).symlink_to(each)
    before, marker, after = (SOURCE / "run.py").read_text().partition("    def __post_init__")
    (root / "calgp" / "run.py").write_text(before.rstrip() + "\n" + LINE + marker + after)
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=root, capture_output=True, text=True, timeout=300,
        env=os.environ | {"PYTHONPATH": str(root), "PYTHONWARNINGS": "ignore"},
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train", "sweep", "tune"])
def test_one_line_makes_a_flag_with_help_and_default(everywhere, command):
    line = next(line for line in everywhere[command].splitlines() if "--warmth" in line)
    assert "--warmth,--heat" in line.replace(" ", "") and "<int>" in line and "Of the oven. [default: 3]" in line


@pytest.mark.slow
def test_one_line_makes_an_option_of_set_of_a_file_of_a_grid_and_of_the_estimator(everywhere):
    assert {name: everywhere[name] for name in ("flag", "set", "config", "estimator", "parameters")} == {
        "flag": 4, "set": 5, "config": 6, "estimator": 2, "parameters": 3,
    }  # fmt: skip
    assert "warmth=7" in everywhere["grid"] and "warmth=8" in everywhere["grid"]
    assert everywhere["command"].endswith("--warmth 2")


@pytest.mark.slow
def test_its_mistakes_are_refused_in_one_form_before_torch_is_imported(everywhere):
    limits, kind, name = everywhere["refused"]
    assert limits == "Invalid warmth=10: must be a whole number from 1 to 9, such as 3."
    assert kind == "Invalid warmth='x': must be a whole number from 1 to 9, such as 3."
    assert name.startswith("run has no option 'warmt'; did you mean 'warmth'? Known: method, ")
    assert not everywhere["torch"]


@pytest.mark.slow
def test_a_younger_option_at_its_default_leaves_the_keys_of_runs_as_they_were(everywhere):
    same, other = everywhere["keys"]
    assert same == key(from_json({})) != other


@pytest.mark.parametrize("option", TYPED, ids=lambda option: option.name)
def test_every_option_says_what_it_is_and_what_its_default_means(option):
    assert option.about.help.endswith("."), "one sentence"
    assert option.default_text not in ("", "[]") and (option.default is not None or option.about.default_text)
    assert option.default in (None, ...) or option.allows(option.default)


def values(type_, within):
    """Values of a type, its numbers within an interval."""
    kind, parts, low, high = get_origin(type_), get_args(type_), within.low, min(within.high, 2**53)
    if type_ is int:
        return st.integers(int(low), int(high)).filter(within.__contains__)
    if type_ is float:
        return st.floats(low, high).filter(within.__contains__)
    if type_ is str:
        return st.text(st.characters(codec="utf-8"))  # pydantic refuses others
    if kind is Literal:
        return st.sampled_from(parts)
    if kind is tuple:
        return st.lists(values(parts[0], within)).map(tuple)
    return st.one_of(values(part, within) for part in parts) if parts else st.from_type(type_)


@given(data=st.data())
def test_what_is_shown_is_read_as_the_same_value(data):
    option = data.draw(st.sampled_from(TYPED))
    value = data.draw(values(option.type, option.about.within or Interval(-1e9, 1e9)))
    text = option.show(value)
    assert option.parse(text) == option.check(Text(text)) == value


def test_a_text_is_read_by_the_type_of_its_option():
    options = options_of(Run)
    assert options["class_weights"].parse("1,2,0.5") == (1.0, 2.0, 0.5)
    assert options["class_weights"].parse("balanced") == "balanced"
    assert options["augment"].parse("flip") == ("flip",) and options["augment"].parse('["flip", "crop"]') == (
        "flip", "crop",
    )  # fmt: skip
    assert options["patience"].parse("none") is None and options["patience"].parse("3") == 3
    assert options["normalise"].parse("none") == "none"
    assert options["source"].parse("3") == "3"
    assert isinstance(options["epochs"].parse("3"), float)


@pytest.mark.parametrize("text", ["", "x", "0", "-1", "nan", "inf", "1e300", "[" * 100_000, "1" * 5000, "1,2", "true,"])
def test_what_cannot_be_a_learning_rate_is_refused_shortly(text):
    with pytest.raises(CalgpError, match=r"must be a number above 0 and below 1e\+12, such as 0\.001\.$") as caught:
        options_of(Run)["learning_rate"].parse(text)
    assert len(str(caught.value)) < 250


def test_names_flags_and_short_flags_find_an_option():
    for name in ("learning_rate", "learning-rate", "--learning-rate", "--lr", "lr"):
        assert find_option(Run, name, of="run").name == "learning_rate"


def test_an_interval_has_its_ends_unless_they_are_open_and_nothing_that_is_not_finite():
    assert 1 in COUNT and 0 not in COUNT and 2**31 in COUNT
    assert 0 not in POSITIVE and 1e-300 in POSITIVE and 1e12 not in POSITIVE
    assert 0 in Interval(0) and float("inf") not in Interval(0) and float("nan") not in Interval(0)
    assert [str(each) for each in (COUNT, POSITIVE, Interval(0), Interval(0, open="("), Interval(0, 1, open=")"))] == [
        "from 1 to 2,147,483,648", "above 0 and below 1e+12", "of at least 0", "above 0", "from 0 to below 1",
    ]  # fmt: skip


def test_plain_fields_are_options_too():
    """As those of somebody's own method."""

    @dataclasses.dataclass(frozen=True)
    class Plain:
        keep: float
        names: list[str] = dataclasses.field(default_factory=list)

    keep, names = options_of(Plain).values()
    assert isinstance(keep, Option) and keep.default is ... and keep.default_text == "required" and names.default == []
    assert validate(Plain, {"keep": Text("0.5")}, of="method") == Plain(0.5)
    with pytest.raises(CalgpError, match="method needs keep"):
        validate(Plain, {}, of="method")


def test_the_estimator_has_every_option_of_a_run_or_says_which_not():
    parameters = ConvGPClassifier().get_params()
    assert set(options_of(Run)) - OWN <= set(parameters)
    assert all(parameters[name] == each.default for name, each in options_of(Run).items() if name not in OWN)
    assert set(options_of(Run)) >= OWN
