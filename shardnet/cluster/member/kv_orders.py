"""Carry out a head's orders to move the KV cache of sequences from other nodes to this one.

Knows the messages, and which link leads to which node. Must not know when moving pays, nor how rows
are stored.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

from shardnet.cluster.member.stage_host import StageHost
from shardnet.cluster.peers.control_link import ControlLink, MessageHandlers
from shardnet.cluster.sharing.bulk_client import KvClient, SourceRefused
from shardnet.errors import UsageError
from shardnet.transport.link import Link
from shardnet.types import HeldRows, SequenceId, SlotId, block_spans
from shardnet.wire.messages.bulk import FetchKv, KvRows
from shardnet.wire.messages.stages import KvMoved, MoveKv

if TYPE_CHECKING:  # it imports torch
    from shardnet.stage.moves.slot_moves import Moves

KEPT_S: Final = 60.0
"""How long something that was moved waits to be opened, and a link for more to be moved."""
ANSWER_S: Final = 10.0
"""Timeout while a node sends nothing of what it was asked for."""


class HostedKv:
    """What sequences hold on this node's stage, for the nodes that take their layers over."""

    def __init__(self, host: StageHost) -> None:
        self._host = host

    async def held(self, ask: FetchKv) -> KvRows:
        """Say what is here. Raises UsageError as SlotMoves.held, and for other rows than here."""

        def look(moves: Moves) -> KvRows:
            if ask.form != moves.form:
                raise UsageError(f"rows of {ask.form} were asked for, and here are {moves.form}")
            held = moves.part_of(ask.layer).held(*_which(ask), ask.begin, ask.end)
            return KvRows(
                request=ask.request,
                first=held.first,
                n_bytes=held.n_bytes,
                is_state=held.is_state,
            )

        return await self._host.on_moves(ask.ring, ask.epoch, look)

    async def read(self, ask: FetchKv, begin: int, end: int) -> memoryview:
        """Copy some positions. Raises UsageError likewise."""

        def read(moves: Moves) -> memoryview:
            return moves.part_of(ask.layer).read(*_which(ask), begin, end)

        return await self._host.on_moves(ask.ring, ask.epoch, read)


