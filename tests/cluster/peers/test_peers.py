"""Peers over in-memory links: one link per pair, gossip, loss, and addresses that mislead."""

from __future__ import annotations

import asyncio
import gc
import itertools

import pytest
from support.cluster.town import TIMES, Member, hello, town

from shardnet.cluster.peers import peer_links as peer_links_module
from shardnet.cluster.peers.control_link import ControlLink, Incoming
from shardnet.cluster.peers.peer_table import MDNS
from shardnet.cluster.peers.peers import MAX_LEFT_OUT
from shardnet.errors import LinkError, PeerUnreachableError, ShardnetError, UsageError
from shardnet.transport.asyncio_link import AsyncioLink
from shardnet.transport.link import Link, LinkOptions
from shardnet.transport.loop import finish
from shardnet.transport.memory import join
from shardnet.types import NodeId
from shardnet.wire.framing.frames import Frame, FrameKind
from shardnet.wire.messages.control import Done
from shardnet.wire.messages.handshake import PeerRole
from shardnet.wire.messages.membership import Ping

PATIENT = LinkOptions(close_s=20)


async def is_used(member: Member, other: Member) -> bool:
    """Send a request over the link that requests use now."""
    control = member.peers.links.link_of(other.node)
    assert control is not None
    await control.ask(Ping(request=0), Done)
    return True


# --- one link


@pytest.mark.parametrize("first", [0, 1])
def test_of_two_nodes_that_dial_each_other_at_once_the_smaller_ones_link_stays(first: int) -> None:
    async def main() -> None:
        async with town("a", "b") as (a, b):
            order = [a.peers.find(b.address), b.peers.find(a.address)]
            lost: list[ShardnetError] = []
            controls = await asyncio.gather(*(order if first == 0 else reversed(order)))
            for member, control in zip((a, b) if first == 0 else (b, a), controls, strict=True):
                assert control is not None
                member.peers.links.watch(control, lost.append)
            [kept] = [link for who, _, link in a.town.links if who is a]
            [other] = [link for who, _, link in a.town.links if who is b]
            assert isinstance(other, AsyncioLink)
            assert await is_used(a, b)
            assert await is_used(b, a)
            await other.wait_lost()
            assert not kept.closed
            assert await is_used(a, b)
            assert await is_used(b, a)
            assert (a.linked, b.linked) == ({"b"}, {"a"})
            assert lost == [], "a link that was replaced is no loss"
            assert a.said("is here") == b.said("is here") == 1

    asyncio.run(main())


def test_a_link_that_has_a_request_to_answer_is_not_closed_under_it() -> None:
    async def main() -> None:
        async with town("a", "b") as (a, b):
            begun, answer = asyncio.Event(), asyncio.Event()
            handle = a._handle

            async def slowly(control: ControlLink, message: Incoming) -> None:
                if isinstance(message, Ping) and message.payload == b"slow":
                    begun.set()
                    await answer.wait()
                await handle(control, message)

            a.peers.links.handler = slowly
            old = await b.peers.link_to(a.address)
            asking = asyncio.create_task(old.ask(Ping(request=0, payload=b"slow"), Done))
            await begun.wait()
            a.peers._node_at.clear()
            await a.peers._open(a.peers._table.known()[0], b.address)  # as if it had not known b's
            new = a.peers.links.link_of(b.node)
            assert new is not None
            for _ in range(3):
                await new.link.drain()
                await is_used(a, b)
                await asyncio.sleep(TIMES.retire_s)  # the time after which an idle one is closed
            assert old.ended is None
            answer.set()
            await asking
            assert isinstance(old.link, AsyncioLink)
            await old.link.wait_lost()
            assert b.peers.links.latest(old) is b.peers.links.link_of(a.node)
            assert await is_used(b, a)

    asyncio.run(main())


