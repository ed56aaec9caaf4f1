"""A stage that spans several nodes: its shards gather over links, and follow shard 0.

Knows how parts become bytes and a whole again, and which calls the other shards must make too; and
how to compute so on one node, to measure what a narrower dtype costs. Must not know frames nor
links.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Final, Protocol

import torch
from torch import Tensor

from shardnet.errors import LostShardError, ShardnetError, internal_error, without_frames
from shardnet.model.kernels.codec import pack_rows, to_bytes, unpack_rows, wire_of
from shardnet.model.shards.cut import shares
from shardnet.model.shards.group import GatherStruct, PythonGather
from shardnet.model.vision.picture import PictureEncoder
from shardnet.runtime.stage.compute import Activations, AheadCompute, Samples, StageCompute
from shardnet.runtime.stage.picture_store import PictureStore
from shardnet.slot_operations import SlotOperation
from shardnet.types import MicroBatch, StepId, WireDType
from shardnet.wire.framing.frames import Buffer
from shardnet.wire.payloads.rows import RowBlock


class PartExchange(Protocol):
    """What brings parts to and from the other shards of a stage; for its compute thread.

    Everything raises LostShardError once one of them is lost.
    """

    def operate(self, operation: SlotOperation) -> None:
        """Have the other shards do what is done to a slot here."""

    def step(
        self, batch: MicroBatch, activations: Activations | None, deep: Sequence[RowBlock] = ()
    ) -> None:
        """Have the other shards compute a step, whose pictures have `deep` where it is embedded."""

    def begin(self, step: StepId) -> None:
        """Begin to count the gathers of a step."""

    def send_part(
        self,
        dtype: WireDType,
        n_rows: int,
        widths: Sequence[int],
        payload: Buffer,
        received: Mapping[int, memoryview],
    ) -> None:
        """Begin a gather: send this shard's part to all others; theirs go where `received` says.

        No buffer changes before `await_parts` has returned for this gather.
        """

    def await_parts(self, n_left: int) -> None:
        """Wait until the parts of all gathers but the last `n_left` have come, and this one's gone.

        Raises what a shard says the step has failed with.
        """

    def fail_step(self, error: ShardnetError) -> None:
        """Tell the other shards that the step that began last has failed here."""


class LinkGroup:
    """Shard `index` of the `size` nodes of a stage. It implements ShardGroup, on any device.

    Parts travel in `wire`, None for their own dtype, which changes no bit. In a narrower one all
    shards go on with the rounded parts, their own included: they never differ.
    """

    def __init__(self, index: int, size: int, wire: WireDType | None = None) -> None:
        self.index = index
        self.size = size
        self._wire = wire
        self._exchange: PartExchange | None = None
        self._native = PythonGather(self)
        self._open: deque[_Gather] = deque()
        self._buffers = _Buffers()

    @property
    def error(self) -> ShardnetError | None:
        """What the step that began last has failed with, here or on another shard."""
        return self._native.error

    @property
    def struct(self) -> GatherStruct:
        """See ShardGroup."""
        return self._native.struct

    def connect(self, exchange: PartExchange | None) -> None:
        """Gather by `exchange` from now on; None when the ring has ended."""
        self._exchange = exchange
        self.begin()

    def begin(self) -> None:
        """Forget what the step before has failed with."""
        self._native.error = None
        self._open.clear()

    def gather(self, part: Tensor, ends: Sequence[int]) -> Tensor:
        """See ShardGroup: after a failure there are zeros where columns of others belong.

        The library gathers no more in that step either: the others would take it for this gather.
        """
        whole = part.new_zeros(part.shape[0], ends[-1])
        if self.error is None and part.shape[0]:
            try:
                self.joining(part.contiguous(), whole, ends)()
                self.end_joins(0)
            except ShardnetError as error:
                self._native.error = without_frames(error)
        return whole

    def check(self) -> None:
        """Raise what the step has failed with here or on another shard."""
        self._native.raise_error()

    def joining(self, part: Tensor, whole: Tensor, ends: Sequence[int]) -> Callable[[], None]:
        """See PythonGroup."""
        gather = _Gather(part, whole, ends, self.index, self._wire)

        def begin() -> None:
            if self._exchange is None:
                raise _not_connected()
            payload = gather.begin(self._buffers)
            self._exchange.send_part(
                gather.wire, gather.n_rows, gather.widths, payload, gather.received
            )
            self._open.append(gather)

        return begin

    def end_joins(self, n_left: int) -> None:
        """See PythonGroup."""
        if self._exchange is None:
            raise _not_connected()
        self._exchange.await_parts(n_left)
        while len(self._open) > n_left:
            self._open.popleft().end(self._buffers)


class _Buffers:
    """Memory into which parts are received that do not go straight to their place."""

    def __init__(self) -> None:
        self._free: dict[int, list[memoryview]] = {}
        self._n_bytes = 0

    def take(self, n_bytes: int) -> memoryview:
        """Return memory of that size, which nobody has."""
        free = self._free.get(n_bytes)
        if not free:
            return memoryview(bytearray(n_bytes))
        self._n_bytes -= n_bytes
        return free.pop()

    def give(self, buffer: memoryview) -> None:
        """Keep memory for later; of too much, nothing."""
        if self._n_bytes + len(buffer) > _MOST_FREE_BYTES:
            self._free.clear()
            self._n_bytes = 0
        self._free.setdefault(len(buffer), []).append(buffer)
        self._n_bytes += len(buffer)


_MOST_FREE_BYTES: Final = 1 << 25
"""Of buffers that wait for the next gather."""


class _Gather:
    """One gather at some place in memory: of `part` [T, own columns] to `whole` [T, all columns].

    Parts travel in `wire`, None for their own dtype: a single row then goes straight from memory
    and into it.
    """

    def __init__(
        self,
        part: Tensor,
        whole: Tensor,
        ends: Sequence[int],
        index: int,
        wire: WireDType | None,
    ) -> None:
        self.n_rows = part.shape[0]
        self.widths = [end - begin for begin, end in pairwise(ends)]
        self.wire = wire or wire_of(part.dtype)
        self._part = part
        self._index = index
        self._columns = [whole[:, begin:end] for begin, end in pairwise(ends)]
        self._is_rounded = wire is not None
        self._is_direct = wire is None and self.n_rows == 1 and part.device.type == "cpu"
        self._others = [shard for shard in range(len(self.widths)) if shard != index]
        self.received: dict[int, memoryview] = {}
        """Where the parts of the others belong."""
        if self._is_direct:
            self._payload, self._own = to_bytes(part), to_bytes(self._columns[index])
            self.received = {shard: to_bytes(self._columns[shard]) for shard in self._others}

    def begin(self, buffers: _Buffers) -> Buffer:
        """Return this shard's part as it travels, and make room for the others'."""
        if not self._is_direct:
            self._payload = pack_rows(self._part, self.wire)
            for shard in self._others:
                n_bytes = self.n_rows * self.wire.row_bytes(self.widths[shard])
                self.received[shard] = buffers.take(n_bytes)
        return self._payload

    def end(self, buffers: _Buffers) -> None:
        """Put all parts in their place, which have come."""
        if self._is_direct:
            self._own[:] = self._payload
            return
        for shard, payload in self.received.items():
            self._put(shard, payload)
            buffers.give(payload)
        if self._is_rounded:
            self._put(self._index, self._payload)
        else:
            self._columns[self._index].copy_(self._part)
        self.received = {}
        self._payload = memoryview(b"")

    def _put(self, shard: int, payload: Buffer) -> None:
        columns = self._columns[shard]
        columns.copy_(
            unpack_rows(payload, self.wire, self.n_rows, self.widths[shard], columns.device)
        )


def _not_connected() -> LostShardError:
    return LostShardError("the nodes of this stage are not connected", remedy="ask again")


class EmbeddingCompute(StageCompute, Protocol):
    """The compute of a shard that embeds token ids, and rows of pictures in their place."""

    pictures: PictureStore | None
    """Where shard 0 finds the rows of pictures."""
    given: Sequence[RowBlock] | None
    """What shard 0 says of pictures in the next step."""

    @property
    def encoder(self) -> PictureEncoder | None:
        """The tower of shard 0, None without one."""

    def shared(self, batch: MicroBatch) -> Sequence[RowBlock]:
        """Return what the other shards need to know of a step's pictures."""


