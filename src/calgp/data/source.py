"""What a source of images is, and where its files are."""

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from calgp.errors import CalgpError

from .images import Images

Split = Literal["train", "val", "test"]


@dataclass(frozen=True, kw_only=True)
class Source(ABC):
    """A named set of labelled images; `classes`, `channels` and `size` are None if only the files can tell."""

    name: str
    description: str
    classes: int | None = None
    channels: int | None = None
    size: int | None = None
    splits: tuple[Split, ...] = ("train", "test")
    downloadable: bool = False

    @abstractmethod
    def load(self, split: Split, directory: Path | None = None) -> Images:
        """The images of one part; `directory` as for `data_directory`."""

    @abstractmethod
    def is_available(self, directory: Path | None = None) -> bool:
        """Whether the files are there to be loaded."""

    def validation(self) -> Images | None:
        """The images that the source itself sets apart from training and test images; most have none."""
        return None

    def check_split(self, split: str) -> None:
        if split not in self.splits:
            parts = " or ".join(map(repr, self.splits))
            raise CalgpError(f"Invalid split {split!r}: {self.name} has no {split!r} part, it must be {parts}.")


def data_directory(option: Path | None = None) -> Path:
    """Where image sets are kept: `option`, else $CALGP_DATA, else calgp's folder in the user's cache."""
    named = os.environ.get("CALGP_DATA") if option is None else option
    return Path(named).expanduser() if named else cache_directory()


def cache_directory() -> Path:
    """calgp's folder in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "calgp"
