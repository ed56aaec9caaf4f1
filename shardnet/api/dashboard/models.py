"""The models of the cluster, each once, with the nodes that have it."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from contextlib import aclosing
from typing import Final

import msgspec

from shardnet.api.client import Client
from shardnet.errors import ShardnetError
from shardnet.wire.messages.membership import ListedModel, ModelsListed

LIST_S: Final = 15.0
"""How long nodes may take to open their models."""
MAX_LISTS: Final = 256
"""Most lists that are read, of at most 64 models each."""


class HeldBy(msgspec.Struct, kw_only=True):
    """A node that has a model, and how much of it."""

    node: str
    name: str
    store: str
    held_bytes: int


class ClusterModel(msgspec.Struct, kw_only=True):
    """A model. Those of one name that differ are several."""

    name: str
    is_served: bool
    is_default: bool
    is_loaded: bool
    size_bytes: int
    family: str | None
    form: str | None
    context: int | None
    fits: bool | None
    failure: str | None
    nodes: list[HeldBy]


class SilentNode(msgspec.Struct, kw_only=True):
    """A node that does not say which models it has."""

    node: str
    name: str
    why: str


class ClusterModels(msgspec.Struct, kw_only=True):
    """All models, those that can be used first."""

    models: list[ClusterModel]
    silent: list[SilentNode]


async def list_models(client: Client) -> list[ModelsListed]:
    """Ask the node and its peers; what does not come within LIST_S is left out.

    Raises LinkError when the node does not answer at all.
    """
    lists: list[ModelsListed] = []
    try:
        async with asyncio.timeout(LIST_S), aclosing(client.models()) as pieces:
            async for piece in pieces:
                lists.append(piece)
                if len(lists) >= MAX_LISTS:
                    break
    except (ShardnetError, TimeoutError):
        if not lists:
            raise
    return lists


def cluster_models(
    lists: Sequence[ModelsListed], *, served: Collection[str], default: str, loaded: str
) -> ClusterModels:
    """Put lists together. `served` are names that may be asked for, `loaded` one or ""."""
    found: dict[tuple[object, ...], ClusterModel] = {}
    for listed in lists:
        for model in listed.models:
            key = (model.name, model.size_bytes, model.family, model.form, model.failure)
            if key not in found:
                found[key] = _model(model, served, default, loaded)
            found[key].nodes.append(
                HeldBy(
                    node=listed.node,
                    name=listed.name,
                    store=model.store,
                    held_bytes=model.held_bytes,
                )
            )
    return ClusterModels(
        models=sorted(found.values(), key=lambda one: (bool(one.failure), one.name.casefold())),
        silent=[
            SilentNode(node=listed.node, name=listed.name, why=listed.failure)
            for listed in lists
            if listed.failure
        ],
    )


def _model(model: ListedModel, served: Collection[str], default: str, loaded: str) -> ClusterModel:
    is_usable = not model.failure
    return ClusterModel(
        name=model.name,
        is_served=is_usable and model.name in served,
        is_default=is_usable and model.name == default,
        is_loaded=is_usable and model.name == loaded,
        size_bytes=model.size_bytes,
        family=model.family or None,
        form=model.form or None,
        context=model.context or None,
        fits=model.fits,
        failure=model.failure or None,
        nodes=[],
    )
