"""What every transport must do: one suite over memory, TCP and TLS, on asyncio and on uvloop."""

from __future__ import annotations

import asyncio
import os
import struct
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from msgspec import structs
from support.transport_harness import HARNESSES, OPTIONS, SMALL_BUFFERS, Harness, hello, raw

from shardnet.errors import (
    LinkClosedError,
    LocalProtocolError,
    PeerSilentError,
    PlanError,
    RemoteProtocolError,
    ShardnetError,
    VersionMismatchError,
)
from shardnet.transport.link import Link, LinkOptions
from shardnet.transport.memory import memory_pair
from shardnet.transport.tcp import connect
from shardnet.wire.framing.frames import HEADER, LIMITS, MIB, PREAMBLE, Frame, FrameKind
from shardnet.wire.messages.handshake import Purpose, error_frame, hello_frame


@pytest.fixture(params=HARNESSES.values(), ids=HARNESSES.keys())
def harness(request: pytest.FixtureRequest) -> Harness:
    chosen: Harness = request.param
    return chosen


def frame(step: int, payload: bytes = b"") -> Frame:
    return Frame(kind=FrameKind.DATA, epoch=3, step=step, meta=b"meta", payload=payload)


async def close_both(a: Link, b: Link) -> None:
    await asyncio.gather(a.close(), b.close())


async def receive_for_ever(link: Link) -> None:
    while True:
        await link.receive()


async def turns(n: int = 50) -> None:
    """Let the loop do what it can do now."""
    for _ in range(n):
        await asyncio.sleep(0)


# --- frames


def test_frames_arrive_whole_and_in_order_both_ways(harness: Harness) -> None:
    async def scenario(harness: Harness) -> None:
        a, b = await harness.pair()
        assert (a.peer.node, b.peer.node) == ("b", "a")
        frames = [frame(i, bytes([i]) * (i * 997)) for i in range(200)]
        for f in frames:
            a.send(f)
            b.send(f)
        for f in frames:
            assert await b.receive() == f
            assert await a.receive() == f
        await close_both(a, b)

    harness.run(scenario)


def test_a_zero_length_frame_is_a_frame(harness: Harness) -> None:
    async def scenario(harness: Harness) -> None:
        a, b = await harness.pair()
        a.send(Frame(kind=FrameKind.TOKENS, step=7))
        assert await b.receive() == Frame(kind=FrameKind.TOKENS, step=7)
        await close_both(a, b)

    harness.run(scenario)


def test_a_64_mib_payload_is_intact(harness: Harness) -> None:
    payload = os.urandom(MIB) * 64

    async def scenario(harness: Harness) -> None:
        a, b = await harness.pair()
        a.send(frame(1, payload))
        draining = asyncio.create_task(a.drain())
        received = await b.receive()
        assert received.payload == payload
        await draining
        await close_both(a, b)

    harness.run(scenario)


def test_a_slow_receiver_holds_the_sender_back(harness: Harness) -> None:
    """Queue of one frame and the smallest socket buffers: few frames are ever under way."""
    n_frames, payload = 60, bytes(64 * 1024)

    async def scenario(harness: Harness) -> None:
        a, b = await harness.pair(SMALL_BUFFERS)
        sent = count()
        n_sent = 0

        async def send_all() -> None:
            nonlocal n_sent
            for step in range(n_frames):
                a.send(frame(step, payload))
                n_sent = next(sent) + 1
                await a.drain()

        sending = asyncio.create_task(send_all())
        most_under_way = 0
        for step in range(n_frames):
            await turns()
            most_under_way = max(most_under_way, n_sent - step)
            assert (await b.receive()).step == step
        await sending
        assert 2 <= most_under_way <= 8
        await close_both(a, b)

    harness.run(scenario)


def test_both_sides_may_send_at_once_through_the_smallest_buffers(harness: Harness) -> None:
    async def scenario(harness: Harness) -> None:
        a, b = await harness.pair(SMALL_BUFFERS)

        async def send(link: Link) -> None:
            for step in range(20):
                link.send(frame(step, bytes(100_000)))
                await link.drain()

        async def receive(link: Link) -> None:
            for step in range(20):
                assert (await link.receive()).step == step

        await asyncio.gather(send(a), send(b), receive(a), receive(b))
        await close_both(a, b)

    harness.run(scenario)


def test_only_one_task_may_receive(harness: Harness) -> None:
    async def scenario(harness: Harness) -> None:
        a, b = await harness.pair()
        waiting = asyncio.create_task(a.receive())
        await turns(1)
        with pytest.raises(LocalProtocolError, match="two tasks"):
            await a.receive()
        b.send(frame(1))
        assert (await waiting).step == 1
        await close_both(a, b)

    harness.run(scenario)


