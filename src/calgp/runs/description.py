"""A run as plain data, and back: run folders, TOML files and the command line describe runs so."""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from calgp.errors import CalgpError, name_error, short_repr
from calgp.json_values import Json
from calgp.methods import METHODS, Method
from calgp.nets import BACKBONES, Auto, Backbone, Pretrained, Wrapped
from calgp.options import options_of, validate
from calgp.run import Run, default_name

Described = TypeVar("Described", Method, Backbone)


def to_json(run: Run) -> dict[str, Json]:
    """The run as plain data.

    >>> to_json(from_json({"seed": 7, "backbone": "resnet"}))["seed"]
    7
    """
    return {**vars(run), "method": _described(run.method), "backbone": _described(run.backbone)}


def flat(data: Mapping[str, Json]) -> dict[str, Json]:
    """Plain data with every option by its whole name.

    >>> flat({"seed": 7, "method": {"name": "cnn-dgp", "depth": 3}})
    {'seed': 7, 'method.name': 'cnn-dgp', 'method.depth': 3}
    """
    found: dict[str, Json] = {}
    for name, value in data.items():
        found |= {f"{name}.{key}": each for key, each in value.items()} if isinstance(value, Mapping) else {name: value}
    return found


def identity(run: Run) -> dict[str, Json]:
    """`to_json` without younger options that are at their defaults: the same for equal runs of all versions."""

    def old(described: Run | Method | Backbone, plain: Mapping[str, Json]) -> dict[str, Json]:
        options = options_of(type(described))
        return {
            name: value
            for name, value in plain.items()
            if name == "kind"
            or not options[name].about.since_version
            or getattr(described, name) != options[name].before
        }

    parts = {"method": run.method, "backbone": run.backbone}
    return old(run, to_json(run)) | {name: old(each, _described(each)) for name, each in parts.items()}


def from_json(data: Mapping[str, Json | Method | Backbone]) -> Run:
    """The run of plain data (a run folder, a TOML file, the command line), checked.

    From Python, method and backbone may also be the objects themselves.

    >>> from_json({"source": "mnist", "method": "cnn-mcd", "epochs": 3}).label
    'cnn-mcd'
    """
    if not isinstance(data, Mapping):
        raise CalgpError(f"Invalid run={short_repr(data)}: must be a table of options.")
    method, backbone = (data.get(name, default_name(name)) for name in ("method", "backbone"))
    if not isinstance(method, Method):
        method = _undescribed(method, METHODS, "method")
    if not isinstance(backbone, Backbone):
        backbone = _undescribed(backbone, BACKBONES, "backbone", Wrapped, Pretrained)
    return validate(Run, {**data, "method": method, "backbone": backbone}, of="run")


def from_folder(data: Mapping[str, Json]) -> Run:
    """The run of a run.json, which may be an earlier version's: options that it lacks were as they were then."""
    return from_json({**_younger(Run), **data} if isinstance(data, Mapping) else data)


def _described(value: Method | Backbone) -> dict[str, Json]:
    return {"kind": type(value).__name__, **dataclasses.asdict(value)}  # type: ignore[call-overload]


def _undescribed(data: Any, table: dict[str, Described], what: str, *others: type[Described]) -> Described:
    """A name in the table, or {kind: …, options …}, or {name: …, options …} for a variant of a ready value.

    Kinds are those in the table, and `others`, of which there need be no ready value.
    """
    if isinstance(data, str):
        data = {"name": data}
    if not isinstance(data, dict):
        raise CalgpError(f"Invalid {what}={short_repr(data)}: must be a name or a table of options.")
    data = dict(data)
    if "name" in data:
        name = data.pop("name")
        if not isinstance(name, str) or name not in table:
            raise name_error(f"There is no {what}", name, table)
        data = _described(table[name]) | data
    kinds = {kind.__name__: kind for kind in (*map(type, table.values()), *others)}
    kind = data.pop("kind", None)
    if not isinstance(kind, str) or kind not in kinds:
        raise name_error(f"There is no kind of {what}", kind, kinds)
    if kinds[kind] is Auto and data:
        raise CalgpError(
            f"Invalid {what}.{next(iter(data))}: auto chooses a network by the images and has no options; name one, "
            "such as --backbone lenet."
        )
    return validate(kinds[kind], _younger(kinds[kind]) | data, of=what)


def _younger(kind: type) -> dict[str, Any]:
    """What a folder of an earlier version does not name, as it was then."""
    return {name: each.before for name, each in options_of(kind).items() if each.about.since_version}
