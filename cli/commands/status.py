"""`shardnet status`: what the node of this machine holds, and for which ring."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import msgspec

from shardnet.api.client import Client
from shardnet.errors import PeerSilentError
from shardnet.transport.loop import at_most
from shardnet.types import BLOCK_POSITIONS, LayerRange

from ..finding.target import named_or_here
from ..flags.options import Access, Json, Nodes, split_nodes, takes_groups
from ..output.columns import terminal_width, wrapped
from ..output.exit_codes import counted, one_line, picked, write_json, write_out

if TYPE_CHECKING:
    from shardnet.wire.messages.diagnostics import NodeReport, PowerMeter, RingBehind, StageState
    from shardnet.wire.messages.membership import NodeInfo, ReportReply

_INDENT = "address  "
"""What continues a line stands below what was said first."""

ANSWER_S = 3.0
"""Deadline for a node's report."""


@takes_groups
async def status(*, nodes: Nodes = "", access: Access, as_json: Json = False) -> None:
    """Show what the node of this machine, or each named node, has loaded and runs."""
    async with contextlib.AsyncExitStack() as stack:
        clients = await named_or_here(stack, split_nodes(nodes), access.identity())
        for reply in await asyncio.gather(*(_ask(client) for client in clients)):
            assert reply.info is not None
            assert reply.report is not None
            if as_json:
                write_json(_as_json(reply.info, reply.report))
            else:
                lines = map(one_line, _as_lines(reply.info, reply.report))
                for line in wrapped(lines, terminal_width(), indent=len(_INDENT)):
                    write_out(line)


async def _ask(client: Client) -> ReportReply:
    """Ask a node for its own report. Raises PeerSilentError when it takes too long."""
    async with at_most(ANSWER_S), aclosing(client.report()) as answers:
        async for reply in answers:
            return reply
    raise PeerSilentError(
        f"{client.address} did not report its state within {ANSWER_S:.0f} s",
        remedy="look at its output",
    )


def _as_json(info: NodeInfo, report: NodeReport) -> dict[str, Any]:
    stage = report.stage
    return {
        **picked(info, "node", "name", "address", "version"),
        "cluster": report.cluster or None,
        "uptime_s": report.uptime_s,
        **picked(info, "device", "memory_bytes", "memory_free_bytes", "threads"),
        "power": [msgspec.structs.asdict(meter) for meter in info.meters],
        "draining": info.is_draining,
        "rests": info.rests or None,
        "pressure": None if report.pressure is None else msgspec.structs.asdict(report.pressure),
        "audit": None if report.audit is None else msgspec.to_builtins(report.audit),
        "requests": report.n_requests,
        "deputy": None if report.deputy is None else msgspec.structs.asdict(report.deputy),
        "deputy_of": [msgspec.structs.asdict(head) for head in report.deputy_of],
        "peers": [view.name for view in report.peers if view.is_linked],
        "reused_positions": report.ring.reused if report.ring is not None else None,
        "stage": None if stage is None else _stage_as_json(info, report, stage),
        "rings": [msgspec.structs.asdict(ring) for ring in report.rings],
    }


def _stage_as_json(info: NodeInfo, report: NodeReport, stage: StageState) -> dict[str, Any]:
    in_ring = stage.n_stages > 0
    return {
        "model": stage.model,
        "layers": list(stage.layers),
        "rank": stage.rank if in_ring else None,
        "stages": stage.n_stages if in_ring else None,
        "head": _head_name(info, report, stage) if in_ring else None,
        "epoch": stage.epoch if in_ring else None,
        **picked(stage, "dtype", "kernel", "weight_bytes"),
        "kv_positions": stage.room_blocks * BLOCK_POSITIONS,
        "kv_used_positions": stage.used_blocks * BLOCK_POSITIONS,
        "sequences": stage.n_open,
        "prefixes": None if stage.prefixes is None else msgspec.structs.asdict(stage.prefixes),
        "standby": None if stage.standby is None else msgspec.structs.asdict(stage.standby),
        "parts": [picked(part, "layers", "devices", "weight_bytes") for part in stage.parts],
    }


def _as_lines(info: NodeInfo, report: NodeReport) -> list[str]:
    from shardnet.cluster.diagnosis.facts import age
    from shardnet.cluster.placement.words import size

    peers = [view.name for view in report.peers if view.is_linked]
    used = info.memory_bytes - info.memory_free_bytes
    lines = [
        f"node     {info.name} ({info.node})",
        f"address  {info.address or '-'}, shardnet {info.version}, up {age(report.uptime_s)}",
        f"cluster  {report.cluster or 'none: no cluster key'}",
        f"device   {info.device}, {counted(info.threads, 'thread')}, memory {size(used)} used, "
        f"{size(info.memory_free_bytes)} free",
        f"peers    {', '.join(peers) or 'none'}",
        *map(_meter_line, info.meters),
    ]
    if info.is_draining:
        lines.append("state    draining: it gives its layers to other nodes, and ends")
    if info.rests:
        lines.append(f"state    resting: it takes no layers now, since {info.rests}")
    lines += [*_pressure_lines(report), *_audit_lines(report), *_deputy_lines(report)]
    stage = report.stage
    if stage is None:
        return [*lines, "stage    none: nothing is loaded", *map(ring_line, report.rings)]
    lines.append(f"stage    {LayerRange(*stage.layers).words} of {stage.model}")
    if stage.n_stages:
        lines.append(
            f"ring     rank {stage.rank} of {stage.n_stages}, "
            f"head {_head_name(info, report, stage)}, epoch {stage.epoch}"
        )
    else:
        lines.append("ring     none: the weights stay loaded for the next one")
    return [
        *lines,
        f"weights  {size(stage.weight_bytes)}, {stage.kernel}, ring in {stage.dtype}",
        f"KV room  {stage.used_blocks * BLOCK_POSITIONS} of "
        f"{stage.room_blocks * BLOCK_POSITIONS} positions used",
        *_part_lines(stage),
        *_prefix_lines(stage),
        *_standby_lines(stage),
        f"running  {_running(report, stage)}",
        *map(ring_line, report.rings),
    ]


