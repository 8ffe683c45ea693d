"""Options: dataclass fields that carry their help text, their limits and their flags.

`Run`, methods and backbones declare each option once, as a field made by `option`. Flags, `--help`, `--set`, the
estimator's parameters, printed commands and error messages are derived from these fields. This module imports neither
torch nor pydantic before a value is checked, so that `calgp train --help` appears at once.
"""

import functools
import json
import math
import types
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from calgp.errors import CalgpError, name_error, short_repr

T = TypeVar("T")


class Text(str):
    """A value as it was typed (`--set`, `--grid`): its option's type decides what it means."""


@dataclass(frozen=True)
class Interval:
    """The finite numbers from `low` to `high`, both included unless `open` has their bracket.

    >>> str(Interval(0, 1, open=")")), 1 in Interval(0, 1, open=")")
    ('from 0 to below 1', False)
    """

    low: float
    high: float = math.inf
    open: Literal["", "(", ")", "()"] = ""

    def __contains__(self, value: float) -> bool:
        above = self.low < value if "(" in self.open else self.low <= value
        return above and (value < self.high if ")" in self.open else value <= self.high) and value < math.inf

    def __str__(self) -> str:
        ends = self.low, 0.0 if self.high == math.inf else self.high
        low, high = (f"{end:,.0f}" if end == round(end) and abs(end) < 1e10 else f"{end:g}" for end in ends)
        if self.high == math.inf:
            return f"above {low}" if "(" in self.open else f"of at least {low}"
        first, between = (f"above {low}", "and") if "(" in self.open else (f"from {low}", "to")
        return f"{first} {between} {'below ' if ')' in self.open else ''}{high}"


COUNT = Interval(1, 2**31)
POSITIVE = Interval(0, 1e12, open="()")


@dataclass(frozen=True)
class About:
    """What a field says of itself beside its type and its default.

    help: one sentence.
    default_text: the default in words, where None or () would say little; of an object, its name.
    within: the numbers that it may be.
    example: for error messages, where the default is none.
    flags: beside --its-name.
    group: its panel in --help.
    since_version: of an option younger than results that are kept: at its default it is no part of a run's identity.
    before: what older runs had, if that is not the default.
    """

    help: str = ""
    default_text: str = ""
    within: Interval | None = None
    example: Any = None
    flags: tuple[str, ...] = ()
    group: str = "Options"
    since_version: str | None = None
    before: Any = ...


def about(help: str, **more: Any) -> dict[str, About]:
    """The metadata of a field that has no default; `more` as in `About`."""
    return {"about": About(help, **more)}


def option(default: T, help: str, **more: Any) -> T:
    """A field with a default and its help text; `more` as in `About`."""
    return field(default=default, metadata=about(help, **more))


def like(kind: type, name: str) -> Any:
    """A field with the default, help and limits of another class's."""
    same = next(each for each in fields(kind) if each.name == name)
    return field(default=same.default, metadata=same.metadata)


