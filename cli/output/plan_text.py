"""Plans and runs as text and as JSON, and what `shardnet plan` shows of --wire-dtype."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec

from shardnet.cluster.machine import kernels
from shardnet.cluster.placement.energy import best_saving
from shardnet.stage.estimate.memory_estimate import KEPT_ROWS_BYTES
from shardnet.types import LayerRange
from shardnet.wire.messages import plans
from shardnet.wire.messages.diagnostics import Drafted
from shardnet.wire.messages.generation import ExpertCount, LastRun, MeanStageTime
from shardnet.wire.messages.measurements import NodeMeasured, StageSeconds, WayMeasured

from .bars import make_bars
from .exit_codes import counted, one_line, picked, say

if TYPE_CHECKING:
    from rich.progress import Progress


class WireBar:
    """Progress of measuring the error: a bar on a terminal, else one line when it begins.

    Shows nothing if the error was measured before.
    """

    def __init__(self, wire_dtype: str) -> None:
        self._words = f"measuring the error of wire dtype {wire_dtype}"
        self._progress: Progress | None = None

    def __enter__(self) -> WireBar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def update(self, report: plans.NodeProgress) -> None:
        """Move the bar; the first report makes it."""
        if self._progress is None:
            self._progress = self._begin(report.total_bytes)
        self._progress.update(self._progress.task_ids[0], completed=report.done_bytes)

    def _begin(self, total_bytes: int) -> Progress:
        progress = make_bars()
        if not progress.console.is_terminal:
            say(f"{self._words}: the head reads the whole checkpoint, {total_bytes / 1e9:.2g} GB")
        progress.add_task(self._words, total=total_bytes)
        progress.start()
        return progress


def narrow_wire_json(wire: plans.NarrowWire | None) -> dict[str, Any]:
    """Return its keys of `plan --json`: null without --wire-dtype or if nothing was measured."""
    return {
        "wire_error": msgspec.to_builtins(wire.error) if wire else None,
        "wire_saves_ms": wire.saves_ms if wire else None,
        "wire_why": wire.why if wire else "",
    }


def narrow_wire_words(plan: plans.PlanReply, wire: plans.NarrowWire) -> str:
    """Describe the size, the time saved and the error of the plan's wire dtype."""
    name = f"wire {plan.wire_dtype}"
    if len(plan.stages) == 1 or plan.wire_dtype == plan.dtype:
        if wire.error is not None:  # only parts within stages are rounded
            return f"parts between the nodes of a stage are rounded: {_error_words(wire.error)}"
        return f"{name}: {wire.why}"
    size = f"{_kb(wire.row_bytes)} instead of {_kb(wire.exact_row_bytes)} kB per token and hop"
    links = [
        f"{stage.rank}-{stage.rank + 1} {stage.wire_dtype}"
        for stage in plan.stages[:-1]
        if stage.wire_dtype not in ("", plan.dtype)
    ]
    if plan.wire_dtype == plans.MIXED_WIRES:
        name += f" ({', '.join(links)})"
    error = _error_words(wire.error) if wire.error else f"error not measured: {wire.why}"
    return f"{name}: {size}, {_saving_words(plan, wire)}; {error}"


def _saving_words(plan: plans.PlanReply, wire: plans.NarrowWire) -> str:
    if wire.saves_ms is None:
        return "time saved unknown, as not all links are measured"
    verb = "saves" if wire.saves_ms >= 0 else "loses"
    words = f"{verb} {short_number(abs(wire.saves_ms))} ms"
    if plan.predicted_tok_s:
        exact_ms = 1e3 / plan.predicted_tok_s + wire.saves_ms
        words += f" of {short_number(exact_ms)} ms"
    words += " per token at these links"
    return words if wire.saves_ms >= 0 else f"{words}: quantising takes longer than it saves"


def _error_words(error: plans.WireError) -> str:
    return (
        f"logits off by at most {short_number(error.max_error)} of their spread "
        f"({short_number(error.rms_error)} rms, KL {error.kl:.1g}), "
        f"{error.n_changed} of {error.n_rows} likeliest tokens differ"
    )


def _kb(size_bytes: int) -> str:
    return f"{size_bytes / 1e3:.1f}"


def short_number(value: float) -> str:
    """Write two significant digits, whole numbers from 10 on."""
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


