"""For the API reference: doctests of docstrings are shown as Python sessions, where Markdown sees quotations."""

import re
from typing import Any

from griffe import Extension

SESSION = re.compile(r"(?:^>>> .*\n?(?:(?!\s*$|```).*\n?)*)+", re.M)


class Doctests(Extension):
    def on_object(self, *, obj: Any, **_: Any) -> None:
        if not obj.is_alias and obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """Each session of a docstring between fences."""
    return SESSION.sub(lambda match: f"```pycon\n{match[0].rstrip()}\n```\n", text)