@dataclass(frozen=True)
class Option:
    """An option as its users need it: read from text, checked, written as text.

    >>> @dataclass(frozen=True)
    ... class Oven:
    ...     degrees: float = option(180.0, "Temperature.", within=Interval(0, 300))
    ...     modes: tuple[Literal["grill", "fan"], ...] = option((), "What is on.", default_text="nothing")
    >>> degrees, modes = options_of(Oven).values()
    >>> degrees.parse("220"), modes.parse("grill,fan"), modes.show(("fan",)), modes.default_text
    (220.0, ('grill', 'fan'), 'fan', 'nothing')
    >>> degrees.parse("500")
    Traceback (most recent call last):
    calgp.errors.CalgpError: Invalid degrees=500: must be a number from 0 to 300, such as 180.
    """

    name: str
    type: Any  # Any: an object that is chosen by its name
    default: Any  # `...`: it must be given
    about: About

    @property
    def flags(self) -> tuple[str, ...]:
        return f"--{self.name.replace('_', '-')}", *self.about.flags

    @property
    def is_switch(self) -> bool:
        """Whether it is a flag without a value: --name, or --no-name where it can be on by default."""
        return {leaf for leaf, _ in _alternatives(self.type)} == {bool}

    def switch(self, value: bool) -> str:
        """The flag that sets a switch."""
        return self.flags[0] if value else self.flags[0].replace("--", "--no-", 1)

    @property
    def default_text(self) -> str:
        """The default in words, or as people type it."""
        return self.about.default_text or ("required" if self.default is ... else _text(self.default))

    @property
    def before(self) -> Any:
        """What runs had before the option was there."""
        return self.default if self.about.before is ... else self.about.before

    @property
    def metavar(self) -> str:
        return _metavar(self.type)

    @functools.cached_property
    def choices(self) -> tuple[str, ...]:
        """The words that it may be."""
        return tuple(word for leaf, _ in _alternatives(self.type) for word in _words_of(leaf))

    def parse(self, text: str, *, of: str = "") -> Any:
        """The value that a text means: JSON, a word, or values with commas between them."""
        for reading in _readings(text):
            try:
                return self.check(reading)
            except CalgpError:
                continue
        raise self.error(json_or_text(text), of=of)

    def show(self, value: Any) -> str:
        """A text that `parse` reads as this value."""
        text = _text(value)
        try:
            return text if self.parse(text) == value else json.dumps(value)
        except CalgpError:
            return json.dumps(value)

    def check(self, value: Any, *, of: str = "") -> Any:
        """The value as the option's type, or an error that says what it must be."""
        if isinstance(value, Text):
            return self.parse(value, of=of)
        found = _validated(self.type, value)
        if found is ... or not self.allows(found):
            raise self.error(value, of=of)
        return found

    def allows(self, value: Any) -> bool:
        """Whether a value of the right type is within the limits, and a word one of the choices."""
        return all(map(self._allows_one, value if isinstance(value, tuple) else (value,)))

    def _allows_one(self, value: Any) -> bool:
        if isinstance(value, str):
            free = not self.choices or any(leaf is str for leaf, _ in _alternatives(self.type))
            return free or value in self.choices
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return not number or self.about.within is None or value in self.about.within

    def error(self, value: Any, *, of: str = "") -> CalgpError:
        name = f"{of}.{self.name}" if of else self.name
        limits = f" {self.about.within}" if self.about.within else ""
        several = ", with commas between several" if any(many for _, many in _alternatives(self.type)) else ""
        example = self.about.example if self.default in (None, (), ...) else self.default
        such = "" if example is None else f", such as {_text(example)}"
        must = f"{_requirement(self.type)}{limits}{several}{such}"
        return CalgpError(f"Invalid {name}={short_repr(value)}: must be {must}.")


@functools.cache
def options_of(kind: type) -> Mapping[str, Option]:
    """The options of a dataclass, by name, in their order."""
    hints, found = get_type_hints(kind), {}
    for each in fields(kind):
        default = each.default if each.default_factory is MISSING else each.default_factory()
        default = ... if default is MISSING else default
        found[each.name] = Option(each.name, hints[each.name], default, each.metadata.get("about", About()))
    return found


def find_option(kind: type, name: str, *, of: str) -> Option:
    """The option of a name, a flag or the short form of a flag.

    >>> find_option(Option, "defaults", of="Option")
    Traceback (most recent call last):
    calgp.errors.CalgpError: Option has no option 'defaults'; did you mean 'default'? Known: name, type, default, about.
    """
    options = options_of(kind)
    flag = f"--{name.removeprefix('--').replace('_', '-')}"
    for each in options.values():
        if name == each.name or flag in each.flags:
            return each
    short = (flag.removeprefix("--") for each in options.values() for flag in each.about.flags)
    raise name_error(f"{of} has no option", name, [*options, *short])


