"""What whoever leads a household orders of runners, and asks them: memory, plans, rings.

Knows the runners of each model and how its ring is. Must not know how memory is divided, nor when a
model is loaded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from shardnet.cluster.peers.control_link import ControlLink, refuse
from shardnet.cluster.peers.supervision import SupervisedJobs
from shardnet.errors import (
    LinkError,
    PeerFailedError,
    PlanError,
    RemoteProtocolError,
    ShardnetError,
)
from shardnet.sampling_params import SamplingParams
from shardnet.transport.address import format_address, host_of, split_address
from shardnet.transport.link import Link
from shardnet.types import NodeId
from shardnet.wire.framing.schema import Numbered
from shardnet.wire.messages.control import Redirect
from shardnet.wire.messages.diagnostics import RingLoad
from shardnet.wire.messages.generation import Generate, Tokenize, Tokenized, Unload
from shardnet.wire.messages.handshake import Capability
from shardnet.wire.messages.household import HouseholdModel, ModelState, OpenRunner, RunnerOpened
from shardnet.wire.messages.membership import NodeInfo, Status, StatusReply
from shardnet.wire.messages.plans import NodeProgress, PlanReply, PlanRequest

ANSWER_S: Final = 2.0
"""How long a runner may take to say how it is."""
ORDER_S: Final = 15.0
"""How long a node may take to open a runner."""
MOST_REDIRECTS: Final = 4


@dataclass(slots=True, kw_only=True)
class Share:
    """The runner of one model on a node that is called `name`."""

    name: str
    node: NodeId
    address: str
    memory_bytes: int


@dataclass(slots=True, kw_only=True, eq=False)
class KeptModel:
    """A model of the household, and how it is."""

    model: HouseholdModel
    state: ModelState = "unloaded"
    why: str = ""
    address: str = ""
    """Where its ring is asked, "" while it has none."""
    shares: dict[NodeId, Share] = field(default_factory=dict)
    """By the id of the node whose runner that is."""
    looked_at: set[NodeId] = field(default_factory=set)
    """The nodes that were asked which runner they have of it from before."""
    plan: PlanReply | None = None
    load: RingLoad | None = None
    asked_s: float = 0.0
    tried_s: float
    lost_s: float = 0.0
    lacks_bytes: int = 0
    """What nodes that are lost had of it, and others have not been given yet."""
    n_waiting: int = 0
    is_encoder: bool = False
    loading: asyncio.Task[None] | None = None

    @property
    def n_requests(self) -> int:
        """Requests that run or wait on its ring."""
        return self.load.running + self.load.waiting + self.load.paused if self.load else 0

    @property
    def used(self) -> set[NodeId]:
        """The nodes that are to have layers of it."""
        return {node for node, share in self.shares.items() if share.memory_bytes}


@dataclass(kw_only=True, eq=False, repr=False)
class RunnerOrders:
    """Talks to nodes by `reach`, and to their runners by links that `dial` opens, `jobs` read."""

    reach: Callable[[NodeId], Awaitable[ControlLink]]
    dial: Callable[[str], Awaitable[Link]]
    jobs: SupervisedJobs
    log: Callable[[str], None]
    _links: dict[str, ControlLink] = field(default_factory=dict)

    async def close(self) -> None:
        """Close the links to runners."""
        await asyncio.gather(*(control.link.close() for control in self._links.values()))

    async def open(self, kept: KeptModel, info: NodeInfo, memory_bytes: int | None) -> None:
        """Open a runner on a node, or see which it has; one that has none is done without."""
        node = NodeId(info.node)
        try:
            opened = await self._order(node, kept, memory_bytes)
        except (ShardnetError, TimeoutError) as error:
            if memory_bytes is not None:
                self.log(f"{info.name} opens no runner for {kept.model.name}: {error}")
            return
        if not opened.address:
            return
        _, port = split_address(opened.address)
        host = host_of(info.address) if info.address else host_of(opened.address)
        kept.shares[node] = Share(
            name=info.name,
            node=NodeId(opened.node),
            address=format_address(host, port),
            memory_bytes=opened.memory_bytes,
        )

    async def _order(self, node: NodeId, kept: KeptModel, memory_bytes: int | None) -> RunnerOpened:
        control = await self.reach(node)
        control.link.peer.require(Capability.HOUSEHOLD)
        peers = [share.address for at, share in kept.shares.items() if at != node]
        order = OpenRunner(
            request=0,
            model=kept.model.name,
            choice=kept.model.choice,
            memory_bytes=memory_bytes,
            peers=peers,
        )
        async with asyncio.timeout(ORDER_S):
            return await control.ask(order, RunnerOpened)

    async def limit(self, kept: KeptModel, room: Mapping[NodeId, int]) -> None:
        """Give each runner of a model its memory, none where none is named."""

        async def give(node: NodeId, share: Share) -> None:
            memory_bytes = room.get(node, 0)
            try:
                await self._order(node, kept, memory_bytes)
            except (LinkError, PeerFailedError, TimeoutError):
                del kept.shares[node]  # it is lost
            else:
                share.memory_bytes = memory_bytes

        await asyncio.gather(*(give(*one) for one in [*kept.shares.items()]))

    async def plan(self, kept: KeptModel) -> PlanReply:
        """Have the runners of a model plan its ring. Raises what that raises."""
        message = PlanRequest(request=0, choice=kept.model.choice)
        _, answer = await self.ask_ring(kept, self._first(kept), message)
        if not isinstance(answer, PlanReply):
            raise RemoteProtocolError(f"a runner answered PlanRequest: {type(answer).__name__}")
        return answer

    async def build(self, kept: KeptModel) -> str:
        """Have the ring built; return where it is asked. Raises what building raises."""
        prompt = Generate(
            request=0, token_ids=[0], choice=kept.model.choice, sampling=SamplingParams()
        )
        message = Tokenize(request=0, generate=prompt)
        address, answer = await self.ask_ring(kept, self._first(kept), message)
        if not isinstance(answer, Tokenized):
            raise RemoteProtocolError(f"a runner answered Tokenize: {type(answer).__name__}")
        return address

    def _first(self, kept: KeptModel) -> str:
        """Return where a model's runner with the most memory is. Raises PlanError without one."""
        if not kept.shares:
            raise PlanError(
                f"no node can have {kept.model.name}",
                remedy="start a node, or name others in the household",
            )
        return max(kept.shares.values(), key=lambda share: share.memory_bytes).address

    async def ask_ring(
        self, kept: KeptModel, address: str, message: PlanRequest | Tokenize | Unload
    ) -> tuple[str, Numbered]:
        """Ask the runner at an address, or where it redirects; return where, and the answer."""
        for _ in range(MOST_REDIRECTS):
            control = await self._link_to(address)
            async with control.conversation(message) as answers:
                async for answer in answers:
                    if not isinstance(answer, NodeProgress):
                        break
                    share = f" {100 * answer.done_bytes // max(1, answer.total_bytes)} %"
                    kept.why = f"{kept.model.name}: {answer.phase}{share}"
            if not isinstance(answer, Redirect):
                return address, answer
            address = answer.address
        raise PeerFailedError(f"the runners of {kept.model.name} redirect to each other")

    async def led(self, kept: KeptModel) -> tuple[str, RingLoad] | None:
        """Return where a model's ring is led, at its head or another of its runners, and its load.

        None without a ring.
        """
        others = [share.address for share in kept.shares.values()]
        for address in filter(None, dict.fromkeys((kept.address, *others))):
            try:
                async with asyncio.timeout(ANSWER_S):
                    control = await self._link_to(address)
                    told = await control.ask(Status(request=0, with_peers=False), StatusReply)
            except (ShardnetError, TimeoutError):
                continue
            if told.load is not None:
                return address, told.load
        return None

    async def _link_to(self, address: str) -> ControlLink:
        """Return a link to the runner at an address. Raises LinkError if it is not there."""
        control = self._links.get(address)
        if control is None or control.link.closed:
            control = ControlLink(await self.dial(address), refuse)
            self._links[address] = control
            self.jobs.begin(control.serve_to_the_end, f"a link to the runner at {address}")
        return control
