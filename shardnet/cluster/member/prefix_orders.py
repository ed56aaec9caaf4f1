"""Carry out what a head asks of the prefixes that this node keeps on disk.

Knows the messages, and that reading may take long. Must not know when a prefix is worth reading.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from shardnet.cluster.member.stage_host import StageHost
from shardnet.cluster.peers.control_link import ControlLink, MessageHandlers
from shardnet.types import SequenceId
from shardnet.wire.messages.stages import FindPrefix, PrefixFound, PrefixRestored, RestorePrefix

if TYPE_CHECKING:
    from shardnet.stage.prefixes.stage_prefixes import StagePrefixes


async def find_prefix(host: StageHost, message: FindPrefix) -> PrefixFound:
    """Say which blocks are on disk here. Raises what StageHost.on_prefixes raises."""

    def find(prefixes: StagePrefixes) -> PrefixFound:
        return PrefixFound(
            request=message.request,
            restorable=prefixes.restorable(message.keys),
            block_bytes=prefixes.block_bytes,
            bytes_per_s=prefixes.files.store.bytes_per_s,
        )

    return await host.on_prefixes(message.ring, message.epoch, find, is_long=False)


async def restore_prefix(host: StageHost, message: RestorePrefix) -> PrefixRestored:
    """Read blocks for a sequence. Raises what StageHost.on_prefixes raises."""
    token_ids = struct.unpack(f"<{len(message.token_ids) // 4}I", _whole(message.token_ids))

    def restore(prefixes: StagePrefixes) -> bool:
        return prefixes.restore(SequenceId(message.sequence_id), message.keys, token_ids)

    is_whole = await host.on_prefixes(message.ring, message.epoch, restore, is_long=True)
    return PrefixRestored(request=message.request, is_whole=is_whole)


class PrefixOrders:
    """Answers the heads of other nodes."""

    def __init__(self, host: StageHost) -> None:
        self._host = host

    def register(self, handlers: MessageHandlers) -> None:
        """Register both orders."""
        handlers.register(FindPrefix, self._find_for)
        handlers.register(RestorePrefix, self._restore_for)

    async def _find_for(self, control: ControlLink, message: FindPrefix) -> None:
        control.send(await find_prefix(self._host, message))

    async def _restore_for(self, control: ControlLink, message: RestorePrefix) -> None:
        await control.answer_with(message.request, restore_prefix(self._host, message))


def _whole(token_ids: bytes) -> bytes:
    """Drop the bytes of an id that is cut off: the prefix is refused for its length then."""
    return token_ids[: len(token_ids) // 4 * 4]
