"""Findings about mDNS: who hears whom by multicast, and why a node knows no other one.

Pure. A node that does not even hear its own announcements is behind a firewall of its own; one that
hears other machines, but no node, is not.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardnet.cluster.diagnosis.facts import (
    HERE,
    MDNS_PORT,
    Facts,
    Finding,
    age,
    at,
    listed,
    open_port,
)
from shardnet.cluster.machine.addresses import NODE_PORT, is_in_tailnet, is_loopback
from shardnet.transport.address import host_of
from shardnet.wire.messages.diagnostics import MdnsRecord, NodeReport, PeerView
from shardnet.wire.messages.membership import ReportReply

SETTLED_S = 6.0
"""Seconds after the start of two nodes by which each should have seen the other's record."""
UNHEARD_S = 70.0
"""Seconds in which every node announces itself by multicast twice."""

_OPEN = open_port(MDNS_PORT, "udp")
_START = "start `shardnet node` on another machine; if one runs"
_PEER = f"name it with --peer HOST:{NODE_PORT}"
_IN_TAILNET = "start both nodes with --tailnet: no multicast passes in a tailnet"
_SHARE = "run `shardnet key new` on the first machine and `shardnet key join` on others"
_KEPT_APART = "the Wi-Fi or the switch keeps machines apart (client isolation, IGMP snooping)"


def multicast_findings(facts: Facts) -> Iterator[Finding]:
    """Report for every node how far its mDNS works, and once what keeps nodes from each other."""
    for reply in facts.replies:
        if reply.report is not None:
            yield from _state(facts.label(reply.node), reply.report)
    yield from _lonely(facts)
    yield from _heard(facts)
    yield from _found(facts)


def _state(where: str, report: NodeReport) -> Iterator[Finding]:
    multicast = report.multicast
    match multicast.state:
        case "off":
            yield at("multicast", where).hint(
                "it neither announces itself nor looks for others by mDNS",
                "start it without --no-mdns if your network passes multicast",
            )
        case "failed":
            yield at("multicast", where).problem(
                f"mDNS does not work there: {multicast.failure or 'it has just begun'}",
                "check its network, or name other nodes with --peer and give --no-mdns",
            )
        case "on":
            yield at("multicast", where).good(
                f"announces itself and looks for others on {', '.join(multicast.hosts)}"
            )


# --- a node that knows nobody


def _lonely(facts: Facts) -> Iterator[Finding]:
    """Report why the node that was asked knows no other one, as far as that shows."""
    reply, where = facts.asked_reply, facts.asked
    if reply is None or reply.report is None:
        return
    report = reply.report
    is_local = all(is_loopback(a.host) for a in report.interfaces if a.is_told)
    if not report.peers and not report.cluster and is_local:
        if not facts.others_found:  # else the key is the finding
            yield _alone(where, "without a cluster key it serves this machine alone", _SHARE)
    elif not report.peers and report.uptime_s < SETTLED_S:
        yield _alone(where, f"it was started {age(report.uptime_s)} ago", "try again in a moment")
    elif facts.unknown:
        others = listed(f"{each.name} ({each.address})" for each in facts.unknown)
        yield at("multicast", where).problem(
            f"it does not find {others} by mDNS, which answers: {_cause(reply, report)}",
            _IN_TAILNET
            if all(is_in_tailnet(host_of(each.address)) for each in facts.unknown)
            else f"{_OPEN} on both machines, or start one of the nodes with --peer and the address "
            "of the other",
        )
    elif not report.peers and report.multicast.state == "off":
        named = listed(f"{record.name} ({record.address})" for record in facts.others_found)
        why = "it was started with --no-mdns and no --peer of it answers"
        yield _alone(where, f"{why}; mDNS shows {named}" if named else why, _PEER)
    elif not report.peers and report.multicast.state == "on":
        yield from _unheard_of(reply, report, where)


def _unheard_of(reply: ReportReply, report: NodeReport, where: str) -> Iterator[Finding]:
    names = _interfaces(report)
    if _is_deaf(reply, report):
        yield at("multicast", where).problem(
            f"it knows no other node: {_cause(reply, report)}", _OPEN
        )
    elif report.multicast.others:
        yield _alone(
            where,
            f"{_cause(reply, report)}, but no other node",
            f"{_START}, {_OPEN} in the firewall there, or {_PEER}",
        )
    else:
        yield _alone(
            where,
            f"{_cause(reply, report)} in {age(report.multicast.listening_s)} on {names}",
            f"{_START}, {_OPEN} on both, or {_KEPT_APART}: {_PEER}",
        )


def _alone(where: str, why: str, remedy: str) -> Finding:
    return at("link", where).hint(f"it knows no other node: {why}", remedy)


def _cause(reply: ReportReply, report: NodeReport) -> str:
    """Say what the multicast that a node hears shows."""
    names = _interfaces(report)
    if report.multicast.state != "on":
        return "it does not use mDNS"
    if _is_deaf(reply, report):
        return (
            f"it does not even hear itself by multicast on {names}, so a firewall of that machine "
            f"drops UDP port {MDNS_PORT}"
        )
    if report.multicast.others:
        return f"other machines are heard by multicast on {', '.join(report.multicast.others)}"
    return "no other machine is heard by multicast"


