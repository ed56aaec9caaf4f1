"""The prefixes that the stages of a ring keep on disk, as its head asks for them.

Knows every stage's port, and what makes two rings compute the same bits. Must not know when a
prefix is worth reading.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from itertools import groupby

from shardnet.cluster.ring.stage_port import StagePort, ask_all
from shardnet.runtime.engine.prefixes import FoundPrefix
from shardnet.types import LayerRange, SequenceId
from shardnet.wire.messages.stages import FindPrefix, PrefixFound, PrefixRestored, RestorePrefix


class RingPrefixes:
    """Asks all stages of a ring at the same time."""

    def __init__(self, ports: Sequence[StagePort], ring: str, epoch: int) -> None:
        self._ports = ports
        self._ring = ring
        self._epoch = epoch

    async def find(self, keys: Sequence[bytes]) -> list[FoundPrefix]:
        """Ask every stage which blocks it has. Raises the first error of any."""
        message = FindPrefix(request=0, ring=self._ring, epoch=self._epoch, keys=tuple(keys))
        answers: list[PrefixFound] = await ask_all(
            port.find_prefix(message) for port in self._ports
        )
        return [
            FoundPrefix(
                restorable=int.from_bytes(answer.restorable, "little"),
                block_bytes=answer.block_bytes,
                bytes_per_s=answer.bytes_per_s,
            )
            for answer in answers
        ]

    async def restore(
        self, sequence_id: SequenceId, keys: Sequence[bytes], token_ids: bytes
    ) -> bool:
        """Have every stage read these blocks; return whether all have. Raises likewise."""
        message = RestorePrefix(
            request=0,
            ring=self._ring,
            epoch=self._epoch,
            sequence_id=sequence_id,
            keys=tuple(keys),
            token_ids=token_ids,
        )
        answers: list[PrefixRestored] = await ask_all(
            port.restore_prefix(message) for port in self._ports
        )
        return all(answer.is_whole for answer in answers)

    async def forget(self, sequence_id: SequenceId) -> None:
        """Have every stage forget what it has read for a sequence. Raises likewise."""
        await self.restore(sequence_id, (), b"")


def ring_seed(facts: Sequence[object], stages: Sequence[tuple[LayerRange, str]]) -> bytes | None:
    """Return what stands for a ring in the keys of its prefixes, None if it keeps none.

    `facts` are what the ring as a whole computes with, `stages` the layers and the arithmetic of
    each, "" where it keeps nothing. Neighbours of equal arithmetic count as one stage: the border
    between them changes no bit.
    """
    if not all(arithmetic for _, arithmetic in stages):
        return None
    computed = [
        [arithmetic, sum(len(layers) for layers, _ in group)]
        for arithmetic, group in groupby(stages, key=lambda stage: stage[1])
    ]
    return hashlib.sha256(json.dumps([*facts, computed]).encode()).digest()
