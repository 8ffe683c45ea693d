"""How the process asks the system for memory: an effect, so it is asked for at the edge and never on import."""

import ctypes

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of glibc's mallopt


def keep_freed_memory() -> bool:
    """Let the C library keep the memory of freed tensors for the next ones; says whether it could.

    By default glibc gives every freed block above 32 MB, and the end of its heap, back to the system, which then has to
    zero each page again when the next step asks for as much: a third of a training step with large activations or a
    large Ω. The process keeps what it once needed instead; its peak stays the same. Other C libraries are left alone.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # not glibc
        return False
    return bool(mallopt(_MMAP_MAX, 0) and mallopt(_TRIM_THRESHOLD, 2**31 - 1))
