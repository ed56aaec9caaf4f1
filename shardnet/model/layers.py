"""Leaf layers that families share: norms, rotary positions, attention over a slot's KV cache.

Knows shapes, not parameter names. Must not know wire or scheduling.

Axes in shape comments: T rows of the micro-batch, H query heads, D head size, E hidden size,
P positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from shardnet.errors import CapacityError
from shardnet.model.config import Activation, Rope, RopeKind
from shardnet.model.kernels import MAX_EXACT_ROWS
from shardnet.model.kv_cache import KvCache
from shardnet.types import MicroBatch, SlotId


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """RMSNorm, or LayerNorm where there is a bias: [T, E] in and out, each row by itself."""

    weight: Tensor  # [E]
    bias: Tensor | None
    eps: float

    def __call__(self, hidden: Tensor) -> Tensor:
        """Normalize every row."""
        if self.bias is None:
            return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)
        return F.layer_norm(hidden, self.weight.shape, self.weight, self.bias, self.eps)


def activate(kind: Activation, hidden: Tensor) -> Tensor:
    """Apply the MLP's nonlinearity, elementwise."""
    match kind:
        case Activation.SILU:
            return F.silu(hidden)
        case Activation.GELU:
            return F.gelu(hidden)
        case Activation.GELU_NEW | Activation.GELU_TANH:
            return F.gelu(hidden, approximate="tanh")
        case Activation.RELU:
            return F.relu(hidden)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """Tables of rotary positions: [P, 1, D] each, in the compute dtype.

    `sin` carries the sign that rotating by half a head brings (rotate_half in transformers).
    """

    cos: Tensor
    sin: Tensor

    def at(self, positions: Tensor) -> Rotary:
        """Pick the rows of the [T] positions of a micro-batch: tables of [T, 1, D]."""
        return Rotary(
            cos=self.cos.index_select(0, positions), sin=self.sin.index_select(0, positions)
        )

    def rotate(self, heads: Tensor) -> Tensor:
        """Rotate [T, heads, D] queries or keys by their rows' positions."""
        half = heads.shape[-1] // 2
        return torch.addcmul(heads * self.cos, heads.roll(half, -1), self.sin)


def rotary_tables(
    rope: Rope, head_size: int, context: int, dtype: torch.dtype, device: torch.device
) -> Rotary:
    """Compute the tables for positions `[0, context)`, in float32, then rounded to `dtype`."""
    frequencies = _rotary_frequencies(rope, head_size)  # [D / 2]
    angles = torch.outer(torch.arange(context, dtype=torch.float32), frequencies)  # [P, D / 2]
    cos, sin = angles.cos(), angles.sin()
    return Rotary(
        cos=torch.cat((cos, cos), -1).unsqueeze(1).to(device, dtype),
        sin=torch.cat((-sin, sin), -1).unsqueeze(1).to(device, dtype),
    )


