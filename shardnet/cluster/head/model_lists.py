"""The models of this node and of its peers: listed for clients, and found by a part of their names.

Knows how a model of a store is described, and how long a peer is waited for. Must not plan: whether
a model fits is what placing.py estimates.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from msgspec.structs import replace

from shardnet.assets import DEFAULT_MODEL_NAME
from shardnet.checkpoint.hub_cache import HubName
from shardnet.checkpoint.model_names import FoundModel, is_path, match, nearest_name
from shardnet.checkpoint.recommended_sampling import MAX_LICENCE, read_licence
from shardnet.cluster.peers.control_link import ControlLink, MessageHandlers
from shardnet.cluster.peers.node_directory import NodeDirectory
from shardnet.cluster.peers.peers import Peers
from shardnet.cluster.planning.placing import fits
from shardnet.cluster.sharing.sharing import Sharing
from shardnet.cluster.store.disk_jobs import DiskJobs
from shardnet.cluster.store.local_models import HeldModel, dated, find_models
from shardnet.cluster.store.model_cache import ModelCache
from shardnet.errors import CheckpointError, RemoteProtocolError, ShardnetError
from shardnet.model.families.stage_tensors import count_parameters
from shardnet.runtime.encoding.encoder_facts import EncoderFacts, find_encoder
from shardnet.runtime.loading.model_facts import stamp
from shardnet.transport.loop import together
from shardnet.types import NodeId, remember
from shardnet.wire.messages.control import Done
from shardnet.wire.messages.diagnostics import MAX_REASON
from shardnet.wire.messages.handshake import explanation
from shardnet.wire.messages.household import HOUSEHOLD_STORE
from shardnet.wire.messages.membership import (
    MAX_FIT_NODES,
    MAX_MODELS_LISTED,
    ListedModel,
    ListModels,
    ModelsListed,
    NodeInfo,
)

M = TypeVar("M")

AT_ONCE: Final = 4
"""Models that are described at one time, each with a process of its own if its header is large."""
NAMES_S: Final = 3.0
"""How long a peer may take to name its models."""
DESCRIBE_S: Final = 15.0
"""How long reading a model's headers may take: large ones take seconds."""
SILENCE_S: Final = 20.0
"""How long a peer may take for the next of its models."""
MAX_OF_PEER: Final = 8192
"""Models that are taken from one peer."""
NAMED_STORE: Final = "a path"
"""Where a model is that is described though no store lists it."""
MAX_NAME: Final = 4096
"""Longest name that travels, in bytes."""
MAX_MEANINGS: Final = 256
"""Names that are remembered with what they meant."""


