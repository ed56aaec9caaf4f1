"""Attention over a slot's KV cache: all positions so far, a sliding window of them, or a chunk.

Knows shapes and slots. Must not know parameter names, rotary positions, wire or scheduling.

Axes in shape comments: T rows of the micro-batch, H query heads, D head size, P positions, G query
heads per KV head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TypedDict, Unpack

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from shardnet.errors import CapacityError
from shardnet.model.cache.kv_cache import KvCache
from shardnet.model.cache.picture_rows import PictureRows
from shardnet.model.kernels.linear import MAX_EXACT_ROWS
from shardnet.model.layers.native_attention import AttentionKind, NativeSpans, native_attend
from shardnet.types import MicroBatch, RowGroup, SlotId

PLAIN = AttentionKind()

Choose = Callable[[int, "ForwardStep"], Tensor | None]
"""Says which positions rows attend to in a layer, given by its index within the stage.

int32 [T, n], ascending, -1 behind the last; None is all that they see."""


class ChunkMasks:
    """What the rows of a prompt chunk must not attend to, where torch attends them together.

    One mask for each kind of the layers, made when the first of them needs it.
    """

    def __init__(
        self,
        position: int,
        n_rows: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        see_each_other: bool,
    ) -> None:
        self._rows = position, n_rows
        self._see_each_other = see_each_other
        self._dtype = dtype
        self._device = device
        self._masks: dict[tuple[int, bool], Tensor] = {}

    def of(self, kind: AttentionKind) -> Tensor:
        """Return [T, P] over the keys from the first that any row sees; additive, 0 or -inf."""
        own = kind.reach, self._see_each_other and not kind.is_causal
        if own not in self._masks:
            self._masks[own] = _mask(*self._rows, kind, own[1], self._dtype, self._device)
        return self._masks[own]


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """The rows `[start, end)` of one slot; `position` is the first one's.

    `masks` is None for rows that torch attends one by one. The last `n_drafts` positions up to the
    last row may be rejected. Rows that `see_each_other`, of a picture, attend up to the last one.
    """

    slot: SlotId
    start: int
    end: int
    position: int
    masks: ChunkMasks | None
    n_drafts: int = 0
    see_each_other: bool = False


class ForwardStep(msgspec.Struct, frozen=True, kw_only=True):
    """The inputs of one forward step that all layers of a stage share.

    `experts`, unless None, collects the experts [T, K] that the rows were routed to, by layer,
    counted from 0 within the stage. `native_spans` are `spans` for the compiled library, None on
    devices other than the CPU. `hidden_dtype` is that of the ring where the device computes in a
    wider one. `kept_layers` are the numbers of layers whose last output is looked at. With
    `is_adapted` linears add adapters to rows, which calls that join several linears do not.
    `pictures` are those of the rows, None for none. `choices` are the positions that layers so far
    have chosen: see Choose.
    """

    token_ids: Tensor  # [T], int64
    positions: Tensor  # [T], int64
    spans: tuple[Span, ...]
    kv: KvCache
    experts: dict[int, Tensor] | None = None
    native_spans: NativeSpans | None = None
    hidden_dtype: torch.dtype | None = None
    kept_layers: frozenset[int] = frozenset()
    is_adapted: bool = False
    pictures: PictureRows | None = None
    choices: list[Tensor | None] = msgspec.field(default_factory=list)

    @property
    def rotary_positions(self) -> Tensor:
        """Positions that heads turn by: [T], or [3, T] by time, height and width."""
        axes = None if self.pictures is None else self.pictures.positions
        return self.positions if axes is None else axes

    def after_layer(self, hidden: Tensor) -> Tensor:
        """Round what a layer returns to the ring's dtype: a border between stages rounds no more.

        [T, E] in the compute dtype, in and out.
        """
        if self.hidden_dtype is None:
            return hidden
        return hidden.to(self.hidden_dtype).to(hidden.dtype)

    def record_experts(self, layer: int, experts: Tensor) -> None:
        """Record the experts [T, K] of a layer, if they are collected."""
        if self.experts is not None:
            self.experts[layer] = experts


class StepOptions(TypedDict, total=False):
    """What a step may have beside its rows: fields of ForwardStep."""

    experts: dict[int, Tensor] | None
    hidden_dtype: torch.dtype | None
    kept_layers: frozenset[int]
    is_adapted: bool
    pictures: PictureRows | None
    choices: list[Tensor | None]


def plan_step(
    batch: MicroBatch,
    kv: KvCache,
    context: int,
    dtype: torch.dtype,
    **options: Unpack[StepOptions],
) -> ForwardStep:
    """Grow the slots of `batch` and prepare the inputs that its layers share.

    `context` is the limit of positions per sequence, `dtype` that of the masks. Raises
    CapacityError for a position beyond `context`, and if the KV cache is full.
    """
    for group in batch.groups:
        end_position = group.position + group.n_rows
        if end_position > context:
            raise CapacityError(
                f"sequence {group.sequence_id}: position {end_position - 1} lies beyond the "
                f"context of {context}",
                remedy="ask for fewer tokens or a longer --context",
            )
        kv.ensure(group.slot, end_position, group.n_rows)
    return step_over(batch.groups, batch.token_ids, kv, dtype, **options)


def step_over(
    groups: Sequence[RowGroup],
    token_ids: Sequence[int],
    kv: KvCache,
    dtype: torch.dtype,
    **options: Unpack[StepOptions],
) -> ForwardStep:
    """Prepare a step over rows for which there is room in their slots; arguments as `plan_step`."""
    spans = []
    positions: list[int] = []
    pictures = options.get("pictures")
    for group in groups:
        start = len(positions)
        positions.extend(range(group.position, group.position + group.n_rows))
        blocks = () if pictures is None else pictures.blocks
        for first, end, see_each_other in _parts(start, len(positions), blocks):
            position, masks = positions[first], None
            if end - first > MAX_EXACT_ROWS:
                masks = ChunkMasks(
                    position, end - first, dtype, kv.device, see_each_other=see_each_other
                )
            spans.append(
                Span(
                    slot=group.slot,
                    start=first,
                    end=end,
                    position=position,
                    masks=masks,
                    n_drafts=max(0, group.n_drafts - (len(positions) - end)),
                    see_each_other=see_each_other,
                )
            )
    return ForwardStep(
        token_ids=torch.tensor(token_ids, dtype=torch.int64, device=kv.device),
        positions=torch.tensor(positions, dtype=torch.int64, device=kv.device),
        spans=tuple(spans),
        kv=kv,
        native_spans=_native_spans(spans, kv),
        **options,
    )


def _parts(
    start: int, end: int, blocks: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, int, bool]]:
    """Cut rows [start, end) at the `blocks` among them; say of each part whether it is one."""
    for block in blocks:
        if start <= block[0] < end:
            if start < block[0]:
                yield start, block[0], False
            yield *block, True
            start = block[1]
    if start < end:
        yield start, end, False


def _native_spans(spans: Sequence[Span], kv: KvCache) -> NativeSpans | None:
    if kv.device.type != "cpu":
        return None
    return NativeSpans([(s.slot, s.start, s.end, s.position, s.see_each_other) for s in spans], kv)


def _mask(
    position: int,
    n_rows: int,
    kind: AttentionKind,
    see_each_other: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Mask the keys that row i, at `position + i`, must not attend to."""
    first = kind.first(position)
    own = position - first  # index of the first row's own key
    shape = (n_rows, own + n_rows)
    mask = torch.full(shape, -math.inf, dtype=dtype, device=device)
    mask = mask.zero_() if see_each_other else mask.triu_(own + 1)
    if kind.window is not None:
        begins = [kind.first(position + row) - first for row in range(n_rows)]
        keys = torch.arange(shape[1], device=device)
        mask.masked_fill_(keys < torch.tensor(begins, device=device)[:, None], -math.inf)
    return mask


def attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    layer: int,
    step: ForwardStep,
    kind: AttentionKind = PLAIN,
    choose: Choose | None = None,
) -> Tensor:
    """Store new keys and values in the slots, then attend over each row's slot.

    `queries` is [T, H, D], `keys` and `values` [T, KV heads, D], in the KV cache's dtype and on its
    device; `layer` counts from 0 within the stage. Values may have other columns; those of 0 are
    read from the keys, and of a kind with a `value_size` the first ones are. Rows attend to the
    positions that `choose` says, once keys and values are
    stored. Returns [T, H x value columns].

    The compiled library gives a row the same bits in any batch and chunk. Torch attends groups of
    at most 32 rows row by row, so that a row's bits are those of a decode step; longer groups are
    prompt chunks.
    """
    n_rows, n_heads, head_size = queries.shape
    n_read = 0 if kind.has_index else kind.value_size or values.shape[-1]
    kv, widths = step.kv, (keys.shape[-1], n_read)
    store_rows(keys, values, layer, step)
    chosen = None if choose is None else choose(layer, step)
    if step.native_spans is not None:
        native = native_attend(
            queries, keys.shape[1], widths[1], layer, step.native_spans, kv, kind, chosen
        )
        if native is not None:
            return native
    grouped = queries.view(n_rows, 1, keys.shape[1], -1, head_size).unbind(0)  # [1, KV heads, G, D]
    parts: list[Tensor] = []
    for span in step.spans:
        parts += _attend_span(grouped, span, _seen(step, span, layer, kind, widths), kind, chosen)
    whole = torch.cat(parts) if len(parts) > 1 else parts[0]  # [T, KV heads, G, D]
    return whole.reshape(n_rows, n_heads * (widths[1] or head_size))


