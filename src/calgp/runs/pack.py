"""A run folder as one file: a plain tar of its files behind a manifest with the SHA-256 of each.

The same folder always makes the same bytes. Reading trusts nothing: a file is taken only if every byte is what `pack`
would have written, so there are no links, no paths that lead elsewhere and nothing that unpacks to more than it is.
"""

import hashlib
import json
import os
import re
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated

from pydantic import Field

from calgp.errors import CalgpError, path_error, short_repr
from calgp.runs.folder import RunFolder
from calgp.runs.reading import LARGEST_JSON
from calgp.runs.record import Text, Whole, parse, to_json
from calgp.runs.writing import wrap_os_errors, write_whole

FORMAT = "calgp-pack-1"
MANIFEST = "calgp-pack.json"
BLOCK = tarfile.BLOCKSIZE
END = bytes(2 * BLOCK)  # of a tar file
CHUNK = 2**20
MOST_FILES = 10_000
PART = r"(?!\.)[^/\\:\x00-\x1f\x7f]+"  # of a path: visible, so neither . nor .., and a plain name everywhere
NAME = re.compile(rf"{PART}(/{PART}){{0,7}}")


@dataclass(frozen=True)
class PackedFile:
    """A file of the run: its path in the folder, its length and its SHA-256."""

    name: Text
    size: Whole
    sha256: Text


@dataclass(frozen=True)
class PackManifest:
    """The files of a packed run, in the order in which they follow."""

    format: Text
    files: Annotated[tuple[PackedFile, ...], Field(max_length=MOST_FILES)]


class Damaged(CalgpError):
    """A file is not, byte for byte, what `pack` would have written; `why`: what is wrong with it."""

    def __init__(self, file: Path, why: str) -> None:
        super().__init__(f"{file} is damaged, or no file of `calgp pack` ({why}); copy it again. Nothing was written.")
        self.why = why


def pack(folder: RunFolder, file: Path) -> PackManifest:
    """Write a run folder as one file; hidden files and whatever is no regular file are left out, links are refused."""
    card = folder.card()
    if card.members:
        raise CalgpError(f"{folder.path} is an ensemble, which has no model of its own; pack its members one by one.")
    if not (folder.finished or folder.interrupted):
        raise CalgpError(f"{folder.path} has neither a model nor a checkpoint; train it first, then pack it.")
    with wrap_os_errors(folder.path):
        manifest = PackManifest(FORMAT, tuple(_describe(folder.path, path) for path in _files(folder.path)))
    if file.is_dir():
        raise CalgpError(f"Invalid file {file}: it is a folder; give the name of a file, such as {file / 'run.calgp'}.")
    with wrap_os_errors(file.parent):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, _chunks(folder.path, manifest))
    return manifest


def unpack(file: Path, target: Path) -> RunFolder:
    """Write a packed run as a new folder, which appears whole and verified or not at all."""
    if not file.is_file():
        raise path_error("packed run", file)
    check_new(target)
    with wrap_os_errors(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".unpack-") as aside, open(file, "rb") as packed:
            made = Path(aside) / "run"
            made.mkdir()
            _unpack_into(made, packed, file)
            RunFolder(made).card()
            check_new(target)  # once more
            made.rename(target)
    return RunFolder(target)


def check_new(target: Path) -> None:
    """Refuse a folder that is there."""
    if target.exists() or target.is_symlink():
        raise CalgpError(f"Invalid folder {target}: it exists, and nothing is overwritten; choose a new name.")


# --- writing ---------------------------------------------------------------------------------------------------------


def _files(root: Path) -> list[Path]:
    """The visible files below a folder, by name."""
    found = []
    for path in sorted(root.rglob("*"), key=lambda each: each.relative_to(root).as_posix()):
        name = path.relative_to(root).as_posix()
        if any(part.startswith(".") for part in path.relative_to(root).parts):
            continue
        if path.is_symlink():
            raise CalgpError(f"{path} is a link, which cannot be packed; put the file itself there.")
        if path.is_file():
            _check_name(name, str(path))
            found.append(path)
    if len(found) > MOST_FILES:
        raise CalgpError(f"{root} has {len(found):,} files; a packed run has at most {MOST_FILES:,}.")
    return found


def _describe(root: Path, path: Path) -> PackedFile:
    digest, size = hashlib.sha256(), 0
    for chunk in _read(path):
        digest.update(chunk)
        size += len(chunk)
    return PackedFile(path.relative_to(root).as_posix(), size, digest.hexdigest())


