"""Requests of a client as its user sees them, against a scripted node."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, suppress

import pytest
from support.cluster.scripted_node import ScriptedNode, client_of, serving

from shardnet.api import ActiveRequest, Client, GenerationEvent, RequestState, SamplingParams
from shardnet.api import client as client_module
from shardnet.api.generation import LOCKSTEP_SET, WINDOW
from shardnet.cluster.peers.control_link import ControlLink, Incoming
from shardnet.errors import (
    CapacityError,
    ContextExceededError,
    LinkClosedError,
    LinkError,
    PeerFailedError,
    PeerUnreachableError,
    VersionMismatchError,
)
from shardnet.transport.link import Link
from shardnet.types import LiveState
from shardnet.wire.messages.generation import StateChanged
from shardnet.wire.messages.plans import PlanReply

DEADLINE_S = 60.0


async def all_of(events: AsyncGenerator[GenerationEvent, None]) -> list[GenerationEvent]:
    async with asyncio.timeout(DEADLINE_S), aclosing(events):
        return [event async for event in events]


def ends(events: Sequence[GenerationEvent]) -> dict[int, RequestState]:
    """The end of each prompt, checked to be one."""
    found = [event for event in events if event.state.is_end]
    assert Counter(event.index for event in found).most_common(1)[0][1] == 1
    return {event.index: event.state for event in found}


def test_a_request_is_told_in_order_and_ends_with_its_result() -> None:
    async def main() -> None:
        node = ScriptedNode()
        async with client_of(node) as client:
            events = await all_of(client.generate("abc", SamplingParams(seed=5)))
        queued, running, finished = (
            RequestState.QUEUED,
            RequestState.RUNNING,
            RequestState.FINISHED,
        )
        assert [event.state for event in events] == [queued, running, running, running, finished]
        assert events[0].ahead == 2
        assert "".join(event.text for event in events) == "abc"
        result = events[-1].result
        assert result is not None
        assert (result.text, result.token_ids, result.tokens) == ("abc", (97, 98), ("a", "b"))
        assert (result.seed, result.sample_index, result.logprobs) == (5, 0, None)
        assert (result.usage.n_prompt, result.usage.n_generated, result.usage.n_reused) == (2, 2, 1)

    asyncio.run(main())


def test_one_that_fails_ends_no_other() -> None:
    async def main() -> None:
        async with client_of(ScriptedNode()) as client:
            events = await all_of(client.generate(["ab", "fail here", "cd"]))
            finished, failed = RequestState.FINISHED, RequestState.FAILED
            assert ends(events) == {0: finished, 1: failed, 2: finished}
            [error] = [event.error for event in events if event.error is not None]
            assert isinstance(error, CapacityError)
            assert "scripted: no room for fail here" in str(error)
            with pytest.raises(CapacityError):
                await client.complete(["ab", "fail here", "wait for ever"])

    asyncio.run(main())


def test_without_a_ring_nobody_is_asked_twice() -> None:
    """What keeps a ring from being built fails all, an error of the first prompt does not."""

    async def main() -> None:
        node = ScriptedNode()
        async with client_of(node) as client:
            events = await all_of(client.generate(["unplanned", "b", "c"]))
            assert set(ends(events).values()) == {RequestState.FAILED}
            assert len({str(event.error) for event in events}) == 1
            assert [asked.prompt for asked in node.asked] == ["unplanned"]
            events = await all_of(client.generate(["fail", "b", "unplanned", "c"]))
            assert [*ends(events).values()].count(RequestState.FINISHED) == 2

    asyncio.run(main())


def test_a_prompt_alone_raises_its_error() -> None:
    async def main() -> None:
        async with client_of(ScriptedNode()) as client:
            with pytest.raises(CapacityError, match="no room"):
                await all_of(client.generate("fail"))
            [result] = await client.complete("ab")
            assert result.text == "ab"

    asyncio.run(main())


def test_results_are_in_order_of_prompts_and_samples() -> None:
    async def main() -> None:
        node = ScriptedNode()
        async with client_of(node) as client:
            results = await client.complete(["a long prompt", "b"], n=2)
        found = [(result.text[0], result.sample, result.sample_index) for result in results]
        assert found == [("a", 0, 0), ("a", 1, 1), ("b", 0, 2), ("b", 1, 3)]

    asyncio.run(main())


def test_a_node_never_has_more_than_a_window_of_requests() -> None:
    async def main() -> None:
        node = ScriptedNode()
        async with client_of(node) as client:
            events = await all_of(client.generate(["abc"] * (3 * WINDOW)))
        assert len(ends(events)) == 3 * WINDOW
        assert WINDOW // 2 < node.n_most <= WINDOW

    asyncio.run(main())


def test_a_set_in_lockstep_begins_when_the_last_has_ended() -> None:
    async def main() -> None:
        async with client_of(ScriptedNode()) as client:
            running: set[int] = set()
            seen: list[int] = []
            async for event in client.generate(["ab"] * (2 * LOCKSTEP_SET + 3), lockstep=True):
                if event.index not in seen:
                    seen.append(event.index)
                    if len(seen) % LOCKSTEP_SET == 1:
                        assert not running
                    running.add(event.index)
                if event.state.is_end:
                    running.remove(event.index)
            assert sorted(seen) == [*range(2 * LOCKSTEP_SET + 3)]

    asyncio.run(main())


def test_closing_one_iterator_leaves_the_others_alone() -> None:
    async def main() -> None:
        node = ScriptedNode()
        async with asyncio.timeout(DEADLINE_S), client_of(node) as client:
            staying = client.generate("wait and see")
            await anext(staying)
            leaving = client.generate(["wait 1", "wait 2", "abc"])
            async with aclosing(leaving):
                async for event in leaving:
                    if event.state.is_end:
                        break
            await node.until_given_up(2)
            assert sorted(node.given_up) == ["wait 1", "wait 2"]
            assert (await client.complete("ab"))[0].text == "ab"
            await staying.aclose()
            await node.until_given_up(3)

    asyncio.run(main())


def test_cancelling_the_task_that_iterates_gives_the_requests_up() -> None:
    async def main() -> None:
        node = ScriptedNode()
        async with asyncio.timeout(DEADLINE_S), client_of(node) as client:
            started = asyncio.Event()

            async def iterate() -> None:
                async with aclosing(client.generate(["wait 1", "wait 2"])) as events:
                    async for _ in events:
                        started.set()

            task = asyncio.create_task(iterate())
            await started.wait()
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            await node.until_given_up(2)

    asyncio.run(main())


def test_should_stop_ends_what_it_names() -> None:
    """It sees texts grow, and requests that have ended no more."""
    seen: list[list[str]] = []

    def should_stop(active: Sequence[ActiveRequest]) -> list[int]:
        seen.append([generation.text for generation in active])
        return [generation.request_id for generation in active if generation.text == "w"] + [999]

    async def main() -> None:
        node = ScriptedNode()
        async with asyncio.timeout(DEADLINE_S), client_of(node) as client:
            events = await all_of(client.generate(["wait", "abc"], should_stop=should_stop))
            assert ends(events) == {0: RequestState.CANCELLED, 1: RequestState.FINISHED}
            await node.until_given_up(1)
            assert node.given_up == ["wait"]

    asyncio.run(main())
    assert any(len(texts) == 2 and texts[0] == "w" for texts in seen)
    assert ["ab"] in seen
    assert seen[-1] == []


def test_a_lost_link_fails_every_request_once() -> None:
    """Those that were not sent yet too."""

    async def main() -> None:
        node = ScriptedNode()
        async with asyncio.timeout(DEADLINE_S), client_of(node) as client:
            n = WINDOW + 20
            found = []
            async with aclosing(client.generate(["wait"] * n)) as events:
                async for event in events:
                    found.append(event)
                    node.link.abort("pulled out")
            assert ends(found) == dict.fromkeys(range(n), RequestState.FAILED)
            assert all(isinstance(e.error, LinkError) for e in found if e.state.is_end)
            with pytest.raises(LinkError):
                await client.complete("a")

    asyncio.run(main())


def test_a_list_is_sent_on_over_one_link(monkeypatch: pytest.MonkeyPatch) -> None:
    dialled: list[str] = []

    async def main() -> None:
        head, node = ScriptedNode(), ScriptedNode(elsewhere="head:1")
        async with asyncio.timeout(DEADLINE_S), serving(head) as link:

            async def dial(address: str, identity: object) -> Link:
                dialled.append(address)
                return link

            monkeypatch.setattr(client_module, "dial", dial)
            async with client_of(node) as client:
                results = await client.complete(["elsewhere 1", "elsewhere 2", "here"])
            assert [result.text for result in results] == ["elsewhere 1", "elsewhere 2", "here"]
            assert [asked.prompt for asked in head.asked] == ["elsewhere 1", "elsewhere 2"]

    asyncio.run(main())
    assert dialled == ["head:1"]


def test_a_client_that_is_closed_while_it_is_sent_on_keeps_no_link(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        dialled, answer = asyncio.Event(), asyncio.Event()
        async with asyncio.timeout(DEADLINE_S), serving(ScriptedNode()) as link:

            async def dial(address: str, identity: object) -> Link:
                dialled.set()
                await answer.wait()
                return link

            monkeypatch.setattr(client_module, "dial", dial)
            async with client_of(ScriptedNode(elsewhere="head:1")) as client:
                asking = asyncio.create_task(client.complete("elsewhere"))
                await dialled.wait()
            answer.set()
            with pytest.raises(LinkError, match="closed meanwhile"):
                await asking
            assert link.closed

    asyncio.run(main())


def test_an_address_that_cannot_be_reached_fails_what_was_sent_there() -> None:
    async def main() -> None:
        async with client_of(ScriptedNode(elsewhere="127.0.0.1:1")) as client:
            events = await all_of(client.generate(["here", "elsewhere", "here"]))
            finished, failed = RequestState.FINISHED, RequestState.FAILED
            assert ends(events) == {0: finished, 1: failed, 2: finished}
            [error] = [event.error for event in events if event.error is not None]
            assert isinstance(error, PeerUnreachableError)

    asyncio.run(main())


def test_being_sent_round_in_circles_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        node = ScriptedNode(elsewhere="other:1")
        other = ScriptedNode(elsewhere="other:1")
        async with serving(other) as link:

            async def dial(address: str, identity: object) -> Link:
                return link

            monkeypatch.setattr(client_module, "dial", dial)
            async with client_of(node) as client:
                with pytest.raises(PeerFailedError, match="keep redirecting the request"):
                    await all_of(client.generate("elsewhere"))

    asyncio.run(main())


def test_a_plan_is_told_once() -> None:
    async def main() -> None:
        plans: list[PlanReply] = []
        async with client_of(ScriptedNode()) as client:
            await all_of(client.generate(["a", "b", "c"], on_plan=plans.append))
            assert [plan.why for plan in plans] == ["it is scripted"]
            assert (await client.plan("elsewhere/model")).model.endswith("elsewhere/model")

    asyncio.run(main())


def test_a_node_that_knows_no_what_if_is_not_asked_one() -> None:
    """It would plan as if no machine had been added."""

    async def main() -> None:
        async with client_of(ScriptedNode(capabilities=[])) as client:
            with pytest.raises(VersionMismatchError, match="does not know machines that are not"):
                await client.plan(added=["x:20:16"])
            assert (await client.plan(without=["n1"])).why == "it is scripted"

    asyncio.run(main())


def test_a_link_that_ended_is_opened_again_for_the_next_call() -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            links = [await stack.enter_async_context(serving(ScriptedNode())) for _ in range(2)]
            lost, spare = links

            async def redial() -> Link:
                if not links:
                    raise PeerUnreachableError("nobody is there")
                return links.pop()

            links.clear()
            async with client_module.open_client(lost, redial=redial) as client:
                lost.abort("cut off")
                for _ in range(2):
                    with pytest.raises(PeerUnreachableError):
                        await client.complete("ab")
                    with pytest.raises(PeerUnreachableError):
                        await client.status()
                links.append(spare)
                results = await asyncio.gather(*(client.complete("ab") for _ in range(3)))
                assert [result.text for [result] in results] == ["ab"] * 3
                assert (await client.status()).node.name == "scripted"

    asyncio.run(main())


def test_links_that_have_ended_are_not_kept() -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:

            async def redial() -> Link:
                return await stack.enter_async_context(serving(ScriptedNode()))

            link = await redial()
            async with client_module.open_client(link, redial=redial) as client:
                ended = weakref.ref(client._control)
                link.abort("cut off")
                await client.status()
                gc.collect()
                assert ended() is None

    asyncio.run(main())


def test_a_call_on_a_link_that_was_cut_unnoticed_is_asked_again() -> None:
    """As after a cell of a notebook that took longer than a node waits for its client."""

    async def listed(client: Client) -> list[str]:
        return [model.name async for listed in client.models() for model in listed.models]

    calls: list[tuple[Callable[[Client], Awaitable[object]], int]] = [
        (lambda client: client.complete(["ab"] * 3), 3),
        (lambda client: client.status(), 0),
        (lambda client: client.tokenize("ab"), 0),
        (listed, 0),
    ]

    async def main() -> None:
        async with AsyncExitStack() as stack:
            nodes = [ScriptedNode() for _ in calls]
            links = [await stack.enter_async_context(serving(node)) for node in nodes]
            begun = iter(zip(nodes, links, strict=True))

            async def redial() -> Link:
                return next(begun)[1]

            first = ScriptedNode()
            link = await stack.enter_async_context(serving(first))
            client = await stack.enter_async_context(client_module.open_client(link, redial=redial))
            befores = [first, *nodes[:-1]]
            for before, node, (call, n_asked) in zip(befores, nodes, calls, strict=True):
                before.link.abort("cut off")
                assert not client._control.link.closed  # this side does not know yet
                assert await call(client)
                assert len(node.asked) == n_asked
            assert first.asked == []

    asyncio.run(main())


def test_a_request_is_asked_twice_at_most() -> None:
    """Whatever ends its links may have to do with it."""
    n_dialled = 0

    async def main() -> None:
        async with AsyncExitStack() as stack:

            async def redial() -> Link:
                nonlocal n_dialled
                n_dialled += 1
                node = ScriptedNode()
                link = await stack.enter_async_context(serving(node))
                node.link.abort("cut off")
                return link

            link = await redial()
            async with client_module.open_client(link, redial=redial) as client:
                for call in (client.complete("ab"), client.status(), client.tokenize("ab")):
                    before = n_dialled
                    with pytest.raises(LinkClosedError):
                        await call
                    assert n_dialled - before <= 2

    asyncio.run(main())


def test_a_request_that_has_no_output_yet_is_asked_again() -> None:
    """It waits for its turn, and then its head is gone: another node may lead by now."""

    async def main() -> None:
        nodes = [ScriptedNode(), ScriptedNode()]

        async def say_where_it_waits(control: ControlLink, message: Incoming) -> None:
            control.send(StateChanged(request=message.request, state=LiveState.QUEUED, ahead=2))
            await asyncio.Event().wait()

        nodes[0].before = say_where_it_waits
        async with AsyncExitStack() as stack:
            first, second = [await stack.enter_async_context(serving(node)) for node in nodes]

            async def redial() -> Link:
                return second

            opened = client_module.open_client(first, redial=redial)
            client = await stack.enter_async_context(opened)
            found = []
            async with asyncio.timeout(DEADLINE_S), aclosing(client.generate(["ab"])) as events:
                async for event in events:
                    found.append(event)
                    if len(found) == 1:
                        assert event.ahead == 2
                        nodes[0].link.abort("killed")
            assert [event.result.text for event in found if event.result] == ["ab"]
            assert len(nodes[1].asked) == 1

    asyncio.run(main())


def test_tokens_of_a_prompt_and_back() -> None:
    async def main() -> None:
        async with client_of(ScriptedNode()) as client:
            told = await client.tokenize("ab")
            assert (told.token_ids, told.context) == ([97, 98], 64)
            back = await client.detokenize([97, 98])
            assert (back.text, back.tokens) == ("ab", ["a", "b"])

    asyncio.run(main())


def test_a_prompt_that_is_too_long_brings_both_numbers() -> None:
    async def main() -> None:
        async with client_of(ScriptedNode()) as client:
            with pytest.raises(ContextExceededError) as caught:
                await client.complete("long")
            assert (caught.value.n_prompt, caught.value.n_context) == (99, 64)

    asyncio.run(main())