def test_the_larger_id_leaves_closing_to_the_smaller_one() -> None:
    """Else each could close the link that the other one has begun to use."""

    async def main() -> None:
        async with town("a", "b") as (a, b):
            a.peers.links.retire_s = 3600.0
            await asyncio.gather(a.peers.find(b.address), b.peers.find(a.address))
            for _ in range(3):
                await asyncio.sleep(TIMES.retire_s)  # the time after which an idle one is closed
                assert len(a.town.open_links(a, b)) == 2

    asyncio.run(main())


def test_a_link_outlives_the_one_that_was_to_replace_it() -> None:
    """Both nodes notice a cut network, one a moment earlier: its new link is not closed then."""

    async def main() -> None:
        async with town("a", "b") as (a, b):
            lost: list[str] = []
            first = await a.peers.link_to(b.address)
            a.peers.links.watch(first, lambda error: lost.append(str(error)))
            second = await b.peers.dial(a.address)  # b has given the first one up
            b.peers._link_up(second, dialled_at=a.address)
            await a.until(lambda: len(a.peers.links._peers[b.node].links) == 2)
            first.link.abort("the network between is cut")
            await a.until(lambda: len(a.peers.links._peers[b.node].links) == 1)
            for _ in range(3):
                await asyncio.sleep(TIMES.retire_s)  # the time after which an idle one is closed
            assert not second.closed
            assert lost == []
            assert await is_used(a, b)

    asyncio.run(main())


def test_a_second_link_to_a_known_node_is_not_dialled() -> None:
    async def main() -> None:
        async with town("a", "b") as (a, b):
            first = await a.peers.link_to(b.address)
            assert await a.peers.link_to(b.address) is first
            assert len(a.town.links) == 1

    asyncio.run(main())


def test_an_address_that_has_passed_to_another_node_leads_to_that_one() -> None:
    """The node that had it is still linked, by the link that it has opened from its new place."""

    async def main() -> None:
        async with town("a", "b", "c") as (a, b, c):
            before = b.address
            a.run(before)
            b.run(a.address)
            await a.until(lambda: a.linked == {"b"} and a.known("b").address == before)
            b.take(["10.0.0.77:7433"])
            b.peers.addresses_changed()
            await a.until(lambda: a.known("b").announced == tuple(b.addresses))
            await b.peers._open(b.peers._table.known()[0], a.address)
            for _, owner, link in a.town.links:
                if owner is b:
                    link.abort("the network between is cut")
            await a.until(lambda: not a.peers.links.is_dialled(b.node, before))
            assert a.linked == {"b"}
            a.town.owners[before] = c
            found = await a.peers.link_to(before)
            assert found.link.peer.node == c.node

    asyncio.run(main())


def test_a_node_is_not_dialled_anew_at_an_address_that_it_reports() -> None:
    async def main() -> None:
        async with town("a", "b") as (a, b):
            a.run(b.address)
            b.run(a.address)
            await a.until(lambda: a.linked == {"b"} and b.node in a.known("b").reported_by)
            a.peers._node_at[b.address] = b.node
            for _, owner, link in a.town.links:
                if owner is b:
                    link.abort("one of two links")
            await a.until_linked("b")
            n_dialled = len(a.town.links)
            assert (await a.peers.link_to(b.address)).link.peer.node == b.node
            assert len(a.town.links) == n_dialled

    asyncio.run(main())


def test_a_node_that_meets_itself_says_so_and_goes_on() -> None:
    async def main() -> None:
        async with town("a", "b") as (a, b):
            assert await a.peers.find(a.address) is None
            with pytest.raises(UsageError, match="this node itself"):
                await a.peers.link_to(a.address)
            a.run(a.address, b.address)
            await a.until_linked("b")
            await a.until(lambda: a.said("is this node itself") == 1)

    asyncio.run(main())


def test_no_more_peers_than_there_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_links_module, "MAX_PEERS", 2)

    async def main() -> None:
        async with town("a", "b", "c", "d") as (a, *others):
            for member in others[:2]:
                await member.peers.link_to(a.address)
            near = await a.town.dial(others[2], a.address, PeerRole.CLIENT)  # clients are no peers
            await near.close()
            with pytest.raises(LinkError, match="2 peers"):
                await others[2].peers.link_to(a.address)
            assert a.linked == {"b", "c"}

    asyncio.run(main())