def _is_deaf(reply: ReportReply, report: NodeReport) -> bool:
    """Whether a node has had time to hear its own announcements, and has not."""
    multicast = report.multicast
    return (
        multicast.state == "on"
        and bool(multicast.listening)
        and multicast.listening_s > SETTLED_S
        and not any(h.node == reply.node and h.age_s < UNHEARD_S for h in multicast.heard)
    )


def _interfaces(report: NodeReport) -> str:
    return ", ".join(report.multicast.listening or report.multicast.hosts)


# --- nodes that are linked


def _heard(facts: Facts) -> Iterator[Finding]:
    """Report which linked nodes were heard by multicast, and all that were not in one finding.

    That is no problem: they know each other. Others might not be found.
    """
    unheard: dict[str, list[str]] = {}
    too_early = True
    for reply, report, view in facts.views:
        if report.multicast.state != "on" or not view.is_linked or view.refusal:
            continue
        viewer, seen = facts.label(reply.node), facts.label(view.node, view.name)
        if found := _heard_of(facts, f"{viewer} → {seen}", report, view):
            yield found
        else:
            unheard.setdefault(f"{viewer} ({_interfaces(report)})", []).append(seen)
            too_early = too_early and _together_s(facts, report, view) < SETTLED_S
    if not unheard:
        return
    pairs = "; ".join(f"{viewer} from {listed(seen)}" for viewer, seen in unheard.items())
    what = f"linked, but never heard by multicast: {pairs}"
    remedy = (
        f"nothing if these are all; else, so that nodes without --peer are found, {_OPEN}, or see "
        f"whether {_KEPT_APART}"
    )
    if too_early:
        what, remedy = f"{what}; they have just been started", "try again in a moment"
    elif deaf := [facts.label(r.node) for r in facts.replies if r.report and _is_deaf(r, r.report)]:
        what += f"; {listed(deaf)} not even from itself: a firewall there drops UDP {MDNS_PORT}"
        remedy = f"{_OPEN} there"
    elif shut := _hear_nobody(facts):
        what += f"; no machine at all is heard on {listed(shut)}"
        remedy = f"{_OPEN} there, or see whether {_KEPT_APART}"
    yield at("multicast", facts.asked).hint(what, remedy)


def _hear_nobody(facts: Facts) -> list[str]:
    """Return the nodes that hear no other machine, if there are any that do."""
    on = [(r.node, r.report.multicast) for r in facts.replies if r.report is not None]
    on = [(node, multicast) for node, multicast in on if multicast.listening]
    shut = [facts.label(node) for node, multicast in on if not multicast.others]
    return shut if len(shut) < len(on) else []


def _heard_of(facts: Facts, where: str, report: NodeReport, view: PeerView) -> Finding | None:
    """Report how a linked node was found, None where it should have been heard and was not."""
    heard = {h.interface: h.age_s for h in report.multicast.heard if h.node == view.node}
    if heard:
        words = ", ".join(f"{name} {age(age_s)} ago" for name, age_s in sorted(heard.items()))
        return at("multicast", where).good(f"heard by multicast on {words}")
    other = _report_of(facts, view)
    if other is not None and other.multicast.state == "off":
        return at("multicast", where).hint("linked without mDNS, which is switched off there")
    listened_s = min(_together_s(facts, report, view), report.multicast.listening_s)
    has_record = any(record.node == view.node for record in report.multicast.records)
    if has_record and (not report.multicast.listening or listened_s < UNHEARD_S):
        return at("multicast", where).good("found by mDNS")
    return None


def _together_s(facts: Facts, report: NodeReport, view: PeerView) -> float:
    """Return for how long both nodes have been up, as far as that is known."""
    other = _report_of(facts, view)
    return min(report.uptime_s, other.uptime_s if other is not None else report.uptime_s)


def _report_of(facts: Facts, view: PeerView) -> NodeReport | None:
    return next((r.report for r in facts.replies if r.node == view.node and r.report), None)


# --- what this process has found itself


def _found(facts: Facts) -> Iterator[Finding]:
    """Report the nodes found by mDNS if there was no node to ask."""
    if facts.found is None or (facts.replies and facts.is_asked_here):
        return
    if not facts.found:
        yield at("multicast", HERE).hint(
            "no node shows itself by mDNS", f"{_START}, {_OPEN} on both, or {_PEER}"
        )
    for record in facts.others_found:
        if record.protocol != facts.protocol:
            yield at("version", _label(record)).problem(
                f"it speaks protocol version {record.protocol} and this machine {facts.protocol}",
                "update the older one: a release speaks with the one before it",
            )
        elif record.cluster == facts.key.fingerprint:
            yield at("multicast", _label(record)).good("it shows itself by mDNS")


def _label(record: MdnsRecord) -> str:
    return f"{record.name} ({record.address})"
