"""Advertise this node: its current addresses and mDNS record; pass on the nodes discovered.

Knows the listener's address, and which records are of the same cluster. Connects `addresses` and
`discovery` to the peers. Must not dial.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from shardnet import __version__
from shardnet.cluster.discovery.discovery import Discovery
from shardnet.cluster.discovery.service_browser import Goodbye, NodeRecord
from shardnet.cluster.machine.addresses import (
    LocalAddress,
    format_addresses,
    is_loopback,
    rank,
    reachable_hosts,
    read_interfaces,
)
from shardnet.cluster.machine.profile import make_host_id
from shardnet.cluster.peers.peers import Peers
from shardnet.transport.address import split_address
from shardnet.types import NodeId
from shardnet.wire.framing.frames import PROTOCOL_VERSION


class Advertisement:
    """The addresses of one node. `on_changed` is called when they change."""

    def __init__(self, *, node: NodeId, name: str, on_changed: Callable[[], None]) -> None:
        self._node = node
        self._name = name
        self._on_changed = on_changed
        self._bound = ""
        self.local: tuple[LocalAddress, ...] = ()
        """This machine's addresses, best first."""
        self.addresses: tuple[str, ...] = ()
        """Addresses (host:port) at which others can reach the node, best first; empty until it
        listens."""

    @property
    def address(self) -> str:
        """The best of `addresses`, "" without one."""
        return self.addresses[0] if self.addresses else ""

    @property
    def is_loopback(self) -> bool:
        """Whether the node can be reached from its own machine only."""
        return all(is_loopback(split_address(address)[0]) for address in self.addresses)

    def listening_at(self, bound: str) -> None:
        """Set the address (host:port) that the listener is bound to."""
        self._bound = bound
        self.refresh()

    def refresh(self) -> None:
        """Read the addresses of this machine again."""
        self.local = rank(read_interfaces())
        host, port = split_address(self._bound)
        addresses = format_addresses(reachable_hosts(host, self.local), port)
        if addresses != self.addresses:
            self.addresses = addresses
            self._on_changed()

    def seen_as(self, address: str) -> str:
        """Return the address to advertise for this node when a request came to `address`.

        A loopback address would lead other machines to themselves.
        """
        host, _ = split_address(address)
        return self.address if is_loopback(host) and not self.is_loopback else address

    async def discover(self, discovery: Discovery, peers: Peers) -> None:
        """Announce this node, and propose the nodes found to `peers`, until cancelled."""

        def found(event: NodeRecord | Goodbye) -> None:
            if isinstance(event, Goodbye):
                peers.withdraw(event.node)
            else:
                why = _refusal(event, discovery.clusters)
                peers.propose(event.node, event.name, event.addresses, why)

        await discovery.run(lambda: self._record(discovery.fingerprint), found)

    def _record(self, fingerprint: str) -> NodeRecord:
        self.refresh()
        return NodeRecord(
            node=self._node,
            name=self._name,
            version=__version__,
            protocol=PROTOCOL_VERSION,
            fingerprint=fingerprint,
            host_id=make_host_id(),
            hosts=_hosts(self.addresses),
            port=split_address(self._bound)[1],
        )


def _hosts(addresses: Iterable[str]) -> tuple[str, ...]:
    return tuple(split_address(address)[0] for address in addresses)


def _refusal(record: NodeRecord, clusters: Sequence[str]) -> str:
    """Return why a node cannot belong to this cluster, "" if it may."""
    if record.protocol != PROTOCOL_VERSION:
        return (
            f"it speaks protocol version {record.protocol} and this node {PROTOCOL_VERSION}: "
            "update the older one"
        )
    if record.fingerprint not in clusters:
        return "it has another cluster key, or one of both has none"
    return ""
