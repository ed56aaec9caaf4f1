"""From facts to findings: what is wrong with a cluster and a model, where, and what to do.

Findings about keys, mDNS, pairs of nodes and a model are made beside it. What has one cause is one
finding.

Uses the planner's own figures and words, so that doctor and plan agree.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

from shardnet.cluster.diagnosis.facts import (
    HERE,
    TOPICS,
    Facts,
    Finding,
    ModelAsked,
    Severity,
    age,
    at,
    remedy_for,
)
from shardnet.cluster.diagnosis.multicast_findings import multicast_findings
from shardnet.cluster.diagnosis.peer_findings import key_findings, pair_findings, seconds_apart
from shardnet.cluster.diagnosis.system_findings import network_findings, windows_findings
from shardnet.cluster.machine import kernels
from shardnet.cluster.machine.addresses import Verdict, is_loopback
from shardnet.cluster.placement.figures import CandidateNode, HeldModel, ModelShape
from shardnet.cluster.placement.room import StageRole, rooms_of, shortest_ring
from shardnet.cluster.placement.words import shortfall_words, size
from shardnet.cluster.pressure.policy import MemoryLook
from shardnet.types import LayerRange, NodeId
from shardnet.wire.messages.diagnostics import AddressView, NodeReport, PeerView
from shardnet.wire.messages.membership import NodeInfo, ReportReply

_NO_FOLDER = "check the path, or fetch a model of the Hub with `shardnet pull`"


def model_findings(facts: Facts) -> Iterator[Finding]:
    """Judge the nodes by the model that was named, if one was."""
    asked = facts.model
    if asked is None:
        return
    if asked.shape is None:
        yield at("model", asked.model).problem(asked.failure, asked.remedy or _NO_FOLDER)
        return
    yield _memory(facts, asked, asked.shape)
    for reply in facts.replies:
        yield from _checkpoint(facts, asked, asked.shape, reply)


def _memory(facts: Facts, asked: ModelAsked, shape: ModelShape) -> Finding:
    candidates = []
    for info in facts.infos:
        if info.is_draining or info.rests:  # plans do without it
            continue
        node, usual = NodeId(info.node), HeldModel(shape=shape, memory_bytes=info.memory_bytes)
        held, name = asked.held.get(node, usual), facts.label(node)
        candidates.append(
            CandidateNode(node=node, name=name, memory_bytes=held.memory_bytes, shape=held.shape)
        )
    rooms = rooms_of([candidate.held(shape) for candidate in candidates])
    dtype = f" in {asked.dtype.value}" if asked.dtype is not None else ""
    needs = (
        f"needs {size(shape.memory_bytes(shape.whole))} with a context of {shape.context}{dtype}"
    )
    if not candidates:
        why = "no node takes layers now" if facts.infos else "no node was there to ask"
        return at("model", asked.model).good(f"{needs}; {why}")
    alone = [
        c.name
        for c, room in zip(candidates, rooms, strict=True)
        if room[StageRole.ALONE] >= shape.n_layers
    ]
    if alone:
        return at("model", asked.model).good(f"{needs}: fits alone on {', '.join(alone)}")
    ring = shortest_ring(rooms, shape.n_layers)
    if ring is None:
        return at("model", asked.model).problem(shortfall_words(shape, candidates))
    names = ", ".join(f"{candidates[n].name} ({size(candidates[n].memory_bytes)})" for n in ring)
    return at("model", asked.model).good(f"{needs}: fits on no node alone, together on {names}")


def _checkpoint(
    facts: Facts, asked: ModelAsked, shape: ModelShape, reply: ReportReply
) -> Iterator[Finding]:
    """Report whether a node has the checkpoint, else whether its disk has room for its part."""
    report, info, where = reply.report, reply.info, facts.label(reply.node)
    if report is None or info is None:
        return
    if report.model_id == asked.model_id:
        yield at("model", where).good(f"has the checkpoint {asked.model}")
    elif report.model_id:
        yield at("model", where).problem(
            f"{asked.model} is another model there: {report.model_id[:12]}, and "
            f"{asked.model_id[:12]} here",
            "copy one checkpoint to both",
        )
    else:
        part = min(shape.weight_bytes(LayerRange(0, shape.n_layers)), info.memory_bytes)
        what = f"it has no checkpoint of its own: {report.model_failure}"
        others = [reply.report.model_id for reply in facts.replies if reply.report is not None]
        if asked.model_id in others:
            what = f"it has not got {asked.model}, and takes its part from a node that has"
        if report.disk_free_bytes is not None and report.disk_free_bytes < part:
            yield at("model", where).problem(
                f"{what}; and its disk has {size(report.disk_free_bytes)} free, its part may take "
                f"{size(part)}",
                "free some space there",
            )
        else:
            yield at("model", where).hint(what)


CLOCKS_DIFFER_S = 1.0

_RESTART = "stop it and start it again: a node keeps the key that it was started with"


def diagnose(facts: Facts) -> list[Finding]:
    """Return all findings, problems first, what is fine last."""
    findings = [
        *key_findings(facts),
        *_asking(facts),
        *network_findings(facts),
        *multicast_findings(facts),
        *_named(facts),
        *_names(facts),
        *_versions(facts),
        *_kernels(facts),
        *windows_findings(facts),
    ]
    for reply in facts.replies:
        findings += _node(facts, reply)
    findings += pair_findings(facts)
    findings += model_findings(facts)
    order = list(Severity)
    return sorted(findings, key=lambda finding: order.index(finding.severity), reverse=True)


# --- this machine -------------------------------------------------------------------------------


def _asking(facts: Facts) -> Iterator[Finding]:
    for view in facts.deaf:
        yield at("node", HERE).problem(
            f"the node at {view.address} does not answer: "
            + view.why.removeprefix(f"{view.address}: "),
            _RESTART if view.seen == "other key" and facts.key.fingerprint else remedy_for(view),
        )
    if not facts.asked and not facts.deaf:
        yield at("node", HERE).hint(
            "no node runs here, so only what shows from outside was checked",
            "start one with `shardnet node`",
        )
    elif facts.asked and not facts.replies:
        yield at("node", facts.asked).problem(
            f"it gave no report: {facts.failure or 'it was too slow'}",
            "read that node's output, or restart it",
        )
    elif facts.failure:
        yield at("node", facts.asked).problem(f"not every report came: {facts.failure}")


def _named(facts: Facts) -> Iterator[Finding]:
    """Report the results for the addresses given on the command line."""
    for view in facts.named:
        yield _reached(HERE, view)


def _reached(where: str, view: AddressView) -> Finding:
    if view.seen == "answers":
        rtt = "" if view.rtt_s is None else f", round trip {view.rtt_s * 1e3:.2g} ms"
        return at("port", where).good(f"{view.address} answers{rtt}")
    topic = TOPICS.get(view.seen, "port")
    return at(topic, where).problem(view.why or f"{view.address}: {view.seen}", remedy_for(view))


# --- one node -----------------------------------------------------------------------------------


def _node(facts: Facts, reply: ReportReply) -> Iterator[Finding]:
    where, report = facts.label(reply.node), reply.report
    if report is None or reply.info is None:
        yield at("node", where).hint(f"its own view is missing: {reply.failure}")
        return
    yield at("node", where).good(_self_words(reply.info, report))
    yield _addresses(where, reply.info, report)
    yield from pressure_findings(where, reply.info, report)
    yield from _wrong_bits(facts, report)
    if report.power_failure:
        yield at("power", where).hint(f"joules per token are not known: {report.power_failure}")
    yield from (at("gpu", where).hint(trouble) for trouble in report.gpu_troubles)
    told = {address for view in report.peers if not view.is_linked for address in _told(view)}
    for view in report.unreached:
        if view.address not in told:
            yield _reached(where, view)
    if reply.clock_ahead_s is not None and abs(reply.clock_ahead_s) > CLOCKS_DIFFER_S:
        yield at("clock", where).hint(
            f"its clock is {seconds_apart(reply.clock_ahead_s)} that of {facts.asked}",
            "nothing here depends on it; set it, so that logs can be compared",
        )


def _wrong_bits(facts: Facts, report: NodeReport) -> Iterator[Finding]:
    """Report which nodes the audits of a head have found computing wrong bits, and when."""
    for found in report.audit.findings if report.audit is not None else ():
        ago = age(max(0.0, report.sent_at - found.at))
        what = f"wrong bits in layer {found.layer} {ago} ago: {found.what}"
        if found.good_at:
            what += f" (nothing was found {age(max(0.0, found.at - found.good_at))} before)"
        yield at("bits", facts.label(found.node)).problem(what, found.remedy)


def _told(view: PeerView) -> Iterator[str]:
    """List the addresses of a node that is not linked, and whose finding says why."""
    if view.told_by:
        yield from (address.address for address in view.addresses)


def _self_words(info: NodeInfo, report: NodeReport) -> str:
    cluster = f"cluster {report.cluster}" if report.cluster else "no cluster key"
    return f"runs at {info.address}, shardnet {info.version}, {cluster}, up {age(report.uptime_s)}"


def _addresses(where: str, info: NodeInfo, report: NodeReport) -> Finding:
    """Report at which of its addresses a node is announced, and why not at the others."""
    told = [f"{a.host} ({a.interface})" for a in report.interfaces if a.is_told]
    if report.cluster and not told:
        return at("address", where).hint(
            f"it is announced at {info.address} only, where other machines do not come",
            "start it without --host, or with the address of a real network",
        )
    words = f"announced at {', '.join(told) or info.address}"
    for address in report.interfaces:
        if told and not address.is_told and not is_loopback(address.host):
            is_good = address.verdict == Verdict.LAN.value
            why = "it does not listen there" if is_good else address.verdict
            words += f"; not {address.host} ({address.interface}): {why}"
    return at("address", where).good(words)


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
            yield at("name", name).problem(
                f"{len(nodes)} nodes have this name: {labels}",
                "give each its own with `shardnet node --name`",
            )
    for node, hosts in machines.items():
        if len(hosts) > 1:
            yield at("name", facts.label(node)).problem(
                f"two machines, {' and '.join(sorted(hosts))}, say that they are node {node}",
                "restart both nodes: each makes itself an id at its start",
            )


def _kernels(facts: Facts) -> Iterator[Finding]:
    """Report who computes without the compiled kernels.

    This machine only where no node runs, and as no problem: its node may compute on a GPU.
    """
    what = f"no compiled kernels here: {kernels.SLOWER}"
    if not facts.replies and not facts.has_kernels:
        yield at("kernels", HERE).hint(what, kernels.REMEDY)
    for info in facts.infos:
        if info.isa == kernels.NONE:
            yield at("kernels", facts.label(info.node)).problem(what, kernels.REMEDY)
        elif info.isa == kernels.OFF:
            yield at("kernels", facts.label(info.node)).hint(
                f"SHARDNET_ISA=off: no compiled kernels are used, {kernels.SLOWER}",
                "start it without SHARDNET_ISA",
            )


def _versions(facts: Facts) -> Iterator[Finding]:
    """Compare the software of all nodes with that of this machine."""
    versions = {node: version for node, version in facts.versions.items() if version}
    others = {node: v for node, v in versions.items() if v != facts.software}
    for node, version in others.items():
        what = f"it runs shardnet {version} and this machine {facts.software}"
        place = at("version", facts.label(node))
        if _is_near(version, facts.software):
            yield place.hint(what, "a release works with the one before it: update the older one")
        else:
            yield place.problem(what, "update the older one: a release works with the one before")
    if versions and not others:
        what = f"every node runs shardnet {facts.software}"
        yield at("version", HERE).good(what)


def _is_near(version: str, other: str) -> bool:
    """Return whether one of two versions X.Y.Z is of the release before the other, or of the same.

    What is no such version is near nothing.
    """
    releases = [re.match(r"(\d+)\.(\d+)\.", each) for each in (version, other)]
    (one, two) = [tuple(map(int, found.groups())) if found else None for found in releases]
    return one is not None and two is not None and one[0] == two[0] and abs(one[1] - two[1]) <= 1


def pressure_findings(where: str, info: NodeInfo, report: NodeReport) -> Iterator[Finding]:
    """Say why a node takes no layers, and whether programs on its machine wait for memory."""
    if info.is_draining:
        yield at("node", where).hint("it is draining and takes no layers")
    if info.rests:
        yield at("node", where).hint(
            f"it rests and takes no layers: {info.rests}", "it takes part again by itself"
        )
    pressure = report.pressure
    if pressure is None:
        return
    look = MemoryLook(
        available_bytes=pressure.available_bytes,
        total_bytes=pressure.total_bytes,
        stalled=pressure.stalled,
    )
    if look.is_short:
        what = f"{size(look.available_bytes)} of {size(look.total_bytes)} of memory are available"
        if look.stalled is not None:
            what += f", and programs waited for memory in {look.stalled:.0%} of the last 10 s"
        remedy = "end other programs there, or start the node with less --memory"
        yield at("memory", where).problem(what, remedy)
