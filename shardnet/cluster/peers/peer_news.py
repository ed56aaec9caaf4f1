"""What a peer is told of this node and others, and what is believed of what it tells. Pure.

Knows which addresses mean something on the other machine. Must not know links or when they are
used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardnet.cluster.machine.addresses import is_loopback, is_scoped
from shardnet.errors import RemoteProtocolError, UsageError
from shardnet.transport.address import host_of, split_address
from shardnet.types import NodeId
from shardnet.wire.framing.schema import MAX_PEER_ADDRESSES
from shardnet.wire.messages.membership import KnownPeer


def told_of(node: NodeId, name: str, addresses: Iterable[str], *, reader_at: str) -> KnownPeer:
    """Write an entry for the peer at `reader_at`; addresses that mean nothing there stay out."""
    same_machine = is_loopback(host_of(reader_at))
    hosts = ((address, host_of(address)) for address in addresses)
    good = [a for a, h in hosts if not is_scoped(h) and (same_machine or not is_loopback(h))]
    return KnownPeer(node=node, name=name, addresses=good[:MAX_PEER_ADDRESSES])


def believed(told: KnownPeer, *, teller: str, teller_at: str) -> Sequence[str]:
    """Return the addresses of an entry that mean something here.

    Raises RemoteProtocolError, which names the `teller`, for what is no address.
    """
    same_machine = is_loopback(host_of(teller_at))
    good = []
    for address in told.addresses:
        try:
            host, _ = split_address(address)
        except UsageError as error:
            raise RemoteProtocolError(f"{teller} told of an address: {error}") from error
        if not is_scoped(host) and (same_machine or not is_loopback(host)):
            good.append(address)
    return good
