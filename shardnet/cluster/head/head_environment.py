"""What the head of this node knows of its own node and the others (head.Neighbourhood).

Knows which part of the node answers each question. Must not know plans, rings or clients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from shardnet.checkpoint.hub_cache import HubName
from shardnet.cluster.download.pulling import pull_beside
from shardnet.cluster.head.head import Elsewhere
from shardnet.cluster.measuring.measurement_service import Survey
from shardnet.cluster.peers.node_directory import Candidates, Neighbours
from shardnet.cluster.peers.peers import Peers
from shardnet.cluster.ring.stage_host import StageHost
from shardnet.cluster.ring.stage_orders import StageOrders
from shardnet.cluster.ring.stage_port import LocalPort, Progress, RemotePort, StagePort
from shardnet.cluster.sharing.replica_sources import ReplicaSource
from shardnet.cluster.sharing.sharing import Sharing
from shardnet.errors import CheckpointError, ShardnetError
from shardnet.runtime.stage.executor import Executor
from shardnet.runtime.stage.loading import ModelFacts, find_folder
from shardnet.tokenizers.tokenizer import Tokenizer
from shardnet.types import NodeId
from shardnet.wire.messages.membership import NodeInfo
from shardnet.wire.messages.stages import LoadStage, StageReady


class Surroundings:
    """What is around the head of node `node`. `on_broken` takes a ring whose own stage left it."""

    def __init__(
        self,
        *,
        node: NodeId,
        name: str,
        host: StageHost,
        orders: StageOrders,
        sharing: Sharing,
        peers: Peers,
        neighbours: Neighbours,
        survey: Survey,
        reader: Executor,
        on_broken: Callable[[str, ShardnetError], None],
        log: Callable[[str], None],
    ) -> None:
        self._node = node
        self._name = name
        self._host = host
        self._orders = orders
        self._sharing = sharing
        self._peers = peers
        self._neighbours = neighbours
        self._survey = survey
        self._reader = reader
        self._on_broken = on_broken
        self._log = log

    @property
    def node(self) -> NodeId:
        """This node's id."""
        return self._node

    async def candidates(self, addresses: Sequence[str]) -> Candidates:
        """Return the nodes at `addresses`, or without any this node and its peers."""
        return await self._neighbours.candidates(addresses)

    async def provide(self, model: str, on_progress: Callable[[int, int], None]) -> None:
        """Pull a model of the Hub that neither this node nor a peer has."""
        name = HubName.parse(model)
        if name is None or find_folder(model) is not None:
            return
        try:
            await self._sharing.identify(model)
        except CheckpointError:
            await pull_beside(name, on_progress, self._log)

    async def identify(self, model: str) -> ModelFacts:
        """Look at the model that a path means, on this node or else on its peers."""
        return await self._sharing.identify(model)

    async def holders(
        self, facts: ModelFacts, model: str, plan: Sequence[NodeInfo]
    ) -> list[ReplicaSource]:
        """Ask the nodes of a plan, and others if need be, what they have of a model."""
        return await self._sharing.holders(facts, model, plan)

    @property
    def survey(self) -> Survey:
        """What measures nodes and links."""
        return self._survey

    async def load_tokenizer(self, folder: Path) -> Tokenizer | None:
        """Load the tokenizer of a checkpoint on this node, None where it has none."""
        return await self._reader.run(lambda: Tokenizer.load_optional(folder))

    async def port(self, node: NodeInfo) -> StagePort:
        """Return the port to a node."""
        if node.node == self._node:
            return LocalPort(
                self._host,
                self._node,
                self._name,
                self._load_own,
                lambda ring: self._orders.unload(self._node, ring),
            )
        return RemotePort(
            await self._sharing.control(node), self._peers.lines.watch, self._peers.lines.latest
        )

    def head_elsewhere(self) -> Elsewhere | None:
        """Return the head of the ring this node has a seat in, None if that is itself."""
        seat = self._host.seat
        if seat is None or seat.owner == self._node or seat.is_over:
            return None
        return Elsewhere(address=seat.addresses[0], model=seat.model)

    async def free_stage(self) -> None:
        """Free the weights that a ring left behind here."""
        await self._host.unload(self._node)

    async def _load_own(self, message: LoadStage, progress: Progress) -> StageReady:
        def broken(error: ShardnetError) -> None:
            self._on_broken(message.ring, error)

        return await self._orders.load(
            message, owner=self._node, owner_name="itself", progress=progress, broken=broken
        )
