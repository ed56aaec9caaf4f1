"""Decode steps by CUDA graphs: the operators between two attentions are captured, then replayed.

Knows where a layer can be split, and which tensors keep their addresses. Must not know parameter
names, slots, wire or scheduling. Rationale: docs/adr/0026-piecewise-graphs.md.

A step launches some twenty operators a layer, and a fast device waits for their launches. A graph
launches them all at once, but it records the addresses of its operands, so what it reads and writes
must stay at the same addresses. Slots do not: they grow and move, and the number of keys differs
from step to step. Attention therefore runs outside of graphs, and a graph is what lies between two
attentions:

    [output linear, residual, MLP sub-layer of one layer] + [norm, linear, rotation of the next]

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
from shardnet.model.layers.attention import ForwardStep
from shardnet.model.layers.decoder_layer import (
    AttentionSublayer,
    Layer,
    MlpSublayer,
    Residual,
    StreamResidual,
)
from shardnet.model.layers.modules import GatedMlp, Heads, SelfAttention
from shardnet.model.layers.rotary import Rotary

log = logging.getLogger(__name__)

GRAPHS_VARIABLE: Final = "SHARDNET_GRAPHS"
"""Set to "off", a GPU runs decode steps operator by operator, for tests and comparisons."""

_MAX_ROWS: Final = GRAPH_BUCKETS[-1]
_WARM_UPS: Final = 2
"""Runs before a capture, in which libraries allocate memory and choose their kernels."""

Replay = Callable[[], None]
"""Replays the captured operators on the same tensors."""


class Capture(Protocol):
    """Captures operators: as CUDA graphs, or in tests on the CPU as a list."""

    def __call__(self, run: Callable[[], None]) -> Replay:
        """Capture the operators of `run`, whose tensors must keep their addresses from then on.

        `run` may be called several times. Raises RuntimeError if the device cannot capture it.
        """


class CudaCapture:
    """Captures CUDA graphs. All share one memory pool, which grows to the size of the largest.

    That is safe because nothing in the pool outlives a replay: outputs of a graph are tensors
    allocated outside of it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], None]) -> Replay:
        """Capture what `run` launches, on a separate stream. Raises RuntimeError on failure.

        Other threads may use the device meanwhile.
        """
        current = torch.cuda.current_stream(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(current):  # restores it, wherever this fails
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
    """Return the capture of `device`; None if it has none or GRAPHS_VARIABLE is "off"."""
    if device.type != "cuda" or environment.get(GRAPHS_VARIABLE, "").lower() == "off":
        return None
    return CudaCapture(device)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitLayer:
    """A layer that can be captured, split at attention."""

    attention: Residual
    self_attn: SelfAttention
    mlp_residual: Residual
    mlp: GatedMlp

    @classmethod
    def of(cls, layer: Layer) -> SplitLayer | None:
        """Split a layer; None if it cannot be captured.

        Everything outside of attention must be the same operators for every batch, without a
        transfer from the device: not so with experts, whose batches depend on the routing, nor with
        linears inside attention (DeepSeek's). Its weights must keep their addresses, which those of
        streamed layers do not.
        """
        first, second = layer.attention, layer.mlp
        if not isinstance(first, AttentionSublayer) or not isinstance(second, MlpSublayer):
            return None
        attn, mlp = first.self_attn, second.mlp
        if not isinstance(attn, SelfAttention) or not attn.is_fusible:
            return None
        if not isinstance(mlp, GatedMlp) or isinstance(first.residual, StreamResidual):
            return None
        linears = (attn.qkv_proj, attn.o_proj, mlp.gate_up_proj, mlp.down_proj)
        if not all(linear.weights_stay for linear in linears):
            return None
        return cls(attention=first.residual, self_attn=attn, mlp_residual=second.residual, mlp=mlp)

    def before(self, hidden: Tensor, rotary: Rotary) -> Heads:
        """Run the operators before attention on hidden states [B, E]."""
        return self.self_attn.heads(self.attention.normalize(hidden), rotary)

    def after(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Run the operators after attention on its input [B, E] and output [B, H x D]: [B, E]."""
        hidden = self.attention.add(hidden, self.self_attn.o_proj(attended))
        return self.mlp_residual.add(hidden, self.mlp(self.mlp_residual.normalize(hidden)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Buffers:
    """The tensors that graphs read and write: the same memory for all layers and buckets."""

    hidden: Tensor  # [B, E], between layers
    attended: Tensor  # [B, H x D], from attention
    heads: Heads  # to attention
    rotaries: Sequence[Rotary]  # [B, 1, R], by the rope's number

    @classmethod
    def of(cls, layer: SplitLayer, tables: Sequence[Rotary]) -> _Buffers:
        """Allocate them for the rows of the largest bucket, and for layers like `layer`."""
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
        """Return views of the first `n_rows` rows of all of them."""
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
        """Copy queries, keys and values to the buffers that attention reads."""
        self.heads.queries.copy_(heads.queries)
        self.heads.keys.copy_(heads.keys)
        self.heads.values.copy_(heads.values)

    def begin(self, rotaries: Sequence[Rotary], n_rows: int) -> None:
        """Copy the rows of a step's tables; pad the rest of the bucket with zeros."""
        for mine, new in zip(self.rotaries, rotaries, strict=True):
            _fill(mine.cos, new.cos)
            _fill(mine.sin, new.sin)
        self.attended[n_rows:].zero_()


def _fill(buffer: Tensor, rows: Tensor) -> None:
    """Copy [T, ...] to the start of [B, ...], and pad with zeros."""
    buffer[: rows.shape[0]].copy_(rows)
    buffer[rows.shape[0] :].zero_()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bucket:
    """The graphs for one number of rows: one before each layer and one after the last.

    A graph is None if neither of its two layers can be captured.
    """

    rows: _Buffers
    pieces: Sequence[Replay | None]

    def replay(self, place: int) -> None:
        """Replay the graph before the layer `place`."""
        piece = self.pieces[place]
        assert piece is not None, "one of its two layers is captured"
        piece()


class DecodeGraphs:
    """Runs steps of at most 32 rows through a stage's layers. Not thread-safe.

    Such a step has no prompt chunk, which is longer. Its rows are padded with zeros to 1, 2, 4, 8,
    16 or 32; rows are independent of each other, so padding does not change results.

    A bucket is captured when it is first needed: loading does not wait for buckets that are never
    used, and the compute thread captures, with its own library handles and workspaces.
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
        self, hidden: Tensor, rotaries: Sequence[Rotary], step: ForwardStep
    ) -> Iterator[Tensor] | None:
        """Begin a walk of hidden states [T, E] through the layers; None if graphs cannot do it.

        That is the case with too many rows, during another walk, and if no layer can be captured.
        What the walk yields after a layer is valid until the next one is requested.
        """
        if self._is_walking or hidden.shape[0] > _MAX_ROWS:
            return None
        bucket = self._bucket(hidden.shape[0])
        return None if bucket is None else self._walk(hidden, rotaries, step, bucket)

    def _walk(
        self, hidden: Tensor, rotaries: Sequence[Rotary], step: ForwardStep, bucket: _Bucket
    ) -> Iterator[Tensor]:
        n_rows, last = hidden.shape[0], len(self._layers) - 1
        own = bucket.rows.first(n_rows)
        bucket.rows.begin(rotaries, n_rows)
        is_inside = False  # whether the buffers hold the hidden states, and the layer's heads
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
        """Return the bucket for `n_rows` rows, captured now if new; None if nothing can be."""
        size = next(size for size in GRAPH_BUCKETS if n_rows <= size)
        if size not in self._buckets and self._capture is not None and self._buffers is not None:
            rows = self._buffers.first(size)
            try:
                pieces = [self._piece(place, rows) for place in range(len(self._layers) + 1)]
            except RuntimeError as error:  # torch raises nothing narrower if it cannot capture
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
        """Capture the operators between the attentions of the layers before and after `place`."""
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