def test_leaving_waits_until_the_connection_of_a_peer_that_left_is_gone() -> None:
    """The peer has said goodbye; the end of its bytes is still on the way."""

    async def main() -> None:
        async with town("a", "b") as (a, b):
            far = AsyncioLink(hello(b, PeerRole.NODE), initiator=True, options=PATIENT)
            near = AsyncioLink(hello(a, PeerRole.NODE), initiator=False, options=PATIENT)
            join(far, near)
            await near.wait_up()
            a.peers.adopt(near)
            transport = far._transport
            assert transport is not None
            transport.pause_reading()
            transport.writelines(far._connection.send(Frame(kind=FrameKind.BYE)))
            await a.until(lambda: a.said("b is gone") == 1)
            assert not near._lost.is_set()
            asyncio.get_running_loop().call_later(0.02, transport.resume_reading)
        assert near._lost.is_set()

    asyncio.run(main())


# --- gossip and candidates


def test_a_node_named_to_one_other_finds_all() -> None:
    async def main() -> None:
        async with town("a", "b", "c", "d", "e") as members:
            members[0].run()
            for known, member in itertools.pairwise(members):
                member.run(known.address)
            for member in members:
                await member.until_linked(*{other.name for other in members if other is not member})
            last = members[4]
            for other in members[:4]:
                await last.until(lambda name=other.name: bool(last.known(name).address))  # type: ignore[misc]
                assert last.known(other.name).address == other.address
                assert last.known(other.name).is_linked

    asyncio.run(main())


def test_every_pair_ends_with_one_link() -> None:
    async def main() -> None:
        async with town("a", "b", "c", "d") as members:
            for member in members:
                member.run(*(other.address for other in members if other is not member))
            for member in members:
                await member.until_linked(*{other.name for other in members if other is not member})
            for a in members:
                for b in members:
                    while a is not b and len(links := a.town.open_links(a, b)) > 1:
                        ends = [asyncio.ensure_future(link.wait_lost()) for link in links]  # type: ignore[attr-defined]
                        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                        for end in ends:
                            end.cancel()
                    assert a is b or await is_used(a, b)

    asyncio.run(main())


def test_peers_are_told_when_there_is_news_and_not_again() -> None:
    async def main() -> None:
        async with town("a", "b") as (a, b):
            a.run()
            b.run(a.address)
            await a.until(lambda: b.n_heard == 1)
            a.peers.addresses_changed()
            for _ in range(5):
                await is_used(a, b)
            assert b.n_heard == 1
            a.addresses.append("10.0.0.200:7433")
            a.peers.addresses_changed()
            await b.until(lambda: b.n_heard == 2)

    asyncio.run(main())


def test_new_addresses_of_a_node_reach_its_peers() -> None:
    async def main() -> None:
        async with town("a", "b") as (a, b):
            a.run()
            b.run(a.address)
            await a.until(lambda: a.linked == {"b"} and a.known("b").address == b.address)
            moved = "10.0.0.77:7433"
            b.town.owners[moved] = b
            del b.town.owners[b.address]
            b.addresses = [moved]
            b.peers.addresses_changed()
            await a.until(lambda: a.known("b").addresses == (moved,))
            assert {"10.0.0.98", "10.0.0.77"} <= set(a.members), "what it was refused at is over"
            await a.until(lambda: a.known("b").address == moved)

    asyncio.run(main())


