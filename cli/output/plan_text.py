"""Plans and runs as text and as JSON.

Knows words, columns and JSON keys. Must not know how a plan is asked for.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from shardnet.cluster.machine import kernels
from shardnet.types import LayerRange
from shardnet.wire.messages.generation import LastRun, MeanStageTime
from shardnet.wire.messages.measurements import NodeMeasured, StageSeconds, WayMeasured
from shardnet.wire.messages.plans import (
    MIXED_WIRES,
    PlannedPart,
    PlannedStage,
    PlannedStandby,
    PlanReply,
)

from .exit_codes import one_line
from .narrow_wire import narrow_wire_json, narrow_wire_words, short_number

NOT_MEASURED = "not measured"

HOPS_NOTE = (
    "Hop times are measured together: the head's round trip without compute and queueing, divided "
    "by the number of hops."
)


def plan_json(plan: PlanReply) -> dict[str, Any]:
    """Return the object that `plan --json` prints."""
    told: dict[str, Any] = _builtins(plan)
    for key in ("type", "request", "recommended", "wire", "nodes", "links"):
        del told[key]
    for stage in told["stages"]:
        stage |= {key: stage[key] or None for key in ("wire_dtype", "parts_why")}
    return told | {
        "quant": plan.quant or "none",
        "adapters": [
            {"name": adapter.name, "weight_bytes": adapter.weight_bytes}
            for adapter in plan.adapters
        ],
        "rings": [
            {
                "nodes": [stage.node for stage in ring.stages],
                "names": [stage.name for stage in ring.stages],
                "layers": [list(stage.layers) for stage in ring.stages],
                "predicted_tok_s": ring.predicted_tok_s,
            }
            for ring in plan.rings
        ],
        **narrow_wire_json(plan.wire),
        "measured": {
            "nodes": [_node_json(node) for node in plan.nodes],
            "links": [
                {
                    "from": link.sender,
                    "to": link.receiver,
                    "round_trip_ms": _in_ms(link.round_trip_s),
                    "bytes_per_s": link.bytes_per_s,
                    "is_steady": link.is_steady,
                }
                for link in plan.links
            ],
        },
    }


def plan_text(plan: PlanReply) -> str:
    """Describe a plan: its stages, their predicted times, and the measurements behind them."""
    lines = [f"{plan.model} in {dtype_words(plan)}, context {plan.context}: {plan.why}"]
    if plan.predicted_tok_s is not None:
        of_what = " of many sequences" if plan.optimise == "throughput" else ""
        stages = [stage for ring in plan.rings for stage in ring.stages] or plan.stages
        used = {stage.node for stage in stages}
        is_steady = all(node.is_steady for node in plan.nodes if node.node in used)
        of_what += "" if is_steady else ", measured while busy: likely more"
        lines.append(f"  predicted: {short_number(plan.predicted_tok_s)} tokens/s{of_what}")
    lines += [f"  warning: {warning}" for warning in plan.warnings]
    if plan.exact is not None:
        lines.append(f"  same bits ({plan.arith} arithmetic): {plan.exact.why}")
    lines += _ring_lines(plan)
    lines += [_standby_line(plan, standby) for standby in plan.standbys]
    lines += [f"  left out: {out.name}: {out.why}" for out in plan.left_out]
    if plan.wire is not None:
        lines.append(f"  {narrow_wire_words(plan, plan.wire)}")
    lines += _without_kernels(plan)
    if plan.nodes:
        lines += ["measured:", *(f"  {_node_line(node)}" for node in plan.nodes)]
        names = {node.node: node.name for node in plan.nodes}
        lines += [f"  {_link_line(link, names)}" for link in plan.links]
    return "\n".join(map(one_line, lines))


def _ring_lines(plan: PlanReply) -> list[str]:
    """Describe the stages, ring by ring where there are several behind one head."""
    if not plan.rings:
        return _stage_lines(plan)
    lines = []
    for number, ring in enumerate(plan.rings, 1):
        about = "" if ring.predicted_tok_s is None else f", {_rate(ring.predicted_tok_s)} tokens/s"
        lines.append(f"  ring {number} of {len(plan.rings)}{about}:")
        stages = _stage_lines(msgspec.structs.replace(plan, stages=ring.stages))
        lines += [f"  {line}" for line in stages]
    return lines


def _stage_lines(plan: PlanReply) -> list[str]:
    lines = []
    for stage in plan.stages:
        lines.append(_stage_line(plan, stage))
        lines += [f"    {_part_line(part)}" for part in stage.parts]
    return lines


def _part_line(part: PlannedPart) -> str:
    line = (
        f"{' + '.join(part.devices)}: {LayerRange(*part.layers).words}"
        f"{', each shared by them' if len(part.devices) > 1 else ''}, "
        f"weights {part.weight_bytes / 2**20:.1f} MiB, KV cache {part.kv_bytes / 2**20:.1f} MiB"
    )
    return line if part.compute_ms is None else f"{line}, compute {_ms(part.compute_ms)}"


def _standby_line(plan: PlanReply, standby: PlannedStandby) -> str:
    size = f"{standby.weight_bytes / 2**20:.1f} MiB, KV up to {standby.kv_bytes / 2**20:.1f} MiB"
    return (
        f"  {standby.name} stands by for {plan.stages[standby.rank].name}: "
        f"{LayerRange(*standby.layers).words} ({size})"
    )


def _without_kernels(plan: PlanReply) -> list[str]:
    """Name the candidates that compute without the compiled kernels, in a line if there are any."""
    names = [node.name for node in plan.nodes if node.isa == kernels.NONE]
    if not names:
        return []
    return [f"  no compiled kernels on {', '.join(names)}: {kernels.SLOWER}; {kernels.REMEDY}"]


def dtype_words(plan: PlanReply) -> str:
    """Describe a plan's dtypes: `bfloat16`, or `bfloat16 with int4 weights and int8 KV`."""
    quantised = [f"{plan.quant} weights"] if plan.quant else []
    if plan.kv_dtype != "auto":
        quantised.append(f"{plan.kv_dtype} KV")
    if plan.mtp_bytes:
        quantised.append(f"{plan.mtp_bytes / 2**20:.1f} MiB for MTP")
    if plan.tower_bytes:
        towers = f"{plan.tower_bytes / 2**20:.1f} MiB for pictures, on the first stage"
        if plan.picture_s is not None:
            towers += f" (one of 512 x 512 in about {1000 * plan.picture_s:.0f} ms)"
        quantised.append(towers)
    if plan.adapters:
        names = ", ".join(adapter.name for adapter in plan.adapters)
        size = sum(adapter.weight_bytes for adapter in plan.adapters) / 2**20
        quantised.append(f"{size:.1f} MiB for LoRA ({names})")
    return f"{plan.dtype} with {' and '.join(quantised)}" if quantised else plan.dtype


