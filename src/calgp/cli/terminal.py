"""The one exit for text to a terminal: what class names, file names and labels say is shown, never obeyed."""

from typing import Any

from rich.console import Console
from rich.progress import TextColumn
from rich.text import Text

from calgp.errors import printable


class Terminal(Console):
    """A console on which a string is text alone: no markup, no emoji codes, no control characters.

    Whatever is printed, be it by itself or in a table, its title or its caption, goes through `render_str`. Our own
    colours are `Text` (see `styled`).
    """

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, emoji=False)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)


def styled(*parts: tuple[str, str] | str) -> Text:
    """Text of which some parts have a style.

    >>> styled(("[cat]\\x1b[2J", "bold"), " 0.9").plain
    '[cat]�[2J 0.9'
    """
    return Text.assemble(
        *(printable(part) if isinstance(part, str) else (printable(part[0]), part[1]) for part in parts)
    )


class PlainColumn(TextColumn):
    """A column of a progress bar, which rich would read as markup."""

    def __init__(self, text_format: str) -> None:
        super().__init__(text_format, markup=False)

    def render(self, task: Any) -> Text:
        return Text(printable(super().render(task).plain))
