"""Showing: figures of runs, and one self-contained page about them."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .html import write_report

__all__ = ["write_report"]


def __getattr__(name: str) -> Any:
    if name in __all__:  # fetched when it is used: words and advice need no matplotlib
        from . import html

        return html.write_report
    raise AttributeError(f"module 'calgp.report' has no attribute {name!r}")
