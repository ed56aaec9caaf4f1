"""Attention over slots by the compiled library: the same bits in any batch and chunk.

Knows the struct of csrc/sublayers.c and how slots store keys and values. Must not know layers,
parameter names or scheduling.

Axes in shape comments: T rows of the micro-batch, H query heads, D head size.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from shardnet.model.cache.kv_cache import KvCache
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.kernels.library import Team, check_memory, fields, is_bf16, native_kernels
from shardnet.types import SlotId, kv_groups

MAX_HEAD: Final = 576
"""The most columns of a query that the library attends with: DeepSeek's latents."""
CHUNK: Final = 1024
CHOSEN_ROWS: Final = 16
CHUNKS: Final = 1 << 31
"""As in csrc/sublayers.h."""


class AttendStruct(ctypes.Structure):
    """`struct attend` of csrc/sublayers.c."""

    _fields_ = (
        *fields(ctypes.c_void_p, "queries", "attended", "sinks", "spans"),
        *fields(ctypes.c_int64, "n_spans", "layer", "row_stride", "n_heads", "n_kv_heads"),
        *fields(ctypes.c_int64, "head_size", "value_size", "row_bytes", "value_bytes"),
        *fields(ctypes.c_int64, "key_columns", "value_columns", "window", "group"),
        ("team", Team),
        *fields(ctypes.c_float, "scale", "soft_cap"),
        *fields(ctypes.c_int32, "is_bf16", "kv_is_bf16", "values_are_keys", "is_causal"),
    )