def test_a_cancelled_receive_loses_nothing(harness: Harness) -> None:
    async def scenario(harness: Harness) -> None:
        a, b = await harness.pair()
        waiting = asyncio.create_task(a.receive())
        await turns(1)
        waiting.cancel()
        await asyncio.wait([waiting])
        b.send(frame(1))
        assert (await a.receive()).step == 1
        await close_both(a, b)

    harness.run(scenario)


def test_what_does_not_belong_on_the_link_is_not_sent(harness: Harness) -> None:
    async def scenario(harness: Harness) -> None:
        a, b = await harness.pair()
        with pytest.raises(LocalProtocolError, match="CONTROL"):
            a.send(Frame(kind=FrameKind.CONTROL))
        a.send(frame(1))
        assert (await b.receive()).step == 1
        await close_both(a, b)

    harness.run(scenario)


# --- clean ends


def test_close_says_goodbye_after_what_was_sent(harness: Harness) -> None:
    async def scenario(harness: Harness) -> None:
        a, b = await harness.pair()
        for step in range(3):
            a.send(frame(step, bytes(100_000)))
        closing = asyncio.create_task(a.close())
        for step in range(3):
            assert (await b.receive()).step == step
        for _ in range(2):
            with pytest.raises(LinkClosedError, match=r"a .* the peer has closed the link"):
                await b.receive()
        await closing
        await a.close()
        await b.close()
        assert a.closed
        assert b.closed
        with pytest.raises(LinkClosedError, match="this side has closed"):
            a.send(frame(4))
        with pytest.raises(LinkClosedError, match="the peer has closed"):
            b.send(frame(4))
        with pytest.raises(LinkClosedError):
            await a.receive()
        with pytest.raises(LinkClosedError):
            await a.drain()

    harness.run(scenario)


def test_close_wakes_our_own_receiver(harness: Harness) -> None:
    async def scenario(harness: Harness) -> None:
        a, b = await harness.pair()
        waiting = asyncio.create_task(a.receive())
        await turns(1)
        await close_both(a, b)
        with pytest.raises(LinkClosedError, match="this side has closed"):
            await waiting

    harness.run(scenario)


def test_close_does_not_wait_for_frames_that_nobody_received(harness: Harness) -> None:
    async def scenario(harness: Harness) -> None:
        a, b = await harness.pair(replace(SMALL_BUFFERS, close_s=1000))
        for step in range(5):
            a.send(frame(step, bytes(100_000)))
        await turns()
        await b.close()
        with pytest.raises(LinkClosedError, match="the peer has closed the link"):
            await a.receive()
        await a.close()

    harness.run(scenario)


def test_close_is_bounded_when_the_peer_does_not_answer(harness: Harness) -> None:
    async def scenario(harness: Harness) -> None:
        peer, link = await harness.raw_up(replace(OPTIONS, close_s=0.1))
        peer.transport.pause_reading()
        link.send(frame(1, bytes(30 * MIB)))
        await link.close()
        peer.transport.resume_reading()
        await peer.lost.wait()

    harness.run(scenario)


def test_abort_drops_the_connection_at_once(harness: Harness) -> None:
    async def scenario(harness: Harness) -> None:
        a, b = await harness.pair()
        a.abort("the test wants it")
        with pytest.raises(LinkClosedError, match=r"b .*: the test wants it"):
            await a.receive()
        with pytest.raises(LinkClosedError):
            await b.receive()
        await close_both(a, b)

    harness.run(scenario)


def test_cancelling_one_of_several_senders_leaves_the_link_alone(harness: Harness) -> None:
    """What was handed over before arrives whole, and so does what others send."""

    async def scenario(harness: Harness) -> None:
        a, b = await harness.pair(SMALL_BUFFERS)
        payload = bytes(MIB)
        for step in range(4):
            a.send(frame(step, payload))
        draining = asyncio.create_task(a.drain(shared=True))
        await turns()
        assert not draining.done()
        draining.cancel()
        with pytest.raises(asyncio.CancelledError):
            await draining
        a.send(frame(4, payload))
        for step in range(5):
            received = await b.receive()
            assert (received.step, received.payload) == (step, payload)
        await close_both(a, b)

    harness.run(scenario)