def _rotary_frequencies(rope: Rope, head_size: int) -> Tensor:
    """Rotary frequencies [D / 2] in float32, after transformers' modeling_rope_utils.py."""
    steps = torch.arange(0, head_size, 2, dtype=torch.float32) / head_size
    frequencies = 1.0 / rope.theta**steps
    if rope.kind is RopeKind.DEFAULT:
        return frequencies
    if rope.kind is RopeKind.LINEAR:
        return frequencies / rope.factor
    wavelengths = 2 * math.pi / frequencies
    low = rope.original_max_positions / rope.low_freq_factor
    high = rope.original_max_positions / rope.high_freq_factor
    smooth = (rope.original_max_positions / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    scaled = torch.where(wavelengths > low, frequencies / rope.factor, between)
    return torch.where(wavelengths < high, frequencies, scaled)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The rows `[start, end)` of one group. `mask` is None for rows attended one by one."""

    slot: SlotId
    start: int
    end: int
    position: int
    mask: Tensor | None  # [end - start, position + end - start]: additive, 0 or -inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What all layers of a stage share in one step."""

    token_ids: Tensor  # [T], int64
    positions: Tensor  # [T], int64
    spans: tuple[Span, ...]
    kv: KvCache


def plan_step(batch: MicroBatch, kv: KvCache, context: int, dtype: torch.dtype) -> Step:
    """Make room in the slots and prepare what the layers share.

    Raises CapacityError for a position beyond `context`, and when the KV room is used up.
    """
    spans = []
    positions: list[int] = []
    for group in batch.groups:
        end_position = group.position + group.n_rows
        if end_position > context:
            raise CapacityError(
                f"sequence {group.sequence_id}: position {end_position - 1} lies beyond the "
                f"context of {context}; ask for fewer tokens or a longer --context"
            )
        kv.ensure(group.slot, end_position)
        start = len(positions)
        positions.extend(range(group.position, end_position))
        mask = None
        if group.n_rows > MAX_EXACT_ROWS:
            mask = _chunk_mask(group.n_rows, group.position, dtype, kv.device)
        spans.append(
            Span(
                slot=group.slot, start=start, end=len(positions), position=group.position, mask=mask
            )
        )
    return Step(
        token_ids=torch.tensor(batch.token_ids, dtype=torch.int64, device=kv.device),
        positions=torch.tensor(positions, dtype=torch.int64, device=kv.device),
        spans=tuple(spans),
        kv=kv,
    )


def _chunk_mask(n_rows: int, position: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Row i sees the keys of positions up to `position + i`."""
    mask = torch.full((n_rows, position + n_rows), -math.inf, dtype=dtype, device=device)
    return mask.triu_(position + 1)


def attention(queries: Tensor, keys: Tensor, values: Tensor, layer: int, step: Step) -> Tensor:
    """Store new keys and values in the slots, attend over all of each slot so far.

    `queries` is [T, H, D], `keys` and `values` [T, KV heads, D]; `layer` counts from 0 within the
    stage. Returns [T, H x D]. Groups of at most 32 rows are attended row by row, so that a
    row's bits are those of a decode step, whoever stands beside it; longer ones are prompt chunks.
    """
    n_rows, n_heads, head_size = queries.shape
    out = queries.new_empty(n_rows, n_heads, head_size)  # [T, H, D]
    for span in step.spans:
        cached_keys, cached_values = step.kv.layer(span.slot, layer)  # [KV heads, P, D]
        end_position = span.position + span.end - span.start
        rows = slice(span.start, span.end)
        cached_keys[:, span.position : end_position] = keys[rows].transpose(0, 1)
        cached_values[:, span.position : end_position] = values[rows].transpose(0, 1)
        if span.mask is not None:
            _attend_chunk(
                out[rows],
                queries[rows],
                cached_keys[:, :end_position],
                cached_values[:, :end_position],
                span.mask,
            )
            continue
        for row in range(span.start, span.end):
            seen = span.position + row - span.start + 1
            _attend_row(out[row], queries[row], cached_keys[:, :seen], cached_values[:, :seen])
    return out.view(n_rows, n_heads * head_size)


def _attend_row(out: Tensor, query: Tensor, keys: Tensor, values: Tensor) -> None:
    """Attend one row: [H, D] over [KV heads, P, D]. Heads of a KV group stand as rows."""
    n_kv_heads, _, head_size = keys.shape
    grouped = query.view(1, n_kv_heads, -1, head_size)  # [1, KV heads, H / KV heads, D]
    attended = F.scaled_dot_product_attention(grouped, keys.unsqueeze(0), values.unsqueeze(0))
    out.view_as(grouped).copy_(attended)


def _attend_chunk(out: Tensor, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> None:
    """Attend a prompt chunk: [T, H, D] over [KV heads, P, D]. KV heads stand as a batch."""
    n_rows, _, head_size = queries.shape
    n_kv_heads, n_positions, _ = keys.shape
    grouped = queries.view(n_rows, n_kv_heads, -1, head_size).permute(1, 2, 0, 3)
    spread = (n_kv_heads, grouped.shape[1], n_positions, head_size)  # H / KV heads by stride 0
    attended = F.scaled_dot_product_attention(
        grouped, keys.unsqueeze(1).expand(spread), values.unsqueeze(1).expand(spread), mask
    )  # [KV heads, H / KV heads, T, D]
    out.view(n_rows, n_kv_heads, -1, head_size).copy_(attended.permute(2, 0, 1, 3))
