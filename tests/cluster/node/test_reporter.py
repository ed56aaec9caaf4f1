"""Reports of real nodes in this process: what they tell, to whom, and what they do not wait for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cluster.small_node import small_settings

from shardnet import __version__
from shardnet.api.client import Client, connect, open_client
from shardnet.cluster.machine.local_nodes import LocalNodes
from shardnet.cluster.machine.profile import Device, MemoryBudget
from shardnet.cluster.node import parts, reporter
from shardnet.cluster.node.node import Node, listening, running
from shardnet.cluster.node.reporter import free_bytes
from shardnet.cluster.node.settings import NodeSettings
from shardnet.cluster.peers import node_directory
from shardnet.cluster.peers.control_link import ControlLink, Incoming
from shardnet.cluster.peers.peer_links import clock_ahead
from shardnet.cluster.peers.peer_table import KnownNode
from shardnet.cluster.store.model_cache import ModelCache
from shardnet.errors import AuthenticationError
from shardnet.transport import tcp
from shardnet.types import DType, NodeId
from shardnet.wire.messages.control import Done
from shardnet.wire.messages.handshake import Hello, PeerRole, Purpose
from shardnet.wire.messages.membership import (
    NodeInfo,
    Ping,
    ReportReply,
    ReportRequest,
    Status,
    StatusReply,
)

CPU = Device(kind="cpu", description="cpu", dtypes=(DType.FLOAT32,))


class Lab:
    """Nodes on loopback that know each other by --peer."""

    def __init__(self, folder: Path, stack: contextlib.AsyncExitStack) -> None:
        self._folder = folder
        self._stack = stack

    async def node(self, name: str, *peers: str) -> tuple[Node, str]:
        """Start a node; return it and its address."""
        settings = NodeSettings(
            node=NodeId(f"{name}-id"),
            name=name,
            budget=MemoryBudget(device=CPU, asked_bytes=2**30),
            threads=1,
            peers=peers,
            local_nodes=LocalNodes(self._folder),
            cache=self._folder,
            models=ModelCache(self._folder),
            log=lambda line: None,
        )
        node = await self._stack.enter_async_context(listening(settings, "127.0.0.1", 0))
        return node, node.address

    async def client(self, address: str) -> Client:
        return await self._stack.enter_async_context(connect(address))

    async def fake_node(
        self, address: str, version: str, handler: Callable[[ControlLink, Incoming], Any]
    ) -> None:
        """Link to the node at `address` as one of another making."""
        host, port = address.split(":")
        hello = Hello(
            purpose=Purpose.CONTROL, role=PeerRole.NODE, node="fake", name="fake", version=version
        )
        link = await tcp.connect(host, int(port), hello)
        serving = asyncio.create_task(ControlLink(link, handler).serve_to_the_end())

        async def end() -> None:
            await link.close()
            await serving

        self._stack.push_async_callback(end)


@asynccontextmanager
async def lab(folder: Path) -> AsyncIterator[Lab]:
    async with contextlib.AsyncExitStack() as stack:
        yield Lab(folder, stack)


async def linked(client: Client, name: str, *, with_addresses: bool = False) -> None:
    """Wait until the node of the client is linked to one other, and has been told where it is."""

    async def is_linked() -> bool:
        views = (await own(client)).peers
        return [
            view.name for view in views if view.is_linked and (view.addresses or not with_addresses)
        ] == [name]

    never = asyncio.Event()
    while not await is_linked():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.01):
                await never.wait()


async def own(client: Client) -> Any:
    [reply] = [reply async for reply in client.report()]
    return reply.report


def test_a_node_tells_of_itself_and_its_peers_with_what_its_probes_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "PROBE_S", 30.0)
    monkeypatch.setattr(reporter, "PEER_REPORT_S", 60.0)

    async def main() -> None:
        async with lab(tmp_path) as town:
            _, anna = await town.node("anna")
            _, bert = await town.node("bert", anna)
            client = await town.client(anna)
            await linked(client, "bert", with_addresses=True)
            await linked(await town.client(bert), "anna", with_addresses=True)
            replies = {
                reply.name: reply async for reply in client.report(probe=True, with_peers=True)
            }
            assert replies.keys() == {"anna", "bert"}
            for name, other in (("anna", "bert"), ("bert", "anna")):
                report, info = replies[name].report, replies[name].info
                assert report is not None
                assert info is not None
                assert info.version == __version__
                [view] = report.peers
                assert (view.name, view.is_linked, view.version) == (other, True, __version__)
                assert [address.seen for address in view.addresses] == ["answers"]
                assert view.bytes_per_s is None or view.bytes_per_s > 0
                assert report.multicast.state == "off"
                assert report.stage is None
            assert replies["anna"].clock_ahead_s is None
            ahead_s = replies["bert"].clock_ahead_s
            assert ahead_s is not None
            assert abs(ahead_s) < 60, "both have one clock"

    asyncio.run(main())


def test_a_host_from_which_a_link_came_up_is_known_to_the_nodes_dialer_too(tmp_path: Path) -> None:
    """Both give places to hosts that are known: see tests/transport/test_listener.py."""

    async def main() -> None:
        async with lab(tmp_path) as town:
            node, anna = await town.node("anna")
            assert "127.0.0.1" not in node.links.dialer.known
            await own(await town.client(anna))
            assert "127.0.0.1" in node.links.dialer.known

    asyncio.run(main())


def test_a_peer_that_does_not_report_is_named_and_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporter, "PEER_REPORT_S", 0.05)

    async def be_silent(control: ControlLink, message: Incoming) -> None:
        if isinstance(message, Ping):
            control.send(Done(request=message.request))
        elif not isinstance(message, ReportRequest):
            return
        await asyncio.Event().wait()

    async def main() -> None:
        async with lab(tmp_path) as town:
            _, anna = await town.node("anna")
            client = await town.client(anna)
            await town.fake_node(anna, __version__, be_silent)
            await linked(client, "fake")
            replies = [reply async for reply in client.report(with_peers=True)]
            assert {reply.name for reply in replies} == {"anna", "fake"}
            [fake] = [reply for reply in replies if reply.name == "fake"]
            assert fake.report is None
            assert "no report within" in fake.failure

    asyncio.run(main())


def test_a_peer_of_another_release_is_asked_as_any_other(tmp_path: Path) -> None:
    async def report(control: ControlLink, message: Incoming) -> None:
        if isinstance(message, ReportRequest):
            control.send(ReportReply(request=message.request, node="fake", name="fake"))

    async def main() -> None:
        async with lab(tmp_path) as town:
            _, anna = await town.node("anna")
            client = await town.client(anna)
            await town.fake_node(anna, "0.0.1", report)
            await linked(client, "fake")
            replies = [reply async for reply in client.report(with_peers=True)]
            [fake] = [reply for reply in replies if reply.name == "fake"]
            assert fake.failure == ""

    asyncio.run(main())


@pytest.mark.parametrize(
    ("cluster", "address", "is_told"),
    [
        (None, "127.0.0.1:999", True),
        (None, "[::1]:999", True),
        (None, "10.0.0.9:999", False),
        ("a" * 16, "10.0.0.9:999", True),
    ],
)
def test_only_members_and_this_machine_are_told(
    cluster: str | None, address: str, is_told: bool
) -> None:
    """With a key every link is a member's: TLS has seen to that."""
    told = reporter.NodeReporter.__new__(reporter.NodeReporter)
    told.cluster = cluster
    control: Any = SimpleNamespace(link=SimpleNamespace(peer_address=address))
    with contextlib.nullcontext() if is_told else pytest.raises(AuthenticationError, match="key"):
        told._check_member(control)


