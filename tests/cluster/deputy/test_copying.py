"""What a head sends its deputy: each thing once, and nothing that its own end does to requests."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from msgspec.structs import replace

from shardnet.cluster.deputy import copied_requests
from shardnet.cluster.deputy.copied_requests import CopiedRequests, read
from shardnet.cluster.deputy.copying import Copying
from shardnet.cluster.head.lead import Lead
from shardnet.cluster.recovery.stand_in import MAX_DUTIES, StandIn
from shardnet.errors import SupersededError
from shardnet.runtime.engine.requests import MadeToken
from shardnet.sampling_params import SamplingParams
from shardnet.types import NodeId
from shardnet.wire.messages.chat import Picture
from shardnet.wire.messages.deputies import (
    RequestCopied,
    RingNode,
    StandBy,
    StandByRefused,
    TokensCopied,
)
from shardnet.wire.messages.generation import Generate
from shardnet.wire.messages.plans import ModelChoice

CHOICE = ModelChoice(model="m")
ID = "0" * 64
TOKEN = MadeToken(token_id=7, logprobs=None)


class Copied:
    """A head whose deputy is a list of messages."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        peer = SimpleNamespace(name="bert", lacking=lambda *needed: [])
        link = SimpleNamespace(closed=False, is_full=False, peer=peer)
        control: Any = SimpleNamespace(link=link, send=self.sent.append)
        self.copying = Copying(link_of=lambda node: control, log=lambda line: None)
        self.told = self.told_of("abc")
        self.generate = Generate(
            request=1,
            choice=CHOICE,
            sampling=SamplingParams(),
            token_ids=[1, 2],
            max_tokens=9,
            key="k",
        )
        copy = self.copying.begin(self.generate, (), lambda: self.told)
        assert copy is not None
        self.copy = copy

    @staticmethod
    def told_of(names: str) -> StandBy:
        """What a deputy is told of a ring of nodes with these names."""
        return StandBy(
            epoch=1,
            choice=CHOICE,
            model_id=ID,
            dtype="float32",
            arith="fast",
            context=64,
            nodes=[RingNode(node=name * 32, address=f"{name}:1") for name in names],
        )

    async def rows(self) -> list[Any]:
        """The rows that were sent in this turn of the event loop."""
        self.sent.clear()
        await asyncio.sleep(0)
        return [row for one in self.sent if isinstance(one, TokensCopied) for row in one.rows]


def test_that_a_request_is_kept_no_more_is_said_once() -> None:
    async def main() -> None:
        copied = Copied()
        copied.copy.add(TOKEN)
        assert [row.end for row in await copied.rows()] == [""]
        assert copied.copy.address == "b:1"
        copied.copying.requests = CopiedRequests(most_numbers=0)  # there is no room any more
        copied.copy.add(TOKEN)
        assert [row.end for row in await copied.rows()] == ["failed"]
        copied.copy.add(TOKEN)
        copied.copy.end("complete")
        assert not await copied.rows()
        assert copied.copy.address == ""

    asyncio.run(main())


def test_a_head_that_ends_says_nothing_of_what_that_does_to_its_requests() -> None:
    """The deputy has all that was made, and sees the end of the head itself."""

    async def main() -> None:
        copied = Copied()
        copied.copy.add(TOKEN)
        copied.sent.clear()
        copied.copying.stop()
        assert [len(one.rows) for one in copied.sent] == [1]
        copied.copy.end("failed")
        assert not await copied.rows()

    asyncio.run(main())


def test_a_node_that_does_not_stand_by_has_the_next_one_asked() -> None:
    async def main() -> None:
        copied = Copied()
        copied.copy.add(TOKEN)
        await copied.rows()
        copied.copying.refused_by(NodeId("b" * 32), "it stands by for 8 heads already")
        assert copied.copy.address == ""
        copied.copy.add(TOKEN)
        assert [len(row.tokens) for row in await copied.rows()] == [2]  # the next is told all
        assert copied.copy.address == "c:1"
        copied.copying.refused_by(NodeId("c" * 32), "it leaves")
        copied.copy.add(TOKEN)
        assert not await copied.rows()
        assert copied.copy.address == ""

    asyncio.run(main())


def test_a_node_that_is_deputy_no_more_does_not_take_over_what_has_ended_since() -> None:
    """Its link to the head lives on: it would learn of no end, and compete with the next one."""

    async def main() -> None:
        copied, duty = Copied(), CopiedRequests()
        control, bert = copied.copying.deputy.control, list[Any]()  # type: ignore[union-attr]
        theirs: Any = SimpleNamespace(link=control.link, send=bert.append)
        copied.copying.link_of = lambda node: theirs if node[0] == "b" else control
        await copied.rows()
        copied.copy.add(TOKEN)
        await copied.rows()
        copied.copy.add(TOKEN)
        copied.told = copied.told_of("acb")
        await copied.rows()
        assert copied.copy.address == "c:1"
        copied.copy.end("complete")
        assert [row.end for row in await copied.rows()] == ["complete"]
        for one in bert:
            if isinstance(one, RequestCopied):
                duty.open(one.generate, ID, 0.0)
            elif isinstance(one, TokensCopied):
                for row in one.rows:
                    duty.add(row.key, row.first, [*read(row.tokens)], row.end, 0.0)
        assert bert
        assert not duty.running

    asyncio.run(main())


