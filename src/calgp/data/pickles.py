"""A reader of the few pickles that CIFAR is published in. It can run no code: it calls nothing that a file names.

`pickle.load` executes what the file says. Here the opcodes are interpreted one by one: containers, texts, numbers and
uint8 arrays are built by this file itself, the names of NumPy's rebuilding functions are compared and never looked up,
and every other opcode is refused. `pickle.Unpickler` with a short list of names was tried: ten bytes may cost 512 MB.
"""

import io
import pickletools
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

import numpy as np

from calgp.errors import CalgpError


class _Name(Enum):
    """A global that a pickle may mention; it stands for an idea and is no function."""

    RECONSTRUCT = "numpy.core.multiarray _reconstruct"
    RECONSTRUCT_2 = "numpy._core.multiarray _reconstruct"
    NDARRAY = "numpy ndarray"
    DTYPE = "numpy dtype"
    ENCODE = "_codecs encode"


@dataclass
class _Array:
    """An array between its creation (REDUCE) and its content (BUILD)."""

    value: np.ndarray | None = None


MAX_OPCODES = 2_000_000  # opcodes: CIFAR-100's train file has 120,241; each may make some 200 bytes
Held: TypeAlias = "str | bytes | int | list[Held] | tuple[Held, ...] | dict[str, Held] | np.ndarray | None"
_OPCODES = {opcode.code: opcode for opcode in pickletools.opcodes}
_MARK = object()
_UINT8 = object()
_LITERALS = {
    "BININT", "BININT1", "BININT2", "LONG1", "SHORT_BINSTRING", "BINSTRING", "BINUNICODE", "SHORT_BINUNICODE",
    "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8",
}  # fmt: skip
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": (), "MARK": _MARK}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_ALLOWED = {
    *_LITERALS, *_CONSTANTS, *_TUPLES, "EMPTY_DICT", "EMPTY_LIST", "TUPLE", "APPEND", "APPENDS", "SETITEM", "SETITEMS",
    "PROTO", "FRAME", "BINPUT", "LONG_BINPUT", "MEMOIZE", "BINGET", "LONG_BINGET", "GLOBAL", "STACK_GLOBAL", "REDUCE",
    "BUILD",
}  # fmt: skip


def read_pickle(data: bytes) -> dict[str, Held]:
    """The dict that a CIFAR pickle holds: texts, ints, lists, and uint8 arrays as values.

    Raises:
        CalgpError: the pickle is damaged, or holds anything else. The message names the cause, not the file.
    """
    reader = _Reader(budget=len(data))
    try:
        for count, (name, argument) in enumerate(_steps(io.BytesIO(data))):
            if count == MAX_OPCODES:
                raise CalgpError(f"the pickle has more than {MAX_OPCODES} opcodes, which no published image set needs")
            reader.step(name, argument)
        return _plain(reader.pop())
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise CalgpError(f"damaged pickle ({type(error).__name__}: {error})") from error


def _steps(stream: io.BytesIO) -> Iterator[tuple[str, Any]]:
    """Opcodes and their arguments up to STOP. An opcode is judged before its argument is read, unlike in `genops`."""
    while (opcode := _OPCODES.get(stream.read(1).decode("latin1"))) is not None:
        if opcode.name == "STOP":
            return
        if opcode.name not in _ALLOWED:
            raise CalgpError(f"the pickle uses {opcode.name}, which image sets do not need and calgp does not run")
        if opcode.name == "GLOBAL":  # pickletools would undo escapes in it, which `pickle` does not
            yield "GLOBAL", b" ".join(stream.readline().rstrip(b"\n") for _ in range(2)).decode("latin1")
        else:
            yield opcode.name, opcode.arg.reader(stream) if opcode.arg else None
    raise ValueError("no pickle, or one without an end")


def _plain(value: Any) -> dict[str, Held]:
    """The finished dict with real arrays in it."""
    if not isinstance(value, dict):
        raise CalgpError(f"the pickle holds a {type(value).__name__} instead of a dict")
    return {key: item.value if isinstance(item, _Array) else item for key, item in value.items()}


def _text(value: Any) -> str:
    """A text; Python 2's strings may come as bytes. Never a container: hashing or printing one could take for ever."""
    if not isinstance(value, str | bytes):
        raise ValueError("text expected")
    return value.decode("latin1") if isinstance(value, bytes) else value


