"""Wake machines that sleep: the packet that their network interfaces wait for, and where it goes.

It goes to private addresses alone: broadcasts in networks of this machine, or one that a node has
named for itself.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from ipaddress import IPv4Interface, ip_address, ip_interface
from typing import Final

from shardnet.cluster.machine.addresses import LocalAddress, usable
from shardnet.errors import UsageError
from shardnet.transport.address import split_address
from shardnet.wire.messages.membership import Asleep

PORT: Final = 9
"""That of the discard service, by custom: the interface looks for the packet in any frame."""
MAC_LENGTH: Final = 17

REMEDY: Final = (
    "see that Wake-on-LAN is on there, in the firmware and in the system (Linux: `ethtool eth0` "
    "says `Wake-on: g`), and that it has a cable to a network of this machine"
)


def magic_packet(mac: str) -> bytes:
    """Return the packet that wakes an interface: six bytes 255, then sixteen times its address."""
    return b"\xff" * 6 + bytes.fromhex(mac.replace(":", "")) * 16


def how_to_wake(local: Sequence[LocalAddress], wake_at: str) -> Asleep:
    """Describe how a machine with the addresses `local` is woken; `wake_at` as in Asleep."""
    cards = [a for a in usable(local) if a.net.version == 4 and len(a.mac) == MAC_LENGTH]
    named = (cards or local) if wake_at else cards
    macs = dict.fromkeys(address.mac for address in named if len(address.mac) == MAC_LENGTH)
    return Asleep(macs=[*macs], networks=[str(card.net) for card in cards], wake_at=wake_at)


def check_wake_at(address: str) -> tuple[str, int]:
    """Return the host and port of an address for the packet. Raises UsageError unless private."""
    host, port = split_address(address)
    try:
        is_private = ip_address(host).is_private
    except ValueError:
        is_private = False
    if not is_private:
        raise UsageError(f"{address}: the packet goes to private IP addresses alone")
    return host, port


def send_magic(asleep: Asleep, own: Sequence[LocalAddress]) -> None:
    """Send the packet once to each place, from a machine that has the addresses `own`.

    Raises UsageError if there is no place, OSError if none can be sent.
    """
    theirs = {ip_interface(network).network for network in asleep.networks}
    ours = [a for a in own if isinstance(a.net, IPv4Interface) and a.net.network in theirs]
    targets = [(a.host, str(a.net.network.broadcast_address), PORT) for a in ours]
    if asleep.wake_at:
        targets = [("", *check_wake_at(asleep.wake_at))]
    if not targets or not asleep.macs:
        raise UsageError(f"it is in none of this machine's networks ({', '.join(asleep.networks)})")
    for whence, host, port in targets:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as opened:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
            if whence:
                opened.bind((whence, 0))
            for mac in asleep.macs:
                opened.sendto(magic_packet(mac), (host, port))
