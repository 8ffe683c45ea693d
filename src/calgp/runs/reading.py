"""Files of a run folder, read as if an enemy had made them: no header decides how much memory is taken.

What a file may cost is limited by its own size, before it is opened further: JSON by `LARGEST_JSON`, tensors by what
lies on the disk, a model by the tensors that lie beside its description.
"""

import hashlib
import json
import os
import re
import stat
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.modules import module as hooked
from torch.overrides import TorchFunctionMode

from calgp.errors import CalgpError, short_repr
from calgp.gp import Model
from calgp.nets import Task
from calgp.run import Run
from calgp.runs.build import network
from calgp.runs.older import current_name, former_shapes
from calgp.runs.record import parse
from calgp.runs.results import Checkpoint

LARGEST_JSON = 2**24  # bytes of a JSON file; parsed it takes up to 30 times as much
LARGEST_LOG = 2**25  # bytes of log.jsonl, which is read line by line
LARGEST_LINE = 2**16
LARGEST_HEADER = 2**24  # bytes of names, shapes and JSON at the beginning of a file of tensors
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
OPTIMISER = re.compile(r"optimiser\.([0-9]{1,6})\.(step|exp_avg|exp_avg_sq|momentum_buffer)")
OPTIMISER_STATE = {  # of a parameter
    "adam": {"step", "exp_avg", "exp_avg_sq"}, "sgd": {"momentum_buffer"}, "muon": {"step", "momentum_buffer"},
}  # fmt: skip
ADVICE = "copy it again or train again"
MALFORMED = (LookupError, TypeError, AttributeError, EOFError, zlib.error)  # of content that is not as it was written


