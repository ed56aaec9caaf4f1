"""How much memory a stage will take, and how many bytes one step reads: predicted before loading.

Knows the tensor table and the shapes of the forward pass. Must not know torch or machines: the
planner calls it. Tests hold it against what loading and computing really take.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from shardnet.model.config.limits import GRAPH_BUCKETS
from shardnet.model.config.model_config import HeadShape, ModelConfig
from shardnet.model.config.panel_form import PANEL, UNPACKED_PANELS, Quantization
from shardnet.model.families.stage_tensors import (
    embedding_tensors,
    head_tensors,
    is_quantizable,
    layer_tensors,
    mtp_tensors,
    shared_tensors,
)
from shardnet.model.families.tensor_shapes import Shape, Table
from shardnet.slot_operations import MAX_DRAFTS
from shardnet.stage.estimate.packed_sizes import PackedCount, PackedSizes
from shardnet.types import (
    BLOCK_POSITIONS,
    LEAST_STATES,
    MAX_ROWS_IN_FLIGHT,
    DType,
    KvDType,
    LayerRange,
)

N_BUFFERS = 2
"""Streamed layers in memory: one computes, the next is read."""
KEPT_ROWS_BYTES = 128 << 20
"""Memory of a stage for rows of tables that other nodes have sent."""

_CHOSEN_ROWS = 16
"""Rows whose chosen positions are copied together: CHOSEN_ROWS of csrc/sublayers.h."""
_DRAFTING_SLOTS = 8
"""Sequences whose drafts are verified at once: where more run, drafts do not pay."""

_GRAPH_BYTES = 256 << 10
"""Assumed memory of the driver for each graph."""
_GRAPH_POOL_BYTES = 64 << 20
"""Assumed further memory of graphs: cuBLAS's workspace, and the granularity of torch's pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightForm:
    """The form of a stage's weights in memory: in the compute dtype, except for linear layers.

    Linear weights are quantised; else those in `packed` stay as they are stored, as its tables
    always do; others are in `linear_dtype` (None: in `dtype`), which the compiled library
    multiplies with rows in `dtype`. Beside them keys and values that are not quantised are in
    `held_dtype` (None: in `dtype`).
    """

    dtype: DType
    quant: Quantization | None = None
    linear_dtype: DType | None = None
    packed: PackedSizes | None = None
    held_dtype: DType | None = None

    @property
    def kv(self) -> DType:
        """The dtype of keys and values that are not quantised."""
        return self.held_dtype or self.dtype

    @property
    def linear(self) -> DType:
        """The dtype of linear weights that are neither quantised nor packed."""
        return self.linear_dtype or self.dtype

    @property
    def of_head(self) -> WeightForm:
        """The form of the LM head, which is quantised less."""
        if self.quant is None:
            return self
        return replace(self, quant=self.quant.of_head)

    @property
    def packed_linears(self) -> PackedSizes | None:
        """The linear weights that stay as they are stored."""
        return self.packed if self.quant is None else None


def layer_weight_bytes(config: ModelConfig, form: WeightForm) -> int:
    """Return the bytes of the largest layer's weights; in most families all are equal."""
    return max(layers_weight_bytes(config, form))


def layers_weight_bytes(config: ModelConfig, form: WeightForm) -> tuple[int, ...]:
    """Return the bytes of each layer's weights; layers with experts are the largest by far."""
    return tuple(_layer_bytes(config, layer, form) for layer in range(config.n_layers))


def attention_weights(config: ModelConfig) -> Fraction:
    """Return about what of a layer's weights those of queries, keys and values are."""
    own = (config.n_heads + 2 * config.n_kv_heads) * config.head_size
    inner = config.intermediate_size
    if config.experts is not None:
        inner = config.experts.n_experts * config.experts.intermediate_size
    return Fraction(own, own + config.n_heads * config.head_size + 3 * inner)


