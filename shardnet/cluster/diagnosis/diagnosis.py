"""From facts to findings: what is wrong with a cluster, where, and what to do.

Pure: takes what was gathered (api/diagnostics.py), asks and reads nothing. The findings about pairs
of nodes and about a model are made beside it (diagnosis/peer_findings.py,
diagnosis/model_findings.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from shardnet.cluster.diagnosis.facts import Facts, Finding, Severity, age, problem
from shardnet.cluster.diagnosis.model_findings import model_findings
from shardnet.cluster.diagnosis.peer_findings import (
    TOPICS,
    key_finding,
    pair_findings,
    remedy_for,
    seconds_apart,
)
from shardnet.cluster.machine import kernels
from shardnet.cluster.machine.addresses import Verdict, is_loopback
from shardnet.errors import AuthenticationError, LinkClosedError, VersionMismatchError
from shardnet.wire.messages.diagnostics import AddressView, NodeReport, RecordSeen, RefusedHost
from shardnet.wire.messages.membership import NodeInfo, ReportReply

RECENT_S = 120.0
"""A refused handshake older than this is reported as over."""
CLOCKS_DIFFER_S = 1.0

HERE = "this machine"


def diagnose(facts: Facts) -> list[Finding]:
    """Return all findings, problems first, what is fine last."""
    findings = [
        *_key(facts),
        *_asking(facts),
        *_browsing(facts),
        *_named(facts),
        *_names(facts),
        *_versions(facts),
        *_kernels(facts),
    ]
    for reply in facts.replies:
        findings += _node(facts, reply)
    findings += pair_findings(facts)
    findings += model_findings(facts)
    order = list(Severity)
    return sorted(findings, key=lambda finding: order.index(finding.severity), reverse=True)


# --- this machine -------------------------------------------------------------------------------


def _key(facts: Facts) -> Iterator[Finding]:
    key = facts.key
    if key.failure:
        yield problem("key", HERE, key.failure, key.remedy)
    elif key.is_set_aside:
        yield Finding(
            severity=Severity.INFO,
            topic="key",
            where=HERE,
            what="--insecure: no key is used, links are neither encrypted nor authenticated",
        )
    elif not key.fingerprint:
        yield Finding(
            severity=Severity.INFO,
            topic="key",
            where=HERE,
            what=f"there is no cluster key at {key.path}, so nodes here listen on loopback only",
            remedy="run `shardnet key new` on the first machine and `shardnet key join` on others",
        )
    else:
        yield Finding(
            topic="key", where=HERE, what=f"holds the key of cluster {key.fingerprint} ({key.path})"
        )


def _asking(facts: Facts) -> Iterator[Finding]:
    for view in facts.deaf:
        yield problem(
            "node",
            HERE,
            f"the node at {view.address} does not answer: "
            + view.why.removeprefix(f"{view.address}: "),
            remedy_for(view),
        )
    if not facts.asked and not facts.deaf:
        yield Finding(
            severity=Severity.INFO,
            topic="node",
            where=HERE,
            what="no node runs here, so only what shows from outside was checked",
            remedy="start one with `shardnet node`",
        )
    elif facts.asked and not facts.replies:
        yield problem(
            "node",
            facts.asked,
            f"it gave no report: {facts.failure or 'it was too slow'}",
            "read that node's output, or restart it",
        )
    elif facts.failure:
        yield problem("node", facts.asked, f"not every report came: {facts.failure}")
    known = [view for reply in facts.replies if reply.report for view in reply.report.peers]
    if facts.replies and not known:
        yield Finding(
            severity=Severity.INFO,
            topic="link",
            where=facts.asked,
            what="it knows no other node",
            remedy="start `shardnet node` on another machine, or name one with --peer HOST:PORT",
        )


def _browsing(facts: Facts) -> Iterator[Finding]:
    """Report the nodes found by mDNS if there was no node to ask."""
    if facts.found is None:
        return
    if not facts.found:
        yield Finding(
            severity=Severity.INFO,
            topic="multicast",
            where=HERE,
            what="no node shows itself by mDNS",
            remedy=(
                "start `shardnet node` on another machine; if one runs, see that UDP port 5353 and "
                "multicast pass, or name it with --peer HOST:PORT"
            ),
        )
    for record in facts.found:
        yield _record(facts, record)


def _record(facts: Facts, record: RecordSeen) -> Finding:
    where = f"{record.name} ({record.address})"
    if record.protocol != facts.protocol:
        return problem(
            "version",
            where,
            f"it speaks protocol version {record.protocol} and this machine {facts.protocol}",
            "install the same version of shardnet on both",
        )
    if record.cluster != facts.key.fingerprint:
        return key_finding(where, HERE, theirs=record.cluster, ours=facts.key.fingerprint)
    return Finding(topic="multicast", where=where, what="it shows itself by mDNS")


def _named(facts: Facts) -> Iterator[Finding]:
    """Report the results for the addresses given on the command line."""
    for view in facts.named:
        yield _reached(HERE, view)


def _reached(where: str, view: AddressView) -> Finding:
    if view.seen == "answers":
        rtt = "" if view.rtt_s is None else f", round trip {view.rtt_s * 1e3:.2g} ms"
        return Finding(topic="port", where=where, what=f"{view.address} answers{rtt}")
    topic = TOPICS.get(view.seen, "port")
    return problem(topic, where, view.why or f"{view.address}: {view.seen}", remedy_for(view))


# --- one node -----------------------------------------------------------------------------------


def _node(facts: Facts, reply: ReportReply) -> Iterator[Finding]:
    where, report = facts.label(reply.node), reply.report
    if report is None or reply.info is None:
        yield Finding(
            severity=Severity.INFO,
            topic="node",
            where=where,
            what=f"its own view is missing: {reply.failure}",
        )
        return
    yield Finding(topic="node", where=where, what=_self_words(reply.info, report))
    yield _addresses(where, reply.info, report)
    yield from _multicast(where, report)
    for refused in report.refused:
        yield from _refused(where, refused)
    for view in report.unreached:
        yield _reached(where, view)
    if reply.clock_ahead_s is not None and abs(reply.clock_ahead_s) > CLOCKS_DIFFER_S:
        yield Finding(
            severity=Severity.INFO,
            topic="clock",
            where=where,
            what=f"its clock is {seconds_apart(reply.clock_ahead_s)} that of {facts.asked}",
            remedy="nothing here depends on it; set it, so that logs can be compared",
        )


def _self_words(info: NodeInfo, report: NodeReport) -> str:
    cluster = f"cluster {report.cluster}" if report.cluster else "no cluster key"
    return f"runs at {info.address}, shardnet {info.version}, {cluster}, up {age(report.uptime_s)}"


def _addresses(where: str, info: NodeInfo, report: NodeReport) -> Finding:
    """Report at which of its addresses a node is announced, and why not at the others."""
    told = [f"{a.host} ({a.interface})" for a in report.interfaces if a.is_told]
    if report.cluster and not told:
        return Finding(
            severity=Severity.INFO,
            topic="address",
            where=where,
            what=f"it is announced at {info.address} only, where other machines do not come",
            remedy="start it without --host, or with the address of a real network",
        )
    words = f"announced at {', '.join(told) or info.address}"
    for address in report.interfaces:
        if told and not address.is_told and not is_loopback(address.host):
            is_good = address.verdict == Verdict.LAN.value
            why = "it does not listen there" if is_good else address.verdict
            words += f"; not {address.host} ({address.interface}): {why}"
    return Finding(topic="address", where=where, what=words)


def _multicast(where: str, report: NodeReport) -> Iterator[Finding]:
    multicast = report.multicast
    match multicast.state:
        case "off":
            yield Finding(
                severity=Severity.INFO,
                topic="multicast",
                where=where,
                what="it neither announces itself nor looks for others by mDNS",
                remedy="start it without --no-mdns if your network passes multicast",
            )
        case "failed":
            yield problem(
                "multicast",
                where,
                f"mDNS does not work there: {multicast.failure or 'it has just begun'}",
                "check its network, or name other nodes with --peer and give --no-mdns",
            )
        case "on":
            yield Finding(
                topic="multicast",
                where=where,
                what=f"announces itself and looks for others on {', '.join(multicast.hosts)}",
            )


def _refused(where: str, refused: RefusedHost) -> Iterator[Finding]:
    """Report refused handshakes. A connection that was only opened and closed does not count.

    A refused handshake with a remedy is that of a node: nothing can be done about others.
    """
    if refused.code == LinkClosedError.code:
        return
    times = "once" if refused.n_times == 1 else f"{refused.n_times} times, at last"
    what = f"it refused {refused.host} {times} {age(refused.age_s)} ago: {refused.why}"
    remedy = refused.remedy or ""
    is_a_node = refused.code == VersionMismatchError.code or (
        refused.code == AuthenticationError.code and remedy != ""
    )
    yield Finding(
        severity=Severity.PROBLEM if is_a_node and refused.age_s < RECENT_S else Severity.INFO,
        topic="version" if refused.code == VersionMismatchError.code else "key",
        where=where,
        what=what,
        remedy=remedy or "find the program that connects from there, if it is none of yours",
    )


# --- all nodes together -------------------------------------------------------------------------


def _names(facts: Facts) -> Iterator[Finding]:
    by_name: dict[str, set[str]] = defaultdict(set)
    machines: dict[str, set[str]] = defaultdict(set)
    for node, name in facts.live.items():
        by_name[name].add(node)
    for info in facts.infos:
        machines[info.node].add(info.host_id)
    for name, nodes in sorted(by_name.items()):
        if len(nodes) > 1:
            labels = ", ".join(sorted(facts.label(node) for node in nodes))
            yield problem(
                "name",
                name,
                f"{len(nodes)} nodes have this name: {labels}",
                "give each its own with `shardnet node --name`",
            )
    for node, hosts in machines.items():
        if len(hosts) > 1:
            yield problem(
                "name",
                facts.label(node),
                f"two machines, {' and '.join(sorted(hosts))}, say that they are node {node}",
                "restart both nodes: each makes itself an id at its start",
            )


def _kernels(facts: Facts) -> Iterator[Finding]:
    """Report who computes without the compiled kernels.

    This machine only where no node runs, and as no problem: its node may compute on a GPU.
    """
    what = f"no compiled kernels here: {kernels.SLOWER}"
    if not facts.replies and not facts.has_kernels:
        yield Finding(
            severity=Severity.INFO,
            topic="kernels",
            where=HERE,
            what=what,
            remedy=kernels.REMEDY,
        )
    for info in facts.infos:
        if info.isa == kernels.NONE:
            yield problem("kernels", facts.label(info.node), what, kernels.REMEDY)
        elif info.isa == kernels.OFF:
            yield Finding(
                severity=Severity.INFO,
                topic="kernels",
                where=facts.label(info.node),
                what=f"SHARDNET_ISA=off: no compiled kernels are used, {kernels.SLOWER}",
                remedy="start it without SHARDNET_ISA",
            )


def _versions(facts: Facts) -> Iterator[Finding]:
    """Compare the software of all nodes with that of this machine."""
    versions = {node: version for node, version in facts.versions.items() if version}
    others = {node: v for node, v in versions.items() if v != facts.software}
    for node, version in others.items():
        yield problem(
            "version",
            facts.label(node),
            f"it runs shardnet {version} and this machine {facts.software}",
            "install the same version on both",
        )
    if versions and not others:
        what = f"every node runs shardnet {facts.software}"
        yield Finding(topic="version", where=HERE, what=what)
