"""Attention over a slot's KV cache: all positions so far, or a sliding window of them.

Knows shapes and slots. Must not know parameter names, rotary positions, wire or scheduling.

Axes in shape comments: T rows of the micro-batch, H query heads, D head size, P positions, G query
heads per KV head.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from shardnet.errors import CapacityError
from shardnet.model.cache.kv_cache import KvCache, SlotAddresses
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.kernels.linear import MAX_EXACT_ROWS
from shardnet.types import MicroBatch, RowGroup, SlotId


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionKind:
    """The variant of attention of one layer.

    `window`: how many positions a row attends to, itself included; None is all. `scale` multiplies
    the scores, None is 1 / sqrt(D). `soft_cap` c turns a score x into c * tanh(x / c). `sinks` are
    extra scores without a value, one for each head: they take part in the softmax only.
    """

    window: int | None = None
    scale: float | None = None
    soft_cap: float | None = None
    sinks: Tensor | None = None  # [KV heads, G, 1], float32

    @property
    def is_plain(self) -> bool:
        """Whether torch's fused kernel supports it: no soft cap, no sinks."""
        return self.soft_cap is None and self.sinks is None

    @classmethod
    def of(cls, config: ModelConfig, layer: int) -> AttentionKind:
        """Read the variant of the absolute `layer` from the config."""
        return cls(
            window=config.window(layer),
            scale=config.attention_scale,
            soft_cap=config.attention_soft_cap,
        )