def test_of_several_addresses_the_fastest_is_used_and_the_reasons_are_kept() -> None:
    """One leads nowhere, one to this node itself, one to another node, and one is slower."""

    async def main() -> None:
        async with town("a", "b", "c") as (a, b, c):
            nowhere, bridge, slow = "10.0.0.1:1", "172.17.0.1:7433", "10.0.0.2:7433"
            a.town.owners |= {bridge: a, slow: b}
            a.town.slow_s[slow] = 0.01
            a.run()
            told = [nowhere, bridge, c.address, slow, b.address]
            a.peers.propose(b.node, "b", told)
            await a.until_linked("b")
            known = a.known("b")
            assert known.address in (b.address, slow)
            assert set(known.addresses) == set(told)
            failures = known.failures
            assert "nothing listens" in failures[nowhere]
            assert "another node answers there, a" in failures[bridge]
            assert "another node answers there, c" in failures[c.address]
            assert len(failures) == 4
            assert a.linked == {"b"}, "what answered by chance is no peer"

    asyncio.run(main())


def test_a_named_address_is_used_only_where_the_nodes_own_do_not_answer() -> None:
    async def main() -> None:
        async with town("a", "b") as (a, b):
            real, named = b.address, "nas.lan:1234"
            a.town.owners[named] = b
            a.run(named)
            b.run()
            await a.until(lambda: a.linked == {"b"} and a.known("b").address == real)
            assert a.town.dialled.count(("a", named)) == 1, "it is not asked who answers there"
            del a.town.owners[real]
            a.peers._table.doubt(b.node, 0.0)
            a.peers._changed.set()
            await a.until(lambda: a.known("b").address == named)
            assert "nothing listens" in a.known("b").failures[real]

    asyncio.run(main())


def test_a_candidate_of_another_cluster_is_left_out_with_one_line() -> None:
    async def main() -> None:
        async with town("a", "b") as (a, b):
            a.run()
            for _ in range(2):
                a.peers.propose(b.node, "b", [b.address], "it has another cluster key")
            assert a.said("another cluster key") == 1
            assert a.known("b").refusal == "it has another cluster key"
            a.peers.propose(b.node, "b", [b.address])
            await a.until_linked("b")
            assert a.town.dialled[0] == ("a", b.address)

    asyncio.run(main())


def test_strangers_do_not_fill_the_log_with_refusals() -> None:
    async def main() -> None:
        async with town("a") as (a,):
            for version in range(100):
                a.peers.propose(NodeId("eve"), "eve", ["10.0.0.66:1"], f"version {version}")
            assert a.said("is left out") == 1
            for number in range(100):
                a.peers.propose(NodeId(f"eve{number}"), "eve", ["10.0.0.66:1"], "another key")
            assert a.said("is left out") == MAX_LEFT_OUT
            assert a.known("eve99").refusal == "another key"

    asyncio.run(main())


def test_a_forged_record_of_a_peer_is_passed_on_to_nobody() -> None:
    async def main() -> None:
        async with town("a", "b", "c") as (a, b, c):
            a.run()
            b.run(a.address)
            await a.until(lambda: a.linked == {"b"} and a.known("b").address == b.address)
            a.peers.propose(b.node, "eve", ["10.0.0.66:7433"])
            c.run(a.address)
            await c.until_linked("a", "b")
            a.addresses.append("10.0.0.200:7433")
            a.peers.addresses_changed()
            await c.until(lambda: len(c.known("a").addresses) == 2)
            assert c.known("b").name == "b"
            assert c.known("b").addresses == (b.address,)

    asyncio.run(main())


def test_until_an_address_has_answered_the_one_it_has_dialled_from_is_given() -> None:
    async def main() -> None:
        async with town("a", "b") as (a, b):
            b.addresses = ["10.0.0.1:7433", "memory-a:7433", "10.0.0.2:7433"]  # all unreachable
            a.run()
            b.run(a.address)
            await a.until(lambda: a.linked == {"b"} and bool(a.known("b").failures))
            assert a.peers.address_of(b.node) == "memory-a:7433"
            assert a.peers.address_of(NodeId("nobody")) == ""

    asyncio.run(main())


