"""The nodes of a stage that spans several find each other, and nobody else gets in."""

from __future__ import annotations

import asyncio
from dataclasses import replace as changed
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec import UNSET
from msgspec.structs import replace
from support.transport_harness import HARNESSES, OPTIONS, Harness

from shardnet.cluster.member import ring_membership
from shardnet.cluster.member.ring_membership import (
    DataEnd,
    DialData,
    RingMembership,
    StageSpan,
)
from shardnet.errors import PeerFailedError, UsageError
from shardnet.transport.link import Link
from shardnet.transport.memory import memory_pair
from shardnet.transport.tcp import connect
from shardnet.transport.traffic import Traffic
from shardnet.types import Epoch, NodeId, WireDType
from shardnet.wire.messages.handshake import Hello, PeerRole, Purpose

ADDRESSES = ("a:1", "b:2", "c:3")


def end(shard: int) -> DataEnd:
    return DataEnd(ring="r", epoch=Epoch(2), rank=1, shard=shard)


def hello(own: DataEnd) -> Hello:
    return Hello(
        purpose=own.purpose,
        role=PeerRole.NODE,
        node=f"n{own.shard}",
        name=f"n{own.shard}",
        version="0",
        ring=own.ring,
        epoch=own.epoch,
        rank=own.rank,
        shard=UNSET if own.shard is None else own.shard,
    )


def spans(n: int = 3) -> list[StageSpan]:
    return [StageSpan(shard=i, addresses=ADDRESSES[:n], end=end(i)) for i in range(n)]


def member_of(span: StageSpan, dial: DialData) -> RingMembership:
    return RingMembership(
        ring="r",
        epoch=Epoch(2),
        rank=1,
        addresses=ADDRESSES,
        model="m",
        owner="h",
        owner_name="head",
        dial=dial,
        on_broken=lambda error, silent: None,
        span=span,
    )


@pytest.mark.parametrize("name", ["tcp-uvloop", "tls-uvloop"])
def test_each_shard_is_linked_to_each_other_one(name: str) -> None:
    async def main(harness: Harness) -> None:
        made = spans()
        listeners = []
        for span in made:

            async def accept(link: Link, span: StageSpan = span) -> None:
                span.accept(link)

            listeners.append(await harness.listen(accept))

        async def dial(address: str, own: DataEnd) -> Link:
            options = changed(OPTIONS, identity=harness.identity)
            port = listeners[ADDRESSES.index(address)].port
            return await connect("127.0.0.1", port, hello(own), options=options)

        linked = await asyncio.gather(*(span.connect(dial, 5.0) for span in made))
        assert [(links.shard, links.n_shards) for links in linked] == [(0, 3), (1, 3), (2, 3)]
        reading = [asyncio.create_task(job) for links in linked for job in links.readers()]
        assert len(reading) == 4  # from shard 0 the stages' sources read

        def gathered(shard: int) -> dict[int, bytes]:
            linked[shard].begin(1)  # type: ignore[arg-type]
            others = [other for other in range(3) if other != shard]
            parts = {other: memoryview(bytearray(4)) for other in others}
            own = bytes([shard] * 4)
            linked[shard].send_part(WireDType.FLOAT32, 1, (1, 1, 1), own, parts)
            linked[shard].await_parts(0)
            return {other: bytes(part) for other, part in parts.items()}

        sources = [links.source(lambda: None) for links in linked[1:]]
        reading += [asyncio.create_task(source.receive()) for source in sources]  # type: ignore[misc]
        found = await asyncio.gather(*(asyncio.to_thread(gathered, shard) for shard in range(3)))
        assert found == [
            {other: bytes([other] * 4) for other in range(3) if other != shard}
            for shard in range(3)
        ]
        for links in linked:
            links.close()
        for task in reading:
            task.cancel()
        for link in [link for span in made for link in span.links]:
            link.abort("the test is over")

    HARNESSES[name].run(main)


