"""How much memory a stage will take, and how many bytes one step reads: predicted before loading.

Knows the tensor table and the shapes of the forward pass. Must not know torch or machines: the
planner calls it. Tests hold it against what loading and computing really take.

`dtype` is what is computed in; `stored`, where it is given, what the weights of products stay in,
which the compiled library multiplies with rows of another dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from shardnet.model.config import ModelConfig
from shardnet.model.layout import (
    Shape,
    Table,
    embedding_tensors,
    head_tensors,
    is_rounded,
    layer_tensors,
    stage_tensors,
)
from shardnet.model.quantization import PANEL, UNPACKED_PANELS, Quantization
from shardnet.types import BLOCK_POSITIONS, DType, KvDType, LayerRange

KEEPS_BFLOAT16 = "native float32"
"""What kernels.py calls products in float32 whose weights stay bfloat16."""

N_BUFFERS = 2
"""Streamed layers in memory: one computes, the next is read."""

GRAPH_BUCKETS = (1, 2, 4, 8, 16, 32)
"""Row counts for which decode steps are captured on CUDA; see decode_graphs.py."""
_GRAPH_BYTES = 256 << 10
"""What the driver is taken to keep for each graph."""
_GRAPH_POOL_BYTES = 64 << 20
"""What graphs are taken to need besides: cuBLAS's workspace, and what torch takes at a time."""


def layer_weight_bytes(
    config: ModelConfig,
    dtype: DType,
    quantization: Quantization | None = None,
    stored: DType | None = None,
) -> int:
    """Bytes of the largest layer's weights in `dtype`; in most families all are alike."""
    return max(layers_weight_bytes(config, dtype, quantization, stored))


def layers_weight_bytes(
    config: ModelConfig,
    dtype: DType,
    quantization: Quantization | None = None,
    stored: DType | None = None,
) -> tuple[int, ...]:
    """Bytes of each layer's weights in `dtype`. Those with experts are much the largest."""
    layers = range(config.n_layers)
    return tuple(
        _table_bytes(layer_tensors(config, n), dtype, quantization, stored) for n in layers
    )


def head_weight_bytes(
    config: ModelConfig,
    dtype: DType,
    quantization: Quantization | None = None,
    stored: DType | None = None,
) -> int:
    """Bytes of the final norm and the LM head in `dtype`, also where the head is tied."""
    kind = quantization.of_head if quantization is not None else None
    return _table_bytes(head_tensors(config), dtype, kind, stored)


def embedding_weight_bytes(config: ModelConfig, dtype: DType) -> int:
    """Bytes of the embedding tables in `dtype`."""
    return _bytes(embedding_tensors(config).values(), dtype)


def stage_weight_bytes(
    config: ModelConfig,
    layers: LayerRange,
    dtype: DType,
    quantization: Quantization | None = None,
    n_streamed: int = 0,
    stored: DType | None = None,
) -> int:
    """Bytes that the stage's weights take in memory when computing in `dtype`.

    `quantization` is what the weights of products are rounded to; `n_streamed` layers are streamed
    from disk, with their buffers.

    A tied model's table is held twice by a stage that is first and last: as a table to look rows up
    in, and in the layout the LM head's kernel wants.
    """
    parts = stage_tensors(config, layers)
    layer_bytes = sum(_table_bytes(t, dtype, quantization, stored) for t in parts.layers.values())
    head_bytes = head_weight_bytes(config, dtype, quantization, stored) if parts.head else 0
    streamed = [parts.layers[layer] for layer in streamed_layers(layers, n_streamed)]
    kept = stored or dtype
    on_disk = [_rounded_bytes(t, kept, quantization) for t in streamed]
    scratch_bytes = max((_scratch_bytes(t, kept, quantization) for t in streamed), default=0)
    buffers = min(N_BUFFERS, len(streamed)) * max(on_disk, default=0) + scratch_bytes
    return (
        _bytes(parts.embedding.values(), dtype) + layer_bytes + head_bytes - sum(on_disk) + buffers
    )


def streamed_layers(layers: LayerRange, n_streamed: int) -> list[int]:
    """Name the layers of a stage that are streamed: spread evenly, so that the disk never rests."""
    n_layers = len(layers)
    n_streamed = min(n_streamed, n_layers)
    return [
        layers.start + place
        for place in range(n_layers)
        if (place + 1) * n_streamed // n_layers > place * n_streamed // n_layers
    ]


