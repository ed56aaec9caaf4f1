"""The stage of this node: loaded, given a seat in a ring, freed.

Knows the one stage and the one seat a node has at a time. Obedient: heads tell it what to do. Must
not plan, nor know clients.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from msgspec.structs import replace

from shardnet.cluster.ring.ring_membership import DialData, RingSeat
from shardnet.errors import BusyError, PeerFailedError, ShardnetError, TakenError, UsageError
from shardnet.runtime.ring.pipeline import Pipeline
from shardnet.runtime.stage.executor import Executor
from shardnet.runtime.stage.loading import (
    LoadedStage,
    StageOrder,
    give_memory_back,
    load,
    use_threads,
)
from shardnet.runtime.stage.progress import Reporter
from shardnet.transport.link import Link
from shardnet.transport.loop import finish
from shardnet.types import Epoch, WireDType
from shardnet.wire.messages.diagnostics import StageState
from shardnet.wire.messages.handshake import Hello
from shardnet.wire.messages.stages import LoadStage

T = TypeVar("T")


class StageHost:
    """Holds at most one loaded stage and one seat. `dial` opens data links for the seat.

    Rounded weights are kept below the folder `packs`.
    """

    def __init__(self, *, dial: DialData, packs: Path | None = None) -> None:
        self._dial = dial
        self._packs = packs
        self._compute = Executor("shardnet-compute")
        self._loader = Executor("shardnet-load", niceness=10)
        self._changing = asyncio.Lock()
        self._work: Reporter | None = None
        """Of what is loaded or measured now."""
        self._is_closing = False
        self.loaded: LoadedStage | None = None
        self.seat: RingSeat | None = None

    def state(self) -> StageState | None:
        """Describe the loaded stage and its place in a ring, for people."""
        if self.loaded is None:
            return None
        loaded, seat = self.loaded, self.seat
        state = StageState(
            model=loaded.order.model,
            layers=(loaded.order.layers.start, loaded.order.layers.end),
            dtype=loaded.order.dtype.value,
            kernel=loaded.kernel,
            weight_bytes=loaded.weight_bytes,
            room_blocks=loaded.room_blocks,
            used_blocks=loaded.compute.used_blocks,
        )
        if seat is None or seat.is_over:
            return state
        return replace(
            state,
            n_open=seat.n_open,
            rank=seat.rank,
            n_stages=len(seat.addresses),
            epoch=seat.epoch,
            head=seat.owner,
        )

    @property
    def progress(self) -> tuple[int, int]:
        """(epoch, last completed step), for heartbeats."""
        return (self.seat.epoch, self.seat.last_step) if self.seat else (0, 0)

    async def give_seat(
        self,
        message: LoadStage,
        *,
        owner: str,
        owner_name: str,
        on_broken: Callable[[ShardnetError], None],
    ) -> RingSeat:
        """Give the place in a ring to `message`: no other head has it until that ring has stood.

        The ring that was here is told. `owner` is the head's node id, `owner_name` its name for
        people. Raises BusyError while sequences of another head are open, TakenError while another
        one builds its ring, PeerFailedError when this node leaves.
        """
        self._refuse_others(owner)  # whose loading keeps the lock for long
        async with self._changing:
            self._check_not_closing()
            self._refuse_others(owner)
            if self.seat is not None and self.seat.ring != message.ring:
                self.seat.revoke(PeerFailedError(f"its place was given to ring {message.ring}"))
            await self._leave()
            self.seat = RingSeat(
                ring=message.ring,
                epoch=Epoch(message.epoch),
                rank=message.rank,
                addresses=tuple(message.addresses),
                model=message.model,
                owner=owner,
                owner_name=owner_name,
                dial=self._dial,
                on_broken=on_broken,
            )
            return self.seat

    def head_lost(self, ring: str) -> None:
        """Take note that the head of a ring is gone: one that it was building will never stand."""
        if self.seat is not None and self.seat.ring == ring:
            self.seat.lose_owner()

    async def take_back(self, seat: RingSeat) -> None:
        """Leave `seat`, unless another one has taken its place already."""
        async with self._changing:
            if self.seat is seat:
                await self._leave()

    async def load(
        self,
        seat: RingSeat,
        order: StageOrder,
        *,
        wire_dtype: WireDType,
        threads: int,
        memory_bytes: int,
        on_progress: Callable[[int, int], None],
    ) -> tuple[LoadedStage, bool]:
        """Have the stage of `order` loaded for `seat`.

        Returns the stage and whether it was there already. A stage of another order is freed first;
        for another wire dtype it need not be. Raises what loading raises, and PeerFailedError when
        the seat was given to another ring meanwhile or this node leaves; then nothing is left
        loaded of this order.
        """
        async with self._changing:
            self._check_not_closing()
            if self.seat is not seat:
                raise PeerFailedError(f"the place of ring {seat.ring} was given away; ask again")
            await self._compute.run(lambda: use_threads(threads))
            reused = self.loaded is not None and self.loaded.fits(order)
            if self.loaded is None or not reused:
                await self._free()
                self.loaded = await self._load(order, memory_bytes, on_progress)
            compute = self.loaded.compute
            await self._compute.run(lambda: compute.use_wire(wire_dtype))
            seat.is_loaded = True
            return self.loaded, reused

    async def measure(
        self,
        job: Callable[[Callable[[], None]], T],
        on_progress: Callable[[int, int], None],
    ) -> T:
        """Run `job`, which computes, on the compute thread. It calls what it is given in between.

        Raises BusyError when sequences are open here, also when one is opened meanwhile, what `job`
        raises, and PeerFailedError when this node leaves. When cancelled, waits until the thread
        has given up.
        """
        async with self._changing:
            self._check_not_closing()
            self.check_idle()
            reporter = Reporter(on_progress, asyncio.get_running_loop())

            def tick() -> None:
                self.check_idle()
                reporter.report(0, 1)

            try:
                return await self._to_its_end(self._compute, lambda: job(tick), reporter)
            finally:
                await self._loader.run(give_memory_back)

    async def turn(self) -> None:
        """Wait for a turn of the compute thread, as each step does.

        Raises BusyError if it is in use, PeerFailedError when this node leaves.
        """
        self._check_not_closing()
        self.check_idle()
        await self._compute.run(lambda: None)

    def check_idle(self) -> None:
        """Raise BusyError while sequences are open here."""
        if self.seat is not None and self.seat.is_busy:
            raise generating_with(self.seat.model)

    async def join(self, ring: str, epoch: int, pipeline: Pipeline | None = None) -> None:
        """Connect the seat to its neighbours and start to work; see RingSeat.join."""
        seat = self._seat(ring, epoch)
        if self.loaded is None or not seat.is_loaded:
            raise UsageError(f"ring {ring} was asked to connect before its stage was loaded")
        await seat.join(self.loaded.compute, self._compute, pipeline)

    def check_hello(self, hello: Hello) -> None:
        """Raise UsageError when a data link's hello is for no seat of this node."""
        self._seat(hello.ring, hello.epoch).check_hello(hello)

    def accept(self, link: Link) -> None:
        """Take a data link. Raises UsageError when it is for no seat of this node."""
        self._seat(link.peer.ring, link.peer.epoch).accept(link)

    async def unload(self, owner: str) -> None:
        """Leave the ring and free the weights.

        Raises BusyError while sequences of another head than `owner` are open.
        """
        async with self._changing:
            self._refuse_if_busy(owner)
            await self._leave()
            await self._free()

    async def close(self) -> None:
        """Leave the ring, free the weights and end the threads; what is loaded just now is not."""
        self._is_closing = True
        if self._work is not None:
            self._work.give_up(_leaving())
        async with self._changing:
            await self._leave()
            self.loaded = None
        self._compute.close()
        self._loader.close()

    async def _load(
        self, order: StageOrder, memory_bytes: int, on_progress: Callable[[int, int], None]
    ) -> LoadedStage:
        """Load on the loading thread. When cancelled, wait until the thread has given up."""
        reporter = Reporter(on_progress, asyncio.get_running_loop())
        try:
            return await self._to_its_end(
                self._loader,
                lambda: load(order, memory_bytes, reporter.report, self._packs),
                reporter,
            )
        except asyncio.CancelledError:
            await finish(self._loader.run(give_memory_back))
            raise

    async def _to_its_end(self, thread: Executor, job: Callable[[], T], reporter: Reporter) -> T:
        """Run `job` on a thread. When cancelled, have it give up and wait until it has."""
        self._work = reporter
        running = asyncio.ensure_future(thread.run(job))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            reporter.give_up()
            try:
                await finish(_ended(running))
            finally:
                del running  # with what it has made: the memory may be wanted while this travels
            raise
        finally:
            self._work = None

    def _check_not_closing(self) -> None:
        if self._is_closing:
            raise _leaving()

    def _seat(self, ring: str, epoch: int) -> RingSeat:
        if self.seat is None or (self.seat.ring, self.seat.epoch) != (ring, epoch):
            raise UsageError(
                f"this node has no seat in ring {ring} epoch {epoch}: another ring has taken it, "
                "or it was never given; ask again"
            )
        return self.seat

    def _refuse_if_busy(self, owner: str) -> None:
        """Raise BusyError while sequences of another head than `owner` are open."""
        if self.seat is not None and self.seat.is_busy and self.seat.owner != owner:
            raise generating_with(self.seat.model)

    def _refuse_others(self, owner: str) -> None:
        """The same, and TakenError while another head builds a ring with this node."""
        self._refuse_if_busy(owner)
        if self.seat is not None and self.seat.is_forming and self.seat.owner != owner:
            raise TakenError(
                f"this node is loading {self.seat.model} for {self.seat.owner_name}: wait until "
                "that ends, or stop the command that asked for it"
            )

    async def _leave(self) -> None:
        if self.seat is not None:
            await self.seat.leave()
            self.seat = None

    async def _free(self) -> None:
        if self.loaded is not None:
            self.loaded = None
            await self._loader.run(give_memory_back)


def generating_with(model: str) -> BusyError:
    """Say that nothing else can be done now."""
    return BusyError(f"this node is generating with {model}: wait until that ends, or stop it")


def _leaving() -> PeerFailedError:
    return PeerFailedError("this node is leaving; start it again, or ask without it")


async def _ended(running: asyncio.Future[T]) -> None:
    """Wait for the end of what was told to give up: nobody else asks how it ended."""
    await asyncio.wait([running])
    if not running.cancelled():
        running.exception()
