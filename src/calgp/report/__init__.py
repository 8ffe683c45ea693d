"""Showing: figures of runs, and one self-contained page about them."""

from .html import write_report

__all__ = ["write_report"]
