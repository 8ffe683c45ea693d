"""Work for engines to do: every beginning and every end leaves a file, so that they can be counted."""

import os
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from calgp.errors import CalgpError


@dataclass(frozen=True)
class Errand:
    """A task; `kills` of its first attempts kill their own process."""

    folder: Path
    name: str
    kills: int = 0
    seconds: float = 0.0

    def count(self, what: str) -> int:
        return len(list(self.folder.glob(f"{self.name}.{what}.*")))

    def mark(self, what: str) -> None:
        (self.folder / f"{self.name}.{what}.{uuid.uuid4().hex}").write_text(str(os.getpid()))


def work(task: Errand, *, watch: Callable[[float], None]) -> None:
    task.mark("begun")
    if task.count("begun") <= task.kills:
        os.kill(os.getpid(), 9)
    if task.name == "bad":
        raise CalgpError("it cannot be")
    time.sleep(task.seconds)
    task.mark("done")
