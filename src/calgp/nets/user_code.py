"""Functions that a user names, by file or by module: the one place where a user's own code is imported."""

import pkgutil
import runpy
from collections.abc import Callable
from typing import Any

from calgp.errors import CalgpError, one_line


def import_function(place: str, asked: str) -> Callable[[], Any]:
    """The function `file.py:name` or `module:name`; errors begin with what was `asked`. A run folder names no code."""
    path, _, function = place.rpartition(":")
    try:
        make = runpy.run_path(path)[function] if path.endswith(".py") else pkgutil.resolve_name(place)
    except KeyError:
        raise CalgpError(f"{asked}: {path} has no function {function!r}.") from None
    except Exception as error:  # the file is the user's: it may raise anything
        raise CalgpError(f"{asked}: {path} cannot be imported ({one_line(error)}).") from None
    if not callable(make):
        raise CalgpError(f"{asked}: {function} must be a function that makes a network.")
    return make