NOT_MEASURED = "not measured"

HOPS_NOTE = (
    "Hop times are measured together: the head's round trip without compute and queueing, divided "
    "by the number of hops."
)


def plan_json(plan: plans.PlanReply) -> dict[str, Any]:
    """Return the object that `plan --json` prints."""
    told: dict[str, Any] = _builtins(plan)
    for key in ("type", "request", "recommended", "wire", "nodes", "links"):
        del told[key]
    for stage in told["stages"]:
        stage |= {key: stage[key] or None for key in ("wire_dtype", "parts_why")}
        stage["estimated"] = stage["address"] == plans.NOT_THERE
    return told | {
        "quant": plan.quant or "none",
        "adapters": [picked(adapter, "name", "weight_bytes") for adapter in plan.adapters],
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
                    "gather_ms": link.gather_s and _in_ms(link.gather_s),
                    "gather_bytes_per_s": link.gather_bytes_per_s,
                }
                for link in plan.links
            ],
        },
    }


def plan_text(plan: plans.PlanReply) -> str:
    """Describe a plan: its stages, their predicted times, and the measurements behind them."""
    lines = [f"{plan.model} in {dtype_words(plan)}, context {plan.context}: {plan.why}"]
    if plan.predicted_tok_s is not None:
        of_what = " of many sequences" if plan.optimise == "throughput" else ""
        stages = [stage for ring in plan.rings for stage in ring.stages] or plan.stages
        used = {stage.node for stage in stages}
        is_steady = all(node.is_steady for node in plan.nodes if node.node in used)
        of_what += "" if is_steady else ", measured while busy: likely more"
        lines.append(f"  predicted: {short_number(plan.predicted_tok_s)} tokens/s{of_what}")
    lines += _energy_lines(plan)
    lines += [f"  warning: {warning}" for warning in plan.warnings]
    if plan.exact is not None:
        lines.append(f"  same bits ({plan.arith} arithmetic): {plan.exact.why}")
    lines += _conversation_lines(plan)
    lines += _ring_lines(plan)
    lines += [_standby_line(plan, standby) for standby in plan.standbys]
    lines += [f"  left out: {out.name}: {out.why}" for out in plan.left_out]
    lines += [_drafter_line(each) for each in plan.drafters]
    if plan.wire is not None:
        lines.append(f"  {narrow_wire_words(plan, plan.wire)}")
    lines += _without_kernels(plan)
    if plan.nodes:
        lines += ["measured:", *(f"  {_node_line(node)}" for node in plan.nodes)]
        names = {node.node: node.name for node in plan.nodes}
        lines += [f"  {_link_line(link, names)}" for link in plan.links]
    return "\n".join(map(one_line, lines))


def _energy_lines(plan: plans.PlanReply) -> list[str]:
    """Say what a token takes, and which node costs more joules than it is worth."""
    energy = plan.energy
    if energy is None:
        return []
    line = f"  energy: about {short_number(energy.joules_per_token)} J a token "
    line += f"({', '.join(energy.sources)})"
    best = best_saving(energy)
    if best is not None and plan.predicted_tok_s:
        fewer = 100 * (1 - best.joules_per_token / energy.joules_per_token)
        slower = 100 * (1 - best.predicted_tok_s / plan.predicted_tok_s)
        speed = f"{slower:.0f} % slower" if slower >= 1 else "as fast"
        line += f"; without {best.name}, switched off: {fewer:.0f} % fewer joules, {speed}"
    return [line]


def what_if_text(
    title: str, now: plans.PlanReply | None, why_not: str, then: plans.PlanReply
) -> str:
    """Describe a plan as it would be, beside that now, None where nothing fits for `why_not`."""
    rate = f"{_rate(then.predicted_tok_s)} tokens/s"
    if now is None:
        head, had = f"{title}: fits then, {rate}", [f"  now: {why_not}"]
    else:
        head = f"{title}: {rate} instead of {_rate(now.predicted_tok_s)}"
        had = ["  now:", *(f"  {line}" for line in _ring_lines(now))]
    return "\n".join([*map(one_line, [head, *had]), plan_text(then)])


