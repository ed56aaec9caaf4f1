"""The plain values every room shares: ids, layer ranges, dtypes, row groups, sampling parameters.

Knows nothing of bytes, tensors or sockets, and imports neither torch nor numpy.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NewType

from shardnet.errors import SamplingError, UsageError

NodeId = NewType("NodeId", str)
SequenceId = NewType("SequenceId", int)
SlotId = NewType("SlotId", int)
Epoch = NewType("Epoch", int)
StepId = NewType("StepId", int)

BLOCK_POSITIONS = 256
"""Positions in one block of KV room (design: slot, block)."""


def blocks_for(n_positions: int) -> int:
    """Return how many blocks hold `n_positions` positions."""
    return -(-n_positions // BLOCK_POSITIONS)


PREFILL_CHUNK_ROWS = 256
"""Rows of one prefill chunk: fixed, counted from position 0, so any split gives the same bits."""


class DType(enum.Enum):
    """A dtype that computes or travels. The value is the name used in flags and JSON."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"

    @property
    def size_bytes(self) -> int:
        """Bytes of one element."""
        return 4 if self is DType.FLOAT32 else 2


@dataclass(frozen=True, slots=True, order=True)
class LayerRange:
    """A half-open range of absolute layer numbers, `[start, end)`."""

    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end:
            raise UsageError(f"layer range {self.start}-{self.end} is empty or negative")

    def __len__(self) -> int:
        return self.end - self.start

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.end))

    def __str__(self) -> str:
        return f"{self.start}-{self.end}"


def parse_layers(text: str) -> tuple[LayerRange, ...]:
    """Read `0-8,8-12` (half-open, in ring order).

    Raises UsageError when a part is not two numbers, is empty, or the parts do not join at 0.
    """
    ranges = []
    for part in text.split(","):
        start, dash, end = part.strip().partition("-")
        if not (dash and start.isdigit() and end.isdigit()):
            raise UsageError(f"--layers: '{part}' is not START-END; write for example 0-8,8-12")
        ranges.append(LayerRange(int(start), int(end)))
    expected = 0
    for layers in ranges:
        if layers.start != expected:
            raise UsageError(
                f"--layers: range {layers} should start at {expected}; ranges must join, from 0"
            )
        expected = layers.end
    return tuple(ranges)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowGroup:
    """Consecutive rows of one sequence in a micro-batch.

    `position` is the position of the first row, `n_sampled` how many of the last rows the tail
    samples.
    """

    sequence_id: SequenceId
    slot: SlotId
    position: int
    n_rows: int
    n_sampled: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """The rows that travel round the ring in one step, without their activations.

    `token_ids` holds the input token id of every row, group after group.
    """

    epoch: Epoch
    step: StepId
    groups: tuple[RowGroup, ...]
    token_ids: Sequence[int]

    @property
    def n_rows(self) -> int:
        """Rows of all groups."""
        return sum(group.n_rows for group in self.groups)

    @property
    def n_sampled(self) -> int:
        """Rows that the tail samples: the number of ids in the answering token frame."""
        return sum(group.n_sampled for group in self.groups)


class LiveState(enum.Enum):
    """How a request stands that has not ended. The value is the name used on the wire."""

    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    RESUMED = "resumed"


MAX_LOGPROBS = 100
MAX_SEED = 2**64 - 1
MAX_SAMPLE_INDEX = 2**32 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tail chooses a token. Temperature 0 is greedy, `top_k` 0 and `top_p` 1 are off.

    `sample_index` tells equal prompts with one seed apart (design decision 3).
    `n_logprobs` is None when no logprobs are asked for, else how many top entries go with each
    token's own.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    sample_index: int = 0
    n_logprobs: int | None = None

    def check(self) -> None:
        """Raise SamplingError that names the first parameter outside its range."""
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise SamplingError(f"temperature must be 0 or more, not {self.temperature}")
        if self.top_k < 0:
            raise SamplingError(f"top-k must be 0 (off) or more, not {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise SamplingError(f"top-p must be above 0 and at most 1, not {self.top_p}")
        if not 0 <= self.seed <= MAX_SEED:
            raise SamplingError(f"seed must be from 0 to 2^64-1, not {self.seed}")
        if not 0 <= self.sample_index <= MAX_SAMPLE_INDEX:
            raise SamplingError(f"sample index must be from 0 to 2^32-1, not {self.sample_index}")
        if self.n_logprobs is not None and not 0 <= self.n_logprobs <= MAX_LOGPROBS:
            raise SamplingError(f"logprobs must be from 0 to {MAX_LOGPROBS}, not {self.n_logprobs}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Logprobs of one sampled row: the token's own and the `top` (token id, logprob) by rank.

    Log-softmax of the raw float32 logits, before penalties and temperature.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
