"""What a source of pictures is, and where its files lie."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from calgp.errors import CalgpError

from .images import Colour, Images, check_form

Split = Literal["train", "test"]


@dataclass(frozen=True, kw_only=True)
class Source(ABC):
    """A named set of labelled pictures; `classes`, `channels` and `size` are None where only the files can tell."""

    name: str
    description: str
    classes: int | None = None
    channels: int | None = None
    size: int | None = None
    splits: tuple[Split, ...] = ("train", "test")
    fetchable: bool = False  # whether `download` knows a host of it

    @abstractmethod
    def load(self, split: Split, directory: Path | None = None) -> Images:
        """The pictures of one part; `directory` as for `data_directory`."""

    @abstractmethod
    def is_here(self, directory: Path | None = None) -> bool:
        """Whether the files are there to be loaded."""

    def check_split(self, split: str) -> None:
        if split not in self.splits:
            parts = " and ".join(map(repr, self.splits))
            raise CalgpError(
                f"{self.name} has no {split!r} part, only {parts}; load that one, or train on another set."
            )


@dataclass(frozen=True)
class Placed(Source):
    """Somebody's own pictures at a path, decoded to `size` and `colour`; what else there is to know the files tell."""

    path: Path
    colour: Colour | None = None
    classes: int | None = field(init=False, default=None)
    channels: int | None = field(init=False, default=None)
    splits: tuple[Split, ...] = field(init=False, default=("train", "test"))
    fetchable: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        check_form(self.size, self.colour)


def data_directory(option: Path | None = None) -> Path:
    """Where image sets are kept: `option`, else $CALGP_DATA, else calgp's folder in the user's cache."""
    if option is not None:
        return Path(option).expanduser()
    if named := os.environ.get("CALGP_DATA"):
        return Path(named).expanduser()
    return cache_directory()


def cache_directory() -> Path:
    """calgp's folder in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "calgp"
