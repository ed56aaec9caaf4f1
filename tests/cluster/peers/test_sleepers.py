"""Nodes that say that they sleep: who knows of it, who dials whom, and how they are woken."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest
from msgspec.structs import replace
from support.cluster.checkup_facts import info
from support.cluster.town import make_sleepers, town

from shardnet.cluster.machine.wake_on_lan import magic_packet
from shardnet.errors import LinkError
from shardnet.types import NodeId
from shardnet.wire.messages.membership import Asleep, NodeInfo

MAC = "00:1b:44:11:3a:b7"
LATER_S = 4_000_000_000.0
"""A moment of the years to come."""


def sleeping(name: str, wake_at: str = "", wake_s: float = 0) -> NodeInfo:
    asleep = Asleep(macs=[MAC], wake_at=wake_at, wake_s=wake_s, since_s=LATER_S)
    return replace(info(name), asleep=asleep)


def test_who_says_goodbye_is_known_to_sleep_and_dialled_by_nobody_until_it_is_back() -> None:
    """It keeps its own way back: it dials those that it knew."""

    async def main() -> None:
        async with town("a", "b") as (a, b):
            a.run(b.address)
            b.run()
            await a.until_linked("b")
            await b.until(lambda: b.linked == {"a"} and bool(b.known("a").announced))
            told = replace(sleeping("bert", wake_s=24.3), name="b")
            await b.peers.fall_asleep(replace(told, node=b.node, address=b.address))
            await a.until_linked()
            [known] = a.peers.sleepers.listed()
            assert (known.node, known.name) == (b.node, "b")
            assert a.said("b sleeps: 25 s to wake") == 1
            a.town.dialled.clear()
            await asyncio.sleep(3 * a.peers.times.redial_s)  # it would be dialled in this time
            assert a.town.dialled == []
            assert not a.known("b").is_wanted

            b.peers.wake()
            await a.until_linked("b")
            assert {who for who, _ in a.town.dialled} == {"b"}
            assert a.peers.sleepers.listed() == []

    asyncio.run(main())


def test_nobody_says_of_another_node_that_it_sleeps() -> None:
    async def main() -> None:
        async with town("a", "b") as (a, b):
            a.run(b.address)
            b.run()
            await a.until_linked("b")
            await b.peers.fall_asleep(replace(sleeping("cleo"), node="c"))
            await a.until_linked()
            assert a.peers.sleepers.listed() == []

    asyncio.run(main())


def test_a_node_is_woken_by_packets_and_tells_the_other_how_long_it_took(tmp_path: Path) -> None:
    """Also after the waking node was started again, and where the other has another id by then."""

    async def main() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as card:
            card.bind(("127.0.0.1", 0))
            card.setblocking(False)
            said: list[str] = []
            before = make_sleepers(path=tmp_path / "sleepers.json")
            at = f"127.0.0.1:{card.getsockname()[1]}"
            before.fell_asleep(sleeping("cleo", at))
            sleepers = make_sleepers(said.append, tmp_path / "sleepers.json")
            await sleepers.load()
            [known] = sleepers.infos()
            assert sleepers.at(known.address) == known
            told: list[tuple[str, float]] = []
            waking = asyncio.create_task(
                sleepers.wake(
                    [known.node], lambda node, waited_s, rule_s: told.append((node, rule_s))
                )
            )
            packet = await asyncio.get_running_loop().sock_recv(card, 200)
            assert packet == magic_packet(MAC)
            assert not waking.done()
            sleepers.woke(NodeId("another id"), "cleo")
            await waking
            assert told == [(known.node, 0)]
            assert sleepers.woke_s["cleo"] > 0
            assert said[0] == "waking cleo"
            assert said[1].startswith("cleo is awake, after ")
            again = make_sleepers(path=tmp_path / "sleepers.json")
            await again.load()
            assert again.listed() == [], "what is awake is not remembered as asleep"

    asyncio.run(main())


def test_who_does_not_wake_is_left_out_by_name_within_its_time(tmp_path: Path) -> None:
    async def main() -> None:
        said: list[str] = []
        sleepers = make_sleepers(said.append, wait_s=0.05)
        cleo = sleeping("cleo", "127.0.0.1:9")
        sleepers.fell_asleep(cleo)
        async with asyncio.timeout(10):
            await sleepers.wake([cleo.node])
        [out] = sleepers.left_out()
        assert (out.node, out.name) == (cleo.node, "cleo")
        assert out.why.startswith("it did not wake within 0.05 s; see that Wake-on-LAN is on there")
        assert sleepers.infos() == []
        assert sleepers.listed() == [cleo], "it is shown still"
        with pytest.raises(LinkError, match=r"cleo \(10\.0\.0\.3:7433\) sleeps: it did not wake"):
            sleepers.at(cleo.address)
        sleepers.fell_asleep(cleo)  # it was here meanwhile
        assert sleepers.infos() == [cleo]

    asyncio.run(main())


def test_a_damaged_file_counts_as_none_and_old_news_are_forgotten(tmp_path: Path) -> None:
    async def main() -> None:
        path = tmp_path / "sleepers.json"
        before = make_sleepers(path=path)
        old = sleeping("bert")
        assert old.asleep is not None
        before.fell_asleep(replace(old, asleep=replace(old.asleep, since_s=1.0)))
        before.fell_asleep(sleeping("cleo"))
        sleepers = make_sleepers(path=path)
        await sleepers.load()
        assert [known.name for known in sleepers.listed()] == ["cleo"]
        path.write_text("{")
        sleepers = make_sleepers(path=path)
        await sleepers.load()
        assert sleepers.listed() == []

    asyncio.run(main())
