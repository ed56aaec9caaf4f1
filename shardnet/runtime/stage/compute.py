"""What a stage computes, behind a small protocol (design decision 15).

Knows the values that go in and come out of one stage's compute. Must not know links, rings or
time. `torch_compute.py` is the real implementation; tests bring a fake.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from shardnet.errors import ShardnetError
from shardnet.types import (
    MicroBatch,
    SequenceId,
    SlotOperation,
    StepId,
    TokenLogprobs,
    WireDType,
)
from shardnet.wire.messages.extras import StageExperts, StageTiming
from shardnet.wire.payloads.rows import RowBlock

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """The hidden states of a micro-batch: `rows x width`, as they travel on a wire of `dtype`.

    `routing` is what the stage's own layers chose for those who asked.
    """

    payload: Buffer
    dtype: WireDType
    width: int
    routing: Sequence[StageExperts] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredToken:
    """The logprobs of the prompt token at `position`, of the row before it."""

    sequence_id: SequenceId
    position: int
    logprobs: TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """What the tail made of a step: one id per sampled row, and what else was asked for.

    `prompt_logprobs` and `blocks` are in order of their positions, sequence by sequence. `routing`
    is that of the stage's own layers.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs | None]
    prompt_logprobs: Sequence[ScoredToken] = ()
    blocks: Sequence[RowBlock] = ()
    routing: Sequence[StageExperts] = ()


class StageCompute(Protocol):
    """One stage's layers, KV cache and, on the tail, sampler. Called from the compute thread only.

    Calls come in data order: what a step sees is what the calls before it left.
    """

    def use_wire(self, dtype: WireDType) -> None:
        """Give activations in `dtype` from now on, and take no other."""

    def operate(self, operation: SlotOperation) -> None:
        """Open or close a sequence, or free a slot."""

    def compute(self, batch: MicroBatch, activations: Activations | None) -> Activations | Samples:
        """Run the stage's layers over the rows of `batch`.

        `activations` is None on the first stage, which embeds the token ids. The last stage
        returns Samples. Raises CapacityError when the KV room is full, ShardnetError for inputs
        that do not fit the model.
        """

    def reset(self) -> None:
        """Forget all sequences and free all slots; keep the weights."""

    @property
    def used_blocks(self) -> int:
        """KV blocks that slots hold now. Any thread may look."""


# What travels through a stage, decoded. A stage forwards what it does not consume.


@dataclass(frozen=True, slots=True, kw_only=True)
class StepArrived:
    """Rows to compute. `arrived_ns` is when they reached this stage (time.perf_counter_ns).

    `timings` and `routing` are those of the stages before.
    """

    batch: MicroBatch
    activations: Activations | None
    timings: tuple[StageTiming, ...]
    arrived_ns: int
    routing: tuple[StageExperts, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepComputed:
    """A stage's result of one step; `timings` and `routing` are those of all stages so far."""

    batch: MicroBatch
    result: Activations | Samples
    timings: tuple[StageTiming, ...]
    routing: tuple[StageExperts, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFailed:
    """A step that some stage could not compute; it travels on to the head in place of its rows."""

    step: StepId
    error: ShardnetError


StepResult = Activations | Samples | ShardnetError
"""What became of one step's rows."""


@runtime_checkable
class TogetherCompute(Protocol):
    """What a StageCompute has besides where a pass costs the same for many rows."""

    def compute_together(self, steps: Sequence[StepArrived]) -> list[StepResult]:
        """Run the stage's layers over the rows of these steps, which follow one another.

        Each gets what `compute` would return or raise, called in this order.
        """


StageInput = StepArrived | SlotOperation | StepFailed
StageOutput = StepComputed | SlotOperation | StepFailed