def _conversation_lines(plan: plans.PlanReply) -> list[str]:
    """Describe how long turns of a long conversation take, and what memory keeps of such."""
    lines, turns, kept = [], plan.turns, plan.kept
    if turns is not None:
        lines.append(
            f"  a prompt of {turns.n_prompt} tokens: first token after about "
            f"{short_number(turns.first_s)} s, of its next turn ({turns.n_next} more) after "
            f"{short_number(turns.next_s)} s, read from disk ({_rate_of(turns.disk_bytes_per_s)}) "
            f"after {short_number(turns.resumed_s)} s"
        )
    if kept is not None:
        states = f" and {kept.states} states" if kept.states else ""
        lines.append(
            f"  keeps {kept.positions} positions{states} of conversations in memory (about "
            f"{counted(kept.conversations, 'conversation')} of {kept.n_prompt})"
        )
    return lines


def _ring_lines(plan: plans.PlanReply) -> list[str]:
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


def _stage_lines(plan: plans.PlanReply) -> list[str]:
    lines = []
    for stage in plan.stages:
        lines.append(_stage_line(plan, stage))
        lines += [f"    {_part_line(part)}" for part in stage.parts]
    return lines


def _part_line(part: plans.PlannedPart) -> str:
    line = (
        f"{' + '.join(part.devices)}: {LayerRange(*part.layers).words}"
        f"{', each shared by them' if len(part.devices) > 1 else ''}, "
        f"weights {part.weight_bytes / 2**20:.1f} MiB, KV cache {part.kv_bytes / 2**20:.1f} MiB"
    )
    return line if part.compute_ms is None else f"{line}, compute {_ms(part.compute_ms)}"


def _standby_line(plan: plans.PlanReply, standby: plans.PlannedStandby) -> str:
    stage, layers = plan.stages[standby.rank].name, LayerRange(*standby.layers).words
    kv = f"KV up to {standby.kv_bytes / 2**20:.1f} MiB"
    if not standby.weight_bytes:
        return (
            f"  {standby.name} follows the KV cache of {stage}: {layers} ({kv}, half of the link)"
        )
    size = f"{standby.weight_bytes / 2**20:.1f} MiB, {kv}"
    return f"  {standby.name} stands by for {stage}: {layers} ({size})"


def _drafter_line(drafted: Drafted) -> str:
    n_tokens = drafted.n_tokens / max(1, drafted.n_steps)
    return (
        f"  drafts: {drafted.drafter} on {drafted.node}, {drafted.n_accepted} of "
        f"{drafted.n_drafted} right, {n_tokens:.2f} tokens a step"
        + (f" ({drafted.why})" if drafted.why else "")
    )


def _without_kernels(plan: plans.PlanReply) -> list[str]:
    """Name the candidates that compute without the compiled kernels, in a line if there are any."""
    names = [node.name for node in plan.nodes if node.isa == kernels.NONE]
    if not names:
        return []
    return [f"  no compiled kernels on {', '.join(names)}: {kernels.SLOWER}; {kernels.REMEDY}"]


def dtype_words(plan: plans.PlanReply) -> str:
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


def layer_words(plan: plans.PlanReply, stage: plans.PlannedStage) -> str:
    """Name a stage's layers, the last one included: `layers 0-7 of 22`."""
    return f"{LayerRange(*stage.layers).words} of {plan.stages[-1].layers[1]}"


def run_json(run: LastRun) -> dict[str, Any]:
    """Return the object that `plan --last --json` prints."""
    plan, timing = run.plan, run.timing
    return {
        **picked(plan, "model", "dtype"),
        "quant": plan.quant or "none",
        **picked(plan, "kv_dtype", "wire_dtype", "context", "optimise"),
        **picked(run, "n_tokens", "ended_at_s"),
        "predicted_tok_s": plan.predicted_tok_s,
        **picked(timing, "decode_tok_s", "ttft_s"),
        "stages": [
            {
                **picked(stage, "rank", "node", "name"),
                "layers": list(stage.layers),
                "predicted_compute_ms": stage.compute_ms,
                **picked(share, "compute_ms", "queue_ms"),
                "predicted_hop_ms": stage.hop_ms,
                "hop_ms": share.wire_ms if len(plan.stages) > 1 else None,
            }
            for stage, share in _pairs(run)
        ],
        "experts": [_builtins(one) for one in run.experts],
        "note": HOPS_NOTE,
    }