def _seen(
    step: ForwardStep, span: Span, layer: int, kind: AttentionKind, widths: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Return the keys and values [KV heads, P, D] that the rows of a span attend to.

    They are views of the slot, or dequantised copies for the duration of this call.
    """
    kv = step.kv
    slot = kv.layer(span.slot, layer)
    first = kind.first(span.position)
    n_seen = span.position + span.end - span.start - first
    first -= kv.first(span.slot, layer)
    keys = kv.dequantize(slot[0].narrow(1, first, n_seen), widths[0])
    if widths[1] == 0:
        return keys, keys
    values = kv.dequantize(slot[1].narrow(1, first, n_seen), kv.value_columns(layer))
    return keys, values[..., : widths[1]]


def store_rows(keys: Tensor, values: Tensor, layer: int, step: ForwardStep) -> None:
    """Write the rows' keys and values, [T, KV heads, D], to their slots, in a layer of the stage.

    In one operator: with many sequences, one call per row costs more than the copy itself.
    """
    keys, values = step.kv.quantize(keys), step.kv.quantize(values)
    targets: list[Tensor] = []
    parts: list[Tensor] = []
    key_rows, value_rows = keys.unbind(0), values.unbind(0)
    for span in step.spans:
        (slot_keys, slot_values), first = step.kv.own(span.slot, layer)  # [KV heads, P, W] each
        start, n_rows, position = span.start, span.end - span.start, span.position - first
        if n_rows == 1:
            targets += (slot_keys.select(1, position), slot_values.select(1, position))
            parts += (key_rows[start], value_rows[start])
            continue
        for new, slot in ((keys, slot_keys), (values, slot_values)):
            targets.append(slot.narrow(1, position, n_rows))
            parts.append(new.narrow(0, start, n_rows).transpose(0, 1))
    torch._foreach_copy_(targets, parts)


def _attend_span(
    grouped: Sequence[Tensor],
    span: Span,
    seen: tuple[Tensor, Tensor],
    kind: AttentionKind,
    chosen: Tensor | None,
) -> list[Tensor]:
    """Attend the rows of a span, together or one by one.

    `grouped` are queries [1, KV heads, G, D] of all rows, `seen` keys and values [KV heads, P, D];
    the last key seen is the last row's own. With `chosen` rows attend to those positions, which are
    counted from the first that is seen. Returns [rows, KV heads, G, D] tensors.
    """
    if chosen is not None:
        parts = []
        for row in range(span.start, span.end):
            own = chosen[row][chosen[row] >= 0]
            own_keys, own_values = (part.index_select(1, own)[None] for part in seen)
            parts.append(attend_row(grouped[row], own_keys, own_values, kind))
        return parts
    if span.masks is not None:
        own = torch.cat(list(grouped[span.start : span.end]))
        return [_attend_chunk(own, *seen, span.masks.of(kind), kind)]
    keys, values = seen[0].unsqueeze(0), seen[1].unsqueeze(0)  # [1, KV heads, P, D]
    if span.end - span.start == 1:
        return [attend_row(grouped[span.start], keys, values, kind)]
    parts = []
    for row in range(span.start, span.end):
        end = keys.shape[2] - (span.end - row) + 1
        first = kind.first(span.position + row - span.start) - kind.first(span.position)
        end = keys.shape[2] if span.see_each_other and not kind.is_causal else end
        own_keys = keys.narrow(2, first, end - first)
        own_values = values.narrow(2, first, end - first)
        parts.append(attend_row(grouped[row], own_keys, own_values, kind))
    return parts


def attend_row(query: Tensor, keys: Tensor, values: Tensor, kind: AttentionKind) -> Tensor:
    """Attend one row: [1, KV heads, G, D] over [1, KV heads, P, D]; G takes the place of rows."""
    if kind.is_plain:
        return F.scaled_dot_product_attention(query, keys, values, scale=kind.scale)
    return _attend_unfused(query, keys, values, None, kind, kind.sinks)


def _attend_chunk(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, kind: AttentionKind
) -> Tensor:
    """Attend a prompt chunk: [T, KV heads, G, D] over [KV heads, P, D]; KV heads are the batch."""
    grouped = queries.permute(1, 2, 0, 3)
    if kind.is_plain:
        spread = (-1, grouped.shape[1], -1, -1)  # G by stride 0
        attended = F.scaled_dot_product_attention(
            grouped,
            keys.unsqueeze(1).expand(spread),
            values.unsqueeze(1).expand(spread),
            mask,
            scale=kind.scale,
        )  # [KV heads, G, T, D]
    else:
        attended = grouped.new_empty(*grouped.shape[:-1], values.shape[-1])
        for head, rows in enumerate(grouped):  # one at a time, to bound the memory of scores
            sinks = None if kind.sinks is None else kind.sinks[head, :, None]  # [G, 1, 1]
            attended[head] = _attend_unfused(rows, keys[head], values[head], mask, kind, sinks)
    return attended.permute(2, 0, 1, 3)


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
