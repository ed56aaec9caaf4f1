"""One node of a ring as its head controls it: the head itself, or a peer over a control link.

Knows how each command reaches a stage. Must not know why it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from msgspec.structs import replace

from shardnet.cluster.member.kv_orders import SOON, Order, StageAnswers
from shardnet.cluster.member.stage_host import StageHost
from shardnet.cluster.member.stage_orders import PhaseProgress, StageOrders
from shardnet.cluster.peers.control_link import Answer, ControlLink
from shardnet.cluster.peers.peer_links import ClockOffset, PeerLinks, compare_clock, same_clock
from shardnet.errors import ShardnetError
from shardnet.runtime.engine.encoding import FirstStage
from shardnet.runtime.ring.pipeline import Pipeline
from shardnet.transport.loop import together
from shardnet.types import NodeId
from shardnet.wire.messages.control import Done
from shardnet.wire.messages.handshake import Capability
from shardnet.wire.messages.stages import ConnectRing, LoadStage, StageReady, UnloadStage

T = TypeVar("T")


async def ask_all(asked: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Wait for what several nodes were asked; raise the first error of any."""
    async with together() as tasks:
        running = [tasks.create_task(each) for each in asked]
    return [each.result() for each in running]


@dataclass(kw_only=True, eq=False, repr=False)
class LocalPort:
    """The head itself, which does what the node does for other heads.

    `on_broken` takes the name of a ring that this node's own stage has left, why, and the neighbour
    that fell silent if that is why.
    """

    host: StageHost
    stages: StageOrders
    answers: StageAnswers
    node: NodeId
    name: str
    on_broken: Callable[[str, ShardnetError, NodeId | None], None]

    def __post_init__(self) -> None:
        self.node_name = self.name

    @property
    def last_step(self) -> int:
        """The last step of this node's own stage."""
        return self.host.progress[1]

    async def load(self, message: LoadStage, on_progress: PhaseProgress) -> StageReady:
        """Load the stage here. A port numbers the request itself.

        The first call of `on_progress` means that the node has accepted the order. Raises
        TakenError if another head is building a ring with it, and what loading raises.
        """
        return await self.stages.load(
            message,
            owner=self.node,
            owner_name="itself",
            progress=on_progress,
            broken=partial(self.on_broken, message.ring),
        )

    async def connect(self, ring: str, epoch: int, pipeline: Pipeline) -> None:
        """Connect to both neighbours, with `pipeline` as the source of steps.

        Only the head's own port uses `pipeline`.
        """
        await self.host.join(ring, epoch, pipeline)

    async def order(self, message: Order, expected: type[Answer]) -> Answer:
        """Have this node's own stage do it; return its `expected` answer.

        Raises what the stage raises, and for another node's LinkError if that is lost.
        """
        answer = await self.answers.answer(message)
        assert isinstance(answer, expected)
        return answer

    def require(self, *needed: Capability) -> None:
        """Do nothing: this node is of this release."""

    @property
    def first_stage(self) -> FirstStage:
        """This node's own stage."""
        return self.host

    async def unload(self, ring: str) -> None:
        """Free the stage here."""
        await self.stages.unload(self.node, ring)

    async def compare_clock(self) -> ClockOffset:
        """Return no difference: it is one clock."""
        return same_clock()

    def watch(self, on_lost: Callable[[ShardnetError], None]) -> Callable[[], None]:
        """Call `on_lost` when the node is lost. A head does not lose itself.

        Returns what ends the watching.
        """
        return lambda: None


@dataclass(eq=False, repr=False)
class RemotePort:
    """A peer, over its control link `first_control`, or that which has replaced it in `links`."""

    first_control: ControlLink
    links: PeerLinks

    @property
    def _control(self) -> ControlLink:
        return self.links.latest(self.first_control)

    @property
    def node(self) -> NodeId:
        """The node id in the peer's hello."""
        return NodeId(self.first_control.link.peer.node)

    @property
    def name(self) -> str:
        """Name and address of the peer."""
        return self._control.peer_name

    @property
    def node_name(self) -> str:
        """The name in the peer's hello."""
        return self.first_control.link.peer.name

    @property
    def last_step(self) -> int:
        """The step in the peer's last heartbeat."""
        return self._control.link.peer_progress[1]

    async def load(self, message: LoadStage, on_progress: PhaseProgress) -> StageReady:
        """Ask the peer, and pass its progress on."""
        if self.first_control.link.peer.lacking(Capability.BORDER_WIDTH):
            message = replace(message, border_width=0)
        return await self._control.ask(
            message,
            StageReady,
            on_progress=lambda report: on_progress(
                report.phase, report.done_bytes, report.total_bytes
            ),
        )

    async def connect(self, ring: str, epoch: int, pipeline: Pipeline) -> None:
        """Ask the peer."""
        await self._control.ask(ConnectRing(request=0, ring=ring, epoch=epoch), Done)

    async def order(self, message: Order, expected: type[Answer]) -> Answer:
        """Ask the peer, and wait as long as it reports that it works where that may take long."""
        if isinstance(message, SOON):
            return await self._control.ask(message, expected)
        return await self._control.ask(message, expected, on_progress=lambda report: None)

    def require(self, *needed: Capability) -> None:
        """Raise VersionMismatchError unless the peer lists each capability; see Hello.require."""
        self.first_control.link.peer.require(*needed)

    @property
    def first_stage(self) -> None:
        """Nothing: it is a peer's."""
        return None

    async def unload(self, ring: str) -> None:
        """Ask the peer."""
        await self._control.ask(UnloadStage(request=0, ring=ring), Done)

    async def compare_clock(self) -> ClockOffset:
        """Ask the peer."""
        return await compare_clock(self._control)

    def watch(self, on_lost: Callable[[ShardnetError], None]) -> Callable[[], None]:
        """Watch the control link."""
        return self.links.watch(self._control, on_lost)


StagePort = LocalPort | RemotePort
"""A node that can hold a stage."""
