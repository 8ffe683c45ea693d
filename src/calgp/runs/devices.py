"""Where a run runs, by the names that users give."""

import atexit
import os
from datetime import timedelta

from lightning_fabric import Fabric
from lightning_fabric.accelerators import CPUAccelerator, CUDAAccelerator, MPSAccelerator
from lightning_fabric.strategies import DDPStrategy
from torch import distributed
from torch.distributed import distributed_c10d

from calgp.errors import CalgpError, OneRankError

ACCELERATORS = {"cpu": CPUAccelerator, "cuda": CUDAAccelerator, "mps": MPSAccelerator}
STARTING = timedelta(minutes=5)  # for the processes of a run to find each other
WORKING = timedelta(minutes=30)  # for one of them to wait for the others' part of a step, or for rank 0's own work


def one_device(fabric: Fabric | None) -> Fabric:
    """The Fabric that was given, or one on the best device of this machine."""
    return Fabric(accelerator="auto", devices=1) if fabric is None else fabric


def open_device(device: str, precision: str = "32-true", *, processes: int = 1) -> Fabric:
    """Fabric on `device` (auto, cpu, cuda, cuda:1, mps …) in a floating type; what it refuses is the user's error.

    With several `processes` this one starts the others, each with the same command line. Those that torchrun has
    started, on one machine or on many, find each other.
    """
    accelerator, _, index = device.partition(":")
    here = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if ranks() > 1 else processes
    nodes = ranks() // here if ranks() > 1 else 1
    if processes > 1 and ranks() > 1:
        raise CalgpError(f"--devices {processes} starts processes itself; torchrun has done so, leave it out.")
    if index and here * nodes > 1:
        raise CalgpError(f"--device {device} is one for several processes; give {accelerator}, and each has its own.")
    # `fit` itself keeps the buffers that move the same on all ranks
    strategy = DDPStrategy(broadcast_buffers=False, timeout=STARTING) if here * nodes > 1 else "auto"
    try:
        devices = [int(index)] if index else here
        fabric = Fabric(
            accelerator=accelerator, strategy=strategy, devices=devices, num_nodes=nodes,
            precision=precision,  # type: ignore[arg-type]
        )  # fmt: skip
        if nodes == 1 and restarted() and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            _meet_again("nccl" if fabric.device.type == "cuda" else "gloo")
        fabric.launch()
        if distributed.is_initialized():
            distributed_c10d._set_pg_timeout(WORKING, distributed.group.WORLD)  # type: ignore[arg-type]
            # while Python still runs: threads of gloo that outlive it may abort the process
            atexit.register(lambda: distributed.is_initialized() and distributed.destroy_process_group())
    except distributed.DistError as error:
        raise OneRankError(
            f"Rank {os.environ.get('RANK', 0)} has not met the others within {STARTING.total_seconds():.0f} seconds "
            f"({str(error).splitlines()[0][:200]}). One of them has ended or was not started: look at its output, end "
            "all, and start them again with the same MASTER_ADDR and MASTER_PORT."
        ) from None
    except Exception as error:  # no such accelerator, no such precision
        raise CalgpError(_refusal(device, precision, error)) from None
    return fabric


def _refusal(device: str, precision: str, error: Exception) -> str:
    """Why a device or a precision cannot be used, and which devices this machine has."""
    kind = device.partition(":")[0]
    there = [name for name in ("cpu", "cuda", "mps") if ACCELERATORS[name].is_available()]
    if kind in ACCELERATORS and kind not in there:
        return f"Invalid --device {device}: this machine has no {kind} that torch can use; it has {', '.join(there)}."
    if kind not in (*ACCELERATORS, "auto", "gpu", "tpu"):
        return f"Invalid --device {device}: must be auto, cpu, cuda, cuda:1 or mps; found: {', '.join(there)}."
    reason = str(error).strip().partition("\n")[0].rstrip(".!")
    if reason.startswith("Precision"):
        return f"Invalid --precision {precision}: must be 32-true, 64-true, bf16-mixed, 16-mixed or one of Fabric's."
    return f"Cannot run on device {device} with precision {precision}: {reason}."


def _meet_again(backend: str) -> None:
    """Let processes that torchrun has restarted on one machine find each other, and not where the dead ones were.

    The store of torchrun (torch 2.13) outlives a restart, and gloo reads the addresses of the first start in it. On
    several machines torchrun's TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 helps; their restart counts need not be the same.
    """
    place = distributed.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store = distributed.PrefixStore(f"calgp/{os.environ['TORCHELASTIC_RESTART_COUNT']}", place)
    distributed.init_process_group(backend, store=store, rank=int(os.environ["RANK"]), world_size=ranks())


def ranks() -> int:
    """How many processes torchrun has started to do this together; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", 1)) if "TORCHELASTIC_RUN_ID" in os.environ else 1


def restarted() -> bool:
    """Whether torchrun has started this process again, since one of the run's had died."""
    return ranks() > 1 and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