def run_text(run: LastRun) -> str:
    """Describe a run: predicted beside measured times."""
    plan, rows = run.plan, []
    for stage, share in _pairs(run):
        what = f"  rank {stage.rank}: {stage.name}, {layer_words(plan, stage)}"
        waited = f" (and {_ms(share.queue_ms)} waiting)" if share.queue_ms >= 0.1 else ""
        rows.append((what, _predicted_ms(stage.compute_ms), _ms(share.compute_ms) + waited))
        rows += [
            ("    experts in memory", "", f"{100 * _share(one):.1f} % of {one.n_used} used")
            for one in run.experts
            if one.rank == stage.rank
        ]
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
    told["read_bytes_per_s"] = node.seconds and node.seconds.read_bytes_per_s
    told["devices"] = [
        picked(device, "name", "memory_bytes")
        | _speeds_json(device.seconds)
        | picked(device, "is_steady")
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


def _stage_line(plan: plans.PlanReply, stage: plans.PlannedStage) -> str:
    where = f" ({stage.address})" if stage.address else ""  # inside this process there is none
    if stage.address == plans.NOT_THERE:
        where = f" ({plans.NOT_THERE}: estimated)"
    line = (
        f"  rank {stage.rank}: {stage.name}{where}, {layer_words(plan, stage)}, "
        f"weights {stage.weight_bytes / 2**20:.1f} MiB, KV cache {stage.kv_bytes / 2**20:.1f} MiB"
    )
    if stage.shards:
        others = ", ".join(f"{shard.name} ({shard.address})" for shard in stage.shards)
        line += f", each layer cut over it and {others}"
    if stage.shares:
        parts = " : ".join(f"{100 * share / sum(stage.shares):.0f} %" for share in stage.shares)
        line += f" in parts of {parts}"
    if stage.dtype not in ("", plan.dtype):
        line += f", computes in {stage.dtype}"
    if plan.wire_dtype == plans.MIXED_WIRES and stage.wire_dtype:
        line += f", sends {stage.wire_dtype}"
    if stage.streamed_layers:
        line += f", {stage.streamed_layers} layers streamed from disk"
    if stage.looked_up_bytes:
        at = "on its disk"
        if stage.rows_from:
            at = f"at {' or '.join(stage.rows_from)}, {KEPT_ROWS_BYTES >> 20} MiB for rows of these"
        line += f", looks up {stage.looked_up_bytes / 2**20:.1f} MiB of tables {at}"
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
    if seconds.read_bytes_per_s is not None:
        memory += f" that reads {short_number(seconds.read_bytes_per_s / 1e9)} GB/s"
    measured = f"{node.kernel}, threads: {node.threads}, {_date(node.measured_at_s)}"
    if node.measured_at_s is None:
        measured = f"{node.kernel}: it is {plans.NOT_THERE}"
    return (
        f"{node.name}: layer {_ms(seconds.layer_s * 1e3)} for 1 token, "
        f"{_ms(seconds.layer_256_s * 1e3)} for 256; embedding {_ms(seconds.embed_s * 1e3)}, "
        f"LM head {_ms(seconds.head_s * 1e3)}; {memory}{disk} "
        f"({measured}{'' if node.is_steady else ', measured while busy'}){devices}"
    )


def _link_line(link: WayMeasured, names: dict[str, str]) -> str:
    ends = " - ".join(names.get(end, end) for end in (link.sender, link.receiver))
    words = f"{ends}: round trip {_ms(link.round_trip_s * 1e3)}, {_rate_of(link.bytes_per_s)}"
    if link.gather_s is not None and link.gather_bytes_per_s is not None:
        words += f"; a gather {_ms(link.gather_s * 1e3)}, {_rate_of(link.gather_bytes_per_s)}"
    return words if link.is_steady else f"{words} (measured while busy)"


def _pairs(run: LastRun) -> list[tuple[plans.PlannedStage, MeanStageTime]]:
    """Pair each stage with its measured times, those without any left out."""
    shares = {share.rank: share for share in run.timing.per_stage}
    return [(stage, shares[stage.rank]) for stage in run.plan.stages if stage.rank in shares]


def _share(experts: ExpertCount) -> float:
    """Return the share of used experts that were in memory."""
    return 1 - experts.n_read / experts.n_used


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
