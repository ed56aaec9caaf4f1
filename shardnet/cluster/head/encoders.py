"""Encoders on this node, beside its stage: vectors and scores of texts for clients.

Knows which are loaded, in what memory, and when they are freed. Must not know rings: no plan is
made, and the model of the ring stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from msgspec import structs

from shardnet.cluster.head.held_encoder import EncoderThread, HeldEncoder
from shardnet.cluster.head.model_lists import ModelLists
from shardnet.cluster.head.replies import report_progress
from shardnet.cluster.member.stage_orders import StageOrders
from shardnet.cluster.peers.control_link import ControlLink, MessageHandlers, RedirectedError
from shardnet.cluster.planning.planning import Planner
from shardnet.cluster.store.disk_jobs import DiskJobs, node_leaves
from shardnet.errors import (
    CapacityError,
    CheckpointError,
    ContextExceededError,
    QueueFullError,
    UsageError,
)
from shardnet.runtime.encoding.encoder_facts import EncoderFacts, find_encoder
from shardnet.runtime.encoding.judge import Judge
from shardnet.runtime.loading.loading import set_compute_threads
from shardnet.runtime.loading.model_facts import find_folder, stamp
from shardnet.tokenizers.formats.tokenizer_files import tokenizer_place
from shardnet.tokenizers.tokenizer import TextProcess, no_tokenizer
from shardnet.types import DType, NodeId
from shardnet.wire.messages.generation import Encode, Encoded
from shardnet.wire.messages.membership import NodeInfo
from shardnet.wire.messages.plans import PlannedStage, PlanReply, PlanRequest

if TYPE_CHECKING:  # it imports torch
    from shardnet.runtime.encoding.decoder import Decoder
    from shardnet.runtime.encoding.encoder import Encoder, EncoderInput, Step

T = TypeVar("T")

IDLE_S: Final = 300.0
"""An encoder that no request has used for so long is freed, unless its last one says otherwise."""
MAX_REQUESTS: Final = 64
"""Requests that wait or run at one time."""


@dataclass(kw_only=True, eq=False, repr=False)
class Encoders:
    """Answers Encode, one batch after another on a thread of its own, and tokenises on another.

    `own_info` describes this node, `ring_model` names the model of its ring, `disk` reads files,
    `lists` and `planner` find models, `address_of` gives a node's address. Encoders take what
    `orders` leave of the first device's memory.
    """

    own_info: Callable[[], NodeInfo]
    ring_model: Callable[[], str | None]
    lists: ModelLists
    planner: Planner
    orders: StageOrders
    disk: DiskJobs
    address_of: Callable[[NodeId], str]
    log: Callable[[str], None]

    def __post_init__(self) -> None:
        self._thread = EncoderThread("shardnet-encode")
        self._reader = EncoderThread("shardnet-encode-text")
        self._held: dict[Path, HeldEncoder] = {}
        self._leaving: set[HeldEncoder] = set()
        """Those that were freed while requests used them."""
        self._tokenizers: set[TextProcess] = set()
        """Of all that are loaded, or being loaded."""
        self._loading: dict[Path, asyncio.Future[HeldEncoder]] = {}
        self._loading_bytes: dict[Path, int] = {}
        self._freeing: asyncio.TimerHandle | None = None
        self._ending: set[asyncio.Future[None]] = set()
        self._n_requests = 0
        self._is_closed = False
        self.ask_for_room: Callable[[str, int], Awaitable[bool]] = _nobody_goes
        """Has models of the household that it is asked by name for unloaded until this node has so
        many bytes for it; says whether any could be."""

    def register(self, handlers: MessageHandlers) -> None:
        """Register the message that asks for vectors and scores."""
        handlers.register(Encode, self.encode)

    async def encode(self, control: ControlLink, message: Encode) -> None:
        """Reply with vectors or scores, with what the model is, or Redirect to who has it.

        That of the ring, which may be on other nodes only, is one that writes, unless it is an
        encoder of which a ring does not make the same.

        Raises QueueFullError, CapacityError without memory for it, ContextExceededError for a text
        that is too long, UsageError for a model of the other kind, CheckpointError.
        """
        with self._counted():
            ring, held = self.ring_model(), [held.model for held in self._held.values()]
            model = await self.lists.resolve(message.model, (ring, *held))
            path = await self.disk.run(model, partial(find_folder, model))
            is_rings = model == ring
            if path is None and not is_rings:
                path = await self._bring(control, message.request, model)
            facts = await self.facts_at(path) if path is not None else None
            if facts is None or (is_rings and facts.is_for_rings_too):
                control.send(Encoded(request=message.request, kind=""))
            else:
                control.send(await self._answer(message, model, facts))

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        if self._n_requests >= MAX_REQUESTS:
            raise QueueFullError(f"{MAX_REQUESTS} requests to encoders wait", remedy="ask again")
        self._n_requests += 1
        try:
            yield
        finally:
            self._n_requests -= 1

    async def find(self, model: str) -> EncoderFacts | None:
        """Read the headers of the encoder that a name means on this node; None if it means none."""
        path = await self.disk.run(model, partial(find_folder, model))
        return await self.facts_at(path) if path is not None else None

    async def facts_at(self, path: Path) -> EncoderFacts | None:
        """Read the headers of an encoder, unless they are known; None for what is none.

        A decoder that does not fit beside the stage is none: a ring makes the same vectors of it.
        Raises CheckpointError if they are damaged.
        """
        held = self._held.get(path)

        def read() -> EncoderFacts | None:
            known = held.encoder.facts if held is not None else None
            if known is not None and known.stamp == stamp(path):
                return known
            found = find_encoder(path)
            unpacks = self.orders.device.for_torch != "cpu"
            return found and replace(found, unpacks=unpacks)

        facts = await self.disk.run(path, read)
        if facts is None or held is not None or not facts.is_for_rings_too:
            return facts
        return facts if facts.needed_bytes <= self._room() else None

    def _room(self) -> int:
        """The bytes that one encoder may take, if it is alone."""
        return self.orders.free_bytes() + self.orders.encoder_bytes

    def plan(self, message: PlanRequest, model: str, facts: EncoderFacts) -> PlanReply:
        """Describe where an encoder would be computed: it is not planned for, but here or nowhere.

        Raises CapacityError if it does not fit even alone.
        """
        own, held = self.own_info(), self._held.get(facts.path)
        room = self._room()
        if held is None and facts.needed_bytes > room:
            raise _does_not_fit(facts, room)
        by, dtype = "by transformers", DType.FLOAT32.value
        if facts.model is not None:
            own_dtype = facts.model.config.checkpoint_dtype or DType.FLOAT32
            by, dtype = "by layers of our own", own_dtype.value
        stage = PlannedStage(
            rank=0,
            node=own.node,
            name=own.name,
            address=own.address,
            layers=(0, facts.config.n_layers),
            weight_bytes=facts.weight_bytes,
            kv_bytes=0,
            dtype=dtype,
            weight_dtype=dtype,
        )
        return PlanReply(
            request=message.request,
            model=model,
            model_id=facts.model_id,
            dtype=dtype,
            wire_dtype=dtype,
            context=facts.context,
            stages=[stage],
            why=f"{facts.config.kind} encoder, one node, {by}",
        )

    def free_idle(self, until_s: float = math.inf) -> None:
        """Free the encoders that no request uses, of these those that are kept until `until_s`."""
        for path, held in [*self._held.items()]:
            if not held.n_users and _ends_s(held) <= until_s:
                self._free(path)

    async def close(self) -> None:
        """Free everything and end the threads, which drop what is loaded just now."""
        self._is_closed = True
        for path in [*self._held]:
            self._free(path)
        for tokenizer in [*self._tokenizers]:
            self._end(tokenizer)
        if self._freeing is not None:
            self._freeing.cancel()
        self._thread.executor.close()
        self._reader.executor.close()
        await asyncio.gather(*self._ending, return_exceptions=True)

    async def _bring(self, control: ControlLink, request: int, model: str) -> Path:
        """Download a model to this node and return where it is, unless a peer has it."""
        holder = await self.lists.holder(model)
        if holder is not None:
            raise RedirectedError(self.address_of(holder))
        progress = partial(report_progress, control, request, 0, "downloading")
        await self.planner.provide(model, progress, "text")
        path = await self.disk.run(model, partial(find_folder, model))
        if path is None:
            raise CheckpointError(f"{model} is not on this node", remedy="copy or pull it there")
        return path

    async def _answer(self, message: Encode, model: str, facts: EncoderFacts) -> Encoded:
        kind = facts.config.kind
        described = Encoded(
            request=message.request,
            kind=kind,
            context=facts.context,
            normalized=facts.modules.normalized,
            width=facts.width,
        )
        if not message.texts:
            known = self._held.get(facts.path)
            if known is not None and message.keep_s is not None:
                known.keep_s = message.keep_s
                self._free_later()
            return described
        if (kind == "reranker") != (message.query is not None):
            wants = "a query and documents to rank" if kind == "reranker" else "texts for vectors"
            raise UsageError(f"{message.model} takes {wants}", remedy="ask another model for that")
        held = await self._load(message.model, model, facts)
        held.n_users += 1
        held.keep_s = message.keep_s
        try:
            inputs = await self._inputs(message, held)
            values = await self._computed(held, inputs, message)
        finally:
            held.n_users -= 1
            held.used_s = time.monotonic()
            self._leave(held)
        n_tokens = [len(given.token_ids) for given in inputs]
        return structs.replace(described, n_tokens=n_tokens, values=values)

    def _leave(self, held: HeldEncoder) -> None:
        """Free an encoder that was freed while it was used, once nobody does; others later."""
        if held in self._leaving and not held.n_users:
            self._leaving.discard(held)
            self._end(held.tokenizer)
            self._count()
        self._free_later()

    async def _inputs(self, message: Encode, held: HeldEncoder) -> list[EncoderInput]:
        """Make the inputs of all texts. Raises what `encode` says of one that is refused."""
        if message.query is not None and not all(isinstance(one, str) for one in message.texts):
            raise UsageError("a document to rank is a text, not token ids")
        inputs = await self._run(self._reader, partial(held.inputs, message))
        context = held.encoder.facts.context
        for place, given in enumerate(inputs, message.first + 1):
            n_tokens = len(given.token_ids)
            if not n_tokens:
                raise UsageError(f"text number {place} is empty", remedy="give it some text")
            if n_tokens > context:
                raise ContextExceededError.of(
                    f"text number {place} has {n_tokens} tokens and the model takes {context} at "
                    "most",
                    n_tokens,
                    context,
                    remedy="shorten it",
                )
        return inputs

    async def _computed(
        self, held: HeldEncoder, inputs: Sequence[EncoderInput], message: Encode
    ) -> bytes:
        """Compute vectors or scores; return their float32 bytes in the inputs' order."""
        from shardnet.runtime.encoding.encoder import batches

        rows: dict[int, bytes] = {}
        facts = held.encoder.facts
        pooling = message.pooling or facts.modules.pooling
        for batch in batches([len(given.token_ids) for given in inputs], facts.batch_positions):
            some = [inputs[place] for place in batch]
            made = await self._run(self._thread, partial(held.encoder.forward, some, pooling))
            rows |= {
                place: row.astype("<f4").tobytes() for place, row in zip(batch, made, strict=True)
            }
        return b"".join(rows[place] for place in range(len(inputs)))

    async def _run(self, thread: EncoderThread, job: Callable[[Step], T]) -> T:
        self._check_not_closed()
        return await thread.run(job)

    # --- what is loaded

    async def _load(self, asked: str, model: str, facts: EncoderFacts) -> HeldEncoder:
        """Return an encoder, loaded if it is not, in memory that others may have had."""
        has_asked = False
        while True:
            self._check_not_closed()
            held = self._held.get(facts.path)
            if held is not None and held.encoder.facts.stamp == facts.stamp:
                return held
            loading = self._loading.get(facts.path)
            if loading is None:
                if held is not None:
                    self._free(facts.path)
                try:
                    self._make_room(facts)
                except CapacityError:
                    if has_asked or not await self.ask_for_room(asked, facts.needed_bytes):
                        raise
                    has_asked = True
                    continue
                loading = self._begin(model, facts)
            await self._thread.end_of(loading)  # whoever was told first may have freed it again

    def _check_not_closed(self) -> None:
        if self._is_closed:
            raise node_leaves()

    def _begin(self, model: str, facts: EncoderFacts) -> asyncio.Future[HeldEncoder]:
        """Load an encoder, and keep it also if who asked has gone, or has waited for too long."""

        def load() -> HeldEncoder:
            from shardnet.runtime.encoding.decoder import load_decoder
            from shardnet.runtime.encoding.encoder import load_encoder

            self._thread.move()
            set_compute_threads(self.orders.threads_of(0))
            tokenizer = TextProcess(tokenizer_place(facts.path))
            self._tokenizers.add(tokenizer)  # before the look: whoever closes ends all of them
            try:
                self._check_not_closed()
                if tokenizer.load()[0] is None:
                    raise no_tokenizer(facts.path, "text")
                judge, device = None, self.orders.device.for_torch
                encoder: Encoder | Decoder
                if facts.model is None:
                    encoder = load_encoder(facts, device, self._thread.move)
                else:
                    if facts.config.kind == "reranker":
                        judge = Judge(tokenizer.encode, facts.modules.answers)
                    encoder = load_decoder(facts, device, judge, self._thread.move)
            except BaseException:
                self._tokenizers.discard(tokenizer)
                tokenizer.close()
                raise
            return HeldEncoder(
                model=model,
                encoder=encoder,
                tokenizer=tokenizer,
                n_bytes=facts.needed_bytes,
                judge=judge,
            )

        loading = self._loading[facts.path] = self._thread.executor.submit(load)
        self._loading_bytes[facts.path] = facts.needed_bytes
        self._count()
        loading.add_done_callback(partial(self._keep, facts))
        return loading

    def _keep(self, facts: EncoderFacts, loading: asyncio.Future[HeldEncoder]) -> None:
        """Keep what was loaded, unless it failed."""
        del self._loading[facts.path], self._loading_bytes[facts.path]
        if not loading.cancelled() and loading.exception() is None and not self._is_closed:
            self._held[facts.path] = loading.result()
            self._free_later()
            size = facts.weight_bytes / 2**20
            by = "float32, by transformers" if facts.model is None else "as stored"
            self.log(f"loaded the encoder {facts.path} ({size:.1f} MiB, {by})")
        self._count()

    def _make_room(self, facts: EncoderFacts) -> None:
        """Free other encoders, the longest unused first, until one fits.

        Raises CapacityError, and frees none, where all of them are not enough.
        """
        needed = facts.needed_bytes
        unused = sorted(
            (held.used_s, path) for path, held in self._held.items() if not held.n_users
        )
        room = self.orders.free_bytes() + sum(self._held[path].n_bytes for _, path in unused)
        if needed > room:
            raise _does_not_fit(facts, room)
        for _, path in unused:
            if needed > self.orders.free_bytes():
                self._free(path)
        free = self.orders.free_bytes()
        if needed > free:
            raise _does_not_fit(facts, free)

    def _free(self, path: Path) -> None:
        """Forget an encoder, whose memory is free when nobody uses it any more."""
        held = self._held.pop(path)
        self.log(f"freed the encoder {path}")
        if held.n_users:
            self._leaving.add(held)
        else:
            self._end(held.tokenizer)
        self._count()

    def _end(self, tokenizer: TextProcess) -> None:
        """Have the process of a tokenizer ended."""
        self._tokenizers.discard(tokenizer)
        ending = self.disk.submit("the tokenizers of encoders", tokenizer.close)
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    def _count(self) -> None:
        held_bytes = sum(held.n_bytes for held in (*self._held.values(), *self._leaving))
        self.orders.encoder_bytes = held_bytes + sum(self._loading_bytes.values())

    def _free_later(self) -> None:
        """Have encoders freed as each has been idle for long enough."""
        if self._freeing is not None:
            self._freeing.cancel()
        unused = [_ends_s(held) for held in self._held.values() if not held.n_users]
        if unused:  # a second later: texts of one request may come in several messages
            wait_s = min(unused) + 1 - time.monotonic()
            self._freeing = asyncio.get_running_loop().call_later(wait_s, self._free_long_idle)

    def _free_long_idle(self) -> None:
        self.free_idle(time.monotonic())
        self._free_later()


def _ends_s(held: HeldEncoder) -> float:
    """Return until when an encoder is kept that no request uses."""
    return held.used_s + (IDLE_S if held.keep_s is None else held.keep_s)


async def _nobody_goes(model: str, free_bytes: int) -> bool:
    return False


def _does_not_fit(facts: EncoderFacts, room_bytes: int) -> CapacityError:
    return CapacityError(
        f"the encoder {facts.path} needs {facts.needed_bytes} bytes, and this node has "
        f"{room_bytes} beside its stage",
        remedy="raise --memory, or free the model of the ring with `shardnet unload`",
    )
