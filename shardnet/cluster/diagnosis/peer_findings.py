"""Findings about pairs of nodes: cluster keys, and links: both ways, where, how good, why none.

Pure. Each pair is seen twice, from either end, as far as both could be asked.

One wrong key shows on every node that meets it, from both sides: it is one finding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from types import MappingProxyType

from shardnet.cluster.diagnosis.facts import (
    HERE,
    TOPICS,
    Facts,
    Finding,
    Severity,
    Topic,
    age,
    at,
    listed,
    remedy_for,
)
from shardnet.cluster.peers.peer_table import MDNS
from shardnet.errors import AuthenticationError, LinkClosedError, VersionMismatchError
from shardnet.transport.address import host_of
from shardnet.transport.tls import SHARE_KEY
from shardnet.wire.messages.diagnostics import (
    AddressView,
    InterfaceAddress,
    MdnsRecord,
    NodeReport,
    PeerView,
    RefusedHost,
    Seen,
)
from shardnet.wire.messages.membership import ReportReply

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
        return at("key", HERE).problem(key.failure, key.remedy)
    if key.is_set_aside:
        return at("key", HERE).hint(
            "--insecure: no key is used, links are neither encrypted nor authenticated"
        )
    if key.fingerprint:
        return at("key", HERE).good(f"holds the key of cluster {key.fingerprint} ({key.path})")
    with_key = [record for record in facts.others_found if record.cluster]
    if with_key:
        nodes = listed(f"{record.name} ({record.address})" for record in with_key)
        clusters = listed(dict.fromkeys(record.cluster for record in with_key))
        return at("key", HERE).problem(
            "it has no cluster key, so its node listens on loopback only, while nodes of cluster "
            f"{clusters} are on this network: {nodes}",
            f"run `shardnet key show` on {with_key[0].name} and `shardnet key join` with that key "
            "here, then start the node here again",
        )
    return at("key", HERE).hint(
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

    for reply, report, view in facts.views:
        record = has_other_key(report, view)
        if record is not None and view.told_by:
            addresses = [record.address, *(each.address for each in view.addresses)]
            label, seen = facts.label(reply.node), facts.label(view.node, view.name)
            note(label, report.cluster, record.cluster, seen, addresses)
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
    return at("key", where).problem(what, remedy)


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


Network = IPv4Network | IPv6Network

TENTHS_S = 100.0
"""Differences of clocks below this are given in tenths of a second."""
SLOW_S = 0.020
"""A round trip above this is no wired network, and costs a ring dearly."""

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


def pair_findings(facts: Facts) -> Iterator[Finding]:
    """Report how each node that was asked sees each other one."""
    for reply, report, view in facts.views:
        where = f"{facts.label(reply.node)} → {facts.label(view.node, view.name)}"
        yield from _view(where, report, view)
    yield from _closed(facts)
    yield from _mtus(facts)


def seconds_apart(ahead_s: float) -> str:
    """Format the difference of two clocks."""
    seconds = abs(ahead_s)
    span = f"{seconds:.1f} s" if seconds < TENTHS_S else age(seconds)
    return f"{span} {'ahead of' if ahead_s > 0 else 'behind'}"


def _view(where: str, report: NodeReport, view: PeerView) -> Iterator[Finding]:
    if view.refusal:
        if view.told_by and has_other_key(report, view) is None:
            records = [record for record in report.multicast.records if record.node == view.node]
            other_version = any(record.protocol != report.protocol for record in records)
            yield at("version" if other_version else "link", where).problem(view.refusal)
    elif view.sleeps:
        yield at("link", where).good(view.sleeps)
    elif view.is_linked:
        yield _link(where, view)
        yield from _addresses(where, view)
    elif not _is_closed(view):
        yield _no_link(where, view)


def _link(where: str, view: PeerView) -> Finding:
    """Report a link and its quality."""
    words = f"linked at {view.address}" if view.address else "linked, by the other one's doing"
    if view.rtt_s is not None:
        words += f", round trip {view.rtt_s * 1e3:.2g} ms"
    if view.bytes_per_s is not None:
        megabytes = view.bytes_per_s / 1e6
        words += f", about {megabytes:.0f} MB/s" if megabytes >= 10 else f", {megabytes:.2g} MB/s"
    if view.rtt_s is not None and view.rtt_s > SLOW_S:
        return at("link", where).hint(
            words, "every token waits for it at each hop: use a cable, or a nearer node"
        )
    return at("link", where).good(words)


def _addresses(where: str, view: PeerView) -> Iterator[Finding]:
    """Report why the other addresses are not used."""
    others = [address for address in view.addresses if address.address != view.address]
    if not others or not view.address:
        return
    reasons = "; ".join(f"not {address.address}: {_why(address)}" for address in others)
    yield Finding(
        severity=Severity.INFO
        if any(address.seen in ("other node", "hangs") for address in others)
        else Severity.OK,
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
    tried = _tried(view)
    if not view.told_by:
        what = "it was here and has left"
    elif any(address.seen == "answers" for address in tried):
        what = "it answers and is not linked yet; run this again in some seconds"
    else:
        what = "only its last report is left" + (f": {_each(tried)}" if tried else "")
    return at("link", where).hint(what)


# --- nodes that are not reached


def _is_closed(view: PeerView) -> bool:
    """Whether a node should answer, and does at no address. A ring dials both ways."""
    seen = {address.seen for address in view.addresses} - {"not tried"}
    if view.is_linked:
        return bool(seen) and "answers" not in seen
    return bool(view.told_by) and bool(seen - {"other node"}) and "answers" not in seen


@dataclass(frozen=True, slots=True, kw_only=True)
class _Closed:
    """A node that others do not reach, and why, the same for all of them."""

    viewers: str
    seen: str
    lead: str
    addresses: list[AddressView]
    elsewhere: str
    topic: Topic
    remedy: str


def _closed(facts: Facts) -> Iterator[Finding]:
    """Report nodes that others do not reach, once for all with one reason."""
    by_cause: dict[tuple[str, ...], list[_Closed]] = {}
    for closed in _closed_nodes(facts):
        cause = (closed.viewers, closed.lead, closed.elsewhere, closed.topic, closed.remedy)
        by_cause.setdefault(cause, []).append(closed)
    for alike in by_cause.values():
        first = alike[0]
        yield at(first.topic, f"{first.viewers} → {listed(each.seen for each in alike)}").problem(
            f"{first.lead}: {_each([a for each in alike for a in each.addresses])}"
            f"{first.elsewhere}",
            first.remedy,
        )


def _closed_nodes(facts: Facts) -> Iterator[_Closed]:
    sights: dict[tuple[str, Seen, bool], list[tuple[ReportReply, PeerView]]] = {}
    for reply, _, view in facts.views:
        if not view.refusal and _is_closed(view):
            reason = (view.node, _worst(_tried(view)).seen, view.is_linked)
            sights.setdefault(reason, []).append((reply, view))
    for (_, seen, is_linked), seen_by in sights.items():
        reply, view = seen_by[0]
        viewers = listed(facts.label(viewer.node) for viewer, _ in seen_by)
        tried, ours = _tried(view), _networks(reply)
        elsewhere, remedy = "", remedy_for(_worst(tried))
        if seen in ("unreachable", "dropped") and _is_elsewhere(tried, ours):
            elsewhere = f"; that is another network than {listed(map(str, ours))} of {viewers}"
            if seen == "unreachable":
                remedy = "connect all machines to one network, or set routes between the two"
        lead = "no link, though mDNS shows it" if MDNS in view.told_by else "no link"
        yield _Closed(
            viewers=viewers,
            seen=facts.label(view.node, view.name),
            lead="linked, but not to be reached from this side" if is_linked else lead,
            addresses=tried,
            elsewhere=elsewhere,
            topic=TOPICS.get(seen, "port"),
            remedy=remedy,
        )


def _networks(reply: ReportReply) -> list[Network]:
    """Return the networks in which a node is advertised."""
    told = reply.report.interfaces if reply.report is not None else ()
    networks = [_network(address) for address in told if address.is_told]
    return list(dict.fromkeys(network for network in networks if network is not None))


def _is_elsewhere(addresses: list[AddressView], ours: list[Network]) -> bool:
    """Whether none of some addresses is in one of our networks; host names may be anywhere."""
    try:
        hosts = [ip_address(host_of(a.address).partition("%")[0]) for a in addresses]
    except ValueError:
        return False
    return bool(ours) and not any(host in network for host in hosts for network in ours)


def _tried(view: PeerView) -> list[AddressView]:
    return [address for address in view.addresses if address.seen != "not tried"]


def _worst(addresses: list[AddressView]) -> AddressView:
    return min(addresses, key=lambda a: _WORST.index(a.seen) if a.seen in _WORST else len(_WORST))


def _each(addresses: list[AddressView]) -> str:
    """Write addresses, and behind those with one reason this reason."""
    by_reason: dict[str, list[str]] = {}
    for address in addresses:
        by_reason.setdefault(_why(address), []).append(address.address)
    return ", ".join(f"{', '.join(those)} ({why})" for why, those in by_reason.items())


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
                yield at("mtu", f"{facts.label(node)} ↔ {facts.label(view.node)}").hint(
                    f"largest packets differ: {near.mtu} bytes on {near.interface} and "
                    f"{far.mtu} bytes on {far.interface}",
                    "if large transfers stall, set both to the smaller one",
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
    network = _network(of)
    try:
        return network is not None and ip_address(host.partition("%")[0]) in network
    except ValueError:
        return False


def _network(of: InterfaceAddress) -> Network | None:
    try:
        return ip_network(f"{of.host.partition('%')[0]}/{of.prefix}", strict=False)
    except ValueError:
        return None
