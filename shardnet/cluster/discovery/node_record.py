"""The mDNS record of a node: written, read and validated.

Records are public and unauthenticated: their size is bounded, and they only mean that a node may
answer there. Must not know sockets or when records come.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Final

from zeroconf import ServiceInfo
from zeroconf.asyncio import AsyncServiceInfo

from shardnet.cluster.machine.addresses import format_addresses
from shardnet.types import NodeId

SERVICE_TYPE: Final = "_shardnet._tcp.local."
MAX_HOSTS: Final = 16

_HOST_TTL_S: Final = 120
_RECORD_TTL_S: Final = 1125
"""The shortest time for which python-zeroconf stores a PTR record."""

_ID: Final = re.compile(r"[0-9A-Za-z_-]{1,63}")
_FINGERPRINT: Final = re.compile(r"[0-9a-f]{0,64}")
_VERSION: Final = re.compile(r"[0-9A-Za-z.+-]{1,32}")
_MAX_NAME_BYTES: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """The description of a node in its record; of another node it is unauthenticated.

    `fingerprint` is that of the cluster key, "" without one; `version` that of shardnet, `protocol`
    that of the wire protocol; `host_id` is equal for nodes on one machine; `hosts` are best first.
    """

    node: NodeId
    name: str
    version: str
    protocol: int
    fingerprint: str
    host_id: str
    hosts: tuple[str, ...]
    port: int

    @property
    def addresses(self) -> tuple[str, ...]:
        """All hosts with the port, host:port."""
        return format_addresses(self.hosts, self.port)


class UnusableRecordError(ValueError):
    """A malformed or useless record; the message says why. It becomes a line in the log."""


def to_service(record: NodeRecord) -> AsyncServiceInfo:
    """Write a node's record as an mDNS service."""
    return AsyncServiceInfo(
        SERVICE_TYPE,
        f"{record.node}.{SERVICE_TYPE}",
        port=record.port,
        parsed_addresses=[host.partition("%")[0] for host in record.hosts[:MAX_HOSTS]],
        server=f"{record.node}.local.",
        properties={
            "id": record.node,
            "name": _short(record.name),
            "version": record.version,
            "protocol": str(record.protocol),
            "cluster": record.fingerprint,
            "host": _short(record.host_id),
        },
        host_ttl=_HOST_TTL_S,
        other_ttl=_RECORD_TTL_S,
    )


def from_service(service: ServiceInfo, own_host_id: str) -> NodeRecord:
    """Read a node's record. Raises UnusableRecordError if it is not well formed.

    Loopback addresses count only for nodes with `own_host_id`, those of this machine.
    """
    properties = service.properties
    node = _text(properties, b"id", _ID)
    if service.name != f"{node}.{SERVICE_TYPE}":
        raise UnusableRecordError("its id is not its name")
    host_id = _text(properties, b"host")
    hosts = tuple(
        host
        for host in dict.fromkeys(service.parsed_scoped_addresses())
        if _is_believable(host, same_machine=host_id == own_host_id)
    )[:MAX_HOSTS]
    if not hosts:
        raise UnusableRecordError("it has no usable address")
    if not service.port:
        raise UnusableRecordError("it has no port")
    protocol = _text(properties, b"protocol", re.compile(r"\d{1,5}"))
    return NodeRecord(
        node=NodeId(node),
        name=_text(properties, b"name"),
        version=_text(properties, b"version", _VERSION),
        protocol=int(protocol),
        fingerprint=_text(properties, b"cluster", _FINGERPRINT),
        host_id=host_id,
        hosts=hosts,
        port=service.port,
    )


def _text(
    properties: dict[bytes, bytes | None], key: bytes, pattern: re.Pattern[str] | None = None
) -> str:
    raw = properties.get(key)
    if raw is None:
        raise UnusableRecordError(f"it has no {key.decode()}")
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        raise UnusableRecordError(f"its {key.decode()} is no text") from None
    if not text.isprintable() or (pattern is not None and not pattern.fullmatch(text)):
        raise UnusableRecordError(f"its {key.decode()} is malformed")
    return text


def _short(text: str) -> str:
    """Remove unprintable characters, and cut to the size of a TXT entry."""
    printable = "".join(c for c in text if c.isprintable())
    return printable.encode(errors="replace")[:_MAX_NAME_BYTES].decode(errors="ignore")


def _is_believable(host: str, *, same_machine: bool) -> bool:
    ip = ip_address(host)
    if ip.is_loopback:
        return same_machine
    return not (ip.is_multicast or ip.is_unspecified or ip.is_reserved)
