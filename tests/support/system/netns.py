"""Hosts with networks of their own on one Linux machine: network namespaces joined by a bridge.

Needs root and iproute2. Everything, the bridge too, lives in namespaces made here: the machine's
own interfaces are never touched.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

SUBNET = "10.77.0"
ENTER = ("ip", "netns", "exec")
"""Behind it stand a namespace and a command line to run there."""


class NotPermittedError(Exception):
    """Namespaces cannot be made here; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One host. Its interface is eth0, with the IPv4 address `address` and an IPv6 one."""

    network: Network
    number: int

    @property
    def namespace(self) -> str:
        """Its network namespace."""
        return f"{self.network.name}-h{self.number}"

    @property
    def address(self) -> str:
        """Its address in the common network."""
        return f"{SUBNET}.{self.number}"

    @property
    def addresses(self) -> tuple[str, str]:
        """Its addresses in the common network, IPv4 and IPv6."""
        return (self.address, f"fd77::{self.number}")

    @property
    def link_address(self) -> str:
        """The hardware address of its interface."""
        shown = ("ip", "-n", self.namespace, "-o", "link", "show", "eth0")
        told = subprocess.run(shown, capture_output=True, text=True, check=True).stdout
        return told.partition("link/ether ")[2].split()[0]

    @property
    def prefix(self) -> tuple[str, ...]:
        """What to put before a command line to run it there. The process id stays the same."""
        return (*ENTER, self.namespace)

    def unplug(self) -> None:
        """Pull the cable out of the switch."""
        self.network.switch_port(self.number, "down")

    def plug_in(self) -> None:
        """Put the cable back."""
        self.network.switch_port(self.number, "up")

    def shape(self, *discipline: str) -> None:
        """Have a queueing discipline, as `tc qdisc` takes it, at both ends of the cable."""
        for there in (self.namespace, f"{self.network.name}-sw"):
            interface = "eth0" if there == self.namespace else f"p{self.number}"
            _run("tc", "-n", there, "qdisc", "replace", "dev", interface, "root", *discipline)

    def unshape(self) -> None:
        """Have none any more."""
        for there in (self.namespace, f"{self.network.name}-sw"):
            interface = "eth0" if there == self.namespace else f"p{self.number}"
            _run("tc", "-n", there, "qdisc", "del", "dev", interface, "root")

    def drop_tcp(self, port: int) -> None:
        """Let what comes to a port vanish, as firewalls do. Links from here to others still work.

        There may be no packet filter, so routing does it, before it looks for local addresses.
        """
        for family in ("-4", "-6"):
            rules = ("-n", self.namespace, family, "rule")
            _ip(*rules, *f"add pref 10 iif eth0 ipproto tcp dport {port} blackhole".split())
            _ip(*rules, "add", "pref", "100", "lookup", "local")
            _ip(*rules, "del", "pref", "0")

    def set_mtu(self, size_bytes: int) -> None:
        """Set the size of the largest packets."""
        _ip("-n", self.namespace, *f"link set eth0 mtu {size_bytes}".split())

    def add_bridge(self, name: str, address: str) -> None:
        """Make a bridge that is up, as container engines do, with something plugged into it."""
        port, end = f"{name[:8]}p", f"{name[:8]}e"
        for line in (
            f"link add {name} type bridge",
            f"link add {port} type veth peer name {end}",
            f"link set {port} master {name} up",
            f"link set {end} up",
            f"addr add {address} dev {name}",
            f"link set {name} up",
        ):
            _ip("-n", self.namespace, *line.split())


class Network:
    """A switch and hosts. Names carry the process id, so that test runs do not meet."""

    def __init__(self, n_hosts: int, name: str = "") -> None:
        self.name = name or f"shardnet-{os.getpid()}"
        self.hosts = [Host(network=self, number=number) for number in range(1, n_hosts + 1)]

    @property
    def _switch(self) -> str:
        return f"{self.name}-sw"

    def up(self) -> None:
        """Make everything."""
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, *["link", "add", "br0", "type", "bridge", "forward_delay", "0"])
        _ip("-n", self._switch, *["link", "set", "br0", "up"])
        for host in self.hosts:
            there = ("-n", host.namespace)
            port = f"p{host.number}"
            _ip("netns", "add", host.namespace)
            _ip(*there, *["link", "set", "lo", "up"])
            _ip(*f"link add eth0 netns {host.namespace} type veth".split(), *("peer", "name", port),
                *("netns", self._switch))  # fmt: skip
            _ip("-n", self._switch, *f"link set {port} master br0 up".split())
            _ip(*there, *f"addr add {host.address}/24 brd + dev eth0".split())
            _ip(*there, *f"addr add {host.addresses[1]}/64 dev eth0 nodad".split())
            _ip(*there, *["link", "set", "eth0", "up"])

    def down(self) -> None:
        """Remove everything that was made."""
        for namespace in (*(host.namespace for host in self.hosts), self._switch):
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)

    def lose_multicast(self) -> None:
        """Have the switch pass multicast to nobody, as some that mean to be clever do."""
        for host in self.hosts:
            port = f"p{host.number}"
            _ip("-n", self._switch, *f"link set {port} type bridge_slave mcast_flood off".split())

    def switch_port(self, number: int, state: str) -> None:
        """Set the switch's end of a host's cable up or down."""
        _ip("-n", self._switch, "link", "set", f"p{number}", state)


def namespace_of(prefix: Sequence[str]) -> str:
    """The namespace that a `Host.prefix` enters; empty for a prefix that does anything else."""
    *enter, namespace = prefix or ("",)
    return namespace if tuple(enter) == ENTER else ""


@contextmanager
def open_network(n_hosts: int) -> Iterator[Network]:
    """Give a network of hosts. Raises NotPermittedError where that cannot be."""
    if shutil.which("ip") is None:
        raise NotPermittedError("there is no `ip` command here")
    network = Network(n_hosts)
    try:
        network.up()
        yield network
    finally:
        network.down()


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotPermittedError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
