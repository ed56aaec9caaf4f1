"""Reports of nodes that are well, to be broken one by one."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from shardnet.cluster.diagnosis.diagnosis import diagnose
from shardnet.cluster.diagnosis.facts import Facts, Finding, KeyFacts, Severity
from shardnet.wire.messages.diagnostics import (
    AddressView,
    InterfaceAddress,
    MdnsRecord,
    MulticastHeard,
    MulticastState,
    NodeReport,
    PeerView,
)
from shardnet.wire.messages.membership import NodeInfo, ReportReply

CLUSTER = "a0b425463aa964af"
GIB = 2**30
HOSTS = {"anna": "10.0.0.1", "bert": "10.0.0.2", "cleo": "10.0.0.3"}
NO_KEY = KeyFacts(path="/home/key")
OK_KEY = KeyFacts(path="/home/key", fingerprint=CLUSTER)


def address_of(name: str) -> str:
    return f"{HOSTS[name]}:7433"


def info(name: str, **changes: Any) -> NodeInfo:
    values: dict[str, Any] = {
        "node": f"{name}-id",
        "name": name,
        "address": address_of(name),
        "version": "0.2.0",
        "device": "cpu",
        "memory_bytes": 8 * GIB,
        "memory_free_bytes": 8 * GIB,
        "cores": 4,
        "threads": 4,
        "dtypes": ["bfloat16", "float32"],
        "host_id": f"host-of-{name}",
    }
    return NodeInfo(**values | changes)


def view(name: str, **changes: Any) -> PeerView:
    """A peer that is linked and answers."""
    address = address_of(name)
    values: dict[str, Any] = {
        "node": f"{name}-id",
        "name": name,
        "version": "0.2.0",
        "is_linked": True,
        "address": address,
        "rtt_s": 0.0004,
        "told_by": ["mdns"],
        "refusal": "",
        "addresses": [AddressView(address=address, seen="answers", rtt_s=0.0004)],
    }
    return PeerView(**values | changes)


def unlinked(name: str, *addresses: AddressView, **changes: Any) -> PeerView:
    """A peer that is not linked, with what came of its addresses."""
    values = {"is_linked": False, "address": "", "rtt_s": None, "addresses": list(addresses)}
    return view(name, **values | changes)


def heard(*names: str, **changes: Any) -> MulticastState:
    """A node that speaks on eth0, has listened for long and has heard these."""
    values: dict[str, Any] = {
        "state": "on",
        "hosts": ["10.0.0.1"],
        "listening": ["eth0"],
        "listening_s": 1000.0,
        "heard": [MulticastHeard(node=f"{n}-id", interface="eth0", age_s=3.0) for n in names],
        "records": [record(name) for name in names],
    }
    return MulticastState(**values | changes)


def record(name: str, **changes: Any) -> MdnsRecord:
    values: dict[str, Any] = {
        "node": f"{name}-id",
        "name": name,
        "version": "0.2.0",
        "protocol": 1,
        "cluster": CLUSTER,
        "address": address_of(name),
    }
    return MdnsRecord(**values | changes)


def interface(host: str, **changes: Any) -> InterfaceAddress:
    values: dict[str, Any] = {
        "interface": "eth0",
        "host": host,
        "prefix": 24,
        "verdict": "on a real network",
        "mtu": 1500,
        "speed_mbit": 1000,
        "is_told": True,
    }
    return InterfaceAddress(**values | changes)


def reply(name: str, *peers: PeerView, **changes: Any) -> ReportReply:
    """What a node that is well reports, with these peers."""
    report: dict[str, Any] = {
        "cluster": CLUSTER,
        "protocol": 1,
        "uptime_s": 3600.0,
        "received_at": 1e9,
        "sent_at": 1e9,
        "interfaces": [interface(HOSTS[name])],
        "multicast": heard(*(peer.name for peer in peers if peer.is_linked)),
        "peers": list(peers),
        "unreached": [],
        "refused": [],
        "disk_free_bytes": 100 * GIB,
    }
    return ReportReply(
        request=1,
        node=f"{name}-id",
        name=name,
        info=info(name),
        report=NodeReport(**report | changes),
        clock_ahead_s=None if name == "anna" else 0.001,
    )


def facts(*replies: ReportReply, **changes: Any) -> Facts:
    """Facts of this machine, where anna runs; without replies two nodes that are well."""
    values: dict[str, Any] = {
        "key": OK_KEY,
        "software": "0.2.0",
        "protocol": 1,
        "asked": "anna (10.0.0.1:7433)",
        "asked_node": "anna-id",
        "replies": replies or (reply("anna", view("bert")), reply("bert", view("anna"))),
    }
    return Facts(**values | changes)


def with_info(one: ReportReply, **changes: Any) -> ReportReply:
    """The same reply with other words of the node about itself."""
    assert one.info is not None
    return replace(one, info=replace(one.info, **changes))


def findings(of: Facts) -> set[tuple[str, str, str]]:
    """What there is to say beyond what is fine: severity, topic, where."""
    return {
        (finding.severity.value, finding.topic, finding.where)
        for finding in diagnose(of)
        if finding.severity is not Severity.OK
    }


def the_one(of: Facts, topic: str, severity: Severity = Severity.PROBLEM) -> Finding:
    """The only finding of this severity and topic."""
    [finding] = [f for f in diagnose(of) if f.topic == topic and f.severity is severity]
    return finding
