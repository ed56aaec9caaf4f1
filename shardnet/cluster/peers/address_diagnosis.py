"""Address diagnosis: dial addresses now, and classify the result for people.

Knows what a failed handshake says about the network path and the node at the other end. Must not
know the purpose of a probe, nor store anything.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Final

from shardnet.cluster.peers.rtt_probe import DialAsClient, ProbeAnswer, probe_rtt
from shardnet.errors import (
    AuthenticationError,
    PeerUnreachableError,
    ShardnetError,
    VersionMismatchError,
)
from shardnet.transport.address import split_address
from shardnet.types import NodeId
from shardnet.wire.messages.diagnostics import MAX_REASON, AddressView, Seen
from shardnet.wire.messages.handshake import explained, explanation

HANDSHAKE_S: Final = 2.0
"""Timeout of the handshake of a probe."""
CONNECT_S: Final = 0.5
"""Timeout of TCP alone after that, to distinguish a firewall from a node that hangs."""


async def probe(
    node: NodeId,
    addresses: Sequence[str],
    dial_as_client: DialAsClient,
    turn: asyncio.Semaphore | None = None,
) -> list[AddressView]:
    """Probe all `addresses` at once: does `node` answer at each, how fast, or why not.

    Returns a view per address, in order; raises nothing. Takes as long as `dial_as_client` waits,
    and CONNECT_S more. `turn` bounds the number of probes at one time.
    """

    async def at(address: str) -> AddressView:
        async with turn or contextlib.nullcontext():
            view, answer = await probe_address(address, dial_as_client)
        if answer is None or answer.node == node:
            return view
        why = f"another node answers there, {answer.name} ({answer.node})"
        return AddressView(address=address, seen="other node", why=explanation(why, MAX_REASON))

    return list(await asyncio.gather(*(at(address) for address in addresses)))


async def probe_address(
    address: str, dial_as_client: DialAsClient
) -> tuple[AddressView, ProbeAnswer | None]:
    """Probe an address; return the result, and the answer of a node, None without one."""
    try:
        answer = await probe_rtt(address, dial_as_client)
    except ShardnetError as error:
        seen = judge(error)
        if seen == "dropped" and await _connects(address):
            seen = "hangs"
        why, remedy = explained(error, MAX_REASON)
        return AddressView(address=address, seen=seen, why=why, remedy=remedy), None
    return AddressView(address=address, seen="answers", rtt_s=answer.rtt_s), answer


def judge(error: ShardnetError) -> Seen:
    """Classify an error of dialling. `dropped` includes `hangs`: see `probe_address`."""
    match error:
        case AuthenticationError():
            return "other key"
        case VersionMismatchError():
            return "other version"
        case PeerUnreachableError(__cause__=ConnectionRefusedError()):
            return "refused"
        case PeerUnreachableError(__cause__=TimeoutError()):
            return "dropped"
        case PeerUnreachableError():
            return "unreachable"
        case _:
            return "failed"


async def _connects(address: str) -> bool:
    """Return whether a TCP connection to an address is accepted."""
    host, port = split_address(address)
    try:
        async with asyncio.timeout(CONNECT_S):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError):
        return False
    writer.transport.abort()
    return True