class _Source:
    """A node that has layers, and the link to it: one sequence after the other goes over it."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.client: KvClient | None = None


class KvOrders:
    """Moves keys and values to `host`. `dial` opens bulk links."""

    def __init__(self, host: StageHost, dial: Callable[[str], Awaitable[Link]]) -> None:
        self._host = host
        self._dial = dial
        self._sources: dict[str, _Source] = {}
        self._expiry: asyncio.TimerHandle | None = None
        self._forgetting: asyncio.Task[None] | None = None

    def register(self, handlers: MessageHandlers) -> None:
        """Register the order."""
        handlers.register(MoveKv, self._move_for)

    async def _move_for(self, control: ControlLink, message: MoveKv) -> None:
        await control.answer_with(message.request, self.move(message))

    async def move(self, message: MoveKv) -> KvMoved:
        """Bring what a sequence holds elsewhere to the stage that is ready for another ring.

        Raises UsageError if this node has no such stage, or if what comes does not fit it,
        CapacityError without room, LinkError and RemoteProtocolError of a source.
        """
        host, to, sequence_id = self._host, message.to, SequenceId(message.sequence_id)
        n_positions = len(message.token_ids) // 4
        if not n_positions:
            await host.on_arrivals(to, lambda moves: moves.forget(sequence_id))
            return KvMoved(request=message.request, is_whole=False, n_bytes=0)
        token_ids = struct.unpack(f"<{n_positions}I", message.token_ids[: 4 * n_positions])
        member = host.membership
        is_member = member is not None and (member.ring, member.epoch) == (
            message.ring,
            message.epoch,
        )
        own = member.addresses[member.rank] if member is not None and is_member else ""
        self._expire_later()
        await host.on_arrivals(to, lambda moves: moves.begin(sequence_id, token_ids))
        n_bytes, slot = 0, SlotId(message.slot)
        for source in message.sources:
            start, end = source.layers
            layers = [layer for layer in host.prepared_layers(to) if start <= layer < end]
            if not layers:
                continue
            if source.address != own:
                n_bytes += await self._pull(message, source.address, layers, n_positions)
            elif message.is_last:
                ours = host.moves_of(message.ring, message.epoch)

                def take(moves: Moves, ours: Moves = ours, layers: list[int] = layers) -> None:
                    for layer in layers:
                        moves.part_of(layer).take_own(sequence_id, ours, slot, layer, n_positions)

                await host.on_arrivals(to, take)
        is_whole = await host.on_arrivals(
            to, lambda moves: moves.is_whole(sequence_id, n_positions)
        )
        return KvMoved(request=message.request, is_whole=is_whole, n_bytes=n_bytes)

    async def _pull(
        self, message: MoveKv, address: str, layers: list[int], n_positions: int
    ) -> int:
        """Fetch layers from one node; return how many bytes came. Raises as `move`."""
        source = self._sources.setdefault(address, _Source())
        async with source.lock:
            if source.client is None or source.client.link.closed:
                source.client = KvClient(await self._dial(address), answer_s=ANSWER_S)
            try:
                return await self._fetch(source.client, message, layers, n_positions)
            except BaseException as error:  # answers to come would be taken for those of others
                source.client.link.abort("what was asked for is not wanted any more")
                if isinstance(error, SourceRefused):
                    raise UsageError(f"a layer was not given away: {error}") from None
                raise

    async def _fetch(
        self, client: KvClient, message: MoveKv, layers: list[int], n_positions: int
    ) -> int:
        """Ask for all layers, then take what comes, block by block."""
        sequence_id = SequenceId(message.sequence_id)

        def wanted(moves: Moves) -> tuple[str, list[int]]:
            return moves.form, [
                moves.part_of(layer).next_wanted(sequence_id, layer) for layer in layers
            ]

        form, begins = await self._host.on_arrivals(message.to, wanted)
        asked = [
            client.ask(
                FetchKv(
                    request=0,
                    ring=message.ring,
                    epoch=message.epoch,
                    sequence_id=message.sequence_id,
                    slot=message.slot,
                    layer=layer,
                    begin=begin,
                    end=n_positions,
                    form=form,
                )
            )
            for layer, begin in zip(layers, begins, strict=True)
        ]
        n_bytes = 0
        for request, layer in zip(asked, layers, strict=True):
            n_bytes += await self._take(client, message, request, layer, n_positions)
        return n_bytes

    async def _take(
        self, client: KvClient, message: MoveKv, request: int, layer: int, end: int
    ) -> int:
        """Take one layer; nothing counts unless its digest is right."""
        sequence_id, to = SequenceId(message.sequence_id), message.to
        rows = await client.rows(request)

        def expect(moves: Moves) -> None:
            held = HeldRows(first=rows.first, n_bytes=rows.n_bytes, is_state=rows.is_state)
            moves.part_of(layer).expect(sequence_id, layer, held, end)

        await self._host.on_arrivals(to, expect)
        parts = [(0, end)] if rows.is_state else [*block_spans(rows.first, end)]
        row_bytes = rows.n_bytes // max(1, end - rows.first)
        buffer = bytearray()
        async for piece in client.payload(rows):
            buffer += piece
            while parts and len(buffer) >= (
                size := rows.n_bytes if rows.is_state else row_bytes * (parts[0][1] - parts[0][0])
            ):
                part, data = parts.pop(0), buffer[:size]
                del buffer[:size]

                def write(
                    moves: Moves,
                    part: tuple[int, int] = part,
                    data: bytearray = data,
                ) -> None:
                    moves.part_of(layer).write(sequence_id, layer, *part, data)

                await self._host.on_arrivals(to, write)
        await self._host.on_arrivals(
            to, lambda moves: moves.part_of(layer).came(sequence_id, layer, end)
        )
        return rows.n_bytes

    def _expire_later(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        self._expiry = asyncio.get_running_loop().call_later(KEPT_S, self._expire)

    def _expire(self) -> None:
        self._expiry = None
        self._forgetting = asyncio.ensure_future(self._forget())

    async def _forget(self) -> None:
        """Close the links, and drop what came and was not opened."""
        sources, self._sources = [*self._sources.values()], {}
        for source in sources:
            if source.client is not None:
                await source.client.link.close()
        await self._host.forget_arrivals()

    async def close(self) -> None:
        """Close the links."""
        if self._expiry is not None:
            self._expiry.cancel()
        if self._forgetting is not None:
            await asyncio.wait([self._forgetting])
        for source in self._sources.values():
            if source.client is not None:
                await source.client.link.close()


def _which(ask: FetchKv) -> tuple[SequenceId, SlotId, int]:
    return SequenceId(ask.sequence_id), SlotId(ask.slot), ask.layer
