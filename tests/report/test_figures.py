from __future__ import annotations

import math
import re
import warnings
from dataclasses import replace
from xml.etree import ElementTree as ET

import matplotlib as mpl
import pytest
from scipy.stats import binomtest

from calgp.report import figures
from calgp.report.figures import Dot
from calgp.runs.results import HoldoutRecord, Reliability, TrainRecord

BINS = Reliability(
    edges=[0.0, 0.25, 0.5, 0.75, 1.0],
    count=[0, 4, 0, 96],
    accuracy=[None, 0.75, None, 0.9],
    confidence=[None, 0.4, None, 0.95],
)
CURVE = figures.Curve("confidence", [0.25, 0.5, 0.75, 1.0], [0.0, 0.0, 0.1, 0.2], 0.075)
BEST = figures.Curve("best", [0.25, 0.5, 0.75, 1.0], [0.0, 0.0, 0.05, 0.2], 0.0625)
LOG = [
    TrainRecord("train", 20, 2.0, -0.5, 1e-3),
    HoldoutRecord("holdout", 30, 1.5, 0.3),
    TrainRecord("train", 40, 1.0, -0.4, 5e-4),
]
FIGURES = {
    "reliability": lambda: figures.reliability(BINS, ece=0.0625, mce=0.35),
    "small": lambda: figures.reliability_small(BINS, label="cnn <x> & $y$", ece=0.0625),
    "confidence": lambda: figures.confidence_histogram([0.9, 0.8, 0.3], [True, True, False]),
    "entropies": lambda: figures.entropies(
        [0.0, 0.1], [1.0, 2.0, 9.0], classes=10, names=("digits", "a<b>&$c"), auroc=(0.9, (0.8, 1.0))
    ),
    "risk": lambda: figures.risk_coverage([CURVE], best=BEST, target=0.1, chosen=(0.5, 0.05)),
    "sets": lambda: figures.set_coverage(["a<b>&$c", "dog"], [0.9, 1.0], [100, 3], [1.2, 1.0], target=0.95),
    "training": lambda: figures.training(LOG),
    "dots": lambda: figures.dots(
        "MNLL", [Dot("cnn", 0.2, (0.1, 0.3), "#0072b2"), Dot("数 $x_1$", 0.3, None, "#e69f00")]
    ),
}


def parsed(svg: str) -> ET.Element:
    return ET.fromstring(svg)  # noqa: S314 (our own)


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in parsed(svg).iter("{http://www.w3.org/2000/svg}text")]


def marks(svg: str, name: str) -> list[ET.Element]:
    return [element for element in parsed(svg).iter() if element.get("class") == name]


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_the_same_every_time_and_stands_alone(name: str) -> None:
    svg = FIGURES[name]()
    assert svg == FIGURES[name]()
    root = parsed(svg)
    assert root.tag.endswith("svg") and root.get("role") == "img"
    ids = [element.get("id") for element in root.iter() if element.get("id")]
    assert len(ids) == len(set(ids))
    assert root.get("aria-labelledby") in ids
    references = re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', svg)
    assert {first or second for first, second in references} <= set(ids)
    assert not re.search(r'(href|src)="(?!#)', svg) and "<style" not in svg and "<metadata" not in svg


def test_ids_of_different_figures_differ() -> None:
    ids = [set(re.findall(r' id="([^"]+)"', make())) for make in FIGURES.values()]
    assert sum(map(len, ids)) == len(set.union(*ids))


def test_a_user_s_own_style_neither_matters_nor_changes() -> None:
    expected = FIGURES["reliability"]()
    with mpl.rc_context({"font.size": 30, "axes.facecolor": "red", "text.usetex": True}):
        assert FIGURES["reliability"]() == expected
        assert mpl.rcParams["font.size"] == 30


def test_reliability_draws_filled_bins_only() -> None:
    svg = figures.reliability(BINS, ece=0.0625, mce=0.35)
    for name in ("accuracy", "gap", "count"):
        assert len(marks(svg, name)) == 2
    assert {"ECE 0.0625", "MCE 0.3500", "n = 100", "over-confident", "under-confident"} <= set(texts(svg))
    assert len(marks(figures.reliability_small(BINS, label="x", ece=0.0625), "accuracy")) == 2


def test_reliability_names_only_the_gaps_that_are_there() -> None:
    bins = Reliability([0.0, 0.5, 1.0], [0, 10], [None, 1.0], [None, 0.9])
    assert "over-confident" not in texts(figures.reliability(bins, ece=0.1, mce=0.1))