@dataclass(kw_only=True, eq=False, repr=False)
class ModelLists:
    """Answers ListModels, and finds what a name means. `own_info` describes this node."""

    own_info: Callable[[], NodeInfo]
    sharing: Sharing
    cache: ModelCache
    peers: Peers
    directory: NodeDirectory
    disk: DiskJobs

    def __post_init__(self) -> None:
        self._meanings: dict[str, str] = {}
        self._nearest: dict[str, str] = {}
        self.household: Callable[[], Sequence[str]] = tuple
        """Lists what models of the household are called."""
        self.encoder: Callable[[str], str] = lambda name: ""
        """Returns the encoder that is called so in the household, "" if none is."""

    def register(self, handlers: MessageHandlers) -> None:
        """Register the message that asks for lists."""
        handlers.register(ListModels, self.answer)

    async def answer(self, control: ControlLink, message: ListModels) -> None:
        """Send this node's models and, if wanted, those of its peers as they come."""
        if not message.nodes and not message.names_only:
            nodes = (await self.directory.candidates(())).nodes
            message = replace(message, nodes=list(nodes[:MAX_FIT_NODES]))
        async with together() as tasks:
            if message.with_peers:
                for peer in self.peers.links.linked():
                    tasks.create_task(self._relay(control, message, peer))
            async with aclosing(self._own(message)) as pieces:
                async for piece in pieces:
                    control.send(piece)
                    await control.link.drain(shared=True)
        control.send(Done(request=message.request))

    async def resolve(self, model: str, in_use: Collection[str | None] = ()) -> str:
        """Return the name of the model that `model` means, here or on a peer.

        That is `model` itself for a path, for a model that is here, and for one that the Hub may
        have. What one of the models `in_use` was found by means it again. Raises UsageError if it
        may be any of several, CheckpointError, with the nearest name or with why it cannot be used,
        if nobody has it.
        """
        model = self.encoder(model) or model
        if model == DEFAULT_MODEL_NAME or is_path(model) or model in in_use:
            return model
        meant = self._meanings.get(model)
        if meant is not None and meant in in_use:
            return meant
        if await self.sharing.is_here(model):
            return model
        names, unusable = await self._names()
        found = match(model, names)
        if found is None and (broken := match(model, unusable)) is not None:
            if HubName.parse(broken) is not None:
                return broken  # what it lacks can be downloaded
            raise CheckpointError(f"{broken} on {self.own_info().name}: {unusable[broken]}")
        if found is not None:
            remember(self._meanings, model, found, MAX_MEANINGS)
            return found
        near = nearest_name(model, names)
        remember(self._nearest, model, near, MAX_MEANINGS)
        if HubName.parse(model) is not None:
            return model
        raise self.hinted(
            model,
            CheckpointError(
                f"{model} is no file or folder where it was asked for, and no model of that name "
                f"is on {self.own_info().name} or its peers",
            ),
        )

    async def holder(self, model: str) -> NodeId | None:
        """Return a peer that has the model of this full name, None if none says so in time."""
        peers = self.peers.links.linked()
        names = await asyncio.gather(*map(self._names_of, peers))
        for peer, held in zip(peers, names, strict=True):
            if model in held:
                return NodeId(peer.link.peer.node)
        return None

    def hinted(self, model: str, error: CheckpointError) -> CheckpointError:
        """Add to the error of a model that was not found which name is nearest."""
        if model not in self._nearest:
            return error
        near = self._nearest[model]
        like = f"the nearest name is {near}" if near else ""
        remedies = (like, error.remedy, "`shardnet models` lists all")
        return type(error)(error.message, remedy="; ".join(filter(None, remedies)))

    # --- this node's models

    async def _own(self, message: ListModels) -> AsyncGenerator[ModelsListed, None]:
        held = await find_models(self.disk, self.cache)
        path = Path(message.model)
        if path.is_absolute() and all(str(model.found.path) != message.model for model in held):
            found = FoundModel(name=message.model, store=NAMED_STORE, path=path)
            with contextlib.suppress(ShardnetError):  # opening it says why
                found = await self.disk.run(path, partial(dated, found))
            held.append(HeldModel(found=found))
        of_household = [ListedModel(name=name, store=HOUSEHOLD_STORE) for name in self.household()]
        if of_household and message.with_peers:
            yield self._listed(message, of_household)
        if message.names_only:
            for named in _pieces([_named(model) for model in held], MAX_MODELS_LISTED):
                yield self._listed(message, named)
            return
        for some in _pieces(held, AT_ONCE):
            described = (self._described(model, message.nodes) for model in some)
            yield self._listed(message, list(await asyncio.gather(*described)))

    def _listed(self, message: ListModels, models: list[ListedModel]) -> ModelsListed:
        info = self.own_info()
        return ModelsListed(request=message.request, node=info.node, name=info.name, models=models)

    async def _described(self, held: HeldModel, nodes: Sequence[NodeInfo]) -> ListedModel:
        """Open a model and describe it; with the reason if that fails."""
        path = held.found.path
        named = _named(held)
        if named.failure:
            return named
        try:
            async with asyncio.timeout(DESCRIBE_S):
                return await self.disk.run(path, partial(self._describe, held, nodes))
        except TimeoutError:
            why = f"its headers were not read within {DESCRIBE_S:g} s; ask again"
            return replace(named, failure=why)
        except (OSError, ShardnetError) as error:
            return replace(named, failure=explanation(error, MAX_REASON))

    def _describe(self, held: HeldModel, nodes: Sequence[NodeInfo]) -> ListedModel:
        """Describe a model by its headers. Blocks."""
        try:
            encoder = find_encoder(held.found.path)
            if encoder is not None:
                return _listed_encoder(held, encoder, nodes)
            facts = self.sharing.inspect(held.found.path)
            facts.check_known()
        except ShardnetError as error:
            sizes = 0
            with contextlib.suppress(ShardnetError):
                sizes = sum(size for _, size, _ in stamp(held.found.path))
            why = explanation(error, MAX_REASON)
            return replace(_named(held), size_bytes=sizes, held_bytes=sizes, failure=why)
        size_bytes = facts.size_bytes
        return replace(
            _named(held),
            size_bytes=size_bytes,
            held_bytes=size_bytes if held.held_bytes is None else held.held_bytes,
            family=facts.config.family[:256],
            form=facts.form[:256],
            context=min(facts.config.max_positions, 2**32 - 1),
            parameters=count_parameters(facts.config),
            licence=explanation(read_licence(held.found.path), MAX_LICENCE),
            modified_s=max((time_ns for _, _, time_ns in facts.stamp), default=0) // 10**9,
            fits=fits(facts, nodes),
        )

    # --- those of peers

    async def _names(self) -> tuple[set[str], dict[str, str]]:
        """Name the models of this node and of the peers that answer in time.

        Returns those and, apart, what is here and cannot be used, with the reasons.
        """
        own = await find_models(self.disk, self.cache)
        peers = await asyncio.gather(*(self._names_of(peer) for peer in self.peers.links.linked()))
        names = {model.found.name for model in own if not model.found.failure}.union(*peers)
        broken = {model.found.name: model.found.failure for model in own if model.found.failure}
        return names, {name: why for name, why in broken.items() if name not in names}

    async def _names_of(self, peer: ControlLink) -> set[str]:
        names: set[str] = set()
        try:
            message = ListModels(request=0, names_only=True)
            async with asyncio.timeout(NAMES_S), aclosing(self._ask(peer, message)) as pieces:
                async for piece in pieces:
                    names |= {model.name for model in piece.models if not model.failure}
        except (ShardnetError, TimeoutError):
            return names  # the ring is planned without a peer that does not answer
        return names

    async def _relay(self, control: ControlLink, message: ListModels, peer: ControlLink) -> None:
        """Pass on what a peer lists, or the reason why it does not."""
        hello, why = peer.link.peer, ""
        try:
            asked = replace(message, with_peers=False, model="")
            async with aclosing(self._ask(peer, asked)) as pieces:
                async for piece in pieces:
                    own = replace(piece, request=message.request, node=hello.node, name=hello.name)
                    if not control.link.closed:
                        control.send(own)
                        await control.link.drain(shared=True)
        except ShardnetError as error:
            why = explanation(error)
        except TimeoutError:
            why = f"no answer for {SILENCE_S:g} s"
        if why:
            control.tell(
                ModelsListed(
                    request=message.request,
                    node=hello.node,
                    name=hello.name,
                    models=[],
                    failure=why,
                )
            )

    async def _ask(
        self, peer: ControlLink, message: ListModels
    ) -> AsyncGenerator[ModelsListed, None]:
        """Ask a peer for its own models. Raises ShardnetError and TimeoutError."""
        n_listed = 0
        async with peer.conversation(message) as answers:
            while n_listed <= MAX_OF_PEER:
                async with asyncio.timeout(SILENCE_S):
                    answer = await anext(answers)
                if isinstance(answer, Done):
                    return
                if not isinstance(answer, ModelsListed):
                    raise RemoteProtocolError(
                        f"{peer.peer_name} answered ListModels with {type(answer).__name__}"
                    )
                n_listed += max(1, len(answer.models))
                yield answer


