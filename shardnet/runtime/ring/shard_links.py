"""The data links between the nodes of one stage: steps to its other shards, parts between all.

The compute thread sends and waits here; the loop receives. Knows frames and gathers. Must not know
tensors, nor what a part is a part of.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final

from shardnet.errors import (
    LostShardError,
    RemoteProtocolError,
    ShardnetError,
    error_for_code,
    without_frames,
)
from shardnet.runtime.ring.links import LinkSource, check_epoch, peer_name, unexpected
from shardnet.runtime.stage.compute import (
    Activations,
    StageInput,
    StageOutput,
)
from shardnet.slot_operations import SlotOperation
from shardnet.transport.link import Link
from shardnet.types import Epoch, MicroBatch, StepId, WireDType
from shardnet.wire.framing.frames import Buffer, Frame, FrameKind
from shardnet.wire.messages.extras import sequence_frame
from shardnet.wire.messages.handshake import error_frame, read_error
from shardnet.wire.payloads.data import StepData, data_frame
from shardnet.wire.payloads.rows import RowBlock, ShardPart, part_frame, read_part, rows_frames

PART_S: Final = 60.0
"""How long a shard may take to its next part: as long as a stage whose step does not move."""

_MOST_WAITING: Final = 64
"""Frames of a shard that may wait here: it can be one gather ahead, and steps may fail."""


class ShardLinks:
    """This node's links to the other shards of its stage, `links` by their numbers.

    `shard` is this node's own. Once a link is lost, what the compute thread calls raises
    LostShardError.
    """

    def __init__(
        self,
        *,
        shard: int,
        links: Mapping[int, Link],
        epoch: Epoch,
        part_s: float = PART_S,
    ) -> None:
        self.shard = shard
        self.n_shards = len(links) + 1
        self._links = dict(links)
        self._epoch = epoch
        self._part_s = part_s
        self._loop = asyncio.get_running_loop()
        self._inboxes: dict[int, queue.SimpleQueue[Frame | None]] = {
            other: queue.SimpleQueue() for other in links
        }
        self._broken: ShardnetError | None = None
        self._step = StepId(0)
        self._number = 0

    # --- on the loop

    def readers(self) -> list[Coroutine[Any, Any, None]]:
        """Return what receives from the other shards; from shard 0 its `source` does."""
        return [self.read(other) for other in self._links if other or not self.shard]

    async def read(self, other: int) -> None:
        """Receive parts from a shard until the link ends. Raises why it has, or what broke it."""
        link = self._links[other]

        def take(frame: Frame) -> bool:
            self.take(other, frame)
            return True

        link.offer(take)
        try:
            while True:
                self.take(other, await link.receive())
        except ShardnetError as error:
            self.fail(error)
            raise

    def take(self, other: int, frame: Frame) -> None:
        """Take a PART, or the ERROR of a step. Raises RemoteProtocolError for any other frame."""
        link = self._links[other]
        check_epoch(frame, self._epoch, link)
        if frame.kind is not FrameKind.PART and frame.kind is not FrameKind.ERROR:
            raise unexpected(frame, link)
        inbox = self._inboxes[other]
        if inbox.qsize() >= _MOST_WAITING:
            self._drop_old(inbox)
        if inbox.qsize() >= _MOST_WAITING:
            raise RemoteProtocolError(
                f"{peer_name(link)} sent more than {_MOST_WAITING} parts that nobody waits for"
            )
        inbox.put(frame)

    def _drop_old(self, inbox: queue.SimpleQueue[Frame | None]) -> None:
        """Drop what is left of steps that failed here before their first gather."""
        kept = []
        with contextlib.suppress(queue.Empty):
            while True:
                frame = inbox.get_nowait()
                if frame is None or frame.step >= self._step:
                    kept.append(frame)
        for frame in kept:  # all were taken before: the compute thread finds them in their order
            inbox.put(frame)

    def fail(self, error: ShardnetError) -> None:
        """End every wait of the compute thread, now and to come, with LostShardError."""
        self._broken = self._broken or without_frames(error)
        for inbox in self._inboxes.values():
            inbox.put(None)

    def source(self, on_arrival: Callable[[], None]) -> ShardSource:
        """Return what shard 0 sends this shard, as its stage takes it in."""
        return ShardSource(self._links[0], self._epoch, on_arrival, self)

    # --- on the compute thread

    def operate(self, operation: SlotOperation) -> None:
        """Have the other shards do what is done to a slot here."""
        self._send(sequence_frame(operation, epoch=self._epoch))

    def step(
        self, batch: MicroBatch, activations: Activations | None, deep: Sequence[RowBlock] = ()
    ) -> None:
        """Have the other shards compute a step; its gathers follow. See PartExchange."""
        sent = activations or _nothing(batch.n_rows)
        data = StepData(batch=batch, dtype=sent.dtype, width=sent.width, payload=sent.payload)
        for block in (*sent.deep, *deep):
            for frame in rows_frames(block, epoch=batch.epoch, step=batch.step):
                self._send(frame)
        self._send(data_frame(data))

    def begin(self, step: StepId) -> None:
        """Begin to count the gathers of a step."""
        self._step, self._number = step, 0

    def gather(
        self, dtype: WireDType, n_rows: int, widths: Mapping[int, int], payload: Buffer
    ) -> dict[int, Buffer]:
        """Send this shard's part to all others, and return theirs by shard number.

        `payload` is `n_rows` rows of `widths[shard]` columns in `dtype`, and must not change any
        more. Raises what a shard says the step has failed with, RemoteProtocolError for a part that
        is not the one of this gather, LostShardError where a shard is lost or sends none in time.
        """
        number, self._number = self._number, self._number + 1
        part = ShardPart(
            number=number,
            shard=self.shard,
            dtype=dtype,
            n_rows=n_rows,
            width=widths[self.shard],
            payload=payload,
        )
        self._send(part_frame(part, epoch=self._epoch, step=self._step))
        parts: dict[int, Buffer] = {}
        for other in self._links:
            expected = (number, other, dtype, n_rows, widths[other])
            parts[other] = self._part(other, expected)
        return parts

    def fail_step(self, error: ShardnetError) -> None:
        """Tell the other shards that the step that began last has failed here."""
        self._send(error_frame(error, epoch=self._epoch, step=self._step))

    def _part(self, other: int, expected: tuple[int, int, WireDType, int, int]) -> Buffer:
        """Wait for the part of a shard; what is left of steps before this one is dropped."""
        until_s = time.monotonic() + self._part_s
        while True:
            frame = self._next(other, until_s)
            if frame.step < self._step:
                continue
            if frame.step == self._step and frame.kind is FrameKind.ERROR:
                report = read_error(frame)
                raise error_for_code(report.code, report.message, remedy=report.remedy or "")
            found: object = f"{frame.kind.name} of step {frame.step}"
            if frame.step == self._step:
                part = read_part(frame)
                found = (part.number, part.shard, part.dtype, part.n_rows, part.width)
                if found == expected:
                    return part.payload
            raise self._break(
                RemoteProtocolError(
                    f"{peer_name(self._links[other])} sent {found} as part of step {self._step}, "
                    f"expected {expected} (gather, shard, dtype, rows, columns)"
                )
            )

    def _next(self, other: int, until_s: float) -> Frame:
        try:
            frame = self._inboxes[other].get(timeout=max(0.0, until_s - time.monotonic()))
        except queue.Empty:
            link = self._links[other]
            raise self._break(
                LostShardError(
                    f"{peer_name(link)} is stuck: it has sent no part of step {self._step} for "
                    f"{self._part_s:.0f} s",
                    remedy="restart that node",
                )
            ) from None
        if frame is None:
            raise self._lost()
        return frame

    def _send(self, frame: Frame) -> None:
        """Send a frame to every other shard, in order with what was sent before."""
        if self._broken is not None:
            raise self._lost()
        try:
            waiting = [link for link in self._links.values() if not link.send_now(frame)]
            if waiting:
                sending = asyncio.run_coroutine_threadsafe(_sent(waiting, frame), self._loop)
                sending.result(self._part_s)
        except TimeoutError:
            names = ", ".join(map(peer_name, self._links.values()))
            raise self._break(
                LostShardError(f"{names}: nothing was read for {self._part_s:.0f} s")
            ) from None
        except ShardnetError as error:
            raise self._break(error) from None

    def _break(self, error: ShardnetError) -> LostShardError:
        """Make the end of the stage, for good."""
        self._broken = self._broken or error
        return self._lost()

    def _lost(self) -> LostShardError:
        error = self._broken
        assert error is not None
        if isinstance(error, LostShardError):
            return error
        return LostShardError(error.message, remedy=error.remedy)


class ShardSource(LinkSource):
    """What shard 0 sends to another shard of its stage: steps, slot operations and parts."""

    def __init__(
        self, link: Link, epoch: Epoch, on_arrival: Callable[[], None], parts: ShardLinks
    ) -> None:
        super().__init__(link, epoch, on_arrival)
        self._parts = parts

    async def receive(self) -> StageInput:
        """See LinkSource; the stage's wait for parts ends with the link."""
        try:
            return await super().receive()
        except ShardnetError as error:
            self._parts.fail(error)
            raise

    def _read(self, frame: Frame) -> StageInput | None:
        """Read a frame; None for a part. Steps that failed before this stage are left out."""
        if frame.kind is FrameKind.PART or (frame.kind is FrameKind.ERROR and frame.step):
            self._parts.take(0, frame)
            return None
        if frame.kind is FrameKind.DATA:
            if frame.step <= self._last_step:
                raise RemoteProtocolError(
                    f"{peer_name(self._link)} sent step {frame.step} after step {self._last_step}"
                )
            self._last_step = frame.step - 1
        return super()._read(frame)


class ShardSink:
    """Where the outputs of a shard beside shard 0 go: nowhere. Shard 0 has the same."""

    def send(self, output: StageOutput) -> None:
        """Drop one output."""

    def send_now(self, output: StageOutput) -> bool:
        """Drop one output."""
        return True

    @property
    def is_full(self) -> bool:
        """Whether `drain` would wait: never."""
        return False

    async def drain(self) -> None:
        """Wait for nothing."""


def _nothing(n_rows: int) -> Activations:
    """Make what travels where a stage embeds: a DATA frame has a column at least."""
    payload = bytes(WireDType.FLOAT16.row_bytes(1) * n_rows)
    return Activations(payload=payload, dtype=WireDType.FLOAT16, width=1)


async def _sent(links: list[Link], frame: Frame) -> None:
    """Send a frame by the loop, and wait until every link has room again."""
    for link in links:
        link.send(frame)
    for link in links:
        await link.drain(shared=True)