def head_weight_bytes(config: ModelConfig, form: WeightForm) -> int:
    """Return the bytes of the final norm and the LM head, even if the head is tied."""
    n_bytes, packed = _table_bytes(head_tensors(config), form.of_head), form.packed_linears
    return n_bytes if packed is None else n_bytes + _added_bytes(packed.head, form.linear)


def mtp_weight_bytes(config: ModelConfig, form: WeightForm) -> int:
    """Return the bytes of what predicts further tokens, beside embedding and LM head."""
    return _layer_bytes(config, config.n_layers, form) if config.has_mtp else 0


def mtp_read_bytes(config: ModelConfig, form: WeightForm) -> int:
    """Return the weight bytes of it that one row reads."""
    return _read_bytes(config, config.n_layers, form) if config.has_mtp else 0


def embedding_weight_bytes(config: ModelConfig, form: WeightForm) -> int:
    """Return the bytes of the embedding tables."""
    n_bytes, packed = _bytes(embedding_tensors(config).values(), form.dtype), form.packed
    return n_bytes if packed is None else n_bytes + _added_bytes(packed.embedding, form.dtype)


def every_stage_bytes(config: ModelConfig, form: WeightForm) -> int:
    """Return the bytes of what every stage holds beside its layers."""
    return _bytes(shared_tensors(config).values(), form.dtype)


def tail_weight_bytes(config: ModelConfig, form: WeightForm) -> int:
    """Return the bytes that a stage holds beside its layers because it is the last, not the first.

    What predicts further tokens needs the embedding too.
    """
    n_bytes = head_weight_bytes(config, form) + mtp_weight_bytes(config, form)
    if config.has_mtp:
        n_bytes += embedding_weight_bytes(config, form) - tied_weight_bytes(form)
    return n_bytes


def shared_weight_bytes(config: ModelConfig, form: WeightForm) -> int:
    """Return what a stage saves of both ends' bytes that has both."""
    return embedding_weight_bytes(config, form) if config.has_mtp else tied_weight_bytes(form)


def tied_weight_bytes(form: WeightForm) -> int:
    """Return the bytes of a tied head that a stage with the embedding holds already, packed."""
    packed = form.packed_linears
    return packed.head.n_bytes if packed is not None and packed.is_tied else 0


def stage_weight_bytes(
    config: ModelConfig,
    layers: LayerRange,
    form: WeightForm,
    n_streamed: int = 0,
) -> int:
    """Return the bytes of the stage's weights in memory.

    For the `n_streamed` layers that are streamed from disk, that is their buffers. A stage that is
    first and last holds a tied table twice, unless it is packed: for lookups, and in the layout of
    the LM head's kernel. What predicts further tokens, on the last stage, needs the embedding too.
    """
    is_first, is_last = layers.start == 0, layers.end == config.n_layers
    ends_bytes = every_stage_bytes(config, form)
    ends_bytes += embedding_weight_bytes(config, form) if is_first else 0
    ends_bytes += tail_weight_bytes(config, form) if is_last else 0
    ends_bytes -= shared_weight_bytes(config, form) if is_first and is_last else 0
    streamed = streamed_layers(layers, n_streamed)
    on_disk = [_linear_bytes(config, layer, form) for layer in streamed]
    scratch_bytes = max((_scratch_bytes(config, layer, form) for layer in streamed), default=0)
    buffers = min(N_BUFFERS, len(streamed)) * max(on_disk, default=0) + scratch_bytes
    layer_bytes = sum(_layer_bytes(config, layer, form) for layer in layers)
    return ends_bytes + layer_bytes - sum(on_disk) + buffers


def streamed_layers(layers: LayerRange, n_streamed: int) -> list[int]:
    """List the layers of a stage to be streamed: spread evenly, to keep the disk busy."""
    n_layers = len(layers)
    n_streamed = min(n_streamed, n_layers)
    return [
        layers.start + place
        for place in range(n_layers)
        if (place + 1) * n_streamed // n_layers > place * n_streamed // n_layers
    ]


