"""The client without async: its loop thread starts, serves and ends, whatever the caller does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import pytest
from support.cluster.scripted_node import ScriptedNode, client_of

from shardnet.api import Client, RequestState, blocking
from shardnet.errors import CapacityError, LinkClosedError, PeerUnreachableError


@asynccontextmanager
async def scripted(nodes: list[ScriptedNode]) -> AsyncIterator[Client]:
    """Make the node on the client's own loop and give a client of it."""
    nodes.append(ScriptedNode())
    async with client_of(nodes[0]) as client:
        yield client


def test_calls_wait_for_their_results() -> None:
    with blocking.opened(scripted([])) as client:
        texts = [event.text for event in client.generate("abc")]
        assert "".join(texts) == "abc"
        assert [result.text for result in client.complete(["ab", "cd"])] == ["ab", "cd"]
        assert client.plan().why == "it is scripted"
        with pytest.raises(CapacityError):
            client.complete("fail")
    assert not [thread for thread in threading.enumerate() if "shardnet" in thread.name]


def test_dropping_an_iterator_gives_its_requests_up() -> None:
    nodes: list[ScriptedNode] = []
    with blocking.opened(scripted(nodes)) as client:
        for event in client.generate(["wait", "abc"]):
            if event.state is RequestState.FINISHED:
                break
        del event
        client._loop.call(nodes[0].until_given_up(1))
        assert nodes[0].given_up == ["wait"]


def test_threads_share_a_client() -> None:
    with blocking.opened(scripted([])) as client, ThreadPoolExecutor(8) as pool:
        prompts = [f"prompt {number}" for number in range(24)]
        results = pool.map(lambda prompt: client.complete(prompt)[0].text, prompts)
        assert list(results) == prompts


def test_an_iterator_that_outlives_its_client_does_no_harm() -> None:
    nodes: list[ScriptedNode] = []
    with blocking.opened(scripted(nodes)) as client:
        events = client.generate("wait")
        next(events)
    events.close()
    with pytest.raises(LinkClosedError, match="with"):
        client.complete("a")


def test_a_client_that_cannot_be_opened_says_why() -> None:
    with (
        pytest.raises(PeerUnreachableError, match=r"127\.0\.0\.1:1"),
        blocking.connect("127.0.0.1:1", insecure=True),
    ):
        pass


def test_an_error_in_the_block_is_the_one_that_comes_out() -> None:
    def fail() -> None:
        with blocking.opened(scripted([])) as client:
            client.complete("a")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()


def test_a_wait_that_is_interrupted_gives_its_requests_up() -> None:
    """As Ctrl-C does: the wait for the next event still runs in the loop when it is closed."""
    nodes: list[ScriptedNode] = []
    with blocking.opened(scripted(nodes)) as client:
        loop, call = client._loop, client._loop.call
        events = client.generate("wait")
        next(events)

        def interrupted(asked: Coroutine[Any, Any, object]) -> object:
            loop.call = call  # type: ignore[method-assign]
            future = asyncio.run_coroutine_threadsafe(asked, loop._loop)
            call(asyncio.sleep(0))  # by now it waits
            future.cancel()
            raise KeyboardInterrupt

        loop.call = interrupted  # type: ignore[method-assign, assignment]
        with pytest.raises(KeyboardInterrupt):
            next(events)
        call(nodes[0].until_given_up(1))
        assert nodes[0].given_up == ["wait"]
