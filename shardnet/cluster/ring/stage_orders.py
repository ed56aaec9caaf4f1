"""The orders of heads, this node's own among them, for the stage of this node.

Knows how a LoadStage becomes a loaded stage within this node's memory, and who is told what. Must
not plan, nor know clients.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from shardnet.cluster.machine.local_nodes import LocalNodes, share_of_cores
from shardnet.cluster.machine.profile import Device, MemoryBudget, available_cores
from shardnet.cluster.peers.control_link import ControlLink
from shardnet.cluster.ring.ring_membership import RingSeat
from shardnet.cluster.ring.stage_host import StageHost
from shardnet.cluster.ring.stage_port import Progress
from shardnet.cluster.sharing.sharing import Sharing
from shardnet.errors import ShardnetError
from shardnet.model.config.quantization import Quantization
from shardnet.runtime.stage.loading import LoadedStage, StageOrder
from shardnet.transport.loop import finish
from shardnet.types import DType, KvDType, LayerRange, WireDType
from shardnet.wire.framing.schema import Phase
from shardnet.wire.messages.handshake import explanation
from shardnet.wire.messages.stages import LoadProgress, LoadStage, RingBroken, StageReady

Watch = Callable[[ControlLink, Callable[[ShardnetError], None]], Callable[[], None]]
"""Has a function called when the node of a link is lost; gives what ends that."""


class StageOrders:
    """Carries orders out on `host`, with weights that `sharing` brings.

    `asked_threads` 0 is a share of the machine's cores. `watch` tells when a head is lost.
    """

    def __init__(
        self,
        *,
        host: StageHost,
        sharing: Sharing,
        budget: MemoryBudget,
        asked_threads: int,
        local_nodes: LocalNodes,
        watch: Watch,
        log: Callable[[str], None],
    ) -> None:
        self._host = host
        self._sharing = sharing
        self._budget = budget
        self._asked_threads = asked_threads
        self._local_nodes = local_nodes
        self._watch = watch
        self._stop_watching: Callable[[], None] = lambda: None
        self._log = log

    @property
    def device(self) -> Device:
        """What computes here."""
        return self._budget.device

    @property
    def threads(self) -> int:
        """Threads a stage computes with: as told, or the share among this machine's nodes."""
        if self._asked_threads:
            return self._asked_threads
        return share_of_cores(available_cores(), len(self._local_nodes.list()))

    def memory_bytes(self) -> int:
        """What a stage of this node may take, its loaded one included."""
        loaded = self._host.loaded
        return self._budget.total_bytes(
            used_bytes=loaded.weight_bytes if loaded else 0,
            n_nodes_here=len(self._local_nodes.list()),
        )

    def free_bytes(self) -> int:
        """What is left beside the loaded stage, and really there."""
        loaded = self._host.loaded
        left = self.memory_bytes() - (loaded.weight_bytes if loaded else 0)
        return max(0, min(left, self._budget.available_bytes()))

    async def load_for(self, control: ControlLink, message: LoadStage) -> None:
        """Carry out a peer's order, and tell it of progress, of the end, and when the ring breaks.

        Raises what `load` raises.
        """

        def progress(phase: Phase, done_bytes: int, total_bytes: int) -> None:
            if not control.link.closed:
                control.send(
                    LoadProgress(
                        request=message.request,
                        done_bytes=done_bytes,
                        total_bytes=total_bytes,
                        phase=phase,
                    )
                )

        def broken(error: ShardnetError) -> None:
            if not control.link.closed:
                control.send(
                    RingBroken(
                        ring=message.ring,
                        epoch=message.epoch,
                        code=error.code,
                        message=explanation(error),
                    )
                )

        def seated() -> None:
            self._stop_watching()
            self._stop_watching = self._watch(control, lambda _: self._host.head_lost(message.ring))

        owner = control.link.peer.node
        ready = await self.load(
            message,
            owner=owner,
            owner_name=control.peer_name,
            progress=progress,
            broken=broken,
            seated=seated,
        )
        control.send(ready)

    async def load(
        self,
        message: LoadStage,
        *,
        owner: str,
        owner_name: str,
        progress: Progress,
        broken: Callable[[ShardnetError], None],
        seated: Callable[[], None] = lambda: None,
    ) -> StageReady:
        """Have the stage of `message` loaded for the head `owner`, called `owner_name`.

        The head has this node's place from then on, which `seated` and the first progress report
        tell. Weights that this node lacks are fetched first. `broken` is called when the seat's
        ring breaks later. Raises UsageError for a wire dtype that is none, and what
        StageHost.give_seat, Sharing.folder and StageHost.load raise; then the place is free again.
        """
        wire_dtype = WireDType.named(message.wire_dtype)

        def left(error: ShardnetError) -> None:
            self._log(f"left the ring of {message.model}: {error}")
            broken(error)

        seat = await self._host.give_seat(
            message, owner=owner, owner_name=owner_name, on_broken=left
        )
        async with AsyncExitStack() as unless_it_is_loaded:
            unless_it_is_loaded.push_async_callback(self._take_back, seat)
            seated()
            progress("loading", 0, 0)
            folder = await self._sharing.folder(message, partial(progress, "fetching"))
            threads = message.threads or self.threads
            loaded, reused = await self._host.load(
                seat,
                self._order(message, folder),
                wire_dtype=wire_dtype,
                threads=threads,
                memory_bytes=self.memory_bytes(),
                on_progress=partial(progress, "loading"),
            )
            unless_it_is_loaded.pop_all()
        self._log(
            f"{'kept' if reused else 'loaded'} layers {loaded.order.layers} of {message.model} "
            f"({loaded.weight_bytes / 2**20:.1f} MiB, {loaded.kernel}, {threads} threads)"
        )
        return _ready(message, loaded, reused)

    async def unload(self, owner: str, ring: str) -> None:
        """Free the stage of a ring. One that has another ring by now is left alone."""
        if self._host.seat is not None and self._host.seat.ring != ring:
            return
        await self._host.unload(owner)
        self._sharing.release()
        self._log("freed the stage")

    async def _take_back(self, seat: RingSeat) -> None:
        await finish(self._host.take_back(seat))

    def _order(self, message: LoadStage, folder: Path) -> StageOrder:
        return StageOrder(
            model=message.model,
            folder=folder,
            model_id=message.model_id,
            layers=LayerRange(*message.layers),
            dtype=DType(message.dtype),
            context=message.context,
            device=self._budget.device.kind,
            quantization=Quantization.named(message.quant),
            kv_dtype=KvDType(message.kv_dtype),
            n_streamed=message.streamed_layers,
        )


def _ready(message: LoadStage, loaded: LoadedStage, reused: bool) -> StageReady:
    return StageReady(
        request=message.request,
        weight_bytes=loaded.weight_bytes,
        room_blocks=loaded.room_blocks,
        reused=reused,
        kernel=loaded.kernel,
        load_s=loaded.load_s,
        exact_rows=loaded.exact_rows,
    )
