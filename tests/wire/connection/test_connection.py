"""The connection state machine: two of them in plain calls, no sockets."""

from __future__ import annotations

import ctypes
import struct

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.soak import examples
from support.strategies.wire_strategies import (
    Pair,
    bulk_frames,
    control_frames,
    data_link_frames,
    encoded,
    feed,
    hello,
    joined,
    pair,
    part_frames,
    steps,
)

from shardnet.errors import (
    AuthenticationError,
    BusyError,
    LinkClosedError,
    LocalProtocolError,
    PlanError,
    RemoteProtocolError,
    VersionMismatchError,
)
from shardnet.wire.connection.connection import (
    DIRECT_BYTES,
    Event,
    FrameReceived,
    HelloReceived,
    LinkConnection,
    LinkFailed,
    LinkState,
    PeerLeft,
    ProgressReported,
)
from shardnet.wire.connection.receive_buffer import ALIGNMENT, SCRATCH_BYTES
from shardnet.wire.framing.frames import (
    HEADER,
    LIMITS,
    PREAMBLE,
    Frame,
    FrameKind,
    pack_frame,
)
from shardnet.wire.messages.control import control_frame
from shardnet.wire.messages.generation import Cancel
from shardnet.wire.messages.handshake import Hello, Purpose, error_frame, hello_frame
from shardnet.wire.payloads.data import StepData, data_frame


def failure(events: list[Event]) -> Exception:
    """The error of the last event, which must be a failure."""
    assert isinstance(events[-1], LinkFailed)
    return events[-1].error


def raw(frame: Frame) -> bytes:
    return joined(pack_frame(frame, LIMITS))


def header(kind: int, *, meta: int = 0, payload: int = 0, step: int = 0) -> bytes:
    return HEADER.pack(0x4E53, kind, 0, meta, payload, 0, step)


# --- the handshake


@pytest.mark.parametrize("purpose", Purpose)
def test_both_sides_are_up_after_the_hellos(purpose: Purpose) -> None:
    made = Pair(hello("a", purpose), hello("b", purpose))
    assert made.seen_b == [HelloReceived(hello=hello("a", purpose))]
    assert made.seen_a == [HelloReceived(hello=hello("b", purpose))]
    assert made.a.state is made.b.state is LinkState.UP


def test_an_acceptors_hello_takes_purpose_ring_and_epoch_of_the_initiators() -> None:
    made = Pair(hello("a", Purpose.DATA, rank=2), hello("b", Purpose.CONTROL, rank=3))
    assert made.seen_a == [HelloReceived(hello=hello("b", Purpose.DATA, rank=3))]


def test_an_acceptor_may_make_its_hello_from_the_initiators() -> None:
    def answer(peer: Hello) -> Hello:
        return hello("b", Purpose.DATA, ring=peer.ring, epoch=peer.epoch, rank=peer.rank + 1)

    made = Pair(hello("a", Purpose.DATA, rank=4), answer)
    assert made.seen_a == [HelloReceived(hello=hello("b", Purpose.DATA, rank=5))]


def test_an_acceptor_may_refuse_by_name() -> None:
    def answer(peer: Hello) -> Hello:
        raise BusyError("another ring is running")

    made = Pair(hello("a"), answer)
    assert type(failure(made.seen_b)) is BusyError
    assert type(failure(made.seen_a)) is BusyError
    assert str(failure(made.seen_a)) == "the peer reports: another ring is running"


def test_an_initiator_cannot_answer() -> None:
    with pytest.raises(LocalProtocolError, match="no hello to answer"):
        LinkConnection(lambda peer: peer, initiator=True)


def test_a_hello_for_another_ring_is_refused_on_both_sides() -> None:
    made = Pair(hello("a", Purpose.DATA), lambda peer: hello("b", Purpose.DATA, ring="r2"))
    assert "ring 'r2' in epoch 3" in str(failure(made.seen_b))
    assert "ring 'r2' in epoch 3" in str(failure(made.seen_a))


