"""Hypothesis strategies for frames and messages, and a connection pair that needs no socket."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
from hypothesis import strategies as st
from support.strategies.msgspec_strategies import values

from shardnet.output_params import OutputKind
from shardnet.slot_operations import SlotOperation
from shardnet.types import Epoch, MicroBatch, RowGroup, SequenceId, SlotId, StepId, WireDType
from shardnet.wire.connection.connection import Event, HelloAnswer, LinkConnection
from shardnet.wire.framing.frames import LIMITS, Frame, FrameKind, Limits
from shardnet.wire.messages.bulk import BulkMessage, Piece, bulk_frame
from shardnet.wire.messages.control import ControlMessage, control_frame
from shardnet.wire.messages.extras import Extras, StageTiming, extras_frame, sequence_frame
from shardnet.wire.messages.handshake import OF_RINGS, Hello, PeerRole, Purpose
from shardnet.wire.payloads.data import StepData, data_frame, tokens_frame
from shardnet.wire.payloads.parts import ShardPart, part_frame
from shardnet.wire.payloads.rows import RowBlock, rows_frames

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
_WHERE = {"epoch": U32, "step": U64}


def hello(node: str = "a", purpose: Purpose = Purpose.CONTROL, **changes: Any) -> Hello:
    if purpose in OF_RINGS:
        changes = {"ring": "r1", "epoch": 3, **changes}
    return Hello(purpose=purpose, role=PeerRole.NODE, node=node, name=node, version="0", **changes)


TIMINGS = st.builds(StageTiming, st.integers(0, 255), *[st.integers(0, 10**15)] * 3)


@st.composite
def steps(draw: st.DrawFn) -> StepData:
    n_groups = draw(st.integers(1, 4))
    slots = draw(st.lists(U32, min_size=n_groups, max_size=n_groups, unique=True))
    ids = draw(st.lists(U64, min_size=n_groups, max_size=n_groups, unique=True))
    groups = []
    for slot, sequence_id in zip(slots, ids, strict=True):
        n_rows = draw(st.sampled_from([1, 1, 2, 5]))
        groups.append(
            RowGroup(
                sequence_id=SequenceId(sequence_id),
                slot=SlotId(slot),
                position=draw(st.integers(0, 2**32 - 1 - n_rows)),
                n_rows=n_rows,
                n_sampled=draw(st.integers(0, n_rows)),
                n_drafts=draw(st.sampled_from([0, 0, 1])),
            )
        )
    n_rows = sum(group.n_rows for group in groups)
    dtype = draw(st.sampled_from(list(WireDType)))
    width = draw(st.one_of(st.integers(1, 8), st.just(20_000)))
    fill = draw(st.binary(min_size=1, max_size=4))
    n_bytes = n_rows * dtype.row_bytes(width)
    return StepData(
        batch=MicroBatch(
            epoch=Epoch(draw(U32)),
            step=StepId(draw(U64)),
            groups=tuple(groups),
            token_ids=tuple(draw(st.lists(U32, min_size=n_rows, max_size=n_rows))),
        ),
        dtype=dtype,
        width=width,
        payload=(fill * (n_bytes // len(fill) + 1))[:n_bytes],
        timings=tuple(draw(st.lists(TIMINGS, max_size=3))),
    )


@st.composite
def row_blocks(draw: st.DrawFn) -> RowBlock:
    n_rows, width = draw(st.integers(1, 5)), draw(st.one_of(st.integers(1, 8), st.just(20_000)))
    kind = draw(st.sampled_from([OutputKind.LOGITS, OutputKind.HIDDEN, OutputKind.STATES]))
    numbers = st.integers(0, 10_000)
    layers = {OutputKind.LOGITS: st.none(), OutputKind.HIDDEN: st.none() | numbers}
    layer = draw(layers.get(kind, numbers))
    return RowBlock(
        sequence_id=SequenceId(draw(U64)),
        kind=kind,
        layer=layer,
        is_deep=kind is OutputKind.HIDDEN and draw(st.booleans()),
        position=draw(st.integers(0, 2**32 - 1 - n_rows)),
        width=width,
        payload=draw(st.binary(min_size=4, max_size=4))[: kind.element_bytes] * (n_rows * width),
    )


@st.composite
def shard_parts(draw: st.DrawFn) -> ShardPart:
    n_rows, width = draw(st.integers(1, 3)), draw(st.integers(1, 200))
    dtype = draw(st.sampled_from(WireDType))
    return ShardPart(
        number=draw(U32),
        shard=draw(st.integers(0, 255)),
        dtype=dtype,
        n_rows=n_rows,
        width=width,
        payload=draw(st.binary(min_size=1, max_size=1)) * (n_rows * dtype.row_bytes(width)),
    )


def slot_operations() -> st.SearchStrategy[SlotOperation]:
    return values(SlotOperation)


def control_frames() -> st.SearchStrategy[Frame]:
    return values(ControlMessage).map(control_frame)


def bulk_frames() -> st.SearchStrategy[Frame]:
    def frame(message: BulkMessage, payload: bytes) -> Frame:
        return bulk_frame(message, payload if isinstance(message, Piece) else b"")

    return st.builds(frame, values(BulkMessage), st.binary(max_size=100))


def part_frames() -> st.SearchStrategy[Frame]:
    return st.builds(part_frame, shard_parts(), **_WHERE)


def data_link_frames() -> st.SearchStrategy[Frame]:
    return st.one_of(
        steps().map(data_frame),
        st.builds(tokens_frame, st.lists(U32, max_size=5), epoch=U32, step=U64),
        st.builds(sequence_frame, slot_operations(), epoch=U32),
        st.builds(extras_frame, values(Extras), epoch=U32, step=U64),
        st.builds(lambda block, **where: rows_frames(block, **where)[0], row_blocks(), **_WHERE),
        st.builds(Frame, kind=st.just(FrameKind.HEARTBEAT), epoch=U32, step=U64),
    )


def feed(connection: LinkConnection, data: bytes, cuts: list[int] | None = None) -> list[Event]:
    """Let `connection` receive `data`, cut at `cuts` and wherever its buffers end."""
    events: list[Event] = []
    borders = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts or [])})
    for start, end in itertools.pairwise(borders):
        while start < end:
            room = connection.get_buffer()
            n = min(len(room), end - start)
            room[:n] = data[start : start + n]
            events += connection.received(n)
            start += n
    return events


def joined(buffers: list[Any]) -> bytes:
    return b"".join(buffers)


class Pair:
    """An initiator and an acceptor, and what each has seen."""

    def __init__(self, a: Hello, b: Hello | HelloAnswer, limits_b: Limits = LIMITS) -> None:
        self.a = LinkConnection(a, initiator=True)
        self.b = LinkConnection(b, initiator=False, limits=limits_b)
        self.seen_a: list[Event] = []
        self.seen_b: list[Event] = []
        self.move(to_b=joined(self.a.start()), to_a=joined(self.b.start()))

    def move(self, *, to_a: bytes = b"", to_b: bytes = b"") -> None:
        """Deliver bytes, and what the connections answer, until nobody has anything to say."""
        while to_a or to_b:
            self.seen_b += feed(self.b, to_b)
            self.seen_a += feed(self.a, to_a)
            to_a, to_b = joined(self.b.take_outgoing()), joined(self.a.take_outgoing())


def pair(purpose: Purpose = Purpose.CONTROL, limits_b: Limits = LIMITS) -> Pair:
    """A pair that is up and has been told so."""
    made = Pair(hello("a", purpose), hello("b", purpose), limits_b)
    made.seen_a.clear()
    made.seen_b.clear()
    return made


def encoded(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)