def test_the_server_in_the_process_of_a_node_is_told_without_a_key(tmp_path: Path) -> None:
    """Metrics and the dashboard of `shardnet serve` on one machine have nothing else to show."""

    async def main() -> None:
        async with (
            running(small_settings(tmp_path)) as node,
            open_client(await node.client(), None, node_name="here") as client,
        ):
            assert node.cluster is None
            assert (await own(client)).uptime_s >= 0

    asyncio.run(main())


def test_an_address_that_answered_once_is_not_said_to_answer_for_ever() -> None:
    """The dashboard says why a node that was switched off is not reached."""
    known = KnownNode(node=NodeId("b"), name="bert", address="h:1", rtt_s=0.001)
    assert reporter._remembered(known, "h:1").seen == "answers"
    known.failures["h:1"] = "h:1: no answer within 5 s"
    view = reporter._remembered(known, "h:1")
    assert (view.seen, view.why, view.rtt_s) == ("failed", "h:1: no answer within 5 s", None)
    assert reporter._remembered(known, "h:2").seen == "not tried"


def test_a_list_comes_at_once_with_what_was_known_of_a_peer_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_asked = 0

    async def answer_once(control: ControlLink, message: Incoming) -> None:
        nonlocal n_asked
        if isinstance(message, Status):
            n_asked += 1
            if n_asked == 1:
                control.send(StatusReply(request=message.request, node=FAKE, peers=[]))
            else:
                await asyncio.Event().wait()

    async def main() -> None:
        async with lab(tmp_path) as town:
            _, anna = await town.node("anna")
            client = await town.client(anna)
            await town.fake_node(anna, __version__, answer_once)
            await linked(client, "fake")
            for grace_s in (30.0, 0.1):
                monkeypatch.setattr(node_directory, "LISTED_S", grace_s)
                status = await client.status(with_peers=True)
                assert [peer.name for peer in status.peers] == ["fake"]
            assert n_asked == 2

    asyncio.run(main())


FAKE = NodeInfo(
    node="fake",
    name="fake",
    address="127.0.0.1:1",
    version=__version__,
    device="cpu",
    memory_bytes=1,
    memory_free_bytes=1,
    cores=1,
    threads=1,
    dtypes=[],
    host_id="fake",
)


@given(
    ahead_s=st.floats(-1e6, 1e6),
    there_s=st.floats(0, 1),
    busy_s=st.floats(0, 10),
    back_s=st.floats(0, 1),
)
def test_a_clock_is_found_to_half_the_difference_of_both_ways(
    ahead_s: float, there_s: float, busy_s: float, back_s: float
) -> None:
    asked = 1e9
    received = asked + there_s + ahead_s
    sent = received + busy_s
    answered = asked + there_s + busy_s + back_s
    found_s = clock_ahead(asked, received, sent, answered)
    assert abs(found_s - ahead_s) <= abs(there_s - back_s) / 2 + 1e-5


def test_free_space_is_that_of_the_disk_where_a_folder_would_be(tmp_path: Path) -> None:
    free = free_bytes(tmp_path / "not" / "there")
    assert free is not None
    assert free > 0