class SpanningCompute:
    """The compute of one shard of a stage; shard 0 has the others do what it does.

    A stage that embeds (`first` is its compute) takes no activations, whatever travels in their
    place.
    """

    def __init__(
        self, own: StageCompute, group: LinkGroup, *, first: EmbeddingCompute | None = None
    ) -> None:
        self._own = own
        self._first = first
        self._group = group
        self._exchange: PartExchange | None = None

    def connect(self, exchange: PartExchange | None) -> None:
        """Work with the shards that `exchange` reaches; None when the ring has ended."""
        self._exchange = exchange
        self._group.connect(exchange)

    @property
    def encoder(self) -> PictureEncoder | None:
        """The tower of a first stage, None without one."""
        return None if self._first is None else self._first.encoder

    @property
    def pictures(self) -> PictureStore | None:
        """Where a first stage finds the rows of pictures."""
        return None if self._first is None else self._first.pictures

    @pictures.setter
    def pictures(self, store: PictureStore | None) -> None:
        if self._first is not None:
            self._first.pictures = store

    @property
    def used_blocks(self) -> int:
        """KV blocks that slots hold now; see StageCompute."""
        return self._own.used_blocks

    @property
    def reads_ahead(self) -> bool:
        """See AheadCompute."""
        return isinstance(self._own, AheadCompute) and self._own.reads_ahead

    def read_ahead(self, batch: MicroBatch) -> None:
        """See AheadCompute: each shard reads its own files."""
        assert isinstance(self._own, AheadCompute)
        self._own.read_ahead(batch)

    def use_wire(self, sent: WireDType, received: WireDType) -> None:
        """See StageCompute."""
        self._own.use_wire(sent, received)

    def operate(self, operation: SlotOperation) -> None:
        """Open or close a sequence, or free a slot, on every shard; see StageCompute."""
        if self._group.index == 0:
            self._connected().operate(operation)
        self._own.operate(operation)

    def compute(self, batch: MicroBatch, activations: Activations | None) -> Activations | Samples:
        """Run the layers with the other shards; see StageCompute.

        A step that fails here fails on all shards, by the same name. Raises LostShardError when one
        is lost.
        """
        exchange, first = self._connected(), self._first
        if self._group.index == 0:
            deep = () if first is None else first.shared(batch)
            exchange.step(batch, activations, deep)
        elif first is not None:
            first.given = () if activations is None else activations.deep
        exchange.begin(batch.step)
        self._group.begin()
        try:
            result = self._own.compute(batch, None if first is not None else activations)
        except Exception as error:
            self._tell(exchange, self._group.error or error, batch.step)
            self._group.check()  # what was computed from zeros is not the cause
            raise
        self._tell(exchange, self._group.error, batch.step)
        self._group.check()
        return result

    def reset(self) -> None:
        """See StageCompute: every shard learns it from its own ring membership."""
        self._own.reset()

    def _tell(self, exchange: PartExchange, error: Exception | None, step: StepId) -> None:
        """Tell the other shards what a step has failed with, if anything: they wait for parts."""
        if error is None or isinstance(error, LostShardError):
            return
        if not isinstance(error, ShardnetError):
            error = internal_error(f"step {step} on shard {self._group.index}", error)
        exchange.fail_step(error)

    def _connected(self) -> PartExchange:
        if self._exchange is None:
            raise _not_connected()
        return self._exchange


