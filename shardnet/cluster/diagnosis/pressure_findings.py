"""Findings about a node's machine: it is short of memory, or the node rests.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardnet.cluster.diagnosis.facts import Finding, Severity, problem
from shardnet.cluster.placement.words import size
from shardnet.cluster.pressure.memory_strain import MemoryLook
from shardnet.wire.messages.diagnostics import NodeReport
from shardnet.wire.messages.membership import NodeInfo


def pressure_findings(where: str, info: NodeInfo, report: NodeReport) -> Iterator[Finding]:
    """Say why a node takes no layers, and whether programs on its machine wait for memory."""
    if info.rests:
        yield Finding(
            severity=Severity.INFO,
            topic="node",
            where=where,
            what=f"it rests and takes no layers: {info.rests}",
            remedy="it takes part again by itself",
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
        yield problem("memory", where, what, remedy)