PLAIN = AttentionKind()


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The rows `[start, end)` of one slot; `position` is the first one's.

    `masks` is None for rows attended one by one, else one mask for each window of the stage's
    layers: [T, P] over the keys from the first that any row sees, additive, 0 or -inf.
    """

    slot: SlotId
    start: int
    end: int
    position: int
    masks: Mapping[int | None, Tensor] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeSpans:
    """Spans as the compiled library reads them, `struct span` of csrc/sublayers.c."""

    spans: npt.NDArray[np.int64]  # [spans, 5]
    slots: tuple[SlotAddresses, ...]
    """The tables that `spans` points to: see KvCache.addresses."""
    address: int
    """Address of `spans`, valid as long as this object lives."""
    has_chunks: bool

    @classmethod
    def of(cls, spans: Sequence[Span], kv: KvCache) -> NativeSpans:
        """Make the table of the spans' rows and slots."""
        slots = tuple(kv.addresses(span.slot) for span in spans)
        table = [
            (slot.ctypes.data, span.start, span.end, span.position, span.masks is not None)
            for span, slot in zip(spans, slots, strict=True)
        ]
        numbers = np.array(table, np.int64)
        return cls(
            spans=numbers,
            slots=slots,
            address=numbers.ctypes.data,
            has_chunks=any(span.masks is not None for span in spans),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardStep:
    """The inputs of one forward step that all layers of a stage share.

    `experts`, unless None, collects the experts [T, K] that the rows were routed to, by layer,
    counted from 0 within the stage. `native_spans` are `spans` for the compiled library, None on
    devices other than the CPU.
    """

    token_ids: Tensor  # [T], int64
    positions: Tensor  # [T], int64
    spans: tuple[Span, ...]
    kv: KvCache
    experts: dict[int, Tensor] | None = None
    native_spans: NativeSpans | None = None

    def record_experts(self, layer: int, experts: Tensor) -> None:
        """Record the experts [T, K] of a layer, if they are collected."""
        if self.experts is not None:
            self.experts[layer] = experts


def plan_step(
    batch: MicroBatch,
    kv: KvCache,
    context: int,
    dtype: torch.dtype,
    windows: Iterable[int | None] = (None,),
    experts: dict[int, Tensor] | None = None,
) -> ForwardStep:
    """Grow the slots of `batch` and prepare the inputs that its layers share.

    `context` is the limit of positions per sequence, `dtype` that of the masks, `windows` the
    distinct windows of the layers, `experts` as in ForwardStep. Raises CapacityError for a position
    beyond `context`, and if the KV cache is full.
    """
    spans = []
    positions: list[int] = []
    for group in batch.groups:
        end_position = group.position + group.n_rows
        if end_position > context:
            raise CapacityError(
                f"sequence {group.sequence_id}: position {end_position - 1} lies beyond the "
                f"context of {context}",
                remedy="ask for fewer tokens or a longer --context",
            )
        kv.ensure(group.slot, end_position, group.n_rows)
        start = len(positions)
        positions.extend(range(group.position, end_position))
        masks = None
        if group.n_rows > MAX_EXACT_ROWS:
            masks = {window: _mask(group, window, dtype, kv.device) for window in windows}
        spans.append(
            Span(
                slot=group.slot,
                start=start,
                end=len(positions),
                position=group.position,
                masks=masks,
            )
        )
    return ForwardStep(
        token_ids=torch.tensor(batch.token_ids, dtype=torch.int64, device=kv.device),
        positions=torch.tensor(positions, dtype=torch.int64, device=kv.device),
        spans=tuple(spans),
        kv=kv,
        experts=experts,
        native_spans=NativeSpans.of(spans, kv) if kv.device.type == "cpu" else None,
    )


def _mask(group: RowGroup, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Mask the keys that row i, at `position + i`, must not attend to."""
    first = 0 if window is None else max(0, group.position - window + 1)
    own = group.position - first  # index of the first row's own key
    shape = (group.n_rows, own + group.n_rows)
    mask = torch.full(shape, -math.inf, dtype=dtype, device=device).triu_(own + 1)
    if window is not None:
        unseen = torch.ones(shape, dtype=torch.bool, device=device).tril_(own - window)
        mask.masked_fill_(unseen, -math.inf)
    return mask


def attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    layer: int,
    step: ForwardStep,
    kind: AttentionKind = PLAIN,
) -> Tensor:
    """Store new keys and values in the slots, then attend over each row's slot.

    `queries` is [T, H, D], `keys` and `values` [T, KV heads, D], in the KV cache's dtype and on its
    device; `layer` counts from 0 within the stage. Values of 0 columns are read from the keys.
    Returns [T, H x D].

    Groups of at most 32 rows are attended row by row, so that a row's bits are those of a decode
    step in any batch; longer groups are prompt chunks.
    """
    n_rows, n_heads, head_size = queries.shape
    kv, widths = step.kv, (keys.shape[-1], values.shape[-1])
    slots = [kv.layer(span.slot, layer) for span in step.spans]  # [KV heads, P, W] each
    firsts = [kv.first(span.slot, layer) for span in step.spans]  # their first positions
    _store(kv.quantize(keys), kv.quantize(values), slots, firsts, step.spans)
    grouped = queries.view(n_rows, 1, keys.shape[1], -1, head_size).unbind(0)  # [1, KV heads, G, D]
    parts: list[Tensor] = []
    for span in step.spans:
        if span.masks is None:
            parts += _attend_rows(grouped, span, _seen(step, span, layer, kind, widths), kind)
        else:
            own = queries[span.start : span.end]
            attended = attend_chunk(own, span, layer, step, kind, widths)
            parts.append(attended.view(-1, *grouped[0].shape[1:]))
    whole = torch.cat(parts) if len(parts) > 1 else parts[0]  # [T, KV heads, G, D]
    return whole.reshape(n_rows, n_heads * head_size)


def attend_chunk(
    queries: Tensor,
    span: Span,
    layer: int,
    step: ForwardStep,
    kind: AttentionKind,
    widths: tuple[int, int],
) -> Tensor:
    """Attend a prompt chunk over its slot, which already holds the chunk's keys and values.

    `queries` are those of the span, [T, H, D], `widths` the columns of keys and values. Returns
    [T, H, D].
    """
    assert span.masks is not None, "a span without masks is attended row by row"
    seen = _seen(step, span, layer, kind, widths)
    return _attend_chunk(queries, *seen, span.masks[kind.window], kind)


def _seen(
    step: ForwardStep, span: Span, layer: int, kind: AttentionKind, widths: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Return the keys and values [KV heads, P, D] that the rows of a span attend to.

    They are views of the slot, or dequantised copies for the duration of this call.
    """
    kv = step.kv
    slot = kv.layer(span.slot, layer)
    position = span.position - kv.first(span.slot, layer)
    first = 0 if kind.window is None else max(0, position - kind.window + 1)
    n_seen = position + span.end - span.start - first
    keys = kv.dequantize(slot[0].narrow(1, first, n_seen), widths[0])
    if widths[1] == 0:
        return keys, keys
    return keys, kv.dequantize(slot[1].narrow(1, first, n_seen), widths[1])


def _store(
    keys: Tensor,
    values: Tensor,
    slots: Sequence[tuple[Tensor, Tensor]],
    firsts: Sequence[int],
    spans: Sequence[Span],
) -> None:
    """Write the rows' keys and values, [T, KV heads, W], to their slots.

    In one operator: with many sequences, one call per row costs more than the copy itself.
    """
    targets: list[Tensor] = []
    parts: list[Tensor] = []
    key_rows, value_rows = keys.unbind(0), values.unbind(0)
    for (slot_keys, slot_values), first, span in zip(slots, firsts, spans, strict=True):
        start, n_rows, position = span.start, span.end - span.start, span.position - first
        if n_rows == 1:
            targets += (slot_keys.select(1, position), slot_values.select(1, position))
            parts += (key_rows[start], value_rows[start])
            continue
        for new, slot in ((keys, slot_keys), (values, slot_values)):
            targets.append(slot.narrow(1, position, n_rows))
            parts.append(new.narrow(0, start, n_rows).transpose(0, 1))
    torch._foreach_copy_(targets, parts)


def _attend_rows(
    grouped: Sequence[Tensor], span: Span, seen: tuple[Tensor, Tensor], kind: AttentionKind
) -> list[Tensor]:
    """Attend the rows of a span one by one; the last key seen is the last row's own."""
    keys, values = seen[0].unsqueeze(0), seen[1].unsqueeze(0)  # [1, KV heads, P, D]
    if span.end - span.start == 1:
        return [_attend_row(grouped[span.start], keys, values, kind)]
    parts = []
    for row in range(span.start, span.end):
        end = keys.shape[2] - (span.end - row) + 1
        first = 0 if kind.window is None else max(0, end - kind.window)
        own = (keys.narrow(2, first, end - first), values.narrow(2, first, end - first))
        parts.append(_attend_row(grouped[row], *own, kind))
    return parts


def _attend_row(query: Tensor, keys: Tensor, values: Tensor, kind: AttentionKind) -> Tensor:
    """Attend one row: [1, KV heads, G, D] over [1, KV heads, P, D]; G takes the place of rows."""
    if kind.is_plain:
        return F.scaled_dot_product_attention(query, keys, values, scale=kind.scale)
    return _attend_unfused(query, keys, values, None, kind, kind.sinks)


def _attend_chunk(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, kind: AttentionKind
) -> Tensor:
    """Attend a prompt chunk: [T, H, D] over [KV heads, P, D]; KV heads are the batch axis."""
    n_rows, n_heads, head_size = queries.shape
    n_kv_heads, n_positions, _ = keys.shape
    grouped = queries.view(n_rows, n_kv_heads, -1, head_size).permute(1, 2, 0, 3)
    if kind.is_plain:
        spread = (n_kv_heads, grouped.shape[1], n_positions, head_size)  # G by stride 0
        attended = F.scaled_dot_product_attention(
            grouped,
            keys.unsqueeze(1).expand(spread),
            values.unsqueeze(1).expand(spread),
            mask,
            scale=kind.scale,
        )  # [KV heads, G, T, D]
    else:
        attended = torch.empty_like(grouped)
        for head, rows in enumerate(grouped):  # one at a time, to bound the memory of scores
            sinks = None if kind.sinks is None else kind.sinks[head, :, None]  # [G, 1, 1]
            attended[head] = _attend_unfused(rows, keys[head], values[head], mask, kind, sinks)
    return attended.permute(2, 0, 1, 3).reshape(n_rows, n_heads, head_size)


def _attend_unfused(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    kind: AttentionKind,
    sinks: Tensor | None,
) -> Tensor:
    """Attend with capped scores or with sinks; scores and softmax are float32.

    [..., T, D] over [..., P, D]; `sinks` are broadcast to [..., T, 1].
    """
    scale = queries.shape[-1] ** -0.5 if kind.scale is None else kind.scale
    scores = (queries @ keys.transpose(-2, -1)).float()  # [..., T, P]
    if kind.soft_cap is None:
        scores.mul_(scale)
    else:
        scores.mul_(scale / kind.soft_cap).tanh_().mul_(kind.soft_cap)
    if mask is not None:
        scores += mask
    if sinks is not None:
        scores = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), -1)
    probabilities = scores.softmax(-1).to(queries.dtype)
    return (probabilities if sinks is None else probabilities[..., :-1]) @ values
