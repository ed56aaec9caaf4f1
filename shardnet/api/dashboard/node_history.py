"""The nodes of a cluster as they were seen: who is up, who was lost, who was refused.

Pure: takes reports and the time. Remembers nodes that are gone, so that people see them go.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from shardnet.api.dashboard.state import NodeState, ShownLink, ShownNode, ShownStandby
from shardnet.checkpoint.model_names import short_name
from shardnet.types import BLOCK_POSITIONS
from shardnet.wire.messages.diagnostics import NodeReport, PeerView
from shardnet.wire.messages.membership import NodeInfo, ReportReply

FORGET_S: Final = 600.0
"""A lost node is shown for so long."""
MAX_NODES: Final = 1024
HERE: Final[tuple[NodeState, ...]] = ("up", "draining", "resting")
"""States of a node that answers."""


class NodeHistory:
    """Remembers the nodes. Times are seconds of one clock."""

    def __init__(self) -> None:
        self._shown: dict[str, ShownNode] = {}
        self._since_s: dict[str, float] = {}

    def nodes(self, now_s: float) -> list[ShownNode]:
        """List all, the asked one first, then by name."""
        shown = [
            replace(node, since_s=max(0.0, now_s - self._since_s[node.node]))
            for node in self._shown.values()
        ]
        return sorted(shown, key=lambda one: (not one.is_asked, one.name.casefold(), one.node))

    def address_of(self, node: str) -> str:
        """Return the address of a node, "" if it is not known."""
        found = self._shown.get(node)
        return (found.address if found else None) or ""

    def take(self, replies: Sequence[ReportReply], now_s: float) -> ReportReply | None:
        """Take the reports of the asked node and of others; return that of the asked one.

        Without it nothing is taken, and None returned. A linked node that is not among them is
        silent, one that is not linked any more is lost.
        """
        asked = next((r for r in replies if r.report is not None and _is_own(r)), None)
        if asked is None or asked.report is None:
            return None
        by_node = {reply.node: reply for reply in replies}
        views = {view.node: view for view in asked.report.peers}
        seen: dict[str, ShownNode] = {}
        for reply in replies:
            seen[reply.node] = self._answered(reply, views, is_asked=reply is asked)
        for view in asked.report.peers:
            if view.node not in by_node:
                node = self._not_answered(view)
                if node is not None:
                    seen[view.node] = node
        for gone, was in self._shown.items():
            if gone not in seen and was.state != "refused":
                seen[gone] = replace(was, state="lost", is_asked=False)
        for named, what in _wrong_bits(replies).items():
            if named in seen:
                seen[named] = replace(seen[named], wrong_bits=what)
        self._keep(seen.values(), now_s)
        return asked

    def asked_is_gone(self, now_s: float) -> None:
        """Note that the asked node does not answer: nothing is known of the others."""
        silent: dict[NodeState, NodeState] = dict.fromkeys(HERE, "silent")
        nodes = self._shown.values()
        self._keep([replace(one, state=silent.get(one.state, one.state)) for one in nodes], now_s)

    def _answered(
        self, reply: ReportReply, views: Mapping[str, PeerView], *, is_asked: bool
    ) -> ShownNode:
        if reply.info is None or reply.report is None:
            before = self._shown.get(reply.node)
            silent = before or ShownNode(node=reply.node, name=reply.name, state="up", since_s=0)
            return replace(silent, state="silent", why=reply.failure or None)
        view = views.get(reply.node)
        address = view.address if view is not None and view.address else reply.info.address
        return _shown(reply.info, reply.report, address, is_asked=is_asked)

    def _not_answered(self, view: PeerView) -> ShownNode | None:
        """Return what a node is that did not report; None for one of which nobody knows."""
        before = self._shown.get(view.node)
        if view.is_linked:
            unknown = ShownNode(node=view.node, name=view.name, state="up", since_s=0)
            return replace(before or unknown, state="silent", why="it did not report in time")
        why = view.refusal or next((one.why for one in view.addresses if one.why), "") or None
        if before is not None and before.state != "refused":
            state: NodeState = "asleep" if view.sleeps else "lost"
            return replace(before, state=state, why=view.sleeps or why)
        if not (view.told_by or view.refusal):
            return None
        return ShownNode(
            node=view.node,
            name=view.name,
            address=view.address or next((one.address for one in view.addresses), None),
            state="refused",
            why=why,
            since_s=0,
            version=view.version or None,
        )

    def _keep(self, nodes: Iterable[ShownNode], now_s: float) -> None:
        """Keep what is shown; forget who is lost for long, or came back under another id."""
        nodes = list(nodes)[:MAX_NODES]
        names = {node.name for node in nodes if node.state in HERE}
        before, since = self._shown, self._since_s
        self._shown, self._since_s = {}, {}
        for node in nodes:
            was = before.get(node.node)
            is_same = was is not None and was.state == node.state
            since_s = since[node.node] if is_same else now_s
            if node.state == "lost" and (node.name in names or now_s - since_s > FORGET_S):
                continue
            self._shown[node.node] = node
            self._since_s[node.node] = since_s


def _is_own(reply: ReportReply) -> bool:
    """Whether a report is the asked node's own: only of others it has compared the clock."""
    return reply.clock_ahead_s is None and not reply.failure


def _wrong_bits(replies: Sequence[ReportReply]) -> dict[str, str]:
    """Say what heads have found last of nodes that computed wrong bits, by node."""
    reports = [reply.report for reply in replies if reply.report is not None]
    return {
        found.node: f"layer {found.layer}: {found.what}; {found.remedy}"
        for report in reports
        if report.audit is not None
        for found in report.audit.findings
    }


def _shown(info: NodeInfo, report: NodeReport, address: str, *, is_asked: bool) -> ShownNode:
    stage = report.stage
    node = ShownNode(
        node=info.node,
        name=info.name,
        address=address or None,
        state="draining" if info.is_draining else "resting" if info.rests else "up",
        why=info.rests or None,
        since_s=0,
        version=info.version,
        uptime_s=report.uptime_s,
        device=info.device,
        isa=info.isa,
        threads=info.threads,
        cores=info.cores,
        memory_bytes=info.memory_bytes,
        memory_free_bytes=info.memory_free_bytes,
        temperature_c=report.temperature_c,
        power=info.meters,
        host=info.host_id,
        is_asked=is_asked,
        deputy=None if report.deputy is None else report.deputy.node,
        deputy_of=[head.node for head in report.deputy_of],
        links=[
            ShownLink(node=view.node, rtt_ms=None if view.rtt_s is None else 1e3 * view.rtt_s)
            for view in report.peers
            if view.is_linked
        ],
    )
    if stage is None:
        return node
    standby = stage.standby
    return replace(
        node,
        model=short_name(stage.model),
        layers=stage.layers,
        rank=stage.rank if stage.n_stages else None,
        weight_bytes=stage.weight_bytes,
        kv_positions=stage.room_blocks * BLOCK_POSITIONS,
        kv_used_positions=stage.used_blocks * BLOCK_POSITIONS,
        kernel=stage.kernel,
        dtype=stage.dtype,
        n_sequences=stage.n_open,
        standby=standby
        and ShownStandby(
            name=standby.node, layers=standby.layers, weight_bytes=standby.weight_bytes
        ),
        parts=stage.parts,
    )
