"""`shardnet plan`: the plan that would be used, and why."""

from __future__ import annotations

from typing import Any

import msgspec

from shardnet.assets import DEFAULT_MODEL_NAME
from shardnet.wire.control import ModelChoice, PlannedStage, PlanReply, PlanRequest

from .access import Access
from .narrow_wire import WireBar, narrow_wire_json, narrow_wire_words
from .options import (
    Context,
    DTypeName,
    Insecure,
    Json,
    KeyFile,
    Layers,
    Local,
    Model,
    Nodes,
    NoMdns,
    Peer,
    Threads,
    WireDTypeName,
    check_sendable,
    model_choice,
)
from .run import run_command
from .target import open_target


def plan(
    model: Model = DEFAULT_MODEL_NAME,
    nodes: Nodes = "",
    local: Local = 0,
    peer: Peer = None,
    no_mdns: NoMdns = False,
    layers: Layers = "",
    context: Context = 0,
    dtype: DTypeName = "auto",
    wire_dtype: WireDTypeName = "",
    threads: Threads = 0,
    key_file: KeyFile = "",
    insecure: Insecure = False,
    as_json: Json = False,
) -> None:
    """Show the plan that would be used, why, and which nodes were left out."""
    choice = model_choice(
        model=model,
        nodes=nodes,
        layers=layers,
        context=context,
        dtype=dtype,
        wire_dtype=wire_dtype,
        threads=threads,
    )
    check_sendable(PlanRequest(request=0, choice=choice))
    access = Access(key_file=key_file, insecure=insecure)
    run_command(_run(choice, local, peer or [], access, not no_mdns, as_json))


async def _run(
    choice: ModelChoice, local: int, peers: list[str], access: Access, mdns: bool, as_json: bool
) -> None:
    async with open_target(choice, local=local, peers=peers, access=access, mdns=mdns) as target:
        with WireBar(choice.wire_dtype) as bar:
            reply = await target.client.plan(target.choice, bar.update)
    print(msgspec.json.encode(_as_json(reply)).decode() if as_json else _as_text(reply))


def _as_json(plan: PlanReply) -> dict[str, Any]:
    return {
        "model": plan.model,
        "model_id": plan.model_id,
        "dtype": plan.dtype,
        "wire_dtype": plan.wire_dtype,
        "context": plan.context,
        "stages": [
            {
                "rank": stage.rank,
                "node": stage.node,
                "name": stage.name,
                "address": stage.address,
                "layers": list(stage.layers),
                "weight_bytes": stage.weight_bytes,
                "kv_bytes": stage.kv_bytes,
                "compute_ms": stage.compute_ms,
            }
            for stage in plan.stages
        ],
        "left_out": [{"node": out.node, "name": out.name, "why": out.why} for out in plan.left_out],
        "predicted_tok_s": plan.predicted_tok_s,
        "why": plan.why,
        **narrow_wire_json(plan.wire),
    }


def _as_text(plan: PlanReply) -> str:
    lines = [f"{plan.model} in {plan.dtype}, context {plan.context}: {plan.why}"]
    lines += [
        f"  rank {stage.rank}: {stage.name}{_where(stage)}, layers "
        f"{stage.layers[0]}-{stage.layers[1]}, weights {stage.weight_bytes / 2**20:.1f} MiB, "
        f"KV cache {stage.kv_bytes / 2**20:.1f} MiB"
        for stage in plan.stages
    ]
    lines += [f"  left out: {out.name}: {out.why}" for out in plan.left_out]
    if plan.wire is not None:
        lines.append(f"  {narrow_wire_words(plan, plan.wire)}")
    return "\n".join(lines)


def _where(stage: PlannedStage) -> str:
    """The node's address, if it has one: the node inside this process has none."""
    return f" ({stage.address})" if stage.address else ""
