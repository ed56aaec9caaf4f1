"""`shardnet plan`: the plan that would be used and why, or what became of the last one."""

from __future__ import annotations

import contextlib
import os
from typing import Annotated

import msgspec
import typer

from shardnet.api.client import connect
from shardnet.assets import DEFAULT_MODEL_NAME
from shardnet.cluster.cache_dir import cache_dir
from shardnet.cluster.last_run import read_last_run
from shardnet.errors import UsageError
from shardnet.wire.control import LastRun, ModelChoice, PlanRequest

from .access import Access
from .narrow_wire import WireBar
from .options import (
    Context,
    DTypeName,
    Insecure,
    Json,
    KeyFile,
    KvDTypeOption,
    Layers,
    Local,
    Model,
    Nodes,
    NoMdns,
    Optimise,
    Peer,
    QuantName,
    StreamLayers,
    Threads,
    WireDTypeName,
    check_sendable,
    model_choice,
)
from .plan_text import plan_json, plan_text, run_json, run_text
from .run import run_command
from .target import connect_here, open_target


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
    quant: QuantName = "none",
    kv_dtype: KvDTypeOption = "auto",
    stream_layers: StreamLayers = "",
    threads: Threads = 0,
    optimise: Optimise = "",
    key_file: KeyFile = "",
    insecure: Insecure = False,
    again: Annotated[
        bool, typer.Option("--again", help="Measure nodes and links anew, whatever they remember.")
    ] = False,
    last: Annotated[
        bool,
        typer.Option("--last", help="Show what was predicted of the last run beside what it was."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Show the plan that would be used, why, what was measured, and which nodes were left out."""
    choice = model_choice(
        model=model,
        nodes=nodes,
        layers=layers,
        context=context,
        dtype=dtype,
        wire_dtype=wire_dtype,
        quant=quant,
        kv_dtype=kv_dtype,
        stream_layers=stream_layers,
        threads=threads,
        optimise=optimise,
    )
    check_sendable(PlanRequest(request=0, choice=choice))
    access = Access(key_file=key_file, insecure=insecure)
    if last:
        run_command(_show_last(choice, peer or [], access, as_json))
    else:
        run_command(_show(choice, local, peer or [], access, not no_mdns, again, as_json))


async def _show(
    choice: ModelChoice,
    local: int,
    peers: list[str],
    access: Access,
    mdns: bool,
    again: bool,
    as_json: bool,
) -> None:
    async with open_target(choice, local=local, peers=peers, access=access, mdns=mdns) as target:
        with WireBar(choice.wire_dtype) as bar:
            reply = await target.client.plan(target.choice, bar.update, again=again)
    print(msgspec.json.encode(plan_json(reply)).decode() if as_json else plan_text(reply))


async def _show_last(choice: ModelChoice, peers: list[str], access: Access, as_json: bool) -> None:
    run = await _last_run(choice.nodes[:1] or peers[:1], access)
    print(msgspec.json.encode(run_json(run)).decode() if as_json else run_text(run))


async def _last_run(addresses: list[str], access: Access) -> LastRun:
    """Ask the node that is named; else take the later run of this machine's node and its file.

    Raises UsageError when there was none.
    """
    async with contextlib.AsyncExitStack() as stack:
        if addresses:
            client = await stack.enter_async_context(connect(addresses[0], access.identity()))
            return await client.last_run()
        runs = [read_last_run(cache_dir(os.environ))]
        here = await connect_here(stack, access.identity())
        if here is not None:
            with contextlib.suppress(UsageError):  # it has led none
                runs.append(await here.last_run())
    found = [run for run in runs if run is not None]
    if not found:
        raise UsageError("no run is known on this machine: run `shardnet generate` first")
    return max(found, key=lambda run: run.ended_at_s)
