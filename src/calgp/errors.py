"""The one exception that calgp raises on purpose, and how it quotes what a file says."""

import reprlib
from typing import Any


class CalgpError(Exception):
    """Something a user handed in cannot be used: the message says what was expected, what came and what to do.

    Raised at the border only (files, options, data); inside, the types are trusted. The command line prints it as one
    sentence and exits with status 1.
    """

    alone = False  # whether only one of several processes has met it, so that the first cannot tell of it


def brief(value: Any) -> str:
    """A value for a message, however large or deep it is.

    >>> brief(list(range(100)))
    '[0, 1, 2, 3, 4, 5, ...]'
    """
    return _BRIEF.repr(value)


def printable(text: str) -> str:
    """Text without what a terminal would obey.

    >>> printable("cat\\x1b[2J")
    'cat�[2J'
    """
    return "".join(sign if sign.isprintable() or sign == "\n" else "�" for sign in text)


_BRIEF = reprlib.Repr()
_BRIEF.maxstring = _BRIEF.maxother = _BRIEF.maxlong = 80
