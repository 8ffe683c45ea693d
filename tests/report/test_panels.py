"""Figures of many runs: what is drawn is what was given, and what was not run says so."""

import re
from xml.etree import ElementTree as ET

import pytest

from calgp.report.panels import Density, Drawn, Line, curves, densities, frontiers, ladders, reliabilities, styles
from calgp.runs.results import Reliability

METHODS = [f"method {n}" for n in range(8)]


def drawn(figure: Drawn, name: str) -> int:
    """How many things of a class there are, in an SVG that is one."""
    ET.fromstring(figure.svg)  # noqa: S314 (our own)
    assert figure.png.startswith(b"\x89PNG")
    return len(re.findall(f'class="{name}"', figure.svg))


def test_methods_differ_in_colour_and_mark_together():
    styled = styles([*METHODS, METHODS[0]])
    assert len(set(styled.values())) == len(styled) == 8
    assert len({mark for _, mark in styled.values()}) == 8


def test_curves_have_a_line_for_each_method_that_was_run():
    lines = [Line("method 0", [(100, 0.2, 0.01), (1000, 0.1, None)]), Line("method 1", [])]
    empty = [Line("method 0", []), Line("method 1", [])]
    figure = curves({"p": {"ERR": lines, "ECE": empty}}, axis="images", log=True, styled=styles(METHODS[:2]))
    assert drawn(figure, "line") == 1
    assert figure.svg.count(">not run<") == 1
    assert ">1k<" in figure.svg and ">ERR<" in figure.svg and ">images<" in figure.svg


def test_reliabilities_of_what_was_run():
    bins = Reliability([0, 0.5, 1], [10, 20], [0.3, 0.9], [0.4, 0.8])
    figure = reliabilities([("p", [("a", bins, "ECE 0.1"), ("b", None, "")]), ("q", [("a", bins, "")])])
    assert drawn(figure, "points") == 2
    assert figure.svg.count(">not run<") == 1


def test_densities_are_drawn_inside_and_outside():
    histogram = ([0.0, 1.0, 2.0], [30.0, 10.0])
    figure = densities([("p", [Density("a", histogram, histogram, "AUROC 0.5"), "b"])], names=("in", "out"))
    assert drawn(figure, "density") == 2
    assert figure.svg.count(">not run<") == 1


def test_ladders_show_published_numbers_beside_measured():
    points = [("method 0", 0.1, 0.02, 0.15), ("method 1", None, None, 0.2), ("method 2", 0.3, None, None)]
    figure = ladders({"p": {"ERR": points}}, styled=styles(METHODS[:3]))
    assert (drawn(figure, "dot"), drawn(figure, "published")) == (2, 2)
    assert figure.svg.count(">not run<") == 1


@pytest.mark.parametrize(("last", "far"), [(0.39, 0), (0.41, 1)])
def test_one_number_far_beyond_the_others_is_written_at_the_edge(last, far):
    points = [("method 0", 0.05, 0.02, None), ("method 1", 0.1, None, None), ("method 2", last, None, None)]
    figure = ladders({"p": {"ERR": points}}, styled=styles(METHODS[:3]))
    assert (drawn(figure, "dot"), drawn(figure, "far"), figure.svg.count(">0.41 →<")) == (3 - far, far, far)


def test_same_input_same_bytes():
    lines = [Line("method 0", [(1, 0.2, 0.01)])]
    first, second = (curves({"p": {"ERR": lines}}, axis="depth", log=False, styled=styles(METHODS)) for _ in range(2))
    assert first == second


def test_frontier_has_every_method():
    points = [("method 0", 0.1, 0.02, 0.001), ("method 1", 5.0, 0.01, None), ("method 2", 9.0, 0.03, None)]
    assert drawn(frontiers({"p": points, "q": points[:1]}, styled=styles(METHODS)), "line") == 4