def test_counts_of_very_different_size_are_on_a_logarithmic_scale() -> None:
    bins = Reliability([0.0, 0.5, 1.0], [1, 9999], [1.0, 1.0], [0.4, 0.9])
    labels = texts(figures.reliability(bins, ece=0.1, mce=0.6))
    assert {"1", "100", "10,000"} <= set(labels) or {"10", "1,000"} <= set(labels)


@pytest.mark.parametrize(("hits", "n"), [(0, 1), (1, 1), (3, 10), (996, 1000)])
def test_wilson_is_scipy_s(hits: int, n: int) -> None:
    expected = binomtest(hits, n).proportion_ci(method="wilson")
    assert figures.wilson(hits / n, n) == pytest.approx(
        (expected.low, expected.high), abs=1e-4
    )  # z = 1.96, not 1.95996


def test_confidence_histogram_tells_right_from_wrong() -> None:
    labels = texts(FIGURES["confidence"]())
    assert "right: 2 images, 85.0 % sure on average" in labels
    assert "wrong: 1 image, 30.0 % sure on average" in labels
    assert "wrong: 0 images" in texts(figures.confidence_histogram([0.9], [True]))


def test_entropies_say_auroc_and_means() -> None:
    labels = texts(figures.entropies([0.5, 0.7], [1.0], classes=10, names=("digits", "letters"), auroc=(1, (0.9, 1))))
    assert "AUROC 1.000 (0.900 – 1.000)" in labels
    assert "digits: 2 images, mean 0.60" in labels and "letters: 1 image, mean 1.00" in labels
    assert f"entropy in nats, at most log 10 = {math.log(10):.2f}" in labels


def test_risk_and_coverage_has_a_line_for_each_score_the_target_and_the_threshold() -> None:
    svg = FIGURES["risk"]()
    assert len(marks(svg, "curve")) == len(marks(svg, "target")) == len(marks(svg, "chosen")) == 1
    expected = {"confidence: AURC 0.075", "best possible: AURC 0.0625", "target 10 %", "the run's threshold"}
    assert expected <= set(texts(svg))
    bare = figures.risk_coverage([CURVE, CURVE], best=BEST)
    assert len(marks(bare, "curve")) == 2 and not marks(bare, "target") and not marks(bare, "chosen")


def test_risk_and_coverage_of_one_image_and_of_no_mistake_can_be_drawn() -> None:
    one = figures.Curve("confidence", [1.0], [0.0], 0.0)
    assert marks(figures.risk_coverage([one], best=one), "curve")


def test_sets_by_class_have_a_dot_and_a_bar_each() -> None:
    svg = FIGURES["sets"]()
    assert len(marks(svg, "covered")) == len(marks(svg, "size")) == 2 and len(marks(svg, "target")) == 1
    assert "a<b>&$c" in texts(svg)


def test_training_shows_what_was_logged() -> None:
    svg = figures.training(LOG)
    assert all(len(marks(svg, f"curve-{key}")) == 1 for key in ("nll", "kl", "mnll", "err", "rate"))
    plain = figures.training([replace(record, kl=0.0) for record in LOG if isinstance(record, TrainRecord)])
    assert not any(marks(plain, f"curve-{key}") for key in ("kl", "mnll", "err"))


def test_training_of_one_record_and_of_one_that_diverged() -> None:
    assert marks(figures.training(LOG[:1]), "curve-nll")
    assert marks(figures.training([LOG[0], replace(LOG[2], nll=math.nan, kl=math.inf)]), "curve-nll")


def test_dots_have_a_row_for_each_run_even_if_a_score_is_infinite() -> None:
    rows = [Dot("a", 0.1, (0.05, 0.2), "#0072b2"), Dot("b", math.inf, (0.3, math.inf), "#e69f00")]
    svg = figures.dots("MNLL", rows)
    assert len(marks(svg, "dot")) == 2 and {"a", "b (inf)", "MNLL (less is better)"} <= set(texts(svg))


def test_names_are_text_and_never_markup() -> None:
    name = "<script>alert(1)</script> $\\frac{x}$ \x00\x1b 数据 \udcff"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        svg = figures.dots("ERR", [Dot(name, 0.1, None, "#0072b2")], unit="%")
    assert "<script" not in svg
    assert any("<script>alert(1)</script> $\\frac{x}$" in text for text in texts(svg))