def layer_stream_bytes(
    config: ModelConfig,
    dtype: DType,
    quantization: Quantization | None = None,
    stored: DType | None = None,
) -> int:
    """Bytes of the layer of which most is read from disk at every step, where it is streamed."""
    layers, kept = range(config.n_layers), stored or dtype
    return max(_rounded_bytes(layer_tensors(config, n), kept, quantization) for n in layers)


def layer_scratch_bytes(
    config: ModelConfig,
    dtype: DType,
    quantization: Quantization | None = None,
    stored: DType | None = None,
) -> int:
    """Bytes that a streamed layer takes besides its buffer while it computes."""
    layers, kept = range(config.n_layers), stored or dtype
    return max(_scratch_bytes(layer_tensors(config, n), kept, quantization) for n in layers)


def read_bytes_per_step(
    config: ModelConfig,
    layers: LayerRange,
    dtype: DType,
    quantization: Quantization | None = None,
    stored: DType | None = None,
) -> int:
    """Weight bytes that one row reads: the layers and the head, not the embedding table.

    Of a layer with experts those that the row visits.
    """
    is_last = layers.end == config.n_layers
    head = head_weight_bytes(config, dtype, quantization, stored) if is_last else 0
    return head + sum(_read_bytes(config, layer, dtype, quantization, stored) for layer in layers)


def layer_read_bytes(
    config: ModelConfig,
    dtype: DType,
    quantization: Quantization | None = None,
    stored: DType | None = None,
) -> int:
    """Weight bytes that one row reads of the layer of which it reads most."""
    layers = range(config.n_layers)
    return max(_read_bytes(config, layer, dtype, quantization, stored) for layer in layers)


def _read_bytes(
    config: ModelConfig,
    layer: int,
    dtype: DType,
    quantization: Quantization | None,
    stored: DType | None,
) -> int:
    tensors, experts = layer_tensors(config, layer), config.layer_experts(layer)
    whole = _table_bytes(tensors, dtype, quantization, stored)
    if experts is None:
        return whole
    of_experts = {name: shape for name, shape in tensors.items() if ".experts." in name}
    unread = experts.n_experts - experts.top_k
    return (
        whole - _table_bytes(of_experts, dtype, quantization, stored) * unread // experts.n_experts
    )


def kv_block_bytes(
    config: ModelConfig, layers: LayerRange, dtype: DType, kv_dtype: KvDType = KvDType.AUTO
) -> int:
    """Bytes of one block (256 positions) of KV room over the stage's layers."""
    return len(layers) * _kv_position_bytes(config, dtype, kv_dtype) * BLOCK_POSITIONS


def activation_peak_bytes(
    config: ModelConfig,
    layers: LayerRange,
    rows: int,
    dtype: DType,
    context: int,
    kv_dtype: KvDType = KvDType.AUTO,
) -> int:
    """The most bytes that the activations of a micro-batch of `rows` rows take at once.

    `context` bounds the positions of one sequence. Counts the largest of attention (projections,
    the mask of a chunk), MLP and head (all rows sampled), plus growing one slot by a block. Rounded
    keys and values of one layer of a sequence are brought back while it is attended over.
    """
    hidden = rows * config.hidden_size * dtype.size_bytes
    queries = rows * config.n_heads * config.key_size * dtype.size_bytes
    keys = rows * config.n_kv_heads * config.key_size * dtype.size_bytes
    attention = 3 * (queries + 2 * keys) + 2 * queries + _score_bytes(config, rows, dtype, context)
    if kv_dtype is not KvDType.AUTO:
        attention += context * _kv_position_bytes(config, dtype, KvDType.AUTO)
    mlp = max(
        4 * rows * config.intermediate_size * dtype.size_bytes, _expert_bytes(config, dtype, rows)
    )
    head = 0
    if layers.end == config.n_layers:
        head = rows * config.vocab_size * (4 + dtype.size_bytes)
    growth = 2 * context * _kv_position_bytes(config, dtype, kv_dtype)
    return 4 * hidden + max(attention, mlp, head) + growth


def waiting_bytes(config: ModelConfig, rows: int, dtype: DType, context: int) -> int:
    """The most bytes that `rows` rows take while a layer of a streaming stage computes others."""
    hidden = rows * config.hidden_size * dtype.size_bytes
    n_masks = len(set(config.windows)) or 1
    return 2 * hidden + n_masks * rows * context * dtype.size_bytes


