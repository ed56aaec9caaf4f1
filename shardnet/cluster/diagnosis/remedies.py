"""What to do about an address that does not answer, and about ports that are closed.

Pure. Knows the ports that nodes use, and how the usual firewalls open them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from shardnet.cluster.diagnosis.facts import Topic
from shardnet.errors import UsageError
from shardnet.transport.address import split_address
from shardnet.wire.messages.diagnostics import AddressView, Seen

NODE_PORT = 7433
"""The TCP port of nodes without --port."""
MDNS_PORT = 5353

_REMEDIES: Mapping[Seen, str] = MappingProxyType(
    {
        "answers": "",
        "refused": (
            "start `shardnet node` there, and see that it listens on that address (--host) and port"
        ),
        "hangs": "read that node's output, or restart it: it may be frozen",
        "unreachable": "check address, cable and routes between the two machines",
        "other key": (
            "run `shardnet key show` on one of the two machines and `shardnet key join` with that "
            "key on the other, then start its node again"
        ),
        "other version": "install the same version of shardnet on both",
        "other node": "",
        "failed": "see whether a node of shardnet listens there",
        "not tried": "",
    }
)

SHARE_KEY = _REMEDIES["other key"]

TOPICS: Mapping[Seen, Topic] = MappingProxyType({"other key": "key", "other version": "version"})
"""The topic of an address that does not answer, if it is not the port."""


def remedy_for(view: AddressView) -> str:
    """Return the remedy for an address that does not answer, "" if none is known.

    For a wrong key it comes with the error, which knows the side that lacks it.
    """
    if view.seen == "other key" and view.remedy:
        return view.remedy
    if view.seen == "dropped":
        port = _port(view.address)
        return (
            f"{open_port(port, 'tcp')} in the firewall of that machine, and in that of the network "
            "between"
        )
    return _REMEDIES[view.seen] or view.remedy or ""


def open_port(port: int, protocol: str) -> str:
    """Say how a port is opened: `protocol` is tcp or udp."""
    rule = f"{port}/{protocol}"
    return (
        f"open {protocol.upper()} port {port} (`sudo ufw allow {rule}`, or "
        f"`sudo firewall-cmd --add-port={rule}`)"
    )


def _port(address: str) -> int:
    try:
        return split_address(address)[1]
    except UsageError:
        return NODE_PORT