def test_a_data_link_to_no_ring_is_refused() -> None:
    made = Pair(hello("a", Purpose.DATA, ring=""), hello("b"))
    assert "names no ring" in str(failure(made.seen_b))
    assert "names no ring" in str(failure(made.seen_a))


@pytest.mark.parametrize("version", [0, 3, 5, 65535])
def test_a_version_mismatch_is_named_on_both_sides(version: int) -> None:
    other = PREAMBLE[:6] + struct.pack("<H", version)
    acceptor = LinkConnection(hello(), initiator=False)
    error = failure(feed(acceptor, other))
    assert isinstance(error, VersionMismatchError)
    assert f"version {version}, we speak 4" in str(error)
    assert joined(acceptor.take_outgoing()) == PREAMBLE  # so the other side can say it too

    initiator = LinkConnection(hello(), initiator=True)
    assert isinstance(failure(feed(initiator, other)), VersionMismatchError)
    assert initiator.take_outgoing() == []


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n", b"\0", b"shardnet", b"SSH-2.0"])
@pytest.mark.parametrize("initiator", [True, False])
def test_another_protocol_is_refused_and_not_shown(data: bytes, initiator: bool) -> None:
    """The error may go to a client that has no business to read what answers there."""
    connection = LinkConnection(hello(), initiator=initiator)
    error = failure(feed(connection, data))
    assert isinstance(error, RemoteProtocolError)
    assert ("something else answers there" in str(error)) is initiator
    assert repr(data)[2:-1] not in str(error).replace("of shardnet", "")
    assert connection.take_outgoing() == []


@pytest.mark.parametrize("data", [b"\x16\x03\x01", b"\x15\x03\x03\0\x02\x02\x74"])
@pytest.mark.parametrize("initiator", [True, False])
def test_tls_is_taken_for_a_peer_with_a_key(data: bytes, initiator: bool) -> None:
    connection = LinkConnection(hello(), initiator=initiator)
    error = failure(feed(connection, data))
    assert isinstance(error, AuthenticationError)
    assert "`shardnet key join`" in str(error)
    told = [] if initiator else [PREAMBLE]  # by which a peer that dialled learns why
    assert connection.take_outgoing() == told


def test_another_protocol_is_refused_at_its_first_wrong_byte() -> None:
    connection = LinkConnection(hello(), initiator=False)
    assert feed(connection, b"shrd") == []
    assert isinstance(failure(feed(connection, b"!")), RemoteProtocolError)


@pytest.mark.parametrize("kind", [kind for kind in FrameKind if kind is not FrameKind.HELLO])
def test_the_first_frame_must_be_a_hello(kind: FrameKind) -> None:
    connection = LinkConnection(hello(), initiator=False)
    frame = error_frame(PlanError("no")) if kind is FrameKind.ERROR else Frame(kind=kind)
    error = failure(feed(connection, PREAMBLE + raw(frame)))
    if kind is FrameKind.ERROR:
        assert isinstance(error, PlanError)
    else:
        assert f"{kind.name} frame is not allowed before the hello" in str(error)


def test_any_error_instead_of_a_hello_ends_the_link() -> None:
    connection = LinkConnection(hello(), initiator=True)
    refusal = error_frame(PlanError("no"), step=3, sequence=4)
    assert isinstance(failure(feed(connection, PREAMBLE + raw(refusal))), PlanError)


def test_a_second_hello_is_refused() -> None:
    made = pair()
    made.move(to_b=raw(hello_frame(hello())))
    assert "HELLO frame is not allowed on a link that is up" in str(failure(made.seen_b))
    assert "the peer reports: a HELLO frame" in str(failure(made.seen_a))


def test_before_the_hello_nothing_above_4_kib_is_taken() -> None:
    connection = LinkConnection(hello(), initiator=False)
    events = feed(connection, PREAMBLE + header(FrameKind.HELLO, meta=4097))
    assert "claims 4097 bytes of meta; at most 4096" in str(failure(events))


