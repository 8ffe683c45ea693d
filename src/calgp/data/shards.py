"""Images in tar archives, as WebDataset has them: NAME.jpg beside NAME.cls or NAME.json, many to a shard."""

import glob
import io
import re
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from calgp.errors import CalgpError

from .files import UNLABELLED
from .folder import Folder
from .formats import read_lines
from .order import ShardOrder
from .path_source import PART_NAMES, Layout, Part, PathSource, find_parts
from .shard_index import ShardFiles, forget_members
from .source import Split

WINDOW = 4096  # images that are shuffled together
CLASSES_FILE = "classes.txt"
_MAX_SHARDS = 100_000


@dataclass(frozen=True)
class Shards(PathSource):
    """The images of tar files, which stay there: `path` is a pattern, or a folder of train-*.tar and test-*.tar.

    A pattern may hold * and ?, and numbers {0000..0099}; the images that it names are split (`test_share`). Labels are
    numbers: the text of NAME.cls, or "label" or "cls" in NAME.json. Lines of a file classes.txt beside the shards name
    them. Other members, including links, are left out; nothing is unpacked.

    An epoch visits the shards in random order, each from its beginning to its end, and shuffles windows of 4,096
    images, so that storage is read forwards. The images of a shard should not be sorted by class.
    """

    workers: int | None = 2
    name: str = field(init=False, default="shards")
    description: str = field(init=False, default="tar files of NAME.jpg with NAME.cls: DIR, or train-{0000..0099}.tar")

    def own_parts(self) -> dict[Split, Path]:
        if not self.path.is_dir():
            return {}
        patterns = [self.path / f"{name}-*.tar" for name in PART_NAMES]
        there = [(pattern, name) for pattern, name in zip(patterns, PART_NAMES, strict=True) if shard_paths(pattern)]
        return find_parts(*zip(*there, strict=True)) if there else {}

    def layout(self) -> Layout:
        own = self.own_parts()
        parts: dict[Split, Part] = {split: _part(shard_paths(pattern)) for split, pattern in own.items()}
        if parts:
            return self._own_layout(_classes(list(parts.values())), parts)
        paths = shard_paths(self.path)
        if not paths:
            raise CalgpError(
                f"There are no shards {self.path}; give a folder of train-*.tar and test-*.tar, or a pattern such as "
                "shards/train-{0000..0099}.tar."
            )
        whole = _part(paths)
        return self._split_layout(_classes([whole]), whole)

    def is_available(self, directory: Path | None = None) -> bool:
        return self.path.is_dir() or bool(shard_paths(self.path))


def _part(paths: Sequence[Path]) -> Part:
    files = ShardFiles.of(paths)
    if (files.labels == UNLABELLED).any():
        name = files.names[int((files.labels == UNLABELLED).nonzero()[0])]
        key = name.partition("/")[2].rpartition(".")[0]
        raise CalgpError(f"{name} in {files.place} has no label; put {key}.cls or {key}.json beside it.")
    return Part.whole(files, ShardOrder(tuple(files.starts.tolist()), (), WINDOW))


def _classes(parts: Sequence[Part]) -> tuple[str, ...]:
    """The lines of classes.txt, or numbers."""
    count = 1 + max(int(part.files.labels.max()) for part in parts)
    file = Path(parts[0].files.place) / CLASSES_FILE
    if not file.is_file():
        return tuple(map(str, range(max(count, 2))))
    names = read_lines(file)
    if count > len(names):
        raise CalgpError(f"{file} names {len(names)} classes, but there are labels up to {count - 1}; add the others.")
    return names


def shard_paths(pattern: Path) -> list[Path]:
    """The files that a pattern names: numbers {0000..0099}, each of which must be there, then * and ?."""
    texts = [str(pattern)]
    while texts and (found := re.search(r"\{(\d+)\.\.(\d+)\}", texts[0])):
        first, last = found.groups()
        if not 0 <= int(last) - int(first) < _MAX_SHARDS // len(texts):
            raise CalgpError(f"Invalid pattern {pattern}: must name 1 to {_MAX_SHARDS} shards, such as {{0000..0099}}.")
        numbers = [f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1)]
        texts = [text.replace(found[0], number, 1) for text in texts for number in numbers]
    named = [Path(path) for text in texts for path in (sorted(glob.glob(text)) if glob.has_magic(text) else [text])]
    if missing := [path for path in named if not path.is_file()]:
        if len(missing) == len(named):
            return []
        raise CalgpError(f"The shard {missing[0]} is missing; {len(named) - len(missing)} of {len(named)} are there.")
    return named


def write_shards(
    folder: Path, out: Path, *, images_per_shard: int, watch: Callable[[int, int], None] = lambda done, total: None
) -> dict[str, int]:
    """Write the images of a folder, as they are, to `out/train-000000.tar` … and `out/test-…`; returns their counts.

    They are shuffled once, always alike, so the same folder makes the same bytes. `out/classes.txt` names the labels.
    """
    if images_per_shard < 1:
        raise CalgpError(f"Invalid images_per_shard={images_per_shard}: must be at least 1, such as 10000.")
    if out.exists() and any(out.iterdir()):
        raise CalgpError(f"{out} is not empty; write shards into a new folder.")
    layout = Folder(folder).layout()
    if strange := [name for name in layout.classes if not name.isprintable() or name != name.strip()]:
        raise CalgpError(
            f"Invalid class {strange[0]!r} of {folder}: must be printable, without outer spaces; rename it."
        )
    out.mkdir(parents=True, exist_ok=True)
    (out / CLASSES_FILE).write_text("".join(f"{name}\n" for name in layout.classes), "utf-8")
    total = sum(len(part.numbers) for part in layout.parts.values())
    for split, part in layout.parts.items():
        order = torch.randperm(len(part.numbers), generator=torch.Generator().manual_seed(0))
        for shard, numbers in enumerate(part.numbers[order].split(images_per_shard)):
            paths = (Path(part.files.place, part.files.names[number]) for number in numbers.tolist())
            images = zip(paths, part.files.labels[numbers].tolist(), strict=True)
            _write_shard(out / f"{split}-{shard:06}.tar", images, first=shard * images_per_shard)
            watch(len(numbers), total)
    return {split: len(part.numbers) for split, part in layout.parts.items()}


def _write_shard(path: Path, images: Iterator[tuple[Path, int]], first: int) -> None:
    temporary = path.with_suffix(".part")
    with tarfile.open(temporary, "w", format=tarfile.USTAR_FORMAT) as archive:
        for number, (image, label) in enumerate(images, first):
            for suffix, content in ((image.suffix.lower(), image.read_bytes()), (".cls", str(label).encode())):
                member = tarfile.TarInfo(f"{number:09}{suffix}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
            forget_members(archive)
    temporary.replace(path)