def ring_line(ring: RingBehind) -> str:
    """Say of one of several rings behind a node what it has in hand, or why it takes nothing."""
    words = f"behind   the ring of {'+'.join(ring.names)}: {counted(ring.n_requests, 'request')}"
    if ring.n_taken_over:
        words += f", {ring.n_taken_over} taken over"
    return f"{words}; takes none: {ring.why}" if ring.why else words


def _part_lines(stage: StageState) -> list[str]:
    """Say which of the node's devices has which layers: nothing where it has one device."""
    from shardnet.cluster.placement.words import size

    return [
        f"device   {' + '.join(part.devices)}: {LayerRange(*part.layers).words}"
        f"{', each shared by them' if len(part.devices) > 1 else ''}, {size(part.weight_bytes)}"
        for part in stage.parts
    ]


def _meter_line(meter: PowerMeter) -> str:
    now = "not known now" if meter.watts is None else f"{meter.watts:.0f} W"
    return f"power    {now} ({meter.source}), {meter.joules / 3600:.2g} Wh since the node began"


def _pressure_lines(report: NodeReport) -> list[str]:
    """Say that memory is short on the machine, or was: nothing where it never was."""
    pressure = report.pressure
    if pressure is None or not (pressure.stalled or pressure.n_drops or pressure.n_rests):
        return []
    waited = ""
    if pressure.stalled is not None:
        waited = f"programs waited for memory in {pressure.stalled:.0%} of the last 10 s; "
    return [
        f"pressure {waited}caches dropped {counted(pressure.n_drops, 'time')}, "
        f"rested {counted(pressure.n_rests, 'time')}"
    ]


def _audit_lines(report: NodeReport) -> list[str]:
    """Say what the audits of a head have found: nothing where none were made."""
    from shardnet.cluster.diagnosis.facts import age
    from shardnet.cluster.placement.words import size

    audit = report.audit
    if audit is None:
        return []
    lines = [
        f"audits   {audit.n_audits}, {size(audit.looked_bytes)} of memory looked at, "
        f"{counted(audit.n_confirmed, 'layer')} computed alike by others"
    ]
    for found in audit.findings:
        is_left_out = ", and was left out" if found.is_left_out else ""
        lines.append(
            f"wrong    {found.name} computed wrong bits in layer {found.layer} "
            f"{age(max(0.0, report.sent_at - found.at))} ago{is_left_out}: {found.what}; "
            f"{found.remedy}"
        )
    return lines


def _deputy_lines(report: NodeReport) -> list[str]:
    """Say who goes on for whom: nothing where no answers are copied."""
    deputy = report.deputy
    lines = [
        f"deputy   goes on with {counted(head.n_requests, 'request')} of {head.node}, if it is lost"
        for head in report.deputy_of
    ]
    if deputy is not None:
        n_requests = counted(deputy.n_requests, "request")
        lines.append(f"deputy   {deputy.node} goes on with {n_requests}, if this node is lost")
    return lines


def _prefix_lines(stage: StageState) -> list[str]:
    """Say what is on disk of finished prompts: nothing where none are kept."""
    from shardnet.cluster.placement.words import size

    kept = stage.prefixes
    if kept is None:
        return []
    return [
        f"prompts  {size(kept.used_bytes)} of {size(kept.limit_bytes)} on disk, "
        f"{kept.saved_positions} positions saved, {kept.restored_positions} restored"
    ]


def _standby_lines(stage: StageState) -> list[str]:
    """Say for whom the node stands by: nothing where it does not."""
    from shardnet.cluster.placement.words import size

    standby = stage.standby
    if standby is None:
        return []
    layers = LayerRange(*standby.layers).words
    held = size(standby.weight_bytes) if standby.weight_bytes else "KV cache"
    return [f"standby  {layers} ({held}), if {standby.node} is lost"]


def _running(report: NodeReport, stage: StageState) -> str:
    sequences = counted(stage.n_open, "sequence")
    if stage.rank or not stage.n_stages:
        return sequences
    return f"{counted(report.n_requests, 'request')}, {sequences} open"


def _head_name(info: NodeInfo, report: NodeReport, stage: StageState) -> str:
    names = {view.node: view.name for view in report.peers} | {info.node: info.name}
    return names.get(stage.head, stage.head)