def _named(text: str) -> _Name:
    try:
        return _Name(text)
    except ValueError:
        raise CalgpError(f"the pickle wants to use {text[:80]!r}; calgp runs nothing that a file names") from None


class _Reader:
    """The pickle machine: a stack, a memo, and no way out."""

    def __init__(self, budget: int) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.budget = budget  # bytes that texts may still be encoded to: a memo could ask for one text endlessly

    def step(self, name: str, argument: Any) -> None:
        if name in _LITERALS:
            self.stack.append(argument)
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name])
        elif name in _TUPLES:
            self.stack.append(tuple(reversed([self.pop() for _ in range(_TUPLES[name])])))
        else:
            self.act(name, argument)

    def act(self, name: str, argument: Any) -> None:
        match name:
            case "EMPTY_DICT" | "EMPTY_LIST":
                self.stack.append({} if name == "EMPTY_DICT" else [])
            case "TUPLE":
                self.stack.append(tuple(self.pop_to_mark()))
            case "APPEND" | "APPENDS":
                values = [self.pop()] if name == "APPEND" else self.pop_to_mark()
                self.top(list).extend(values)
            case "SETITEM" | "SETITEMS":
                items = [self.pop(), self.pop()][::-1] if name == "SETITEM" else self.pop_to_mark()
                self.top(dict).update(zip(map(_text, items[::2]), items[1::2], strict=True))
            case "BINPUT" | "LONG_BINPUT" | "MEMOIZE":
                self.memo[len(self.memo) if name == "MEMOIZE" else argument] = self.stack[-1]
            case "BINGET" | "LONG_BINGET":
                self.stack.append(self.memo[argument])
            case "GLOBAL":
                self.stack.append(_named(argument))
            case "STACK_GLOBAL":
                name, module = self.pop(), self.pop()
                self.stack.append(_named(f"{_text(module)} {_text(name)}"))
            case "REDUCE":
                arguments, function = self.pop(), self.pop()
                self.stack.append(self.reduce(function, arguments))
            case "BUILD":
                self.build(self.pop(), self.stack[-1])
            # PROTO and FRAME only say how the pickle is written

    def pop(self) -> Any:
        if not self.stack or self.stack[-1] is _MARK:
            raise ValueError("a value is missing")
        return self.stack.pop()

    def pop_to_mark(self) -> list[Any]:
        items = []
        while self.stack[-1] is not _MARK:
            items.append(self.stack.pop())
        self.stack.pop()
        return items[::-1]

    def top(self, kind: type) -> Any:
        if not isinstance(self.stack[-1], kind):
            raise ValueError(f"{kind.__name__} expected")
        return self.stack[-1]

    def reduce(self, function: Any, arguments: Any) -> Any:
        if function in (_Name.RECONSTRUCT, _Name.RECONSTRUCT_2) and arguments[0] is _Name.NDARRAY:
            return _Array()
        if function is _Name.DTYPE and arguments[0] in ("u1", "|u1"):
            return _UINT8
        if function is _Name.ENCODE and arguments[1] == "latin1":
            return self.encode(arguments[0])
        raise CalgpError("the pickle builds something other than an array of uint8")

    def encode(self, text: str) -> bytes:
        """Latin-1 text as bytes: so come Python 2's strings, and Python 3's bytes at protocol 2 (`_codecs.encode`)."""
        self.budget -= len(text)
        if self.budget < 0:
            raise CalgpError("the pickle unfolds to more than its own size")
        return text.encode("latin1")

    def build(self, state: Any, target: Any) -> None:
        if target is _UINT8:
            return  # byte order and alignment: a byte has none
        if not isinstance(target, _Array) or target.value is not None:
            raise CalgpError("the pickle builds something other than an array of uint8")
        _, shape, dtype, fortran, content = state
        if dtype is not _UINT8 or not all(isinstance(size, int) and size >= 0 for size in shape):
            raise CalgpError("the pickle holds an array that is not of uint8")
        values = np.frombuffer(self.encode(content) if isinstance(content, str) else content, np.uint8)
        target.value = values.reshape(shape, order="F" if fortran else "C")
