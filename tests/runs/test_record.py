"""Frozen dataclasses as JSON: nothing is guessed in reading, nothing is lost in writing."""

import json
import math
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calgp.errors import CalgpError
from calgp.runs.card import Card, Member
from calgp.runs.environment import Environment
from calgp.runs.record import Count, Finite, Interval, Share, Text, Whole, parse, to_json
from calgp.runs.results import Calibration, Checkpoint, Evaluation, FittedDecisions, Histogram, Reliability

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@dataclass(frozen=True)
class Inner:
    share: Share
    names: tuple[Text, ...] = ()


@dataclass(frozen=True)
class Outer:
    whole: Whole
    count: Count
    finite: Finite
    interval: Interval
    inner: Inner
    flag: bool
    more: dict[Text, Inner]
    maybe: float | None = None


PLAIN = {
    "whole": 0, "count": 1, "finite": 0.5, "interval": [0.0, 1.0], "inner": {"share": 1.0, "names": ["a"]},
    "flag": True, "more": {"one": {"share": 0.0, "names": []}}, "maybe": None,
}  # fmt: skip
RECORD = Outer(0, 1, 0.5, (0.0, 1.0), Inner(1.0, ("a",)), True, {"one": Inner(0.0)})


def with_value(place: str, value: object) -> dict[str, object]:
    data = json.loads(json.dumps(PLAIN))
    inside = data
    *path, last = place.split(".")
    for key in path:
        inside = inside[key]
    inside[last] = value
    return data


def test_a_record_is_plain_data_and_back():
    assert to_json(RECORD) == PLAIN and parse(Outer, PLAIN) == RECORD
    assert parse(Outer, {key: value for key, value in PLAIN.items() if key != "maybe"}) == RECORD  # it has a default


def test_keys_without_a_field_are_ignored():
    assert parse(Outer, with_value("inner.younger", [1, 2]) | {"younger": {}}) == RECORD


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("whole", "0"), ("whole", 0.0), ("whole", True), ("whole", -1), ("whole", 2**63), ("whole", None),
        ("count", 0), ("count", 2**40), ("count", "1"),
        ("finite", math.nan), ("finite", math.inf), ("finite", 1e31), ("finite", "0.5"), ("finite", True),
        ("interval", [0.0]), ("interval", [0.0, 1.0, 2.0]), ("interval", "01"), ("interval", {"0": 0, "1": 1}),
        ("inner", None), ("inner", []), ("inner.share", 1.1), ("inner.share", -0.1), ("inner.share", math.nan),
        ("inner.names", "a"), ("inner.names", {"a": 1}),
        ("flag", 1), ("flag", "true"), ("flag", None),
        ("more", []), ("more.one", None), ("more.one.share", "0"),
        ("maybe", "nan"), ("maybe", []),
    ],
)  # fmt: skip
def test_no_value_is_taken_for_one_of_another_type_or_size(place, value):
    with pytest.raises(CalgpError, match=rf"^{place}(\.\d)?: .*, not "):
        parse(Outer, with_value(place, value))


def test_a_whole_number_is_a_float_and_keeps_its_value():
    found = parse(Outer, with_value("finite", 3) | {"interval": [0, 10**18], "maybe": 2**53})
    assert (found.finite, found.interval, found.maybe) == (3.0, (0.0, 1e18), float(2**53))
    assert all(type(value) is float for value in (found.finite, *found.interval, found.maybe))


def test_a_missing_value_is_named():
    data = with_value("inner", {})
    with pytest.raises(CalgpError, match=r"^inner\.share: field required, not \{\}"):
        parse(Outer, data)


@pytest.mark.parametrize("value", [None, [], "text", 3, True])
def test_what_is_no_table_is_refused(value):
    with pytest.raises(CalgpError, match=r"^it: .*, not "):
        parse(Outer, value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 5e-324, 1.7976931348623157e308, -0.0, 0.1 + 0.2])
def test_every_float_comes_back_to_the_bit(value):
    """Scores may be infinite or NaN: a probability of 0 makes the MNLL infinite."""
    data = json.loads(json.dumps(to_json(Outer(0, 1, 0.0, (value, value), Inner(1.0), False, {}, value))))
    assert [each.hex() for each in parse(Outer, data).interval] == [value.hex()] * 2


@settings(max_examples=200, deadline=None)
@given(st.floats())
def test_any_float_comes_back_to_the_bit(value):
    assert parse(Outer, with_value("maybe", value)).maybe.hex() == value.hex()


def test_values_nested_deep_are_refused():
    deep: object = 1.0
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(CalgpError, match="nested too deep"):
        parse(Outer, PLAIN | {"maybe": deep})
    shallow: object = 1.0
    for _ in range(300):
        shallow = [shallow]
    with pytest.raises(CalgpError):
        parse(Outer, PLAIN | {"maybe": shallow})


@pytest.mark.parametrize("place", ["inner.share", "more.one.share"])
def test_messages_stay_short_however_long_a_value_is(place):
    with pytest.raises(CalgpError) as caught:
        parse(Outer, with_value(place, "x" * 100_000))
    assert len(str(caught.value)) < 300
    with pytest.raises(CalgpError) as caught:
        parse(Outer, with_value("more", {"x" * 100_000: {"share": 2}}))
    assert len(str(caught.value)) < 600


KINDS = [Outer, Card, Member, Environment, Calibration, FittedDecisions, Evaluation, Histogram, Reliability, Checkpoint]


@settings(max_examples=150, deadline=None)
@given(JSON, st.sampled_from(KINDS))
def test_any_json_is_a_record_or_refused_in_one_sentence(value, kind):
    try:
        found = parse(kind, value)
    except CalgpError as error:
        assert 0 < len(str(error)) < 1000
    else:
        assert parse(kind, to_json(found)) == found
