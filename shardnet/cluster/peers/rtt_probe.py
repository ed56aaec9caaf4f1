"""Probes of addresses: which node answers, how fast, and, for people, why none does."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from shardnet.cluster.peers.control_link import ControlLink, refuse
from shardnet.errors import (
    AuthenticationError,
    PeerUnreachableError,
    ShardnetError,
    VersionMismatchError,
)
from shardnet.transport.address import split_address
from shardnet.transport.link import Link
from shardnet.transport.loop import cancel_all
from shardnet.types import NodeId
from shardnet.wire.messages.control import Done
from shardnet.wire.messages.diagnostics import MAX_REASON, AddressView, Seen
from shardnet.wire.messages.handshake import explained, explanation
from shardnet.wire.messages.membership import Ping

N_PINGS: Final = 3
"""Round trips measured per probe; the shortest counts."""

SAME_RTT: Final = 1.25
SAME_RTT_S: Final = 0.0001
"""Round trips within this factor of the shortest, or below this time, count as equal."""

DialAsClient = Callable[[str], Awaitable[Link]]
"""Opens a control link to an address as a client."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeAnswer:
    """The node that answered at an address. `rtt_s` is the shortest of a few round trips."""

    address: str
    node: NodeId
    name: str
    rtt_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The best answer of a node, None without one; why other addresses are not used, by address."""

    best: ProbeAnswer | None
    failures: dict[str, str]


async def compare(
    node: NodeId, addresses: Sequence[str], dial_as_client: DialAsClient, *, grace_s: float
) -> Comparison:
    """Probe all `addresses` at once and choose the one where `node` answers fastest.

    Of about equal ones it is the first in order. When one has answered, the others get `grace_s`
    seconds more; without any, this takes as long as `dial_as_client` waits. Errors become failures.
    """
    if not addresses:
        return Comparison(best=None, failures={})
    found: list[ProbeAnswer] = []
    failures: dict[str, str] = {}
    dials = {
        asyncio.create_task(probe_rtt(address, dial_as_client)): address for address in addresses
    }
    try:
        waiting = set(dials)
        while waiting:
            done, waiting = await asyncio.wait(
                waiting,
                timeout=grace_s if found else None,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if not done:
                break
            for task in done:
                answer = _answer(task, node)
                if isinstance(answer, ProbeAnswer):
                    found.append(answer)
                else:
                    failures[dials[task]] = answer
    finally:
        await cancel_all(*dials)
    best = choose(found, addresses)
    if best is not None:
        for address in addresses:
            if address != best.address:
                failures.setdefault(address, f"not faster than {best.address}")
    return Comparison(best=best, failures=failures)


def choose(found: Sequence[ProbeAnswer], order: Sequence[str]) -> ProbeAnswer | None:
    """Return the answer with the shortest round trip, None without any.

    Of about equal ones it is the first in `order`, addresses.
    """
    if not found:
        return None
    limit_s = max(min(answer.rtt_s for answer in found) * SAME_RTT, SAME_RTT_S)
    return min(found, key=lambda s: (s.rtt_s > limit_s, order.index(s.address)))


async def probe_rtt(address: str, dial_as_client: DialAsClient) -> ProbeAnswer:
    """Probe which node answers at an address, and how fast. Raises as dialling and `ping`."""
    async with _asking(await dial_as_client(address)) as control:
        rtt_s = min([await ping(control) for _ in range(N_PINGS)])
        peer = control.link.peer
        return ProbeAnswer(address=address, node=NodeId(peer.node), name=peer.name, rtt_s=rtt_s)


async def ping(control: ControlLink, payload: bytes = b"", *, as_step: bool = False) -> float:
    """Measure one round trip, in seconds, with `payload` on the way there.

    With `as_step` the answer waits for the peer's compute thread. Raises LinkError if the link
    ends; with `payload` or `as_step`, BusyError if the peer serves a request.
    """
    message = Ping(request=0, payload=payload, as_step=as_step)
    begun = time.perf_counter()
    await control.ask(message, Done)
    return time.perf_counter() - begun


def _answer(task: asyncio.Task[ProbeAnswer], node: NodeId) -> ProbeAnswer | str:
    """Return the answer at an address if it is of `node`, else why it does not count."""
    error = task.exception()
    if isinstance(error, ShardnetError):
        return str(error)
    answer = task.result()
    if answer.node != node:
        return f"another node answers there, {answer.name} ({answer.node})"
    return answer


@asynccontextmanager
async def _asking(link: Link) -> AsyncIterator[ControlLink]:
    """Use a link as a client, and close it."""
    control = ControlLink(link, refuse)
    reading = asyncio.create_task(control.serve_to_the_end())
    try:
        yield control
    except asyncio.CancelledError:
        link.abort("the answer is not needed any more")
        raise
    finally:
        await link.close()
        await reading


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