def layer_buffer_bytes(config: ModelConfig, form: WeightForm) -> int:
    """Return the bytes of a buffer for the largest layer, if it is streamed."""
    return max(_linear_bytes(config, layer, form) for layer in range(config.n_layers))


def layer_stream_bytes(config: ModelConfig, form: WeightForm) -> int:
    """Return the bytes that one row reads from disk of the largest layer, if it is streamed.

    Of experts, those that it is routed to, none of which was used lately.
    """
    return max(
        _linear_bytes(config, layer, form) - _unread_bytes(config, layer, form)
        for layer in range(config.n_layers)
    )


def layer_scratch_bytes(config: ModelConfig, form: WeightForm) -> int:
    """Return the bytes that a streamed layer needs besides its buffer while it computes."""
    return max(_scratch_bytes(config, layer, form) for layer in range(config.n_layers))


def read_bytes_per_step(config: ModelConfig, layers: LayerRange, form: WeightForm) -> int:
    """Return the weight bytes that one row reads: layers and head, without the embedding table.

    Of a layer with experts, only those that one row is routed to count.
    """
    is_last = layers.end == config.n_layers
    head = head_weight_bytes(config, form) + mtp_read_bytes(config, form) if is_last else 0
    return head + sum(_read_bytes(config, layer, form) for layer in layers)


def layer_read_bytes(config: ModelConfig, form: WeightForm) -> int:
    """Return the largest number of weight bytes that one row reads in any layer."""
    return max(_read_bytes(config, layer, form) for layer in range(config.n_layers))


def _read_bytes(config: ModelConfig, layer: int, form: WeightForm) -> int:
    return _layer_bytes(config, layer, form) - _unread_bytes(config, layer, form)


def _unread_bytes(config: ModelConfig, layer: int, form: WeightForm) -> int:
    """Return the bytes of the experts of a layer to which one row is not routed."""
    tensors, experts = _tensors(config, layer), config.layer_experts(layer)
    if experts is None:
        return 0
    of_experts = {name: shape for name, shape in tensors.items() if ".experts." in name}
    expert_bytes = _table_bytes(of_experts, form)
    if form.packed_linears is not None:
        expert_bytes += _added_bytes(form.packed_linears.experts[layer], form.linear)
    return expert_bytes * (experts.n_experts - experts.top_k) // experts.n_experts


def kv_block_bytes(
    config: ModelConfig,
    layers: LayerRange,
    dtype: DType,
    kv_dtype: KvDType = KvDType.AUTO,
    computed: DType | None = None,
) -> int:
    """Return the bytes of one KV block (256 positions) over the stage's layers.

    Layers that keep a state take none. Entries that positions are chosen by are in the dtype
    `computed`, None for `dtype`.
    """
    if config.outline is not None:
        return config.outline.block_bytes(layers, dtype)
    caching = [layer for layer in layers if config.has_kv(layer)]
    if config.has_mtp and layers.end == config.n_layers:
        caching.append(config.n_layers)
    position = sum(_kv_position_bytes(config.heads(layer), dtype, kv_dtype) for layer in caching)
    return position * BLOCK_POSITIONS + _entry_bytes(config, caching, computed or dtype)


def _entry_bytes(config: ModelConfig, layers: Sequence[int], dtype: DType) -> int:
    """Return the bytes of what a block's positions are chosen by where entries are made of them."""
    own = config.indexer
    if own is None or own.n_pooled == 1:
        return 0
    n_choosing = len({*layers} & {*own.layers})
    return n_choosing * own.head_size * dtype.size_bytes * BLOCK_POSITIONS // own.n_pooled


def state_bytes(config: ModelConfig, layers: LayerRange, dtype: DType) -> int:
    """Return the bytes of one state over the stage's layers: 0 where none keeps one.

    Where others have windows, the rows that these reach are kept with it.
    """
    if config.outline is not None:
        return config.outline.slot_bytes(layers)
    n_bytes = 0
    for layer in layers if config.has_state else ():
        shape, window = config.state(layer), config.windows[layer] if config.windows else None
        n_bytes += shape.size_bytes(dtype) if shape is not None else 0
        if window is not None and config.has_kv(layer):
            n_bytes += window * _kv_position_bytes(config.heads(layer), dtype, KvDType.AUTO)
    return n_bytes


