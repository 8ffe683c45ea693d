"""For the API reference: doctests are shown as Python sessions, and options with their default and help text."""

import dataclasses
import re
from importlib import import_module
from typing import Any

from griffe import Docstring, Extension

from calgp.options import options_of

SESSION = re.compile(r"(?:^>>> .*\n?(?:(?!\s*$|```).*\n?)*)+", re.M)


class Doctests(Extension):
    def on_object(self, *, obj: Any, **_: Any) -> None:
        if not obj.is_alias and obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


class Options(Extension):
    """A field that `option` made shows its default, and its help text as its docstring."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.is_attribute and obj.parent.is_class and obj.docstring is None:
            kind = getattr(import_module(obj.parent.module.path), obj.parent.name)
            described = dataclasses.is_dataclass(kind) and any(each.metadata for each in dataclasses.fields(kind))
            found = options_of(kind).get(obj.name) if described else None
            if found is not None and found.about.help:
                obj.value = None if found.default is ... else repr(found.default)
                if (init := obj.parent.members.get("__init__")) is not None:
                    init.parameters[obj.name].default = obj.value
                words = f" Default: {found.about.default_text}." if found.about.default_text else ""
                obj.docstring = Docstring(found.about.help + words, parent=obj)


def fenced(text: str) -> str:
    """Each session of a docstring between fences."""
    return SESSION.sub(lambda match: f"```pycon\n{match[0].rstrip()}\n```\n", text)
