"""The library adds attention up in the order of docs/exactness.md, on every instruction set."""

from __future__ import annotations

import pytest
import torch
from support.oracles.attention_in_blocks import attended
from support.rings.stage_chain import Rows, batch_of

from shardnet.model.cache.kv_cache import KvCache
from shardnet.model.cache.kv_quantization import dequantize_rows
from shardnet.model.kernels.library import ISA_VARIABLE, find_kernels
from shardnet.model.layers import native_attention
from shardnet.model.layers.attention import plan_step
from shardnet.model.layers.native_attention import AttentionKind, native_attend
from shardnet.types import KvDType, SlotId

ISAS = ("portable", "avx2", "avx512", "neon")
SINKS = torch.tensor([0.5, -1.0, 3.0, 0.0, 9.0, 1.0])
KINDS = {
    "plain": AttentionKind(),
    "window": AttentionKind(window=150, scale=0.3),
    "window of one block": AttentionKind(window=20),
    "chunk": AttentionKind(window=150, are_chunks=True),
    "chunk that ends within": AttentionKind(window=100, are_chunks=True),
    "capped": AttentionKind(soft_cap=0.8),
    "sinks": AttentionKind(sinks=SINKS.view(2, 3, 1)),
}
POSITION, N_ROWS = 299, 2


@pytest.mark.parametrize(
    ("name", "value_size", "kv_dtype", "dtype"),
    [
        ("plain", 24, KvDType.AUTO, torch.float32),
        ("plain", 0, KvDType.INT8, torch.float32),
        ("window", 24, KvDType.AUTO, torch.bfloat16),
        ("window of one block", 0, KvDType.AUTO, torch.float32),
        ("chunk", 24, KvDType.AUTO, torch.float32),
        ("chunk that ends within", 24, KvDType.INT8, torch.bfloat16),
        ("capped", 24, KvDType.INT8, torch.bfloat16),
        ("sinks", 0, KvDType.AUTO, torch.bfloat16),
        ("sinks", 24, KvDType.INT8, torch.float32),
    ],
)
def test_blocks_are_computed_apart_and_joined_in_order(
    name: str,
    value_size: int,
    kv_dtype: KvDType,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kind, n_kv_heads, size = KINDS[name], 2, 20
    generator = torch.Generator().manual_seed(0)
    n_positions = POSITION + N_ROWS
    queries = torch.randn(N_ROWS, 6, size, generator=generator).to(dtype)
    rows = [
        torch.randn(n_kv_heads, n_positions, width, generator=generator).to(dtype)
        for width in (size, value_size)
    ]
    rows[0] *= torch.linspace(0.5, 2, n_positions)[:, None]  # the largest score moves on
    kv = KvCache(
        1, n_kv_heads, size, dtype, torch.device("cpu"), 2, value_size=value_size, kv_dtype=kv_dtype
    )
    step = plan_step(
        batch_of([Rows(slot=0, position=POSITION, ids=[0] * N_ROWS, n_sampled=0)]), kv, 400, dtype
    )
    for stored, own in zip(kv.layer(SlotId(0), 0), rows, strict=True):
        if own.shape[2]:
            stored[:, :n_positions] = kv.quantize(own)
    keys, values = (
        dequantize_rows(kv.quantize(own), own.shape[2], torch.float32)
        if kv.is_quantized and own.shape[2]
        else own.float()
        for own in rows
    )
    values = values if value_size else keys
    wanted = torch.empty(N_ROWS, 6, value_size or size)
    for row in range(N_ROWS):
        end = POSITION + row + 1
        for head in range(n_kv_heads):
            own = slice(3 * head, 3 * head + 3)
            wanted[row, own] = torch.from_numpy(
                attended(
                    queries[row, own].float().numpy(),
                    keys[head, :end].numpy(),
                    values[head, :end].numpy(),
                    first=_first(kind, end - 1),
                    scale=size**-0.5 if kind.scale is None else kind.scale,
                    soft_cap=kind.soft_cap or 0.0,
                    sinks=SINKS[own].numpy() if kind.sinks is not None else None,
                )
            )
    wanted = wanted.flatten(1).to(dtype)
    for isa in ISAS:
        kernels = find_kernels({ISA_VARIABLE: isa})
        if kernels is None:
            pytest.skip("there is no compiled library")
        monkeypatch.setattr(native_attention, "native_kernels", lambda found=kernels: found)
        assert step.native_spans is not None
        own = native_attend(queries, n_kv_heads, value_size, 0, step.native_spans, kv, kind)
        assert own is not None
        assert torch.equal(own, wanted), isa


def _first(kind: AttentionKind, position: int) -> int:
    """The first position that a row attends to."""
    window = kind.window or position + 1
    return position // window * window if kind.are_chunks else max(0, position + 1 - window)
