"""All text goes to the terminal here: class names, file names and labels are never read as markup or control codes."""

import textwrap
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

    def say(self, text: str, *, problem: bool = False) -> None:
        """Sentences: on a terminal broken between words, elsewhere not at all. A `problem` begins with "Error:".

        Paths stay whole, and so does a line that is a command to copy (`Next: …`).
        """
        for number, line in enumerate(f"{'Error: ' * problem}{text}".split("\n")):
            if self.is_terminal and not line.startswith("Next: "):
                line = textwrap.fill(line, self.width, break_long_words=False, break_on_hyphens=False)
            shown = self.render_str(line)
            if problem and not number:
                shown.stylize("bold red", 0, len("Error:"))
            self.print(shown, highlight=False, soft_wrap=True)


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