def layer_words(plan: PlanReply, stage: PlannedStage) -> str:
    """Name a stage's layers, the last one included: `layers 0-7 of 22`."""
    return f"{LayerRange(*stage.layers).words} of {plan.stages[-1].layers[1]}"


def run_json(run: LastRun) -> dict[str, Any]:
    """Return the object that `plan --last --json` prints."""
    plan, timing = run.plan, run.timing
    return {
        "model": plan.model,
        "dtype": plan.dtype,
        "quant": plan.quant or "none",
        "kv_dtype": plan.kv_dtype,
        "wire_dtype": plan.wire_dtype,
        "context": plan.context,
        "optimise": plan.optimise,
        "n_tokens": run.n_tokens,
        "ended_at_s": run.ended_at_s,
        "predicted_tok_s": plan.predicted_tok_s,
        "decode_tok_s": timing.decode_tok_s,
        "ttft_s": timing.ttft_s,
        "stages": [
            {
                "rank": stage.rank,
                "node": stage.node,
                "name": stage.name,
                "layers": list(stage.layers),
                "predicted_compute_ms": stage.compute_ms,
                "compute_ms": share.compute_ms,
                "queue_ms": share.queue_ms,
                "predicted_hop_ms": stage.hop_ms,
                "hop_ms": share.wire_ms if len(plan.stages) > 1 else None,
            }
            for stage, share in _pairs(run)
        ],
        "note": HOPS_NOTE,
    }


def run_text(run: LastRun) -> str:
    """Describe a run: predicted beside measured times."""
    plan, rows = run.plan, []
    for stage, share in _pairs(run):
        what = f"  rank {stage.rank}: {stage.name}, {layer_words(plan, stage)}"
        waited = f" (and {_ms(share.queue_ms)} waiting)" if share.queue_ms >= 0.1 else ""
        rows.append((what, _predicted_ms(stage.compute_ms), _ms(share.compute_ms) + waited))
        if len(plan.stages) > 1:
            to = plan.stages[(stage.rank + 1) % len(plan.stages)].name
            rows.append((f"    hop to {to}", _predicted_ms(stage.hop_ms), _ms(share.wire_ms)))
    many = plan.optimise == "throughput" and plan.predicted_tok_s is not None
    predicted = f"{_rate(plan.predicted_tok_s)}{' of many sequences' if many else ''}"
    rows.append(("  tokens/s", predicted, _rate(run.timing.decode_tok_s)))
    rows.insert(0, ("", "predicted", "measured"))
    wide = [max(len(row[column]) for row in rows) for column in range(2)]
    ended = f"{run.n_tokens} tokens, ended {_date(run.ended_at_s)}"
    lines = [f"{plan.model} in {dtype_words(plan)}, {ended}"]
    lines += [f"{a:{wide[0]}}  {b:{wide[1]}}  {c}".rstrip() for a, b, c in rows]
    lines = [*map(one_line, lines)]
    return "\n".join([*lines, HOPS_NOTE] if len(plan.stages) > 1 else lines)


