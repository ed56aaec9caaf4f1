"""Values of programs on several nodes: two have each, any finds it, and there is a bound."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from shardnet.cluster.deputy.copying import KeptValues
from shardnet.cluster.peers.control_link import ControlLink, MessageHandlers
from shardnet.errors import LinkClosedError
from shardnet.wire.messages import deputies
from shardnet.wire.messages.deputies import (
    DropValue,
    FindValue,
    KeepValue,
    ListValues,
    ValueName,
)
from shardnet.wire.messages.handshake import PeerRole


class Node:
    """A node whose links to the others are calls. A second passes with each value."""

    now_s = 0.0

    def __init__(self, **bounds: int) -> None:
        self.others: list[Node] = []
        self.is_up = True
        self.handlers = MessageHandlers()
        kept = KeptValues(lambda: cast("Any", self.others), clock=lambda: Node.now_s, **bounds)
        kept.register(self.handlers)

    try_to_ask = ControlLink.try_to_ask

    async def ask(
        self, message: Any, expected: object = None, role: PeerRole = PeerRole.NODE
    ) -> Any:
        if not self.is_up:
            raise LinkClosedError("it is gone")
        answers: list[Any] = []
        link = SimpleNamespace(peer=SimpleNamespace(role=role))
        control = SimpleNamespace(link=link, send=answers.append)
        await self.handlers.handle(cast("Any", control), message)
        [answer] = answers
        return answer

    # --- what a program asks

    async def keep(self, name: str, value: bytes, owner: str = "ann") -> None:
        of = ValueName(owner=owner, name=name)
        Node.now_s += 1
        await self.ask(KeepValue(request=1, of=of, value=value), role=PeerRole.CLIENT)

    async def find(self, name: str, owner: str = "ann") -> bytes | None:
        of = ValueName(owner=owner, name=name)
        found: bytes | None = (
            await self.ask(FindValue(request=1, of=of), role=PeerRole.CLIENT)
        ).value
        return found

    async def list_names(self, prefix: str, owner: str = "ann") -> dict[str, bytes]:
        of = ValueName(owner=owner, name=prefix)
        listed = await self.ask(ListValues(request=1, of=of), role=PeerRole.CLIENT)
        return {value.name: value.value for value in listed.values}

    async def drop(self, name: str) -> None:
        of = ValueName(owner="ann", name=name)
        await self.ask(DropValue(request=1, of=of), role=PeerRole.CLIENT)


def town(n: int) -> list[Node]:
    nodes = [Node() for _ in range(n)]
    for node in nodes:
        node.others = [other for other in nodes if other is not node]
    return nodes


def test_any_node_finds_what_two_keep_and_what_is_lost_with_both() -> None:
    async def main() -> None:
        anna, bert, cleo, dora = nodes = town(4)
        bert.is_up = False
        await anna.keep("a", b"1")
        bert.is_up = True
        for node in nodes:
            assert (await node.find("a"), await node.find("a", "ben")) == (b"1", None)
        anna.is_up = False
        assert await dora.find("a") == b"1"
        cleo.is_up = False
        assert await dora.find("a") is None

    asyncio.run(main())


def test_the_latest_value_of_each_name_is_listed() -> None:
    async def main() -> None:
        anna, bert, cleo = town(3)
        await anna.keep("batch_1", b"old")
        await cleo.keep("batch_1", b"new")
        await cleo.keep("batch_2", b"")
        await cleo.keep("file_1", b"x" * (deputies.MAX_LISTED_VALUE + 1))
        for node in (anna, bert, cleo):
            assert await node.list_names("batch_") == {"batch_1": b"new", "batch_2": b""}
            assert await node.list_names("file_") == await node.list_names("", "ben") == {}
        await bert.drop("batch_1")
        assert await anna.list_names("") == {"batch_2": b""}

    asyncio.run(main())


def test_what_was_used_least_recently_makes_room() -> None:
    async def main() -> None:
        node = Node(most=3, most_bytes=10)
        for name in "abc":
            await node.keep(name, b"123")
        assert await node.find("a") == b"123"
        await node.keep("d", b"", "ben")
        assert await node.find("b") is None
        await node.keep("e", b"12345")
        assert await node.list_names("") == {"a": b"123", "e": b"12345"}
        await node.keep("e", b"x" * 11)
        assert await node.list_names("") == {}

    asyncio.run(main())
