"""`shardnet household`: the models that answer side by side, and which there are to be."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import typer

from shardnet.api.switching.household_file import read_household
from shardnet.assets import DEFAULT_MODEL_NAME
from shardnet.cluster.placement.words import size
from shardnet.files import expanded
from shardnet.wire.messages.household import HouseholdModelState
from shardnet.wire.messages.plans import ModelChoice

from ..finding.target import open_target
from ..flags import options
from ..flags.lazy_group import examples
from ..flags.ring_options import Wanted
from ..output.columns import columns, terminal_width
from ..output.exit_codes import counted, say, write_json, write_out


@examples(
    "shardnet household",
    "shardnet household household.toml",
    "shardnet household --drop titles",
)
@options.takes_groups
async def household(
    *,
    file: Annotated[
        str, typer.Argument(metavar="[FILE]", help="Models that there are to be (TOML).")
    ] = "",
    drop: Annotated[
        list[str] | None,
        options.option("--drop NAME", "A model that is to be no more; may be given several times."),
    ] = None,
    nodes: options.Nodes = "",
    peer: options.Peer = None,
    search: options.Search,
    access: options.Access,
    as_json: options.Json = False,
) -> None:
    """List the models of the household: how each is, on which nodes, and what it waits for.

    With a FILE the household has its models too, led by the node that is asked unless another one
    leads: programs ask for them by name at any node's server.
    """
    models = read_household(expanded(file)) if file else []
    wanted = Wanted(
        choice=ModelChoice(model=DEFAULT_MODEL_NAME, nodes=options.split_nodes(nodes)),
        local=0,
        peers=options.check_addresses(peer),
        search=search,
        access=access,
    )
    async with open_target(wanted) as target:
        if models or drop:
            await target.client.name_models(models, dropped=drop or ())
        found = await target.client.household()
    if as_json:
        write_json({"models": [as_printed(one) for one in found]})
        return
    if not found:
        say("the household has no models: name some with `shardnet household FILE`")
        return
    for line in columns(table(found), terminal_width()):
        write_out(line)


def as_printed(state: HouseholdModelState) -> dict[str, Any]:
    """Return what --json prints of a model."""
    told: dict[str, Any] = msgspec.to_builtins(state)
    model = told.pop("model")
    choice = model.pop("choice")
    return {**model, "model": choice["model"], **told}


def table(found: list[HouseholdModelState]) -> list[list[str]]:
    """Return the rows of the list, the header first."""
    rows = [["NAME", "MODEL", "PRIORITY", "STATE", "NODES", ""]]
    for one in found:
        shares = [f"{share.name} {size(share.memory_bytes)}" for share in one.shares]
        busy = f"{counted(one.n_requests, 'request')}" if one.n_requests else ""
        waiting = f"{one.n_waiting} waiting" if one.n_waiting else ""
        rows.append(
            [
                one.model.name + " (kept)" * one.model.kept,
                one.model.choice.model,
                str(one.model.priority),
                one.state,
                ", ".join(shares) or "-",
                "; ".join(filter(None, (busy, waiting, one.why))),
            ]
        )
    return rows
