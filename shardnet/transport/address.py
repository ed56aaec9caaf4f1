"""Addresses as people write them, `host:port`: written and read.

Knows brackets around IPv6 hosts, and IPv4 hosts that an IPv6 socket has seen. Must not know names
or what an address is good for.
"""

from __future__ import annotations

from shardnet.errors import UsageError


def format_address(host: str, port: int) -> str:
    """Write `host:port`, an IPv6 host in brackets, an IPv4 host that came by IPv6 as IPv4."""
    if host.startswith("::ffff:") and "." in host:
        host = host.removeprefix("::ffff:")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Read `host:port`, an IPv6 host in brackets. Raises UsageError when it is not that."""
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    is_port = len(port) <= 5 and port.isdecimal() and 0 < int(port) < 65536
    if not (colon and is_port and _is_host(host)):
        raise UsageError(
            f"'{address}' is not HOST:PORT", remedy="write for example 192.168.1.12:7433"
        )
    return host, int(port)


def _is_host(host: str) -> bool:
    """Say whether the resolver takes `host`: it raises UnicodeError for one it cannot encode."""
    try:
        return bool(host.encode("idna"))
    except UnicodeError:
        return False


def host_of(address: str) -> str:
    """Return the host of an address; one of IPv4 that an IPv6 socket has seen as itself."""
    return address.rpartition(":")[0].strip("[]").removeprefix("::ffff:")
