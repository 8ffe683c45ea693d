"""Rows of plain data as CSV that a spreadsheet opens as data."""

import csv
import io
from collections.abc import Mapping, Sequence

from calgp.json_values import Json

FORMULA = ("=", "+", "-", "@", "\t", "\r")  # what a cell begins with that spreadsheets compute


def csv_text(rows: Sequence[Mapping[str, Json]], *, escape: bool = True) -> str:
    """A header and a line for each row; lists are joined by spaces.

    With `escape`, text that a spreadsheet would run as a formula gets an apostrophe in front (class names and file
    names may come from anybody). Numbers stay numbers.

    >>> csv_text([{"file": "=HYPERLINK(1)", "p": -0.5}]).splitlines()
    ['file,p', "'=HYPERLINK(1),-0.5"]
    """
    text = io.StringIO()
    writer = csv.writer(text)
    names = list(dict.fromkeys(name for row in rows for name in row))
    plain = _escaped if escape else lambda value: value
    writer.writerow([plain(name) for name in names])
    for row in rows:
        values = (row.get(name) for name in names)
        writer.writerow([plain(" ".join(map(str, v)) if isinstance(v, list | tuple) else v) for v in values])
    return text.getvalue()


def _escaped(value: object) -> object:
    if not isinstance(value, str) or not value.startswith(FORMULA):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value
