"""Memory of states, as the loader and the planner count it, against what the KV cache holds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.models.checkpoints import make_decoder

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.cluster.planning.model_shape import model_shape
from shardnet.errors import CapacityError
from shardnet.model.cache.kv_cache import KvCache
from shardnet.model.config.model_config import ModelConfig
from shardnet.runtime.loading.loading import MAX_ROOM_POSITIONS, kv_room_blocks
from shardnet.stage.estimate.memory_estimate import (
    WeightForm,
    activation_peak_bytes,
    kv_block_bytes,
    stage_weight_bytes,
    state_bytes,
)
from shardnet.types import (
    PREFILL_CHUNK_ROWS,
    PROMPT_TAIL_ROWS,
    STATE_SLOTS,
    DType,
    LayerRange,
    SlotId,
)

DTYPE = DType.BFLOAT16


@pytest.fixture
def config(tmp_path: Path) -> ModelConfig:
    """Three layers with a state, then one with attention."""
    return Checkpoint.open(make_decoder(tmp_path, "qwen3_next", with_tokenizer=False)).config


def test_it_is_what_the_slots_hold(config: ModelConfig) -> None:
    layers = LayerRange(1, 4)
    kv = KvCache(
        3,
        config.n_kv_heads,
        config.head_size,
        torch.bfloat16,
        torch.device("cpu"),
        2 * STATE_SLOTS,
        states=[config.state(layer) for layer in layers],
    )
    for slot in range(STATE_SLOTS):
        kv.ensure(SlotId(slot), 290, 290)
        kv.assume_end(SlotId(slot), 290)
        kv.ensure(SlotId(slot), 300, 10)  # notes the state before its rows
        kv.assume_end(SlotId(slot), 300)
        kv.ensure(SlotId(slot), 320, PROMPT_TAIL_ROWS)  # and another
    states = [kv.state(SlotId(slot), layer) for slot in range(STATE_SLOTS) for layer in (0, 1)]
    noted = [earlier for state in states for earlier in state.noted]
    held = sum(state.recent.nbytes + state.recurrent.nbytes for state in (*states, *noted))
    assert state_bytes(config, layers, DTYPE) == held
    assert kv_block_bytes(config, layers, DTYPE) == kv.block_bytes
    keys, values = kv.layer(SlotId(0), 2)
    assert keys.nbytes + values.nbytes == 2 * kv.block_bytes


@pytest.mark.parametrize("layers", [LayerRange(0, 4), LayerRange(1, 3)], ids=str)
def test_a_stage_needs_room_for_all_states(config: ModelConfig, layers: LayerRange) -> None:
    """Weights, a step, the states of all slots, and the blocks of one sequence: not a byte less."""
    form = WeightForm(dtype=DTYPE)
    needed = (
        stage_weight_bytes(config, layers, form)
        + activation_peak_bytes(config, layers, PREFILL_CHUNK_ROWS, DTYPE, 512)
        + state_bytes(config, layers, DTYPE)
        + 2 * kv_block_bytes(config, layers, DTYPE)
    )
    has_attention = layers.end == 4
    assert (kv_room_blocks(config, layers, form, 512, needed) == 2) is has_attention
    with pytest.raises(CapacityError, match="for a context of 512"):
        kv_room_blocks(config, layers, form, 512, needed - 1)
    held_bytes = 2 * kv_block_bytes(config, layers, DTYPE)
    assert kv_room_blocks(config, layers, form, 512, needed, held_bytes=held_bytes)
    with pytest.raises(CapacityError, match=f"beside {held_bytes + 1} of the stage"):
        kv_room_blocks(config, layers, form, 512, needed, held_bytes=held_bytes + 1)
    assert kv_room_blocks(config, layers, form, 512, 1 << 50) == MAX_ROOM_POSITIONS // 256


def test_the_planner_counts_no_layer_as_less_than_it_takes(config: ModelConfig) -> None:
    for context in (256, 512):
        shape = model_shape(config, DTYPE, context)
        for layer in range(4):
            one = LayerRange(layer, layer + 1)
            blocks = context // 256 * kv_block_bytes(config, one, DTYPE)
            assert shape.kv_layer_bytes >= blocks + state_bytes(config, one, DTYPE)
