"""Whom a plan may use: peers are waited for while they are there, and named if they say nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import cast

from msgspec.structs import replace
from support.cluster.checkup_facts import info

from shardnet.cluster.peers.advertisement import Advertisement
from shardnet.cluster.peers.node_directory import TOO_BUSY, NodeCandidates, NodeDirectory
from shardnet.cluster.peers.peers import Peers
from shardnet.errors import LinkClosedError
from shardnet.wire.messages.membership import NodeInfo, Status, StatusReply

Telling = Callable[[NodeInfo], Awaitable[NodeInfo]]


class Peer:
    """The link to a node that says who it is when `tell` has come to its end."""

    def __init__(self, name: str, tell: Telling) -> None:
        self._info = replace(info("bert"), node=name, name=name)
        self._tell = tell
        self.link = SimpleNamespace(peer=SimpleNamespace(node=name, name=name))

    async def ask(self, message: Status, expected: type[StatusReply]) -> StatusReply:
        return StatusReply(request=message.request, node=await self._tell(self._info), peers=[])


async def at_once(node: NodeInfo) -> NodeInfo:
    return node


async def never(node: NodeInfo) -> NodeInfo:
    await asyncio.Event().wait()
    raise AssertionError


async def gone(node: NodeInfo) -> NodeInfo:
    raise LinkClosedError("no byte for 8 s")


async def asked(
    *peers: Peer,
    status_s: float,
    is_draining: bool = False,
    leads: bool = False,
    redialled: Sequence[Peer] = (),
) -> NodeCandidates:
    """Ask for candidates among `peers`, of which some have another link once all is `settled`."""
    linked = {peer.link.peer.node: peer for peer in peers}
    settled = False

    async def settle() -> None:
        nonlocal settled
        linked.update({peer.link.peer.node: peer for peer in redialled if settled})
        settled = True

    def link_of(node: str) -> Peer | None:
        return linked[node] if linked[node] in redialled else None

    links = SimpleNamespace(linked=lambda: [*linked.values()], settled=settle, link_of=link_of)
    neighbours = NodeDirectory(
        own_info=lambda: replace(info("anna"), node="anna", is_draining=is_draining),
        peers=cast(Peers, SimpleNamespace(links=links, address_of=lambda node: f"{node}:1")),
        advertisement=cast(Advertisement, None),
        status_s=status_s,
    )
    return await neighbours.candidates([], leads=leads)


def test_a_busy_peer_is_waited_for() -> None:
    async def main() -> None:
        others = asyncio.Event()

        async def fast(node: NodeInfo) -> NodeInfo:
            others.set()
            return node

        async def slow(node: NodeInfo) -> NodeInfo:
            await others.wait()
            for _ in range(100):
                await asyncio.sleep(0)
            return node

        found = await asked(Peer("slow", slow), Peer("fast", fast), status_s=60)
        assert [node.node for node in found.nodes] == ["anna", "slow", "fast"]
        assert [node.address for node in found.nodes[1:]] == ["slow:1", "fast:1"]
        assert found.silent == ()

    asyncio.run(main())


def test_who_says_nothing_in_time_and_whose_link_ends_are_named() -> None:
    found = asyncio.run(
        asked(Peer("pi", never), Peer("vera", gone), Peer("bert", at_once), status_s=0.05)
    )
    assert [node.node for node in found.nodes] == ["anna", "bert"]
    assert [(out.node, out.why) for out in found.silent] == [
        ("pi", f"it did not answer within 0.05 s: {TOO_BUSY}"),
        ("vera", "no byte for 8 s"),
    ]


def test_a_peer_whose_link_breaks_as_it_is_asked_is_asked_over_the_next_one() -> None:
    again = Peer("vera", at_once)
    found = asyncio.run(asked(Peer("vera", gone), status_s=60, redialled=[again]))
    assert [node.node for node in found.nodes] == ["anna", "vera"]
    assert found.silent == ()


def test_a_node_that_drains_is_a_candidate_only_for_the_ring_that_it_leads() -> None:
    """Else the ring in the place of one that it has lost would be led by nobody."""

    async def away(node: NodeInfo) -> NodeInfo:
        return replace(node, is_draining=True)

    async def found(leads: bool) -> list[str]:
        peers = (Peer("bert", at_once), Peer("carl", away))
        there = await asked(*peers, status_s=1.0, is_draining=True, leads=leads)
        assert "carl" in [node.node for node in there.away]
        assert "carl" in [out.node for out in there.silent]
        return [node.node for node in there.nodes]

    assert asyncio.run(found(leads=False)) == ["bert"]
    assert asyncio.run(found(leads=True)) == ["anna", "bert"]
