"""Whole rings in one process: real workers, links, pipeline and engine over a compute that counts.

A stage of FakeCompute adds one to what it gets for every row; the tail's token is a function of the
slot's tokens so far and of how many stages each row has passed. A lost, repeated, reordered or
mixed-up row changes the tokens.
"""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from support.rings.rings import SMALLEST, NoText, running_ring

from shardnet.errors import ShardnetError
from shardnet.runtime.engine.engine import Engine
from shardnet.runtime.engine.requests import GenerationFinished, GenerationRequest, TokenGenerated
from shardnet.runtime.scheduling.scheduler import Scheduler
from shardnet.runtime.scheduling.step_cost import RingLimits, StepLimits
from shardnet.runtime.stage.compute import Activations, Samples
from shardnet.sampling_params import SamplingParams
from shardnet.slot_operations import CloseSequence, FreeSlot, OpenSequence, SlotOperation
from shardnet.transport.link import Link, LinkOptions
from shardnet.types import Epoch, MicroBatch, SequenceId, SlotId, WireDType

VOCAB = 50
WIDTH = 8192
"""Elements of a row. With float32 a row is 32 KiB: more than the smallest socket buffers hold."""


def expected_tokens(prompt: Sequence[int], n_tokens: int) -> list[int]:
    """What a ring of any number of stages must generate."""
    tokens = list(prompt)
    for _ in range(n_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def next_token(history: Sequence[int]) -> int:
    return (sum((place + 1) * token for place, token in enumerate(history)) * 7 + 3) % VOCAB


@dataclass
class FakeCompute:
    """StageCompute without a model. `fail_at` makes the step that holds that token id fail."""

    rank: int
    n_stages: int
    fail_at: int | None = None
    owners: dict[SlotId, SequenceId] = field(default_factory=dict)
    history: dict[SlotId, list[int]] = field(default_factory=dict)

    def use_wire(self, sent: WireDType, received: WireDType) -> None:
        assert sent is received is WireDType.FLOAT32

    def operate(self, operation: SlotOperation) -> None:
        match operation:
            case OpenSequence(slot=slot, n_kept=n_kept, source=source):
                assert slot not in self.owners
                self.owners[slot] = operation.sequence_id
                held = self.history.get(slot if source is None else source, [])
                assert len(held) >= n_kept
                self.history[slot] = held[:n_kept]
            case CloseSequence(sequence_id=sequence_id, slot=slot, n_kept=n_kept):
                assert self.owners.pop(slot) == sequence_id
                del self.history[slot][n_kept:]
            case FreeSlot(slot=slot):
                assert slot not in self.owners
                del self.history[slot]

    def reset(self) -> None:
        self.owners.clear()

    def compute(self, batch: MicroBatch, activations: Activations | None) -> Activations | Samples:
        if self.fail_at in batch.token_ids:
            raise ShardnetError(f"rank {self.rank} met token {self.fail_at}")
        passed = 0.0
        if activations is not None:
            assert (activations.dtype, activations.width) == (WireDType.FLOAT32, WIDTH)
            rows = struct.unpack(f"<{len(batch.token_ids) * WIDTH}f", activations.payload)
            assert len(set(rows)) == 1
            passed = rows[0]
        assert passed == self.rank
        ids, row = [], 0
        for group in batch.groups:
            assert self.owners[group.slot] == group.sequence_id
            history = self.history[group.slot]
            assert len(history) == group.position
            history += batch.token_ids[row : row + group.n_rows]
            row += group.n_rows
            ids += [next_token(history)] * group.n_sampled
        if self.rank == self.n_stages - 1:
            return Samples(token_ids=ids, logprobs=[None] * len(ids))
        payload = struct.pack("<f", passed + 1) * (len(batch.token_ids) * WIDTH)
        return Activations(payload=payload, dtype=WireDType.FLOAT32, width=WIDTH)


@dataclass
class FakeRing:
    """A ring that runs."""

    engine: Engine
    computes: list[FakeCompute]
    links: list[Link]

    async def generate(self, prompt: Sequence[int], n_tokens: int) -> list[int]:
        """Generate and return the tokens."""
        tokens = []
        async for event in self.engine.generate(request_of(prompt, n_tokens)):
            if isinstance(event, TokenGenerated):
                tokens.append(event.token_id)
            elif isinstance(event, GenerationFinished):
                self.timing = event.timing
        return tokens


def request_of(
    prompt: Sequence[int], n_tokens: int, *, priority: int = 0, deadline_s: float | None = None
) -> GenerationRequest:
    """A greedy request without text."""
    return GenerationRequest(
        prompt=tuple(prompt),
        sampling=SamplingParams(),
        max_tokens=n_tokens,
        stop_ids=frozenset(),
        text=NoText(),
        priority=priority,
        deadline_s=deadline_s,
    )


@asynccontextmanager
async def fake_ring(
    n_stages: int,
    *,
    over: str,
    chunk_rows: int = 4,
    max_slots: int = 8,
    room_blocks: int = 64,
    options: LinkOptions = SMALLEST,
) -> AsyncIterator[FakeRing]:
    """Run a ring over "memory" or "tcp" links, by default with the smallest queues and buffers."""
    computes = [FakeCompute(rank, n_stages) for rank in range(n_stages)]
    scheduler = Scheduler(
        RingLimits(
            epoch=Epoch(1),
            n_stages=n_stages,
            room_blocks=room_blocks,
            context=1024,
            max_slots=max_slots,
            limits=StepLimits(chunk_rows=chunk_rows, mixed_rows=chunk_rows),
        )
    )
    async with running_ring(computes, scheduler, vocab_size=VOCAB, over=over, options=options) as (
        engine,
        links,
    ):
        yield FakeRing(engine, computes, links)
