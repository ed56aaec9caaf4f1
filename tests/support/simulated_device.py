"""A device that this machine lacks, simulated: its tensors are in the CPU's memory.

What a real one would refuse is refused: operators over tensors of two devices, and dtypes that it
has none of. What its own kernels would compute wrongly is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

_MOVES = {"to", "cpu", "cuda", "type", "copy_", "_foreach_copy_", "__setitem__", "__getitem__"}
"""Functions whose tensors may be of two devices: indices, and what is copied, come from the CPU."""
_PROPERTIES = (Tensor.T, Tensor.mT, Tensor.H, Tensor.data)
"""Properties that are tensors; the others are facts about one."""


class _OnDevice(Tensor):
    """A tensor that says it is on another device than its `memory`."""

    memory: Tensor

    @staticmethod
    def __new__(cls, memory: Tensor, device: torch.device) -> _OnDevice:
        made: _OnDevice = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            memory.shape,
            strides=memory.stride(),
            storage_offset=memory.storage_offset(),
            dtype=memory.dtype,
            device=device,
        )
        made.memory = memory
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return _call(func, args, kwargs or {}, frozenset())

    @classmethod
    def __torch_dispatch__(cls, func: object, *others: object) -> Any:
        raise AssertionError(f"{func} came past __torch_function__: {cls.__name__} has no kernels")


class _Simulation(TorchFunctionMode):
    def __init__(self, lacks: frozenset[torch.dtype]) -> None:
        super().__init__()
        self._lacks = lacks

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return _call(func, args, kwargs or {}, self._lacks)


@contextmanager
def simulated_device(*lacks: torch.dtype) -> Iterator[None]:
    """Let tensors be made on devices that are not here; they refuse the dtypes `lacks`."""
    with _Simulation(frozenset(lacks)):
        yield


def _call(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    lacks: frozenset[torch.dtype],
) -> Any:
    name = getattr(func, "__name__", "")
    is_fact = name == "__get__" and getattr(func, "__self__", None) not in _PROPERTIES
    if is_fact or name in ("__repr__", "size", "stride", "dim", "is_contiguous"):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    mine = [tensor for tensor in tensors if isinstance(tensor, _OnDevice)]
    device, args, kwargs = _target(name, args, kwargs)
    if device is None and mine:
        device = mine[0].device
    if mine and name not in _MOVES:
        _check_one_device(name, tensors)
    plain_args, plain_kwargs = tree_map(_memory, (tuple(args), dict(kwargs)))
    made = func(*plain_args, **plain_kwargs)
    if device is None or device.type == "cpu":
        return made
    by_memory = {id(tensor.memory): tensor for tensor in mine}

    def placed(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.dtype in lacks:
            raise TypeError(f"{name}: {device} has no {value.dtype}")
        known = by_memory.get(id(value))
        return _OnDevice(value, device) if known is None else known

    return tree_map(placed, made)


def _check_one_device(name: str, tensors: Sequence[Tensor]) -> None:
    """Raise RuntimeError as torch does; a single number may be on the CPU."""
    devices = {tensor.device for tensor in tensors if tensor.dim()}
    if len(devices) > 1:
        raise RuntimeError(f"{name}: expected all tensors on one device, found {devices}")


def _memory(value: Any) -> Any:
    return value.memory if isinstance(value, _OnDevice) else value


def _target(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[torch.device | None, Sequence[Any], Mapping[str, Any]]:
    """Return the device that a call names, and the arguments with the CPU in its place."""
    if name == "cpu":
        return torch.device("cpu"), (args[0].clone(),), kwargs
    named = kwargs.get("device")
    if named is not None:
        kwargs = {**kwargs, "device": "cpu"}
        return torch.device(named), args, kwargs
    if name == "to" and len(args) > 1:
        if isinstance(args[1], Tensor):
            return args[1].device, args, kwargs
        if isinstance(args[1], str | torch.device):
            device = torch.device(args[1])
            if device != args[0].device:
                kwargs = {**kwargs, "copy": True}
            return device, (args[0], "cpu", *args[2:]), kwargs
    return None, args, kwargs