def _chunks(root: Path, manifest: PackManifest) -> Iterator[bytes]:
    """The bytes of the tar file."""
    text = _manifest_bytes(manifest)
    yield _header(MANIFEST, len(text))
    yield text + _padding(len(text))
    for each in manifest.files:
        yield _header(each.name, each.size)
        digest = hashlib.sha256()
        for chunk in _read(root / each.name):
            digest.update(chunk)
            yield chunk
        if digest.hexdigest() != each.sha256:
            raise CalgpError(f"{root / each.name} has changed while it was packed; wait for its writer and pack again.")
        yield _padding(each.size)
    yield END


def _manifest_bytes(manifest: PackManifest) -> bytes:
    text = (json.dumps(to_json(manifest), indent=1, ensure_ascii=False) + "\n").encode()
    if len(text) > LARGEST_JSON:
        raise CalgpError(f"The list of files would have {len(text):,} bytes; {LARGEST_JSON:,} can be read again.")
    return text


def _header(name: str, size: int) -> bytes:
    """The one block that stands in front of a regular file in a tar file."""
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = size, 0o644
    try:
        return entry.tobuf(tarfile.USTAR_FORMAT, "utf-8", "strict")
    except ValueError as error:
        raise CalgpError(f"{short_repr(name)} of {size:,} bytes cannot be in a tar file ({error}).") from None


def _padding(size: int) -> bytes:
    return bytes(-size % BLOCK)


def _read(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            yield chunk


def _check_name(name: str, where: str) -> None:
    if not NAME.fullmatch(name):
        raise CalgpError(f"Invalid file name {short_repr(name)} in {where}: must be a plain path; nothing was written.")


# --- reading ---------------------------------------------------------------------------------------------------------


def _unpack_into(folder: Path, packed: IO[bytes], file: Path) -> None:
    """Write the files of a packed run; all of it must be as `pack` writes it."""
    whole = os.fstat(packed.fileno()).st_size
    manifest = _read_manifest(packed, whole, file)
    needed = sum(each.size for each in manifest.files)
    if needed > whole:  # nothing is compressed, so the file must hold it all
        raise Damaged(file, f"it claims {needed:,} bytes of files, and has {whole:,} itself")
    if needed > (room := shutil.disk_usage(folder).free):
        raise CalgpError(f"{file} holds {needed:,} bytes, and there is room for {room:,}; unpack elsewhere.")
    for each in manifest.files:
        if packed.read(BLOCK) != _header(each.name, each.size):
            raise Damaged(file, f"{short_repr(each.name)} is not where the manifest says")
        (folder / each.name).parent.mkdir(parents=True, exist_ok=True)
        digest, left = hashlib.sha256(), each.size
        with open(folder / each.name, "xb") as out:
            while left and (chunk := packed.read(min(CHUNK, left))):
                digest.update(chunk)
                out.write(chunk)
                left -= len(chunk)
            out.flush()
            os.fsync(out.fileno())
        if left or digest.hexdigest() != each.sha256 or packed.read(len(_padding(each.size))) != _padding(each.size):
            raise Damaged(file, f"{short_repr(each.name)} is not what was packed: its checksum differs")
    if packed.read(len(END) + 1) != END:
        raise Damaged(file, "it does not end where the last file ends")


def _read_manifest(packed: IO[bytes], whole: int, file: Path) -> PackManifest:
    header = packed.read(BLOCK)
    digits = header[124:135]
    size = int(digits, 8) if re.fullmatch(rb"[0-7]{11}", digits) else -1
    if not 0 <= size <= min(LARGEST_JSON, whole) or header != _header(MANIFEST, size):
        raise Damaged(file, "it does not begin with the manifest of a packed run")
    text, padding = packed.read(size), packed.read(-size % BLOCK)
    try:
        manifest = parse(PackManifest, json.loads(text.decode("utf-8")))
    except (ValueError, RecursionError, CalgpError) as error:
        raise Damaged(file, f"its manifest cannot be read: {str(error)[:200]}") from None
    if manifest.format != FORMAT:
        raise CalgpError(f"{file} is of format {short_repr(manifest.format)}; this version reads {FORMAT!r}.")
    names = [each.name for each in manifest.files]
    for name in names:
        _check_name(name, str(file))
    parents = {parent.as_posix().lower() for name in names for parent in Path(name).parents}
    if len({name.lower() for name in names} | parents) != len(names) + len(parents):
        raise Damaged(file, "two of its files have the same name")
    if text != _manifest_bytes(manifest) or padding != _padding(size):
        raise Damaged(file, "its manifest is not as it was written")
    return manifest