def test_cancelling_a_send_in_the_middle_aborts_the_link(harness: Harness) -> None:
    async def scenario(harness: Harness) -> None:
        a, b = await harness.pair(SMALL_BUFFERS)

        async def send_for_ever() -> None:
            for step in count():
                a.send(frame(step, bytes(MIB)))
                await a.drain()

        sending = asyncio.create_task(send_for_ever())
        assert (await b.receive()).step == 0
        await turns()
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        assert a.closed
        with pytest.raises(LinkClosedError, match="a send was cancelled"):
            a.send(frame(1))
        with pytest.raises(LinkClosedError):
            await receive_for_ever(b)
        await close_both(a, b)

    harness.run(scenario)


# --- peers that do not read


async def control_pair(harness: Harness, options: LinkOptions) -> tuple[Link, Link]:
    """Both ends of a control link."""
    own = hello("a", Purpose.CONTROL)
    if not harness.tcp:
        return await memory_pair(own, hello("b", Purpose.CONTROL), options=options)
    accepted: asyncio.Queue[Link] = asyncio.Queue()
    listener = await harness.listen(accepted.put, options=options)
    options = replace(options, identity=harness.identity)
    return await connect("127.0.0.1", listener.port, own, options=options), await accepted.get()


def test_a_control_link_to_a_peer_that_reads_nothing_holds_a_bounded_memory(
    harness: Harness,
) -> None:
    """Nobody waits for `drain` there; the peer lives, and may even send."""

    async def scenario(harness: Harness) -> None:
        options = replace(SMALL_BUFFERS, unsent_bytes=100_000)
        near, far = await control_pair(harness, options)

        async def send_much() -> None:
            for _ in range(1000):
                near.send(Frame(kind=FrameKind.CONTROL, meta=bytes(10_000)))
                await asyncio.sleep(0)

        with pytest.raises(PeerSilentError, match="it does not read: more than 100000 bytes"):
            await send_much()
        assert near.closed
        far.abort("it has read nothing")
        await near.close()

    harness.run(scenario)


def test_a_control_link_carries_the_largest_messages_one_after_the_other(harness: Harness) -> None:
    """A peer that reads them does not read too little while it has them to read."""
    sizes = [LIMITS[FrameKind.CONTROL][0]] * 2 + [100, 100]

    async def scenario(harness: Harness) -> None:
        near, far = await control_pair(harness, OPTIONS)
        for size in sizes:
            near.send(Frame(kind=FrameKind.CONTROL, meta=bytes(size)))
        assert [len((await far.receive()).meta) for _ in sizes] == sizes
        await close_both(near, far)

    harness.run(scenario)


# --- peers that break


async def refused(link: Link, error: type[ShardnetError], match: str) -> None:
    with pytest.raises(error, match=match):
        await link.receive()
    assert link.closed
    with pytest.raises(error, match=match):
        link.send(frame(1))
    await link.close()


def test_a_killed_peer(harness: Harness) -> None:
    async def scenario(harness: Harness) -> None:
        peer, link = await harness.raw_up()
        peer.transport.abort()
        await refused(link, LinkClosedError, "raw ")

    harness.run(scenario)


def test_what_comes_after_the_end_is_discarded_unread(harness: Harness) -> None:
    """A damaged frame would be answered with an ERROR frame, after the end of our own half."""

    async def scenario(harness: Harness) -> None:
        broken: list[dict[str, Any]] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: broken.append(context))
        peer, link = await harness.raw_up()
        closing = asyncio.create_task(link.close())
        await peer.read(peer.head_bytes)  # BYE
        peer.send(b"no frame" * 10)
        await turns()
        peer.transport.close()
        await closing
        assert broken == []

    harness.run(scenario)


def test_a_peer_that_ends_in_the_middle_of_a_frame(harness: Harness) -> None:
    async def scenario(harness: Harness) -> None:
        peer, link = await harness.raw_up()
        peer.send(peer.packed(frame(1, bytes(100)))[:-1])
        peer.transport.close()
        await refused(link, LinkClosedError, "closed the connection in the middle of a frame")

    harness.run(scenario)


def test_a_peer_that_ends_without_goodbye(harness: Harness) -> None:
    async def scenario(harness: Harness) -> None:
        peer, link = await harness.raw_up()
        peer.send(peer.packed(frame(1)))
        peer.transport.close()
        assert (await link.receive()).step == 1
        await refused(link, LinkClosedError, "without saying goodbye")

    harness.run(scenario)


@pytest.mark.parametrize("sent", [0, 10, 60_000], ids=["nothing", "in a header", "in a payload"])
def test_a_peer_that_falls_silent(harness: Harness, sent: int) -> None:
    async def scenario(harness: Harness) -> None:
        peer, link = await harness.raw_up(replace(OPTIONS, silence_s=0.2))
        peer.send(peer.packed(frame(1, bytes(100_000)))[:sent])
        await refused(link, PeerSilentError, r"raw .*: nothing came for 0\.2 s")
        await peer.lost.wait()

    harness.run(scenario)


