"""Weight sharing: fetch models from the nodes that have them, and serve them to others.

Knows which nodes to ask for a model, and that fetched parts are cached. Must not plan, nor know
rings or clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from shardnet.checkpoint.hub_cache import HubName
from shardnet.checkpoint.model_names import is_path
from shardnet.checkpoint.replica import (
    NO_LAYERS,
    Replica,
    begin_replica,
    check_heads,
    lay_out,
    range_tensors,
    table_tensors,
)
from shardnet.checkpoint.tensors.stored_tensor import StoredRow
from shardnet.cluster.machine.folders import ADAPTERS_FOLDER
from shardnet.cluster.peers.control_link import ControlLink
from shardnet.cluster.peers.peers import Peers
from shardnet.cluster.sharing import bulk_client
from shardnet.cluster.sharing.adapter_sharing import AdapterSharing
from shardnet.cluster.sharing.fetching import Fetch
from shardnet.cluster.sharing.replica_sources import ReplicaSource, agreed
from shardnet.cluster.sharing.table_rows import TableRows
from shardnet.cluster.store.adapter_store import AdapterStore
from shardnet.cluster.store.disk_jobs import DiskJobs, DiskPlace
from shardnet.cluster.store.local_models import LocalModels
from shardnet.cluster.store.model_cache import ModelCache, ModelUse
from shardnet.errors import (
    BusyError,
    CapacityError,
    CheckpointError,
    LinkError,
    PeerFailedError,
    PeerSilentError,
    ShardnetError,
    ShortageError,
)
from shardnet.runtime.loading.loading import check_layers
from shardnet.runtime.loading.model_facts import ModelFacts, check_model_id, find_folder, stamp
from shardnet.transport.link import Link
from shardnet.transport.loop import at_most, finish, together
from shardnet.types import LayerRange, NodeId
from shardnet.wire.framing.schema import MAX_STAGES
from shardnet.wire.messages.handshake import Hello
from shardnet.wire.messages.membership import IdentifyModel, ModelIdentity, NodeInfo
from shardnet.wire.messages.stages import LoadStage

PEER_ANSWER_S = 3.0
"""Timeout for asking a node outside the ring which model it has."""
CLOSE_S = 3.0
"""How long a node that leaves waits for disk writes."""
REPORT_S = 0.5
"""Interval between progress reports of a fetch, also without progress."""
MAX_BULK_LINKS = 32
"""Bulk links that this node serves at one time."""

FetchProgress = Callable[[int, int], None]
"""Takes (bytes fetched, bytes to fetch in all)."""


@dataclass(kw_only=True, eq=False, repr=False)
class Sharing:
    """Finds models on this node and others, serves them, and fetches them into `cache`.

    `node` and `name` are those of this node. `dial` opens a bulk link to an address. `rate` limits
    how fast this node sends. `disk` reads checkpoints and writes replicas. `kv` has the keys and
    values of sequences, which go over bulk links too.
    """

    node: NodeId
    name: str
    cache: ModelCache
    peers: Peers
    dial: Callable[[str], Awaitable[Link]]
    rate: bulk_client.SendRate
    disk: DiskJobs
    log: Callable[[str], None]
    kv: bulk_client.HeldKv | None = None

    def __post_init__(self) -> None:
        self._models = LocalModels(self.cache)
        store = AdapterStore(self.cache.folder / ADAPTERS_FOLDER)
        self.adapters = AdapterSharing(store, self.dial, self.disk)
        """Finds LoRA adapters here, and fetches them."""
        self.rows = TableRows(dial=self.dial)
        """Asks other nodes for rows of tables that do not fit this one's disk."""
        self.server = bulk_client.BulkServer(
            self._models, self.disk, self.rate, time.monotonic, store, self.kv
        )
        self._links: set[Link] = set()
        self._n_at_work = 0
        self._idle = asyncio.Event()
        self._in_use: ModelUse | None = None

    # --- requests of other nodes

    async def answer(self, message: IdentifyModel) -> ModelIdentity:
        """Answer which model this node has at a path, or under an id."""
        facts = await self._at(message.model)
        if message.model_id and (facts is None or not facts.is_complete):
            facts = await self._by_id(message.model_id)
        stored = facts.layers if facts is not None and not facts.is_complete else NO_LAYERS
        return ModelIdentity(
            request=message.request,
            model_id=facts.model_id if facts is not None else "",
            complete=facts is not None and facts.is_complete,
            layers=_ranges(stored.held),
            but_tables=_ranges(stored.but_tables),
            room_bytes=await self._room_bytes(message.model_id, facts),
        )

    async def _room_bytes(self, model_id: str, facts: ModelFacts | None) -> int | None:
        """Return how much more of a model fits this disk; None where all is here, or unknown."""
        if model_id and (facts is None or not facts.is_complete):
            with contextlib.suppress(ShardnetError):  # loading will say what is wrong with it
                return await self._in_cache.run(partial(self.cache.room_bytes, model_id))
        return None

    def check_hello(self, hello: Hello) -> None:
        """Raise BusyError for a bulk link if there are too many."""
        if len(self._links) >= MAX_BULK_LINKS:
            raise BusyError(
                f"this node sends weights over {MAX_BULK_LINKS} links already",
                remedy="try again later",
            )

    async def serve(self, link: Link) -> None:
        """Serve weights on a bulk link until it ends."""
        self._links.add(link)
        try:
            with self._at_work():
                await self.server.serve(link)
        except ShardnetError as error:
            if not link.closed:
                self.log(f"stopped sending weights: {error}")
            link.abort("the fetch has ended")
        finally:
            self._links.discard(link)

    async def close(self) -> None:
        """Close all bulk links, and wait up to CLOSE_S for disk writes."""
        self.rows.close()
        await asyncio.gather(*(link.close() for link in [*self._links]))
        async with at_most(CLOSE_S):
            while self._n_at_work:
                await self._idle.wait()
            await self.disk.drain()
        self.release()

    # --- requests of this node

    async def identify(self, model: str) -> ModelFacts:
        """Identify the model at the path `model`: from the folder here, else from the peers.

        Fetches its headers into the cache, but no tensors. Raises CheckpointError if no node has
        it, PlanError if the peers have different models there.
        """
        own = await self._at(model)
        if own is not None and own.is_complete:
            return own
        answers = await self._ask_peers(self.peers.links.linked(), model, "")
        replicas = agreed(
            [answer for answer in answers.values() if isinstance(answer, ReplicaSource)]
        )
        if not replicas:
            if own is None:
                raise _not_found(model, self.name, answers)
            return own
        model_id = replicas[0].model_id
        if own is not None and own.model_id == model_id:
            return own
        sources = [source.address for source in replicas]
        folder = await self._find_or_begin_replica(model, model_id, sources)
        return await self._in_cache.run(partial(self._models.inspect, folder))

    async def is_unchanged(self, facts: ModelFacts, model: str) -> bool:
        """Say whether the files that `facts` were read from are still what `model` names here.

        Compares names, sizes and times, and opens nothing. False for a model that is not complete
        here: other nodes have to be asked.
        """

        def check() -> bool:
            return find_folder(model) == facts.path and stamp(facts.path) == facts.stamp

        return facts.is_complete and await self.disk.run(model, check)

    async def is_here(self, model: str) -> bool:
        """Say whether `model` names a folder or a GGUF file on this machine."""
        return await self.disk.run(model, lambda: find_folder(model) is not None)

    def inspect(self, path: Path) -> ModelFacts:
        """Identify the checkpoint at a path here; others can fetch it from then on. Blocks.

        Raises CheckpointError if it cannot be read, or is not supported.
        """
        return self._models.inspect(path)

    async def sources(
        self, facts: ModelFacts, model: str, nodes: Sequence[NodeInfo]
    ) -> list[ReplicaSource]:
        """Find the nodes that have a model: those of a plan and, if one lacks it, all peers.

        `model` is the path requested, `facts` those of the model found for it. Returns the nodes of
        the plan first, in order, also those without the model. Raises the error of a plan's node
        that does not answer; other peers that fail to are left out.
        """
        async with together() as tasks:
            asks = [tasks.create_task(self._ask_node(facts, model, node)) for node in nodes]
        found = [ask.result() for ask in asks]
        if all(source.is_complete for source in found):
            return found
        known = {source.node for source in found}
        rest = [c for c in self.peers.links.linked() if c.link.peer.node not in known]
        answers = await self._ask_peers(rest, model, facts.model_id)
        return found + [answer for answer in answers.values() if isinstance(answer, ReplicaSource)]

    async def holdings(
        self, facts: ModelFacts, model: str, nodes: Sequence[NodeInfo]
    ) -> dict[NodeId, ReplicaSource]:
        """Find what nodes have of a model; those that do not answer in PEER_ANSWER_S are left out.

        `model` and `facts` as for `sources`.
        """

        async def ask(node: NodeInfo) -> ReplicaSource | None:
            try:
                async with asyncio.timeout(PEER_ANSWER_S):
                    return await self._ask_node(facts, model, node)
            except (ShardnetError, TimeoutError):
                return None

        found = await asyncio.gather(*(ask(node) for node in nodes))
        return {source.node: source for source in found if source is not None}

    async def control(self, node: NodeInfo) -> ControlLink:
        """Return the control link to another node, dialled if need be."""
        control = self.peers.links.link_of(NodeId(node.node))
        return control if control is not None else await self.peers.link_to(node.address)

    async def folder(self, order: LoadStage, on_progress: FetchProgress) -> Path:
        """Return a folder with the tensors of a stage, fetched if they are not on this machine.

        The folder is not deleted before the next order (one that loads beside it: before its
        weights have come), or `release`. Raises CheckpointError if this node has another model at
        that path; as Fetch.run if fetching fails.
        """
        facts = await self._at(order.form.model)
        if facts is None or not facts.is_complete:
            facts = await self._by_id(order.form.model_id)
        if facts is not None and facts.is_complete:
            check_model_id(facts.path, facts.model_id, order.form.model_id)
            self.release()
            return facts.path
        latest = (0, 0)

        def report(done_bytes: int, total_bytes: int) -> None:
            nonlocal latest
            is_news = total_bytes != latest[1]
            latest = (done_bytes, total_bytes)
            if is_news:
                on_progress(*latest)

        async def repeat() -> None:
            while True:
                on_progress(*latest)
                await asyncio.sleep(REPORT_S)

        async with together() as tasks:
            repeating = tasks.create_task(repeat())
            folder = await self._fetch_stage(order, report)
            repeating.cancel()
        return folder

    async def _fetch_stage(self, order: LoadStage, on_progress: FetchProgress) -> Path:
        """Fetch the tensors of a stage into the model's replica, which is in use from now on."""
        with contextlib.ExitStack() as unless_fetched:
            use = await self._in_cache.run(partial(self.cache.use, order.form.model_id))
            unless_fetched.callback(use.close)
            if not order.beside:  # the ring that used the last one has been left
                self.release()
            form, sources = order.form, order.sources
            folder = await self._find_or_begin_replica(form.model, form.model_id, sources)
            await self._fetch(folder, order, on_progress)
            self.release()
            self._in_use = use
            unless_fetched.pop_all()
        return folder

    def release(self) -> None:
        """Allow the replica used last to be evicted."""
        if self._in_use is not None:
            self._in_use.close()
            self._in_use = None

    # --- this node's disks

    @property
    def _in_cache(self) -> DiskPlace:
        return self.disk.at(self.cache.folder)

    async def _at(self, model: str) -> ModelFacts | None:
        return await self.disk.run(model, partial(self._models.at, model))

    async def _by_id(self, model_id: str) -> ModelFacts | None:
        return await self.disk.run(f"model {model_id[:12]}", partial(self._models.by_id, model_id))

    # --- asking

    async def _ask_node(self, facts: ModelFacts, model: str, node: NodeInfo) -> ReplicaSource:
        if node.node == self.node:
            return ReplicaSource(
                node=self.node,
                name=self.name,
                address=node.address,
                model_id=facts.model_id,
                is_complete=facts.is_complete,
                layers=facts.layers.held,
                but_tables=facts.layers.but_tables,
                room_bytes=await self._room_bytes(facts.model_id, facts),
            )
        return await self._ask(await self.control(node), model, facts.model_id, node.address)

    async def _ask_peers(
        self, controls: Sequence[ControlLink], model: str, model_id: str
    ) -> dict[str, ReplicaSource | ShardnetError]:
        """Ask peers for the model; return by name what each has, or why it did not answer."""

        async def ask(control: ControlLink) -> ReplicaSource | ShardnetError:
            address = self.peers.address_of(NodeId(control.link.peer.node))
            try:
                async with asyncio.timeout(PEER_ANSWER_S):
                    return await self._ask(control, model, model_id, address)
            except ShardnetError as error:
                return error
            except TimeoutError:
                return PeerSilentError(f"{control.peer_name}: no answer for {PEER_ANSWER_S:g} s")

        answers = await asyncio.gather(*(ask(control) for control in controls))
        return {c.peer_name: answer for c, answer in zip(controls, answers, strict=True)}

    async def _ask(
        self, control: ControlLink, model: str, model_id: str, address: str
    ) -> ReplicaSource:
        message = IdentifyModel(request=0, model=model, model_id=model_id)
        answer = await control.ask(message, ModelIdentity)
        return ReplicaSource(
            node=NodeId(control.link.peer.node),
            name=control.peer_name,
            address=address,
            model_id=answer.model_id,
            is_complete=answer.complete,
            layers=tuple(LayerRange(*layers) for layers in answer.layers),
            but_tables=tuple(LayerRange(*layers) for layers in answer.but_tables),
            room_bytes=answer.room_bytes,
        )

    # --- fetching

    async def _find_or_begin_replica(
        self, model: str, model_id: str, sources: Sequence[str]
    ) -> Path:
        """Return the replica of a model, begun from one of the sources if need be.

        Records that the path `model` means it.
        """
        found = await self._in_cache.run(partial(self._models.replica, model_id))
        folder = found.path if found is not None else await self._begin_replica(model_id, sources)
        await self._in_cache.run(partial(self.cache.remember, model, model_id))
        return folder

    async def _begin_replica(self, model_id: str, sources: Sequence[str]) -> Path:
        failures = []
        for source in sources:
            try:
                link = await self.dial(source)
            except ShardnetError as error:  # whatever a peer refuses a link with
                failures.append(str(error))
                continue
            try:
                return await self._fetch_skeleton(bulk_client.BulkClient(link, model_id), model_id)
            except (LinkError, bulk_client.SourceRefused, CheckpointError, BusyError) as error:
                failures.append(str(error))
            finally:
                await link.close()
        raise PeerFailedError(
            f"no node sends the headers of model {model_id[:12]}: "
            f"{'; '.join(failures) or 'no node to ask'}",
            remedy="start a node that has its checkpoint",
        )

    async def _fetch_skeleton(self, client: bulk_client.BulkClient, model_id: str) -> Path:
        """Fetch the headers of a model's files into a new replica without tensors."""
        heads = await client.skeleton()
        check_heads(heads, client.name)
        disk = self._in_cache
        with self._at_work():
            async with self._staging() as staged:
                files = await disk.run(partial(lay_out, staged, heads))
                try:
                    for head in heads:
                        async with aclosing(client.head(head)) as pieces:
                            async for at, piece in pieces:
                                await disk.run(partial(files.write, head.name, at, piece))
                finally:
                    disk.submit(files.close)
                await disk.run(partial(begin_replica, staged, model_id, client.name))
                return await disk.run(partial(self._models.install, staged, model_id))

    @contextlib.asynccontextmanager
    async def _staging(self) -> AsyncIterator[Path]:
        """Give ModelCache.staging, its folder made and deleted off the loop."""
        staging = self.cache.staging()
        staged = await self._in_cache.run(staging.__enter__)
        try:
            yield staged
        finally:
            await finish(self._in_cache.run(partial(staging.__exit__, None, None, None)))

    async def _fetch(self, folder: Path, order: LoadStage, on_progress: FetchProgress) -> None:
        began = time.monotonic()
        with self._at_work():
            disk = self._in_cache
            replica = await disk.run(partial(Replica, folder))
            try:
                layers = LayerRange(*order.layers)
                check_layers(replica.checkpoint.config, layers)
                if order.form.mtp:
                    replica.checkpoint.use_mtp()
                tensors = await self._make_room(replica, layers, order)
                fetched = await Fetch(
                    model_id=order.form.model_id,
                    replica=replica,
                    sources=order.sources,
                    dial=self.dial,
                    writer=disk,
                    on_progress=on_progress,
                    log=self.log,
                ).run(tensors)
            finally:
                disk.submit(replica.close)
        if fetched.n_bytes:
            self.log(
                f"fetched {fetched.n_bytes / 2**20:.1f} MiB of {order.form.model} from "
                f"{', '.join(fetched.sources)} in {time.monotonic() - began:.1f} s"
            )

    async def _make_room(self, replica: Replica, layers: LayerRange, order: LoadStage) -> list[str]:
        """Make room for a stage's tensors; return which are to be fetched.

        Tables for which there is none stay at the other nodes, which give their rows.
        """
        model_id, tensors = order.form.model_id, range_tensors(replica.checkpoint, layers)
        n_bytes = replica.lacking_bytes(tensors)
        if not n_bytes:
            return tensors
        is_cut = any(len(part.devices) > 1 for part in order.parts)  # by processes without links
        tables = {} if is_cut else table_tensors(replica.checkpoint, layers)
        room = partial(self.cache.make_room, keep=model_id)
        try:
            deleted = await self._in_cache.run(partial(room, n_bytes))
        except CapacityError:
            if not replica.lacking_bytes(tables):
                raise
            tensors = [name for name in tensors if name not in tables]
            deleted = await self._in_cache.run(partial(room, replica.lacking_bytes(tensors)))
            firsts = [StoredRow(t.name, 0, t.size_bytes // t.shape[0]) for t in tables.values()]
            await self.rows.begin(model_id, order.sources, firsts)
            table_bytes = sum(table.size_bytes for table in tables.values())
            self.log(
                f"{table_bytes / 2**20:.1f} MiB of tables of {order.form.model} do not fit this "
                "disk: their rows are asked for at other nodes"
            )
        for model in deleted:
            self.log(f"deleted {model.name or model.model_id[:12]} from the cache for room")
        return tensors

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        """Make `close` wait for the work inside."""
        self._n_at_work += 1
        try:
            yield
        finally:
            self._n_at_work -= 1
            if not self._n_at_work:
                self._idle.set()
                self._idle = asyncio.Event()


def _ranges(ranges: Sequence[LayerRange]) -> list[tuple[int, int]]:
    return [(layers.start, layers.end) for layers in ranges][:MAX_STAGES]


def _not_found(
    model: str, name: str, answers: Mapping[str, ReplicaSource | ShardnetError]
) -> ShardnetError:
    """Make the error of a model that no node has, or that of a node that cannot look."""
    for answer in answers.values():
        if isinstance(answer, ShortageError):
            return answer
    said = "; ".join(
        str(answer) if isinstance(answer, ShardnetError) else f"{peer} has none"
        for peer, answer in answers.items()
    )
    if not is_path(model):
        is_of_hub = HubName.parse(model) is not None
        return CheckpointError(
            f"{model} is neither a folder where it was asked for, nor on {name} nor on a peer "
            f"({said or 'no peers'})",
            remedy=f"`shardnet pull {model}` downloads it, if the Hub has it" * is_of_hub,
        )
    return CheckpointError(
        f"there is no checkpoint folder at {model} on {name} nor on a peer ({said or 'no peers'})",
        remedy="check the path of --model, or copy the checkpoint to one of the nodes",
    )
