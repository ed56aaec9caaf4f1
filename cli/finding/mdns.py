"""How commands find nodes by mDNS, and on which interfaces.

Imports python-zeroconf only when it looks.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Final

from shardnet.cluster.machine.addresses import (
    LOOPBACK_HOST,
    dial_order,
    format_addresses,
    multicast_hosts,
    rank,
    read_interfaces,
    usable,
)

if TYPE_CHECKING:
    from shardnet.cluster.discovery.node_record import NodeRecord
    from shardnet.cluster.peers.rtt_probe import ProbeAnswer
    from shardnet.transport.identity import Identity

INTERFACES_VARIABLE: Final = "SHARDNET_MDNS_INTERFACES"
"""Comma-separated addresses of the interfaces to use, where the automatic choice is wrong."""

LONGEST_S: Final = 1.5
HERE_S: Final = 0.5
QUIET_S: Final = 0.4
"""Most time to search, the same where only this machine is searched, which loses no packet, and the
silence after which all nodes have been seen."""

ANSWER_S: Final = 2.0
"""Deadline for a found node to answer."""


def mdns_interfaces(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the interface addresses in SHARDNET_MDNS_INTERFACES, () where it is not set."""
    named = environment.get(INTERFACES_VARIABLE, "")
    return tuple(part.strip() for part in named.split(",") if part.strip())


async def look_for_nodes(
    identity: Identity | None, *, insecure: bool, on_heard: Callable[[], None] = lambda: None
) -> list[NodeRecord]:
    """Return the nodes of this cluster that mDNS finds within LONGEST_S.

    Calls `on_heard` at each record that comes, whoever's it is.

    Without a key only this machine is searched, unless `insecure`: a prompt must not go to an
    unknown node that happens to answer first.
    """
    found = await _browse(beyond=identity is not None or insecure, on_heard=on_heard)
    fingerprint = identity.fingerprint if identity else ""
    return [candidate for candidate in found if candidate.fingerprint == fingerprint]


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
        longest_s=HERE_S if set(interfaces) <= {LOOPBACK_HOST} else LONGEST_S,
        quiet_s=QUIET_S,
        on_heard=on_heard,
    )


async def find_nearest(
    identity: Identity | None,
    *,
    insecure: bool,
    answer_s: float = ANSWER_S,
    on_heard: Callable[[], None] = lambda: None,
) -> list[ProbeAnswer]:
    """Return the nodes found that answer within `answer_s` seconds, shortest round trip first.

    Calls `on_heard` at each record that comes, whoever's it is.
    """
    from shardnet.api.client import dial
    from shardnet.cluster.peers.rtt_probe import compare

    local = rank(read_interfaces())
    dial_as_client = partial(dial, identity=identity)

    async def ask(candidate: NodeRecord) -> ProbeAnswer | None:
        addresses = format_addresses(dial_order(candidate.hosts, local), candidate.port)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(answer_s):
                return (
                    await compare(candidate.node, addresses, dial_as_client, grace_s=QUIET_S)
                ).best
        return None

    candidates = await look_for_nodes(identity, insecure=insecure, on_heard=on_heard)
    answers = await asyncio.gather(*(ask(candidate) for candidate in candidates))
    return sorted((a for a in answers if a is not None), key=lambda answer: answer.rtt_s)