@pytest.mark.parametrize(
    "wrong",
    [
        replace(hello(end(1)), ring="other"),
        replace(hello(end(1)), epoch=1),
        replace(hello(end(1)), rank=0),
        hello(end(0)),
        hello(end(3)),
        replace(hello(end(1)), shard=UNSET),
    ],
)
def test_nobody_else_is_let_in(wrong: Hello) -> None:
    async def main() -> None:
        with pytest.raises(UsageError, match="expected each shard from 1 to 2 of rank 1 of ring r"):
            spans()[0].check_hello(wrong)

    asyncio.run(main())


def test_a_shard_comes_once() -> None:
    async def main() -> None:
        first, *_ = spans()
        near, far = await memory_pair(hello(end(1)), hello(end(0)))
        first.accept(far)
        assert first.links == [far]
        with pytest.raises(UsageError, match="once"):
            first.accept(far)
        with pytest.raises(PeerFailedError, match="b:2 did not open its parts link to shard 0"):
            await first.connect(_no_dial, 0.0)
        first.cancel()
        for link in (near, far):
            link.abort("the test is over")

    asyncio.run(main())


async def _no_dial(address: str, own: DataEnd) -> Link:
    raise AssertionError("shard 0 dials nobody")


def test_a_link_that_opens_while_its_node_leaves_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shard 1 dials shard 0, and would wait for shard 2."""
    monkeypatch.setattr(ring_membership, "SpanningCompute", object)

    async def main() -> None:
        dialled, goes_on = asyncio.Event(), asyncio.Event()
        near, far = await memory_pair(hello(end(1)), hello(end(0)))

        async def dial(address: str, own: DataEnd) -> Link:
            dialled.set()
            await goes_on.wait()
            return near

        member = member_of(StageSpan(shard=1, addresses=ADDRESSES, end=end(1)), dial)
        lane = SimpleNamespace(compute=object())
        joining = asyncio.create_task(member._connect_shards(cast(Any, lane)))
        await dialled.wait()
        await member.leave()
        goes_on.set()
        with pytest.raises(PeerFailedError):
            await joining
        assert near.closed
        await far.close()

    asyncio.run(main())


def test_connections_that_come_up_while_their_node_leaves_are_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last shard waits for nobody: its connection for parts is handed over all the same."""
    monkeypatch.setattr(ring_membership, "SpanningCompute", object)

    async def main(harness: Harness) -> None:
        span, parts_dialled, goes_on = spans(2)[0], asyncio.Event(), asyncio.Event()
        traffic = Traffic(NodeId("n1"))

        async def accept(link: Link) -> None:
            span.accept(link)

        listener = await harness.listen(accept)

        async def dial(address: str, own: DataEnd) -> Link:
            if own.purpose is Purpose.PARTS:
                parts_dialled.set()
                await goes_on.wait()
            options = changed(OPTIONS, traffic=traffic)
            return await connect("127.0.0.1", listener.port, hello(own), options=options)

        member = member_of(spans(2)[1], dial)
        joining = asyncio.create_task(
            member._connect_shards(cast(Any, SimpleNamespace(compute=object())))
        )
        await parts_dialled.wait()
        await member.leave()
        goes_on.set()
        with pytest.raises(PeerFailedError):
            await joining
        assert [count.n_links for count in traffic.counts()] == [0, 0]
        for link in span.links:
            link.abort("the test is over")

    HARNESSES["tcp-uvloop"].run(main)


def test_nobody_waits_for_last_words_about_parts() -> None:
    """Whoever has not taken the connection yet, or is frozen, says none."""

    async def main() -> None:
        own, other = (replace(hello(end(shard)), purpose=Purpose.PARTS) for shard in (0, 1))
        near, far = await memory_pair(own, other, options=changed(OPTIONS, close_s=3600))
        member = member_of(spans(2)[0], _no_dial)
        member.accept(near)
        async with asyncio.timeout(30):
            await member.leave()
        assert near.closed
        far.abort("the test is over")

    asyncio.run(main())
