"""Carry out a head's orders beside loading: KV caches moved, prefixes on disk, audits of stages."""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from shardnet.cluster.member.stage_host import StageHost
from shardnet.cluster.peers.control_link import ControlLink, MessageHandlers
from shardnet.cluster.sharing.bulk_client import KvClient, ReadRows, SourceRefused
from shardnet.errors import CapacityError, UsageError
from shardnet.runtime.loading.loading import check_layers, trim_heap
from shardnet.runtime.loading.model_facts import check_model_id
from shardnet.runtime.stage.stage_order import StageOrder
from shardnet.stage.estimate.memory_estimate import stage_weight_bytes
from shardnet.stage.estimate.stored_dtype import weight_form
from shardnet.transport.link import Link
from shardnet.transport.loop import unheard
from shardnet.types import HeldRows, LayerRange, SequenceId, SlotId, StateId, block_spans
from shardnet.wire.messages import stages
from shardnet.wire.messages.bulk import FetchKv, KvRows
from shardnet.wire.messages.control import Done

if TYPE_CHECKING:
    from shardnet.stage.moves.slot_moves import HeldLayer, Moves
    from shardnet.stage.prefixes.stage_prefixes import StagePrefixes


KEPT_S: Final = 60.0
"""How long something that was moved waits to be opened, and a link for more to be moved: from the
last of it that came."""
FOUND_S: Final = 1.0
"""How long what was found of a sequence waits to be asked for."""
AHEAD_SHARE: Final = 0.25
"""Of the available memory, for what a prompt looks up."""
SystemBytes = Callable[[], tuple[int, int]]
"""Says how much of the system's memory is available, and all of it."""
ANSWER_S: Final = 10.0
"""Timeout while a node sends nothing of what it was asked for."""


class HostedKv:
    """What sequences hold on this node's stage, for the nodes that take their layers over."""

    def __init__(self, host: StageHost) -> None:
        self._host = host
        self._looked_for: tuple[object, ...] = ()
        self._found: dict[int, HeldLayer] = {}
        self._expiry: asyncio.TimerHandle | None = None

    async def held(self, ask: FetchKv) -> tuple[KvRows, ReadRows]:
        """Say what is here. Raises UsageError as SlotMoves.look, and for other rows than here."""
        layer = await self._look(ask)
        if ask.form != layer.form:
            raise UsageError(f"rows of {ask.form} were asked for, and here are {layer.form}")
        held = layer.held(ask.begin)

        async def read(begin: int, end: int) -> memoryview:
            return await self._host.beside_compute(partial(layer.read, begin, end), layer.is_free)

        rows = KvRows(
            request=ask.request, first=held.first, n_bytes=held.n_bytes, is_state=held.is_state
        )
        return rows, read

    async def _look(self, ask: FetchKv) -> HeldLayer:
        """Look up a layer. Others of the same positions are asked for next, and were found too.

        The compute thread has time between two steps, of which one with a chunk of a prompt may
        take a second.
        """
        wanted = (SequenceId(ask.sequence_id), SlotId(ask.slot), ask.end)
        state = None if ask.state is None else StateId(ask.state)
        looked_for = (ask.ring, ask.epoch, *wanted, state)
        self._host.moves_of(ask.ring, ask.epoch)
        if looked_for != self._looked_for:
            found = await self._host.on_moves(
                ask.ring, ask.epoch, lambda moves: moves.look(*wanted, state)
            )
            self._looked_for, self._found = looked_for, found
        if self._expiry is not None:
            self._expiry.cancel()
        self._expiry = asyncio.get_running_loop().call_later(FOUND_S, self._forget)
        return _layer_of(self._found, ask.layer)

    def _forget(self) -> None:
        """Let go of memory that slots may have left meanwhile."""
        self._looked_for, self._found, self._expiry = (), {}, None