# --- frames


@pytest.mark.parametrize("purpose", Purpose)
@pytest.mark.parametrize("kind", FrameKind)
def test_each_purpose_has_its_kinds(purpose: Purpose, kind: FrameKind) -> None:
    common = {FrameKind.HEARTBEAT, FrameKind.ERROR, FrameKind.BYE}
    own = {
        Purpose.CONTROL: {FrameKind.CONTROL},
        Purpose.DATA: {
            FrameKind.DATA,
            FrameKind.TOKENS,
            FrameKind.EXTRAS,
            FrameKind.SEQUENCE,
            FrameKind.ROWS,
        },
        Purpose.BULK: {FrameKind.BULK},
        Purpose.PARTS: {FrameKind.PART},
    }
    allowed = common | own[purpose]
    frame = error_frame(PlanError("x"), step=1) if kind is FrameKind.ERROR else Frame(kind=kind)
    made = pair(purpose)
    if kind in allowed:
        made.move(to_b=joined(made.a.send(frame)))
        assert not isinstance(made.seen_b[0], LinkFailed)
    else:
        with pytest.raises(LocalProtocolError):
            made.a.send(frame)
        made.move(to_b=raw(frame))
        assert f"{kind.name} frame is not allowed" in str(failure(made.seen_b))


@settings(max_examples=examples(50), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.one_of(
        st.tuples(st.just(Purpose.CONTROL), st.lists(control_frames(), max_size=6)),
        st.tuples(st.just(Purpose.DATA), st.lists(data_link_frames(), max_size=6)),
        st.tuples(st.just(Purpose.BULK), st.lists(bulk_frames(), max_size=6)),
        st.tuples(st.just(Purpose.PARTS), st.lists(part_frames(), max_size=6)),
    ),
    st.lists(st.integers(0, 2**20), max_size=12),
    st.binary(max_size=40),
)
def test_any_chunking_gives_the_same_events(
    sent: tuple[Purpose, list[Frame]], cuts: list[int], rubbish: bytes
) -> None:
    purpose, frames = sent
    stream = joined([raw(frame) for frame in frames]) + rubbish
    whole, cut, single = pair(purpose), pair(purpose), pair(purpose)
    expected = feed(whole.b, stream)
    assert [e.frame for e in expected if isinstance(e, FrameReceived)] == [
        frame for frame in frames if frame.kind is not FrameKind.HEARTBEAT
    ]
    for connection, borders in ((cut.b, cuts), (single.b, list(range(min(len(stream), 2000))))):
        assert _comparable(feed(connection, stream, borders)) == _comparable(expected)


def _comparable(events: list[Event]) -> list[object]:
    return [str(e.error) if isinstance(e, LinkFailed) else e for e in events]


@given(st.lists(st.integers(0, 200), max_size=8))
def test_any_chunking_of_the_handshake_gives_the_same_events(cuts: list[int]) -> None:
    stream = PREAMBLE + raw(hello_frame(hello("b"))) + raw(Frame(kind=FrameKind.BYE))
    connection = LinkConnection(hello(), initiator=True)
    assert feed(connection, stream, cuts) == [HelloReceived(hello=hello("b")), PeerLeft()]


@settings(max_examples=30, deadline=None)
@given(steps())
def test_frames_keep_their_content(step: StepData) -> None:
    made = pair(Purpose.DATA)
    frame = data_frame(step)
    made.move(to_b=joined(made.a.send(frame)))
    assert made.seen_b == [FrameReceived(frame=frame)]


def test_a_heartbeat_reports_progress() -> None:
    made = pair()
    made.move(to_b=joined(made.a.send(Frame(kind=FrameKind.HEARTBEAT, epoch=2, step=2**40))))
    assert made.seen_b == [ProgressReported(epoch=2, step=2**40)]


