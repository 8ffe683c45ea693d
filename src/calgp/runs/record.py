"""Frozen dataclasses as JSON: `to_json` writes one, `parse` reads one and checks every value.

Files may come from anybody, so reading is strict: no text is taken for a number. Keys without a field are ignored,
since a later version may write more.

>>> from dataclasses import dataclass
>>> @dataclass(frozen=True)
... class Point:
...     x: float
...     label: str | None = None
>>> to_json(Point(0.5))
{'x': 0.5, 'label': None}
>>> parse(Point, {"x": 1, "label": "a", "more": True})
Point(x=1.0, label='a')
"""

import json
from typing import Annotated, TypeVar

from pydantic import Field, ValidationError

from calgp.errors import CalgpError, short_repr
from calgp.json_values import Json
from calgp.options import adapter

T = TypeVar("T")

Whole = Annotated[int, Field(ge=0, lt=2**63)]
Count = Annotated[int, Field(ge=1, lt=2**40)]
Threads = Annotated[int, Field(ge=1, le=1024)]
Finite = Annotated[float, Field(allow_inf_nan=False, ge=-1e30, le=1e30)]
Share = Annotated[float, Field(ge=0, le=1)]
Text = Annotated[str, Field(max_length=4096)]
Interval = tuple[float, float]  # a score may be infinite or NaN: a probability of 0 makes the MNLL infinite


def parse(kind: type[T], value: object) -> T:
    """The record of plain data; a CalgpError names the first value that is wrong."""
    try:
        return adapter(kind).validate_json(json.dumps(value), strict=True)
    except RecursionError:
        raise CalgpError("it is nested too deep") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(map(str, first["loc"]))[:200] or "it"
        what = first["msg"][0].lower() + first["msg"][1:300]
        raise CalgpError(f"{place}: {what}, not {short_repr(first['input'])}") from None


def to_json(record: object) -> dict[str, Json]:
    """The record as plain data, tuples as lists."""
    return json.loads(json.dumps(adapter(type(record)).dump_python(record)))
