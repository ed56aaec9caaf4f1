"""Interpret the pickle of a torch file without running it, to locate its tensors.

A pickle is a program for a small machine. This one follows the few steps that torch.save writes for
a dict of tensors (torch/serialization.py, torch/_utils.py) and records what they would make; any
other step or name is refused, and nothing is imported or called. Must not know files.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from shardnet.checkpoint.tensors.stored_tensor import MAX_AXES, MAX_NAME_CHARACTERS
from shardnet.errors import CheckpointError, shown

MAX_PICKLE_BYTES: Final = 8 << 20
"""Cap on the pickle; a model's has some 100 KB."""
MAX_STEPS: Final = 1 << 19
"""Cap on its steps, to follow them within seconds; torch.save writes about 35 for a tensor."""
MAX_STACK: Final = 1 << 14
"""Cap on the values that wait at one time; torch.save sets a thousand pairs at a time."""
MAX_ARGUMENTS: Final = 16
"""Cap on the arguments of a call; a tensor has seven at most."""

_STORAGES: Final[Mapping[str, str]] = {
    "torch.FloatStorage": "F32",
    "torch.HalfStorage": "F16",
    "torch.BFloat16Storage": "BF16",
    "torch.DoubleStorage": "F64",
    "torch.LongStorage": "I64",
    "torch.IntStorage": "I32",
    "torch.ShortStorage": "I16",
    "torch.CharStorage": "I8",
    "torch.ByteStorage": "U8",
    "torch.BoolStorage": "BOOL",
}
_DICT, _TENSOR, _PARAMETER = (
    "collections.OrderedDict",
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_parameter",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """The contiguous elements of the archive member `key`."""

    key: str
    dtype: str
    n_elements: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PickledTensor:
    """A tensor's place in its storage, in elements."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Name:
    """A name that the pickle would import."""

    name: str


class _Mark:
    """The start of a tuple, or a group of items, on the stack."""


class _Damaged(Exception):
    """The pickle contradicts itself, or claims what it cannot hold; str() says how."""


def pickled_tensors(data: bytes, where: str) -> dict[str, PickledTensor]:
    """Interpret the pickle of a dict of tensors; `where` names its file in errors.

    Raises CheckpointError for anything else. Nothing is executed.
    """
    if len(data) > MAX_PICKLE_BYTES:
        raise CheckpointError(
            f"{where}: its pickle has {len(data)} bytes, at most {MAX_PICKLE_BYTES} are read",
            remedy="convert the checkpoint to safetensors",
        )
    try:
        made = _Machine(where).run(data)
    except _Damaged as error:
        raise CheckpointError(
            f"{where}: its pickle is damaged ({error})", remedy="fetch it again"
        ) from error
    if not isinstance(made, dict):
        raise CheckpointError(
            f"{where}: its pickle holds no dict of tensors", remedy="convert it to one"
        )
    for name, value in made.items():
        if not isinstance(value, PickledTensor):
            raise CheckpointError(
                f"{where}: the entry {name!r:.80} of its pickle is no tensor under a name",
                remedy="save the plain state_dict, or convert the checkpoint to safetensors",
            )
    return made


class _Machine:
    """The stack and the memo of the pickle machine."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._stack: list[Any] = []
        self._memory: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        """Follow all steps; return the final value."""
        for n_steps, (step, argument) in enumerate(self._steps(data), 1):
            if n_steps > MAX_STEPS:
                raise _Damaged(f"more than {MAX_STEPS} steps")
            if step == "STOP":
                return self._pop()
            self._follow(step, argument)
            if len(self._stack) > MAX_STACK:
                raise _Damaged(f"more than {MAX_STACK} values wait")
        raise _Damaged("it does not end")

    def _steps(self, data: bytes) -> Iterator[tuple[str, Any]]:
        """Yield each step and its argument; a step that is not followed is refused unread."""
        at = 0
        while at < len(data):
            step = _STEP_NAMES.get(data[at], "")
            if not step:
                other = next((s.name for s in pickletools.opcodes if ord(s.code) == data[at]), "")
                if not other:
                    raise _Damaged(f"the byte 0x{data[at]:02X} at {at} is no step")
                raise self._refused(f"takes the step {other}")
            argument, at = _argument(step, data, at + 1)
            yield step, argument

    def _follow(self, step: str, argument: Any) -> None:
        if step in _PUSHED:
            self._stack.append(argument)
        elif step in _CONSTANTS:
            self._stack.append(_CONSTANTS[step]())
        elif step in ("BINPUT", "LONG_BINPUT"):
            self._memory[argument] = self._top()
        elif step in ("BINGET", "LONG_BINGET"):
            if argument not in self._memory:
                raise _Damaged(f"nothing was stored as {argument}")
            self._stack.append(self._memory[argument])
        elif step in _STEPS:
            _STEPS[step](self)
        elif step == "GLOBAL":
            self._stack.append(self._name(*argument))

    def _top(self) -> Any:
        if not self._stack:
            raise _Damaged("no value waits")
        return self._stack[-1]

    def _pop(self) -> Any:
        top = self._top()
        self._stack.pop()
        return top

    def _refused(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self._where}: its pickle {what}, which no dict of tensors needs: it may be meant to "
            "run code, so nothing of it was",
            remedy="use a checkpoint in safetensors",
        )

    def _name(self, module: str, name: str) -> _Name:
        if len(module) + len(name) > MAX_NAME_CHARACTERS:
            raise _Damaged(f"a name of {len(module) + len(name)} characters")
        full = f"{module}.{name}"
        if full not in _STORAGES and full not in (_DICT, _TENSOR, _PARAMETER):
            raise self._refused(f"names {full if full.isprintable() else shown(full)}")
        return _Name(full)

    def _stack_global(self) -> None:
        name, module = self._pop(), self._pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise _Damaged("a name is no text")
        self._stack.append(self._name(module, name))

    def _group(self) -> list[Any]:
        """Pop the items above the last mark, and the mark."""
        group: list[Any] = []
        while not isinstance(top := self._pop(), _Mark):
            group.append(top)
        return group[::-1]

    def _tuple(self, n: int | None) -> None:
        items = self._group() if n is None else [self._pop() for _ in range(n)][::-1]
        self._stack.append(tuple(items))

    def _set_items(self, items: list[Any]) -> None:
        target = self._top()
        if not isinstance(target, dict) or len(items) % 2:
            raise _Damaged("items are set on what is no dict")
        # Any other key would be hashed, which takes ages for a tuple of tuples of tuples.
        if not all(type(key) is str and len(key) <= MAX_NAME_CHARACTERS for key in items[::2]):
            raise _Damaged(f"a key is no text of at most {MAX_NAME_CHARACTERS} characters")
        target.update(zip(items[::2], items[1::2], strict=True))

    def _set_item(self) -> None:
        value, key = self._pop(), self._pop()
        self._set_items([key, value])

    def _memoize(self) -> None:
        self._memory[len(self._memory)] = self._top()

    def _build(self) -> None:
        """Ignore the attributes of a dict: torch stores the versions of modules there."""
        self._pop()
        if not isinstance(self._top(), dict):
            raise self._refused("sets attributes")

    def _storage(self) -> None:
        match self._pop():
            case ("storage", _Name(name), str(key), str(), int(n_elements)) if (
                name in _STORAGES and len(key) <= MAX_NAME_CHARACTERS and _is_size(n_elements)
            ):
                self._stack.append(Storage(key=key, dtype=_STORAGES[name], n_elements=n_elements))
            case _:
                raise _Damaged("a storage is none")

    def _reduce(self) -> None:
        """Record the result that a call would have."""
        arguments, function = self._pop(), self._pop()
        if isinstance(arguments, tuple) and len(arguments) > MAX_ARGUMENTS:
            raise _Damaged(f"{len(arguments)} arguments")
        match function, arguments:
            case _Name(name), () if name == _DICT:
                self._stack.append({})
            case _Name(name), (Storage() as storage, offset, shape, strides, *_) if name == _TENSOR:
                self._stack.append(_tensor(storage, offset, shape, strides))
            case _Name(name), (PickledTensor() as tensor, *_) if name == _PARAMETER:
                self._stack.append(tensor)
            case _Name(name), _:
                raise _Damaged(f"{name} is called with something else than torch gives it")
            case _:
                raise self._refused("calls what has no name")


def _tensor(storage: Storage, offset: Any, shape: Any, strides: Any) -> PickledTensor:
    for numbers in (shape, strides):
        if not isinstance(numbers, tuple) or len(numbers) > MAX_AXES:
            raise _Damaged(f"a tensor without a shape and strides of at most {MAX_AXES} axes")
    if len(shape) != len(strides) or not all(map(_is_size, (offset, *shape, *strides))):
        raise _Damaged("a tensor whose shape, strides and offset do not fit each other")
    return PickledTensor(storage=storage, offset=offset, shape=shape, strides=strides)


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _argument(step: str, data: bytes, at: int) -> tuple[Any, int]:
    """Read the argument of the step before `at`; return it and where the next step begins."""
    kind = _ARGUMENTS.get(step)
    if kind is None:
        return None, at
    if kind == "lines":
        module, _, rest = data[at : at + 2 * MAX_NAME_CHARACTERS].partition(b"\n")
        name, end, _ = rest.partition(b"\n")
        if not end:
            raise _Damaged(f"a name without an end at {at}")
        return (_text(module, at), _text(name, at)), at + len(module) + len(name) + 2
    if at + kind.size > len(data):
        raise _Damaged(f"it ends within the step {step}")
    (value,) = kind.unpack_from(data, at)
    at += kind.size
    if step not in _SIZED:
        return value, at
    if value > len(data) - at:
        raise _Damaged(f"{value} bytes at {at}, of {len(data)}")
    content = data[at : at + value]
    if step == "LONG1":
        return int.from_bytes(content, "little", signed=True), at + value
    return _text(content, at), at + value


def _text(content: bytes, at: int) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise _Damaged(f"a text at {at} is not UTF-8") from error


_PUSHED: Final = frozenset(
    ["BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE"]
)
_CONSTANTS: Final[Mapping[str, Callable[[], Any]]] = {
    "MARK": _Mark,
    "EMPTY_DICT": dict,
    "EMPTY_TUPLE": tuple,
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
}
_STEPS: Final[Mapping[str, Callable[[_Machine], None]]] = {
    "TUPLE": lambda machine: machine._tuple(None),
    "TUPLE1": lambda machine: machine._tuple(1),
    "TUPLE2": lambda machine: machine._tuple(2),
    "TUPLE3": lambda machine: machine._tuple(3),
    "SETITEM": _Machine._set_item,
    "SETITEMS": lambda machine: machine._set_items(machine._group()),
    "MEMOIZE": _Machine._memoize,
    "STACK_GLOBAL": _Machine._stack_global,
    "BINPERSID": _Machine._storage,
    "REDUCE": _Machine._reduce,
    "BUILD": _Machine._build,
}
_ARGUMENTS: Final[Mapping[str, Any]] = {
    "PROTO": struct.Struct("<B"),
    "FRAME": struct.Struct("<Q"),
    "BININT": struct.Struct("<i"),
    "BININT1": struct.Struct("<B"),
    "BININT2": struct.Struct("<H"),
    "BINFLOAT": struct.Struct(">d"),
    "LONG1": struct.Struct("<B"),
    "SHORT_BINUNICODE": struct.Struct("<B"),
    "BINUNICODE": struct.Struct("<I"),
    "BINPUT": struct.Struct("<B"),
    "LONG_BINPUT": struct.Struct("<I"),
    "BINGET": struct.Struct("<B"),
    "LONG_BINGET": struct.Struct("<I"),
    "GLOBAL": "lines",
}
"""By step: the layout of its argument, or of its argument's length."""
_SIZED: Final = ("LONG1", "SHORT_BINUNICODE", "BINUNICODE")
_STEP_NAMES: Final = {
    ord(step.code): step.name
    for step in pickletools.opcodes
    if step.name in {*_PUSHED, *_CONSTANTS, *_STEPS, *_ARGUMENTS, "STOP"}
}
"""The steps that are followed, by their byte."""