def check_options(value: Any) -> None:
    """Refuse numbers beyond the limits of their options and unknown words: for the `__post_init__` of a dataclass."""
    for name, each in options_of(type(value)).items():
        if not each.allows(getattr(value, name)):
            raise each.error(getattr(value, name))


def validate(kind: type[T], data: Mapping[str, Any], *, of: str) -> T:
    """A dataclass of untrusted values: unknown names and wrong values are refused by name."""
    found = {}
    for key, value in data.items():
        if key not in options_of(kind):
            raise name_error(f"{of} has no option", key, options_of(kind))
        found[key] = options_of(kind)[key].check(value, of="" if of == "run" else of)
    missing = [name for name, each in options_of(kind).items() if each.default is ... and name not in found]
    if missing:
        raise CalgpError(f"{of} needs {missing[0]}, which was not given.")
    return kind(**found)


def _validated(type_: Any, value: Any) -> Any:
    """The value as a type, `...` if it is of another."""
    from pydantic import ValidationError

    try:
        return adapter(type_).validate_python(value)
    except ValidationError:
        return ...


@functools.cache
def adapter(type_: Any) -> Any:
    """Pydantic's checks of a type, made once."""
    from pydantic import TypeAdapter

    return TypeAdapter(type_)


def json_or_text(text: str) -> Any:
    """JSON where it is JSON, else the text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return str(text)


def _readings(text: str) -> Iterator[Any]:
    """What a text may mean, the most exact first: JSON, itself, a list, None."""
    parts = [part.strip() for part in text.split(",")]
    yield from (json_or_text(text), str(text), [json_or_text(part) for part in parts], parts)
    if text.lower() == "none":
        yield None


def _text(value: Any) -> str:
    """A value as people type it.

    >>> _text((1.0, 0.5)), _text(None), _text(True)
    ('1,0.5', 'none', 'true')
    """
    if isinstance(value, tuple | list):
        return ",".join(map(_text, value))
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e6:
        return str(int(value))
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


_KINDS = {int: ("<int>", "a whole number"), float: ("<float>", "a number"), bool: ("true|false", "true or false"),
          str: ("<str>", "a text"), Any: ("<name>", "a name")}  # fmt: skip


@functools.cache
def _alternatives(type_: Any) -> tuple[tuple[Any, bool], ...]:
    """What a type but None may be, and whether there may be several.

    >>> _alternatives(Literal["balanced"] | tuple[float, ...] | None)
    ((typing.Literal['balanced'], False), (<class 'float'>, True))
    """
    parts = get_args(type_) if get_origin(type_) in (Union, types.UnionType) else (type_,)
    each = ((get_args(part)[0], True) if get_origin(part) is tuple else (part, False) for part in parts)
    return tuple(one for one in each if one[0] is not type(None))


def _words_of(leaf: Any) -> tuple[str, ...]:
    return get_args(leaf) if get_origin(leaf) is Literal else ()


def _metavar(type_: Any) -> str:
    """
    >>> _metavar(int | None), _metavar(Literal["grey", "rgb"]), _metavar(tuple[float, ...])
    ('<int>', 'grey|rgb', '<float>,…')
    """
    names = ("|".join(_words_of(leaf)) or _KINDS.get(leaf, ("<value>",))[0] for leaf, _ in _alternatives(type_))
    return "|".join(name + ",…" * many for name, (_, many) in zip(names, _alternatives(type_), strict=True))


def _requirement(type_: Any) -> str:
    """
    >>> _requirement(int | None), _requirement(Literal["a", "b", "c"])
    ('none or a whole number', 'a, b or c')
    """
    words = ["none"] * (type(None) in get_args(type_))
    words += [
        word for leaf, _ in _alternatives(type_) for word in _words_of(leaf) or [_KINDS.get(leaf, ("", "other"))[1]]
    ]
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