def draft_bytes(config: ModelConfig, layers: LayerRange, dtype: DType) -> int:
    """Return the bytes, beside states, by which drafts are rewound over the stage's layers.

    They are what the recurrence is given of a step's rows, of some slots, and of the rows of one
    that has drafts behind drafts in flight, with another state before these.
    """
    shapes = [shape for shape in map(config.state, layers) if shape is not None]
    return sum(
        _DRAFTING_SLOTS * shape.input_bytes(1 + MAX_DRAFTS, dtype)
        + shape.input_bytes(2 * MAX_ROWS_IN_FLIGHT, dtype)
        + shape.size_bytes(dtype)
        for shape in shapes
    )


def least_state_bytes(config: ModelConfig, layers: LayerRange, dtype: DType) -> int:
    """Return the bytes of the states that a stage must have room for, and of what drafts take."""
    return LEAST_STATES * state_bytes(config, layers, dtype) + draft_bytes(config, layers, dtype)


def activation_peak_bytes(
    config: ModelConfig,
    layers: LayerRange,
    rows: int,
    dtype: DType,
    context: int,
    kv_dtype: KvDType = KvDType.AUTO,
) -> int:
    """Return the peak bytes of activations of a micro-batch of `rows` rows.

    `context` bounds the positions of one sequence. Counts the largest of attention (projections,
    the mask of a chunk), MLP and head (all rows sampled), plus growing one slot by a block and the
    tables of rotary positions.
    Quantised keys and values of one layer of a sequence are dequantised while attending. A layer
    with a recurrence has float32 columns instead.
    """
    hidden = rows * config.row_width * dtype.size_bytes
    queries = rows * config.n_heads * config.key_size * dtype.size_bytes
    keys = rows * _key_columns(config) * dtype.size_bytes
    attention = 3 * (queries + 2 * keys) + 2 * queries + _score_bytes(config, rows, dtype, context)
    if config.has_gates:
        attention += 3 * queries
    if kv_dtype is not KvDType.AUTO:
        attention += context * _widest_position_bytes(config, dtype, KvDType.AUTO)
    attention += _choice_bytes(config, layers, rows, dtype, context)
    mlp = max(
        4 * rows * config.intermediate_size * dtype.size_bytes, _expert_bytes(config, dtype, rows)
    )
    head = 0
    if layers.end == config.n_layers:
        head = rows * config.vocab_size * (4 + dtype.size_bytes)
    growth = 2 * context * _widest_position_bytes(config, dtype, kv_dtype)
    recurrence = _recurrence_bytes(config, rows, dtype)
    mixing = 0 if config.streams is None else 12 * rows * config.row_width  # three times in float32
    if config.ngrams is not None:
        mixing += 16 * rows * config.row_width  # gated, normed and convolved, beside the streams
    rotary = rotary_bytes(config, dtype, context)
    return 4 * hidden + mixing + max(attention, mlp, head, recurrence) + growth + rotary


def rotary_bytes(config: ModelConfig, dtype: DType, context: int) -> int:
    """Return the bytes of the tables of rotary positions: a cosine and a sine of each column."""
    has_own = config.latent is not None or config.compressed is not None
    kinds = {
        (rope, config.head_size if has_own else config.heads(layer).key_size)
        for layer in range(config.n_layers)
        if (rope := config.layer_rope(layer)) is not None
    }
    return sum(2 * context * rope.rotated(size) * dtype.size_bytes for rope, size in kinds)


