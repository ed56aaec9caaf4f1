"""Has the beginnings of prompts read from the stages' disks, for an engine.

Must not know how that is decided and done (prefixes.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from shardnet.runtime.engine.live_requests import LiveRequests
from shardnet.runtime.engine.prefixes import Prefixes
from shardnet.runtime.engine.requests import GenerationRequest
from shardnet.runtime.scheduling.scheduler import Scheduler
from shardnet.runtime.scheduling.sequences import RestorePrefix


@dataclass(slots=True, kw_only=True)
class Restoring:
    """What is being read now. `prefixes` is None where the ring keeps none.

    `on_end` is called when a sequence may begin, with what was read or without.
    """

    prefixes: Prefixes | None
    scheduler: Scheduler
    on_end: Callable[[], None]
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def n_positions(self) -> int:
        """Positions that were read so far on this ring."""
        return self.prefixes.restored_positions if self.prefixes else 0

    async def find(self, request: GenerationRequest) -> int:
        """Return how many positions of the prompt to read from the stages' disks."""
        if self.prefixes is None:
            return 0
        if request.deterministic or request.lockstep or request.outputs.needs_whole_prompt:
            return 0
        inputs = request.adapters, request.places
        held = self.scheduler.book.prefix(request.prompt, *inputs)
        n_held = held.n_kept if held else 0
        return await self.prefixes.find(request.prompt, n_held, *inputs)

    def begin(self, wanted: RestorePrefix, requests: LiveRequests) -> None:
        """Begin to read for a sequence."""
        if self.prefixes is None:  # nobody found anything
            self.scheduler.restored(wanted.sequence_id, 0)
            return
        restoring = asyncio.create_task(self._restore(self.prefixes, wanted, requests))
        self._tasks.add(restoring)
        restoring.add_done_callback(self._tasks.discard)

    def cancel(self) -> None:
        """End what is being read: the ring is gone."""
        for restoring in self._tasks:
            restoring.cancel()

    def learn(self, n_rows: int, slowest_us: int) -> None:
        """Note what a prompt chunk cost; see Prefixes.learn."""
        if self.prefixes is not None:
            self.prefixes.learn(n_rows, slowest_us)

    async def _restore(
        self, prefixes: Prefixes, wanted: RestorePrefix, requests: LiveRequests
    ) -> None:
        """Have a prompt's beginning read from disk, and let its sequence begin in any case."""
        sequence_id, n_positions = wanted.sequence_id, 0
        live = requests.get(sequence_id)
        if live is not None:
            request = live.request
            n_positions = await prefixes.restore(
                sequence_id, request.prompt, wanted.n_positions, request.adapters, request.places
            )
        if not self.scheduler.restored(sequence_id, n_positions) and n_positions:
            await prefixes.forget(sequence_id)
        self.on_end()
