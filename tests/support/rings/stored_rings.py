"""Rings in one process whose stages keep prefixes on disk, asked as plain calls."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

from support.rings.torch_rings import TorchStages, request, run

from shardnet.runtime.engine.prefixes import FoundPrefix, Prefixes
from shardnet.runtime.engine.requests import GenerationRequest, RequestEvent, RequestMoved
from shardnet.stage.prefixes.prefix_store import PrefixStore
from shardnet.stage.prefixes.stage_prefixes import StagePrefixes
from shardnet.types import LiveState, SequenceId

LIMIT_BYTES = 1 << 30


class StoredStages:
    """Gives every stage the folder of its layers below `folder`, and asks them one by one."""

    def __init__(self, stages: TorchStages, folder: Path, limit_bytes: int = LIMIT_BYTES) -> None:
        self.stages = stages
        self.store = PrefixStore(folder, limit_bytes)
        self.kept = []
        for compute in stages.computes:
            layers = str(compute._model.layers)
            files = self.store.of_stage(f"stage {layers}", "/m", layers)
            compute.prefixes = StagePrefixes(compute._model.kv, files)
            self.kept.append(compute.prefixes)

    async def find(self, keys: Sequence[bytes]) -> list[FoundPrefix]:
        return [
            FoundPrefix(
                restorable=int.from_bytes(kept.restorable(keys), "little"),
                block_bytes=kept.block_bytes,
                bytes_per_s=kept.files.store.bytes_per_s,
            )
            for kept in self.kept
        ]

    async def restore(
        self, sequence_id: SequenceId, keys: Sequence[bytes], token_ids: bytes
    ) -> bool:
        ids = struct.unpack(f"<{len(token_ids) // 4}I", token_ids)
        return all(kept.restore(sequence_id, keys, ids) for kept in self.kept)

    async def forget(self, sequence_id: SequenceId) -> None:
        await self.restore(sequence_id, (), b"")

    def run(self, *requests: GenerationRequest) -> list[list[RequestEvent]]:
        """Run requests one by one on a cold ring, then wait until all is on disk.

        A last one comes after their end has reached every stage.
        """
        last = request([1, 2, 3], 1)
        events = run(
            self.stages,
            *requests,
            last,
            chunk_rows=256,
            at_once=False,
            prefixes=Prefixes(self, b"this ring"),
        )
        self.settle()
        return events[:-1]

    def settle(self) -> None:
        """Wait until all is on disk."""
        for kept in self.kept:
            kept.settle(30.0)

    def close(self) -> None:
        """End the threads that write."""
        for kept in self.kept:
            kept.close()


def n_kept(events: Sequence[RequestEvent]) -> int:
    """How many positions of the prompt were not computed."""
    running = [
        event
        for event in events
        if isinstance(event, RequestMoved) and event.state is LiveState.RUNNING
    ]
    assert len(running) == 1
    return running[0].n_kept