def test_zero_length_frames_are_frames() -> None:
    made = pair(Purpose.DATA)
    tokens = Frame(kind=FrameKind.TOKENS, step=4)
    made.move(to_b=joined([*made.a.send(tokens), *made.a.send(tokens)]))
    assert made.seen_b == [FrameReceived(frame=tokens)] * 2


def test_a_large_payload_is_received_straight_into_its_aligned_buffer() -> None:
    made = pair(Purpose.DATA)
    payload = bytes(range(256)) * 1024
    data = joined(made.a.send(Frame(kind=FrameKind.DATA, meta=b"m", payload=payload)))
    split = HEADER.size + 1 + 100
    assert feed(made.b, data[:split]) == []
    room = made.b.get_buffer()
    assert len(room) == len(payload) - 100
    room[:] = data[split:]
    (event,) = made.b.received(len(room))
    assert isinstance(event, FrameReceived)
    received = event.frame.payload
    assert isinstance(received, memoryview)
    assert received == payload
    assert received.obj is room.obj
    assert ctypes.addressof(ctypes.c_char.from_buffer(received)) % ALIGNMENT == 0


def test_two_payloads_never_share_a_buffer() -> None:
    made = pair(Purpose.DATA)
    frame = Frame(kind=FrameKind.DATA, payload=b"x" * 100)
    first, second = feed(made.b, joined([*made.a.send(frame), *made.a.send(frame)]))
    assert isinstance(first, FrameReceived)
    assert isinstance(second, FrameReceived)
    memoryview(first.frame.payload)[0:1] = b"y"
    assert bytes(second.frame.payload) == b"x" * 100


def test_many_small_frames_come_with_one_read() -> None:
    made = pair()
    data = joined([raw(control_frame(Cancel(request=i))) for i in range(1000)])
    assert len(data) <= SCRATCH_BYTES == len(made.b.get_buffer())
    made.b.get_buffer()[: len(data)] = data
    assert len(made.b.received(len(data))) == 1000


def test_the_rest_of_a_small_payload_comes_with_the_next_frames() -> None:
    made = pair(Purpose.DATA)
    data = joined(made.a.send(Frame(kind=FrameKind.DATA, payload=bytes(DIRECT_BYTES))))
    feed(made.b, data[:100])
    assert len(made.b.get_buffer()) == SCRATCH_BYTES


def test_a_sent_payload_is_not_copied() -> None:
    payload = bytearray(100)
    _, sent = pair(Purpose.DATA).a.send(Frame(kind=FrameKind.DATA, payload=payload))
    assert isinstance(sent, memoryview)
    assert sent.obj is payload


@pytest.mark.parametrize(
    ("kind", "lengths"),
    [
        (FrameKind.DATA, {"payload": 2**32 - 1}),
        (FrameKind.DATA, {"meta": 2**32 - 1}),
        (FrameKind.TOKENS, {"payload": 65537}),
        (FrameKind.SEQUENCE, {"payload": 1}),
    ],
)
def test_a_claim_above_the_cap_is_refused_before_memory_is_taken(
    kind: FrameKind, lengths: dict[str, int]
) -> None:
    made = pair(Purpose.DATA)
    made.move(to_b=header(kind, **lengths))
    assert isinstance(failure(made.seen_b), RemoteProtocolError)
    assert "claims" in str(failure(made.seen_b))
    assert len(made.b.get_buffer()) <= SCRATCH_BYTES


def test_memory_of_a_large_payload_is_taken_as_its_bytes_come() -> None:
    made, claimed = pair(Purpose.DATA), LIMITS[FrameKind.DATA][1]
    resident = psutil.Process().memory_info().rss
    feed(made.b, header(FrameKind.DATA, payload=claimed))
    feed(made.b, bytes(1000))
    assert psutil.Process().memory_info().rss - resident < claimed / 16