def test_an_address_that_a_node_had_before_is_not_given_for_it() -> None:
    """It has moved to a network whose firewall lets nobody in: it is linked, and not reached."""

    async def main() -> None:
        async with town("a", "b") as (a, b):
            a.peers._table.add_report(b.node, "b", ("10.9.9.9:7433",), source=MDNS, now=0)
            a.peers._table.answered(b.node, "10.9.9.9:7433", 0.001, {})
            a.run()
            b.addresses = ["10.0.0.1:7433", "memory-a:7433"]  # all unreachable
            b.run(a.address)
            await a.until(lambda: a.known("b").failures.keys() >= set(b.addresses))
            assert a.peers.address_of(b.node) == "memory-a:7433"

    asyncio.run(main())


def test_what_a_peer_tells_is_bounded_by_what_makes_sense_here() -> None:
    """Loopback and link-local addresses of another machine lead elsewhere."""

    async def main() -> None:
        async with town("a", "b") as (a, b):
            b.addresses = ["127.0.0.1:7433", "[fe80::1%eth0]:7433", b.address]
            a.run()
            b.run(a.address)
            good = b.addresses[2]
            await a.until(lambda: a.linked == {"b"} and a.known("b").addresses == (good,))

    asyncio.run(main())


# --- loss


def test_a_lost_node_is_gone_at_once_and_whoever_watches_is_told_once() -> None:
    async def main() -> None:
        async with town("a", "b", "c") as (a, b, c):
            a.run()
            c.run(a.address)
            b.run(a.address)
            for member, others in ((a, "bc"), (c, "ab")):
                await member.until_linked(*others)
            await a.until(lambda: "c" in a.known("b").reported_by)
            lost: list[ShardnetError] = []
            control = a.peers.links.link_of(b.node)
            assert control is not None
            a.peers.links.watch(control, lost.append)
            b._running.cancel()  # type: ignore[union-attr]
            a.town.cut(lambda x, y: b in (x, y))
            await a.until_linked("c")
            await c.until_linked("a")
            assert len(lost) == 1
            assert a.said("node b is gone") == 1
            assert not a.known("b").is_linked
            await a.until(lambda: "c" not in a.known("b").reported_by)
            a.peers.links.watch(control, lost.append)
            assert len(lost) == 2, "what has ended is told at once"

    asyncio.run(main())


def test_a_node_is_lost_though_what_it_asked_for_has_not_stopped_yet() -> None:
    """Another head may take this node, and the lost one may come back by a link that is used."""

    async def main() -> None:
        async with town("a", "b") as (a, b):
            began, may_stop = asyncio.Event(), asyncio.Event()

            async def stop_late(control: ControlLink, message: Incoming) -> None:
                if isinstance(message, Ping) and message.payload == b"slow":
                    began.set()
                    await finish(may_stop.wait())
                await a._handle(control, message)

            a.peers.links.handler = stop_late
            control = await b.peers.link_to(a.address)
            asking = asyncio.create_task(control.ask(Ping(request=0, payload=b"slow"), Done))
            await began.wait()
            control.link.abort("the network between is cut")
            await a.until(lambda: a.said("b is gone") == 1)
            with pytest.raises(LinkError):
                await asking
            await b.until(lambda: b.said("a is gone") == 1)
            await b.peers.link_to(a.address)
            await a.until(lambda: a.peers.links.link_of(b.node) is not None)
            assert await is_used(a, b)
            may_stop.set()

    asyncio.run(main())


def test_a_link_that_breaks_is_dialled_again_before_its_node_counts_as_lost() -> None:
    """One that is closed with a goodbye is not: who leaves is lost at once."""

    async def main() -> None:
        async with town("a", "b") as (a, b):
            lost: list[ShardnetError] = []
            control = await a.peers.link_to(b.address)
            a.peers.links.watch(control, lost.append)
            control.link.abort("bytes have changed on their way")
            await a.until(lambda: a.peers.links.link_of(b.node) is not control)
            await a.peers.links.settled()
            assert a.peers.links.link_of(b.node) is not None
            assert (lost, a.said("is gone"), a.known("b").is_linked) == ([], 0, True)
            again = a.peers.links.latest(control)
            assert not again.link.closed
            n_dialled = len(a.town.dialled)
            await b.peers.close()
            await a.until(lambda: a.said("b is gone") == 1)
            assert (len(lost), len(a.town.dialled)) == (1, n_dialled)

    asyncio.run(main())


