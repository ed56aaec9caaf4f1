"""Rows of tables that other nodes have in their files, and for which this one's disk has no room.

Knows whom to ask, for how long, and when to ask another one. Must not know what the rows are for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from shardnet.checkpoint.tensors.stored_tensor import StoredRow
from shardnet.cluster.sharing.bulk_client import BulkClient, SourceRefused
from shardnet.errors import LostShardError, PeerSilentError, ShardnetError
from shardnet.transport.deadline import deadline
from shardnet.transport.link import Link
from shardnet.types import remember
from shardnet.wire.messages.bulk import MAX_ROWS
from shardnet.wire.messages.handshake import Capability

ANSWER_S = 10.0
"""How long a node may take until it is linked, and be silent while it sends rows."""
MAX_MODELS = 16
"""Models of which the nodes to ask are remembered."""


@dataclass(kw_only=True, eq=False, repr=False)
class TableRows:
    """Asks other nodes for rows, over one bulk link at a time that `dial` opens."""

    dial: Callable[[str], Awaitable[Link]]
    answer_s: float = ANSWER_S

    def __post_init__(self) -> None:
        self._sources: dict[str, tuple[str, ...]] = {}
        self._linked: tuple[str, str, BulkClient] | None = None
        """The node that was asked last, for which model, and the link to it."""
        self._turn = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def begin(self, model_id: str, sources: Sequence[str], rows: Sequence[StoredRow]) -> None:
        """Ask the addresses `sources` for rows of a model from now on.

        Raises LostShardError unless there are some that give `rows`.
        """
        self._loop = asyncio.get_running_loop()
        remember(self._sources, model_id, (*sources,), MAX_MODELS)
        await self._bring(model_id, rows)

    def ask(self, model_id: str, rows: Sequence[StoredRow]) -> bytearray:
        """Bring rows of a model for which `begin` was called; see AskRows."""
        assert self._loop is not None, "begin was called"
        return asyncio.run_coroutine_threadsafe(self._bring(model_id, rows), self._loop).result()

    def close(self) -> None:
        """Close the link."""
        if self._linked is not None:
            self._linked[2].link.abort("no more rows are needed")
            self._linked = None

    async def _bring(self, model_id: str, rows: Sequence[StoredRow]) -> bytearray:
        found = bytearray()
        async with self._turn:
            for begin in range(0, len(rows), MAX_ROWS):
                found += await self._from_any(model_id, rows[begin : begin + MAX_ROWS])
        return found

    async def _from_any(self, model_id: str, rows: Sequence[StoredRow]) -> bytearray:
        """Bring rows over the link that is there, else over a new one, from one node or another."""
        failures: dict[str, str] = {}
        linked = [self._linked[0]] if self._linked is not None else []
        for source in (*linked, *self._sources[model_id]):
            try:
                return await (await self._client(source, model_id)).rows(rows)
            except (SourceRefused, ShardnetError) as error:
                failures[source] = str(error)
                self.close()
        raise LostShardError(
            f"no node gives rows of {rows[0].tensor}, for which this node's disk has no room "
            f"({'; '.join(failures.values()) or 'no node to ask'})",
            remedy="start a node that has the whole checkpoint, or make room on this disk",
        )

    async def _client(self, source: str, model_id: str) -> BulkClient:
        if self._linked is None or self._linked[:2] != (source, model_id):
            self.close()
            try:
                async with deadline(self.answer_s):
                    link = await self.dial(source)
            except TimeoutError:
                why = f"{source} opens no link within {self.answer_s:g} s"
                raise PeerSilentError(why) from None
            self._linked = source, model_id, BulkClient(link, model_id, answer_s=self.answer_s)
            link.peer.require(Capability.TABLE_ROWS)
        return self._linked[2]