def graph_bytes(config: ModelConfig, dtype: DType, quantization: Quantization | None = None) -> int:
    """The most bytes that CUDA graphs of decode steps keep, of a stage with all layers.

    Rounded weights are unpacked on CUDA, by steps without graphs too: that is counted here. Static
    buffers and the largest graph's own memory follow from the shapes; what the driver and
    the libraries keep is a margin, not measured yet.
    """
    rows = GRAPH_BUCKETS[-1]
    queries = config.n_heads * config.key_size
    keys = config.n_kv_heads * config.key_size
    buffers = config.hidden_size + 2 * queries + 2 * keys + 4 * config.key_size
    inside = 4 * config.hidden_size + 3 * (queries + 2 * keys) + 4 * config.intermediate_size
    unpacking = 0
    if quantization is not None:
        n_in = max(config.hidden_size, queries, config.intermediate_size)
        weight = 2 + 2 * dtype.size_bytes  # its byte twice; itself, and one of the panels before
        unpacking = 2 * UNPACKED_PANELS * PANEL * n_in * weight  # in graphs, and out of them
    n_graphs = len(GRAPH_BUCKETS) * (config.n_layers + 1)
    return (
        rows * (buffers + inside) * dtype.size_bytes
        + unpacking
        + n_graphs * _GRAPH_BYTES
        + _GRAPH_POOL_BYTES
    )


def _expert_bytes(config: ModelConfig, dtype: DType, rows: int) -> int:
    """All answers of all experts, their sum in float32, and one expert that every row visits."""
    experts = config.experts
    if experts is None:
        return 0
    answers = experts.top_k * rows * config.hidden_size * dtype.size_bytes
    adding = 2 * rows * config.hidden_size * 4
    shared = 4 * rows * experts.shared_intermediate_size * dtype.size_bytes
    one = rows * (2 * config.hidden_size + 4 * experts.intermediate_size) * dtype.size_bytes
    return answers + max(adding, one) + shared


def _score_bytes(config: ModelConfig, rows: int, dtype: DType, context: int) -> int:
    """The masks of a chunk, one for each window, and with a soft cap the scores of one KV head."""
    n_masks = len(set(config.windows)) or 1
    masks = n_masks * rows * context * dtype.size_bytes
    if config.attention_soft_cap is None and not config.has_sinks:
        return masks
    scores = config.n_heads // config.n_kv_heads * rows * context
    return masks + scores * (4 + 4 + dtype.size_bytes)


def _kv_position_bytes(config: ModelConfig, dtype: DType, kv_dtype: KvDType) -> int:
    """Keys and values of one position in one layer."""
    sizes = (config.key_size, config.value_size)
    return config.n_kv_heads * sum(kv_dtype.row_bytes(size, dtype) for size in sizes)


def _table_bytes(
    tensors: Table,
    dtype: DType,
    quantization: Quantization | None,
    stored: DType | None = None,
) -> int:
    """Bytes of a part's tensors, of which products may be rounded: the last two axes of each.

    Those that are not stay in `stored`, None for `dtype`. Rounded weights are filled up to whole
    panels and groups whichever axis is which.
    """
    if quantization is None:
        products = [shape for name, shape in tensors.items() if is_rounded(name, shape)]
        spared_bytes = _bytes(products, dtype) - _bytes(products, stored or dtype)
        return _bytes(tensors.values(), dtype) - spared_bytes
    return sum(
        math.prod(shape[:-2])
        * max(quantization.packed_bytes(*shape[-2:]), quantization.packed_bytes(*shape[:-3:-1]))
        if is_rounded(name, shape)
        else math.prod(shape) * dtype.size_bytes
        for name, shape in tensors.items()
    )


def _rounded_bytes(tensors: Table, dtype: DType, quantization: Quantization | None) -> int:
    """Bytes of those of a layer's tensors that are read at every step where it is streamed."""
    products = {name: shape for name, shape in tensors.items() if is_rounded(name, shape)}
    return _table_bytes(products, dtype, quantization)


def _scratch_bytes(tensors: Table, dtype: DType, quantization: Quantization | None) -> int:
    """What a layer's products take once they are packed; rounded weights lie on disk packed."""
    return 0 if quantization is not None else _rounded_bytes(tensors, dtype, None)


def _bytes(shapes: Iterable[Shape], dtype: DType) -> int:
    return sum(math.prod(shape) for shape in shapes) * dtype.size_bytes
