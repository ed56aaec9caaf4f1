"""What connects the nodes of one stage: links for steps and errors, connections for parts.

The compute thread sends steps, and moves all bytes of parts itself; the loop receives the rest.
Knows frames, heads of parts and gathers. Must not know tensors, nor what a part is a part of.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final, NamedTuple

from shardnet.errors import (
    LinkError,
    LostShardError,
    RemoteProtocolError,
    ShardnetError,
    error_for_code,
    without_frames,
)
from shardnet.runtime.ring.links import LinkSource, check_epoch, peer_name, unexpected
from shardnet.runtime.stage.compute import Activations, StageInput, StageOutput
from shardnet.runtime.stage.worker import StageSink
from shardnet.slot_operations import SlotOperation
from shardnet.transport.direct_connection import DirectConnection
from shardnet.transport.link import Link
from shardnet.types import Epoch, MicroBatch, StepId, WireDType
from shardnet.wire.framing.frames import Buffer, Frame, FrameKind
from shardnet.wire.messages.extras import Extras, extras_frame, mask_rows, sequence_frame
from shardnet.wire.messages.handshake import error_frame, read_error
from shardnet.wire.payloads.data import StepData, data_frame
from shardnet.wire.payloads.parts import PartHeads, ShardPart
from shardnet.wire.payloads.rows import RowBlock, rows_frames

_DROPPED_BYTES: Final = 1 << 16
"""How much of a part that nobody waits for is received at once."""


class _Expected(NamedTuple):
    """A part that is to come, its head without checksums, and where its payload belongs."""

    part: ShardPart
    head: bytes
    into: memoryview


class PartStream:
    """This shard's end of the connection to another one.

    Parts come in the order of their gathers. Those of steps before are left out.
    """

    def __init__(self, connection: DirectConnection, epoch: Epoch) -> None:
        self.connection = connection
        self._heads = PartHeads(epoch, is_checked=not connection.is_encrypted)
        self._head = memoryview(bytearray(self._heads.n_bytes))
        self._n_head = 0
        self._dropped = memoryview(bytearray(_DROPPED_BYTES))
        self._n_drop = 0
        """Bytes still to come of a part that is left out."""
        self._is_open = False
        """Whether the head that has come is that of the first expected part."""
        self._step = StepId(0)
        self._expected: deque[_Expected] = deque()
        self._rest = memoryview(b"")
        """Where the rest of the part belongs whose head has come."""

    def exchange(self, step: StepId, own: ShardPart, other: ShardPart, into: memoryview) -> None:
        """Send `own`, and receive `other` of the same gather to `into`: see `move`.

        Raises LinkError when the connection is lost.
        """
        self._step = step
        self._expected.append(_Expected(other, self._heads.plain(other, step), into))
        self.connection.send(self._heads.packed(own, step), own.payload)

    def move(self, n_left: int = 0) -> bool:
        """Send and receive what is possible; return whether all but `n_left` exchanges are over.

        Raises LinkError when the connection is lost, RemoteProtocolError for another part than the
        expected one.
        """
        while len(self._expected) > n_left and self._receive(self._expected[0]):
            self._expected.popleft()
        return (self.connection.flush() or n_left > 0) and len(self._expected) <= n_left

    def rest(self) -> None:
        """Leave the buffers of all exchanges alone: they may change from now on."""
        if self._is_open:
            self._leave_out(len(self._rest))
        self._expected.clear()
        self.connection.keep()

    def _receive(self, expected: _Expected) -> bool:
        """Receive what has come of the part that is waited for; return whether it is whole."""
        while not self._is_open:
            if not self._receive_head(expected):
                return False
        while self._rest:
            n = self.connection.receive(self._rest)
            if not n:
                return False
            self._rest = self._rest[n:]
        try:
            self._heads.check(self._head, expected.into)
        except RemoteProtocolError as error:
            raise error.at(self.connection.peer) from None
        self._is_open, self._n_head = False, 0
        return True

    def _receive_head(self, expected: _Expected) -> bool:
        """Receive some of a head, or of a part that is left out; return whether that got on.

        Not behind such a part either: whoever waits looks at the time between two of them.
        """
        if self._n_drop:
            n = self.connection.receive(self._dropped[: self._n_drop])
            self._n_drop -= n
            return n > 0 and self._n_drop > 0
        if self._n_head < len(self._head):
            n = self.connection.receive(self._head[self._n_head :])
            self._n_head += n
            return n > 0
        return self._take_head(expected)

    def _take_head(self, expected: _Expected) -> bool:
        """Open the expected part, or leave out one of a step before.

        Returns False for a part of a step to come: why this one has failed there is on its way, by
        another link. Raises RemoteProtocolError for any other.
        """
        if self._heads.is_of(self._head, expected.head):
            self._is_open, self._rest = True, expected.into
            return True
        try:
            step, found = self._heads.read(self._head)
        except RemoteProtocolError as error:
            raise error.at(self.connection.peer) from None
        if step < self._step:
            self._leave_out(found.n_bytes)
        if step != self._step:
            return step < self._step
        raise RemoteProtocolError(
            f"{self.connection.peer} sent {_shape(found)} as part of step {step}, expected "
            f"{_shape(expected.part)} (gather, shard, dtype, rows, columns)"
        )

    def _leave_out(self, n_bytes: int) -> None:
        """Drop the next `n_bytes`, behind which a head comes."""
        self._n_drop, self._n_head, self._is_open = n_bytes, 0, False


def _shape(part: ShardPart) -> tuple[object, ...]:
    return (part.number, part.shard, part.dtype.value, part.n_rows, part.width)


PART_S: Final = 60.0
"""How long a shard may take to its next part: as long as a stage whose step does not move."""

_ALONE_NS: Final = 20_000
"""How long a thread that waits for parts lets no other on to its core: they are nearly there."""
_SPIN_NS: Final = 3_000_000
"""And how long it does not sleep: shards that have equal work are about equally far."""
_MOST_FAILURES: Final = 64
"""Of steps that other shards have failed with and that have not begun here."""
_let_others_run: Callable[[], object] = getattr(os, "sched_yield", lambda: time.sleep(0))
_NAP_SHARE: Final = 0.05
"""A nap is so much of what it has waited,"""
_LONGEST_NAP_S: Final = 0.02
"""and no longer than this."""


class ShardLinks:
    """This node's `links` and `connections` to the other shards of its stage, by their numbers.

    `shard` is this node's own. Once a link is lost, what the compute thread calls raises
    LostShardError.
    """

    def __init__(
        self,
        *,
        shard: int,
        links: Mapping[int, Link],
        connections: Mapping[int, DirectConnection],
        epoch: Epoch,
        part_s: float = PART_S,
    ) -> None:
        self.shard = shard
        self.n_shards = len(links) + 1
        self._links = dict(links)
        self._streams = {
            other: PartStream(connection, epoch) for other, connection in connections.items()
        }
        self._epoch = epoch
        self._part_s = part_s
        self._loop = asyncio.get_running_loop()
        self._broken: ShardnetError | None = None
        self._failures: dict[int, ShardnetError] = {}
        """Why other shards have failed with this step, and with steps to come here."""
        self._step = StepId(0)
        self._number = 0

    # --- on the loop

    def readers(self) -> list[Coroutine[Any, Any, None]]:
        """Return what receives from the other shards; from shard 0 its `source` does."""
        return [self.read(other) for other in self._links if other or not self.shard]

    async def read(self, other: int) -> None:
        """Receive what a shard says of steps until the link ends. Raises why it has, or what broke
        it.
        """
        link = self._links[other]
        try:
            while True:
                self.take(other, await link.receive())
        except ShardnetError as error:
            self.fail(error)
            raise

    def take(self, other: int, frame: Frame) -> None:
        """Take the ERROR of a step. Raises RemoteProtocolError for any other frame."""
        link = self._links[other]
        check_epoch(frame, self._epoch, link)
        if frame.kind is not FrameKind.ERROR:
            raise unexpected(frame, link)
        if len(self._failures) >= _MOST_FAILURES:
            raise RemoteProtocolError(
                f"{peer_name(link)} has failed with {_MOST_FAILURES} steps that did not come here"
            )
        report = read_error(frame)
        error = error_for_code(report.code, report.message, remedy=report.remedy or "")
        if frame.step >= self._step:
            self._failures.setdefault(frame.step, error)

    def fail(self, error: ShardnetError) -> None:
        """End every wait of the compute thread, now and to come, with LostShardError."""
        self._broken = self._broken or without_frames(error)

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
        if batch.masks:  # the other shards draft behind the same tokens
            extras = Extras(masks=mask_rows(batch.masks))
            self._send(extras_frame(extras, epoch=batch.epoch, step=batch.step))
        self._send(data_frame(data))

    def begin(self, step: StepId) -> None:
        """Begin to count the gathers of a step."""
        self._step, self._number = step, 0
        for failed in list(self._failures):  # to which the loop may add meanwhile
            if failed < step:
                del self._failures[failed]

    def send_part(
        self,
        dtype: WireDType,
        n_rows: int,
        widths: Sequence[int],
        payload: Buffer,
        received: Mapping[int, memoryview],
    ) -> None:
        """Begin a gather: send this shard's part to all others; theirs go where `received` says.

        `payload` is `n_rows` rows of `widths[shard]` columns in `dtype`. Raises LostShardError
        where a shard is lost.
        """
        if self._broken is not None:
            raise self._lost()
        number, self._number = self._number, self._number + 1

        def part(shard: int, payload: Buffer = b"") -> ShardPart:
            return ShardPart(
                number=number,
                shard=shard,
                dtype=dtype,
                n_rows=n_rows,
                width=widths[shard],
                payload=payload,
            )

        own = part(self.shard, payload)
        try:
            for other, stream in self._streams.items():
                stream.exchange(self._step, own, part(other), received[other])
        except LinkError as error:
            raise self._break(error) from None

    def await_parts(self, n_left: int) -> None:
        """Wait until the parts of all gathers but the last `n_left` have come, and this one's gone.

        Raises what a shard says the step has failed with, LostShardError where a shard is lost,
        sends none in time, or one that is not the part of this gather.
        """
        try:
            self._await_parts(n_left)
        except BaseException as error:
            for stream in self._streams.values():
                stream.rest()
            if isinstance(error, LinkError):
                raise self._break(error) from None
            raise

    def fail_step(self, error: ShardnetError) -> None:
        """Tell the other shards that the step that began last has failed here."""
        self._send(error_frame(error, epoch=self._epoch, step=self._step))

    def close(self) -> None:
        """Close the connections for parts."""
        for stream in self._streams.values():
            stream.connection.close()

    def _await_parts(self, n_left: int) -> None:
        """Move bytes until all parts have come and gone: spin at first, then nap between looks."""
        waiting = list(self._streams.values())
        began_ns = 0
        while waiting := [stream for stream in waiting if not stream.move(n_left)]:
            now_ns = time.perf_counter_ns()
            began_ns = began_ns or now_ns
            waited_ns = now_ns - began_ns
            if waited_ns < _ALONE_NS:
                continue
            if self._broken is not None:
                raise self._lost()
            if self._failures and (error := self._failures.get(self._step)) is not None:
                raise error
            if waited_ns < _SPIN_NS:
                _let_others_run()
            elif waited_ns < self._part_s * 1e9:
                time.sleep(min(_LONGEST_NAP_S, waited_ns * 1e-9 * _NAP_SHARE))
            else:
                raise self._stuck(waiting[0])

    def _stuck(self, stream: PartStream) -> LostShardError:
        return self._break(
            LostShardError(
                f"{stream.connection.peer} is stuck: it has sent no part of step {self._step} for "
                f"{self._part_s:.0f} s",
                remedy="restart that node",
            )
        )

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
    """What shard 0 sends to another shard of its stage: steps, and slot operations."""

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
        """Read a frame; None for why a step has failed. Steps that failed before this stage are
        left out.
        """
        if frame.kind is FrameKind.ERROR and frame.step:
            self._parts.take(0, frame)
            return None
        if frame.kind is FrameKind.DATA:
            if frame.step <= self._last_step:
                raise RemoteProtocolError(
                    f"{peer_name(self._link)} sent step {frame.step} after step {self._last_step}"
                )
            self._last_step = frame.step - 1
        return super()._read(frame)


class ShardSink(StageSink):
    """Where the outputs of a shard beside shard 0 go: nowhere. Shard 0 has the same."""

    def send(self, output: StageOutput) -> None:
        """Drop one output."""

    def send_now(self, output: StageOutput) -> bool:
        """Drop one output."""
        return True


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
