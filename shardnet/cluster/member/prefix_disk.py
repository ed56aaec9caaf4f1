"""Finished prompts of this node's stages on their way to disk and back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from shardnet.cluster.member.stage_loader import LOAD_SILENCE_S, looked_at
from shardnet.cluster.store.disk_jobs import DiskJobs
from shardnet.errors import ShardnetError
from shardnet.runtime.loading.loaded_stage import LoadedStage

if TYPE_CHECKING:  # it imports torch
    from shardnet.stage.prefixes.stage_prefixes import StagePrefixes

T = TypeVar("T")

SETTLE_PREFIXES_S = 10.0
"""How long a stage that is freed waits for finished prompts to be on disk."""


class PrefixDisk:
    """Reads and writes prefixes on a thread of its own."""

    def __init__(self) -> None:
        self._jobs = DiskJobs("shardnet-prefix-reader", silence_s=LOAD_SILENCE_S)

    async def run(
        self, prefixes: StagePrefixes, job: Callable[[StagePrefixes], T], *, is_long: bool
    ) -> T:
        """Run `job` with prefixes; see StageHost.on_prefixes."""
        folder = prefixes.files.store.folder
        place = folder if is_long else f"the list of {folder}"
        return await self._jobs.run(place, partial(job, prefixes))

    def retire(self, old: LoadedStage, new: LoadedStage) -> None:
        """Free a stage while the next one begins to work; the ring does not wait for it."""
        kept = prefixes_of(new)
        for prefixes in prefixes_of(old):
            if prefixes not in kept:

                def settle(prefixes: StagePrefixes = prefixes) -> None:
                    prefixes.settle(SETTLE_PREFIXES_S)
                    prefixes.close()

                folder = prefixes.files.store.folder
                self._jobs.submit(folder, settle).add_done_callback(looked_at)

    async def settle(self, loaded: LoadedStage) -> None:
        """Let finished prompts reach the disk before their memory is wanted for something else."""
        for prefixes in prefixes_of(loaded):
            folder = prefixes.files.store.folder
            try:
                with contextlib.suppress(ShardnetError):  # the disk hangs, or this node leaves
                    await self._jobs.run(folder, partial(prefixes.settle, SETTLE_PREFIXES_S))
            finally:
                prefixes.close()

    def close(self) -> None:
        """End the thread."""
        self._jobs.close()


def prefixes_of(stage: LoadedStage) -> list[StagePrefixes]:
    """List the prefixes of a stage and of its parts."""
    parts = stage.parts or (stage,)
    return [part.prefixes for part in parts if part.prefixes is not None]
