"""The one exception that calgp raises on purpose, and how it quotes what a file or a user says."""

import reprlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any


class CalgpError(Exception):
    """An error that the user can fix: the message says what was wrong, what was expected and what to do.

    Raised for files, options and data that cannot be used. The command line prints it and exits with its `status`.

    >>> import calgp
    >>> try:
    ...     calgp.load("no-such-run")
    ... except calgp.CalgpError as error:
    ...     print("no-such-run" in str(error))
    True
    """

    status = 1
    on_one_rank = False  # whether rank 0 cannot print it: see `OneRankError`


class OneRankError(CalgpError):
    """What failed on one of several ranks only: that rank prints it."""

    on_one_rank = True


def short_repr(value: Any) -> str:
    """A value for a message, however large or deep it is.

    >>> short_repr(list(range(100)))
    '[0, 1, 2, 3, 4, 5, ...]'
    """
    return _REPR.repr(value)


def name_error(missing: str, name: object, known: Iterable[str], *, more: str = "") -> CalgpError:
    """The error of a name that is not there, with the nearest one that is; `more` is said behind those that are known.

    >>> name_error("There is no method", "cnn-mdc", ["cnn", "cnn-mcd"])
    CalgpError("There is no method 'cnn-mdc'; did you mean 'cnn-mcd'? Known: cnn, cnn-mcd.")
    """
    known = list(known)
    near = nearest(str(name), known)
    hint = f"did you mean {near!r}? Known" if near else "known"
    return CalgpError(
        f"{missing} {short_repr(name)}; {hint}: {', '.join([*known, *([more] if more else [])]) or 'none'}."
    )


def path_error(what: str, path: Path) -> CalgpError:
    """The error of a path that is not there, with the nearest one beside it that is."""
    beside = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
    near = nearest(path.name, beside)
    return CalgpError(f"There is no {what} {path}" + (f"; did you mean {path.parent / near}?" if near else "."))


def one_line(error: BaseException) -> str:
    """The kind of an error of somebody else's code, and the first line of what it says.

    >>> one_line(ValueError("no\\nyes"))
    'ValueError: no'
    """
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most like this one, if any is.

    >>> nearest("mnits", ["mnist", "cifar10"])
    'mnist'
    """
    import difflib

    return next(iter(difflib.get_close_matches(name[:80].lower(), list(known), n=1)), None)


def printable(text: str) -> str:
    """Text without what a terminal would obey.

    >>> printable("cat\\x1b[2J")
    'cat�[2J'
    """
    return "".join(sign if sign.isprintable() or sign == "\n" else "�" for sign in text)


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 80