def test_the_limits_are_the_receivers() -> None:
    made = pair(Purpose.DATA, limits_b={**LIMITS, FrameKind.DATA: (1000, 10)})
    made.move(to_b=joined(made.a.send(Frame(kind=FrameKind.DATA, payload=bytes(11)))))
    assert "claims 11 bytes of payload; at most 10" in str(failure(made.seen_b))


# --- ends


def test_bye_is_a_clean_end() -> None:
    made = pair()
    made.move(to_b=joined(made.a.send(Frame(kind=FrameKind.BYE))))
    assert made.seen_b == [PeerLeft()]
    assert made.b.eof() == []
    for connection in (made.a, made.b):
        with pytest.raises(LinkClosedError):
            connection.send(Frame(kind=FrameKind.HEARTBEAT))


def test_frames_still_come_after_our_own_bye() -> None:
    made = pair()
    made.a.send(Frame(kind=FrameKind.BYE))
    made.move(to_a=joined(made.b.send(control_frame(Cancel(request=1)))))
    assert made.seen_a == [FrameReceived(frame=control_frame(Cancel(request=1)))]


def test_bytes_after_the_end_are_not_looked_at() -> None:
    made = pair()
    made.move(to_b=raw(Frame(kind=FrameKind.BYE)) + b"anything" * 100_000)
    assert made.seen_b == [PeerLeft()]


@pytest.mark.parametrize(
    ("data", "when"),
    [
        (b"", "without saying goodbye"),
        (header(FrameKind.BYE)[:-1], "in the middle of a frame"),
        (header(FrameKind.CONTROL, meta=10), "in the middle of a frame"),
        (header(FrameKind.CONTROL, meta=10) + b"x", "in the middle of a frame"),
    ],
)
def test_eof_without_bye_is_an_event_of_its_own(data: bytes, when: str) -> None:
    made = pair()
    assert feed(made.b, data) == []
    error = failure(made.b.eof())
    assert isinstance(error, LinkClosedError)
    assert when in str(error)
    assert made.b.eof() == []


def test_eof_during_the_handshake() -> None:
    for data in (b"", PREAMBLE):
        connection = LinkConnection(hello(), initiator=False)
        assert feed(connection, data) == []
        assert "during the handshake" in str(failure(connection.eof()))


def test_an_error_about_a_step_or_a_sequence_goes_on() -> None:
    made = pair(Purpose.DATA)
    for frame in (error_frame(PlanError("x"), step=1), error_frame(PlanError("x"), sequence=0)):
        made.seen_b.clear()
        made.move(to_b=joined(made.a.send(frame)))
        assert made.seen_b == [FrameReceived(frame=frame)]


def test_an_error_about_the_link_ends_it_with_its_own_class() -> None:
    made = pair()
    made.move(to_b=joined(made.a.send(error_frame(PlanError("no plan")))))
    assert type(failure(made.seen_b)) is PlanError
    assert made.b.state is LinkState.ENDED
    assert made.b.take_outgoing() == []


@pytest.mark.parametrize(
    ("kind", "meta"),
    [(FrameKind.ERROR, b"\xc0"), (FrameKind.ERROR, encoded({"code": 1}))],
)
def test_a_malformed_error_frame_ends_the_link(kind: FrameKind, meta: bytes) -> None:
    made = pair()
    made.move(to_b=raw(Frame(kind=kind, step=1, meta=meta)))
    assert isinstance(failure(made.seen_b), RemoteProtocolError)


def test_events_before_a_fault_in_the_same_bytes_are_kept() -> None:
    made = pair()
    frame = control_frame(Cancel(request=1))
    made.move(to_b=raw(frame) + b"\0" * 24)
    assert made.seen_b[0] == FrameReceived(frame=frame)
    assert "stream is damaged" in str(failure(made.seen_b))


def test_nothing_is_sent_before_the_link_is_up() -> None:
    connection = LinkConnection(hello(), initiator=True)
    connection.start()
    with pytest.raises(LocalProtocolError, match="before the preamble"):
        connection.send(Frame(kind=FrameKind.HEARTBEAT))
