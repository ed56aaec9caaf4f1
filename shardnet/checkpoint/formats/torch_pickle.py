"""Interpret the pickle of a torch file without running it, to locate its tensors.

A pickle is a program for a small machine. This one follows the few steps that torch.save writes for
a dict of tensors (torch/serialization.py, torch/_utils.py) and records what they would make; any
other step or name is refused, and nothing is imported or called. Must not know files.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from shardnet.errors import CheckpointError

MAX_PICKLE_BYTES: Final = 8 << 20
"""Cap on the pickle, to interpret it within seconds; a model's has some 100 KB."""

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
    except (ValueError, IndexError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{where}: its pickle is damaged ({error or type(error).__name__})",
            remedy="fetch it again",
        ) from error
    if not isinstance(made, dict):
        raise CheckpointError(
            f"{where}: its pickle holds no dict of tensors", remedy="convert it to one"
        )
    for name, value in made.items():
        if not isinstance(name, str) or not isinstance(value, PickledTensor):
            raise CheckpointError(
                f"{where}: the entry {name!r} of its pickle is no tensor under a name",
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
        """Interpret all opcodes; return the final value."""
        for step, argument, _ in pickletools.genops(data):
            if step.name == "STOP":
                return self._stack.pop()
            self._follow(step.name, argument)
        raise ValueError("it does not end")

    def _follow(self, step: str, argument: Any) -> None:
        if step in _PUSHED:
            self._stack.append(argument)
        elif step in _CONSTANTS:
            self._stack.append(_CONSTANTS[step]())
        elif step in ("BINPUT", "LONG_BINPUT"):
            self._memory[argument] = self._stack[-1]
        elif step in ("BINGET", "LONG_BINGET"):
            self._stack.append(self._memory[argument])
        elif step in _STEPS:
            _STEPS[step](self)
        elif step == "GLOBAL":
            self._stack.append(self._name(*argument.split(" ", 1)))
        elif step not in ("PROTO", "FRAME"):
            raise self._refused(f"takes the step {step}")

    def _refused(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self._where}: its pickle {what}, which no dict of tensors needs: it may be meant to "
            "run code, so nothing of it was",
            remedy="use a checkpoint in safetensors",
        )

    def _name(self, module: str, name: str) -> _Name:
        full = f"{module}.{name}"
        if full not in _STORAGES and full not in (_DICT, _TENSOR, _PARAMETER):
            raise self._refused(f"names {full}")
        return _Name(full)

    def _stack_global(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise ValueError("a name is no text")
        self._stack.append(self._name(module, name))

    def _group(self) -> list[Any]:
        """Pop the items above the last mark, and the mark."""
        group: list[Any] = []
        while not isinstance(top := self._stack.pop(), _Mark):
            group.append(top)
        return group[::-1]

    def _tuple(self, n: int | None) -> None:
        items = self._group() if n is None else [self._stack.pop() for _ in range(n)][::-1]
        self._stack.append(tuple(items))

    def _set_items(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, dict) or len(items) % 2:
            raise ValueError("items are set on what is no dict")
        target.update(zip(items[::2], items[1::2], strict=True))

    def _set_item(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._set_items([key, value])

    def _memoize(self) -> None:
        self._memory[len(self._memory)] = self._stack[-1]

    def _build(self) -> None:
        """Ignore the attributes of a dict: torch stores the versions of modules there."""
        self._stack.pop()
        if not isinstance(self._stack[-1], dict):
            raise self._refused("sets attributes")

    def _storage(self) -> None:
        match self._stack.pop():
            case ("storage", _Name(name), str(key), str(), int(n_elements)) if name in _STORAGES:
                self._stack.append(Storage(key=key, dtype=_STORAGES[name], n_elements=n_elements))
            case other:
                raise ValueError(f"{other!r} is no storage")

    def _reduce(self) -> None:
        """Record the result that a call would have."""
        arguments, function = self._stack.pop(), self._stack.pop()
        match function, arguments:
            case _Name(name), () if name == _DICT:
                self._stack.append({})
            case _Name(name), (Storage() as storage, offset, shape, strides, *_) if name == _TENSOR:
                self._stack.append(_tensor(storage, offset, shape, strides))
            case _Name(name), (PickledTensor() as tensor, *_) if name == _PARAMETER:
                self._stack.append(tensor)
            case _Name(name), _:
                raise ValueError(f"{name} is called with something else than torch gives it")
            case _:
                raise self._refused("calls what has no name")


def _tensor(storage: Storage, offset: Any, shape: Any, strides: Any) -> PickledTensor:
    numbers = (offset, *shape, *strides)
    if any(type(n) is not int or not 0 <= n < 1 << 62 for n in numbers):
        raise ValueError(f"a tensor of shape {shape} at {offset} in steps of {strides}")
    if len(shape) != len(strides) or len(shape) > 8:
        raise ValueError(f"a tensor of shape {shape} in steps of {strides}")
    return PickledTensor(storage=storage, offset=offset, shape=tuple(shape), strides=tuple(strides))


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
