"""Counts what the links of a node carry, by the name of the peer and the link's purpose.

Knows names, purposes, bytes, and what Linux tells of a TCP connection. Must not know frames.
"""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from shardnet.types import NodeId
from shardnet.wire.messages.diagnostics import LinkTraffic
from shardnet.wire.messages.handshake import Hello, PeerRole, Purpose

MAX_COUNTED: Final = 256
"""Most peers and purposes; those whose links have ended longest ago are forgotten."""

_TCP_INFO_BYTES: Final = 104
_RTT_AT: Final = 68
_RESENT_AT: Final = 100
"""Offsets in struct tcp_info of linux/tcp.h, which grows at its end only."""


@dataclass(slots=True, kw_only=True, eq=False)
class Meter:
    """The counts of one link. `tcp` returns its socket, None where it has none."""

    tcp: Callable[[], Any]
    sent_bytes: int = 0
    received_bytes: int = 0


@dataclass(slots=True, kw_only=True)
class Carried:
    """What the links of one purpose to one peer have carried; `live` is not in the sums."""

    n_failed: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    n_resent: int | None = None
    live: list[Meter] = field(default_factory=list)


class Traffic:
    """What all links between one node and others have carried. Links of clients do not count."""

    def __init__(self, node: NodeId) -> None:
        self._node = node
        self._carried: dict[tuple[str, Purpose], Carried] = {}

    def up(self, peer: Hello, meter: Meter) -> None:
        """Count a link from now on."""
        if peer.role is not PeerRole.NODE or peer.node == self._node:
            return
        key = (peer.name, peer.purpose)
        carried = self._carried.pop(key, None) or Carried()
        self._carried[key] = carried
        carried.live.append(meter)
        for old in [key for key, each in self._carried.items() if not each.live]:
            if len(self._carried) > MAX_COUNTED:
                del self._carried[old]

    def down(self, peer: Hello, meter: Meter, *, failed: bool) -> None:
        """Note that a link has ended, and whether something broke it."""
        carried = self._carried.get((peer.name, peer.purpose))
        if carried is None or meter not in carried.live:
            return
        carried.live.remove(meter)
        carried.n_failed += failed
        carried.sent_bytes += meter.sent_bytes
        carried.received_bytes += meter.received_bytes
        _, n_resent = tcp_figures(meter.tcp())
        if n_resent is not None:
            carried.n_resent = (carried.n_resent or 0) + n_resent

    def counts(self) -> list[LinkTraffic]:
        """Return what was carried, by name and purpose."""
        return [
            _counts(name, purpose, self._carried[name, purpose])
            for name, purpose in sorted(self._carried, key=lambda key: (key[0], key[1].value))
        ]


def _counts(name: str, purpose: Purpose, carried: Carried) -> LinkTraffic:
    figures = [tcp_figures(meter.tcp()) for meter in carried.live]
    resent = [n for n in (carried.n_resent, *(n for _, n in figures)) if n is not None]
    return LinkTraffic(
        name=name,
        purpose=purpose.value,
        n_links=len(carried.live),
        n_failed=carried.n_failed,
        sent_bytes=carried.sent_bytes + sum(meter.sent_bytes for meter in carried.live),
        received_bytes=carried.received_bytes + sum(meter.received_bytes for meter in carried.live),
        round_trip_us=max((us for us, _ in figures if us is not None), default=None),
        n_resent=sum(resent) if resent else None,
    )


def tcp_figures(sock: Any) -> tuple[int | None, int | None]:
    """Return the smoothed round trip of a TCP connection (us) and how many segments were resent.

    None each where the system does not say, as outside of Linux, or the connection is gone.
    """
    if sock is None or not sys.platform.startswith("linux"):
        return None, None
    try:
        raw = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        (round_trip_us,) = struct.unpack_from("=I", raw, _RTT_AT)
        (n_resent,) = struct.unpack_from("=I", raw, _RESENT_AT)
    except (OSError, struct.error, AttributeError):
        return None, None
    return round_trip_us or None, n_resent