@pytest.mark.parametrize("address", ["", "d:1"])
def test_what_fails_with_a_ring_of_which_nobody_knows_the_head_runs_no_more(address: str) -> None:
    """Its key may be asked for again, which a request that runs on would keep from being copied."""

    async def main() -> None:
        copied, error = Copied(), SupersededError("another node leads this ring")
        error.address = address
        copied.copy.end("complete")
        control: Any = SimpleNamespace(link=SimpleNamespace(closed=False))
        copying = copied.copying
        with (
            pytest.raises(SupersededError),
            copying.copied(control, copied.generate, (), lambda: copied.told),
        ):
            raise error
        assert [one.generate.key for one in copying.requests.running] == ["k"] * bool(address)

    asyncio.run(main())


def test_pictures_of_requests_do_not_pile_up_on_the_link_to_a_deputy() -> None:
    """A control link on which too much waits is ended, and the ring that has the node with it."""

    async def main() -> None:
        copied = Copied()
        deputy = copied.copying.deputy
        assert deputy is not None
        link: Any = deputy.control.link
        copies = []
        for key in "xy":
            request = replace(copied.generate, key=key, pictures=[Picture(data=b"p")])
            copies.append(copied.copying.begin(request, (), lambda: copied.told))
            link.is_full = True
        assert [one.generate.key for one in copied.copying.requests.running] == ["k", "x"]
        copied.told = copied.told_of("acb")
        copied.copy.add(TOKEN)
        await copied.rows()
        assert [one.generate.key for one in copied.copying.requests.running] == ["k"]
        for copy in copies:
            assert copy is not None
            copy.add(TOKEN)
            assert copy.address == ""

    asyncio.run(main())


def test_who_stands_by_for_many_heads_tells_the_next_one() -> None:
    nothing: Any = Mock()
    stand_in = StandIn(
        node=NodeId("d" * 32),
        head=nothing,
        planner=nothing,
        router=nothing,
        copying=nothing,
        links=Mock(watch=Mock(return_value=Mock())),
        address_of=nothing,
        tasks=nothing,
        log=pytest.fail,
    )
    told = Copied.told_of("ab")
    sent: list[list[Any]] = []

    async def main() -> None:
        for head in range(MAX_DUTIES + 1):
            sent.append([])
            known = {"node": str(head), "name": str(head), "lacking": lambda *needed: []}
            link = SimpleNamespace(peer=SimpleNamespace(**known))
            control: Any = SimpleNamespace(link=link, send=sent[-1].append)
            await stand_in._stand_by(control, told)

    asyncio.run(main())
    assert sent[:-1] == [[]] * MAX_DUTIES
    assert [type(one) for one in sent[-1]] == [StandByRefused]


def test_a_ring_is_described_once_for_its_deputy() -> None:
    """Every turn of the event loop asks: an answer that is the same object costs nothing."""
    plan: Any = Mock()
    plan.stand_by = Mock(side_effect=lambda epoch: object())
    ring: Any = SimpleNamespace(epoch=1)
    lead = Lead(plan=plan, ring=ring, tokenizer=None, eos_ids=())
    assert lead.told is lead.told
    plan.stand_by.assert_called_once_with(1)
    first, lead.ring = lead.told, SimpleNamespace(epoch=2)  # type: ignore[assignment]
    assert lead.told is not first
    plan.stand_by.assert_called_with(2)


def test_pictures_of_copied_requests_are_counted_and_answers_make_room_for_them() -> None:
    kept = CopiedRequests(most_picture_bytes=10)

    def opened(key: str, n_bytes: int, at_s: float) -> bool:
        generate = Generate(
            request=1,
            choice=CHOICE,
            sampling=SamplingParams(),
            token_ids=[1],
            key=key,
            pictures=[Picture(data=bytes(n_bytes))],
        )
        return kept.open(generate, ID, at_s) is not None

    assert opened("a", 4, 0.0)
    assert opened("b", 4, 1.0)
    assert not opened("c", 4, 2.0), "two others run"
    kept.add("b", 0, [TOKEN], "left", 3.0)
    kept.add("a", 0, [TOKEN], "complete", 4.0)
    assert opened("c", 6, 5.0)
    assert kept.find("b", 5.0) is None, "the first that ended"
    assert kept.find("a", 5.0) is not None
    kept.forget("c")
    assert opened("d", 6, 6.0)
    assert kept.find("a", 6.0) is not None


def test_answers_that_ended_make_room_for_requests_that_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of the last minute, in which there may be thousands, must not keep others from it."""
    monkeypatch.setattr(copied_requests, "MAX_REQUESTS", 3)
    kept = CopiedRequests(most_numbers=6)
    sampling = SamplingParams()

    def opened(key: str, n_prompt: int, at_s: float) -> bool:
        ids = [1] * n_prompt
        generate = Generate(request=1, choice=CHOICE, sampling=sampling, token_ids=ids, key=key)
        return kept.open(generate, ID, at_s) is not None

    assert all(opened(key, 1, 0.0) for key in "abc")
    assert not opened("d", 1, 1.0), "three others run"
    kept.add("b", 0, [TOKEN], "complete", 2.0)
    kept.add("a", 0, [TOKEN], "left", 3.0)
    assert opened("d", 1, 4.0)
    assert kept.find("b", 4.0) is None, "the first that ended"
    assert kept.find("a", 4.0) is not None
    assert kept.add("c", 0, [TOKEN, TOKEN, TOKEN], "", 5.0), "now there are too many numbers"
    assert kept.find("a", 5.0) is None
    assert not kept.add("c", 3, [TOKEN, TOKEN], "", 5.0)
    assert [one.generate.key for one in kept.running] == ["d"]
