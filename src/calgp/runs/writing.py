"""Files that appear whole or not at all, in folders that one process writes at a time."""

import os
import tempfile
import threading
import time
from collections.abc import Iterator
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
_owners: dict[Path, tuple[int, int]] = {}  # the process and the thread that own a folder


class Busy(CalgpError):
    """Another process writes in the folder."""


def write_whole(path: Path, data: bytes) -> None:
    """Write aside, flush to the disk, rename, flush the directory: the file appears whole or not at all."""
    handle, aside = _aside(path)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(aside, 0o644)
        os.replace(aside, path)
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise
    flush_directory(path.parent)


def _aside(path: Path) -> tuple[int, str]:
    """A new file beside `path`, locked as long as it is open: what is not locked was left by a process that died."""
    while True:
        handle, aside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=PART)
        if fcntl is None or (_locked(handle) and os.fstat(handle).st_nlink):
            return handle, aside
        os.close(handle)  # taken for a leftover, between being made and being locked


def remove_leftovers(folder: Path) -> None:
    """Remove the unfinished files of processes that died; those that are being written stay."""
    for path in folder.glob(f".*{PART}"):
        with suppress(OSError):  # removed by somebody else; Windows keeps what is open by itself
            handle = os.open(path, os.O_RDWR)
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
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
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
        raise CalgpError(
            f"Cannot write in {path}: {error.strerror or error}. Make room, or choose another folder with --out; what "
            "was written before is whole."
        ) from None
