"""What a request gets beside tokens, put in order on the head: prompt logprobs and rows.

Knows which rows count: those of rejected guesses do not, and a replayed row counts once. Must not
know steps, links or clients.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shardnet.errors import BusyError, CapacityError, RemoteProtocolError
from shardnet.runtime.stage.compute import ScoredToken
from shardnet.types import ALL_ROWS, OutputKind, OutputParams, SequenceId, TokenLogprobs
from shardnet.wire.payloads.rows import RowBlock

MAX_OUTPUT_BYTES = 1 << 30
"""Logits and hidden states that the requests of one head may take together, as float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScored:
    """Logprobs of the prompt's next tokens in order; the first token has none."""

    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsGiven:
    """The next rows of the logits, hidden states or experts that were asked for."""

    block: RowBlock


OutputEvent = PromptScored | RowsGiven


class OutputCollector:
    """The outputs of one request with a prompt of `n_prompt` tokens."""

    def __init__(self, params: OutputParams, n_prompt: int) -> None:
        self._params = params
        self._next_scored = 1
        self._pending: Sequence[RowBlock] = ()
        self._streams = {
            kind: _stream(params, kind, first)
            for kind in OutputKind
            if (first := params.first_row(kind, n_prompt)) is not None
        }

    def arrive(
        self, prompt_logprobs: Sequence[ScoredToken], blocks: Sequence[RowBlock]
    ) -> list[OutputEvent]:
        """Take what a step gave; its rows count when they are released.

        Raises RemoteProtocolError for what was not asked for, or when something is missing.
        """
        self._pending = blocks
        scored = [entry for entry in prompt_logprobs if entry.position >= self._next_scored]
        for entry in scored:
            if self._params.n_prompt_logprobs is None or entry.position != self._next_scored:
                raise RemoteProtocolError(
                    f"the tail sent logprobs of prompt token {entry.position}, not of "
                    f"{self._next_scored}"
                )
            self._next_scored += 1
        return [PromptScored(logprobs=tuple(entry.logprobs for entry in scored))] if scored else []

    def release(self, end: int) -> list[OutputEvent]:
        """Let the rows at positions below `end` count."""
        events: list[OutputEvent] = []
        for block in self._pending:
            stream = self._streams.get(block.kind)
            if stream is None:
                raise RemoteProtocolError(f"the tail sent {block.kind.value} nobody asked for")
            rows = stream.next_rows(block, end)
            if rows is not None and (out := stream.take(rows)) is not None:
                events.append(RowsGiven(block=out))
        return events

    def finish(self) -> list[OutputEvent]:
        """Give what had to wait for the end: the last rows, a mean."""
        return [
            RowsGiven(block=block) for stream in self._streams.values() for block in stream.finish()
        ]


class _Stream:
    """Rows of one kind, given on as they come."""

    def __init__(self, first: int) -> None:
        self._next = first

    def next_rows(self, block: RowBlock, end: int) -> RowBlock | None:
        """Return the rows of `block` below `end` that have not been taken; they are taken then."""
        start, stop = max(block.position, self._next), min(block.position + block.n_rows, end)
        if start >= stop:
            return None
        if start != self._next:
            raise RemoteProtocolError(
                f"the tail sent {block.kind.value} of position {start}, not of {self._next}"
            )
        self._next = stop
        return block.part(start - block.position, stop - block.position)

    def take(self, rows: RowBlock) -> RowBlock | None:
        """Take rows; return what can be given on."""
        return rows

    def finish(self) -> list[RowBlock]:
        """Return what is left."""
        return []


class _LastRows(_Stream):
    """Only the last rows of a sequence: what these are is known at its end."""

    def __init__(self, first: int, n_rows: int) -> None:
        super().__init__(first)
        self._rows: deque[RowBlock] = deque(maxlen=n_rows)

    def take(self, rows: RowBlock) -> None:
        """Keep rows, each copied, so that what they came in is forgotten."""
        for index in range(max(0, rows.n_rows - (self._rows.maxlen or 0)), rows.n_rows):
            row = rows.part(index, index + 1)
            self._rows.append(replace(row, payload=bytes(row.payload)))

    def finish(self) -> list[RowBlock]:
        """Return them as one block."""
        if not self._rows:
            return []
        first = self._rows[0]
        return [
            RowBlock(
                sequence_id=first.sequence_id,
                kind=first.kind,
                position=first.position,
                width=first.width,
                payload=b"".join(row.payload for row in self._rows),
            )
        ]


class _MeanRow(_Stream):
    """The mean of all rows, summed in float64."""

    def __init__(self, first: int) -> None:
        super().__init__(first)
        self._sum: NDArray[np.float64] | None = None
        self._n_rows = 0
        self._sequence_id = SequenceId(0)

    def take(self, rows: RowBlock) -> None:
        """Add rows up."""
        values = np.frombuffer(rows.payload, "<f4").reshape(-1, rows.width)
        added = values.sum(0, dtype=np.float64)
        self._sum = added if self._sum is None else self._sum + added
        self._n_rows += rows.n_rows
        self._sequence_id = rows.sequence_id

    def finish(self) -> list[RowBlock]:
        """Return the mean as a block of one row, at position 0."""
        if self._sum is None:
            return []
        mean = (self._sum / self._n_rows).astype("<f4")
        return [
            RowBlock(
                sequence_id=self._sequence_id,
                kind=OutputKind.HIDDEN,
                position=0,
                width=len(mean),
                payload=mean.tobytes(),
            )
        ]


def _stream(params: OutputParams, kind: OutputKind, first: int) -> _Stream:
    n_rows = params.rows(kind)
    if kind is OutputKind.HIDDEN and params.hidden_mean:
        return _MeanRow(first)
    return _Stream(first) if n_rows is None or n_rows == ALL_ROWS else _LastRows(first, n_rows)


class OutputBudget:
    """The memory that outputs may take on the head, all requests together."""

    def __init__(self, limit_bytes: int = MAX_OUTPUT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._taken_bytes = 0

    @contextlib.contextmanager
    def room_for(self, n_bytes: int) -> Iterator[None]:
        """Take room while a request runs.

        Raises CapacityError when there is never as much, BusyError when others have it now.
        """
        if n_bytes > self._limit_bytes:
            raise CapacityError(
                f"the logits, hidden states and routing asked for may take {n_bytes} bytes and the "
                f"head gives them {self._limit_bytes}: ask for fewer rows, or lower --max-tokens"
            )
        if self._taken_bytes + n_bytes > self._limit_bytes:
            raise BusyError(
                f"the rows of other requests take {self._taken_bytes} of "
                f"{self._limit_bytes} bytes: ask again later"
            )
        self._taken_bytes += n_bytes
        try:
            yield
        finally:
            self._taken_bytes -= n_bytes


def output_bytes(
    params: OutputParams, n_positions: int, *, vocab_size: int, width: int, routing: int = 0
) -> int:
    """Give the most bytes that a request's rows may take when it grows to `n_positions`.

    `routing` is the width of a row of experts.
    """
    widths = {
        OutputKind.LOGITS: vocab_size,
        OutputKind.HIDDEN: width,
        OutputKind.ROUTING: routing,
    }
    n_bytes = 0
    for kind, columns in widths.items():
        rows = params.rows(kind)
        if rows is not None:
            n_rows = n_positions if rows == ALL_ROWS else min(rows, n_positions)
            is_mean = kind is OutputKind.HIDDEN and params.hidden_mean
            n_bytes += kind.element_bytes * columns * (1 if is_mean else n_rows)
    return n_bytes