def test_a_silent_peer_is_told_why_its_control_link_ends(harness: Harness) -> None:
    """It may have stood still, and read on later."""

    async def scenario(harness: Harness) -> None:
        options = replace(OPTIONS, client_silence_s=0.2)
        peer, link = await harness.raw_up(options, Purpose.CONTROL)
        with pytest.raises(PeerSilentError, match=r"raw .*: nothing came for 0\.2 s"):
            await link.receive()
        report = await peer.read_error()
        assert report.code == PeerSilentError.code
        assert "nothing came from this side for 0.2 s" in report.message
        peer.transport.close()
        await link.close()

    harness.run(scenario)


def test_a_client_may_be_silent_for_longer_than_a_node(harness: Harness) -> None:
    """Its event loop may be that of a program which does other things too."""

    async def scenario(harness: Harness) -> None:
        options = replace(OPTIONS, silence_s=1e6, client_silence_s=0.2)
        _, link = await harness.raw_up(options, Purpose.CONTROL)
        with pytest.raises(PeerSilentError, match=r"raw .*: nothing came for 0\.2 s"):
            await link.receive()
        link.abort("enough")

    harness.run(scenario)


def test_a_ring_notices_within_five_seconds_and_not_a_pause_of_three() -> None:
    """A heartbeat goes out at every second tick at least, and silence is looked at in each."""
    options = LinkOptions()
    tick_s = min(options.heartbeat_s, options.silence_s / 4)
    assert options.silence_s + tick_s < 5
    assert 3 + 2 * tick_s < options.silence_s


def test_a_silent_peer_does_not_hold_drain(harness: Harness) -> None:
    async def scenario(harness: Harness) -> None:
        peer, link = await harness.raw_up(replace(OPTIONS, silence_s=0.2))
        peer.transport.pause_reading()
        link.send(frame(1, bytes(30 * MIB)))
        with pytest.raises(PeerSilentError):
            await link.drain()
        peer.transport.abort()

    harness.run(scenario)


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (bytes(24), "the stream is damaged"),
        (HEADER.pack(0x4E53, FrameKind.DATA, 0, 0, 2**32 - 1, 3, 1), "claims 4294967295 bytes"),
        (raw(Frame(kind=FrameKind.BULK)), "BULK frame is not allowed"),
        (raw(hello_frame(hello())), "HELLO frame is not allowed"),
    ],
    ids=["garbage", "4 GB", "bulk", "second hello"],
)
def test_a_peer_that_breaks_the_protocol_is_told_why(
    harness: Harness, data: bytes, what: str
) -> None:
    async def scenario(harness: Harness) -> None:
        peer, link = await harness.raw_up()
        peer.send(data + bytes(100_000))
        with pytest.raises(RemoteProtocolError, match=f"raw .*: .*{what}"):
            await link.receive()
        assert what in (await peer.read_error()).message
        peer.transport.close()
        await link.close()

    harness.run(scenario)


@pytest.mark.parametrize(
    ("data", "error", "what"),
    [
        (
            b"GET / HTTP/1.1\r\n\r\n",
            RemoteProtocolError,
            "does not speak the protocol",
        ),
        (PREAMBLE[:6] + struct.pack("<H", 9), VersionMismatchError, "version 9, we speak 4"),
        (PREAMBLE + raw(frame(1)), RemoteProtocolError, "DATA frame is not allowed before the he"),
        (
            PREAMBLE + HEADER.pack(0x4E53, FrameKind.HELLO, 0, 5000, 0, 0, 0),
            RemoteProtocolError,
            "claims 5000 bytes of meta; at most 4096",
        ),
        (
            PREAMBLE + raw(hello_frame(structs.replace(hello("raw"), ring=""))),
            RemoteProtocolError,
            "wants a data link but names no ring",
        ),
    ],
    ids=["http", "version", "wrong first kind", "large hello", "no ring"],
)
def test_a_handshake_that_fails(
    harness: Harness, data: bytes, error: type[ShardnetError], what: str
) -> None:
    async def scenario(harness: Harness) -> None:
        peer, up = await harness.raw()
        peer.send(data)
        await peer.lost.wait()
        with pytest.raises(error, match=what):
            await up
        if data.startswith(PREAMBLE[:6]):
            assert peer.received.startswith(PREAMBLE)
        else:
            assert peer.received == b""

    harness.run(scenario)


