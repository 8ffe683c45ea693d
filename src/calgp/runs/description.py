"""A run as plain data, and back: run folders, TOML files and the command line describe runs so."""

import dataclasses
from typing import Any, TypeVar

from calgp.errors import CalgpError, name_error, short_repr
from calgp.methods import METHODS, Method
from calgp.nets import BACKBONES, Auto, Backbone, Pretrained, Wrapped
from calgp.options import options_of, validate
from calgp.run import Run, default_name

Described = TypeVar("Described", Method, Backbone)


def to_json(run: Run) -> dict[str, Any]:
    """The run as plain data.

    >>> to_json(from_json({"seed": 7, "backbone": "resnet"}))["seed"]
    7
    """
    data = {field.name: getattr(run, field.name) for field in dataclasses.fields(run)}
    return data | {name: _described(data[name]) for name in ("method", "backbone")}


def identity(run: Run) -> dict[str, Any]:
    """`to_json` without younger options that are at their defaults: the same for equal runs of all versions."""
    data = to_json(run)
    for described, plain in ((run, data), (run.method, data["method"]), (run.backbone, data["backbone"])):
        for name, each in options_of(type(described)).items():
            if each.about.since_version and getattr(described, name) == each.before:
                del plain[name]
    return data


def from_json(data: dict[str, Any]) -> Run:
    """The run of plain data (a run folder, a TOML file, the command line), checked.

    From Python, method and backbone may also be the objects themselves.

    >>> from_json({"source": "mnist", "method": "cnn-mcd", "epochs": 3}).label
    'cnn-mcd'
    """
    if not isinstance(data, dict):
        raise CalgpError(f"Invalid run={short_repr(data)}: must be a table of options.")
    method, backbone = (data.get(name, default_name(name)) for name in ("method", "backbone"))
    if not isinstance(method, Method):
        method = _undescribed(method, METHODS, "method")
    if not isinstance(backbone, Backbone):
        backbone = _undescribed(backbone, BACKBONES, "backbone", Wrapped, Pretrained)
    return validate(Run, {**data, "method": method, "backbone": backbone}, of="run")


def from_folder(data: dict[str, Any]) -> Run:
    """The run of a run.json, which may be an earlier version's: options that it lacks were as they were then."""
    if isinstance(data, dict):
        younger = {name: each.before for name, each in options_of(Run).items() if each.about.since_version}
        data = younger | data
    return from_json(data)


def _described(value: Any) -> dict[str, Any]:
    return {"kind": type(value).__name__} | dataclasses.asdict(value)


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
    # a folder of an earlier version does not name the options that are younger
    options = options_of(kinds[kind])
    younger = {name: each.before for name, each in options.items() if each.about.since_version}
    return validate(kinds[kind], younger | data, of=what)
