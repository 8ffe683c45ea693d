import csv
import io

import pytest

from calgp.report.csv_text import csv_text


@pytest.mark.parametrize("text", ["=1+1", "+1-800", "-cmd|' /C calc'!A0", "@SUM(A1)", "\tx", "\rx"])
def test_text_that_spreadsheets_compute_is_escaped_in_cells_and_headers(text):
    header, row = csv.reader(io.StringIO(csv_text([{"file": text, text: "plain"}]), newline=""))
    assert header == ["file", f"'{text}"] and row == [f"'{text}", "plain"]
    header, row = csv.reader(io.StringIO(csv_text([{"file": text, text: "plain"}], escape=False), newline=""))
    assert header == ["file", text] and row == [text, "plain"]


def test_numbers_stay_numbers_and_lists_are_joined():
    rows = [{"a": -1.5, "b": "-3e-4", "c": [0, 1], "d": None}, {"a": 2, "e": "a,b"}]
    found = list(csv.reader(io.StringIO(csv_text(rows))))
    assert found == [["a", "b", "c", "d", "e"], ["-1.5", "-3e-4", "0 1", "", ""], ["2", "", "", "", "a,b"]]