class _Source:
    """A node that has layers, and the link to it: one sequence after the other goes over it."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.client: KvClient | None = None


class KvOrders:
    """Moves keys and values to `host`. `dial` opens bulk links."""

    def __init__(self, host: StageHost, dial: Callable[[str], Awaitable[Link]]) -> None:
        self._host = host
        self._dial = dial
        self._sources: dict[str, _Source] = {}
        self._expiry: asyncio.TimerHandle | None = None
        self._forgetting: asyncio.Task[None] | None = None

    async def move(self, message: stages.MoveKv) -> stages.KvMoved:
        """Bring what a sequence holds elsewhere to the stage that is ready for another ring.

        Raises UsageError if this node has no such stage, or if what comes does not fit it,
        CapacityError without room, LinkError and RemoteProtocolError of a source.
        """
        host, to, sequence_id = self._host, message.to, SequenceId(message.sequence_id)
        n_positions = len(message.token_ids) // 4
        if not n_positions:
            await host.on_arrivals(to, lambda moves: moves.forget(sequence_id))
            return stages.KvMoved(request=message.request, is_whole=False, n_bytes=0)
        token_ids = struct.unpack(f"<{n_positions}I", message.token_ids[: 4 * n_positions])
        member = host.membership
        is_member = member is not None and (member.ring, member.epoch) == (
            message.ring,
            message.epoch,
        )
        own = member.own_address if member is not None and is_member else ""
        self._expire_later()
        await host.on_arrivals(to, lambda moves: moves.begin(sequence_id, token_ids))
        n_bytes = 0
        for source in message.sources:
            start, end = source.layers
            layers = [layer for layer in host.prepared_layers(to) if start <= layer < end]
            if not layers:
                continue
            if source.address != own:
                n_bytes += await self._pull(message, source.address, layers, n_positions)
            elif message.is_last:
                await self._take_own(message, layers, n_positions)
        is_whole = await host.on_arrivals(
            to, lambda moves: moves.is_whole(sequence_id, n_positions)
        )
        return stages.KvMoved(request=message.request, is_whole=is_whole, n_bytes=n_bytes)

    async def _take_own(self, message: stages.MoveKv, layers: list[int], n_positions: int) -> None:
        """Take layers from this node's own stage. Raises as `move`."""
        sequence_id, slot = SequenceId(message.sequence_id), SlotId(message.slot)
        state = None if message.state is None else StateId(message.state)
        held = await self._host.on_moves(
            message.ring,
            message.epoch,
            lambda moves: moves.look(sequence_id, slot, n_positions, state),
        )
        own = [(layer, _layer_of(held, layer)) for layer in layers]

        def take(moves: Moves) -> None:
            for layer, found in own:
                moves.part_of(layer).take_own(sequence_id, layer, found)

        is_free = all(found.is_free for _, found in own)
        await self._host.on_arrivals(message.to, take, is_free=is_free)

    async def _pull(
        self, message: stages.MoveKv, address: str, layers: list[int], n_positions: int
    ) -> int:
        """Fetch layers from one node; return how many bytes came. Raises as `move`."""
        source = self._sources.setdefault(address, _Source())
        async with source.lock:
            if source.client is None or source.client.link.closed:
                source.client = KvClient(await self._dial(address), answer_s=ANSWER_S)
            try:
                return await self._fetch(source.client, message, layers, n_positions)
            except BaseException as error:  # answers to come would be taken for those of others
                source.client.link.abort("what was asked for is not wanted any more")
                if isinstance(error, SourceRefused):
                    raise UsageError(f"a layer was not given away: {error}") from None
                raise

    async def _fetch(
        self, client: KvClient, message: stages.MoveKv, layers: list[int], n_positions: int
    ) -> int:
        """Ask for layers, and take what comes, block by block.

        While the ring goes on the link is left to others half of the time.
        """
        sequence_id = SequenceId(message.sequence_id)

        def wanted(moves: Moves) -> list[tuple[int, int, str]]:
            parts = [(layer, moves.part_of(layer)) for layer in layers]
            return [
                (layer, part.next_wanted(sequence_id, layer), part.form(layer))
                for layer, part in parts
            ]

        asks = [
            FetchKv(
                request=0,
                ring=message.ring,
                epoch=message.epoch,
                sequence_id=message.sequence_id,
                slot=message.slot,
                layer=layer,
                begin=begin,
                end=n_positions,
                form=form,
                state=message.state,
            )
            for layer, begin, form in await self._host.on_arrivals(message.to, wanted)
        ]
        asked = [client.ask(ask) for ask in asks] if message.is_last else []
        n_bytes, loop = 0, asyncio.get_running_loop()
        for number, ask in enumerate(asks):
            request = asked[number] if asked else client.ask(ask)
            rows = await client.rows(request)
            began_s = loop.time()
            await self._take(client, message, rows, ask.layer, n_positions)
            n_bytes += rows.n_bytes
            if not message.is_last:
                await asyncio.sleep(loop.time() - began_s)
        return n_bytes

    async def _take(
        self, client: KvClient, message: stages.MoveKv, rows: KvRows, layer: int, end: int
    ) -> None:
        """Take one layer; nothing counts unless its digest is right."""
        sequence_id, to = SequenceId(message.sequence_id), message.to

        def expect(moves: Moves) -> None:
            held = HeldRows(first=rows.first, n_bytes=rows.n_bytes, is_state=rows.is_state)
            moves.part_of(layer).expect(sequence_id, layer, held, end)

        await self._host.on_arrivals(to, expect)
        parts = [(rows.first, end)] if rows.is_state else [*block_spans(rows.first, end)]
        row_bytes = rows.n_bytes // max(1, end - rows.first)
        buffer = bytearray()
        async for piece in client.payload(rows):
            buffer += piece
            while parts and len(buffer) >= (
                size := rows.n_bytes if rows.is_state else row_bytes * (parts[0][1] - parts[0][0])
            ):
                part, data = parts.pop(0), buffer[:size]
                del buffer[:size]

                def write(
                    moves: Moves, part: tuple[int, int] = part, data: bytearray = data
                ) -> None:
                    moves.part_of(layer).write(sequence_id, layer, *part, data)

                await self._host.on_arrivals(to, write)
                self._expire_later()
        await self._host.on_arrivals(
            to, lambda moves: moves.part_of(layer).came(sequence_id, layer, end)
        )

    def _expire_later(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        self._expiry = asyncio.get_running_loop().call_later(KEPT_S, self._expire)

    def _expire(self) -> None:
        self._expiry = None
        self._forgetting = asyncio.ensure_future(self._forget())
        self._forgetting.add_done_callback(unheard)

    async def _forget(self) -> None:
        """Close the links, and drop what came and was not opened, unless its stage loads now."""
        if self._host.is_preparing:
            self._expire_later()
            return
        sources, self._sources = [*self._sources.values()], {}
        for source in sources:
            if source.client is not None:
                await source.client.link.close()
        await self._host.forget_arrivals()

    async def close(self) -> None:
        """Close the links."""
        if self._expiry is not None:
            self._expiry.cancel()
        if self._forgetting is not None:
            self._forgetting.cancel()  # the compute thread may hang
            await asyncio.wait([self._forgetting])
        for source in self._sources.values():
            if source.client is not None:
                await source.client.link.close()


def _layer_of(found: Mapping[int, HeldLayer], layer: int) -> HeldLayer:
    """Return what was found of a layer. Raises UsageError for one that is not here."""
    if layer not in found:
        raise UsageError(f"layer {layer} was asked for, and is not here")
    return found[layer]


async def find_prefix(host: StageHost, message: stages.FindPrefix) -> stages.PrefixFound:
    """Say which blocks are on disk here. Raises what StageHost.on_prefixes raises."""

    def find(prefixes: StagePrefixes) -> stages.PrefixFound:
        return stages.PrefixFound(
            request=message.request,
            restorable=prefixes.restorable(message.keys),
            block_bytes=prefixes.block_bytes,
            bytes_per_s=prefixes.files.store.bytes_per_s,
        )

    return await host.on_prefixes(message.ring, message.epoch, find, is_long=False)


async def restore_prefix(host: StageHost, message: stages.RestorePrefix) -> stages.PrefixRestored:
    """Read blocks for a sequence. Raises what StageHost.on_prefixes raises."""
    token_ids = struct.unpack(f"<{len(message.token_ids) // 4}I", _whole(message.token_ids))

    def restore(prefixes: StagePrefixes) -> bool:
        return prefixes.restore(SequenceId(message.sequence_id), message.keys, token_ids)

    is_whole = await host.on_prefixes(message.ring, message.epoch, restore, is_long=True)
    return stages.PrefixRestored(request=message.request, is_whole=is_whole)


def _whole(token_ids: bytes) -> bytes:
    """Drop the bytes of an id that is cut off: the prefix is refused for its length then."""
    return token_ids[: len(token_ids) // 4 * 4]


WEIGHTS_S = 0.02
"""How long memory is looked at where no rows are computed, which else say how long."""


MAX_BYTES: Final = 1 << 30
"""The largest layer that is read: the memory is needed for a moment beside all else."""


async def audit_stage(host: StageHost, message: stages.AuditStage) -> stages.StageAudited:
    """Look at memory and compute rows, between steps.

    Raises WrongValuesError for what is wrong, UsageError where nothing can be said.
    """
    part = host.part_with(message.ring, message.epoch, message.layer)
    audit, place = part.audit, part.order.device.place
    if audit is None or not (audit.promises_bits or audit.weight_bytes):
        raise UsageError("the stage of this node cannot be audited")

    def compute() -> tuple[float, bytes, bytes]:
        began_s = time.perf_counter()
        before, after = audit.compute(message.layer)
        return time.perf_counter() - began_s, before, after

    def look() -> tuple[float, int]:
        began_s = time.perf_counter()
        n_bytes = audit.look_at_memory()
        return time.perf_counter() - began_s, n_bytes

    rows_s, before, after = WEIGHTS_S, b"", b""
    with_rows = message.with_rows and audit.promises_bits
    if with_rows:
        rows_s, before, after = await host.between_steps(compute, place)
    looked_s, looked_bytes = 0.0, 0
    while looked_s < rows_s and looked_bytes < audit.weight_bytes:
        took_s, n_bytes = await host.between_steps(look, place)
        if not n_bytes:
            break
        looked_s, looked_bytes = looked_s + took_s, looked_bytes + n_bytes
    return stages.StageAudited(
        request=message.request,
        took_s=looked_s + (rows_s if with_rows else 0.0),
        looked_bytes=looked_bytes,
        weight_bytes=audit.weight_bytes,
        before=before,
        after=after,
    )


async def compute_for_audit(host: StageHost, message: stages.ComputeLayer) -> stages.LayerComputed:
    """Compute rows with a layer from this node's checkpoint. Raises as compute_layer."""
    order = host.member_order(message.ring, message.epoch)

    def compute() -> tuple[float, bytes]:
        began_s = time.thread_time()
        after = compute_layer(order, message.layer, message.before)
        trim_heap()  # of the layer
        return time.thread_time() - began_s, after

    took_s, after = await host.beside_steps(compute, "audits")
    return stages.LayerComputed(request=message.request, took_s=took_s, after=after)


async def count_experts(host: StageHost, message: stages.CountExperts) -> stages.ExpertsCounted:
    """Count the experts of streamed layers that steps used. Raises as `member_order`."""
    host.member_order(message.ring, message.epoch)
    assert host.loaded is not None, "member_order says so"
    pools = [part.experts for part in host.loaded.parts or (host.loaded,)]
    return stages.ExpertsCounted(
        request=message.request,
        n_used=sum(pool.n_used for pool in pools if pool is not None),
        n_read=sum(pool.n_read for pool in pools if pool is not None),
    )


async def read_ahead(host: StageHost, system_bytes: SystemBytes, message: stages.ReadAhead) -> Done:
    """Read what a prompt looks up, into a share of what is available. Raises as `member_order`."""
    host.member_order(message.ring, message.epoch)
    assert host.loaded is not None, "member_order says so"
    tables = [table for part in host.loaded.parts or (host.loaded,) for table in part.tables]
    most_bytes = int(AHEAD_SHARE * system_bytes()[0]) // max(1, len(tables))
    turns = zip(*(table.asking(message.token_ids, most_bytes) for table in tables), strict=False)
    while await host.beside_steps(lambda: next(turns, None), "tables"):
        pass
    return Done(request=message.request)


Order = (
    stages.FindPrefix
    | stages.RestorePrefix
    | stages.ReadAhead
    | stages.MoveKv
    | stages.AuditStage
    | stages.ComputeLayer
    | stages.CountExperts
)
"""What a stage is asked for beside its life in a ring."""
SOON: Final = (stages.FindPrefix, stages.AuditStage, stages.CountExperts)
"""The orders of which no progress is reported."""


class StageAnswers:
    """What this node's stage answers to the orders of heads, of this node's own too."""

    def __init__(self, host: StageHost, kv: KvOrders, system_bytes: SystemBytes) -> None:
        self._answers: dict[type[Order], Callable[[Any], Coroutine[Any, Any, Any]]] = {
            stages.FindPrefix: partial(find_prefix, host),
            stages.RestorePrefix: partial(restore_prefix, host),
            stages.ReadAhead: partial(read_ahead, host, system_bytes),
            stages.MoveKv: kv.move,
            stages.AuditStage: partial(audit_stage, host),
            stages.ComputeLayer: partial(compute_for_audit, host),
            stages.CountExperts: partial(count_experts, host),
        }

    def register(self, handlers: MessageHandlers) -> None:
        """Register all orders of other nodes."""
        for kind in self._answers:
            handlers.register(kind, self._answer_for)

    async def answer(self, message: Order) -> object:
        """Carry an order out; return its answer. Raises what the stage raises."""
        return await self._answers[type(message)](message)

    async def _answer_for(self, control: ControlLink, message: Order) -> None:
        work = self._answers[type(message)](message)
        if isinstance(message, SOON):
            control.send(await work)
        else:
            await control.answer_with(message.request, work)


def compute_layer(order: StageOrder, layer: int, before: bytes) -> bytes:
    """Compute rows with a layer as stages of `order` would, by one thread; return them after it.

    `before` and what is returned are as in StageAudit.compute. Raises CheckpointError where this
    node lacks the layer, UsageError if the model does, CapacityError for one that is larger than
    MAX_BYTES, RemoteProtocolError for what are no rows of the model.
    """
    import torch

    from shardnet.stage.load import choose_kernels, load_stage
    from shardnet.stage.stage_audit import rows_after

    form = order.form
    checkpoint = order.opened()
    check_model_id(order.folder, checkpoint.model_id, form.model_id)
    config, device, layers = checkpoint.config, torch.device("cpu"), LayerRange(layer, layer + 1)
    check_layers(config, layers)
    choice = choose_kernels(checkpoint, form, order.arith, device)
    n_bytes = stage_weight_bytes(config, layers, weight_form(checkpoint, choice))
    if n_bytes > MAX_BYTES:
        raise CapacityError(f"layer {layer} takes {n_bytes} bytes, more than is read for an audit")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = load_stage(
            checkpoint,
            layers,
            choice=choice,
            device=device,
            room_blocks=1,
            context=form.context,
            progress=lambda done, total: None,
        )
        return rows_after(model, before, form.dtype)
    finally:
        torch.set_num_threads(threads)
