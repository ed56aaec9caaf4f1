"""What programs have a server keep between requests: in its memory, bounded, each key's its own."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

from shardnet.api.server.errors import Fault, HttpError

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held(Generic[Value]):
    value: Value
    n_bytes: int


class Kept(Generic[Value]):
    """Values by the name of the key that they came with, and their ids.

    There are `most` at most, of `most_bytes` in all: the least recently used make room. `what`
    names one in errors.
    """

    def __init__(self, what: str, *, most: int, most_bytes: int) -> None:
        self._what = what
        self._most = most
        self._most_bytes = most_bytes
        self._n_bytes = 0
        self._held: OrderedDict[tuple[str, str], _Held[Value]] = OrderedDict()

    def put(self, owner: str, name: str, value: Value, n_bytes: int) -> None:
        """Keep a value of `n_bytes`, in place of the one of this name if there is one."""
        self.drop(owner, name)
        self._held[owner, name] = _Held(value=value, n_bytes=n_bytes)
        self._n_bytes += n_bytes
        while len(self._held) > self._most or self._n_bytes > self._most_bytes:
            _, gone = self._held.popitem(last=False)
            self._n_bytes -= gone.n_bytes

    def find(self, owner: str, name: str) -> Value | None:
        """Return the value of this name, which counts as used, None where there is none."""
        held = self._held.get((owner, name))
        if held is None:
            return None
        self._held.move_to_end((owner, name))
        return held.value

    def get(self, owner: str, name: str) -> Value:
        """Return the value of this name, which counts as used. Raises HttpError 404."""
        value = self.find(owner, name)
        if value is None:
            message = self.gone(name)
            raise HttpError(Fault(status=404, kind="invalid_request_error", message=message))
        return value

    def drop(self, owner: str, name: str) -> bool:
        """Keep a value no longer; say whether there was one."""
        gone = self._held.pop((owner, name), None)
        self._n_bytes -= gone.n_bytes if gone is not None else 0
        return gone is not None

    def of(self, owner: str) -> list[Value]:
        """List the values of a key, the least recently used first."""
        return [held.value for (whose, _), held in self._held.items() if whose == owner]

    def gone(self, name: str) -> str:
        """Say that there is no value of this name, and for how long there would be one."""
        return (
            f"there is no {self._what} {name[:128]}: this server keeps the {self._most} last used, "
            f"of {self._most_bytes >> 20} MiB in all, until it ends"
        )
