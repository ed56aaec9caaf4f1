"""Which node a command talks to: named, started for this run, found by mDNS, or in this process.

Imports python-zeroconf only when it looks.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from shardnet.api.client import Client, connect
from shardnet.api.connections import check_local, node_in_process, start_nodes
from shardnet.cluster.machine.addresses import (
    LOOPBACK_HOST,
    dial_order,
    format_addresses,
    multicast_hosts,
    rank,
    read_interfaces,
    usable,
)
from shardnet.cluster.machine.folders import runtime_dir
from shardnet.cluster.machine.local_nodes import LocalNodes, share_of_cores
from shardnet.cluster.machine.profile import available_cores
from shardnet.errors import (
    AuthenticationError,
    ConfigurationError,
    LinkError,
    PeerUnreachableError,
    UsageError,
)
from shardnet.threads import DaemonThreads
from shardnet.transport.loop import at_most
from shardnet.wire.messages.plans import ModelChoice

from ..flags.options import Access, Search, mdns_interfaces
from ..flags.ring_options import Wanted
from ..output.columns import warn_of_cache
from ..output.exit_codes import counted, say

if TYPE_CHECKING:
    from shardnet.cluster.discovery.service_browser import NodeRecord
    from shardnet.cluster.peers.rtt_probe import ProbeAnswer
    from shardnet.transport.identity import Identity


LONGEST_S: Final = 1.5
HERE_S: Final = 0.5
QUIET_S: Final = 0.4
"""Most time to search, the same where only this machine is searched, which loses no packet, and the
silence after which all nodes have been seen."""

ANSWER_S: Final = 2.0
"""Deadline for a found node to answer."""


async def look_for_nodes(
    identity: Identity | None, *, insecure: bool, on_heard: Callable[[], None] = lambda: None
) -> list[NodeRecord]:
    """Return the nodes of this cluster that mDNS finds within LONGEST_S.

    Calls `on_heard` at each record that comes, whoever's it is.

    Without a key only this machine is searched, unless `insecure`: a prompt must not go to an
    unknown node that happens to answer first.
    """
    found = await _browse(beyond=identity is not None or insecure, on_heard=on_heard)
    clusters = identity.fingerprints if identity else ("",)
    return [candidate for candidate in found if candidate.fingerprint in clusters]


async def browse_all() -> list[NodeRecord]:
    """Return the nodes of all clusters that mDNS finds within LONGEST_S."""
    return await _browse(beyond=True)


async def _browse(*, beyond: bool, on_heard: Callable[[], None] = lambda: None) -> list[NodeRecord]:
    """Search this machine and, with `beyond`, its networks."""
    from shardnet.cluster.discovery.discovery import browse
    from shardnet.cluster.machine.profile import make_host_id

    local = rank(read_interfaces())
    hosts = (*(address.host for address in usable(local) if beyond), LOOPBACK_HOST)
    interfaces = mdns_interfaces(os.environ) or multicast_hosts(hosts, local)
    return await browse(
        interfaces,
        own_host_id=make_host_id(),
        only_here=not beyond,
        longest_s=HERE_S if set(interfaces) <= {LOOPBACK_HOST} else LONGEST_S,
        quiet_s=QUIET_S,
        on_heard=on_heard,
    )


async def find_nearest(
    identity: Identity | None,
    search: Search,
    *,
    insecure: bool,
    answer_s: float = ANSWER_S,
    on_heard: Callable[[], None] = lambda: None,
) -> list[ProbeAnswer]:
    """Return the nodes found that answer within `answer_s` seconds, shortest round trip first.

    `search` says how to look. Calls `on_heard` at each record that comes, whoever's it is.
    """
    from shardnet.api.client import dial
    from shardnet.cluster.peers.rtt_probe import compare

    local = rank(read_interfaces())
    dial_as_client = partial(dial, identity=identity)

    async def ask(candidate: NodeRecord) -> ProbeAnswer | None:
        addresses = format_addresses(dial_order(candidate.hosts, local), candidate.port)
        async with at_most(answer_s):
            return (await compare(candidate.node, addresses, dial_as_client, grace_s=QUIET_S)).best
        return None

    async def by_mdns() -> list[ProbeAnswer | None]:
        if search.no_mdns:
            return []
        candidates = await look_for_nodes(identity, insecure=insecure, on_heard=on_heard)
        return await asyncio.gather(*(ask(candidate) for candidate in candidates))

    async def in_tailnet() -> list[ProbeAnswer]:
        return await look_in_tailnet(identity, insecure=insecure) if search.tailnet else []

    heard, answered = await asyncio.gather(by_mdns(), in_tailnet())
    found = {a.node: a for a in (*answered, *heard) if a is not None}
    return sorted(found.values(), key=lambda answer: answer.rtt_s)


async def look_in_tailnet(identity: Identity | None, *, insecure: bool) -> list[ProbeAnswer]:
    """Return the nodes of this cluster that answer on the user's machines in a tailnet.

    Says why there are none where Tailscale cannot be asked. Without a key nobody is asked, unless
    `insecure`.
    """
    from shardnet.api.client import dial
    from shardnet.cluster.machine.virtual_networks import ask_tailscale
    from shardnet.cluster.peers.address_search import probe_all, tailnet_addresses

    if identity is None and not insecure:
        return []
    try:
        addresses = tailnet_addresses(await ask_tailscale(os.environ))
    except ConfigurationError as error:
        say(f"warning: --tailnet finds no nodes: {error}")
        return []
    return await probe_all(addresses, partial(dial, identity=identity), longest_s=ANSWER_S)


SOON_S = 0.3
"""Within this time a node that is there is heard, unless a packet was lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A client of the node to ask, and the model choice to send, with the nodes of --local."""

    client: Client
    choice: ModelChoice


@asynccontextmanager
async def open_target(wanted: Wanted) -> AsyncIterator[Target]:
    """Connect to the node to ask; --local nodes and a node in this process end with the context.

    Raises UsageError when --nodes and --local are both given, LinkError when a named node does not
    answer, ConfigurationError when the cluster key cannot be used.
    """
    choice = wanted.choice
    async with contextlib.AsyncExitStack() as stack:
        if choice.nodes and wanted.local:
            raise UsageError("--nodes and --local exclude each other", remedy="give one of them")
        if wanted.local:
            check_local(wanted.local, choice)
            addresses = await stack.enter_async_context(
                local_processes(
                    wanted.local, choice.threads, wanted.access, wanted.prefix_cache_bytes
                )
            )
            choice = replace(choice, nodes=addresses)
        client = await _client(stack, choice, wanted)
        yield Target(client=client, choice=choice)


async def _client(stack: contextlib.AsyncExitStack, choice: ModelChoice, wanted: Wanted) -> Client:
    access = wanted.access
    identity = access.identity()
    if choice.nodes:
        return await stack.enter_async_context(connect(choice.nodes[0], identity))
    here = await connect_here(stack, identity, may_do_without=True)
    if here is not None:
        await _warn_of_unknown_peers(here, wanted.peers)
        return here
    if wanted.peers:
        return await _nearest(stack, wanted.peers, identity)
    looks = wanted.search.is_allowed
    if looks and (found := await _search(identity, wanted.search, insecure=access.insecure)):
        say(f"asking the nearest node, {found[0].name} ({found[0].address})")
        return await stack.enter_async_context(connect(found[0].address, identity))
    say("no node runs here, none was named and none was found: running in this process")
    warn_of_cache()
    import_node()
    return await stack.enter_async_context(
        node_in_process(choice.threads, identity, prefix_cache_bytes=wanted.prefix_cache_bytes)
    )


def import_node() -> None:
    """Import what a node needs, torch above all: that takes a second or two.

    It is excluded from garbage collection, since it is never freed: collecting it takes a tenth of
    a node's start, and would block its event loop later.
    """
    gc.disable()
    try:
        import shardnet.cluster.machine.profile
        import shardnet.cluster.member.stage_host
        import shardnet.cluster.node.node
        import shardnet.runtime.loading.loading
        import shardnet.stage.load

        shardnet.runtime.loading.loading.keep_one_heap()  # before it has threads
        gc.freeze()
    finally:
        gc.enable()


async def _search(
    identity: Identity | None,
    search: Search,
    *,
    insecure: bool,
    prepare: Callable[[], None] = import_node,
) -> list[ProbeAnswer]:
    """Search for nodes as `search` says.

    If none is heard within SOON_S, `prepare` is called on a thread meanwhile: the model will most
    likely run in this process, and importing what that needs takes longer than the search.
    """
    heard = asyncio.Event()
    searching = asyncio.create_task(
        find_nearest(identity, search, insecure=insecure, on_heard=heard.set)
    )
    try:
        await asyncio.wait(
            [searching, hearing := asyncio.create_task(heard.wait())],
            timeout=SOON_S,
            return_when=asyncio.FIRST_COMPLETED,
        )
        hearing.cancel()
        if not heard.is_set() and not searching.done():
            DaemonThreads(1, "shardnet-imports").submit(prepare)
        return await searching
    finally:
        searching.cancel()


async def _warn_of_unknown_peers(here: Client, peers: Sequence[str]) -> None:
    """Warn of each --peer that the node of this machine, which is asked instead, does not know."""
    if not peers:
        return
    status = await here.status(with_peers=True)
    known = {status.node.address, *(peer.address for peer in status.peers)}
    if unknown := [peer for peer in peers if peer not in known]:
        say(
            f"--peer {', '.join(unknown)} is not asked: the node of this machine is asked, "
            "which does not know it; give --peer to `shardnet node`, or name the ring with --nodes"
        )


async def connect_here(
    stack: contextlib.AsyncExitStack, identity: Identity | None, *, may_do_without: bool = False
) -> Client | None:
    """Connect to the oldest node of this machine that answers; None when there is none.

    A node with another cluster key is skipped with a message. Where the command may do without it,
    the errors of one that is busy say how.
    """
    for node in LocalNodes(runtime_dir(os.environ)).list():
        with contextlib.suppress(LinkError):
            try:
                client = await stack.enter_async_context(connect(node.address, identity))
            except AuthenticationError as error:
                say(f"node {node.name} of this machine is not asked: {error}")
                continue
            say(f"asking the node of this machine, {node.name} ({node.address})")
            if may_do_without:
                client.if_busy = (
                    "wait until that ends; or do without the nodes that run here: --local 1; or "
                    f"end node {node.name} ({node.address}, process {node.pid}): kill {node.pid}"
                )
            return client
    return None


async def named_or_here(
    stack: contextlib.AsyncExitStack, addresses: Sequence[str], identity: Identity | None
) -> list[Client]:
    """Connect to the nodes at `addresses`, or to the node of this machine if that is empty.

    Raises PeerUnreachableError when none runs here, LinkError when a named one does not answer.
    """
    if addresses:
        return [await stack.enter_async_context(connect(a, identity)) for a in addresses]
    here = await connect_here(stack, identity)
    if here is None:
        none = "no node runs on this machine"
        if LocalNodes(runtime_dir(os.environ)).list():
            none = "no node of this machine can be asked"
        raise PeerUnreachableError(
            none, remedy="start one with `shardnet node`, or name one with --nodes HOST:PORT"
        )
    return [here]


async def _nearest(
    stack: contextlib.AsyncExitStack, peers: Sequence[str], identity: Identity | None
) -> Client:
    """Connect to the peers; return the one that answers fastest. Raises PeerUnreachableError."""
    failures = []
    best: tuple[float, Client] | None = None
    for peer in peers:
        try:
            client = await stack.enter_async_context(connect(peer, identity))
            asked = time.monotonic()
            await client.status(with_peers=False)
            if best is None or time.monotonic() - asked < best[0]:
                best = (time.monotonic() - asked, client)
        except LinkError as error:
            failures.append(str(error))
    if best is None:
        raise PeerUnreachableError("no --peer answers: " + "; ".join(failures))
    say(f"asking the nearest peer, {best[1].address}")
    return best[1]


@asynccontextmanager
async def local_processes(
    n_nodes: int, threads: int, access: Access, prefix_cache_bytes: int = 0
) -> AsyncIterator[list[str]]:
    """Start `n_nodes` node processes and yield their addresses; see `start_nodes`.

    `threads` 0 gives each its share of the cores. Together they keep at most `prefix_cache_bytes`.
    """
    threads = threads or share_of_cores(available_cores(), n_nodes)
    say(f"starting {counted(n_nodes, 'node')} on this machine, threads each: {threads}")
    warn_of_cache()
    arguments = access.node_arguments()
    if prefix_cache_bytes:  # their folder is one, and each sees what the others take
        arguments += ["--prefix-cache", str(prefix_cache_bytes)]
    async with start_nodes(n_nodes, threads, arguments) as addresses:
        yield addresses
