"""Drafters beside a ring: loaded here, for this node's rings or those of others, or elsewhere.

Knows how one is found, loaded and asked over a link, and when it is lost. Must not know requests,
nor which drafts are accepted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from msgspec import structs

from shardnet.cluster.member.stage_orders import StageOrders
from shardnet.cluster.peers.control_link import REPLY_SILENCE_S, ControlLink, MessageHandlers
from shardnet.cluster.planning.planning import Planner
from shardnet.cluster.store.disk_jobs import DiskJobs
from shardnet.errors import (
    CancelledRequestError,
    CheckpointError,
    PeerSilentError,
    RemoteProtocolError,
    ShardnetError,
    UsageError,
)
from shardnet.runtime.engine.model_drafts import Ask, DraftHost
from shardnet.runtime.loading.model_facts import find_folder
from shardnet.transport.deadline import deadline
from shardnet.types import SlotId
from shardnet.wire.framing.schema import Numbered
from shardnet.wire.messages.control import Done, Failed, reported_error
from shardnet.wire.messages.drafting import (
    Draft,
    Drafted,
    DrafterReady,
    FreeDraftSlot,
    LoadDrafter,
)
from shardnet.wire.messages.stages import LoadProgress

if TYPE_CHECKING:  # it imports torch, which a node without a drafter may never need
    from shardnet.runtime.engine.draft_model import DraftModel

T = TypeVar("T")

LOST_S: Final = 30.0
"""A drafter on another node that has not answered for so long is lost."""
OnBytes = Callable[[int, int], None]
"""Takes (bytes done, bytes in all)."""


@dataclass(kw_only=True, eq=False, repr=False)
class DrafterLoader:
    """Loads drafters on this node, into memory that its stage leaves; `planner` downloads them."""

    disk: DiskJobs
    planner: Planner
    orders: StageOrders

    def __post_init__(self) -> None:
        self._loaded: list[DraftModel] = []
        self.orders.drafter_bytes = lambda: sum(each.n_bytes for each in self._live())

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
        """Load a drafter. Raises what `folder_of` and load_drafter raise."""
        from shardnet.runtime.engine.draft_model import load_drafter

        path = await self.folder_of(message.drafter, on_progress)
        model = message.form.model
        target = await self.disk.run(model, partial(find_folder, model))
        spare_bytes, threads = self.orders.free_bytes(), self.orders.threads_of(0)
        loaded = await self.disk.run(
            message.drafter,
            lambda: load_drafter(
                path,
                target,
                message.form,
                vocab_size=message.vocab_size,
                device=self.orders.device.for_torch,
                memory_bytes=spare_bytes,
                threads=threads,
            ),
        )
        self._loaded.append(loaded)
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
                    weight_bytes=model.n_bytes,
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
        if len(message.token_ids) % 4 or len(message.states) % (len(message.token_ids) // 2):
            raise RemoteProtocolError("Draft has parts of token ids, or of rows of states")
        ask = Ask(draft=message)
        drafting = model.ask(ask)
        try:
            token_ids = await asyncio.shield(drafting)
        except asyncio.CancelledError:
            ask.is_over = True
            if drafting.cancelled():
                raise CancelledRequestError("the drafter was unloaded") from None
            raise
        control.send(Drafted(request=message.request, token_ids=tuple(token_ids)))

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
        self._control, self._order = control, order
        self._answers: asyncio.Queue[Numbered | ShardnetError] = asyncio.Queue()
        self._is_ready = False
        self.draft_s = 0.0

    async def load(self, on_progress: OnBytes) -> None:
        """Have it loaded. Raises the error that the node reports, LinkError, PeerSilentError."""
        self._control.begin(self._order, self._on_answer)
        try:
            await self._wait_until_ready(on_progress)
        except BaseException:
            self.close()
            raise

    async def _wait_until_ready(self, on_progress: OnBytes) -> None:
        peer = self._control.peer_name
        while not self._is_ready:
            try:
                async with deadline(REPLY_SILENCE_S):
                    answer = await self._answers.get()
            except TimeoutError:
                raise PeerSilentError(f"{peer} loads no drafter: it did not answer") from None
            match answer:
                case ShardnetError():
                    raise answer
                case Failed():
                    raise reported_error(answer, peer)
                case LoadProgress(done_bytes=done, total_bytes=total):
                    on_progress(done, total)
                case DrafterReady(layers=layers, most=most, draft_s=draft_s):
                    self.layers, self.most, self.draft_s = layers, most, draft_s
                    self._is_ready = True
                case _:
                    raise RemoteProtocolError(f"{peer} answered LoadDrafter with {answer}")

    def _on_answer(self, answer: Numbered | ShardnetError) -> None:
        if self._is_ready:  # whatever follows says that it is lost
            self.close()
        else:
            self._answers.put_nowait(answer)

    def close(self) -> None:
        """Have it unloaded; see DraftHost."""
        if not self.is_closed:
            super().close()
            if self._control.ended is None:
                self._control.end(self._order.request, cancel=True)

    def ask(self, ask: Ask) -> asyncio.Future[list[int]]:
        """See DraftHost."""
        request, drafter = self._control.next_request(), self._order.request
        message = structs.replace(ask.draft, request=request, drafter=drafter)
        return self._sent(message, self._drafts)

    def free(self, slot: SlotId) -> asyncio.Future[None]:
        """See DraftHost."""
        request = self._control.next_request()
        message = FreeDraftSlot(request=request, drafter=self._order.request, slot=slot)
        return self._sent(message, lambda answer: None)

    def _drafts(self, answer: Numbered) -> list[int]:
        if not isinstance(answer, Drafted):
            raise RemoteProtocolError(f"{self._control.peer_name} answered Draft with {answer}")
        if max(answer.token_ids, default=0) >= self._order.vocab_size:
            raise RemoteProtocolError(f"{self._control.peer_name} drafted no token of the model")
        return [*answer.token_ids]

    def _sent(
        self, message: Draft | FreeDraftSlot, read: Callable[[Numbered], T]
    ) -> asyncio.Future[T]:
        """Send a message; the future has what `read` makes of its answer."""
        loop, control = asyncio.get_running_loop(), self._control
        answered: asyncio.Future[T] = loop.create_future()

        def lost(error: ShardnetError) -> None:
            if not answered.done():
                answered.set_exception(error)
            self.close()

        def on_answer(answer: Numbered | ShardnetError) -> None:
            timer.cancel()
            if isinstance(answer, ShardnetError):  # the link has ended
                lost(answer)
                return
            control.end(message.request, cancel=False)
            if answered.done():
                return
            try:
                if isinstance(answer, Failed):
                    answered.set_exception(reported_error(answer, control.peer_name))
                else:
                    answered.set_result(read(answer))
            except RemoteProtocolError as error:
                lost(error)

        silence = PeerSilentError(f"{control.peer_name} has drafted nothing for {LOST_S:g} s")
        timer = loop.call_later(LOST_S, lost, silence)
        try:
            control.begin(message, on_answer)
        except ShardnetError as error:
            timer.cancel()
            lost(error)
        return answered