def _node_json(node: NodeMeasured) -> dict[str, Any]:
    told = _builtins(node) | _speeds_json(node.seconds, "embed", "step")
    told |= {key: told[key] or None for key in ("kernel", "isa", "threads", "why_not")}
    told["devices"] = [
        {
            "name": device.name,
            "memory_bytes": device.memory_bytes,
            **_speeds_json(device.seconds),
            "is_steady": device.is_steady,
        }
        for device in node.devices
    ]
    told["gather_ms"] = node.gather_s and _in_ms(node.gather_s)
    return {key: value for key, value in told.items() if key not in ("seconds", "gather_s")}


def _builtins(told: msgspec.Struct) -> dict[str, Any]:
    """Return what a struct has as JSON knows it."""
    known: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(told))
    return known


def _speeds_json(seconds: StageSeconds | None, *further: str) -> dict[str, float | None]:
    return {
        f"{name}_ms": None if seconds is None else _in_ms(getattr(seconds, f"{name}_s"))
        for name in ("layer", "layer_256", "head", *further)
    }


def _stage_line(plan: PlanReply, stage: PlannedStage) -> str:
    where = f" ({stage.address})" if stage.address else ""  # inside this process there is none
    line = (
        f"  rank {stage.rank}: {stage.name}{where}, {layer_words(plan, stage)}, "
        f"weights {stage.weight_bytes / 2**20:.1f} MiB, KV cache {stage.kv_bytes / 2**20:.1f} MiB"
    )
    if stage.shards:
        others = ", ".join(f"{shard.name} ({shard.address})" for shard in stage.shards)
        line += f", each layer cut over it and {others}"
    if stage.dtype not in ("", plan.dtype):
        line += f", computes in {stage.dtype}"
    if plan.wire_dtype == MIXED_WIRES and stage.wire_dtype:
        line += f", sends {stage.wire_dtype}"
    if stage.streamed_layers:
        line += f", {stage.streamed_layers} layers streamed from disk"
    if stage.compute_ms is not None:
        line += f", compute {_ms(stage.compute_ms)}"
    if stage.hop_ms is not None:
        line += f", hop to {plan.stages[(stage.rank + 1) % len(plan.stages)].name} "
        line += _ms(stage.hop_ms)
    if stage.fetch_bytes:
        sources = " or ".join(stage.fetch_from) or "other nodes"
        line += f", fetches {stage.fetch_bytes / 2**20:.1f} MiB from {sources} first"
        line += f" (about {short_number(stage.fetch_s)} s)" if stage.fetch_s else ""
    return line


def _node_line(node: NodeMeasured) -> str:
    memory = f"memory {node.memory_bytes / 2**30:.2f} GiB"
    if node.seconds is None:
        return f"{node.name}: {memory}; speed not measured: {node.why_not}"
    devices = "".join(
        f"; {device.name}: layer {_ms(device.seconds.layer_s * 1e3)}, "
        f"memory {device.memory_bytes / 2**30:.2f} GiB"
        for device in node.devices
        if device.seconds is not None
    )
    if node.gather_s is not None:
        devices += f"; a gather of their parts {_ms(node.gather_s * 1e3)}"
    disk = f", disk {_rate_of(node.disk_bytes_per_s)}" if node.disk_bytes_per_s else ""
    seconds = node.seconds
    return (
        f"{node.name}: layer {_ms(seconds.layer_s * 1e3)} for 1 token, "
        f"{_ms(seconds.layer_256_s * 1e3)} for 256; embedding {_ms(seconds.embed_s * 1e3)}, "
        f"LM head {_ms(seconds.head_s * 1e3)}; {memory}{disk} "
        f"({node.kernel}, threads: {node.threads}, {_date(node.measured_at_s)}"
        f"{'' if node.is_steady else ', measured while busy'}){devices}"
    )


def _link_line(link: WayMeasured, names: dict[str, str]) -> str:
    ends = " - ".join(names.get(end, end) for end in (link.sender, link.receiver))
    return f"{ends}: round trip {_ms(link.round_trip_s * 1e3)}, {_rate_of(link.bytes_per_s)}" + (
        "" if link.is_steady else " (measured while busy)"
    )


def _pairs(run: LastRun) -> list[tuple[PlannedStage, MeanStageTime]]:
    """Pair each stage with its measured times, those without any left out."""
    shares = {share.rank: share for share in run.timing.per_stage}
    return [(stage, shares[stage.rank]) for stage in run.plan.stages if stage.rank in shares]


def _predicted_ms(ms: float | None) -> str:
    return NOT_MEASURED if ms is None else _ms(ms)


def _rate(tok_s: float | None) -> str:
    return NOT_MEASURED if tok_s is None else short_number(tok_s)


def _rate_of(bytes_per_s: float) -> str:
    return f"{short_number(bytes_per_s / 1e6)} MB/s"


def _ms(ms: float) -> str:
    return f"{short_number(ms)} ms"


def _in_ms(seconds: float) -> float:
    """Convert seconds to milliseconds with six significant digits."""
    return float(f"{seconds * 1e3:.6g}")


def _date(since_1970_s: float | None) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(since_1970_s or 0))
