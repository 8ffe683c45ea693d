"""Files that appear whole or not at all, in folders that one process writes at a time."""

import errno
import os
import secrets
import stat
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from calgp.errors import CalgpError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

PART = ".part"  # ends the name of a file that is not whole yet
LOCK = ".lock"
GRACE = 2.0  # seconds: a process that was killed a moment ago, or its pool, may still be going
REMEDIES = dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "make room there, or ") | dict.fromkeys(
    (errno.EACCES, errno.EPERM), "allow it there, or "
)
_owners: dict[Path, tuple[int, int]] = {}  # the process and the thread that own a folder


class Busy(CalgpError):
    """Another process writes in the folder."""


def write_whole(path: Path, data: bytes | Iterable[bytes]) -> None:
    """Write aside, flush to the disk, rename, flush the directory: the file appears whole or not at all.

    A link stays and its target is written; a file that is there keeps its permissions, a new one has those that the
    umask leaves. What is no regular file (a device, a pipe, standard output) is written to, since it has no content to
    lose. Unfinished files of the same name, left by processes that died, are removed.
    """
    chunks = (data,) if isinstance(data, bytes | bytearray | memoryview) else data
    if _is_stream(path):
        with open(path, "wb") as stream:
            stream.writelines(chunks)
        return
    path = Path(os.path.realpath(path))
    if path.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    before = os.stat(path) if path.exists() else None
    remove_leftovers(path.parent, _beside(path))
    handle, aside = _aside(path)
    try:
        with os.fdopen(handle, "wb") as file:
            file.writelines(chunks)
            file.flush()
            os.fsync(file.fileno())
        if before is not None:
            with suppress(PermissionError):  # somebody else's file in a folder that is ours too
                if hasattr(os, "chown") and (before.st_uid, before.st_gid) != (os.geteuid(), os.getegid()):
                    os.chown(aside, before.st_uid, before.st_gid)
                os.chmod(aside, stat.S_IMODE(before.st_mode))
        os.replace(aside, path)
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise
    flush_directory(path.parent)


def _is_stream(path: Path) -> bool:
    """Whether a path leads to what is no regular file, or to an open file of a process (/dev/stdout)."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return False
    if stat.S_ISREG(mode):
        return path.is_symlink() and any(
            os.path.realpath(folder).startswith("/proc/")
            for folder in (path.parent, os.path.dirname(os.readlink(path)))
        )
    return not stat.S_ISDIR(mode)


def _beside(path: Path) -> str:
    """What the names of a file's unfinished versions begin with: short, where names may have 255 bytes."""
    return f".{path.name[:48]}."


def _aside(path: Path) -> tuple[int, str]:
    """A new file beside `path`, locked as long as it is open: what is not locked was left by a process that died."""
    while True:
        aside = os.path.join(path.parent, f"{_beside(path)}{secrets.token_hex(8)}{PART}")
        # not tempfile's, whose mode is 0600 whatever the umask
        handle = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
        if fcntl is None or (_locked(handle) and os.fstat(handle).st_nlink):
            return handle, aside
        os.close(handle)  # taken for a leftover, between being made and being locked


def remove_leftovers(folder: Path, prefix: str = ".") -> None:
    """Remove the unfinished files of processes that died; those that are being written stay."""
    with suppress(OSError):
        for name in os.listdir(folder):
            if name.startswith(prefix) and name.endswith(PART):
                _remove_leftover(folder / name)


def _remove_leftover(path: Path) -> None:
    with suppress(OSError):  # removed by somebody else; Windows keeps what is open by itself
        handle = os.open(path, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
        try:
            if fcntl is not None and _locked(handle):
                path.unlink()
        finally:
            os.close(handle)
        if fcntl is None:
            path.unlink()


def flush_directory(path: Path) -> None:
    """Make the names in a directory last, as fsync does for what is in a file. Windows has no such call."""
    if fcntl is not None:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_files(folder: Path, files: Mapping[str, bytes | str]) -> None:
    """Write files, each whole or not at all, into a folder that is made if need be."""
    with wrap_os_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder)
        for name, content in files.items():
            write_whole(folder / name, content.encode("utf-8", "replace") if isinstance(content, str) else content)


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Be the only one who writes in a folder, which is made if need be; a second process, or thread, is refused.

    The lock is the operating system's, on the file .lock: it ends with the process, however that ends. Who owns a
    folder may ask again. File systems without locks have none here either.
    """
    with wrap_os_errors(folder):
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            flush_directory(folder.parent)
    me, path = (os.getpid(), threading.get_ident()), folder.resolve()
    if _owners.get(path) == me:
        yield
        return
    with wrap_os_errors(folder):
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _wait_for(handle, folder)
        _owners[path] = me
        remove_leftovers(folder)
        yield
    finally:
        if _owners.get(path) == me:
            del _owners[path]
        os.close(handle)


def _wait_for(handle: int, folder: Path) -> None:
    deadline = time.monotonic() + GRACE
    while not _locked(handle):
        if time.monotonic() > deadline:
            raise Busy(f"{folder} is being written by another process; wait for its end, or end it.")
        time.sleep(0.05)


def _locked(handle: int) -> bool:
    """Whether the lock of an open file is now ours, or there are no locks."""
    try:
        if fcntl is not None:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        else:
            import msvcrt

            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
    except (BlockingIOError, PermissionError):
        return False
    except OSError:  # a file system without locks
        return True
    return True


@contextmanager
def wrap_os_errors(path: Path) -> Iterator[None]:
    """Failures of the file system, as one clear sentence."""
    try:
        yield
    except OSError as error:
        remedy = f"{REMEDIES.get(error.errno or 0, '')}choose another place (--out for most commands)"
        raise CalgpError(
            f"Cannot write in {path}: {error.strerror or error}. {remedy[0].upper()}{remedy[1:]}; what was written "
            "before is whole."
        ) from None
