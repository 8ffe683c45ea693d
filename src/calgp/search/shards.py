"""Folders of shards with a manifest: each shard is made by one task of an engine, and one that is made stays."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from calgp.errors import CalgpError
from calgp.runs.failures import Interrupted
from calgp.runs.reading import is_file, read_json, wrap_read_errors
from calgp.runs.record import Count, Text, parse, to_json
from calgp.runs.writing import LOCK, owned, wrap_os_errors, write_files
from calgp.search.engines import Engine, RunningTask, SerialEngine, Work

MANIFEST = "manifest.json"
INTERRUPTED = 130  # status of a command that Ctrl-C has ended
CHUNK = 2**20  # bytes


@dataclass(frozen=True)
class Shard:
    """A file of a folder of shards."""

    rows: Count
    sha256: Text


class Sharded:
    """A manifest, to be a frozen dataclass: of what the shards are, how they are cut, and which are there.

    Two that are equal but for `shards` describe the same bytes. `holds` and `command` name the content in messages,
    `file` is the name of a shard with a place for its number.
    """

    holds: ClassVar[str]
    command: ClassVar[str]
    file: ClassVar[str]
    rows: int
    rows_per_shard: int
    shards: tuple[Shard | None, ...]

    def shard_name(self, number: int) -> str:
        return self.file.format(number)

    @property
    def shard_count(self) -> int:
        """How many shards there are when all rows are done."""
        return -(-self.rows // self.rows_per_shard)

    @property
    def made(self) -> int:
        """How many shards are there."""
        return sum(each is not None for each in self.shards)

    @property
    def finished(self) -> bool:
        return len(self.shards) == self.made == self.shard_count

    def rows_of(self, shard: int) -> int:
        return min(self.rows_per_shard, self.rows - shard * self.rows_per_shard)

    def slice_of(self, shard: int) -> slice:
        """Which rows of all are in a shard."""
        return slice(shard * self.rows_per_shard, shard * self.rows_per_shard + self.rows_of(shard))


Content = TypeVar("Content")
M = TypeVar("M", bound=Sharded)


@dataclass(frozen=True, eq=False)
class ShardTask(Generic[Content]):
    """A shard to make, and what it is made of: nothing of the others, so that it is small to send."""

    number: int
    content: Content


@dataclass(frozen=True, eq=False)
class _Tasks(Sequence[ShardTask[Content]]):
    """Tasks that are made when they are asked for."""

    numbers: Sequence[int]
    content: Callable[[int], Content]

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: Any) -> Any:
        return ShardTask(self.numbers[index], self.content(self.numbers[index]))


def make_shards(
    folder: Path,
    wanted: M,
    work: Work[ShardTask[Content]],
    content: Callable[[int], Content],
    *,
    engine: Engine = SerialEngine(),
    watch: Callable[[int, int], None] = lambda more, total: None,
) -> M:
    """Let `work` write every shard that `folder` does not have yet, of the `content` of its number.

    The manifest, written here after each shard, names those that are whole: after an interruption the same call makes
    the others. The first one that fails stops all. A folder that holds anything else is refused. `watch` is told how
    many more rows are done, and how many there are.
    """
    check_folder(folder, wanted)
    with owned(folder):
        manifest = _begin(folder, wanted)
        there = {number for number, shard in enumerate(manifest.shards) if shard is not None}
        todo = [number for number in range(manifest.shard_count) if number not in there]
        done, shown = sum(map(manifest.rows_of, there)), 0

        def show(rows: int) -> None:
            nonlocal shown
            rows, shown = rows - shown, rows
            watch(rows, wanted.rows)

        def under_way(seen: Sequence[RunningTask[ShardTask[Content]]]) -> None:
            show(done + sum(round((each.share or 0) * wanted.rows_of(each.task.number)) for each in seen))

        def ended(task: ShardTask[Content], failure: str | None) -> None:
            nonlocal done, manifest
            if failure is not None:
                raise CalgpError(failure)
            manifest = with_shard(folder, manifest, task.number)
            done += manifest.rows_of(task.number)
            show(done)

        show(done)
        if todo:
            try:
                engine.run(work, _Tasks(todo, content), ended=ended, watch=under_way)
            except Interrupted as stopped:
                stopped.status = INTERRUPTED
                raise
    return manifest


def with_shard(folder: Path, manifest: M, number: int) -> M:
    """Write the manifest that also names a shard, whose file is there."""
    path = folder / manifest.shard_name(number)
    if not is_file(path):
        raise CalgpError(f"{path} was made elsewhere and is not here: all machines must see the folder at one path.")
    shards = [*manifest.shards, *[None] * (number + 1 - len(manifest.shards))]
    shards[number] = Shard(manifest.rows_of(number), sha256(path))
    manifest = replace(manifest, shards=tuple(shards))  # type: ignore[type-var]  (each is a dataclass)
    write_manifest(folder, manifest)
    return manifest


def read_manifest(folder: Path, kind: type[M]) -> M:
    """manifest.json, checked."""
    path = folder / MANIFEST
    if not is_file(path):
        raise CalgpError(f"{folder} has no {MANIFEST}, so it is no folder of {kind.holds}; `{kind.command}` makes one.")
    try:
        return parse(kind, read_json(path))
    except CalgpError as error:
        raise CalgpError(f"{path} is damaged ({str(error).rstrip('.')}); copy the folder again.") from None


def write_manifest(folder: Path, manifest: Sharded) -> None:
    write_files(folder, {MANIFEST: json.dumps(to_json(manifest), indent=1) + "\n"})


def check_folder(folder: Path, wanted: Sharded) -> None:
    """Refuse a place that holds anything but such shards."""
    with wrap_os_errors(folder):
        if folder.exists() and not folder.is_dir():
            raise CalgpError(f"Invalid --out {folder}: must be a folder, but it is a file; choose another name.")
        if folder.is_dir() and not is_file(folder / MANIFEST) and any(p.name != LOCK for p in folder.iterdir()):
            raise CalgpError(f"Invalid --out {folder}: it holds other files than {wanted.holds}; choose a new folder.")


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with wrap_read_errors(path), open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _begin(folder: Path, wanted: M) -> M:
    """The manifest to go on with: a new one, or the one that is there if it is of the same work."""
    if not is_file(folder / MANIFEST):
        write_manifest(folder, wanted)
        return wanted
    there = read_manifest(folder, type(wanted))
    for each in fields(wanted):  # type: ignore[arg-type]
        begun, asked = getattr(there, each.name), getattr(wanted, each.name)
        if each.name != "shards" and begun != asked:
            what = each.name.replace("_", " ")
            raise CalgpError(
                f"Invalid --out {folder}: it holds {wanted.holds} with other {what} ({str(begun)[:80]}, now "
                f"{str(asked)[:80]}); choose another folder, or remove this one."
            )
    kept = list(there.shards[: there.shard_count])
    for number, shard in enumerate(kept):
        path = folder / there.shard_name(number)
        if shard is not None and (not is_file(path) or sha256(path) != shard.sha256):
            kept[number] = None  # it is made again
    return replace(there, shards=tuple(kept))  # type: ignore[type-var]