class RoundedGroup:
    """The only shard of a stage, whose columns are rounded as parts of several nodes to `wire`.

    Each node has a part by its weight.
    It implements ShardGroup.
    """

    index = 0
    size = 1

    def __init__(self, wire: WireDType, weights: Sequence[int]) -> None:
        self._wire = wire
        self._weights = weights
        self._native = PythonGather(self)

    @property
    def struct(self) -> GatherStruct:
        """See ShardGroup."""
        return self._native.struct

    def gather(self, part: Tensor, ends: Sequence[int]) -> Tensor:
        """Return all columns, rounded part by part."""
        whole = torch.empty_like(part)
        self.joining(part, whole, ends)()
        return whole

    def joining(self, part: Tensor, whole: Tensor, ends: Sequence[int]) -> Callable[[], None]:
        """See PythonGroup."""
        n_rows, weights = part.shape[0], self._weights[: ends[-1]]

        def join() -> None:
            for begin, end in pairwise(shares(ends[-1], len(weights), weights)):
                if n_rows and begin < end:
                    payload = pack_rows(part[:, begin:end], self._wire)
                    whole[:, begin:end] = unpack_rows(
                        payload, self._wire, n_rows, end - begin, part.device
                    )

        return join

    def end_joins(self, n_left: int) -> None:
        """See PythonGroup: none is ever open."""

    def check(self) -> None:
        """Raise what could not be rounded: an activation that does not fit the wire."""
        self._native.raise_error()