def _choice_bytes(
    config: ModelConfig, layers: LayerRange, rows: int, dtype: DType, context: int
) -> int:
    """Return the bytes by which rows choose positions: scores, and copies of what is chosen.

    Entries of several positions each are those of one sequence, in memory that has grown for them.
    """
    own = config.indexer
    if own is None or context <= own.n_chosen:
        return 0
    together, usual = min(rows, _CHOSEN_ROWS), config.usual_heads
    queries = 3 * rows * own.n_heads * own.head_size * dtype.size_bytes
    copied = usual.key_size
    if config.latent is None:
        copied = usual.n_kv_heads * (copied + config.heads(own.layers[0]).value_size)
    copies = together * own.n_attended * copied * dtype.size_bytes
    scores = together * (context // own.n_pooled)
    return queries + copies + 4 * (scores + 2 * rows * own.n_attended)


def waiting_bytes(config: ModelConfig, rows: int, dtype: DType, context: int) -> int:
    """Return the peak bytes of `rows` rows that wait while a streamed layer computes others.

    `context` bounds the positions of one sequence.
    """
    hidden = rows * config.row_width * dtype.size_bytes
    n_masks = len(set(config.windows)) or 1
    return 2 * hidden + n_masks * rows * context * dtype.size_bytes


def graph_bytes(config: ModelConfig, dtype: DType) -> int:
    """Return an upper bound of the bytes that CUDA graphs of a stage with all layers hold.

    Static buffers and the largest graph's own memory follow from the shapes, and so does what
    unpacking weights takes while they are loaded; the memory of driver and libraries is a margin,
    not measured yet.
    """
    rows = GRAPH_BUCKETS[-1]
    queries = config.n_heads * config.key_size
    keys = _key_columns(config)
    buffers = config.hidden_size + 2 * queries + 2 * keys + 4 * config.key_size
    inside = 4 * config.hidden_size + 3 * (queries + 2 * keys) + 4 * config.intermediate_size
    n_in = max(config.hidden_size, queries, config.intermediate_size)
    weight = 2 + dtype.size_bytes + 4 * 4  # its byte twice, itself, place and products in float32
    unpacking = UNPACKED_PANELS * PANEL * n_in * weight
    n_graphs = len(GRAPH_BUCKETS) * (config.n_layers + 1)
    return (
        rows * (buffers + inside) * dtype.size_bytes
        + unpacking
        + n_graphs * _GRAPH_BYTES
        + _GRAPH_POOL_BYTES
    )


def _recurrence_bytes(config: ModelConfig, rows: int, dtype: DType) -> int:
    """Return the bytes of projections, convolution and outputs, and of one state's update."""
    if config.short_conv is not None:
        return rows * config.hidden_size * (5 * dtype.size_bytes + 3 * 4)
    own = config.delta_net
    if own is None:
        return 0
    projected = 3 * (own.mixed_width + own.value_width) * dtype.size_bytes
    convolved = 3 * own.mixed_width * 4
    heads = 4 * own.n_value_heads * (own.key_size + own.value_size) * 4
    return rows * (projected + convolved + heads) + own.state.size_bytes(dtype)


def _expert_bytes(config: ModelConfig, dtype: DType, rows: int) -> int:
    """Return the bytes of all expert outputs, their sum in float32, and the shared expert."""
    experts = config.experts
    if experts is None:
        return 0
    outputs = experts.top_k * rows * config.hidden_size * dtype.size_bytes
    adding = 2 * rows * config.hidden_size * 4
    shared = 4 * rows * experts.shared_intermediate_size * dtype.size_bytes
    one = rows * (2 * config.hidden_size + 4 * experts.intermediate_size) * dtype.size_bytes
    return outputs + max(adding, one) + shared


def _score_bytes(config: ModelConfig, rows: int, dtype: DType, context: int) -> int:
    """Return the bytes of a chunk's masks, one per window, and of unfused scores of one KV head.

    Where an indexer chooses positions, rows see no more than are chosen.
    """
    if config.indexer is not None:
        context = min(context, config.indexer.n_attended)
    n_masks = len(set(config.windows)) or 1
    masks = n_masks * rows * context * dtype.size_bytes
    if config.attention_soft_cap is None and not config.has_sinks:
        return masks
    scores = config.n_heads // config.n_kv_heads * rows * context
    return masks + scores * (4 + 4 + dtype.size_bytes)


def _kv_position_bytes(heads: HeadShape, dtype: DType, kv_dtype: KvDType) -> int:
    """Return the bytes of keys and values of one position in one layer."""
    sizes = (heads.key_size, heads.value_size)
    return heads.n_kv_heads * sum(kv_dtype.row_bytes(size, dtype) for size in sizes)


def _widest_position_bytes(config: ModelConfig, dtype: DType, kv_dtype: KvDType) -> int:
    """Return those bytes of the layer that has the most."""
    caching = {config.heads(layer) for layer in range(config.n_layers) if config.has_kv(layer)}
    return max((_kv_position_bytes(heads, dtype, kv_dtype) for heads in caching), default=0)


def _key_columns(config: ModelConfig) -> int:
    """Return the columns of all keys of a position, in the layer that has the most."""
    return max(heads.n_kv_heads * heads.key_size for heads in _distinct_heads(config))


def _distinct_heads(config: ModelConfig) -> tuple[HeadShape, ...]:
    layers = range(config.n_layers)
    return tuple(dict.fromkeys((config.usual_heads, *map(config.heads, layers))))


def _tensors(config: ModelConfig, layer: int) -> Table:
    return mtp_tensors(config) if layer == config.n_layers else layer_tensors(config, layer)


def _layer_bytes(config: ModelConfig, layer: int, form: WeightForm) -> int:
    n_bytes, packed = _table_bytes(_tensors(config, layer), form), form.packed_linears
    if layer < len(config.adapter_bytes):
        n_bytes += config.adapter_bytes[layer]
    return n_bytes if packed is None else n_bytes + _added_bytes(packed.layers[layer], form.linear)


def _added_bytes(packed: PackedCount, dtype: DType) -> int:
    """Return how many bytes more than in `dtype` packed weights take: usually below zero."""
    return packed.n_bytes - packed.n_weights * dtype.size_bytes


def _table_bytes(tensors: Table, form: WeightForm) -> int:
    """Return the bytes of tensors; those of linears may be quantised, over their last two axes.

    Quantised weights are padded to whole panels and groups; which axis is the output is unknown, so
    the larger result counts. What stays packed as it is stored counts as if it were plain.
    """
    kind = form.quant
    linears = {name: shape for name, shape in tensors.items() if is_quantizable(name, shape)}
    rest = [shape for name, shape in tensors.items() if name not in linears]
    if kind is None:
        return _bytes(rest, form.dtype) + _bytes(linears.values(), form.linear)
    return _bytes(rest, form.dtype) + sum(
        math.prod(shape[:-2])
        * max(kind.form.packed_bytes(*shape[-2:]), kind.form.packed_bytes(*shape[:-3:-1]))
        for shape in linears.values()
    )


def _linear_bytes(config: ModelConfig, layer: int, form: WeightForm) -> int:
    """Return the bytes of the tensors that are read at every step if the layer is streamed."""
    tensors, packed = layer_tensors(config, layer), form.packed_linears
    linears = {name: shape for name, shape in tensors.items() if is_quantizable(name, shape)}
    n_bytes = _table_bytes(linears, form)
    return n_bytes if packed is None else n_bytes + _added_bytes(packed.layers[layer], form.linear)


def _scratch_bytes(config: ModelConfig, layer: int, form: WeightForm) -> int:
    """Return the bytes of a layer's packed linears that are not packed on disk or in reading."""
    if form.quant is not None:
        return 0
    packed_bytes = form.packed.layers[layer].n_bytes if form.packed is not None else 0
    return _linear_bytes(config, layer, form) - packed_bytes


def _bytes(shapes: Iterable[Shape], dtype: DType) -> int:
    return sum(math.prod(shape) for shape in shapes) * dtype.size_bytes