class Stored(NamedTuple):
    """A tensor that a file holds, by its header."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class Header(NamedTuple):
    """The beginning of a file of tensors: what it holds, the JSON stored beside it, its `digest` if it has one."""

    tensors: dict[str, Stored]
    metadata: dict[str, Any]
    digest: str | None


def is_file(path: Path) -> bool:
    """Whether there is a regular file (no device, no pipe); False where the question itself is refused."""
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that is too long, a folder that may not be entered, a NUL
        return False


@contextmanager
def wrap_read_errors(path: Path) -> Iterator[None]:
    """What goes wrong in reading a file, as one clear sentence."""
    try:
        yield
    except (OSError, ValueError, RuntimeError, SafetensorError, CalgpError, *MALFORMED) as error:
        why = "it is nested too deep" if isinstance(error, RecursionError) else str(error)
        why = f"a part of it is not as it is written: {error!r}" if isinstance(error, MALFORMED) else why
        raise CalgpError(f"{path} cannot be read ({why[:300]}); {ADVICE}.") from None


def read_bytes(path: Path, most: int) -> bytes:
    """A regular file of at most `most` bytes."""
    with open(path, "rb", opener=_without_waiting) as file:
        _check_size(file.fileno(), most)
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"it has more than {most} bytes")
    return content


def read_json(path: Path) -> Any:
    """The value in a JSON file; its texts can be written again (no half of a surrogate pair)."""
    with wrap_read_errors(path):
        content = read_bytes(path, LARGEST_JSON)
        value = json.loads(content.decode("utf-8"))
        if b"\\u" in content:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        return value


def read_lines(path: Path) -> list[str]:
    """The lines of a log; what is no UTF-8 in it is replaced, and a line that is too long is left out."""
    with wrap_read_errors(path):
        text = read_bytes(path, LARGEST_LOG).decode("utf-8", "replace")
    return [line for line in text.split("\n") if len(line) <= LARGEST_LINE]


def read_header(path: Path) -> Header:
    """Names, types and shapes of the tensors in a file, which safetensors compares with its size; no tensor is read."""
    with wrap_read_errors(path):
        with open(path, "rb", opener=_without_waiting) as file:
            _check_size(file.fileno(), 2**63)
            if int.from_bytes(file.read(8), "little") > LARGEST_HEADER:
                raise ValueError(f"its header claims more than {LARGEST_HEADER} bytes")
        with safe_open(path, "np") as opened:
            described = opened.metadata() or {}
            tensors = {name: _stored(name, opened.get_slice(name)) for name in opened.keys()}  # noqa: SIM118
        metadata = json.loads(described.get("calgp", "{}"))
        if not isinstance(metadata, dict):
            raise ValueError("what is stored beside its tensors is no table")
        return Header(tensors, metadata, described.get("sha256"))


def read_tensors(path: Path, header: Header | None = None) -> dict[str, Tensor]:
    """The tensors of a file, whose `header` may have been read already. They lie in the file until they are used."""
    header = read_header(path) if header is None else header
    with wrap_read_errors(path):
        tensors = load_file(path)
        if {name: Stored(value.dtype, tuple(value.shape)) for name, value in tensors.items()} != header.tensors:
            raise ValueError("its tensors are not those of its header")
        if header.digest not in (None, digest(tensors)):
            raise ValueError("its tensors are not those that were written: their checksum differs")
    return tensors


def digest(tensors: dict[str, Tensor]) -> str:
    """SHA-256 of tensors and their names: a flipped bit in a weight would otherwise be a slightly other model."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(name.encode())
        found.update(tensors[name].reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def recall_network(run: Run, path: Path) -> None:
    """Let a run's network take what its folder keeps of it, if it does."""
    if is_file(path):
        with wrap_read_errors(path):
            run.backbone.recall(read_bytes(path, LARGEST_JSON).decode())


def check_model(run: Run, task: Task, header: Header, path: Path, prefix: str = "") -> None:
    """Refuse a file whose tensors are not those of the model that run.json describes, before that model takes memory.

    `prefix` is what names of the model's tensors begin with in the file.
    """
    tensors = header.tensors.items()
    stored = {current_name(name.removeprefix(prefix)): each for name, each in tensors if name.startswith(prefix)}
    model = model_without_memory(run, task, most=4 * len(stored) + 100)
    described = {name: Stored(value.dtype, tuple(value.shape)) for name, value in model.state_dict().items()}
    if strange := sorted(set(stored) ^ set(described)):
        where = "which run.json does not describe" if strange[0] in stored else "which run.json describes, is not in it"
        raise _unfit(path, f"{short_repr(strange[0])}, {where}")
    former = former_shapes(model)
    for name, each in stored.items():
        wanted = described[name]
        if each.shape not in (wanted.shape, former.get(name)):
            raise _unfit(path, f"{short_repr(name)} has the shape {list(each.shape)}, expected {list(wanted.shape)}")
        if each.dtype != wanted.dtype and not (each.dtype.is_floating_point and wanted.dtype.is_floating_point):
            raise _unfit(path, f"{short_repr(name)} is of {each.dtype}, expected {wanted.dtype}")


def check_checkpoint(run: Run, task: Task, header: Header, path: Path, *, steps: int) -> Checkpoint:
    """Refuse a checkpoint that is not of the model of run.json and of its optimiser; how far it is, of `steps`."""
    check_model(run, task, header, path, prefix="model.")
    if any(name.startswith("best.") for name in header.tensors):
        check_model(run, task, header, path, prefix="best.")
    with wrap_read_errors(path):
        state = parse(Checkpoint, header.metadata)
    if run.patience is not None and state.stopping is None:
        raise _unfit(path, "it does not say how far early stopping is")
    if state.step > steps or state.failed > state.step:
        raise _unfit(path, f"it is at step {state.step} of {steps}, {state.failed} of them failed")
    model = model_without_memory(run, task, most=4 * len(header.tensors) + 100)
    shapes = [tuple(parameter.shape) for parameter in model.parameters() if parameter.requires_grad]
    states: dict[str, set[str]] = {}
    for name, each in header.tensors.items():
        if name.startswith(("model.", "best.")):
            continue
        found = OPTIMISER.fullmatch(name)
        if found is None or int(found[1]) >= len(shapes):
            raise _unfit(path, f"{short_repr(name)} is no tensor of an optimiser of it")
        wanted = () if found[2] == "step" else shapes[int(found[1])]
        if each.shape != wanted or not each.dtype.is_floating_point:
            raise _unfit(path, f"{short_repr(name)} is of {each.dtype} {list(each.shape)}, expected {list(wanted)}")
        states.setdefault(found[1], set()).add(found[2])
    kinds = {p: "adam" if run.optimiser == "muon" and len(shapes[int(p)]) != 4 else run.optimiser for p in states}
    right = all(names == OPTIMISER_STATE[kinds[place] or "adam"] for place, names in states.items())
    # an optimiser has nothing to keep before its first step that did not fail, nor of a parameter without gradient
    if not right or (state.step > state.failed and not states):
        raise _unfit(path, f"it does not hold the state of the optimiser {run.optimiser}")
    return state


def check_columns(tensors: dict[str, Tensor], classes: int, path: Path) -> dict[str, Tensor]:
    """Predictions: a row an image in every column, labels among the classes, and no number that is not finite."""
    kinds = {"label": torch.int64, "y": torch.int64, "rows": torch.int64}
    floats = ("confidence", "entropy", "mutual_information")
    with wrap_read_errors(path):
        if absent := sorted({*kinds, *floats} - set(tensors)):
            raise ValueError(f"it lacks the column {absent[0]}")
        n = len(tensors["label"]) if tensors["label"].ndim == 1 else 0
        for name, values in tensors.items():
            wide = name in ("log_probs", "spread", "sets")
            if n < 1 or values.shape != ((n, classes) if wide else (n,)):
                raise ValueError(f"{short_repr(name)} has the shape {list(values.shape)}, not a row for each image")
            if name in kinds and values.dtype != kinds[name]:
                raise ValueError(f"{short_repr(name)} is of {values.dtype}, expected {kinds[name]}")
            if name in ("log_probs", "spread", *floats) and not values.is_floating_point():
                raise ValueError(f"{short_repr(name)} is of {values.dtype}, expected numbers")
        if any(not tensors[name].isfinite().all() for name in floats):
            raise ValueError("it has numbers that are not finite")
        if int(tensors["label"].min()) < 0 or int(tensors["label"].max()) >= classes or int(tensors["y"].min()) < 0:
            raise ValueError(f"it has labels that are none of the {classes} classes")
    return tensors


def model_without_memory(run: Run, task: Task, *, most: int) -> Model:
    """The model of a run on the meta device, where tensors have no content; refused beyond `most` tensors."""
    try:
        with _counting(most), _Valueless(), torch.device("meta"):
            return run.method.build(task, network(run, task))
    except CalgpError:
        raise
    except (RuntimeError, TypeError, ValueError, ArithmeticError, MemoryError) as error:
        reason = str(error).partition("\n")[0][:200]
        raise CalgpError(f"The model that run.json describes cannot be built ({reason}); train again.") from None


class _Valueless(TorchFunctionMode):
    """On the meta device tensors have shapes and no values: what is asked about values (GPyTorch does) is denied."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.__bool__, torch.equal) and args[0].is_meta:
            return False
        return func(*args, **(kwargs or {}))


@contextmanager
def _counting(most: int) -> Iterator[None]:
    """Stops a network that never ends: each tensor that a module of this thread takes is counted."""
    taken, here = 0, threading.get_ident()

    def count(module: torch.nn.Module, name: str, value: Tensor | None) -> None:
        nonlocal taken
        taken += threading.get_ident() == here
        if taken > most:
            raise CalgpError(f"run.json describes a model of more than {most} tensors, its file has far fewer.")

    hooks = [hooked.register_module_parameter_registration_hook(count)]
    hooks.append(hooked.register_module_buffer_registration_hook(count))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _without_waiting(path: str, flags: int) -> int:
    """A pipe in the place of a file must not be waited for."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _check_size(handle: int, most: int) -> None:
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("it is no regular file")
    if found.st_size > most:
        raise ValueError(f"it has {found.st_size} bytes; at most {most} are read")


def _stored(name: str, entry: Any) -> Stored:
    dtype, shape = entry.get_dtype(), tuple(entry.get_shape())
    if dtype not in DTYPES:
        raise ValueError(f"its header gives {short_repr(name)} the type {dtype}; known are {', '.join(DTYPES)}")
    if len(shape) > 8 or not all(n < 2**40 for n in shape):
        raise ValueError(f"its header gives {short_repr(name)} the shape {short_repr(shape)}")
    return Stored(DTYPES[dtype], shape)


def _unfit(path: Path, what: str) -> CalgpError:
    return CalgpError(f"{path} does not fit the model that run.json describes: {what}.")
