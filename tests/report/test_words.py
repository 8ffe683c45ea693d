from __future__ import annotations

from dataclasses import replace

import pytest

from calgp.metrics import Scores
from calgp.report import words
from forked import python

SCORES = Scores(n=1000, err=0.018, mnll=0.05, ece=0.01, mce=0.1, brier=0.03, confidence=0.98, entropy=0.05)


def test_words_and_advice_need_no_matplotlib() -> None:
    """`calgp train` and `evaluate` say them; importing matplotlib takes a second, and memory."""
    python(
        "-c", "import sys, calgp.report.advice, calgp.report.words; sys.exit('matplotlib' in sys.modules)", check=True
    )


def test_summary_says_how_wrong_and_how_sure() -> None:
    said = words.summary(SCORES, (900, 0.99, 0.995)).replace(words.THIN, " ")
    assert said.startswith("On 1,000 test images it is wrong on 1.80 %. Where it is at least 90 % sure (900 images,")
    assert "it is right 99.5 % of the time" in said and said.endswith("the difference may be chance.")


@pytest.mark.parametrize(
    ("confidence", "verdict"), [(0.9, "under-confident by 8.2 points"), (1.0, "over-confident by")]
)
def test_summary_names_a_difference_that_chance_does_not_explain(confidence: float, verdict: str) -> None:
    assert verdict in words.summary(replace(SCORES, confidence=confidence), None)


def test_numbers_are_written_alike() -> None:
    assert words.percent(0.0064) == f"0.64{words.THIN}%"
    assert words.decimal(-0.01234) == "−0.0123" and words.nats(1.1454) == "1.145"
    assert words.interval((0.148, 0.196), words.percent) == f"14.8 – 19.6{words.THIN}%"
    assert words.interval(None) == "–"


def test_a_date_is_a_date_or_what_was_written() -> None:
    assert words.day("2026-11-05T21:29:18+00:00") == "5 November 2026"
    assert words.day("unknown") == "unknown"