class ChoiceStruct(ctypes.Structure):
    """`struct choice` of csrc/sublayers.h."""

    _fields_ = (
        *fields(AttendStruct, "index", "attend"),
        *fields(ctypes.c_void_p, "weights", "chosen", "scores", "keys", "values"),
        *fields(ctypes.c_int64, "n_rows", "n_chosen", "n_pooled", "stride", "first_row"),
        *(("end_row", ctypes.c_int64), ("blocks", ctypes.c_void_p)),
        *fields(ctypes.c_int64, "n_blocks", "block_size", "makes_blocks"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Blocks of `size` entries each that rows look at further: `numbers`, int32 [T, N].

    They ascend, with -1 behind the last; all are -1 where a row sees no more. What `are_new` are
    written by the choice: those with the best entries, and the last that a row sees.
    """

    numbers: Tensor
    size: int
    are_new: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Entries:
    """What rows choose among of each span: entries of `n_pooled` positions, of which they see all.

    `keys` [N, D] are contiguous but for what may stand between them. With `blocks` rows choose
    among the entries of theirs.
    """

    keys: Sequence[Tensor]
    n_pooled: int
    blocks: Blocks | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionKind:
    """The variant of attention of one layer.

    `window`: how many positions a row attends to, itself included; None is all. Where they
    `are_chunks` it attends to those from the first of its own chunk on. `scale` multiplies the
    scores, None is 1 / sqrt(D). `soft_cap` c turns a score x into c * tanh(x / c). `sinks` are
    extra scores without a value, one for each head: they take part in the softmax only. Where it
    `is_causal` rows of a picture do not see each other, whatever the model's other layers do. With
    `has_index` values are read from the keys, and those in the slots are what an index has. With a
    `value_size` values in the slots have more columns, behind those that attention reads.
    """

    window: int | None = None
    are_chunks: bool = False
    scale: float | None = None
    soft_cap: float | None = None
    sinks: Tensor | None = None  # [KV heads, G, 1], float32
    is_causal: bool = False
    has_index: bool = False
    value_size: int | None = None

    @property
    def is_plain(self) -> bool:
        """Whether torch's fused kernel supports it: no soft cap, no sinks."""
        return self.soft_cap is None and self.sinks is None

    @property
    def reach(self) -> int:
        """The window as the library and the kernel text take it."""
        return 0 if self.window is None else self.window + CHUNKS * self.are_chunks

    def first(self, position: int) -> int:
        """Return the first position that a row attends to."""
        if self.window is None:
            return 0
        if self.are_chunks:
            return position - position % self.window
        return max(0, position - self.window + 1)

    @classmethod
    def of(cls, config: ModelConfig, layer: int) -> AttentionKind:
        """Read the variant of the absolute `layer` from the config."""
        return cls(
            window=config.window(layer),
            are_chunks=config.has_chunks,
            scale=config.attention_scale,
            soft_cap=config.attention_soft_cap,
        )


class NativeSpans:
    """The rows of each slot in a step as the library reads them, `struct span`."""

    def __init__(self, rows: Sequence[tuple[SlotId, int, int, int, bool]], kv: KvCache) -> None:
        """Make the table of spans.

        Each is slot, first row, end, the first row's position, and whether they see each other.
        """
        slots = tuple(kv.addresses(slot) for slot, *_ in rows)
        table = [(slot.ctypes.data, *row[1:]) for slot, row in zip(slots, rows, strict=True)]
        numbers = np.array(table, np.int64)
        self.spans = numbers  # [spans, 5]
        self.slots = slots
        """The tables that `spans` points to: see KvCache.addresses."""
        self.address = numbers.ctypes.data
        """Address of `spans`, valid as long as this object lives."""
        self.n_rows = rows[-1][2]


def attend_struct(
    kind: AttentionKind, n_heads: int, n_kv_heads: int, head_size: int, value_size: int
) -> AttendStruct:
    """Set the fields that are the same in every call. Values of 0 columns are read from the keys.

    `kind` must outlive the struct, which points to its sinks. Raises ValueError for other sinks
    than one for each head.
    """
    sinks = kind.sinks
    if sinks is not None:
        check_memory("the sinks", sinks, n_heads * 4, torch.float32)
    return AttendStruct(
        sinks=None if sinks is None else sinks.data_ptr(),
        row_stride=n_heads * head_size,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_size=head_size,
        value_size=value_size or head_size,
        values_are_keys=value_size == 0,
        window=kind.reach,
        scale=head_size**-0.5 if kind.scale is None else kind.scale,
        soft_cap=kind.soft_cap or 0.0,
        is_causal=kind.is_causal,
    )


def bind_slots(struct: AttendStruct, spans: NativeSpans, layer: int, kv: KvCache) -> bool:
    """Point to the slots of a step. Returns False if the library cannot read how they are stored.

    Raises ValueError if the slots have no such layer.
    """
    if layer >= len(spans.slots[0]):
        raise ValueError(f"layer {layer} is not among those of the step's slots")
    keys = _stored_row(struct.head_size, kv)
    own = struct.value_size if struct.values_are_keys else kv.value_columns(layer)
    values = _stored_row(own, kv)
    if keys.group != values.group:
        return False
    struct.group, struct.row_bytes, struct.value_bytes = keys.group, keys.n_bytes, values.n_bytes
    struct.key_columns, struct.value_columns = keys.n_columns, values.n_columns
    struct.kv_is_bf16 = kv.stored_dtype is torch.bfloat16
    struct.spans = spans.address
    struct.n_spans = len(spans.slots)
    struct.layer = layer
    return True


def can_attend(head_size: int, kv: KvCache, value_size: int = 0) -> bool:
    """Say whether the library attends with heads of `head_size` columns over these slots.

    Values have `value_size` columns, 0 where they are read from the keys or have as many.
    """
    is_computed = kv.dtype in (torch.float32, torch.bfloat16) and kv.device.type == "cpu"
    is_head = head_size <= MAX_HEAD and head_size % 2 == 0
    if value_size and _stored_row(head_size, kv).group != _stored_row(value_size, kv).group:
        return False
    return is_computed and is_head and native_kernels() is not None


def native_attend(
    queries: Tensor,
    n_kv_heads: int,
    value_size: int,
    layer: int,
    spans: NativeSpans,
    kv: KvCache,
    kind: AttentionKind,
    chosen: Tensor | None = None,
) -> Tensor | None:
    """Attend with queries [T, H, D] over slots that hold the keys and values of all T rows.

    Each slot has `n_kv_heads` in the layer. Values of `value_size` 0 are read from the keys.
    Rows attend to the `chosen` positions, int32 [T, n], as native_choose gives them, None for all.
    Returns [T, H x value columns], or None if the library is not there or cannot: other devices and
    dtypes, larger heads.
    """
    kernels, rows = native_kernels(), queries.contiguous()
    struct = _bound(rows, n_kv_heads, value_size, layer, spans, kv, kind)
    if kernels is None or struct is None:
        return None
    attended = rows.new_empty(len(rows), rows.shape[1] * struct.value_size)
    struct.attended = attended.data_ptr()
    if chosen is None:
        kernels.function("shardnet_attend", ctypes.POINTER(AttendStruct))(struct)
        return attended
    n_chosen = chosen.shape[1]
    n_copied = min(len(rows), CHOSEN_ROWS) * n_kv_heads * n_chosen
    keys = torch.empty(n_copied * struct.row_bytes, dtype=torch.uint8)
    values = keys.new_empty(0 if struct.values_are_keys else n_copied * struct.value_bytes)
    choice = ChoiceStruct(attend=struct, n_rows=len(rows), n_chosen=n_chosen, n_pooled=1)
    choice.chosen, choice.keys = chosen.data_ptr(), keys.data_ptr()
    choice.values = keys.data_ptr() if struct.values_are_keys else values.data_ptr()
    kernels.function("shardnet_attend_chosen", ctypes.POINTER(ChoiceStruct))(choice)
    return attended


def native_attend_rows(
    queries: Tensor, rows: Tensor, counts: Sequence[int], kv: KvCache, kind: AttentionKind
) -> Tensor | None:
    """Attend with queries [T, H, D] to rows of their own [T, P, D], keys that are values too.

    Each attends to the first so many of `counts`. Returns [T, H x D], or None as `native_attend`.
    """
    kernels, n_rows = native_kernels(), len(rows)
    is_computed = can_attend(queries.shape[2], kv) and rows.dtype is queries.dtype is kv.dtype
    if kernels is None or not is_computed:
        return None
    queries = queries.contiguous()
    attended = queries.new_empty(n_rows, queries[0].numel())
    places = np.zeros((n_rows, 5), np.int64)
    places[:, 0] = rows.data_ptr() + np.arange(n_rows) * rows.stride(0) * rows.element_size()
    places[:, 3] = rows.shape[1]
    spans = np.zeros((n_rows, 5), np.int64)
    spans[:, 0] = places.ctypes.data + np.arange(n_rows) * places.strides[0]
    spans[:, 1], spans[:, 2] = np.arange(n_rows), np.arange(1, n_rows + 1)
    spans[:, 3] = np.array(counts) - 1
    struct = attend_struct(kind, queries.shape[1], 1, queries.shape[2], 0)
    struct.queries, struct.attended = queries.data_ptr(), attended.data_ptr()
    struct.spans, struct.n_spans = spans.ctypes.data, n_rows
    struct.row_bytes = struct.value_bytes = rows.shape[2] * rows.element_size()
    struct.key_columns = struct.value_columns = rows.shape[2]
    struct.is_bf16 = struct.kv_is_bf16 = is_bf16(rows)
    struct.team = kernels.team
    struct.team.n_threads = torch.get_num_threads()
    kernels.function("shardnet_attend", ctypes.POINTER(AttendStruct))(struct)
    return attended


def native_choose(
    queries: Tensor,
    weights: Tensor,
    n_chosen: int,
    layer: int,
    spans: NativeSpans,
    kv: KvCache,
    entries: Entries | None = None,
) -> Tensor | None:
    """Choose the positions that score highest: int32 [T, n_chosen], ascending, -1 behind the last.

    A score is the sum over heads of `weights`, float32 [T, H], times what is above 0 of `queries`
    [T, H, D] times the key that the slot has of a position among its values. Of equal scores the
    first positions are chosen. None as `native_attend`.

    With `entries` those of each span are chosen instead.
    """
    kernels, rows, kind = native_kernels(), queries.contiguous(), AttentionKind(scale=1.0)
    struct = _bound(rows, 1, 0, layer, spans, kv, kind)
    if kernels is None or struct is None:
        return None
    check_memory("the weights of an index", weights, 4 * len(rows) * rows.shape[1], torch.float32)
    n_pooled = 1 if entries is None else entries.n_pooled
    keys = [] if entries is None else entries.keys
    places = np.zeros((len(keys), 5), np.int64)
    table = spans.spans.copy()
    if keys:
        places[:, 1] = [own.data_ptr() for own in keys]
        places[:, 3] = [len(own) for own in keys]
        table[:, 0] = places.ctypes.data + places.strides[0] * np.arange(len(keys))
        struct.spans, struct.layer, struct.group = table.ctypes.data, 0, 0
        struct.row_bytes = keys[0].stride(0) * keys[0].element_size()
        struct.kv_is_bf16 = keys[0].dtype is torch.bfloat16
    chosen = torch.empty(len(rows), n_chosen, dtype=torch.int32)
    most = max(position + end - start for _, start, end, position, _ in spans.spans)
    stride = -(-max(1, int(most) // n_pooled) // CHUNK) * CHUNK
    scores = torch.empty(min(len(rows), CHOSEN_ROWS), stride)
    choice = ChoiceStruct(
        index=struct, attend=struct, n_rows=len(rows), n_chosen=n_chosen, n_pooled=n_pooled
    )
    choice.weights, choice.chosen = weights.data_ptr(), chosen.data_ptr()
    choice.scores, choice.stride = scores.data_ptr(), stride
    if entries is not None and (blocks := entries.blocks) is not None:
        check_memory("blocks of entries", blocks.numbers, 4 * blocks.numbers.numel(), torch.int32)
        choice.blocks, choice.n_blocks = blocks.numbers.data_ptr(), blocks.numbers.shape[1]
        choice.block_size, choice.makes_blocks = blocks.size, blocks.are_new
    kernels.function("shardnet_choose", ctypes.POINTER(ChoiceStruct))(choice)
    return chosen


def _bound(
    rows: Tensor,
    n_kv_heads: int,
    value_size: int,
    layer: int,
    spans: NativeSpans,
    kv: KvCache,
    kind: AttentionKind,
) -> AttendStruct | None:
    """Make the struct of a call with queries [T, H, D], None where the library cannot."""
    kernels = native_kernels()
    n_rows, n_heads, head_size = rows.shape
    if kernels is None or not can_attend(head_size, kv) or kv.dtype is not rows.dtype:
        return None
    struct = attend_struct(kind, n_heads, n_kv_heads, head_size, value_size)
    if n_rows != spans.n_rows or not bind_slots(struct, spans, layer, kv):
        return None
    struct.queries = rows.data_ptr()
    struct.is_bf16 = is_bf16(rows)
    struct.team = kernels.team
    struct.team.n_threads = torch.get_num_threads()
    return struct


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoredRow:
    """A key or value in a slot: its bytes and columns, and how many columns share a scale.

    Where rows are not quantised `group` is 0.
    """

    n_bytes: int
    n_columns: int
    group: int


def _stored_row(size: int, kv: KvCache) -> _StoredRow:
    """Describe rows of `size` columns in the slots."""
    if not kv.is_quantized:
        return _StoredRow(n_bytes=size * kv.stored_dtype.itemsize, n_columns=size, group=0)
    n_groups, group = kv_groups(size)
    n_columns = n_groups * group
    n_bytes = n_columns + n_groups * torch.bfloat16.itemsize
    return _StoredRow(n_bytes=n_bytes, n_columns=n_columns, group=group)
