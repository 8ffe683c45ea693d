"""What a result was computed by: versions, processor, device."""

import functools
import platform
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

import torch
from lightning_fabric import Fabric

from calgp._version import __version__
from calgp.gp.hadamard import fht
from calgp.runs.record import Count, Text, Threads


@dataclass(frozen=True)
class Environment:
    """Versions, processor, device, precision, threads and how a batch was divided: what decides the bits of a result.

    `transform` is what SORF's Hadamard transform is done by, where it is not torch.
    `command`, `started`, `python` and `platform` describe how a run was started. `resumed` lists what it was continued
    by, if that differed.
    """

    calgp: Text | None = None
    torch: Text | None = None
    transform: Text | None = None
    threads: Threads | None = None
    machine: Text | None = None
    processor: Text | None = None
    device: Text | None = None
    precision: Text | None = None
    ranks: Count | None = None
    accumulate: Count | None = None
    python: Text | None = None
    platform: Text | None = None
    command: tuple[Text, ...] | None = None
    started: Text | None = None
    resumed: tuple["Environment", ...] = ()

    def arithmetic(self) -> "Environment":
        """Only what decides the bits of a result."""
        return replace(self, python=None, platform=None, command=None, started=None, resumed=())

    def shared(self) -> dict[str, object]:
        """What all ranks must have in common."""
        names = ("calgp", "torch", "transform", "device", "precision", "accumulate")
        return {name: getattr(self, name) for name in names}

    def items(self) -> Iterator[tuple[str, object]]:
        """What is known, by name."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return ((name, value) for name, value in values if value is not None and value != ())


def arithmetic(fabric: Fabric | None = None) -> Environment:
    """What decides the bits of a prediction here, besides the run and its data."""
    return Environment(
        calgp=__version__,
        torch=torch.__version__,
        transform=transform(),
        threads=torch.get_num_threads(),
        machine=platform.machine(),
        processor=processor(),
        device=None if fabric is None else fabric.device.type,
        precision=None if fabric is None else str(fabric.strategy.precision.precision),
    )


def training_arithmetic(fabric: Fabric, accumulate: int) -> Environment:
    """What decides the bits of a training: also how a batch is divided, which changes the order of adding."""
    ranks = fabric.world_size if fabric.world_size > 1 else None
    return replace(arithmetic(fabric), ranks=ranks, accumulate=accumulate if accumulate > 1 else None)


@functools.cache
def transform() -> str | None:
    """What transforms SORF's features, where it is not torch."""
    return None if fht is None else f"fht-cpu {version('fht-cpu')}"


@functools.cache
def processor() -> str:
    """The processor's name, where the system gives it, and the instructions that torch uses of it."""
    found = re.search(r"^model name\s*:\s*(.+)$", _cpu_info(), re.MULTILINE)
    return f"{found[1] if found else platform.processor()}, {torch.backends.cpu.get_cpu_capability()}"


def emulates_bf16(cpu_info: str | None = None) -> bool:
    """Whether this is an x86 processor without bf16 instructions, on which bf16-mixed is slower than 32-true.

    >>> emulates_bf16("flags : fpu avx2 avx512f"), emulates_bf16("flags : fpu avx512f avx512_bf16"), emulates_bf16("")
    (True, False, False)
    """
    return _has_bf16(_cpu_info() if cpu_info is None else cpu_info) is False


def computes_in_bf16(device: torch.device) -> bool:
    """Whether a device has instructions for bf16, so that bf16-mixed is faster than 32-true."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "cpu" and _has_bf16(_cpu_info()) is True


def _has_bf16(cpu_info: str) -> bool | None:
    """Whether an x86 processor has bf16 instructions; None of others."""
    flags = re.search(r"^flags\s*:\s*(.+)$", cpu_info, re.MULTILINE)
    return None if flags is None else bool({"avx512_bf16", "amx_bf16"} & set(flags[1].split()))


@functools.cache
def _cpu_info() -> str:
    """What Linux says of the processor; nothing elsewhere."""
    path = Path("/proc/cpuinfo")
    return path.read_text(errors="replace") if path.is_file() else ""


def environment(computed_by: Environment | None = None) -> Environment:
    """What a run is made by, and how it was started."""
    program = Path(sys.argv[0]).name
    command = ["calgp"] if program in ("calgp", "__main__.py") else ["python", program]
    return replace(
        arithmetic() if computed_by is None else computed_by,
        python=platform.python_version(),
        platform=platform.system(),
        # as a run folder can keep it: bytes that are no UTF-8 replaced, and not without end
        command=tuple(part.encode("utf-8", "replace").decode()[:4000] for part in (*command, *sys.argv[1:])),
        started=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )
