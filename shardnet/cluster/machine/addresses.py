"""Rank the addresses of this machine by how well other machines can reach it there.

Knows what interface names and address ranges mean on common systems. A real network ranks first;
link-local addresses and VPNs count only if there is none; container bridges, whose address is often
the same on every host, and interfaces that are down never count. Each address carries the reason.
Everything but `read_interfaces` is pure. Must not open sockets.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Interface, IPv6Interface, ip_address, ip_interface, ip_network
from typing import Final

import psutil

from shardnet.runtime.processors.processor_use import NO_FIGURE
from shardnet.transport.address import format_address

LOOPBACK_HOST: Final = "127.0.0.1"

_BRIDGES: Final = re.compile(
    r"(docker\d+|docker_gwbridge|br-[0-9a-f]{6,}|veth.*|vEthernet \(.*|cni.*|podman\d+|"
    r"virbr\d+.*|lxc.*|lxdbr\d+|incusbr\d+|flannel.*|cali.*|cilium.*|kube.*|weave.*|vmnet\d+|"
    r"vboxnet\d+|bridge1\d\d)",
    re.IGNORECASE,
)
"""macOS calls its bridge to virtual machines bridge100; bridge0 joins Thunderbolt cables."""
_TUNNELS: Final = re.compile(
    r"(tun\d*.*|tap\d*.*|wg.*|tailscale.*|zt.*|utun\d+|ppp\d+|ipsec\d+|gpd\d+|nebula.*|warp.*|"
    r"CloudflareWARP)",
    re.IGNORECASE,
)
NODE_PORT: Final = 7433
"""The TCP port of nodes without --port."""
_TAILNETS: Final = (ip_network("100.64.0.0/10"), ip_network("fd7a:115c:a1e0::/48"))
"""Where Tailscale and what is like it live: carrier-grade NAT (RFC 6598), and their own IPv6."""


class Verdict(enum.Enum):
    """The use of an address, best first. The value is the reason shown to people."""

    LAN = "on a real network"
    LINK_LOCAL = "link-local: used only where there is no real network"
    TUNNEL = "VPN or tunnel: used only where there is no real network"
    BRIDGE = "bridge of containers or virtual machines: other hosts may have the same address"
    LOOPBACK = "loopback: reaches this machine alone"
    DOWN = "the interface is down or has no carrier"
    UNUSABLE = "no address of a single machine"


_ORDER: Final = {verdict: place for place, verdict in enumerate(Verdict)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """A network interface as the system describes it. Addresses are written `address/prefix`.

    `mac` is its hardware address, as `00:1b:44:11:3a:b7`, "" without one. `speed_mbit` (Mbit/s) and
    `mtu` (bytes) are 0 if the system does not know them.
    """

    name: str
    is_up: bool
    is_point_to_point: bool = False
    speed_mbit: int = 0
    mtu: int = 0
    mac: str = ""
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalAddress:
    """One address of this machine and its verdict. `host` has the IPv6 scope, `net` does not."""

    interface: str
    host: str
    net: IPv4Interface | IPv6Interface
    verdict: Verdict
    speed_mbit: int
    mtu: int = 0
    mac: str = ""


def read_interfaces() -> tuple[Interface, ...]:
    """Read the network interfaces of this machine from the system."""
    try:
        stats, addresses = psutil.net_if_stats(), psutil.net_if_addrs()
    except NO_FIGURE:  # as where there is no network
        return ()
    interfaces = []
    for name, entries in addresses.items():
        state = stats.get(name)
        flags = state.flags.split(",") if state is not None else []
        interfaces.append(
            Interface(
                name=name,
                is_up=state is not None and state.isup,
                is_point_to_point="pointopoint" in flags,
                speed_mbit=state.speed if state is not None else 0,
                mtu=state.mtu if state is not None else 0,
                mac=next((mac for kind, mac, *_ in entries if kind == psutil.AF_LINK), "")
                .replace("-", ":")
                .lower(),
                addresses=tuple(filter(None, (_written(e.address, e.netmask) for e in entries))),
            )
        )
    return tuple(interfaces)


def rank(interfaces: Iterable[Interface]) -> tuple[LocalAddress, ...]:
    """Sort all addresses, best first: by verdict, then speed, then IPv4 before IPv6."""
    judged = [
        LocalAddress(
            interface=interface.name,
            host=written.partition("/")[0],
            net=(net := ip_interface(written)),
            verdict=_judge(interface, net),
            speed_mbit=interface.speed_mbit,
            mtu=interface.mtu,
            mac=interface.mac,
        )
        for interface in interfaces
        for written in interface.addresses
    ]
    return tuple(
        sorted(
            judged,
            key=lambda a: (_ORDER[a.verdict], -a.speed_mbit, a.net.version, a.interface, a.host),
        )
    )


def usable(addresses: Sequence[LocalAddress]) -> tuple[LocalAddress, ...]:
    """Return the addresses to advertise: those on real networks, else link-local ones and VPNs."""
    for verdicts in ((Verdict.LAN,), (Verdict.LINK_LOCAL, Verdict.TUNNEL)):
        found = tuple(address for address in addresses if address.verdict in verdicts)
        if found:
            return found
    return ()


def reachable_hosts(bound_host: str, addresses: Sequence[LocalAddress]) -> tuple[str, ...]:
    """Return the hosts at which a listener on `bound_host` can be dialled, best first.

    `addresses` come from `rank`. A listener on all addresses is reachable at the usable ones (on
    `0.0.0.0` those of IPv4), or on loopback if there are none; any other at its own. Raises
    ValueError if `bound_host` is not an IP address.
    """
    bound = ip_address(bound_host)
    if not bound.is_unspecified:
        return (bound_host,)
    hosts = tuple(a.host for a in usable(addresses) if bound.version == 6 or a.net.version == 4)
    return hosts or (LOOPBACK_HOST,)


def multicast_hosts(hosts: Sequence[str], addresses: Sequence[LocalAddress]) -> tuple[str, ...]:
    """Return one of `hosts` per interface, preferably IPv4: where to send multicast."""
    by_host = {address.host: address for address in addresses}
    chosen: dict[str, str] = {}
    for host in sorted(hosts, key=lambda host: ":" in host):
        known = by_host.get(host)
        chosen.setdefault(known.interface if known is not None else host, host)
    return tuple(host for host in hosts if host in chosen.values())


def dial_order(hosts: Iterable[str], own: Sequence[LocalAddress]) -> tuple[str, ...]:
    """Sort another node's hosts into the order in which this machine should dial them.

    First those in one of its real networks, last those in one of its container bridges.
    """
    return tuple(sorted(dict.fromkeys(hosts), key=lambda host: _distance(host, own)))


def is_loopback(host: str) -> bool:
    """Return whether `host` means the dialling machine itself, on every machine."""
    try:
        ip = ip_address(host)
    except ValueError:
        return host == "localhost"
    ip = getattr(ip, "ipv4_mapped", None) or ip
    return ip.is_loopback or ip.is_unspecified


def is_in_tailnet(host: str) -> bool:
    """Return whether `host` is an address of a tailnet, for whatever machine."""
    try:
        return any(ip_address(host) in network for network in _TAILNETS)
    except ValueError:
        return False


def is_scoped(host: str) -> bool:
    """Return whether `host` is link-local, so that advertising it to other nodes is useless."""
    try:
        return ip_address(host).is_link_local
    except ValueError:
        return False


def format_addresses(hosts: Iterable[str], port: int) -> tuple[str, ...]:
    """Write each host with the port, `host:port`."""
    return tuple(format_address(host, port) for host in hosts)


def _judge(interface: Interface, net: IPv4Interface | IPv6Interface) -> Verdict:
    ip = net.ip
    if ip.is_loopback:
        return Verdict.LOOPBACK
    if ip.is_unspecified or ip.is_multicast:
        return Verdict.UNUSABLE
    if not interface.is_up:
        return Verdict.DOWN
    if _BRIDGES.fullmatch(interface.name):
        return Verdict.BRIDGE
    if interface.is_point_to_point or _TUNNELS.fullmatch(interface.name):
        return Verdict.TUNNEL
    if is_in_tailnet(str(ip)):
        return Verdict.TUNNEL
    return Verdict.LINK_LOCAL if ip.is_link_local else Verdict.LAN


def _distance(host: str, own: Sequence[LocalAddress]) -> tuple[int, int, str]:
    """Return a sort key for the distance of a host; host names rank in the middle."""
    try:
        ip = ip_address(host)
    except ValueError:
        return (1, 0, host)
    nets = [a for a in own if a.net.version == ip.version and ip in a.net.network]
    verdicts = {a.verdict for a in nets}
    if ip.is_loopback or Verdict.LAN in verdicts:
        place = 0
    elif ip.is_link_local:
        place = 2
    elif Verdict.TUNNEL in verdicts or is_in_tailnet(str(ip)):
        place = 3
    elif Verdict.BRIDGE in verdicts:
        place = 4
    else:
        place = 1
    return (place, ip.version, host)


def _written(address: str, netmask: str | None) -> str | None:
    """Format as `address/prefix`; None for hardware addresses."""
    try:
        ip = ip_address(address)
    except ValueError:
        return None
    if netmask is None:
        return f"{address}/{ip.max_prefixlen}"
    if ip.version == 4:
        return f"{address}/{netmask}"
    return f"{address}/{int(ip_address(netmask)).bit_count()}"
