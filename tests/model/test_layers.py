from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from shardnet.model.attention import attention, plan_step
from shardnet.model.config import Activation
from shardnet.model.families import parse_config
from shardnet.model.kv_cache import KvCache
from shardnet.model.layers import activate
from shardnet.model.rotary import rotary_tables
from shardnet.types import Epoch, MicroBatch, RowGroup, SequenceId, SlotId, StepId

CPU = torch.device("cpu")
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize("kind", list(Activation), ids=lambda k: k.value)
def test_activations_are_those_of_transformers(kind: Activation) -> None:
    values = torch.linspace(-6, 6, 1001)
    torch.testing.assert_close(activate(kind, values), ACT2FN[kind.value](values))


@pytest.mark.parametrize("head_size", [8, 64, 128])
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 10000.0},
        {"rope_type": "default", "rope_theta": 500000.0},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        {"rope_type": "llama3", "rope_theta": 500000.0, "original_max_position_embeddings": 8192}
        | LLAMA3,
        {"rope_type": "llama3", "rope_theta": 10000.0, "original_max_position_embeddings": 256}
        | LLAMA3,
    ],
    ids=lambda rope: "-".join(str(value) for value in list(rope.values())[:2]),
)
def test_rotary_positions_are_those_of_transformers(rope: dict[str, Any], head_size: int) -> None:
    context = 3000
    theirs = LlamaConfig(
        num_attention_heads=2,
        hidden_size=2 * head_size,
        max_position_embeddings=16384,
        rope_parameters=dict(rope),
    )
    ours = parse_config(theirs.to_dict() | {"architectures": None}, "config.json").rope
    assert ours is not None
    heads = torch.randn(1, 2, context, head_size, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(context)
    cos, sin = LlamaRotaryEmbedding(theirs)(heads, positions[None])
    expected, _ = apply_rotary_pos_emb(heads, heads, cos, sin)
    tables = rotary_tables(ours, head_size, context, torch.float32, CPU).at(positions)
    rotated = tables.rotate(heads[0].transpose(0, 1))  # [T, heads, D]
    torch.testing.assert_close(rotated.transpose(0, 1)[None], expected, rtol=0, atol=1e-5)


def naive_attention(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """One row [H, D] over [P, KV heads, D], in float64, from the definition."""
    spread = query.shape[0] // keys.shape[1]
    keys, values = (t.double().repeat_interleave(spread, dim=1) for t in (keys, values))
    scores = torch.einsum("hd,phd->hp", query.double(), keys) / query.shape[1] ** 0.5
    return torch.einsum("hp,phd->hd", scores.softmax(-1), values)


@given(
    sizes=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 40)), min_size=1, max_size=4),
    n_kv_heads=st.sampled_from([1, 2, 6]),
)
def test_each_row_attends_to_its_own_slot_up_to_itself(
    sizes: list[tuple[int, int]], n_kv_heads: int
) -> None:
    """Groups of one row, few and many, each after some positions that were there before."""
    n_heads, head_size = 6, 4
    generator = torch.Generator().manual_seed(0)

    def draw(rows: int, heads: int) -> Tensor:
        return torch.randn(rows, heads, head_size, generator=generator)

    kv = KvCache(1, n_kv_heads, head_size, torch.float32, CPU, room_blocks=16)
    past = [(draw(position, n_kv_heads), draw(position, n_kv_heads)) for position, _ in sizes]
    n_rows = sum(rows for _, rows in sizes)
    queries, keys, values = (
        draw(n_rows, n_heads),
        draw(n_rows, n_kv_heads),
        draw(n_rows, n_kv_heads),
    )
    batch = MicroBatch(
        epoch=Epoch(1),
        step=StepId(1),
        groups=tuple(
            RowGroup(
                sequence_id=SequenceId(slot),
                slot=SlotId(slot),
                position=position,
                n_rows=rows,
                n_sampled=0,
            )
            for slot, (position, rows) in enumerate(sizes)
        ),
        token_ids=[0] * n_rows,
    )
    step = plan_step(batch, kv, 400, torch.float32)
    for slot, (past_keys, past_values) in enumerate(past):
        cached_keys, cached_values = kv.layer(SlotId(slot), 0)
        cached_keys[:, : len(past_keys)] = past_keys.transpose(0, 1)
        cached_values[:, : len(past_values)] = past_values.transpose(0, 1)
    attended = attention(queries, keys, values, 0, step).view(n_rows, n_heads, head_size)
    start = 0
    for (_, rows), (past_keys, past_values) in zip(sizes, past, strict=True):
        for row in range(start, start + rows):
            seen = slice(start, row + 1)
            expected = naive_attention(
                queries[row],
                torch.cat((past_keys, keys[seen])),
                torch.cat((past_values, values[seen])),
            )
            torch.testing.assert_close(attended[row].double(), expected, rtol=0, atol=1e-5)
        start += rows
