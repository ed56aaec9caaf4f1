"""`shardnet plan`: the plan that would be used and why, or how the last run compared."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any

from shardnet.api.client import Client, connect
from shardnet.api.requests import check_request
from shardnet.cluster.head.last_run import read_last_run
from shardnet.cluster.machine.folders import cache_dir
from shardnet.errors import PlanError, UsageError
from shardnet.wire.messages.generation import LastRun
from shardnet.wire.messages.measurements import NodeMeasured
from shardnet.wire.messages.membership import NodeInfo
from shardnet.wire.messages.plans import NodeProgress, PlanReply, PlanRequest

from ..finding.target import connect_here, open_target
from ..flags.lazy_group import examples
from ..flags.options import Access, Json, flag, naming, takes_groups
from ..flags.ring_options import OnlineRingOptions
from ..output.columns import terminal_width, wrapped
from ..output.exit_codes import write_json, write_out
from ..output.plan_text import WireBar, plan_json, plan_text, run_json, run_text, what_if_text
from ..output.progress import LoadBars


@examples(
    "shardnet plan --model ~/models/Qwen3-4B",
    "shardnet plan --model qwen3 --quant int8 --context 32768",
    "shardnet plan --nodes attic.local:7433,desk.local:7433",
    'shardnet plan --model qwen3 --add "RTX 3060 12GB, 32 GB" --without attic',
    "shardnet plan --last",
)
@takes_groups
async def plan(
    *,
    ring: OnlineRingOptions,
    access: Access,
    again: bool = flag(False, "--again", "Measure nodes and links again; ignore stored figures."),
    add: list[str] | None = flag(
        None,
        "--add MACHINE",
        "Predict with a machine that is not there: 'RTX 3060 12GB, 32 GB', or its figures, "
        "NAME:GB/s:GiB[:TFLOPS]; may be given several times.",
    ),
    without: list[str] | None = flag(
        None, "--without NODE", "Predict without a node, by name or id."
    ),
    last: bool = flag(False, "--last", "Compare the last run's prediction with what was measured."),
    as_json: Json = False,
) -> None:
    """Show the plan that would be used, why, what was measured, and which nodes were left out."""
    wanted = ring.wanted(access)
    with naming(None):
        check_request(PlanRequest(request=0, choice=wanted.choice))
    if last:
        run = await _last_run([*wanted.choice.nodes[:1], *wanted.peers[:1]], access)
        _show(run_json(run) if as_json else run_text(run))
        return
    async with open_target(wanted) as target:
        with LoadBars() as planning, WireBar(wanted.choice.wire_dtype) as bar:

            def update(report: NodeProgress) -> None:
                if report.phase == "measuring":
                    planning.update(report)
                else:
                    planning.stop()
                    bar.update(report)

            client, choice = target.client, target.choice
            ask = partial(client.plan, choice, update)
            now, why_not, then = None, "", None
            try:
                now = await ask(again=again)
            except PlanError as error:
                if not add:
                    raise
                why_not = str(error)
            if add or without:
                left = [await _ids_of(client, now, name) for name in without or ()]
                then = await ask(added=add or (), without=[*chain(*left)])
    if then is None:
        assert now is not None
        _show(plan_json(now) if as_json else plan_text(now))
    elif as_json:
        _show(plan_json(then) | {"now": now and plan_json(now), "why_not_now": why_not or None})
    else:
        told = [*(f"with {one}" for one in add or ()), *(f"without {one}" for one in without or ())]
        _show(what_if_text(", ".join(told), now, why_not, then))


async def _ids_of(client: Client, now: PlanReply | None, name: str) -> list[str]:
    """Return the ids of the nodes with a name or id. Raises UsageError where there is none."""
    known: Sequence[NodeMeasured | NodeInfo] = now.nodes if now is not None else ()
    if not known:
        status = await client.status(with_peers=True)
        known = [status.node, *status.peers]
    if found := [node.node for node in known if name in (node.name, node.node)]:
        return found
    there = ", ".join(node.name for node in known)
    raise UsageError(f"--without {name}: there is no such node", remedy=f"name one of {there}")


def _show(told: dict[str, Any] | str) -> None:
    """Print JSON, or a text whose lines are broken where they are longer than the terminal."""
    if isinstance(told, str):
        write_out("\n".join(wrapped(told.splitlines(), terminal_width())))
    else:
        write_json(told)


async def _last_run(addresses: list[str], access: Access) -> LastRun:
    """Return the last run of the named node, else the later one of this machine's node and file.

    Raises UsageError when no run is known.
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
        raise UsageError("no run is known on this machine", remedy="run `shardnet generate` first")
    return max(found, key=lambda run: run.ended_at_s)
