"""What this node is and does now; gives memory and processors back where its machine needs them.

A node that rests takes no new layers. It leaves the rings of other heads; of a ring that it leads
it takes no new requests, and frees it with the last one.

Before a node ends, its layers and what sequences have in them go to other nodes (drain). A node in
another head's ring asks that head to do without it. A node that is a head itself has its deputy go
on, if all its requests are copied there. Without one it cannot give them away, since their texts
are made there: it takes no new ones, and ends with the last.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

from shardnet import __version__
from shardnet.cluster.head.drafts import Drafts
from shardnet.cluster.head.encoders import Encoders
from shardnet.cluster.head.head import Head
from shardnet.cluster.head.lent_drafters import LentDrafters
from shardnet.cluster.machine.device_list import CPU
from shardnet.cluster.machine.power import PowerWatch
from shardnet.cluster.machine.profile import Device, available_cores, make_host_id
from shardnet.cluster.member.stage_host import StageHost
from shardnet.cluster.member.stage_orders import StageOrders
from shardnet.cluster.node.settings import NodeSettings
from shardnet.cluster.peers.advertisement import Advertisement
from shardnet.cluster.peers.control_link import ControlLink, MessageHandlers
from shardnet.cluster.pressure import policy
from shardnet.cluster.router.router import Router
from shardnet.cluster.store.disk_jobs import DiskJobs
from shardnet.errors import BusyError, ShardnetError
from shardnet.transport.loop import shielded
from shardnet.types import PORTABLE_ARITHMETIC, NodeId
from shardnet.wire.framing.schema import MAX_NAME
from shardnet.wire.messages.control import Done
from shardnet.wire.messages.diagnostics import PressureState
from shardnet.wire.messages.generation import Unload
from shardnet.wire.messages.handshake import Capability
from shardnet.wire.messages.membership import DeviceInfo, NodeInfo, StageInfo
from shardnet.wire.messages.stages import Drain, DropWarm, LeaveRing

DRAIN_LOOK_S: Final = 0.05
"""Interval of the looks at what is left."""
OFFER_S: Final = 8.0
"""How long a head takes new requests for its deputy to take over with the others: a second offer is
made after 5 s."""
LULL_S: Final = 0.5
"""How long a head with a deputy has to be without requests: clients may just be asking again."""


@dataclass(kw_only=True, eq=False, repr=False)
class NodeDrain:
    """Drains one node, once. `link_of` gives the control link to a head, `n_routed` the number of
    requests that this node gives to several rings.

    `hand_over` has the deputy of this head go on, if it `has_deputy`; it returns whether that does.
    `drain_runners` drains the runners of this node within so many seconds.
    """

    head: Head
    host: StageHost
    n_routed: Callable[[], int]
    link_of: Callable[[NodeId], ControlLink | None]
    hand_over: Callable[[], Awaitable[bool]]
    has_deputy: Callable[[], bool]
    log: Callable[[str], None]
    drain_runners: Callable[[float], Awaitable[None]] = lambda deadline_s: asyncio.sleep(0)

    def __post_init__(self) -> None:
        self._refused = ("", "")
        """The ring whose head could not do without this node, and why it was asked to."""
        self._done = asyncio.Event()
        self.is_over = asyncio.Event()
        """Set when a node that was ordered to drain is to end, and who ordered it knows."""

    def register(self, handlers: MessageHandlers) -> None:
        """Register the order."""
        handlers.register(Drain, self._drain_for)

    async def _drain_for(self, control: ControlLink, message: Drain) -> None:
        draining = asyncio.ensure_future(self.drain(message.deadline_s))
        try:
            await control.report_until(message.request, draining)
            control.send(Done(request=message.request))
            await control.link.drain()
        finally:  # also where nobody waits for it any more
            draining.add_done_callback(lambda _: self.is_over.set())

    @property
    def is_needed(self) -> bool:
        """Whether requests would miss this node: they run, or their ring is being built."""
        membership = self.host.membership
        is_forming = membership is not None and membership.is_forming
        return self._leads or self.host.is_busy or is_forming

    @property
    def _leads(self) -> bool:
        """Whether requests come to this node: for its own ring, or for others behind it."""
        return self.head.is_in_use or self.n_routed() > 0

    async def drain(self, deadline_s: float, pauses_s: float = 0.0) -> bool:
        """Take nothing more, and give away what is here; return when that is done.

        After `deadline_s` seconds it is over in any case; returns whether it was done. A ring that
        cannot do without this node may wait for it `pauses_s`: then it need not be empty.
        """
        if self.host.refusals.is_draining:
            await self._done.wait()
            return not self.is_needed
        self.host.refusals.is_draining, asked_s = True, time.monotonic()
        self.head.is_draining = not self.has_deputy()
        self.log("draining: this node takes nothing more, and ends when it is empty")
        needed_s = asked_s
        runners = asyncio.ensure_future(self.drain_runners(deadline_s))
        try:
            async with asyncio.timeout(deadline_s):
                await shielded(runners)
                while not (await self.leave(pauses_s=pauses_s) and pauses_s):
                    if self._leads and await self.hand_over():
                        self.log("the deputy goes on with the requests of this node")
                        self.head.is_draining = True
                    if time.monotonic() - asked_s > OFFER_S:  # some are not copied there
                        self.head.is_draining = True
                    if self.is_needed:
                        needed_s = time.monotonic()
                    elif self.head.is_draining or time.monotonic() - needed_s > LULL_S:
                        break
                    await asyncio.sleep(DRAIN_LOOK_S)
            self.log("drained: no request needs this node any more")
        except TimeoutError:
            self.log(f"the node ends before it is empty: {deadline_s:g} s are over")
            return False
        finally:
            self.head.is_draining = True
            self._done.set()
        return True

    def stay(self) -> None:
        """Take part again, after a drain."""
        self.host.refusals.is_draining = self.head.is_draining = False
        self._refused, self._done = ("", ""), asyncio.Event()
        self.log("this node stays, and takes part again")

    async def leave(self, why: str = "", pauses_s: float = 0.0) -> bool:
        """Ask the head of the ring that this node is in, if it is another one, to do without it.

        Where it cannot, its requests are waited for: it is not asked again for that reason. `why`
        is why the node rests, "" if it drains. Returns whether the head does without it, or waits
        for `pauses_s` where it cannot.
        """
        membership = self.host.membership
        if membership is None or membership.is_over or membership.owner == self.head.node:
            return False
        if membership.is_forming or self._refused == (membership.ring, why):
            return False
        control = self.link_of(NodeId(membership.owner))
        if control is None:  # it is dialled again, or lost
            return False
        if control.link.peer.lacking(Capability.UPDATE):
            pauses_s = 0.0  # it does not know that nodes come back
        message = LeaveRing(request=0, ring=membership.ring, why=why, returns_s=pauses_s)
        try:
            await control.ask(message, Done, on_progress=lambda report: None)
        except ShardnetError as error:
            self._refused = (membership.ring, why)
            self.log(f"the ring of {membership.model} cannot do without this node: {error}")
            return False
        if not why:
            self.head.was_succeeded(membership.addresses[0])  # who asks here is sent there
        return True


LOOK_S: Final = 2.0
"""Interval of the looks."""
IDLE_S: Final = 30.0
"""A model that a request has used less than so long ago is not freed for others' sake."""
ASK_S: Final = 5.0
"""How long the head of a ring may take to free what it keeps."""


