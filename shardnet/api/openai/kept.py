"""What programs have a cluster keep between requests: in its nodes' memory, each key's its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec

from shardnet.api.client import Client
from shardnet.api.server.errors import Fault, HttpError, refused
from shardnet.wire.messages.deputies import MAX_LISTED_VALUE, MAX_VALUE

_ROOM: Final = 256
"""Bytes of a value beside its description."""


class _Value(msgspec.Struct, array_like=True, frozen=True):
    """What is kept under a name: a description, and how long the content in parts is."""

    description: bytes
    n_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A description as JSON, and how long ago it came."""

    description: bytes
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Values of one kind, each a small description and a content, which may be large.

    `what` names one in errors; all ids begin with `prefix`. The nodes bound how many there are:
    the least recently used make room. Calls raise ShardnetError where no node answers.
    """

    what: str
    prefix: str

    async def put(
        self, client: Client, owner: str, name: str, description: bytes, content: bytes = b""
    ) -> None:
        """Keep a value. Raises HttpError 400 for a description that is too long."""
        if len(description) > MAX_LISTED_VALUE - _ROOM:
            raise refused(f"what describes a {self.what} has {len(description)} bytes: too many")
        for place, at in enumerate(range(0, len(content), MAX_VALUE)):
            await client.keep_value(owner, _part(name, place), content[at : at + MAX_VALUE])
        value = _Value(description=description, n_bytes=len(content))
        await client.keep_value(owner, name, msgspec.msgpack.encode(value))

    async def describe(self, client: Client, owner: str, name: str) -> bytes:
        """Return a description. Raises HttpError 404."""
        value = await self._find(client, owner, name)
        if value is None:
            raise self._missing(name)
        return value.description

    async def find(self, client: Client, owner: str, name: str) -> bytes | None:
        """Return a content, None if it is not kept, or not all of it."""
        value = await self._find(client, owner, name)
        if value is None:
            return None
        content = bytearray()
        for place in range(-(-value.n_bytes // MAX_VALUE)):
            part = await client.find_value(owner, _part(name, place))
            if part is None:
                return None
            content += part
        return bytes(content) if len(content) == value.n_bytes else None

    async def get(self, client: Client, owner: str, name: str) -> bytes:
        """Return a content. Raises HttpError 404."""
        content = await self.find(client, owner, name)
        if content is None:
            raise self._missing(name)
        return content

    async def listed(self, client: Client, owner: str, prefix: str = "") -> list[Listed]:
        """List the descriptions of a key, or of those whose ids begin with `prefix`."""
        values = await client.list_values(owner, prefix or self.prefix)
        return [
            Listed(
                description=msgspec.msgpack.decode(value.value, type=_Value).description,
                age_s=value.age_s,
            )
            for value in values
        ]

    async def drop(self, client: Client, owner: str, name: str) -> None:
        """Keep a value no longer. Raises HttpError 404 if it is not kept."""
        value = await self._find(client, owner, name)
        if value is None:
            raise self._missing(name)
        await client.drop_value(owner, name)
        for place in range(-(-value.n_bytes // MAX_VALUE)):
            await client.drop_value(owner, _part(name, place))

    def gone(self, name: str) -> str:
        """Say that there is no value of this name, and for how long there would be one."""
        return (
            f"there is no {self.what} {name[:128]}: the cluster keeps what was used last, in the "
            "memory of two nodes, until these end"
        )

    def _missing(self, name: str) -> HttpError:
        return HttpError(Fault(status=404, kind="invalid_request_error", message=self.gone(name)))

    async def _find(self, client: Client, owner: str, name: str) -> _Value | None:
        if not name.startswith(self.prefix) or len(name) > 128 or "\0" in name:
            return None
        found = await client.find_value(owner, name)
        return msgspec.msgpack.decode(found, type=_Value) if found is not None else None


def _part(name: str, place: int) -> str:
    return f"part/{name}/{place}"
