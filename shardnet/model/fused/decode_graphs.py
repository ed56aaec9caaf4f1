"""Decode steps by replay: what stands between two attentions is captured once, then replayed.

Knows where a layer can be cut, and which tensors stay where they are. Must not know parameter
names, slots, wire or scheduling. Why it is done so: docs/adr/0026-piecewise-graphs.md.

A step launches some twenty operators a layer, and a fast device waits for their launches. A graph
launches them all at once, but it is a list of operators with the addresses that they work on, so
what it reads and writes must always lie at the same place. Slots do not: they grow and move, and
how far a row looks differs from step to step. Attention therefore stays as it is, and a graph is
what stands between two of them:

    [output product, residual, MLP half of one layer] + [norm, product, rotation of the next]

Axes in shape comments: B rows of a bucket, E hidden size, H query heads, D head size, R rotated
columns.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

from shardnet.model.config.limits import GRAPH_BUCKETS
from shardnet.model.layers.attention import Step
from shardnet.model.layers.decoder_layer import AttentionHalf, Layer, MlpHalf, Residual
from shardnet.model.layers.modules import GatedMlp, Heads, SelfAttention
from shardnet.model.layers.rotary import Rotary

log = logging.getLogger(__name__)

GRAPHS_VARIABLE: Final = "SHARDNET_GRAPHS"
"""Has a GPU run decode steps operator by operator, for tests and comparisons: off."""

_MAX_ROWS: Final = GRAPH_BUCKETS[-1]
_WARM_UPS: Final = 2
"""Runs before a capture: libraries take memory and choose their kernels in the first ones."""

Replay = Callable[[], None]
"""Does again what was captured, to the same tensors."""


class Capture(Protocol):
    """How a device captures: CUDA graphs, or in tests on the CPU a list of operators."""

    def __call__(self, run: Callable[[], None]) -> Replay:
        """Capture what `run` does to tensors, which from then on stay where they are.

        It may be run several times on the way. Raises RuntimeError where the device cannot.
        """


class CudaCapture:
    """Captures CUDA graphs. All share one pool of memory, so that it grows to the largest's.

    That is safe because nothing in the pool outlives its graph: what one graph leaves to another,
    or to attention, lies in tensors from outside.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], None]) -> Replay:
        """Capture what `run` launches; it is run on a stream of its own. Raises RuntimeError.

        Other threads may go on using the device meanwhile.
        """
        current = torch.cuda.current_stream(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(current):  # which it is again, wherever this fails
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                for _ in range(_WARM_UPS):
                    run()
            current.wait_stream(self._stream)
            with torch.cuda.graph(
                graph,
                pool=self._pool,
                stream=self._stream,
                capture_error_mode="thread_local",
            ):
                run()
        return graph.replay


def find_capture(device: torch.device, environment: Mapping[str, str]) -> Capture | None:
    """Return how `device` captures, None where it does not or GRAPHS_VARIABLE says off."""
    if device.type != "cuda" or environment.get(GRAPHS_VARIABLE, "").lower() == "off":
        return None
    return CudaCapture(device)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitLayer:
    """A layer that can be captured, cut where attention is."""

    attention: Residual
    self_attn: SelfAttention
    around_mlp: Residual
    mlp: GatedMlp

    @classmethod
    def of(cls, layer: Layer) -> SplitLayer | None:
        """Cut a layer; None where it cannot be captured.

        It can when all but its attention does the same to every row and takes nothing back from
        the device: not with experts, whose products have as many rows as chose them, nor with
        attention that has products inside (DeepSeek's). And its weights must stay where they are,
        which those of streamed layers do not.
        """
        first, second = layer.attention, layer.mlp
        if not isinstance(first, AttentionHalf) or not isinstance(second, MlpHalf):
            return None
        attn, mlp = first.self_attn, second.mlp
        if not isinstance(attn, SelfAttention):
            return None
        products = (attn.qkv_proj, attn.o_proj, mlp.gate_up_proj, mlp.down_proj)
        if not all(product.weights_stay for product in products):
            return None
        return cls(attention=first.residual, self_attn=attn, around_mlp=second.residual, mlp=mlp)

    def before(self, hidden: Tensor, rotary: Rotary) -> Heads:
        """Do what comes before attention, with the layer's rows [B, E]."""
        return self.self_attn.heads(self.attention.enter(hidden), rotary)

    def after(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Do what comes after it, with the layer's rows [B, E] and [B, H x D]: [B, E]."""
        hidden = self.attention.add(hidden, self.self_attn.o_proj(attended))
        return self.around_mlp.add(hidden, self.mlp(self.around_mlp.enter(hidden)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Buffers:
    """What graphs read and write: the same memory for all layers and buckets, B rows of it."""

    hidden: Tensor  # [B, E], between layers
    attended: Tensor  # [B, H x D], from attention
    heads: Heads  # to attention
    rotaries: Sequence[Rotary]  # [B, 1, R], by the rope's number

    @classmethod
    def of(cls, layer: SplitLayer, tables: Sequence[Rotary]) -> _Buffers:
        """Make them for so many rows as the largest bucket has, and for such layers."""
        attn = layer.self_attn
        like = tables[0].cos
        n_hidden, n_attended = attn.o_proj.shape

        def zeros(*shape: int) -> Tensor:
            return like.new_zeros(_MAX_ROWS, *shape)

        return cls(
            hidden=zeros(n_hidden),
            attended=zeros(n_attended),
            heads=Heads(
                queries=zeros(attn.n_heads, attn.head_size),
                keys=zeros(attn.n_kv_heads, attn.head_size),
                values=zeros(attn.n_kv_heads, attn.head_size),
            ),
            rotaries=[
                Rotary(cos=zeros(*table.cos.shape[1:]), sin=zeros(*table.sin.shape[1:]))
                for table in tables
            ],
        )

    def first(self, n_rows: int) -> _Buffers:
        """Return the first rows of them all, which share their memory."""
        heads = self.heads
        return _Buffers(
            hidden=self.hidden[:n_rows],
            attended=self.attended[:n_rows],
            heads=Heads(
                queries=heads.queries[:n_rows],
                keys=heads.keys[:n_rows],
                values=heads.values[:n_rows],
            ),
            rotaries=[
                Rotary(cos=rotary.cos[:n_rows], sin=rotary.sin[:n_rows]) for rotary in self.rotaries
            ],
        )

    def take_heads(self, heads: Heads) -> None:
        """Copy to where attention looks for them."""
        self.heads.queries.copy_(heads.queries)
        self.heads.keys.copy_(heads.keys)
        self.heads.values.copy_(heads.values)

    def begin(self, rotaries: Sequence[Rotary], n_rows: int) -> None:
        """Take the rows of a step's tables; where later rows of the bucket are, put zeros."""
        for mine, new in zip(self.rotaries, rotaries, strict=True):
            _fill(mine.cos, new.cos)
            _fill(mine.sin, new.sin)
        self.attended[n_rows:].zero_()


def _fill(buffer: Tensor, rows: Tensor) -> None:
    """Copy [T, ...] to the beginning of [B, ...], zeros behind."""
    buffer[: rows.shape[0]].copy_(rows)
    buffer[rows.shape[0] :].zero_()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bucket:
    """What was captured for so many rows: a piece before each layer and one behind the last.

    A piece is None where neither of the layers beside it can be captured.
    """

    rows: _Buffers
    pieces: Sequence[Replay | None]

    def replay(self, place: int) -> None:
        """Run the piece before the layer `place`."""
        piece = self.pieces[place]
        assert piece is not None, "a layer beside it is captured"
        piece()


class DecodeGraphs:
    """Runs steps of at most 32 rows through a stage's layers. Not thread-safe.

    Such a step has no prompt chunk, which is longer. Its rows are filled up with rows of zeros to
    1, 2, 4, 8, 16 or 32; each row is computed by itself, so those change nothing.

    A bucket is captured when it is first needed: then nobody waits, while a model is loaded, for
    buckets that are never used; and it is the thread that computes that captures, whose handles
    and workspaces the libraries then use.
    """

    def __init__(
        self,
        layers: Sequence[tuple[Layer, int]],
        tables: Sequence[Rotary],
        capture: Capture,
    ) -> None:
        """Take a stage's layers, each with the number of its rope's table in `tables`."""
        self._layers = layers
        self._split = [SplitLayer.of(layer) for layer, _ in layers]
        self._capture: Capture | None = capture
        self._buffers: _Buffers | None = None
        first = next((split for split in self._split if split is not None), None)
        if first is not None:
            self._buffers = _Buffers.of(first, tables)
        self._buckets: dict[int, _Bucket] = {}
        self._is_walking = False

    def begin(
        self, hidden: Tensor, rotaries: Sequence[Rotary], step: Step
    ) -> Iterator[Tensor] | None:
        """Begin a walk of [T, E] through the layers; None where it has to go without graphs.

        That is where there are too many rows, where another walk has not ended, and where nothing
        can be captured. What the walk gives after a layer lasts until it is asked for the next.
        """
        if self._is_walking or hidden.shape[0] > _MAX_ROWS:
            return None
        bucket = self._bucket(hidden.shape[0])
        return None if bucket is None else self._walk(hidden, rotaries, step, bucket)

    def _walk(
        self, hidden: Tensor, rotaries: Sequence[Rotary], step: Step, bucket: _Bucket
    ) -> Iterator[Tensor]:
        n_rows, last = hidden.shape[0], len(self._layers) - 1
        own = bucket.rows.first(n_rows)
        bucket.rows.begin(rotaries, n_rows)
        is_inside = False  # whether the rows lie in the buffer, and the layer's heads are made
        self._is_walking = True
        try:
            for index, (layer, rope) in enumerate(self._layers):
                split = self._split[index]
                if split is None:
                    hidden = layer(hidden, index, rotaries[rope], step)
                    is_inside = False
                else:
                    if not is_inside:
                        _fill(bucket.rows.hidden, hidden)
                        bucket.replay(index)
                    own.attended.copy_(split.self_attn.attend(own.heads, index, step))
                    bucket.replay(index + 1)
                    hidden, is_inside = own.hidden, True
                if index < last:
                    yield hidden
        finally:
            self._is_walking = False
        yield hidden.clone() if is_inside else hidden

    def _bucket(self, n_rows: int) -> _Bucket | None:
        """Return what is captured for `n_rows` rows, now if need be; None where nothing can be."""
        size = next(size for size in GRAPH_BUCKETS if n_rows <= size)
        if size not in self._buckets and self._capture is not None and self._buffers is not None:
            rows = self._buffers.first(size)
            try:
                pieces = [self._piece(place, rows) for place in range(len(self._layers) + 1)]
            except RuntimeError as error:  # torch has no narrower one for what cannot be captured
                self._capture = None
                log.warning(
                    "decode steps of %d rows run operator by operator, they cannot be captured: %s",
                    size,
                    " ".join(str(error).split()),
                )
            else:
                self._buckets[size] = _Bucket(rows=rows, pieces=pieces)
        return self._buckets.get(size)

    def _piece(self, place: int, rows: _Buffers) -> Replay | None:
        """Capture what stands between the attentions of the layers before and after `place`."""
        before = self._split[place - 1] if place > 0 else None
        after = self._split[place] if place < len(self._split) else None
        if self._capture is None or (before is None and after is None):
            return None
        rotary = rows.rotaries[self._layers[place][1]] if after is not None else None

        def run() -> None:
            hidden = rows.hidden
            if before is not None:
                hidden = before.after(hidden, rows.attended)
                rows.hidden.copy_(hidden)
            if after is not None and rotary is not None:
                rows.take_heads(after.before(hidden, rotary))

        return self._capture(run)
