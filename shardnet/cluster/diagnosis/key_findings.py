"""Findings about cluster keys: none here, another one there, and hosts that were refused.

Pure. One wrong key shows on every node that meets it, from both sides: it is one finding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from shardnet.cluster.diagnosis.facts import (
    HERE,
    SHARE_KEY,
    Facts,
    Finding,
    Severity,
    age,
    good,
    hint,
    listed,
    problem,
)
from shardnet.errors import AuthenticationError, LinkClosedError, VersionMismatchError
from shardnet.transport.address import host_of
from shardnet.wire.messages.diagnostics import MdnsRecord, NodeReport, PeerView, RefusedHost

RECENT_S = 120.0
"""A refused handshake older than this is reported as over."""


def key_findings(facts: Facts) -> Iterator[Finding]:
    """Report the key of this machine, and every cluster that has another one."""
    yield _own(facts)
    pairs = _pairs(facts)
    for (ours, theirs), pair in pairs.items():
        yield _pair_finding(pair, ours=ours, theirs=theirs)
    yield from _refused(facts, {host for pair in pairs.values() for host in pair.hosts})


def has_other_key(report: NodeReport, view: PeerView) -> MdnsRecord | None:
    """Return the record of a node that is left out for its key, None for any other reason."""
    for record in report.multicast.records:
        is_it = record.node == view.node and record.protocol == report.protocol
        if view.refusal and is_it and record.cluster != report.cluster:
            return record
    return None


# --- this machine


def _own(facts: Facts) -> Finding:
    key = facts.key
    if key.failure:
        return problem("key", HERE, key.failure, key.remedy)
    if key.is_set_aside:
        return hint(
            "key", HERE, "--insecure: no key is used, links are neither encrypted nor authenticated"
        )
    if key.fingerprint:
        return good("key", HERE, f"holds the key of cluster {key.fingerprint} ({key.path})")
    with_key = [record for record in facts.others_found if record.cluster]
    if with_key:
        nodes = listed(f"{record.name} ({record.address})" for record in with_key)
        clusters = listed(dict.fromkeys(record.cluster for record in with_key))
        return problem(
            "key",
            HERE,
            "it has no cluster key, so its node listens on loopback only, while nodes of cluster "
            f"{clusters} are on this network: {nodes}",
            f"run `shardnet key show` on {with_key[0].name} and `shardnet key join` with that key "
            "here, then start the node here again",
        )
    return hint(
        "key",
        HERE,
        f"there is no cluster key at {key.path}, so nodes here listen on loopback only",
        "run `shardnet key new` on the first machine and `shardnet key join` on others",
    )


# --- nodes with different keys


@dataclass(frozen=True, slots=True)
class _Pair:
    """The nodes of one cluster that see those of another one, and the hosts of these."""

    viewers: dict[str, None] = field(default_factory=dict)
    seen: dict[str, None] = field(default_factory=dict)
    hosts: set[str] = field(default_factory=set)


def _pairs(facts: Facts) -> dict[tuple[str, str], _Pair]:
    """Collect who sees whom, by the fingerprints of both keys."""
    pairs: dict[tuple[str, str], _Pair] = {}

    def note(viewer: str, ours: str, theirs: str, seen: str, addresses: Iterable[str]) -> None:
        pair = pairs.setdefault((ours, theirs), _Pair())
        pair.viewers[viewer] = None
        pair.seen[seen] = None
        pair.hosts.update(map(host_of, addresses))

    for reply in facts.replies:
        for view in reply.report.peers if reply.report is not None else ():
            assert reply.report is not None
            record = has_other_key(reply.report, view)
            if record is not None and view.told_by:
                addresses = [record.address, *(each.address for each in view.addresses)]
                label, seen = facts.label(reply.node), facts.label(view.node, view.name)
                note(label, reply.report.cluster, record.cluster, seen, addresses)
    ours = facts.key.fingerprint
    if not facts.replies and (ours or facts.key.is_set_aside):
        for record in facts.others_found:
            if record.protocol == facts.protocol and record.cluster != ours:
                seen = f"{record.name} ({record.address})"
                note(HERE, ours, record.cluster, seen, [record.address])
    return pairs


def _pair_finding(pair: _Pair, *, ours: str, theirs: str) -> Finding:
    """Report which nodes have a wrong key, by the fingerprints; "" stands for none."""
    viewers, seen = listed(pair.viewers), listed(pair.seen)
    where = seen if HERE in pair.viewers else f"{viewers} → {seen}"
    if not theirs:
        what, remedy = (
            f"no cluster key on {seen}",
            "run `shardnet key join` there and start the node again",
        )
    elif not ours:
        what = f"the key of cluster {theirs} on {seen}, and none on {viewers}"
        remedy = f"run `shardnet key join` on {viewers} and start the node again"
    else:
        what = f"different keys: that of cluster {theirs} on {seen}, that of {ours} on {viewers}"
        remedy = f"if they belong together: {SHARE_KEY}"
    return problem("key", where, what, remedy)


# --- hosts that were refused


def _refused(facts: Facts, covered: set[str]) -> Iterator[Finding]:
    """Report refused handshakes, one finding for all nodes that refused a host for one reason.

    Those of `covered` hosts are explained already. A connection that was only opened and closed
    does not count.
    """
    by_reason: dict[tuple[str, int, str], list[tuple[str, RefusedHost]]] = {}
    for reply in facts.replies:
        for refused in reply.report.refused if reply.report is not None else ():
            is_key = refused.code == AuthenticationError.code
            if refused.code != LinkClosedError.code and not (is_key and refused.host in covered):
                reason = (refused.host, refused.code, refused.why)
                by_reason.setdefault(reason, []).append((facts.label(reply.node), refused))
    for hosts in by_reason.values():
        yield _refusal(listed(label for label, _ in hosts), [refused for _, refused in hosts])


def _refusal(where: str, all_of_it: list[RefusedHost]) -> Finding:
    """Report one host. A refused handshake with a remedy is that of a node.

    Nothing can be done about others.
    """
    latest = min(all_of_it, key=lambda refused: refused.age_s)
    n_times = sum(refused.n_times for refused in all_of_it)
    times = "once" if n_times == 1 else f"{n_times} times, at last"
    remedy = latest.remedy or ""
    is_version = latest.code == VersionMismatchError.code
    is_a_node = is_version or (latest.code == AuthenticationError.code and remedy != "")
    return Finding(
        severity=Severity.PROBLEM if is_a_node and latest.age_s < RECENT_S else Severity.INFO,
        topic="version" if is_version else "key",
        where=where,
        what=f"it refused {latest.host} {times} {age(latest.age_s)} ago: {latest.why}",
        remedy=remedy or "find the program that connects from there, if it is none of yours",
    )