UNUSED_LOOK_S: Final = 5.0
"""Interval of the looks."""


@dataclass(kw_only=True, eq=False, repr=False)
class NodePressure:
    """Looks after the machine of one node.

    `memory` returns what is available there, None does not look; `owner` returns what others do
    there, and may take some milliseconds, on a thread of `disk`; without it the node does not yield
    to them. `link_of` gives the link to a head, `on_changed` is called when the node begins or ends
    to rest.
    """

    head: Head
    host: StageHost
    drain: NodeDrain
    unused: UnusedModels
    drafts: Drafts
    lent: LentDrafters
    encoders: Encoders
    disk: DiskJobs
    link_of: Callable[[NodeId], ControlLink | None]
    memory: Callable[[], policy.MemoryLook] | None
    owner: Callable[[], policy.OwnerLook] | None
    on_changed: Callable[[], None]
    log: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._watch = policy.OwnerWatch()
        self._policy = policy.PressurePolicy()
        self._n_drops = self._n_rests = 0

    def state(self) -> PressureState | None:
        """Describe it for people; None where the memory is not looked at."""
        if self.memory is None:
            return None
        look = self.memory()
        return PressureState(
            available_bytes=max(0, look.available_bytes),
            total_bytes=look.total_bytes,
            stalled=look.stalled,
            n_drops=self._n_drops,
            n_rests=self._n_rests,
            yields=self.owner is not None,
        )

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Give back what it is time to."""
        if self.host.refusals.is_draining:
            return
        held_bytes = self.host.weight_bytes
        why, memory = "", None
        if self.owner is not None:
            why = self._watch.look(self.clock(), await self._look_at_owner(self.owner))
        if self.memory is not None and (held_bytes or self.rests):
            memory = self.memory()
        match self._policy.look(self.clock(), memory, why, held_bytes):
            case policy.Action.DROP:
                await self._drop_caches()
            case policy.Action.REST:
                await self._begin_to_rest()
            case policy.Action.BACK:
                self._take_part()
            case policy.Action.NOTHING:
                pass
        if self.rests:
            await self._give_away()

    async def _look_at_owner(self, owner: Callable[[], policy.OwnerLook]) -> policy.OwnerLook:
        """Look at what others do here. Nothing is known while the driver of a GPU hangs."""
        try:
            return await self.disk.run("what others do on this machine", owner)
        except ShardnetError:
            return policy.OwnerLook(n_cores=1)

    @property
    def rests(self) -> str:
        """Why this node rests, "" while it does not."""
        return self._policy.why

    async def _drop_caches(self) -> None:
        self._n_drops += 1
        self.log("memory is short: what is kept for requests to come is freed")
        membership = self.host.membership
        if membership is None or membership.is_over or membership.owner == self.head.node:
            self.head.drop_warm()
        elif (control := self.link_of(NodeId(membership.owner))) is not None:
            message = DropWarm(request=0, ring=membership.ring)
            try:
                async with asyncio.timeout(ASK_S):
                    await control.ask(message, Done)
            except (ShardnetError, TimeoutError) as error:
                self.log(f"warning: the head keeps what it has for requests to come: {error}")
        if not self.head.n_requests:
            self.drafts.close()
        self.lent.loader.pause()
        self.lent.close()
        self.encoders.free_idle()
        await self.host.drop_caches()

    async def _begin_to_rest(self) -> None:
        is_for_memory = self.rests == policy.SHORT_OF_MEMORY
        if is_for_memory and await self.unused.free(IDLE_S, "memory is short"):
            self._policy.relieved()
            return
        self._n_rests += 1
        self.log(f"resting: this node gives its layers away and takes none ({self.rests})")

    async def _give_away(self) -> None:
        """Give away what can be now."""
        self.head.rests = self.rests
        if self.head.is_in_use:  # its ring may need this node yet, should it lose another one
            return
        if self.host.refusals.rests != self.rests:
            self.host.refusals.rests = self.rests
            self.on_changed()
        await self.host.drop_standby()
        await self.drain.leave(self.rests)
        if not self.drain.is_needed and self.host.loaded is not None:
            await self.unused.free(0.0, self.rests)

    def _take_part(self) -> None:
        self.log("this node takes part again")
        self.host.refusals.rests = self.head.rests = ""
        self.on_changed()


@dataclass(kw_only=True, eq=False, repr=False)
class UnusedModels:
    """Looks after the model of the ring that this node is in.

    A ring that this node leads is freed when no request has used it for `idle_s` seconds, never for
    None. `link_of` gives the link to the head of another ring.
    """

    router: Router
    host: StageHost
    link_of: Callable[[NodeId], ControlLink | None]
    idle_s: float | None
    log: Callable[[str], None]

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            await asyncio.sleep(UNUSED_LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Free the model of the ring that this node leads if it is time to."""
        idle_s = self.idle_s
        if idle_s is not None and self.router.idle_s is not None:
            await self.free(idle_s, f"no request used it for {idle_s:g} s")

    async def free(self, idle_s: float, why: str) -> bool:
        """Free the model unless a request has used it within `idle_s`; return whether it was freed.

        The head of another ring is asked to.
        """
        loaded, unused_s = self.host.loaded, self.router.idle_s
        if loaded is None or (unused_s is not None and unused_s < idle_s):
            return False
        try:
            if unused_s is not None:
                await self.router.unload(idle_s=idle_s)
            elif not await self._ask_head(idle_s):
                return False
        except BusyError:
            return False
        except ShardnetError as error:
            self.log(f"warning: {loaded.order.form.model} could not be freed: {error}")
            return False
        self.log(f"{loaded.order.form.model} was freed: {why}")
        return True

    async def _ask_head(self, idle_s: float) -> bool:
        """Ask the head of the ring that this node is in to free it; False if there is none.

        Weights of a ring that is over are freed here.
        """
        membership = self.host.membership
        if membership is None or membership.is_over:
            await self.router.unload(idle_s=idle_s)
            return True
        control = self.link_of(NodeId(membership.owner))
        if control is None:
            return False
        await control.ask(Unload(request=0, idle_s=idle_s), Done)
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnState:
    """Describes this node at any time."""

    settings: NodeSettings
    advertisement: Advertisement
    host: StageHost
    orders: StageOrders
    power: PowerWatch
    started_s: float = field(default_factory=time.monotonic)

    def info(self) -> NodeInfo:
        """Describe this node: who it is, its memory in bytes, and the stage it has loaded."""
        loaded, membership = self.host.loaded, self.host.membership
        first, *others = devices = self.settings.budget.devices
        total_bytes = self.orders.memory_bytes()
        stage = None
        if loaded is not None:
            layers = loaded.order.layers
            stage = StageInfo(
                model=loaded.order.form.model,
                layers=(layers.start, layers.end),
                rank=None if membership is None or membership.is_over else membership.rank,
            )
        return NodeInfo(
            node=self.settings.node,
            name=self.settings.name,
            address=self.advertisement.address,
            version=__version__,
            device=" + ".join(device.description for device in devices)[:MAX_NAME],
            memory_bytes=total_bytes,
            memory_free_bytes=max(0, total_bytes - self.host.weight_bytes),
            cores=available_cores(),
            threads=self.orders.threads,
            dtypes=[dtype.value for dtype in first.dtypes],
            host_id=make_host_id(),
            stage=stage,
            isa=first.isa,
            arithmetic=" + ".join(dict.fromkeys(map(self._arithmetic_of, devices)))[:MAX_NAME],
            uptime_s=time.monotonic() - self.started_s,
            is_draining=self.host.refusals.is_draining,
            rests=self.host.refusals.rests,
            devices=self._devices() if others else [],
            tensor_parallel=self.settings.tensor_parallel,
            meters=self.power.meters(),
        )

    def _devices(self) -> list[DeviceInfo]:
        room = self.orders.device_bytes()
        return [
            DeviceInfo(
                name=device.name,
                device=device.description,
                memory_bytes=n_bytes,
                threads=self.orders.threads_of(place),
                dtypes=[dtype.value for dtype in device.dtypes],
                isa=device.isa,
                arithmetic=self._arithmetic_of(device),
            )
            for place, (device, n_bytes) in enumerate(
                zip(self.settings.budget.devices, room, strict=True)
            )
        ]

    def _arithmetic_of(self, device: Device) -> str:
        """Name a device's arithmetic: behind a device of the kernel text the CPU's is its own."""
        first = self.settings.budget.device
        is_behind = device.kind == CPU and first.arithmetic == PORTABLE_ARITHMETIC
        return PORTABLE_ARITHMETIC if is_behind and first.driver else device.arithmetic

    def threads(self) -> int:
        """Return the threads that a stage computes with."""
        return self.orders.threads
