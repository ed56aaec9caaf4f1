"""Findings about pairs of nodes: is there a link, both ways, where, how good, and if not, why not.

Pure. Each pair is seen twice, from either end, as far as both could be asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from ipaddress import ip_address, ip_network
from types import MappingProxyType

from shardnet.cluster.diagnosis.facts import Facts, Finding, Severity, Topic, age, problem
from shardnet.cluster.peers.peer_table import MDNS
from shardnet.transport.address import host_of
from shardnet.wire.messages.diagnostics import (
    AddressView,
    InterfaceAddress,
    NodeReport,
    PeerView,
    Seen,
)
from shardnet.wire.messages.membership import ReportReply

SETTLED_S = 6.0
"""Seconds after the start of two nodes by which each should have seen the other's record."""
UNHEARD_S = 70.0
"""Seconds in which every node announces itself by multicast twice."""
SLOW_S = 0.020
"""A round trip above this is no wired network, and costs a ring dearly."""

REMEDIES: Mapping[Seen, str] = MappingProxyType(
    {
        "answers": "",
        "refused": (
            "start `shardnet node` there, and see that it listens on that address (--host) and port"
        ),
        "dropped": "open its TCP port in the firewall of that machine and of the network between",
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
"""The remedy for each way in which an address does not answer."""

TOPICS: Mapping[Seen, Topic] = MappingProxyType({"other key": "key", "other version": "version"})
"""The topic of an address that does not answer, if it is not the port."""

_WORDS: Mapping[Seen, str] = MappingProxyType(
    {
        "answers": "answers",
        "refused": "the connection is refused: nothing listens there",
        "dropped": "no answer at all: a firewall drops it, or the machine is off",
        "hangs": "the connection is accepted and then nothing comes",
        "unreachable": "it cannot be reached",
        "other key": "it holds another cluster key, or none",
        "other version": "it speaks another version of the protocol",
        "other node": "another node answers there",
        "failed": "no node of shardnet answers there",
        "not tried": "not tried",
    }
)
_WORST: tuple[Seen, ...] = (
    "other key",
    "other version",
    "hangs",
    "dropped",
    "refused",
    "unreachable",
    "failed",
)
"""Results of probes, the one that best explains why a node is not reached first."""


def remedy_for(view: AddressView) -> str:
    """Return the remedy for an address that does not answer, "" if none is known.

    For a wrong key it comes with the error, which knows the side that lacks it.
    """
    if view.seen == "other key" and view.remedy:
        return view.remedy
    return REMEDIES[view.seen] or view.remedy or ""


def pair_findings(facts: Facts) -> Iterator[Finding]:
    """Report how each node that was asked sees each other one."""
    for reply in facts.replies:
        if reply.report is not None:
            for view in reply.report.peers:
                yield from _view(facts, reply, reply.report, view)
    yield from _mtus(facts)


def key_finding(where: str, viewer: str, *, theirs: str, ours: str) -> Finding:
    """Report which node has a wrong key.

    `where` names the nodes, `viewer` the one that was asked; `theirs` and `ours` are the
    fingerprints of the keys of the other node and of the viewer, "" without one.
    """
    if not theirs:
        what, remedy = "it has no cluster key", "run `shardnet key join` there and restart its node"
    elif not ours:
        what = f"it holds the key of cluster {theirs}, and {viewer} has none"
        remedy = f"run `shardnet key join` on {viewer} and start its node again"
    else:
        what = f"it holds the key of cluster {theirs}, and {viewer} that of {ours}"
        remedy = f"if it belongs here: {REMEDIES['other key']}"
    return problem("key", where, what, remedy)


def seconds_apart(ahead_s: float) -> str:
    """Format the difference of two clocks."""
    return f"{abs(ahead_s):.1f} s {'ahead of' if ahead_s > 0 else 'behind'}"


def _view(
    facts: Facts, reply: ReportReply, report: NodeReport, view: PeerView
) -> Iterator[Finding]:
    viewer = facts.label(reply.node)
    where = f"{viewer} → {facts.label(view.node, view.name)}"
    if view.refusal:
        yield _refusal(where, viewer, report, view)
    elif view.is_linked:
        yield _link(where, view)
        yield from _ports(where, view)
        yield from _addresses(where, view)
        yield from _multicast(facts, where, report, view)
    else:
        yield _no_link(where, view)


def _refusal(where: str, viewer: str, report: NodeReport, view: PeerView) -> Finding:
    records = [record for record in report.multicast.records if record.node == view.node]
    for record in records:
        if record.protocol == report.protocol and record.cluster != report.cluster:
            return key_finding(where, viewer, theirs=record.cluster, ours=report.cluster)
    other_version = any(record.protocol != report.protocol for record in records)
    return problem("version" if other_version else "link", where, view.refusal)


def _link(where: str, view: PeerView) -> Finding:
    """Report a link and its quality."""
    words = f"linked at {view.address}" if view.address else "linked, by the other one's doing"
    if view.rtt_s is not None:
        words += f", round trip {view.rtt_s * 1e3:.2g} ms"
    if view.bytes_per_s is not None:
        megabytes = view.bytes_per_s / 1e6
        words += f", about {megabytes:.0f} MB/s" if megabytes >= 10 else f", {megabytes:.2g} MB/s"
    if view.rtt_s is not None and view.rtt_s > SLOW_S:
        return Finding(
            severity=Severity.INFO,
            topic="link",
            where=where,
            what=words,
            remedy="every token waits for it at each hop: use a cable, or a nearer node",
        )
    return Finding(topic="link", where=where, what=words)


def _ports(where: str, view: PeerView) -> Iterator[Finding]:
    """Report a linked node that answers at no address from this side; a ring dials both ways."""
    tried = [address for address in view.addresses if address.seen != "not tried"]
    if tried and not any(address.seen == "answers" for address in tried):
        worst = _worst(tried)
        yield problem(
            "port",
            where,
            f"linked, but not to be reached from this side: {_each(tried)}",
            remedy_for(worst),
        )


def _addresses(where: str, view: PeerView) -> Iterator[Finding]:
    """Report why the other addresses are not used."""
    others = [address for address in view.addresses if address.address != view.address]
    if not others or not view.address:
        return
    reasons = "; ".join(f"not {address.address}: {_why(address)}" for address in others)
    yield Finding(
        severity=Severity.OK
        if all(address.seen == "answers" for address in others)
        else Severity.INFO,
        topic="address",
        where=where,
        what=f"uses {view.address}; {reasons}",
    )


def _why(address: AddressView) -> str:
    if address.seen == "answers":
        rtt = "" if address.rtt_s is None else f" in {address.rtt_s * 1e3:.2g} ms"
        return f"answers{rtt}, and is not better"
    if address.seen == "failed" and address.why:  # as it was remembered
        return address.why.removeprefix(f"{address.address}: ")
    return _WORDS[address.seen]


def _no_link(where: str, view: PeerView) -> Finding:
    if not view.told_by:
        return Finding(
            severity=Severity.INFO, topic="link", where=where, what="it was here and has left"
        )
    seen = {address.seen for address in view.addresses}
    if "answers" in seen:
        return Finding(
            severity=Severity.INFO,
            topic="link",
            where=where,
            what="it answers and is not linked yet; run this again in some seconds",
        )
    tried = [address for address in view.addresses if address.seen != "not tried"]
    if not tried or seen <= {"other node", "not tried"}:
        others = f": {_each(tried)}" if tried else ""
        return Finding(
            severity=Severity.INFO,
            topic="link",
            where=where,
            what=f"only its last report is left{others}",
        )
    worst = _worst(tried)
    topic = TOPICS.get(worst.seen, "port")
    link = "no link, though mDNS shows it" if MDNS in view.told_by else "no link"
    return problem(topic, where, f"{link}: {_each(tried)}", remedy_for(worst))


def _worst(addresses: list[AddressView]) -> AddressView:
    return min(addresses, key=lambda a: _WORST.index(a.seen) if a.seen in _WORST else len(_WORST))


def _each(addresses: list[AddressView]) -> str:
    return ", ".join(f"{address.address} ({_why(address)})" for address in addresses)


def _multicast(facts: Facts, where: str, report: NodeReport, view: PeerView) -> Iterator[Finding]:
    """Report whether a linked node was seen by multicast, and on which interfaces."""
    if report.multicast.state != "on":
        return
    heard = {h.interface: h.age_s for h in report.multicast.heard if h.node == view.node}
    if heard:
        words = ", ".join(f"{name} {age(age_s)} ago" for name, age_s in sorted(heard.items()))
        yield Finding(topic="multicast", where=where, what=f"heard by multicast on {words}")
        return
    other = next((r.report for r in facts.replies if r.node == view.node and r.report), None)
    together_s = min(report.uptime_s, other.uptime_s if other is not None else report.uptime_s)
    listened_s = min(together_s, report.multicast.listening_s)
    has_record = any(record.node == view.node for record in report.multicast.records)
    if other is not None and other.multicast.state == "off":
        yield Finding(
            severity=Severity.INFO,
            topic="multicast",
            where=where,
            what="linked without mDNS, which is switched off there",
        )
    elif has_record and (not report.multicast.listening or listened_s < UNHEARD_S):
        yield Finding(topic="multicast", where=where, what="found by mDNS")
    else:
        names = ", ".join(report.multicast.listening or report.multicast.hosts)
        what = f"linked, but never heard by multicast on {names}"
        if together_s < SETTLED_S:
            yield Finding(
                severity=Severity.INFO,
                topic="multicast",
                where=where,
                what=f"{what}; both have been up for {age(together_s)} only, try again later",
            )
        else:
            yield problem(
                "multicast",
                where,
                what,
                "let UDP port 5353 and multicast pass (client isolation of a WLAN, IGMP snooping "
                "of a switch, a firewall), or name nodes with --peer and give --no-mdns",
            )


# --- both ends ----------------------------------------------------------------------------------


def _mtus(facts: Facts) -> Iterator[Finding]:
    """Compare the largest packets of both ends of each link, once."""
    reports = {reply.node: reply.report for reply in facts.replies if reply.report is not None}
    compared: set[frozenset[str]] = set()
    for node, report in reports.items():
        for view in report.peers:
            pair, other = frozenset((node, view.node)), reports.get(view.node)
            if other is None or not view.is_linked or pair in compared:
                continue
            ends = _ends(report, other, view.address)
            if ends is None:  # it is the other one that has found the way
                continue
            compared.add(pair)
            near, far = ends
            if near.mtu and far.mtu and near.mtu != far.mtu:
                yield Finding(
                    severity=Severity.INFO,
                    topic="mtu",
                    where=f"{facts.label(node)} ↔ {facts.label(view.node)}",
                    what=(
                        f"largest packets differ: {near.mtu} bytes on {near.interface} and "
                        f"{far.mtu} bytes on {far.interface}"
                    ),
                    remedy="if large transfers stall, set both to the smaller one",
                )


def _ends(
    ours: NodeReport, theirs: NodeReport, address: str
) -> tuple[InterfaceAddress, InterfaceAddress] | None:
    """Return the addresses at both ends of the way to `address`, None if unknown."""
    host = host_of(address)
    far = next((a for a in theirs.interfaces if a.host == host), None)
    if far is None:
        return None
    near = next((a for a in ours.interfaces if _is_in_network(a.host, far)), None)
    return (near, far) if near is not None else None


def _is_in_network(host: str, of: InterfaceAddress) -> bool:
    """Return whether a host is in the network of an address; host names are in none."""
    try:
        network = ip_network(f"{of.host.partition('%')[0]}/{of.prefix}", strict=False)
        return ip_address(host.partition("%")[0]) in network
    except ValueError:
        return False
