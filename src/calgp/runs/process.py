"""What a process is asked once, before it works: effects on all of it, so the edge asks and no import does."""

import ctypes

import torch

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


def flush_denormals() -> bool:
    """Take numbers below 1.2e-38 for zero, in this thread and those it starts; says whether the processor can.

    Some processors compute with such (denormal) numbers in microcode. Weights that a prior has shrunk to nothing are
    full of them, and a training whose weights die became ten times slower there, for the sake of zeros.
    """
    return torch.set_flush_denormal(True)


def tune_process() -> None:
    """All of the above, as every `calgp` command that computes and every process that it starts does."""
    keep_freed_memory()
    flush_denormals()
