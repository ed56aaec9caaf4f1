"""How much memory a stage will take, and how many bytes one step reads: predicted before loading.

Knows the tensor table and the shapes of the forward pass. Must not know torch or machines: the
planner calls it. Tests hold it against what loading and computing really take.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from shardnet.model.config import ModelConfig
from shardnet.model.layout import (
    Shape,
    embedding_tensors,
    head_tensors,
    layer_tensors,
    stage_tensors,
)
from shardnet.types import BLOCK_POSITIONS, DType, LayerRange


def layer_weight_bytes(config: ModelConfig, dtype: DType) -> int:
    """Bytes of the largest layer's weights in `dtype`; in most families all are alike."""
    layers = range(config.n_layers)
    return max(_bytes(layer_tensors(config, layer).values(), dtype) for layer in layers)


def head_weight_bytes(config: ModelConfig, dtype: DType) -> int:
    """Bytes of the final norm and the LM head in `dtype`, also where the head is tied."""
    return _bytes(head_tensors(config).values(), dtype)


def embedding_weight_bytes(config: ModelConfig, dtype: DType) -> int:
    """Bytes of the embedding tables in `dtype`."""
    return _bytes(embedding_tensors(config).values(), dtype)


def stage_weight_bytes(config: ModelConfig, layers: LayerRange, dtype: DType) -> int:
    """Bytes that the stage's weights take in memory when computing in `dtype`.

    A tied model's table is held twice by a stage that is first and last: as a table to look rows up
    in, and in the layout the LM head's kernel wants.
    """
    parts = stage_tensors(config, layers)
    layer_bytes = sum(_bytes(tensors.values(), dtype) for tensors in parts.layers.values())
    return (
        _bytes(parts.embedding.values(), dtype) + layer_bytes + _bytes(parts.head.values(), dtype)
    )


def read_bytes_per_step(config: ModelConfig, layers: LayerRange, dtype: DType) -> int:
    """Weight bytes that one decode step reads: the layers and the head, not the embedding table."""
    head = head_weight_bytes(config, dtype) if layers.end == config.n_layers else 0
    return head + sum(_bytes(layer_tensors(config, layer).values(), dtype) for layer in layers)


def kv_block_bytes(config: ModelConfig, layers: LayerRange, dtype: DType) -> int:
    """Bytes of one block (256 positions) of KV room over the stage's layers."""
    return len(layers) * _kv_position_bytes(config, dtype) * BLOCK_POSITIONS


def activation_peak_bytes(
    config: ModelConfig, layers: LayerRange, rows: int, dtype: DType, context: int
) -> int:
    """The most bytes that the activations of a micro-batch of `rows` rows take at once.

    `context` bounds the positions of one sequence. Counts the largest of attention (projections,
    the mask of a chunk), MLP and head (all rows sampled), plus growing one slot by a block.
    """
    hidden = rows * config.hidden_size * dtype.size_bytes
    queries = rows * config.n_heads * config.head_size * dtype.size_bytes
    keys = rows * config.n_kv_heads * config.head_size * dtype.size_bytes
    attention = 3 * (queries + 2 * keys) + 2 * queries + _score_bytes(config, rows, dtype, context)
    mlp = 4 * rows * config.intermediate_size * dtype.size_bytes
    head = 0
    if layers.end == config.n_layers:
        head = rows * config.vocab_size * (4 + dtype.size_bytes)
    growth = 2 * context * _kv_position_bytes(config, dtype)
    return 4 * hidden + max(attention, mlp, head) + growth


def _score_bytes(config: ModelConfig, rows: int, dtype: DType, context: int) -> int:
    """The masks of a chunk, one for each window, and with a soft cap the scores of one KV head."""
    n_masks = len(set(config.windows)) or 1
    masks = n_masks * rows * context * dtype.size_bytes
    if config.attention_soft_cap is None:
        return masks
    scores = config.n_heads // config.n_kv_heads * rows * context
    return masks + scores * (4 + 4 + dtype.size_bytes)


def _kv_position_bytes(config: ModelConfig, dtype: DType) -> int:
    """Keys and values of one position in one layer."""
    return 2 * config.n_kv_heads * config.head_size * dtype.size_bytes


def _bytes(shapes: Iterable[Shape], dtype: DType) -> int:
    return sum(math.prod(shape) for shape in shapes) * dtype.size_bytes
