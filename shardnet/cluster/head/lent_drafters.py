"""Drafters beside a ring: loaded here, for this node's rings or those of others, or elsewhere.

Knows how one is found, loaded and asked over a link, and when it is lost. Must not know requests,
nor which drafts are accepted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from msgspec import structs

from shardnet.cluster.member.stage_orders import StageOrders
from shardnet.cluster.peers.control_link import REPLY_SILENCE_S, ControlLink, MessageHandlers
from shardnet.cluster.planning.planning import Planner
from shardnet.cluster.store.disk_jobs import DiskJobs
from shardnet.errors import (
    CancelledRequestError,
    CapacityError,
    CheckpointError,
    LinkError,
    PeerSilentError,
    RemoteProtocolError,
    ShardnetError,
    UsageError,
    internal_error,
)
from shardnet.runtime.engine.model_drafts import Ask, DraftHost
from shardnet.runtime.loading.model_facts import find_folder
from shardnet.transport.deadline import deadline
from shardnet.types import SlotId
from shardnet.wire.messages.control import Done
from shardnet.wire.messages.drafting import (
    Draft,
    DrafterReady,
    DraftReply,
    FreeDraftSlot,
    LoadDrafter,
)
from shardnet.wire.messages.stages import LoadProgress

if TYPE_CHECKING:  # it imports torch, which a node without a drafter may never need
    from shardnet.runtime.engine.draft_model import DraftModel

_log = logging.getLogger(__name__)

T = TypeVar("T")

OnBytes = Callable[[int, int], None]
"""Takes (bytes done, bytes in all)."""
LOAD_S: Final = 1800.0
"""How long another node may load one, its download included."""
PAUSE_S: Final = 60.0
"""How long a node that was short of memory loads none."""


@dataclass(kw_only=True, eq=False, repr=False)
class DrafterLoader:
    """Loads drafters on this node, into memory that its stage leaves; `planner` downloads them."""

    disk: DiskJobs
    planner: Planner
    orders: StageOrders

    def __post_init__(self) -> None:
        self._loaded: list[DraftModel] = []
        self._turn, self._loading = asyncio.Lock(), dict[object, int]()
        self.orders.drafter_bytes = lambda: sum(
            [*self._loading.values(), *(each.n_bytes for each in self._live())]
        )
        self._until_s = 0.0

    def pause(self) -> None:
        """Refuse to load any for PAUSE_S: memory is short."""
        self._until_s = time.monotonic() + PAUSE_S

    def _check_pause(self) -> None:
        if time.monotonic() < self._until_s:
            raise CapacityError("memory is short here: no drafter is loaded now")

    def _live(self) -> list[DraftModel]:
        self._loaded = [each for each in self._loaded if not each.is_closed]
        return self._loaded

    async def folder_of(self, name: str, on_progress: OnBytes) -> Path:
        """Return where a drafter is, downloaded if its name is one of the Hub.

        Raises CheckpointError if there is none, and what the download raises.
        """
        path = await self.disk.run(name, partial(find_folder, name))
        if path is None:
            await self.planner.provide(name, on_progress)
            path = await self.disk.run(name, partial(find_folder, name))
        if path is None:
            raise CheckpointError(
                f"--speculate {name}: there is no such checkpoint here",
                remedy="name a folder or a model of the Hub, or give off, ngram, mtp or auto",
            )
        return path

    async def load(self, message: LoadDrafter, on_progress: OnBytes) -> DraftModel:
        """Load a drafter. Raises what `folder_of` and load_drafter raise, and CapacityError in a
        pause.
        """
        self._check_pause()
        path = await self.folder_of(message.drafter, on_progress)
        model = message.form.model
        target = await self.disk.run(model, partial(find_folder, model))
        order = object()

        def load() -> DraftModel:
            from shardnet.runtime.engine.draft_model import load_drafter  # torch takes seconds

            try:
                return load_drafter(
                    path,
                    target,
                    message.form,
                    vocab_size=message.vocab_size,
                    device=self.orders.device.for_torch,
                    memory_bytes=spare_bytes,
                    threads=threads,
                    take=partial(self._loading.__setitem__, order),
                )
            finally:  # also where nobody waits any more
                self._loading.pop(order, None)

        async with self._turn:  # who comes next counts what this one takes
            spare_bytes, threads = self.orders.free_bytes(), self.orders.threads_of(0)
            loaded = await self.disk.run(message.drafter, load)
            self._loaded.append(loaded)
        if time.monotonic() < self._until_s:
            loaded.close()
        self._check_pause()
        return loaded


@dataclass(kw_only=True, eq=False, repr=False)
class LentDrafters:
    """Drafts on this node for the rings of others, as long as their heads and links last."""

    loader: DrafterLoader
    log: Callable[[str], None]

    def __post_init__(self) -> None:
        self._lent: dict[tuple[ControlLink, int], DraftModel] = {}

    def register(self, handlers: MessageHandlers) -> None:
        """Register what other heads ask."""
        handlers.register(LoadDrafter, self._lend)
        handlers.register(Draft, self._draft)
        handlers.register(FreeDraftSlot, self._free)

    def close(self) -> None:
        """Unload all."""
        for model in self._lent.values():
            model.close()

    async def _lend(self, control: ControlLink, message: LoadDrafter) -> None:
        """Load a drafter, and unload it when its head does not want it any more, or is gone."""
        loading = asyncio.ensure_future(self.loader.load(message, lambda done, total: None))
        try:
            await control.report_until(message.request, loading)
            model = loading.result()
        finally:
            loading.cancel()
        key, whose = (control, message.request), control.peer_name
        self._lent[key] = model
        self.log(f"drafting with {message.drafter} for {whose}")
        try:
            control.send(
                DrafterReady(
                    request=message.request,
                    layers=model.layers,
                    most=model.most,
                    draft_s=await model.measured_s(),
                )
            )
            await model.ended.wait()
            raise CancelledRequestError("the drafter was unloaded: memory is short")
        finally:
            del self._lent[key]
            model.close()
            self.log(f"no longer drafting with {message.drafter} for {whose}")

    async def _draft(self, control: ControlLink, message: Draft) -> None:
        model = self._of(control, message.drafter)
        ask, (n_rows, rest) = Ask(draft=message), divmod(len(message.token_ids), 4)
        is_whole = not rest and len(message.states) == n_rows * model.width
        if not is_whole or max(ask.token_ids) >= model.vocab_size:
            raise RemoteProtocolError("Draft has parts of token ids or rows, or ids of no tokens")
        token_ids = await model.ask(ask)
        control.send(DraftReply(request=message.request, token_ids=tuple(token_ids)))

    async def _free(self, control: ControlLink, message: FreeDraftSlot) -> None:
        await self._of(control, message.drafter).free(message.slot)
        control.send(Done(request=message.request))

    def _of(self, control: ControlLink, drafter: int) -> DraftModel:
        model = self._lent.get((control, drafter))
        if model is None or model.is_closed:
            raise UsageError(f"there is no drafter {drafter} here for {control.peer_name}")
        return model


class FarDrafter(DraftHost):
    """A drafter on another node. With the link, or an answer that does not come, it is lost."""

    def __init__(self, control: ControlLink, order: LoadDrafter) -> None:
        super().__init__()
        self.control, self._order = control, order
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.draft_s, self._number = 0.0, 0

    async def load(self, on_progress: OnBytes) -> None:
        """Have it loaded. Raises the error that the node reports, LinkError, PeerSilentError."""
        self._run(self._hold(on_progress))
        try:
            await self._ready
        except BaseException:
            self.close()
            raise

    async def _hold(self, on_progress: OnBytes) -> None:
        """Wait until it is ready, and then for what ends it."""
        name = self.control.peer_name
        try:
            async with self.control.conversation(self._order) as answers:
                async with deadline(LOAD_S):
                    while not self._ready.done():
                        async with deadline(REPLY_SILENCE_S):
                            answer = await anext(answers)
                        if isinstance(answer, LoadProgress):
                            on_progress(answer.done_bytes, answer.total_bytes)
                        elif isinstance(answer, DrafterReady):
                            self.layers, self.most = answer.layers, answer.most
                            self.draft_s, self._number = answer.draft_s, answer.request
                            self._ready.set_result(None)
                raise RemoteProtocolError(f"{name} sent {type(await anext(answers)).__name__}")
        except Exception as error:
            found = internal_error("a drafter", error)
            if isinstance(error, TimeoutError):
                found = PeerSilentError(f"{name} loads no drafter: no answer")
            if self._ready.done():
                _log.warning("%s drafts no more with %s: %s", name, self._order.drafter, found)
            else:
                self._ready.set_exception(found)
        finally:
            self.close()

    def close(self) -> None:
        """Have it unloaded; see DraftHost."""
        super().close()
        for task in self._tasks:
            task.cancel()

    def ask(self, ask: Ask) -> asyncio.Future[list[int]]:
        """See DraftHost."""
        return self._run(self._drafts(ask))

    def free(self, slot: SlotId) -> asyncio.Future[None]:
        """See DraftHost."""
        return self._run(self._freed(slot))

    async def _drafts(self, ask: Ask) -> list[int]:
        control = self.control
        message = structs.replace(ask.draft, drafter=self._number)
        try:
            answer = await control.ask(message, DraftReply)
            ids = answer.token_ids
            if len(ids) > message.limit or max(ids, default=0) >= self._order.vocab_size:
                raise RemoteProtocolError(f"{control.peer_name} drafted what nobody asked for")
        except LinkError:
            self.close()
            raise
        return [*ids]

    async def _freed(self, slot: SlotId) -> None:
        message = FreeDraftSlot(request=0, drafter=self._number, slot=slot)
        try:
            await self.control.ask(message, Done)
        except ShardnetError:  # the slot would be lost for good
            self.close()
            raise

    def _run(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