def test_a_partition_heals_by_itself() -> None:
    async def main() -> None:
        async with town("a", "b", "c") as (a, b, c):
            a.run()
            b.run(a.address)
            c.run(a.address)
            for member, others in ((a, "bc"), (b, "ac"), (c, "ab")):
                await member.until_linked(*others)
            a.town.cut(lambda x, y: (x is c) != (y is c))
            await c.until_linked()
            await a.until_linked("b")
            a.town.cut(lambda x, y: False)
            for member, others in ((a, "bc"), (b, "ac"), (c, "ab")):
                await member.until_linked(*others)

    asyncio.run(main())


def test_a_peer_that_does_not_answer_is_named_once_and_dialled_until_it_does() -> None:
    async def main() -> None:
        async with town("a", "b") as (a, b):
            del a.town.owners[b.address]
            a.run(b.address)
            await a.until(lambda: a.said("nothing listens there") > 0)
            await a.until(lambda: len(a.town.dialled) >= 3)
            a.town.owners[b.address] = b
            await a.until_linked("b")
            assert a.said("nothing listens there") == 1

    asyncio.run(main())


def test_callers_that_want_one_dead_address_wait_for_one_dial_and_leave_nothing() -> None:
    """One after the other each would wait for its own."""

    dialled: list[str] = []

    async def nobody_answers(address: str) -> Link:
        dialled.append(address)
        await asyncio.sleep(0)
        raise PeerUnreachableError("nobody answers")

    async def main() -> None:
        async with town("a") as (a,):
            a.peers.dial = nobody_answers
            for n_dialled in (1, 2):
                finding = [a.peers.find("10.0.0.1:1") for _ in range(5)]
                errors = await asyncio.gather(*finding, return_exceptions=True)
                assert [type(error) for error in errors] == [PeerUnreachableError] * 5
                assert len(dialled) == n_dialled
            del finding, errors
            await asyncio.sleep(0)  # the loop still holds what this task has waited for
            gc.collect()
            assert dict(a.peers._dialling) == {}

    asyncio.run(main())


# --- addresses for other links


def test_another_link_goes_where_the_node_has_answered_us() -> None:
    async def main() -> None:
        async with town("a", "b") as (a, b):
            real, bridge = b.address, "172.17.0.1:7433"
            a.run()
            b.addresses = [bridge, real]
            b.run(a.address)
            await a.until(lambda: a.linked == {"b"} and a.known("b").address == real)

            async def dial(address: str) -> Link:
                tried.append(address)
                return await a.town.dial(a, address, PeerRole.CLIENT)

            tried: list[str] = []
            await (await a.peers.dial_by(bridge, dial)).close()
            assert tried == [real]

            tried.clear()  # it has moved; whoever told the address knows better
            a.town.owners[bridge] = b
            del a.town.owners[real]
            await (await a.peers.dial_by(bridge, dial)).close()
            assert tried == [real, bridge]

            tried.clear()
            with pytest.raises(PeerUnreachableError):
                await a.peers.dial_by("10.0.0.250:1", dial)
            assert tried == ["10.0.0.250:1"]

    asyncio.run(main())


def test_the_round_trip_is_measured() -> None:
    async def main() -> None:
        async with town("a", "b") as (a, b):
            await a.peers.link_to(b.address)
            await a.until(lambda: a.peers.links.rtt_s(b.node) is not None)
            rtt_s = a.peers.links.rtt_s(b.node)
            assert rtt_s is not None
            assert rtt_s > 0
            assert a.peers.links.rtt_s(NodeId("nobody")) is None

    asyncio.run(main())