def _named(held: HeldModel) -> ListedModel:
    """Name a model without having opened it."""
    found = held.found
    name = explanation(found.name, MAX_NAME)
    unusable = "" if name == found.name else "its name is no UTF-8 or too long: rename it"
    return ListedModel(
        name=name,
        store=found.store,
        size_bytes=held.whole_bytes,
        held_bytes=held.held_bytes or 0,
        modified_s=found.modified_s,
        failure=explanation(found.failure, MAX_REASON) or unusable,
    )


def _listed_encoder(held: HeldModel, facts: EncoderFacts, nodes: Sequence[NodeInfo]) -> ListedModel:
    return replace(
        _named(held),
        size_bytes=facts.size_bytes,
        held_bytes=facts.size_bytes,
        family=facts.config.model_type,
        form=facts.form[:256],
        context=facts.context,
        kind=facts.config.kind,
        parameters=facts.n_parameters,
        licence=explanation(read_licence(facts.path), MAX_LICENCE),
        modified_s=max((time_ns for _, _, time_ns in facts.stamp), default=0) // 10**9,
        fits=any(node.memory_bytes >= facts.needed_bytes for node in nodes) if nodes else None,
    )


def _pieces(models: list[M], n_at_most: int) -> Iterator[list[M]]:
    for at in range(0, len(models), n_at_most):
        yield models[at : at + n_at_most]