def test_a_refused_peer_is_told_why_though_it_sends_on(harness: Harness) -> None:
    async def scenario(harness: Harness) -> None:
        peer, up = await harness.raw()
        peer.send(
            PREAMBLE + raw(hello_frame(structs.replace(hello("raw"), ring=""))) + bytes(20 * MIB)
        )
        assert await peer.read(len(PREAMBLE)) == PREAMBLE
        _, kind, *_ = HEADER.unpack(await peer.read(HEADER.size))
        assert kind == FrameKind.ERROR
        peer.transport.abort()
        with pytest.raises(RemoteProtocolError, match="names no ring"):
            await up

    harness.run(scenario)


def test_an_error_about_the_link_is_raised_with_its_class_and_the_peers_name(
    harness: Harness,
) -> None:
    async def scenario(harness: Harness) -> None:
        peer, link = await harness.raw_up()
        peer.send(peer.packed(error_frame(PlanError("no plan fits"))))
        await refused(link, PlanError, "raw .*: the peer reports: no plan fits")

    harness.run(scenario)


def test_an_error_about_a_step_is_a_frame(harness: Harness) -> None:
    async def scenario(harness: Harness) -> None:
        a, b = await harness.pair()
        a.send(error_frame(PlanError("no plan fits"), epoch=3, step=8))
        received = await b.receive()
        assert (received.kind, received.step) == (FrameKind.ERROR, 8)
        await close_both(a, b)

    harness.run(scenario)


# --- heartbeats and pauses


OTHER_EPOCH = 4
"""Of another ring than the link's: what is said of steps of that ring says nothing of the link."""


def beating(options: LinkOptions, n_beats: int) -> tuple[LinkOptions, asyncio.Event]:
    """Options with fast heartbeats and a short silence, and an event after `n_beats` of them."""
    beats = count(1)
    enough = asyncio.Event()

    def progress() -> tuple[int, int]:
        n = next(beats)
        if n >= n_beats:
            enough.set()
        return (OTHER_EPOCH, n)

    return replace(options, heartbeat_s=0.05, silence_s=0.4, progress=progress), enough


def test_heartbeats_keep_an_idle_link_up_and_tell_progress(harness: Harness) -> None:
    async def scenario(harness: Harness) -> None:
        options, enough = beating(OPTIONS, 30)
        a, b = await harness.pair(options)
        await enough.wait()  # 30 beats of two links: 0.75 s, longer than the silence
        a.send(frame(1))
        b.send(frame(1))
        await a.receive()
        await b.receive()
        for link in (a, b):
            epoch, step = link.peer_progress
            assert epoch == OTHER_EPOCH
            assert step >= 20
        await close_both(a, b)

    harness.run(scenario)


def test_a_stage_that_reports_a_step_and_has_not_sent_it_breaks_the_protocol(
    harness: Harness,
) -> None:
    """Not the other way: nothing of steps comes from the stage after this one."""

    async def scenario(harness: Harness) -> None:
        done = 7
        options = replace(OPTIONS, heartbeat_s=0.05, progress=lambda: (3, done))
        before, after = await harness.pair(options)
        before.send(frame(done))
        assert (await after.receive()).step == done
        while not after.peer_progress == before.peer_progress == (3, done):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        done += 1
        with pytest.raises(RemoteProtocolError, match=r"step 8 by its own .* after step 7 none"):
            await after.receive()
        with pytest.raises(LinkClosedError):
            await before.receive()

    harness.run(scenario)


def test_a_receiver_that_takes_its_time_blames_nobody_and_is_not_blamed(harness: Harness) -> None:
    async def scenario(harness: Harness) -> None:
        options, enough = beating(SMALL_BUFFERS, 20)
        a, b = await harness.pair(options)

        async def send_all() -> None:
            for step in range(5):
                a.send(frame(step, bytes(MIB)))
                await a.drain()

        sending = asyncio.create_task(send_all())
        await enough.wait()  # only b beats, a's writing is paused: 1 s, longer than the silence
        for step in range(5):
            assert (await b.receive()).step == step
        await sending
        await close_both(a, b)

    harness.run(scenario)


def test_two_sides_that_both_only_send_end_in_an_error(harness: Harness) -> None:
    async def scenario(harness: Harness) -> None:
        a, b = await harness.pair(replace(SMALL_BUFFERS, silence_s=0.3))

        async def send_for_ever(link: Link) -> None:
            for step in count():
                link.send(frame(step, bytes(MIB)))
                await link.drain()

        ends = await asyncio.gather(send_for_ever(a), send_for_ever(b), return_exceptions=True)
        assert PeerSilentError in map(type, ends)
        assert {type(end) for end in ends} <= {PeerSilentError, LinkClosedError}
        await close_both(a, b)

    harness.run(scenario)
