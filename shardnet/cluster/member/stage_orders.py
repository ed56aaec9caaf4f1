"""Carry out the orders of heads, this node's own among them, for the stage of this node.

Knows how a LoadStage becomes a loaded stage within this node's memory, and what is reported to the
head. Must not plan, nor know clients.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from shardnet.cluster.machine.device_list import CPU
from shardnet.cluster.machine.local_nodes import LocalNodes, share_of_cores
from shardnet.cluster.machine.profile import Device, MemoryBudget, available_cores
from shardnet.cluster.member.refusals import check_load_order
from shardnet.cluster.member.ring_membership import OnBroken
from shardnet.cluster.member.stage_host import StageHost
from shardnet.cluster.peers.control_link import ControlLink, MessageHandlers
from shardnet.cluster.sharing.sharing import Sharing
from shardnet.errors import CapacityError, ShardnetError, UsageError
from shardnet.runtime.loading.loaded_stage import LoadedStage
from shardnet.runtime.stage.stage_order import StageAdapter, StageDevice, StageOrder, StagePart
from shardnet.transport.loop import finish
from shardnet.types import LayerRange, NodeId
from shardnet.wire.framing.schema import Phase
from shardnet.wire.messages.control import Done
from shardnet.wire.messages.handshake import explanation
from shardnet.wire.messages.stages import (
    ConnectRing,
    LoadStage,
    RingBroken,
    StageReady,
    UnloadStage,
)

PhaseProgress = Callable[[Phase, int, int], None]
"""Takes (what is done, bytes done, bytes in all)."""

Watch = Callable[[ControlLink, Callable[[ShardnetError], None]], Callable[[], None]]
"""Calls a function when the node of a link is lost; returns what ends the watch."""


@dataclass(kw_only=True, eq=False, repr=False)
class StageOrders:
    """Carries orders out on `host`, with weights that `sharing` brings.

    `asked_threads` 0 means a share of the machine's cores. `watch` reports that a head is lost,
    `latest` returns the link that has replaced one to it.
    """

    host: StageHost
    sharing: Sharing
    budget: MemoryBudget
    asked_threads: int
    local_nodes: LocalNodes
    watch: Watch
    latest: Callable[[ControlLink], ControlLink]
    log: Callable[[str], None]

    def __post_init__(self) -> None:
        self._stop_watching: Callable[[], None] = lambda: None
        self._stop_awaiting: Callable[[], None] = lambda: None
        self._overfull: set[int] = set()
        """Places of GPUs that ran out of memory while they had some left by their drivers' word."""
        self.encoder_bytes = 0
        """What encoders take of the first device (head/encoders.py)."""
        self.drafter_bytes: Callable[[], int] = lambda: 0
        """What drafters take of it (head/lent_drafters.py)."""
        self.promised_bytes: Callable[[], int] = lambda: 0
        """What of this node's memory is promised to runners, and looks free (household/runners.py).
        """

    def register(self, handlers: MessageHandlers) -> None:
        """Register the orders of heads but LoadStage, which the node's own ring may forbid."""
        handlers.register(ConnectRing, self._connect_for)
        handlers.register(UnloadStage, self._unload_for)

    async def _connect_for(self, control: ControlLink, message: ConnectRing) -> None:
        await self.host.join(message.ring, message.epoch)
        control.send(Done(request=message.request))

    async def _unload_for(self, control: ControlLink, message: UnloadStage) -> None:
        await self.unload(control.link.peer.node, message.ring)
        control.send(Done(request=message.request))

    @property
    def device(self) -> Device:
        """The device that computes here, the first of several."""
        return self.budget.device

    @property
    def devices(self) -> Sequence[Device]:
        """All devices that compute here."""
        return self.budget.devices

    @property
    def threads(self) -> int:
        """Threads a stage computes with: as configured, or a share among this machine's nodes."""
        if self.asked_threads:
            return self.asked_threads
        return share_of_cores(available_cores(), len(self.local_nodes.list()))

    @property
    def most_threads(self) -> int:
        """Threads that others may order a stage to compute with: this machine's cores."""
        return max(available_cores(), self.asked_threads)

    def threads_of(self, place: int, threads: int = 0) -> int:
        """Return the threads of one device, where the node has `threads`, 0 for as configured."""
        threads, device = threads or self.threads, self.devices[place]
        if device.kind != CPU:
            return threads
        own = max(1, threads // sum(each.kind == CPU for each in self.devices))
        return min(own, len(device.cores) or own)

    def memory_bytes(self) -> int:
        """Return the bytes that a stage of this node may take, its loaded one included."""
        return sum(self.device_bytes())

    def device_bytes(self) -> list[int]:
        """Return the same for each device."""
        found = self.budget.device_bytes(
            self.host.weight_bytes_by_device, n_nodes_here=len(self.local_nodes.list())
        )
        for place in self._overfull:
            found[place] = 0
        if self.budget.asked_bytes is not None:  # else it is not among what is available
            found[0] = max(0, found[0] - self.encoder_bytes - self.drafter_bytes())
        left = max(0, sum(found) - self.promised_bytes())
        return [n_bytes * left // sum(found) if left else 0 for n_bytes in found]

    def free_bytes(self, place: int = 0) -> int:
        """Return the bytes left of a device beside what is loaded, at most what it has free."""
        left = self.device_bytes()[place] - self.host.weight_bytes_by_device[place]
        return max(0, min(left, self.budget.free_bytes(self.devices[place])))

    async def load_for(self, control: ControlLink, message: LoadStage) -> None:
        """Carry out a peer's order; send it progress, the reply, and RingBroken if the ring breaks.

        Raises what `load` raises.
        """

        def progress(phase: Phase, done_bytes: int, total_bytes: int) -> None:
            control.tell_progress(message.request, done_bytes, total_bytes, phase)

        def broken(error: ShardnetError, silent: NodeId | None) -> None:
            self.latest(control).tell(
                RingBroken(
                    ring=message.ring,
                    epoch=message.epoch,
                    code=error.code,
                    message=explanation(error),
                    silent=silent or "",
                )
            )

        def entered() -> None:
            self._stop_watching()
            self._stop_watching = self.watch(control, lambda _: self.host.head_lost(message.ring))
            if message.instead_of:  # also when this node is in another ring by then
                self.watch(control, lambda _: self.host.refusals.head_lost(owner))

        owner = control.link.peer.node
        ready = await self.load(
            message,
            owner=owner,
            owner_name=control.peer_name,
            progress=progress,
            broken=broken,
            entered=entered,
        )
        if message.beside:  # not before: what is ready for another head stays where this is refused
            self._stop_awaiting()
            drop = self.host.drop_prepared
            self._stop_awaiting = self.watch(control, lambda _: drop(message.ring))
        control.send(ready)

    async def load(
        self,
        message: LoadStage,
        *,
        owner: str,
        owner_name: str,
        progress: PhaseProgress,
        broken: OnBroken,
        entered: Callable[[], None] = lambda: None,
    ) -> StageReady:
        """Have the stage of `message` loaded for the head `owner`, called `owner_name`.

        This node is a member of the head's ring from then on: `entered` is called, and `progress`
        for the first time. Weights that this node lacks are fetched first. `broken` is called if
        the ring breaks later. Raises what check_load_order raises, and what StageHost.enter_ring,
        Sharing.folder and StageHost.load raise; the membership is over then.
        """
        is_own = owner == self.host.refusals.node
        check_load_order(message, self.most_threads, len(self.devices), is_own=is_own)
        if message.beside:
            return await self._prepare(message, owner, progress)

        def left(error: ShardnetError, silent: NodeId | None) -> None:
            self.log(f"left the ring of {message.form.model}: {error}")
            broken(error, silent)

        membership = await self.host.enter_ring(
            message, owner=owner, owner_name=owner_name, on_broken=left
        )
        async with AsyncExitStack() as unless_it_is_loaded:
            unless_it_is_loaded.push_async_callback(
                lambda: finish(self.host.leave_ring(membership))
            )
            entered()
            progress("loading", 0, 0)
            folder = await self.sharing.folder(message, partial(progress, "fetching"))
            adapters = await self.sharing.adapters.fetch(message, partial(progress, "fetching"))
            threads = message.threads or self.threads
            order = self._order(message, folder, adapters)

            def loading(order: StageOrder) -> Awaitable[tuple[LoadedStage, bool]]:
                return self.host.load(
                    membership,
                    order,
                    sent=message.wire_dtype,
                    received=message.received_dtype,
                    threads=threads,
                    memory_bytes=self.device_bytes(),
                    on_progress=partial(progress, "loading"),
                )

            try:
                loaded, reused = await loading(order)
            except CapacityError as error:
                loaded, reused = await loading(self._on_cpu(order, error))
            unless_it_is_loaded.pop_all()
        self.log(
            f"{'kept' if reused else 'loaded'} {loaded.order.layers.words} of {message.form.model} "
            f"({loaded.weight_bytes / 2**20:.1f} MiB, {loaded.kernel}, {threads} threads)"
        )
        return self._ready(message, loaded, reused)

    def _ready(self, message: LoadStage, loaded: LoadedStage, reused: bool) -> StageReady:
        """Say what is loaded, which asks other nodes for rows of tables that are not here."""
        for part in loaded.parts or (loaded,):
            for table in part.tables:
                if table.cache is not None:
                    table.cache.ask = self.sharing.rows.ask
        return StageReady(
            request=message.request,
            weight_bytes=loaded.weight_bytes,
            room_blocks=loaded.room_blocks,
            reused=reused,
            kernel=loaded.kernel,
            load_s=loaded.load_s,
            exact_rows=loaded.exact_rows,
            arithmetic=loaded.arithmetic,
            shares_blocks=loaded.shares_blocks,
            room_states=loaded.room_states,
        )

    async def _prepare(self, message: LoadStage, owner: str, progress: PhaseProgress) -> StageReady:
        """Load a stage for a ring to come. Raises as `load`; then nothing has changed."""
        progress("loading", 0, 0)
        if message.kv_only:
            return await self._follow(message, owner, progress)
        folder = await self.sharing.folder(message, partial(progress, "fetching"))
        adapters = await self.sharing.adapters.fetch(message, partial(progress, "fetching"))
        stage, in_use = await self.host.prepare(
            message.ring,
            owner,
            self._order(message, folder, adapters),
            memory_bytes=self.device_bytes(),
            on_progress=partial(progress, "loading"),
            stands_for=message.stands_for,
        )
        awaited = f"if {message.stands_for} is lost" if message.stands_for else "for the next plan"
        self.log(f"{stage.order.layers.words} of {message.form.model} are ready {awaited}")
        return self._ready(message, stage, in_use)

    async def _follow(self, message: LoadStage, owner: str, progress: PhaseProgress) -> StageReady:
        """Take in what sequences of another node hold, whose weights are fetched at its loss."""
        own = self.host.loaded
        if own is None:
            raise UsageError(f"{message.stands_for} is followed by nodes of its ring alone")
        adapters = await self.sharing.adapters.fetch(message, partial(progress, "fetching"))
        order = self._order(message, own.order.folder, adapters)
        stage = await self.host.follow(message.ring, owner, order, stands_for=message.stands_for)
        self.log(f"the KV cache of {message.stands_for} is followed, in case that it is lost")
        return self._ready(message, stage, True)

    async def unload(self, owner: str, ring: str) -> None:
        """Free the stage of `ring`, unless this node is a member of another ring by now.

        What was loaded beside it for `ring` is freed in any case.
        """
        self.host.drop_prepared(ring)
        if await self.host.unload(owner, ring):
            self.sharing.release()
            self.sharing.rows.close()
            self.log("freed the stage")

    def _order(
        self, message: LoadStage, folder: Path, adapters: tuple[StageAdapter, ...]
    ) -> StageOrder:
        devices = stage_devices(self.devices)
        cpu = next((device for device in self.devices if device.kind == CPU), self.device)
        parts = [
            StagePart(
                layers=LayerRange(*part.layers),
                devices=tuple(devices[place] for place in part.devices),
            )
            for part in message.parts
        ]
        order = StageOrder(
            form=message.form,
            folder=folder,
            layers=LayerRange(*message.layers),
            is_tail=message.rank == message.n_stages - 1,
            devices=(devices[0],),
            n_streamed=message.n_streamed,
            arith=(self.device if devices[0].driver else cpu).arith(message.arith),
            shard=message.shard,
            n_nodes=len(message.shard_nodes) or 1,
            shares=tuple(message.shares),
            adapters=adapters,
            border_width=message.border_width,
        )
        if len(parts) == 1:
            return order.on(parts[0])
        return replace(order, parts=tuple(parts))

    def _on_cpu(self, order: StageOrder, error: CapacityError) -> StageOrder:
        """Return the order for the CPU alone where a GPU of this node ran out of memory.

        Raises `error` unless it did, and the CPU is one of its devices.
        """
        places = {part.device.place for part in order.by_device}
        gpus = {place for place in places if self.devices[place].kind != CPU}
        cpu = next((each for each in stage_devices(self.devices) if each.torch == CPU), None)
        if not isinstance(error.__cause__, RuntimeError) or not gpus or cpu is None:
            raise error
        self._overfull |= gpus
        self.log(f"{error.message}: the CPU computes from now on")
        return order.on(StagePart(layers=order.layers, devices=(cpu,)))


def stage_devices(devices: Sequence[Device]) -> list[StageDevice]:
    """Describe the devices of a node to those who load stages and compute."""
    return [
        StageDevice(
            place=place,
            name=device.name,
            torch=device.for_torch,
            cores=device.cores,
            driver=device.driver,
        )
        for place, device in enumerate(devices)
    ]
