"""Outputs of a request beside its tokens, in order, on the head: prompt logprobs and rows.

Knows which rows count: those of rejected drafts do not, and a replayed row counts once. Must not
know steps, links or clients.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardnet.errors import BusyError, CapacityError, RemoteProtocolError
from shardnet.output_params import ALL_ROWS, OutputKind, OutputParams
from shardnet.runtime.stage.compute import ScoredToken
from shardnet.sampling_params import TokenLogprobs
from shardnet.types import SequenceId
from shardnet.wire.payloads.rows import RowBlock

MAX_OUTPUT_BYTES = 1 << 30
"""Bytes of float32 logits and hidden states that all requests of one head may hold together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobsReady:
    """Logprobs of the next prompt tokens, in order; the first prompt token has none."""

    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsReady:
    """The next rows of the requested logits, hidden states or routed experts."""

    block: RowBlock


OutputEvent = PromptLogprobsReady | RowsReady


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
        """Add the outputs of a step; its rows are kept back until they are released.

        Raises RemoteProtocolError for outputs that were not requested, or if a position is missing.
        """
        if self._params.hidden_layers:
            others = [block for block in blocks if block.kind is not OutputKind.HIDDEN]
            blocks = [*others, *self._joined_states(blocks)]
        self._pending = blocks
        scored = [entry for entry in prompt_logprobs if entry.position >= self._next_scored]
        for entry in scored:
            if self._params.n_prompt_logprobs is None or entry.position != self._next_scored:
                raise RemoteProtocolError(
                    f"the tail sent logprobs of prompt token {entry.position}, not of "
                    f"{self._next_scored}"
                )
            self._next_scored += 1
        return (
            [PromptLogprobsReady(logprobs=tuple(entry.logprobs for entry in scored))]
            if scored
            else []
        )

    def _joined_states(self, blocks: Sequence[RowBlock]) -> list[RowBlock]:
        """Join the hidden states after some layers and the last ones: for each row all of them.

        Raises RemoteProtocolError unless each comes for the same rows.
        """
        parts: dict[int | None, list[RowBlock]] = {}
        for block in blocks:
            if block.kind is OutputKind.HIDDEN:
                parts.setdefault(block.layer, []).append(block)
        if not parts:
            return []
        tables = [
            joined_rows(parts.get(number, ())) for number in (*self._params.hidden_layers, None)
        ]
        starts = {start for start, _ in tables}
        shapes = {table.shape for _, table in tables}
        if len(starts) > 1 or len(shapes) > 1 or len(parts) != len(tables):
            raise RemoteProtocolError(
                f"hidden states after {len(tables)} numbers of layers were requested; they came "
                f"after {[*parts]}, from positions {[*starts]} on, in shapes {[*shapes]}"
            )
        [position] = starts
        joined = np.concatenate([table for _, table in tables], 1)
        return [
            RowBlock(
                sequence_id=next(iter(parts.values()))[0].sequence_id,
                kind=OutputKind.HIDDEN,
                position=position,
                width=joined.shape[1],
                payload=joined.tobytes(),
            )
        ]

    def release(self, end: int) -> list[OutputEvent]:
        """Release the rows at positions below `end`: they belong to accepted tokens."""
        events: list[OutputEvent] = []
        for block in self._pending:
            stream = self._streams.get(block.kind)
            if stream is None:
                raise RemoteProtocolError(
                    f"the tail sent {block.kind.value}, which were not requested"
                )
            rows = stream.next_rows(block, end)
            if rows is not None and (out := stream.take(rows)) is not None:
                events.append(RowsReady(block=out))
        return events

    def finish(self) -> list[OutputEvent]:
        """Return the outputs that are known only at the end: the last rows, a mean."""
        return [
            RowsReady(block=block) for stream in self._streams.values() for block in stream.finish()
        ]


