"""Which prompts begin with what is on the stages' disks, whether reading it pays, and who waits.

Knows keys of blocks, rates, and that all stages must restore the same positions or none. Must not
know files, nor how the stages are asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from shardnet.errors import ShardnetError
from shardnet.runtime.engine.live_request import LiveRequests
from shardnet.runtime.engine.requests import GenerationRequest
from shardnet.runtime.scheduling.kv_block_manager import block_keys
from shardnet.runtime.scheduling.scheduler import Scheduler
from shardnet.runtime.scheduling.sequences import RestorePrefix
from shardnet.slot_operations import AdapterUse, Pictures, whole_before
from shardnet.types import BLOCK_POSITIONS, STORED_PREFIX_POSITIONS, SequenceId

_log = logging.getLogger(__name__)

FIND_S: Final = 1.0
"""How long stages may take to say what they have: a prompt waits for it."""
FIND_SHARE: Final = 0.1
"""And this share of what computing it would take: on a busy machine a second passes soon."""
_LEAST_ROWS: Final = 64
"""Steps of fewer rows say little about what prompts cost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPrefix:
    """What one stage has of a prompt: bit `n - 1` of `restorable` is set for its first `n` blocks.

    A block has `block_bytes`, read at `bytes_per_s`, 0 where that was not measured.
    """

    restorable: int
    block_bytes: int
    bytes_per_s: float

    def seconds(self, n_blocks: int) -> float:
        """Predict the time to read the first blocks; 0 where nothing was measured."""
        return n_blocks * self.block_bytes / self.bytes_per_s if self.bytes_per_s else 0.0


class PrefixStages(Protocol):
    """The stages of a ring, all of which keep prefixes on disk."""

    async def find(self, keys: Sequence[bytes]) -> list[FoundPrefix]:
        """Ask every stage which blocks it has. Raises the first error of any."""

    async def restore(
        self, sequence_id: SequenceId, keys: Sequence[bytes], token_ids: bytes
    ) -> bool:
        """Have every stage read these blocks; return whether all have. Raises likewise."""

    async def forget(self, sequence_id: SequenceId) -> None:
        """Have every stage forget what it has read for a sequence. Raises likewise."""


class Prefixes:
    """The prefixes of one ring, which `seed` stands for.

    `row_s` is what a row of a prompt takes as far as is known before any was computed.
    """

    def __init__(self, stages: PrefixStages, seed: bytes, row_s: float | None = None) -> None:
        self._stages = stages
        self.seed = seed
        self._row_s = row_s
        self._one_by_one = asyncio.Lock()
        self._unforgotten: set[SequenceId] = set()
        self.restored_positions = 0
        """Positions that were read from disk instead of being computed."""

    def learn(self, n_rows: int, slowest_us: int) -> None:
        """Learn what rows of prompts take, from a step of nothing else: its slowest stage."""
        if n_rows >= _LEAST_ROWS:
            row_s = slowest_us / 1e6 / n_rows
            self._row_s = row_s if self._row_s is None else (3 * self._row_s + row_s) / 4

    async def find(
        self,
        prompt: Sequence[int],
        n_held: int,
        adapters: Sequence[AdapterUse] = (),
        pictures: Pictures = (),
    ) -> int:
        """Return how many of the first positions of `prompt` to read from disk, 0 for none.

        `n_held` of them are in the KV cache; all were computed with the same `adapters`. The last
        token never counts: its row is sampled, nor do blocks that cut a picture which must not be.
        Reading must be faster than computing, as far as
        both were measured.
        """
        n_positions = len(prompt) - 1
        if n_positions < max(STORED_PREFIX_POSITIONS, n_held + BLOCK_POSITIONS):
            return 0
        keys = block_keys(self.seed, prompt, n_positions, adapters, pictures)
        computing_s = (n_positions - n_held) * (self._row_s or 0.0)
        try:
            async with asyncio.timeout(FIND_S + FIND_SHARE * computing_s):
                found = await self._stages.find(keys)
        except (ShardnetError, TimeoutError):
            return 0
        restorable = (1 << len(keys)) - 1
        for stage in found:
            restorable &= stage.restorable
        n_blocks = restorable.bit_length()
        while whole_before(pictures, n_blocks * BLOCK_POSITIONS) < n_blocks * BLOCK_POSITIONS:
            n_blocks = (restorable & ((1 << (n_blocks - 1)) - 1)).bit_length()
        more = n_blocks * BLOCK_POSITIONS - n_held
        if more < BLOCK_POSITIONS:
            return 0
        slowest_s = max(stage.seconds(n_blocks) for stage in found)
        if self._row_s is not None and slowest_s >= more * self._row_s:
            return 0
        return n_blocks * BLOCK_POSITIONS

    async def restore(
        self,
        sequence_id: SequenceId,
        prompt: Sequence[int],
        n_positions: int,
        adapters: Sequence[AdapterUse] = (),
        pictures: Pictures = (),
    ) -> int:
        """Have all stages read the first positions; return how many they have: all, or 0."""
        keys = block_keys(self.seed, prompt, n_positions, adapters, pictures)
        token_ids = struct.pack(f"<{n_positions}I", *prompt[:n_positions])
        async with self._one_by_one:
            for each in [*self._unforgotten]:
                await self.forget(each)
            try:
                if await self._stages.restore(sequence_id, keys, token_ids):
                    self.restored_positions += n_positions
                    return n_positions
            except Exception as error:  # the positions are computed instead
                _log.warning("a prompt's beginning was not read from disk: %s", error)
            await self.forget(sequence_id)
        return 0

    async def forget(self, sequence_id: SequenceId) -> None:
        """Have the stages forget what they have read for a sequence that does not begin."""
        self._unforgotten.add(sequence_id)
        with contextlib.suppress(ShardnetError):  # it is tried again before the next one is read
            await self._stages.forget(sequence_id)
            self._unforgotten.discard(sequence_id)


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
        held = self.scheduler.queue.kv_blocks.prefix(request.prompt, *inputs)
        n_held = held.n_kept if held else 0
        return await self.prefixes.find(request.prompt, n_held, *inputs)

    def begin(self, wanted: RestorePrefix, requests: LiveRequests) -> None:
        """Begin to read for a sequence."""
        if self.prefixes is None:  # nobody found anything
            self.scheduler.queue.restored(wanted.sequence_id, 0)
            asyncio.get_running_loop().call_soon(self.on_end)
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
        if not self.scheduler.queue.restored(sequence_id, n_positions) and n_positions:
            await prefixes.forget(sequence_id)
        self.on_end()
