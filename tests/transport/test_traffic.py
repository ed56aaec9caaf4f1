"""What links carry is counted: bytes, ends that nobody wanted, and the kernel's round trip."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from msgspec.structs import replace as changed
from support.transport_harness import OPTIONS, hello

from shardnet.transport.link import Link
from shardnet.transport.listener import Listener
from shardnet.transport.tcp import connect, listen
from shardnet.transport.traffic import MAX_COUNTED, Meter, Traffic
from shardnet.types import NodeId
from shardnet.wire.framing.frames import Frame, FrameKind
from shardnet.wire.messages.diagnostics import LinkTraffic
from shardnet.wire.messages.handshake import PeerRole


def test_bytes_and_broken_links_are_counted_by_peer_and_purpose() -> None:
    async def main() -> None:
        ours, theirs = Traffic(NodeId("a")), Traffic(NodeId("b"))
        accepted: asyncio.Queue[Link] = asyncio.Queue()
        listener: Listener = await listen(
            "127.0.0.1",
            0,
            lambda _: hello("b"),
            accepted.put,
            options=replace(OPTIONS, traffic=theirs),
        )
        port = int(listener.address.rpartition(":")[2])
        counts: list[LinkTraffic] = []
        for is_closed in (True, False):
            link = await connect(
                "127.0.0.1", port, hello("a"), options=replace(OPTIONS, traffic=ours)
            )
            far = await accepted.get()
            link.send(Frame(kind=FrameKind.TOKENS, epoch=3, step=1, payload=b"1234" * 1000))
            await far.receive()
            [live] = ours.counts()
            assert (live.name, live.purpose, live.n_links) == ("b", "data", 1)
            assert live.n_resent is None or live.round_trip_us
            if is_closed:
                await asyncio.gather(link.close(), far.close())
            else:
                link.abort("pulled out")
                await far.close()
            counts += ours.counts()
        await listener.close()
        assert [(c.n_links, c.n_failed) for c in counts] == [(0, 0), (0, 1)]
        assert counts[1].sent_bytes > 8000
        [seen] = theirs.counts()
        assert seen.name == "a"
        assert 8000 < seen.received_bytes <= counts[1].sent_bytes  # a goodbye may cross
        assert counts[1].received_bytes <= seen.sent_bytes

    asyncio.run(main())


def test_clients_and_peers_of_long_ago_do_not_pile_up() -> None:
    traffic, client = Traffic(NodeId("a")), changed(hello("c"), role=PeerRole.CLIENT)
    traffic.up(client, Meter(tcp=lambda: None))
    traffic.up(hello("a"), Meter(tcp=lambda: None))
    assert traffic.counts() == []
    for number in range(MAX_COUNTED + 5):
        peer, meter = hello(f"n{number:04}"), Meter(tcp=lambda: None, sent_bytes=1)
        traffic.up(peer, meter)
        traffic.down(peer, meter, failed=False)
    names = [counts.name for counts in traffic.counts()]
    assert (len(names), names[0], names[-1]) == (MAX_COUNTED, "n0005", f"n{MAX_COUNTED + 4:04}")