def joined_rows(blocks: Sequence[RowBlock], dtype: str = "<f4") -> tuple[int, NDArray[Any]]:
    """Join consecutive rows: the position of the first, and all, [R, E].

    Raises RemoteProtocolError for rows that are not, and for some of another width.
    """
    if not blocks:
        return 0, np.empty((0, 0), dtype)
    position = blocks[0].position
    for block in blocks:
        if block.position != position or block.width != blocks[0].width:
            raise RemoteProtocolError(
                f"hidden states of position {block.position} came, {block.width} wide; position "
                f"{position} is next, {blocks[0].width} wide"
            )
        position += block.n_rows
    rows = [np.frombuffer(block.payload, dtype).reshape(-1, block.width) for block in blocks]
    return blocks[0].position, np.concatenate(rows)


class _Stream:
    """Rows of one kind, passed on as they are released."""

    def __init__(self, first: int) -> None:
        self._next = first
        self._width = 0

    def next_rows(self, block: RowBlock, end: int) -> RowBlock | None:
        """Take the rows of `block` below `end` that were not taken before, or None."""
        start, stop = max(block.position, self._next), min(block.position + block.n_rows, end)
        if start >= stop:
            return None
        if start != self._next:
            raise RemoteProtocolError(
                f"the tail sent {block.kind.value} of position {start}, not of {self._next}"
            )
        if self._width not in (0, block.width):
            raise RemoteProtocolError(
                f"the tail sent {block.kind.value} {block.width} wide after others {self._width} "
                "wide"
            )
        self._width = block.width
        self._next = stop
        return block.part(start - block.position, stop - block.position)

    def take(self, rows: RowBlock) -> RowBlock | None:
        """Add rows; return those that can be passed on now."""
        return rows

    def finish(self) -> list[RowBlock]:
        """Return the remaining rows."""
        return []


class _LastRows(_Stream):
    """Only the last rows of a sequence, which are known at its end."""

    def __init__(self, first: int, n_rows: int) -> None:
        super().__init__(first)
        self._rows: deque[RowBlock] = deque(maxlen=n_rows)

    def take(self, rows: RowBlock) -> None:
        """Keep copies of the last rows, so that the received buffers can be freed."""
        for index in range(max(0, rows.n_rows - (self._rows.maxlen or 0)), rows.n_rows):
            row = rows.part(index, index + 1)
            self._rows.append(replace(row, payload=bytes(row.payload)))

    def finish(self) -> list[RowBlock]:
        """Return the kept rows as one block."""
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
    """The mean of all rows, accumulated in float64."""

    def __init__(self, first: int) -> None:
        super().__init__(first)
        self._sum: NDArray[np.float64] | None = None
        self._n_rows = 0
        self._sequence_id = SequenceId(0)

    def take(self, rows: RowBlock) -> None:
        """Add rows to the sum."""
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
    """Limits the memory that the outputs of all requests take on the head."""

    def __init__(self, limit_bytes: int = MAX_OUTPUT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._taken_bytes = 0

    @contextlib.contextmanager
    def room_for(self, n_bytes: int) -> Iterator[None]:
        """Reserve `n_bytes` while a request runs.

        Raises CapacityError if the limit is lower, BusyError if other requests hold the memory now.
        """
        if n_bytes > self._limit_bytes:
            raise CapacityError(
                f"the requested logits, hidden states and routing may take {n_bytes} bytes, the "
                f"head allows {self._limit_bytes}",
                remedy="ask for fewer rows, or lower --max-tokens",
            )
        if self._taken_bytes + n_bytes > self._limit_bytes:
            raise BusyError(
                f"the outputs of other requests take {self._taken_bytes} of "
                f"{self._limit_bytes} bytes",
                remedy="ask again later",
            )
        self._taken_bytes += n_bytes
        try:
            yield
        finally:
            self._taken_bytes -= n_bytes


def output_bytes(
    params: OutputParams, n_positions: int, *, vocab_size: int, width: int, routing: int = 0
) -> int:
    """Return the most bytes that the outputs of a request of `n_positions` positions can take.

    `vocab_size`, `width` and `routing` are the widths of a row of logits, of one hidden state and
    of experts.
    """
    widths = {
        OutputKind.LOGITS: vocab_size,
        OutputKind.HIDDEN: width * params.n_states,
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
