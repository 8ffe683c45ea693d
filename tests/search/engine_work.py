"""Work for engines to do: every beginning and every end leaves a file, so that they can be counted."""

import os
import signal
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from calgp.errors import CalgpError
from calgp.search.engines import Engine
from calgp.search.shards import ShardTask


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


def marked(work, folder: Path, job, *, watch) -> None:
    """Work whose every beginning and end leaves a file."""
    name = job.number if isinstance(job, ShardTask) else job.key
    (folder / f"{name}.begun.{uuid.uuid4().hex}").touch()
    work(job, watch=watch)
    (folder / f"{name}.done.{uuid.uuid4().hex}").touch()


def killed_once(work, folder: Path, number: int, task: ShardTask, *, watch) -> None:
    """Work whose process gets SIGKILL in the first attempt at one shard, when half of it is done."""
    first = not list(folder.glob(f"{number}.begun.*")) and task.number == number

    def kill(share: float) -> None:
        if first and share >= 0.5:
            os.kill(os.getpid(), signal.SIGKILL)

    marked(work, folder, task, watch=kill)


@dataclass(frozen=True)
class Killing(Engine):
    """An engine of which a process is killed once, in the middle of a shard."""

    engine: Engine
    folder: Path
    number: int

    def run(self, work, tasks, *, ended, watch) -> None:
        self.engine.run(partial(killed_once, work, self.folder, self.number), tasks, ended=ended, watch=watch)


@dataclass(frozen=True)
class Marking(Engine):
    """An engine whose work is counted."""

    engine: Engine
    folder: Path

    def run(self, work, tasks, *, ended, watch) -> None:
        self.engine.run(partial(marked, work, self.folder), tasks, ended=ended, watch=watch)

    def counted(self, what: str) -> list[int]:
        """How often each job was begun or done, in order."""
        names = [path.name.split(".")[0] for path in self.folder.glob(f"*.{what}.*")]
        return sorted(map(names.count, set(names)))
