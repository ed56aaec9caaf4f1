"""Write the entries of PeersKnown for a peer, and filter the addresses in those of a peer. Pure.

Knows which addresses are meaningful on the other machine. Must not know links or when messages are
sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardnet.cluster.machine.addresses import is_loopback, is_scoped
from shardnet.errors import RemoteProtocolError, UsageError
from shardnet.transport.address import host_of, split_address
from shardnet.types import NodeId
from shardnet.wire.framing.schema import MAX_PEER_ADDRESSES
from shardnet.wire.messages.membership import KnownPeer


def entry_for(node: NodeId, name: str, addresses: Iterable[str], *, reader_at: str) -> KnownPeer:
    """Make the entry of a node for the peer at the address `reader_at`.

    Leaves out link-local `addresses`, loopback ones if the peer is on another machine, and those
    beyond MAX_PEER_ADDRESSES.
    """
    same_machine = is_loopback(host_of(reader_at))
    hosts = ((address, host_of(address)) for address in addresses)
    good = [a for a, h in hosts if not is_scoped(h) and (same_machine or not is_loopback(h))]
    return KnownPeer(node=node, name=name, addresses=good[:MAX_PEER_ADDRESSES])


def usable_addresses(entry: KnownPeer, *, sender: str, sender_at: str) -> Sequence[str]:
    """Return the addresses of an entry that are meaningful on this machine.

    `sender` is the peer's name, `sender_at` its address. Raises RemoteProtocolError, which names
    the sender, if one is not host:port.
    """
    same_machine = is_loopback(host_of(sender_at))
    good = []
    for address in entry.addresses:
        try:
            host, _ = split_address(address)
        except UsageError as error:
            raise RemoteProtocolError(f"{sender} reported an unusable address: {error}") from error
        if not is_scoped(host) and (same_machine or not is_loopback(host)):
            good.append(address)
    return good
