"""`shardnet models` and `household`: what this machine and its peers have, and what answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import typer

from shardnet.api.switching.household_file import read_household
from shardnet.assets import DEFAULT_MODEL_NAME
from shardnet.files import expanded
from shardnet.wire.messages.household import HouseholdModelState
from shardnet.wire.messages.membership import ListedModel, ModelsListed
from shardnet.wire.messages.plans import ModelChoice

from ..finding.target import open_target
from ..flags import options
from ..flags.lazy_group import examples
from ..flags.ring_options import Wanted
from ..output.columns import columns, terminal_width
from ..output.exit_codes import counted, picked, say, write_json, write_out


@options.takes_groups
async def models(
    *,
    nodes: options.Nodes = "",
    peer: options.Peer = None,
    search: options.Search,
    model_folder: options.ModelFolder = None,
    access: options.Access,
    as_json: options.Json = False,
) -> None:
    """List the models of the node that is asked and of its peers; --model takes every name.

    They are looked for in the caches of Hugging Face and shardnet, in Ollama's and LM Studio's
    stores, and in --model-folder. Part of a name is enough for --model where it means one of them.
    Whether a model fits is estimated from the memory of the nodes together. What cannot be used is
    listed on standard error, with the reason.
    """
    options.keep_model_folders(model_folder)
    wanted = _wanted(nodes, peer, search, access)
    lists: list[ModelsListed] = []
    async with open_target(wanted) as target, aclosing(target.client.models()) as pieces:
        async for piece in pieces:
            lists.append(piece)
    if as_json:
        write_json(models_json(lists))
        return
    for line in model_lines(lists, terminal_width()):
        write_out(line)
    for line in remarks(lists):
        say(line)


def _wanted(
    nodes: str, peer: list[str] | None, search: options.Search, access: options.Access
) -> Wanted:
    """Say whom to ask what concerns no one model."""
    return Wanted(
        choice=ModelChoice(model=DEFAULT_MODEL_NAME, nodes=options.split_nodes(nodes)),
        local=0,
        peers=options.check_addresses(peer),
        search=search,
        access=access,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeModel:
    """A model on a node."""

    node: str
    node_name: str
    model: ListedModel


def models_of(lists: Sequence[ModelsListed]) -> list[NodeModel]:
    """List all models, those that can be used first, by name."""
    found = [
        NodeModel(node=listed.node, node_name=listed.name, model=model)
        for listed in lists
        for model in listed.models
    ]
    return sorted(found, key=lambda one: (bool(one.model.failure), one.model.name.casefold()))


def models_json(lists: Sequence[ModelsListed]) -> dict[str, Any]:
    """Return what --json prints: a model per node that has it, and the nodes that do not say."""
    return {
        "models": [
            {
                "name": one.model.name,
                "node": one.node,
                "node_name": one.node_name,
                **picked(one.model, "store", "size_bytes", "held_bytes"),
                "family": one.model.family or None,
                "kind": one.model.kind or "generation",
                "form": one.model.form or None,
                "context": one.model.context or None,
                "fits": one.model.fits,
                "failure": one.model.failure or None,
            }
            for one in models_of(lists)
        ],
        "silent": [
            {"node": listed.node, "node_name": listed.name, "why": listed.failure}
            for listed in lists
            if listed.failure
        ],
    }


def model_lines(lists: Sequence[ModelsListed], width: int | None) -> list[str]:
    """Describe the models that can be used in columns of at most `width`, None for no limit."""
    rows = [("name", "size", "family", "form", "context", "fits", "where")]
    for name, models in _by_name(models_of(lists)):
        for first in _distinct(models):
            where = ", ".join(_where(one) for one in models if _is_same(one.model, first.model))
            model = first.model
            cells = (
                name,
                _size(model.size_bytes),
                f"{model.family} ({model.kind})" if model.kind else model.family,
                model.form,
                str(model.context or ""),
                {True: "yes", False: "no", None: ""}[model.fits],
                where,
            )
            rows.append(cells)
    return columns(rows, width)


def remarks(lists: Sequence[ModelsListed]) -> Iterator[str]:
    """Yield a line for each model that cannot be used, and for each node that does not say."""
    for one in models_of(lists):
        if one.model.failure:
            yield f"{one.model.name} on {one.node_name} cannot be used: {one.model.failure}"
    for listed in lists:
        if listed.failure:
            yield f"{listed.name} does not say which models it has: {listed.failure}"


def _by_name(models: Sequence[NodeModel]) -> Iterator[tuple[str, list[NodeModel]]]:
    usable = [one for one in models if not one.model.failure]
    for name in dict.fromkeys(one.model.name for one in usable):
        yield name, [one for one in usable if one.model.name == name]


def _distinct(models: Sequence[NodeModel]) -> list[NodeModel]:
    """List the first of each of several models of one name."""
    found: list[NodeModel] = []
    for one in models:
        if not any(_is_same(one.model, other.model) for other in found):
            found.append(one)
    return found


def _is_same(one: ListedModel, other: ListedModel) -> bool:
    return (one.size_bytes, one.family, one.form) == (other.size_bytes, other.family, other.form)


def _where(one: NodeModel) -> str:
    model = one.model
    if model.held_bytes < model.size_bytes:
        return f"{one.node_name} ({_size(model.held_bytes)} of it)"
    return one.node_name


def _size(n_bytes: int) -> str:
    from shardnet.cluster.placement.words import size

    return size(n_bytes)


# --- the household


@examples(
    "shardnet household",
    "shardnet household household.toml",
    "shardnet household --drop titles",
)
@options.takes_groups
async def household(
    *,
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="Models that there are to be (TOML).")
    ] = "",
    drop: list[str] | None = options.flag(
        None, "--drop NAME", "A model that is to be no more; may be given several times."
    ),
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
    wanted = _wanted(nodes, peer, search, access)
    async with open_target(wanted) as target:
        if models or drop:
            await target.client.name_models(models, dropped=drop or ())
        found = await target.client.household()
    if as_json:
        write_json({"models": [household_json(one) for one in found]})
        return
    if not found:
        say("the household has no models: name some with `shardnet household FILE`")
        return
    for line in columns(household_table(found), terminal_width()):
        write_out(line)


def household_json(state: HouseholdModelState) -> dict[str, Any]:
    """Return what --json prints of a model."""
    told: dict[str, Any] = msgspec.to_builtins(state)
    model = told.pop("model")
    choice = model.pop("choice")
    return {**model, "model": choice["model"], **told}


def household_table(found: list[HouseholdModelState]) -> list[list[str]]:
    """Return the rows of the list, the header first."""
    rows = [["NAME", "MODEL", "PRIORITY", "STATE", "NODES", ""]]
    for one in found:
        shares = [f"{share.name} {_size(share.memory_bytes)}" for share in one.shares]
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
